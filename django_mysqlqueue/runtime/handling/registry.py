"""Handlers: what ``@subscriber`` declares, and what their groups' settings make of it."""

from __future__ import annotations

import inspect
import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

from asgiref.sync import async_to_sync
from django.db import router
from django.utils.module_loading import autodiscover_modules

from django_mysqlqueue import naming
from django_mysqlqueue.backoff import Backoff
from django_mysqlqueue.conf import check_handler_option, get_settings
from django_mysqlqueue.exceptions import SubscriberError
from django_mysqlqueue.models import ConsumerGroup
from django_mysqlqueue.runtime.handling.handler import Handler, HandlerFunction, mode_text
from django_mysqlqueue.runtime.handling.timeouts import limited
from django_mysqlqueue.service import groups, known_topics
from django_mysqlqueue.service.refs import GroupRef

if TYPE_CHECKING:
    from django_mysqlqueue.runtime.handling.delivery import Delivery

logger = logging.getLogger("django_mysqlqueue.subscriber")

One = TypeVar("One", bound="Callable[[Delivery], Any]")
Many = TypeVar("Many", bound="Callable[[list[Delivery]], Any]")
Exceptions = type[Exception] | Sequence[type[Exception]]


class _Unset:
    def __repr__(self) -> str:
        return "<the setting's>"


UNSET: Any = _Unset()

DEFAULT_BATCH_SIZE = 100
"""Deliveries that one call of a ``batch=True`` handler gets at most."""


@dataclass(frozen=True, slots=True)
class Declared:
    """A handler as it was decorated: only the options that were given."""

    ref: GroupRef
    function: HandlerFunction
    batch: bool
    options: dict[str, Any]

    @property
    def where(self) -> str:
        return _name(self.function)

    @property
    def place(self) -> tuple[str, object, object]:
        """Where in the source it stands; two functions of one name are still two."""
        code = getattr(self.function, "__code__", None)
        if code is None:
            return self.where, id(self.function), None
        return self.where, code.co_filename, code.co_firstlineno


def _name(function: HandlerFunction) -> str:
    """Where it can be found, without memory addresses: it is shown to people."""
    if isinstance(function, partial):
        return f"partial({_name(function.func)})"
    if hasattr(function, "__qualname__"):
        return f"{function.__module__}.{function.__qualname__}"
    return f"{type(function).__module__}.{type(function).__qualname__}()"


_declared: list[Declared] = []


@overload
def subscriber(
    topic: str,
    *,
    group: str,
    mode: Literal["ordered", "shared"] = ...,
    atomic: bool = ...,
    start: Literal["earliest", "latest"] = ...,
    on_failure: Literal["skip", "block"] = ...,
    max_attempts: int | None = ...,
    visibility_timeout: float = ...,
    max_processing_time: float = ...,
    timeout: float | None = ...,
    backoff: Backoff | Mapping[str, float] = ...,
    reject_on: Exceptions = ...,
    retry_on: Exceptions = ...,
    batch: Literal[False] = ...,
) -> Callable[[One], One]: ...


@overload
def subscriber(
    topic: str,
    *,
    group: str,
    mode: Literal["ordered", "shared"] = ...,
    atomic: bool = ...,
    start: Literal["earliest", "latest"] = ...,
    on_failure: Literal["skip", "block"] = ...,
    max_attempts: int | None = ...,
    visibility_timeout: float = ...,
    max_processing_time: float = ...,
    timeout: float | None = ...,
    backoff: Backoff | Mapping[str, float] = ...,
    reject_on: Exceptions = ...,
    retry_on: Exceptions = ...,
    batch: Literal[True],
    batch_size: int = ...,
) -> Callable[[Many], Many]: ...


def subscriber(
    topic: str,
    *,
    group: str,
    mode: Literal["ordered", "shared"] = "ordered",
    atomic: bool = False,
    start: Literal["earliest", "latest"] = "earliest",
    on_failure: Literal["skip", "block"] = "skip",
    max_attempts: int | None = UNSET,
    visibility_timeout: float = UNSET,
    max_processing_time: float = UNSET,
    timeout: float | None = UNSET,
    backoff: Backoff | Mapping[str, float] = UNSET,
    reject_on: Exceptions = UNSET,
    retry_on: Exceptions = UNSET,
    batch: bool = False,
    batch_size: int = UNSET,
) -> Callable[[Any], Any]:
    """Declares a function as the handler of a topic for a consumer group.

    The function takes one argument, a ``Delivery``, or with ``batch=True`` a
    list of them. Returning acks what was handed over, raising nacks it, unless
    it said otherwise through a delivery's methods. What is not given here comes
    from ``MYSQLQUEUE``; ``MYSQLQUEUE["GROUPS"]`` overrides both.

    Args:
        topic: the topic; one ending in the DLQ suffix handles dead letters.
        group: the consumer group. A required name of its own: one taken from the
            function would replay everything when the function is renamed.
        mode: ``"ordered"`` handles a partition's messages one after another, in
            order, on one subscriber at a time; ``"shared"`` hands each message to any.
        atomic: run the handler in a transaction that also writes the ack.
        start: where a new group begins: ``"earliest"`` or ``"latest"``.
        on_failure: in ordered mode, whether later messages of a partition pass a
            failed one (``"skip"``) or wait until it is settled (``"block"``).
        max_attempts: failed attempts until a message goes to the DLQ; None: no limit.
        visibility_timeout: shared mode: seconds until a vanished subscriber's
            deliveries are handed out again.
        max_processing_time: seconds after which a handler counts as hung and its
            process shuts down.
        timeout: async handlers: seconds after which a call is cancelled and has
            failed with TimeoutError; below ``max_processing_time``. None: no such
            limit. A sync handler runs in a thread, which cannot be ended.
        backoff: a ``Backoff`` or a dict of its fields.
        reject_on: exception classes, or one. A message whose handler raises one of
            them is dead-lettered at once, with the traceback as the reason.
        retry_on: exception classes, or one: only these are retried; any other
            exception dead-letters the message at once. ``reject_on`` is checked
            first. Database errors that say nothing about the message (a lost
            connection, a deadlock) are always retried.
        batch: call the function with a list of deliveries, of one or more
            partitions, in offset order within each; with ``atomic`` they share a
            transaction. What a method says of a delivery counts for that one; a
            raise nacks all. A message that failed before, or whose holder
            vanished, comes alone, so that it costs its neighbours one attempt at most.
        batch_size: how many deliveries such a list has at most (default 100). It
            is handed over as soon as there is one; nothing waits for it to fill.

    Raises:
        SubscriberError: names the function and the rule that it breaks.
    """
    if callable(topic):
        raise SubscriberError(f"@subscriber on {_name(topic)} lacks its arguments: @subscriber(topic, group=…)")
    given = {
        "mode": mode,
        "atomic": atomic,
        "start": start,
        "on_failure": on_failure,
        "max_attempts": max_attempts,
        "visibility_timeout": visibility_timeout,
        "max_processing_time": max_processing_time,
        "timeout": timeout,
        "backoff": backoff,
        "batch_size": batch_size,
        "reject_on": reject_on,
        "retry_on": retry_on,
    }

    def declare(function: HandlerFunction) -> HandlerFunction:
        name = _name(function) if callable(function) else repr(function)
        where = f"@subscriber({topic!r}, group={group!r}) on {name}"
        if batch_size is not UNSET and not batch:
            raise SubscriberError(f"{where}: batch_size={batch_size!r} without batch=True, which it belongs to")
        try:
            options = {name: check_handler_option(name, value) for name, value in given.items() if value is not UNSET}
            ref = GroupRef(naming.check_name("group", group), naming.check_subscribed_topic(topic))
        except ValueError as error:
            raise SubscriberError(f"{where}: {error}") from error
        _check_function(where, function, options)
        _check_options(where, options)
        _remember(Declared(ref, function, batch, options))
        return function

    return declare


def _check_function(where: str, function: HandlerFunction, options: dict[str, Any]) -> None:
    if not callable(function):
        raise SubscriberError(f"{where}: is not callable")
    if inspect.isclass(function):
        raise SubscriberError(
            f"{where}: is a class, which would only be instantiated; decorate a function, or an instance with __call__"
        )
    _check_signature(where, function)
    call = _called(function)
    if inspect.isgeneratorfunction(call) or inspect.isasyncgenfunction(call):
        raise SubscriberError(f"{where}: is a generator function, whose body would never run")
    is_async = inspect.iscoroutinefunction(call)
    if options["atomic"] and is_async:
        raise SubscriberError(f"{where}: an async handler cannot be atomic: Django's transactions are synchronous")
    timeout = options.get("timeout")
    if timeout is not None and not is_async:
        raise SubscriberError(
            f"{where}: timeout={timeout:g} is for async handlers: a sync handler runs in a thread, which cannot be "
            "ended. Declare it with async def, set a time limit on what it calls (timeout= of an HTTP client, "
            "read_timeout of a database), or set max_processing_time, after which its whole process leaves"
        )


def _check_options(where: str, options: dict[str, Any]) -> None:
    if options["mode"] == "shared" and options["on_failure"] == "block":
        raise SubscriberError(
            f"{where}: on_failure='block' keeps the order of a partition, and mode='shared' has none; "
            "use mode='ordered'"
        )
    timeout, longest = options.get("timeout"), options.get("max_processing_time")
    if timeout is not None and longest is not None and timeout >= longest:
        raise SubscriberError(
            f"{where}: timeout={timeout:g} must be below max_processing_time={longest:g}, after which its whole "
            "process leaves"
        )


def _check_signature(where: str, function: HandlerFunction) -> None:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return  # a built-in does not tell
    try:
        signature.bind(object())
    except TypeError as error:
        raise SubscriberError(f"{where}: takes {signature}, but is called with the delivery alone: {error}") from None


def _called(function: HandlerFunction) -> Any:
    """The function whose body runs in the end: of a partial, of an object with ``__call__``."""
    while isinstance(function, partial):
        function = function.func
    return function if inspect.isroutine(function) else type(function).__call__


def _remember(declared: Declared) -> None:
    # A module that is imported again (under a test, say) replaces its own handlers.
    same = [known for known in _declared if known.ref == declared.ref and known.place == declared.place]
    for known in same:
        _declared.remove(known)
    _declared.append(declared)
    known_topics.declare(declared.ref.topic)


_discovery = threading.local()


def discover() -> None:
    """Imports ``subscribers.py`` of every installed app, as the admin does with ``admin.py``.

    Within one of these imports it does nothing: a module that publishes while it is imported
    must not have the others imported from its middle. There is no lock: Python has one for each
    module, and sees when two threads would wait for each other.
    """
    if getattr(_discovery, "is_running", False):
        return
    _discovery.is_running = True
    try:
        autodiscover_modules("subscribers")
    finally:
        _discovery.is_running = False


def handlers() -> dict[GroupRef, Handler]:
    """Every declared handler, resolved.

    Raises:
        SubscriberError: two functions are declared for one group and topic.
    """
    discover()
    found: dict[GroupRef, Handler] = {}
    for declared in _declared:
        if declared.ref in found:
            raise SubscriberError(
                f"Two handlers for the group {declared.ref.group!r} of {declared.ref.topic!r}: "
                f"{found[declared.ref].where} and {declared.where}."
            )
        found[declared.ref] = _resolve(declared)
    return found


def _resolve(declared: Declared) -> Handler:
    settings = get_settings()
    options: dict[str, Any] = {
        "max_attempts": settings.max_attempts,
        "visibility_timeout": settings.visibility_timeout,
        "max_processing_time": settings.max_processing_time,
        "backoff": settings.backoff,
        **declared.options,
        **settings.groups.get(declared.ref.group, {}),
    }
    options["batch_size"] = options.get("batch_size", DEFAULT_BATCH_SIZE) if declared.batch else 1
    _check_function(declared.where, declared.function, options)
    _check_options(declared.where, options)
    function = declared.function
    is_async = inspect.iscoroutinefunction(_called(function))
    if is_async:
        if options.get("timeout") is not None:
            function = limited(function, options["timeout"], declared.where)
        function = async_to_sync(function)  # on the process's loop where there is one: see executor.Loop
    return Handler(
        ref=declared.ref,
        function=function,
        where=declared.where,
        batch=declared.batch,
        is_async=is_async,
        **options,
    )


def register_groups(using: str, only: Iterable[GroupRef] | None = None) -> None:
    """Registers the handlers' groups on ``using`` if the queue lives there.

    A mode that differs from the registered one is only logged here, so that
    ``migrate`` does not fail; the subscriber refuses to start.
    """
    if using != (get_settings().database or router.db_for_write(ConsumerGroup)):
        return
    known = handlers()
    for ref in only if only is not None else known:
        handler = known[ref]
        registered = groups.register(using, ref, mode=handler.mode, start=handler.start)
        if registered.mode != handler.mode:
            logger.warning(mode_text(handler, registered.mode))

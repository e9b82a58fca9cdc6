"""The registry of handlers: ``@subscriber`` declares them, and the settings of their groups complete their options."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

from django.conf import settings as django_settings
from django.utils.module_loading import autodiscover_modules

from django_mysqlqueue import job_queues, naming
from django_mysqlqueue.backoff import Backoff
from django_mysqlqueue.conf import check_handler_option, get_settings
from django_mysqlqueue.delivery_limits import Rate
from django_mysqlqueue.exceptions import SubscriberError
from django_mysqlqueue.service import known_topics
from django_mysqlqueue.service.databases import queue_aliases, works_on
from django_mysqlqueue.service.refs import GroupRef
from django_mysqlqueue.subscriptions.handler import Handler, HandlerFunction
from django_mysqlqueue.subscriptions.options import SYNC_TIMEOUT, BrokenRule, broken_by, broken_rules

if TYPE_CHECKING:
    from django_mysqlqueue.subscriptions.delivery import Delivery


One = TypeVar("One", bound="Callable[[Delivery], Any]")
Many = TypeVar("Many", bound="Callable[[list[Delivery]], Any]")
Exceptions = type[Exception] | Sequence[type[Exception]]
RatePerKey = str | Rate | Mapping[str, str | Rate | None] | None


class _Unset:
    def __repr__(self) -> str:
        return "<from MYSQLQUEUE>"


UNSET: Any = _Unset()

DEFAULT_BATCH_SIZE = 100
"""Maximum number of deliveries per call of a ``batch=True`` handler."""


@dataclass(frozen=True, slots=True)
class Declared:
    """A handler as it was declared, with only the options that were given."""

    ref: GroupRef
    function: HandlerFunction
    batch: bool
    options: dict[str, Any]

    @property
    def where(self) -> str:
        """The function's dotted name, for messages."""
        return _name(self.function)

    @property
    def place(self) -> tuple[str, object, object]:
        """The function's place in the source, which differs between two functions of the same name."""
        code = getattr(self.function, "__code__", None)
        if code is None:
            return self.where, id(self.function), None
        return self.where, code.co_filename, code.co_firstlineno


def _name(function: HandlerFunction) -> str:
    """Return the dotted name of a function, without memory addresses, for messages."""
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
    on_expiry: Literal["skip", "dead_letter"] = ...,
    max_attempts: int | None = ...,
    visibility_timeout: float = ...,
    max_processing_time: float = ...,
    timeout: float | None = ...,
    backoff: Backoff | Mapping[str, float] = ...,
    claim_size: int = ...,
    prefetch: int = ...,
    priority_share: int = ...,
    poll_interval: float = ...,
    max_poll_interval: float = ...,
    rate: str | Rate | None = ...,
    rate_per_key: RatePerKey = ...,
    burst: int | None = ...,
    max_in_flight: int | None = ...,
    max_in_flight_per_key: int | None = ...,
    limit_by: str | None = ...,
    filter: Mapping[str, Any] | None = ...,
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
    on_expiry: Literal["skip", "dead_letter"] = ...,
    max_attempts: int | None = ...,
    visibility_timeout: float = ...,
    max_processing_time: float = ...,
    timeout: float | None = ...,
    backoff: Backoff | Mapping[str, float] = ...,
    claim_size: int = ...,
    prefetch: int = ...,
    priority_share: int = ...,
    poll_interval: float = ...,
    max_poll_interval: float = ...,
    rate: str | Rate | None = ...,
    rate_per_key: RatePerKey = ...,
    burst: int | None = ...,
    max_in_flight: int | None = ...,
    max_in_flight_per_key: int | None = ...,
    limit_by: str | None = ...,
    filter: Mapping[str, Any] | None = ...,
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
    on_expiry: Literal["skip", "dead_letter"] = "skip",
    max_attempts: int | None = UNSET,
    visibility_timeout: float = UNSET,
    max_processing_time: float = UNSET,
    timeout: float | None = UNSET,
    backoff: Backoff | Mapping[str, float] = UNSET,
    claim_size: int = UNSET,
    prefetch: int = UNSET,
    priority_share: int = UNSET,
    poll_interval: float = UNSET,
    max_poll_interval: float = UNSET,
    rate: str | Rate | None = UNSET,
    rate_per_key: RatePerKey = UNSET,
    burst: int | None = UNSET,
    max_in_flight: int | None = UNSET,
    max_in_flight_per_key: int | None = UNSET,
    limit_by: str | None = UNSET,
    filter: Mapping[str, Any] | None = UNSET,
    reject_on: Exceptions = UNSET,
    retry_on: Exceptions = UNSET,
    batch: bool = False,
    batch_size: int = UNSET,
) -> Callable[[Any], Any]:
    """Declare a function as the handler of a topic for a consumer group.

    The function takes one argument, a ``Delivery``, or with ``batch=True`` a list of them. When it returns, its
    deliveries are acked; when it raises an exception, they are nacked; the methods of a delivery settle it in another
    way. Options that you do not pass come from ``MYSQLQUEUE``. ``MYSQLQUEUE["GROUPS"]`` overrides the decorator and the
    settings.

    Args:
        topic: the topic. To handle dead letters, pass a DLQ topic.
        group: the name of the consumer group. It is required: if it came from the function's name, renaming the
            function would create a new group and replay all messages.
        mode: ``"ordered"``: one subscriber at a time handles a partition's messages one by one, in order.
            ``"shared"``: messages go to any free handler thread, in any order.
        atomic: if True, the handler runs in a transaction that also writes the ack.
        start: where a new group starts: ``"earliest"`` or ``"latest"``.
        on_failure: in ordered mode, whether later messages of a partition overtake a failed one (``"skip"``) or wait
            until it is settled (``"block"``).
        on_expiry: whether a message that expires before its handling starts is only settled (``"skip"``) or
            dead-lettered (``"dead_letter"``).
        max_attempts: number of failed attempts after which a message is dead-lettered; None for no limit.
        visibility_timeout: in shared mode, seconds until the messages of a lost subscriber are redelivered.
        max_processing_time: seconds after which a handler counts as hung. Its process then exits.
        timeout: for async handlers, seconds after which a call is cancelled and fails with TimeoutError; less than
            ``max_processing_time``; None for no limit. There is no such limit for a sync handler: it runs in a thread,
            which cannot be stopped.
        backoff: a ``Backoff``, or a dict of its fields.
        claim_size: maximum number of messages that a claim takes.
        prefetch: number of deliveries that may wait in a process until a handler thread is free. By default, the
            groups of a process share ``PREFETCH``.
        priority_share: while messages with several priorities wait, one of every ``priority_share`` claims, and one of
            every ``priority_share`` starts, is for a lower priority than the highest; 0: none is.
        poll_interval: seconds between two polls while messages are available. A process polls as often as the group
            that polls most often requires.
        max_poll_interval: longest time in seconds between two polls.
        rate: how many of the group's messages start, in all its subscribers together, for example ``"100/s"``; units
            are ``s``, ``m``, ``h`` and ``d``. Retries count, too. Like the other limits below, it applies as
            ``manage.py migrate`` has registered it, or as ``queueset`` has overridden it; None: no limit.
        rate_per_key: the same for the messages with each key. If keys have different rates, a dict of rates by key, in
            which ``"*"`` stands for all others, for example ``{"acme": "50/s", "*": "5/s"}``; None: no limit.
        burst: how many more messages than the rate may start within its period. By default as many as the rate can be
            kept with: a fifth of a second's, and at least 1.
        max_in_flight: maximum number of the group's messages that its subscribers have claimed and not finished.
        max_in_flight_per_key: the same for the messages with each key.
        limit_by: name of the field of the metadata by which the limits per key count (default: the message's key).
            They do not apply to messages without it.
        filter: which messages the group gets, by their metadata, as a dict in the syntax of Amazon SNS subscription
            filter policies; see the reference of filters. Other messages are passed without a call. Like the limits, it
            applies as ``migrate`` has registered it, or as ``queueset`` has overridden it; None: all messages.
        reject_on: an exception class, or a sequence of classes. If the handler raises one of them, the message is
            dead-lettered at once, with the traceback as the reason.
        retry_on: an exception class, or a sequence of classes. Only these are retried: any other exception dead-letters
            the message at once. ``reject_on`` is checked first. Database errors that have nothing to do with the
            message (a lost connection, a deadlock) are always retried.
        batch: if True, the function gets a list of deliveries from one or more partitions, in offset order within each
            partition. With ``atomic`` they share a transaction. A delivery's methods settle only that delivery; an
            exception nacks all. A message that failed before, or whose subscriber was lost, is delivered alone, so that
            it makes the other messages of its batch fail at most once.
        batch_size: maximum number of deliveries in the list (default 100). The function is called as soon as there is
            at least one message, without waiting for a full list.

    Raises:
        SubscriberError: the declaration breaks a rule. The error names the function and the rule.
    """
    if callable(topic):
        raise SubscriberError(f"@subscriber on {_name(topic)} needs arguments: @subscriber(topic, group=…)")
    given = {
        "mode": mode,
        "atomic": atomic,
        "start": start,
        "on_failure": on_failure,
        "on_expiry": on_expiry,
        "max_attempts": max_attempts,
        "visibility_timeout": visibility_timeout,
        "max_processing_time": max_processing_time,
        "timeout": timeout,
        "backoff": backoff,
        "batch_size": batch_size,
        "claim_size": claim_size,
        "prefetch": prefetch,
        "priority_share": priority_share,
        "poll_interval": poll_interval,
        "max_poll_interval": max_poll_interval,
        "rate": rate,
        "rate_per_key": rate_per_key,
        "burst": burst,
        "max_in_flight": max_in_flight,
        "max_in_flight_per_key": max_in_flight_per_key,
        "limit_by": limit_by,
        "filter": filter,
        "reject_on": reject_on,
        "retry_on": retry_on,
    }

    def declare(function: HandlerFunction) -> HandlerFunction:
        name = _name(function) if callable(function) else repr(function)
        where = f"@subscriber({topic!r}, group={group!r}) on {name}"
        if batch_size is not UNSET and not batch:
            raise SubscriberError(f"{where}: batch_size={batch_size!r} requires batch=True")
        try:
            options = {name: check_handler_option(name, value) for name, value in given.items() if value is not UNSET}
            ref = GroupRef(naming.check_name("group", group), naming.check_subscribed_topic(topic))
        except ValueError as error:
            raise SubscriberError(f"{where}: {error}") from error
        _check_function(where, function, options)
        _check_rules(where, broken_rules(options))
        _remember(Declared(ref, function, batch, options))
        return function

    return declare


def _check_function(where: str, function: HandlerFunction, options: dict[str, Any]) -> None:
    if not callable(function):
        raise SubscriberError(f"{where}: it is not callable")
    if inspect.isclass(function):
        raise SubscriberError(
            f"{where}: it is a class, which a call would only instantiate. Decorate a function or a callable instance"
        )
    _check_signature(where, function)
    call = _called(function)
    if inspect.isgeneratorfunction(call) or inspect.isasyncgenfunction(call):
        raise SubscriberError(f"{where}: it is a generator function, whose body would never run")
    is_async = inspect.iscoroutinefunction(call)
    if options["atomic"] and is_async:
        raise SubscriberError(f"{where}: an async handler cannot be atomic: Django's transactions are synchronous")
    timeout = options.get("timeout")
    if timeout is not None and not is_async:
        raise SubscriberError(f"{where}: timeout={timeout:g} {SYNC_TIMEOUT}")


def _check_rules(where: str, broken: Iterable[BrokenRule]) -> None:
    for rule in broken:
        raise SubscriberError(f"{where}: {rule.text}")


def _check_signature(where: str, function: HandlerFunction) -> None:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return  # A built-in function has no signature.
    try:
        signature.bind(object())
    except TypeError as error:
        raise SubscriberError(f"{where}: it takes {signature}, but is called with one argument: {error}") from None


def _called(function: HandlerFunction) -> Any:
    """Return the function whose body a call runs, for a partial or a callable object."""
    while isinstance(function, partial):
        function = function.func
    return function if inspect.isroutine(function) else type(function).__call__


def _remember(declared: Declared) -> None:
    # A module that is imported again (for example by a test) replaces its own handlers.
    same = [known for known in _declared if known.ref == declared.ref and known.place == declared.place]
    for known in same:
        _declared.remove(known)
    _declared.append(declared)
    known_topics.declare(declared.ref.topic)


sources: list[Callable[[], Mapping[GroupRef, Handler]]] = []
"""Functions that return further handlers, set by the app."""
_discovery = threading.local()


def discover() -> None:
    """Import ``subscribers.py`` of every installed app, as the admin does with ``admin.py``.

    If ``TASKS`` has queues of jobs, ``tasks.py`` too, which may declare recurring schedules.

    During one of these imports it does nothing: a module that publishes while it is imported must not start the import
    of the others. It uses no lock: Python has one for each module, and detects when two threads would wait for each
    other.
    """
    if getattr(_discovery, "is_running", False):
        return
    _discovery.is_running = True
    try:
        autodiscover_modules("subscribers")
        if job_queues.find is not None and job_queues.find():
            autodiscover_modules("tasks")
        for source in sources:
            for ref in source():
                known_topics.declare(ref.topic)
    finally:
        _discovery.is_running = False


def handlers() -> dict[GroupRef, Handler]:
    """Return all declared handlers, with resolved options.

    Raises:
        SubscriberError: two functions are declared for one group and topic.
    """
    discover()
    found: dict[GroupRef, Handler] = {}
    for declared in _declared:
        if declared.ref in found:
            raise SubscriberError(
                f"Two handlers are declared for the group {declared.ref.group!r} on {declared.ref.topic!r}: "
                f"{found[declared.ref].where} and {declared.where}."
            )
        found[declared.ref] = _resolve(declared)
    for source in sources:
        for ref, handler in source().items():
            if ref in found:
                raise SubscriberError(
                    f"Two handlers are declared for the group {ref.group!r} on {ref.topic!r}: {found[ref].where} and "
                    f"{handler.where}."
                )
            found[ref] = handler
    return found


def handlers_in(using: str, chosen: Mapping[GroupRef, Handler]) -> dict[GroupRef, Handler]:
    """Return the handlers that run in a database: those whose topics it has, or that have not left it yet.

    A database that the settings do not name runs all handlers: messages may be published to it with ``using``.

    Args:
        using: alias of the database.
        chosen: the handlers, by group and topic.
    """
    is_known = using in queue_aliases()
    return {ref: handler for ref, handler in chosen.items() if not is_known or using in works_on(ref.topic)}


def subscriptions() -> dict[GroupRef, Handler]:
    """Return all handlers, and the groups of ``SQL_TOPICS`` without one: these have options, but no function to call.

    Raises:
        SubscriberError: two functions are declared for one group and topic, or options do not fit together.
    """
    found = handlers()
    for group, topics in get_settings().sql_topics.items():
        where = f"MYSQLQUEUE['GROUPS'][{group!r}]"
        for topic in topics:
            ref = GroupRef(group, topic)
            if ref not in found:
                found[ref] = _resolve(
                    Declared(ref, _consumed_in_sql, batch=False, options=dict(_WITHOUT_DECORATOR)), where
                )
    return found


_WITHOUT_DECORATOR = {
    "mode": "ordered",
    "atomic": False,
    "start": "earliest",
    "on_failure": "skip",
}
"""The defaults of ``subscriber``."""


def _consumed_in_sql(delivery: Delivery) -> None:
    raise SubscriberError(f"The group {delivery.group!r} is for clients in plain SQL.")


def option_source(ref: GroupRef, name: str) -> str:
    """Return where an option of a subscription comes from: ``GROUPS``, ``@subscriber``, ``MYSQLQUEUE`` or ``default``.

    Args:
        ref: the group and its topic, one of ``subscriptions``.
        name: name of the option.
    """
    declared = next((one for one in _declared if one.ref == ref), None)
    if name in get_settings().groups.get(ref.group, {}):
        return "GROUPS"
    if declared is not None and name in declared.options:
        return "@subscriber"
    return "MYSQLQUEUE" if name.upper() in getattr(django_settings, "MYSQLQUEUE", {}) else "default"


def _resolve(declared: Declared, where: str = "") -> Handler:
    """Return a handler with all options.

    Args:
        declared: the handler as it was declared.
        where: its place, for errors (default: the function's dotted name).
    """
    where = where or declared.where
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
    _check_function(where, declared.function, options)
    handler = Handler(
        ref=declared.ref,
        function=declared.function,
        where=where,
        batch=declared.batch,
        is_async=inspect.iscoroutinefunction(_called(declared.function)),
        **options,
    )
    _check_rules(where, broken_by(handler))
    return handler

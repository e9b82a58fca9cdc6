"""The registry of handlers: ``@subscriber`` declares them, and the settings of their groups complete their options."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar, Unpack, overload

from django.conf import settings as django_settings
from django.utils.module_loading import autodiscover_modules

from django_mysqlqueue.exceptions import SubscriberError
from django_mysqlqueue.names.rules import check_name
from django_mysqlqueue.options import job_queues
from django_mysqlqueue.options.conf import get_settings
from django_mysqlqueue.options.table import IN_CODE, OPTIONS, BatchOptions, SubscriberOptions, check_option
from django_mysqlqueue.options.topics import check_subscribed_topic
from django_mysqlqueue.service import known_topics
from django_mysqlqueue.service.databases import queue_aliases, works_on
from django_mysqlqueue.service.refs import GroupRef
from django_mysqlqueue.subscriptions.handler import Handler, HandlerFunction
from django_mysqlqueue.subscriptions.options import (
    SYNC_CONCURRENCY,
    SYNC_TIMEOUT,
    BrokenRule,
    broken_by,
    broken_rules,
    defaults,
)
from django_mysqlqueue.text.humanize import close_names, did_you_mean

if TYPE_CHECKING:
    from django_mysqlqueue.subscriptions.delivery import Delivery


One = TypeVar("One", bound="Callable[[Delivery], Any]")
Many = TypeVar("Many", bound="Callable[[list[Delivery]], Any]")


class Declared(NamedTuple):
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
    topic: str, *, group: str, batch: Literal[False] = ..., **options: Unpack[SubscriberOptions]
) -> Callable[[One], One]: ...


@overload
def subscriber(
    topic: str, *, group: str, batch: Literal[True], **options: Unpack[BatchOptions]
) -> Callable[[Many], Many]: ...


def subscriber(topic: str, *, group: str, batch: bool = False, **options: Unpack[BatchOptions]) -> Callable[[Any], Any]:
    """Declare a function as the handler of a topic for a consumer group.

    The function takes one argument, a ``Delivery``, or with ``batch=True`` a list of them. When it returns, its
    deliveries are acked; when it raises an exception, they are nacked; the methods of a delivery settle it in another
    way. Options that you do not pass come from ``MYSQLQUEUE``. ``MYSQLQUEUE["GROUPS"]`` overrides the decorator and the
    settings.

    Args:
        topic: the topic. To handle dead letters, pass a DLQ topic.
        group: the name of the consumer group. It is required: if it came from the function's name, renaming the
            function would create a new group and replay all messages.
        batch: if True, the function gets a list of deliveries from one or more partitions, in offset order within each
            partition. With ``atomic`` they share a transaction. A delivery's methods settle only that delivery; an
            exception nacks all. A message that failed before, or whose subscriber was lost, is delivered alone, so that
            it makes the other messages of its batch fail at most once.
        options: the options of the group; see the table of options below.

    Raises:
        SubscriberError: the declaration breaks a rule. The error names the function and the rule.
    """
    if callable(topic):
        raise SubscriberError(f"@subscriber on {_name(topic)} needs arguments: @subscriber(topic, group=…)")
    without_settings = {name: option.default for name, option in OPTIONS.items()}
    if unknown := [name for name in options if name not in IN_CODE]:
        hint = did_you_mean(close_names(unknown[0], IN_CODE, most=1))
        raise TypeError(f"subscriber() got an unexpected keyword argument {unknown[0]!r}. {hint}".rstrip())

    def declare(function: HandlerFunction) -> HandlerFunction:
        name = _name(function) if callable(function) else repr(function)
        where = f"@subscriber({topic!r}, group={group!r}) on {name}"
        if "batch_size" in options and not batch:
            raise SubscriberError(f"{where}: batch_size={options['batch_size']!r} requires batch=True")
        try:
            given = {name: check_option(name, value) for name, value in options.items()}
            ref = GroupRef(check_name("group", group), check_subscribed_topic(topic))
        except ValueError as error:
            raise SubscriberError(f"{where}: {error}") from error
        _check_function(where, function, without_settings | given)
        _check_rules(where, broken_rules(without_settings | given))
        _remember(Declared(ref, function, batch, given))
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
    if (concurrency := options.get("concurrency")) is not None and not is_async:
        raise SubscriberError(f"{where}: concurrency={concurrency} {SYNC_CONCURRENCY}")
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
                found[ref] = _resolve(Declared(ref, _consumed_in_sql, batch=False, options={}), where)
    return found


def _consumed_in_sql(delivery: Delivery) -> None:
    raise SubscriberError(f"The group {delivery.group!r} is for clients in plain SQL.")


def option_source(ref: GroupRef, name: str) -> str:
    """Return where an option of a subscription comes from: ``GROUPS``, ``@subscriber``, ``MYSQLQUEUE`` or ``default``.

    ``ref``: the group and its topic, one of ``subscriptions``.
    """
    declared = next((one for one in _declared if one.ref == ref), None)
    if name in get_settings().groups.get(ref.group, {}):
        return "GROUPS"
    if declared is not None and name in declared.options:
        return "@subscriber"
    return "MYSQLQUEUE" if name.upper() in getattr(django_settings, "MYSQLQUEUE", {}) else "default"


def _resolve(declared: Declared, where: str = "") -> Handler:
    """Return a handler with all options.

    ``where``: its place, for errors (default: the function's dotted name).
    """
    where = where or declared.where
    settings = get_settings()
    options = {**defaults(settings), **declared.options, **settings.groups.get(declared.ref.group, {})}
    if not declared.batch:
        options["batch_size"] = 1
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

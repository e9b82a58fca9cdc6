"""Register groups and schedules: when a subscriber starts, and groups after ``migrate`` as well."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial

from django_mysqlqueue.exceptions import InvalidMessage, SubscriberError
from django_mysqlqueue.runtime.log import event
from django_mysqlqueue.runtime.threads import about
from django_mysqlqueue.schedules import registry
from django_mysqlqueue.schedules.definitions import Definition
from django_mysqlqueue.service import groups, routing, schedules
from django_mysqlqueue.service.databases import queue_alias, queue_aliases, works_on
from django_mysqlqueue.service.refs import GroupRef
from django_mysqlqueue.sql.session import Session
from django_mysqlqueue.subscriptions.handler import Handler, mode_text
from django_mysqlqueue.subscriptions.options import registrable
from django_mysqlqueue.subscriptions.registry import discover, subscriptions
from django_mysqlqueue.subscriptions.users import user_refusal


def register(using: str, chosen: Mapping[GroupRef, Handler]) -> None:
    """Register the groups of handlers, except those whose topics are only published via this database.

    Raises:
        SubscriberError: a group is registered with a mode other than its handler's.
    """
    for ref, handler in chosen.items():
        home, *others = works_on(ref.topic)
        if home != using and using in others:
            continue  # It works for the group if the topic has not moved away yet.
        registered = _register(using, handler, registrable(handler))
        if registered is not None and registered.mode != handler.mode:
            raise SubscriberError(mode_text(handler, registered.mode))


def declared_schedules() -> dict[str, dict[str, Definition]]:
    """Return the recurring schedules that this project declares, by the alias of their database and by name.

    Raises:
        SubscriberError: one of them breaks a rule.
    """
    discover()
    found: dict[str, dict[str, Definition]] = {}
    for name, definition in registry.definitions().items():
        try:
            found.setdefault(schedules.home_of(definition), {})[name] = definition
        except InvalidMessage as error:
            raise SubscriberError(f"Schedule {name!r}: {error}") from None
    return found


def register_schedules(using: str, wanted: Mapping[str, Definition]) -> None:
    """Register the recurring schedules of a database, without a statement if there are none."""
    if not wanted:
        return
    for name, done in schedules.register(using, wanted).items():
        is_new = done == schedules.NEW
        event(logging.INFO, "recurring.registered", schedule=name, times=wanted[name].timetable, new=is_new)
        if done == schedules.REPLACED:
            event(logging.WARNING, "recurring.replaced", schedule=name)


def _register(using: str, handler: Handler, options: Mapping[str, Mapping[str, object]]) -> groups.Registered | None:
    """Register a group, unless it is new and its topic has moved to another database; then return None."""
    ref = handler.ref
    check = partial(_refuse_moved, ref=ref)
    try:
        return groups.register(using, ref, mode=handler.mode, start=handler.start, options=options, check=check)
    except _Moved as error:
        event(logging.ERROR, "group.moved", group=ref.group, topic=ref.topic, database=using, target=str(error))
        return None


class _Moved(Exception):
    """A topic is in another database."""


def _refuse_moved(session: Session, ref: GroupRef) -> None:
    if target := routing.moved_to(session, ref.topic):
        raise _Moved(target)


def register_groups(using: str) -> None:
    """Register the groups of the handlers whose topics are in a database, with their registered options.

    A mode that differs from the registered one is only logged here, so that ``migrate`` does not fail. The subscriber
    refuses to start.
    """
    if using not in queue_aliases():
        return
    with about(using):
        for ref, handler in subscriptions().items():
            if queue_alias(topic=ref.topic) == using:
                _register_options(using, handler)


def _register_options(using: str, handler: Handler) -> None:
    ref = handler.ref
    options = registrable(handler)
    registered = _register(using, handler, options)
    if registered is None:
        return
    for column, value in options.items():
        try:
            has_changed = groups.register_options(using, ref, column, value, actor="migrate", check=_check_user)
        except SubscriberError as error:
            event(logging.WARNING, "user.refused", group=ref.group, topic=ref.topic, error=str(error))
            break
        if has_changed:
            _tell(handler, column)
    if registered.mode != handler.mode:
        event(
            logging.WARNING,
            "group.mode_kept",
            group=ref.group,
            topic=ref.topic,
            error=mode_text(handler, registered.mode),
        )


def _check_user(session: Session, ref: GroupRef) -> None:
    controls = groups.group_controls(session, [ref])
    if ref not in controls:
        return
    try:
        refusal = user_refusal(session, ref, controls[ref].options)
    except ValueError as error:
        refusal = str(error)
    if refusal:
        raise SubscriberError(refusal)


def _tell(handler: Handler, column: str) -> None:
    ref = handler.ref
    if column == "limits":
        event(logging.INFO, "limits.registered", group=ref.group, topic=ref.topic, limits=handler.limits.text or "none")
    elif column == "filter":
        event(logging.INFO, "filter.registered", group=ref.group, topic=ref.topic, filter=str(handler.filter or "none"))
    else:
        event(
            logging.INFO,
            "users.registered",
            group=ref.group,
            topic=ref.topic,
            users=", ".join(handler.allowed_users or ()) or "all",
        )

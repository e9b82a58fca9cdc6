"""Register the consumer groups of handlers, after ``migrate`` and when a subscriber starts."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from django_mysqlqueue.exceptions import SubscriberError
from django_mysqlqueue.runtime.log import event
from django_mysqlqueue.service import groups
from django_mysqlqueue.service.publishing import queue_alias
from django_mysqlqueue.service.refs import GroupRef
from django_mysqlqueue.subscriptions.handler import Handler, mode_text
from django_mysqlqueue.subscriptions.options import registrable
from django_mysqlqueue.subscriptions.registry import handlers


def register(using: str, chosen: Mapping[GroupRef, Handler]) -> None:
    """Register the groups of handlers.

    Raises:
        SubscriberError: a group is registered with a mode other than its handler's.
    """
    for ref, handler in chosen.items():
        limits = registrable(handler)
        registered = groups.register(using, ref, mode=handler.mode, start=handler.start, limits=limits)
        if registered.mode != handler.mode:
            raise SubscriberError(mode_text(handler, registered.mode))


def register_groups(using: str, *, with_limits: bool = True) -> None:
    """Register the groups of all handlers, and their limits, if ``using`` is the queue's database.

    A mode that differs from the registered one is only logged here, so that ``migrate`` does not fail. The subscriber
    refuses to start.

    Args:
        using: a database alias.
        with_limits: whether its schema has a place for limits.
    """
    if using != queue_alias():
        return
    for ref, handler in handlers().items():
        limits = registrable(handler) if with_limits else {}
        registered = groups.register(using, ref, mode=handler.mode, start=handler.start, limits=limits)
        if with_limits and groups.register_limits(using, ref, limits, actor="migrate"):
            text = handler.limits.text or "none"
            event(logging.INFO, "limits.registered", group=ref.group, topic=ref.topic, limits=text)
        if registered.mode != handler.mode:
            event(
                logging.WARNING,
                "group.mode_kept",
                group=ref.group,
                topic=ref.topic,
                error=mode_text(handler, registered.mode),
            )

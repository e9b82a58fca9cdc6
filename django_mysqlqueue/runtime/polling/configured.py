"""The options of a group that a process polls, which can change while it runs."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod

from django_mysqlqueue.options.table import as_text
from django_mysqlqueue.runtime.log import event
from django_mysqlqueue.runtime.polling.context import Context
from django_mysqlqueue.runtime.polling.limited import Limited
from django_mysqlqueue.runtime.priorities import ByPriority
from django_mysqlqueue.service.claims import Claimant
from django_mysqlqueue.service.groups import OptionColumns
from django_mysqlqueue.sql.session import Session
from django_mysqlqueue.subscriptions.handler import Handler
from django_mysqlqueue.subscriptions.options import (
    changed,
    filter_of,
    option_value,
    overridden,
    stored,
    with_registered,
)
from django_mysqlqueue.subscriptions.users import user_refusal

NOT_READ = OptionColumns("", "", "", "")
"""In place of the columns of a group row that a process has not read yet. No claim is possible with it."""


class ConfiguredGroup(ABC):
    """A group with the options of its handler, the registered limits, and the overrides."""

    todo: ByPriority[None]
    stopped: bool

    def __init__(self, context: Context, handler: Handler) -> None:
        self.context = context
        self.inbox = context.inbox
        self.using = context.using
        self.ref = handler.ref
        self.max_bytes = context.limits.waiting_bytes // context.groups
        self._declared = handler
        """The handler as the code declares it, without overrides."""
        self._columns = NOT_READ
        """The columns of the group row that were applied last."""
        self.refused = ""
        """Why nothing is claimed: this release cannot parse the group's filter, or the database user may not use the
        group. Empty if neither is so."""
        self.limited = Limited(
            context.inbox, handler.ref, context.subscriber, threads=context.threads, lease_ms=context.lease_ms
        )

    @abstractmethod
    def notify(self, key: str) -> None:
        """Note that a partition has, or may have, unclaimed messages."""

    def configure(self, handler: Handler) -> None:
        """Use a handler's options from now on, also for the deliveries that wait.

        Deliveries that are being handled keep the options with which they started.
        """
        context = self.context
        self.handler = handler
        self.claim_size = max(handler.claim_size or context.claim_size, handler.batch_size)
        """Maximum number of messages per claim."""
        # For a batch handler, one batch for each thread and one more: with less, the first thread would take all
        # partitions that are there, and the other threads would wait for them.
        batches = (context.threads + 1) * handler.batch_size if handler.batch else 1
        self.least = max(batches, handler.prefetch or context.settings.prefetch // context.groups)
        """Deliveries of this group that may wait in the inbox, however full other groups have made it."""
        if handler.prefetch is None:
            context.prefetch.join(self.ref, lambda: bool(self.todo))
        else:
            context.prefetch.leave(self.ref)
        self.claimant = Claimant(
            handler, context.subscriber, context.subset, options=self._columns, clock=context.clock
        )
        for key in self.limited.configure(handler.limits):
            self.notify(key)
        self.priority_share = option_value(handler, "priority_share", context.settings)
        self.inbox.configure(handler, enough=max(1, self.claim_size // 2), priority_share=self.priority_share)

    def override(self, columns: OptionColumns) -> bool:
        """Apply the registered options and the overrides of the group row, if they have changed since.

        A limit or an override that this code does not know, or that its handler cannot have, is logged and ignored. But
        without its filter, a group would get messages that are not for it: it claims nothing until the filter changes.

        Returns:
            Whether an option has changed.
        """
        if columns == self._columns:
            return False
        self._columns = columns
        registered, unknown = with_registered(self._declared, columns)
        self._warn(registered, filter_is_known="filter" not in unknown)
        handler, ignored = overridden(registered, {one.name: one.value for one in stored(columns.overrides)})
        for name, text in (*unknown.items(), *ignored.items()):
            if name in ("filter", "allowed_users"):
                continue  # see _refuse
            event(logging.WARNING, "settings.ignored", group=self.ref.group, topic=self.ref.topic, error=text)
        self._refuse(columns)
        names = changed(self.handler, handler)
        values = [f"{name}={as_text(name, option_value(handler, name, self.context.settings))}" for name in names]
        self.configure(handler)
        if names:
            event(
                logging.INFO, "settings.changed", group=self.ref.group, topic=self.ref.topic, settings=", ".join(values)
            )
        return bool(names)

    def _warn(self, registered: Handler, *, filter_is_known: bool) -> None:
        """Warn if the registered options are not those of the code."""
        here, there = self._declared, registered
        if here.limits != there.limits:
            event(
                logging.WARNING,
                "limits.not_registered",
                group=self.ref.group,
                topic=self.ref.topic,
                registered=there.limits.text or "none",
                code=here.limits.text or "none",
            )
        if filter_is_known and here.filter != there.filter:
            event(
                logging.WARNING,
                "filter.not_registered",
                group=self.ref.group,
                topic=self.ref.topic,
                registered=str(there.filter or "none"),
                code=str(here.filter or "none"),
            )

    def _refuse(self, columns: OptionColumns) -> None:
        before = self.refused
        if error := _filter_error(columns):
            event(logging.ERROR, "filter.refused", group=self.ref.group, topic=self.ref.topic, error=error)
        elif error := self._user_error(columns):
            event(logging.ERROR, "user.refused", group=self.ref.group, topic=self.ref.topic, error=error)
        self.refused = error
        self.stopped = bool(error) or (self.stopped and not before)

    def _user_error(self, columns: OptionColumns) -> str:
        try:
            return user_refusal(Session(self.using), self.ref, columns)
        except ValueError as error:
            return str(error)


def _filter_error(columns: OptionColumns) -> str:
    try:
        filter_of(columns)
    except ValueError as error:
        return str(error)
    return ""

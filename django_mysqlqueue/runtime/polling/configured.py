"""What a process knows of a group from its handler and its row, which can change while it runs."""

from __future__ import annotations

import logging

from django_mysqlqueue.options.table import as_text
from django_mysqlqueue.runtime.log import event
from django_mysqlqueue.runtime.polling.context import Context
from django_mysqlqueue.service import routing
from django_mysqlqueue.service.claims import Claimant
from django_mysqlqueue.service.databases import queue_alias
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

LARGEST_CLAIM = 1000
"""Maximum number of messages per claim, for an async handler of which more calls may run."""
NOT_READ = OptionColumns("", "", "", "")
"""In place of the columns of a group row that a process has not read yet. No claim is possible with it."""


class Configuration:
    """What the handler and the group's row say of a group: its options, and whether anything may be claimed."""

    def __init__(self, context: Context, handler: Handler) -> None:
        self.context = context
        self.ref = handler.ref
        self.max_bytes = context.limits.waiting_bytes // context.groups
        self._declared = handler
        """The handler as the code declares it, without overrides."""
        self.columns = NOT_READ
        """The columns of the group row that were applied last."""
        self.refused = ""
        """Why nothing is claimed: this release cannot parse the group's filter, or the database user may not use the
        group. Empty if neither is so."""
        self.stopped = False
        """Whether nothing is claimed: the group is paused, dropped, of the other mode, or its filter is unknown."""
        self.other_mode = ""
        """The group's mode, if it is no longer the handler's: the process stops."""
        self._announced = False
        self._revision: tuple[int, int] | None = None
        """The id of the group's registration, and its revision, at the last tick. Operators' changes increase it."""
        self.use(handler)

    # -- options --------------------------------------------------------------

    def use(self, handler: Handler) -> None:
        """Use a handler's options from now on, also for the deliveries that wait.

        Deliveries that are being handled keep the options with which they started.
        """
        context = self.context
        self.handler = handler
        self.calls = context.concurrency(handler) or context.threads
        """How many calls of the handler may run at a time in this process."""
        places = self.calls if handler.is_async and not handler.batch else 1
        # In order, a larger claim would only take more from each partition, of which a claim takes few.
        most = min(places, LARGEST_CLAIM) if handler.shared else 1
        size = handler.claim_size or max(context.claim_size, most)
        self.claim_size = max(size, handler.batch_size)
        """Maximum number of messages per claim."""
        # For a batch handler, one batch for each thread and one more: with less, the first call would take all
        # partitions that are there, and the others would wait for them.
        batches = (min(self.calls, context.threads) + 1) * handler.batch_size if handler.batch else 1
        self.least = max(batches, handler.prefetch or max(places, context.settings.prefetch // context.groups))
        """Deliveries of this group that may wait in the inbox, however full other groups have made it."""
        self.priority_share = option_value(handler, "priority_share", context.settings)
        self.subset = context.subset.minus(handler.paused_tasks)
        """The partitions from which this process claims."""
        self.claimant = Claimant(handler, context.subscriber, options=self.columns, clock=context.clock)

    def override(self, columns: OptionColumns) -> list[str] | None:
        """Use the registered options and the overrides of the group row, if they have changed since.

        A limit or an override that this code does not know, or that its handler cannot have, is logged and ignored. But
        without its filter, a group would get messages that are not for it: it claims nothing until the filter changes.

        Returns:
            The names of the options that have changed; None if the row says what it said before.
        """
        if columns == self.columns:
            return None
        registered, unknown = with_registered(self._declared, columns)
        self._warn(registered, filter_is_known="filter" not in unknown)
        handler, ignored = overridden(registered, {option.name: option.value for option in stored(columns.overrides)})
        for name, text in (*unknown.items(), *ignored.items()):
            if name in ("filter", "allowed_users"):
                continue  # see _refuse
            event(logging.WARNING, "settings.ignored", group=self.ref.group, topic=self.ref.topic, error=text)
        self._refuse(columns)
        names = changed(self.handler, handler)
        values = [f"{name}={as_text(name, option_value(handler, name, self.context.settings))}" for name in names]
        # Last: what an error leaves undone is done with the next turn.
        self.columns = columns
        self.use(handler)
        if names:
            event(
                logging.INFO, "settings.changed", group=self.ref.group, topic=self.ref.topic, settings=", ".join(values)
            )
        return names

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
            return user_refusal(Session(self.context.using), self.ref, columns)
        except ValueError as error:
            return str(error)

    # -- whether anything may be claimed --------------------------------------

    def stop(self, *, dropped: bool) -> None:
        """Claim nothing until the next tick has checked the group again."""
        self.stopped = True
        if not self._announced:
            self._announce_stop(dropped=dropped)
            self._announced = True

    def _announce_stop(self, *, dropped: bool) -> None:
        group, topic = self.ref
        using = self.context.using
        if not dropped:
            event(logging.INFO, "group.paused", group=group, topic=topic)
        elif target := routing.moved_to(Session(using), topic):
            # With settings that name the target, the process works for the group there.
            level = logging.ERROR if queue_alias(topic=topic) == using else logging.INFO
            event(level, "group.moved", group=group, topic=topic, database=using, target=target)
        else:
            event(logging.ERROR, "group.dropped", group=group, topic=topic)

    def recheck_paused(self) -> None:
        """Claim again after a tick, because the group may have been resumed."""
        self._announced = self.stopped and not self.refused
        self.stopped = bool(self.refused)

    def check_mode(self, registered: str) -> None:
        """Stop claiming if the group's registered mode is no longer the handler's."""
        if registered != self.handler.mode:
            self.other_mode = registered
            self.stopped = True

    def has_new_revision(self, revision: tuple[int, int]) -> bool:
        """Return whether an operator has changed the group since the last tick, or it was registered again."""
        revised = self._revision is not None and revision != self._revision
        self._revision = revision
        if revised:
            event(logging.INFO, "group.reloaded", group=self.ref.group, topic=self.ref.topic)
        return revised


def _filter_error(columns: OptionColumns) -> str:
    try:
        filter_of(columns)
    except ValueError as error:
        return str(error)
    return ""

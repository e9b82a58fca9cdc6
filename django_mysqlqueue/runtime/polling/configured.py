"""The options of a group that a process polls, which can change while it runs."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod

from django_mysqlqueue.runtime.log import event
from django_mysqlqueue.runtime.polling.context import Context
from django_mysqlqueue.runtime.polling.limited import Limited
from django_mysqlqueue.runtime.priorities import ByPriority
from django_mysqlqueue.service.claims import Claimant
from django_mysqlqueue.subscriptions.handler import Handler
from django_mysqlqueue.subscriptions.options import (
    as_text,
    changed,
    option_value,
    overridden,
    stored,
    with_registered,
)


class ConfiguredGroup(ABC):
    """A group with the options of its handler, the registered limits, and the overrides."""

    todo: ByPriority[None]

    def __init__(self, context: Context, handler: Handler) -> None:
        self.context = context
        self.inbox = context.inbox
        self.using = context.using
        self.ref = handler.ref
        self.max_bytes = context.limits.waiting_bytes // context.groups
        self._declared = handler
        """The handler as the code declares it, without overrides."""
        self._controls = ("", "")
        """The columns of the group row with limits and overrides that were applied last."""
        self.limited = Limited(context.inbox, handler.ref, context.subscriber, context.threads)

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
            handler.ref,
            context.subscriber,
            handler.max_attempts,
            int(handler.visibility_timeout * 1000) if handler.shared else None,
            strict=handler.on_failure == "block" and not handler.shared,
            subset=context.subset,
            backoff=handler.backoff,
            limits=handler.limits,
            lease_ms=context.lease_ms,
        )
        if self.limited.is_other(handler.limits):
            self.inbox.return_waiting(handler.ref)
        for key in self.limited.configure(handler.limits):
            self.notify(key)
        self.priority_share = option_value(handler, "priority_share", context.settings)
        self.inbox.configure(handler, enough=max(1, self.claim_size // 2), priority_share=self.priority_share)

    def override(self, limits: str, overrides: str) -> bool:
        """Apply the registered limits and the overrides of the group's options, if they have changed since.

        A limit or an override that this code does not know, or that its handler cannot have, is logged and ignored.

        Args:
            limits: the JSON text of the limits in the group row.
            overrides: that of the overrides.

        Returns:
            Whether an option has changed.
        """
        if (limits, overrides) == self._controls:
            return False
        self._controls = (limits, overrides)
        registered, unknown = with_registered(self._declared, limits)
        if registered.limits != self._declared.limits:
            event(
                logging.WARNING,
                "limits.not_registered",
                group=self.ref.group,
                topic=self.ref.topic,
                registered=registered.limits.text or "none",
                code=self._declared.limits.text or "none",
            )
        handler, ignored = overridden(registered, {one.name: one.value for one in stored(overrides)})
        for text in (*unknown.values(), *ignored.values()):
            event(logging.WARNING, "settings.ignored", group=self.ref.group, topic=self.ref.topic, error=text)
        names = changed(self.handler, handler)
        if not names:
            return False
        values = [f"{name}={as_text(name, option_value(handler, name, self.context.settings))}" for name in names]
        self.configure(handler)
        event(logging.INFO, "settings.changed", group=self.ref.group, topic=self.ref.topic, settings=", ".join(values))
        return True

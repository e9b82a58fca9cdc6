"""Claimed deliveries on their way into the inbox: their payloads are read after the claim has committed."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from django_mysqlqueue.backoff import Backoff, Failures
from django_mysqlqueue.runtime.handling.lanes import Held
from django_mysqlqueue.runtime.handling.observers import dead_ends
from django_mysqlqueue.runtime.log import delivery_fields, event, is_worth_a_line
from django_mysqlqueue.runtime.polling.configured import ConfiguredGroup
from django_mysqlqueue.runtime.polling.context import Context
from django_mysqlqueue.service import payloads
from django_mysqlqueue.service.claims import Claim
from django_mysqlqueue.service.deliveries import Action, Claimed, Settlement
from django_mysqlqueue.subscriptions.handler import Handler

REST = Backoff(initial=0.1, maximum=5.0, jitter=0.0)
"""The pause of a group after a failed turn. Other groups continue."""
INFINITE = float("inf")


class DeliveringGroup(ConfiguredGroup):
    """A group that puts what it has claimed into the inbox."""

    def __init__(self, context: Context, handler: Handler) -> None:
        super().__init__(context, handler)
        self.rests_until = 0.0
        """The end of the pause after a failed turn, by the monotonic clock."""
        self._unanswered = Failures(REST)
        """Claims in a row for which the database did not return all payloads."""

    def _hand_out(self, claim: Claim) -> None:
        """Read the payloads, after the claim has committed, and put the deliveries into the inbox."""
        deliveries = claim.deliveries
        if not deliveries:
            return

        def held(delivery: Claimed) -> Held:
            body = found[delivery.offset]
            at = body.expires_at
            left = INFINITE if at is None else (at - delivery.delivered_at) / 1000
            return Held(delivery, body, self.handler, claim.began + left, body.coalesce_key or "", states.get(delivery))

        try:
            found = payloads.read(self.using, [delivery.offset for delivery in deliveries])
            missing = [delivery.offset for delivery in deliveries if delivery.offset not in found]
            deleted = payloads.deleted(self.using, missing) if missing else set()
            bodies = {delivery: found[delivery.offset] for delivery in deliveries if delivery.offset in found}
            states = self.handler.claimed(self.using, bodies)
            readable = {delivery.offset: held(delivery) for delivery in bodies}
        except Exception:
            for delivery in deliveries:
                self.inbox.settle(Settlement(delivery, Action.RELEASE), ordered=not self.handler.shared)
            raise
        if not missing:
            self._unanswered.clear()
            self.inbox.put(readable.values())
            return
        # One by one: in a partition, messages before a missing one are handled, and messages after it wait.
        for delivery in deliveries:
            if delivery.offset in readable:
                self.inbox.put([readable[delivery.offset]])
            elif delivery.offset in deleted:
                event(logging.WARNING, "delivery.deleted", **delivery_fields(delivery))
                self.inbox.settle(Settlement(delivery, Action.DELETED), ordered=not self.handler.shared)
            else:
                self.inbox.settle(Settlement(delivery, Action.RELEASE), ordered=not self.handler.shared)
        if len(deleted) < len(missing):
            self._rest_without_payloads(len(missing) - len(deleted), len(deliveries))

    def _rest_without_payloads(self, missing: int, claimed: int) -> None:
        """Pause the group: if it claimed the messages again at once, they would probably be missing again."""
        self.rests_until = time.monotonic() + self._unanswered.add()
        if is_worth_a_line(self._unanswered.count):
            event(
                logging.ERROR,
                "payloads.not_returned",
                group=self.ref.group,
                topic=self.ref.topic,
                messages=missing,
                claimed=claimed,
                failures=self._unanswered.count,
            )

    def _tell_dead(self, dead: Sequence[tuple[Claimed, str]]) -> None:
        found = payloads.read(self.using, [delivery.offset for delivery, _ in dead])
        self.context.watch.tell(dead_ends(self.handler, dead, found, self.using, self.context.clock.now()))

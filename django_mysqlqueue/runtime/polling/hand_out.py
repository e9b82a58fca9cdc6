"""Claimed deliveries on their way into the inbox: their payloads are read after the claim has committed."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from django_mysqlqueue.options.backoff import Failures
from django_mysqlqueue.runtime.handling.lanes import Held
from django_mysqlqueue.runtime.handling.observers import dead_ends
from django_mysqlqueue.runtime.log import delivery_fields, event, failing
from django_mysqlqueue.runtime.polling.health import REST
from django_mysqlqueue.runtime.polling.parts import Parts
from django_mysqlqueue.service import payloads
from django_mysqlqueue.service.claims import Claim
from django_mysqlqueue.service.deliveries import Action, Claimed, Settlement

INFINITE = float("inf")


class HandOut:
    """Puts what a group has claimed into the inbox, or releases it."""

    def __init__(self, parts: Parts) -> None:
        self._context, self._configuration, self._health = parts.context, parts.configuration, parts.health
        self._inbox = parts.context.inbox
        self._unanswered = Failures(REST)
        """Claims in a row for which the database did not return all payloads."""

    def deliver(self, claim: Claim) -> None:
        """Put the deliveries of a claim into the inbox, and tell the listeners of those that were dead-lettered."""
        if claim.fence is not None and claim.deliveries:
            self._deliver(claim.deliveries, claim.fence.asked_at)
        if claim.dead and self._context.watch.is_wanted():
            bodies = payloads.read(self._context.using, [delivery.offset for delivery, _ in claim.dead])
            handler, context = self._configuration.handler, self._context
            context.watch.tell(dead_ends(handler, claim.dead, bodies, context.using, context.clock.now()))

    def _deliver(self, deliveries: Sequence[Claimed], asked_at: float) -> None:
        using = self._context.using
        handler = self._configuration.handler
        try:
            bodies = payloads.read(using, [delivery.offset for delivery in deliveries])
            missing = [delivery.offset for delivery in deliveries if delivery.offset not in bodies]
            deleted = payloads.deleted(using, missing) if missing else set()
            readable = self._inbox.wanted(
                {delivery: bodies[delivery.offset] for delivery in deliveries if delivery.offset in bodies}
            )
            states = handler.claimed(using, readable)
            items: dict[int, Held] = {}
            for delivery, body in readable.items():
                at = body.expires_at
                starts_until = INFINITE if at is None else asked_at + (at - delivery.delivered_at) / 1000
                state = states.get(delivery)
                claimed = delivery if state is None else delivery._replace(job=handler.job_of(state))
                items[delivery.offset] = Held(claimed, body, handler, starts_until, state)
        except Exception:
            for delivery in deliveries:
                self._settle(delivery, Action.RELEASE)
            raise
        if not missing:
            self._unanswered.clear()
            self._inbox.put(items.values())
            return
        # One by one: in a partition, messages before a missing one are handled, and messages after it wait.
        for delivery in deliveries:
            if delivery.offset in items:
                self._inbox.put([items[delivery.offset]])
            elif delivery.offset in deleted:
                event(logging.WARNING, "delivery.deleted", **delivery_fields(delivery))
                self._settle(delivery, Action.DELETED)
            elif delivery.offset not in bodies:
                self._settle(delivery, Action.RELEASE)
        if len(deleted) < len(missing):
            self._rest_without_payloads(len(missing) - len(deleted), len(deliveries))

    def _settle(self, delivery: Claimed, action: Action) -> None:
        self._inbox.settle(Settlement(delivery, action), ordered=not self._configuration.handler.shared)

    def _rest_without_payloads(self, missing: int, claimed: int) -> None:
        """Pause the group: if it claimed the messages again at once, they would probably be missing again."""
        self._health.rest(self._unanswered.add())
        failing(
            logging.ERROR,
            "payloads.not_returned",
            group=self._configuration.ref.group,
            topic=self._configuration.ref.topic,
            messages=missing,
            claimed=claimed,
            failures=self._unanswered.count,
        )

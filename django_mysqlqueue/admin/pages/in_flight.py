"""The page of subscribers and of the messages that they hold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from django.utils.translation import gettext_lazy

from django_mysqlqueue.admin.pages.base import Page
from django_mysqlqueue.inspection import partitions
from django_mysqlqueue.inspection.partitions import InFlight
from django_mysqlqueue.inspection.subscribers import SubscriberStatus, read_held, read_refusals, read_subscribers
from django_mysqlqueue.options.topics import is_dlq
from django_mysqlqueue.service.groups import registered_refs
from django_mysqlqueue.service.refs import GroupRef
from django_mysqlqueue.service.subsets import EVERYTHING
from django_mysqlqueue.text.humanize import task_name

SHOWN_IN_FLIGHT = 200


@dataclass(slots=True)
class Worker:
    """A subscriber process on the page."""

    status: SubscriberStatus
    """It as a subscriber of one of its groups."""
    subset: str
    groups: list[tuple[GroupRef, int, str, str]] = field(default_factory=list)
    """For each group: the number of partitions that it owns, its share of all partitions with an owner, and the error
    because of which it cannot work for the group."""
    held: int = 0
    """The number of messages that it holds."""


class InFlightPage(Page):
    """The subscribers, for users who may view all topics, and the list of in-flight messages."""

    name = "inflight"
    title = gettext_lazy("In flight")
    filters = ("group", "topic", "subscriber", "task")
    shows_several_topics = True

    def context(self) -> dict[str, Any]:
        session = self.session
        subscriber, task = self.text("subscriber"), self.text("task")
        # Which of them are of a task is known once they are read.
        limit = SHOWN_IN_FLIGHT if task is None else self.bounds.in_flight
        refs = [one for one in registered_refs(self.using) if self.may_view(one.topic)]
        found: list[InFlight] = []
        for one in filter(self._is_wanted, refs):
            found += partitions.in_flight(session, one, subscriber=subscriber, limit=limit, bounds=self.bounds)
        tasks = sorted({one.task for one in found} - {""})
        found = [one for one in found if task in (None, one.task)]
        found.sort(key=lambda delivery: delivery.since)
        shown = found[:SHOWN_IN_FLIGHT]
        subscribers = read_subscribers(session, lease_ms=self.lease_ms)
        live = {row.name for rows in subscribers.values() for row in rows if row.live}
        # Those of a live subscriber, and those of a DLQ topic, cannot be dead-lettered.
        lost = [one for one in shown if one.subscriber not in live and not is_dlq(one.ref.topic)]
        sees_all = self.topics_to_view() is None
        return {
            "rows": shown,
            "live": live,
            "operable": self.operable(one.ref.topic for one in lost),
            "shown": SHOWN_IN_FLIGHT,
            "more": len(found) >= SHOWN_IN_FLIGHT,
            "groups": sorted({one.group for one in refs}),
            "topics": sorted({one.topic for one in refs}),
            "tasks": [(one, task_name(one)) for one in tasks],
            "sees_all": sees_all,
            # Names of subscribers and hosts do not belong to a topic.
            **(self._subscribers(subscribers) if sees_all else {}),
        }

    def _is_wanted(self, ref: GroupRef) -> bool:
        return self.text("group") in (None, ref.group) and self.text("topic") in (None, ref.topic)

    def _subscribers(self, subscribers: Mapping[GroupRef, list[SubscriberStatus]]) -> dict[str, Any]:
        """Return the subscribers of the groups that are wanted, and their leases."""
        session, wanted = self.session, self.text("subscriber")
        rows = {ref: found for ref, found in subscribers.items() if self._is_wanted(ref)}
        shares = {place: number for place, number in partitions.shares(session).items() if self._is_wanted(place[1])}
        owned: Counter[GroupRef] = Counter()
        waiting: Counter[GroupRef] = Counter()
        for (owner, ref), number in shares.items():
            (owned if owner else waiting)[ref] += number
        workers: dict[str, Worker] = {}
        held = {ref: read_held(session, ref, bounds=self.bounds) for ref in rows}
        for row in sorted((row for found in rows.values() for row in found), key=lambda row: (not row.live, row.name)):
            if wanted not in (None, row.name):
                continue
            subset = "" if row.subset == EVERYTHING else str(row.subset)
            worker = workers.setdefault(row.name, Worker(row, subset))
            number = shares.get((row.name, row.ref), 0)
            share = f"{number / owned[row.ref]:.0%}" if number else ""
            worker.groups.append((row.ref, number, share, self.errors.whole(row.error, row.ref.topic)))
            worker.held += held[row.ref].get(row.name, 0)
        known = {(row.name, row.ref) for found in rows.values() for row in found}
        return {
            "workers": list(workers.values()),
            "refusals": read_refusals(session),
            "waiting": sorted(waiting.items()),
            "orphans": sorted(
                (owner, ref, number) for (owner, ref), number in shares.items() if owner and (owner, ref) not in known
            ),
        }

"""The pages of in-flight messages and subscribers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from django.utils.translation import gettext_lazy

from django_mysqlqueue.admin.pages.base import Page
from django_mysqlqueue.inspection import partitions
from django_mysqlqueue.inspection.partitions import InFlight
from django_mysqlqueue.inspection.subscribers import SubscriberStatus, read_refusals, read_subscribers
from django_mysqlqueue.options.topics import is_dlq
from django_mysqlqueue.service.groups import registered_refs
from django_mysqlqueue.service.refs import GroupRef
from django_mysqlqueue.service.subsets import EVERYTHING
from django_mysqlqueue.text.humanize import task_name

SHOWN_IN_FLIGHT = 200


class InFlightPage(Page):
    """The list of in-flight messages."""

    name = "inflight"
    title = gettext_lazy("In flight")
    filters = ("group", "topic", "subscriber", "task")
    shows_several_topics = True

    def context(self) -> dict[str, Any]:
        session = self.session
        now = session.now()
        group, topic, subscriber, task = (self.text(name) for name in self.filters)
        # Which of them are of a task is known once they are read.
        limit = SHOWN_IN_FLIGHT if task is None else self.bounds.in_flight
        refs = [one for one in registered_refs(self.using) if self.may_view(one.topic)]
        found: list[InFlight] = []
        for one in [one for one in refs if group in (None, one.group) and topic in (None, one.topic)]:
            found += partitions.in_flight(session, one, subscriber=subscriber, limit=limit, bounds=self.bounds)
        tasks = sorted({one.task for one in found} - {""})
        found = [one for one in found if task in (None, one.task)]
        found.sort(key=lambda delivery: delivery.since)
        shown = found[:SHOWN_IN_FLIGHT]
        subscribers = read_subscribers(session, lease_ms=self.lease_ms)
        live = {row.name for rows in subscribers.values() for row in rows if row.live}
        # Those of a live subscriber, and those of a DLQ topic, cannot be dead-lettered.
        lost = [one for one in shown if one.subscriber not in live and not is_dlq(one.ref.topic)]
        return {
            "rows": shown,
            "now": now,
            "live": live,
            "operable": self.operable(one.ref.topic for one in lost),
            "shown": SHOWN_IN_FLIGHT,
            "more": len(found) >= SHOWN_IN_FLIGHT,
            "groups": sorted({one.group for one in refs}),
            "topics": sorted({one.topic for one in refs}),
            "tasks": [(one, task_name(one)) for one in tasks],
        }


@dataclass(slots=True)
class Worker:
    """A subscriber process on the page."""

    status: SubscriberStatus
    """It as a subscriber of one of its groups."""
    subset: str
    groups: list[tuple[GroupRef, int, str, str]] = field(default_factory=list)
    """For each group: the number of partitions that it owns, its share of all partitions with an owner, and the error
    because of which it cannot work for the group."""


class SubscribersPage(Page):
    """The list of subscribers."""

    name = "subscribers"
    title = gettext_lazy("Subscribers")

    def context(self) -> dict[str, Any]:
        session = self.session
        now = session.now()
        shares = partitions.shares(session)
        owned: dict[GroupRef, int] = {}
        waiting: dict[GroupRef, int] = {}
        for (owner, ref), number in shares.items():
            place = owned if owner else waiting
            place[ref] = place.get(ref, 0) + number
        workers: dict[str, Worker] = {}
        rows = read_subscribers(session, lease_ms=self.lease_ms)
        for row in sorted((row for found in rows.values() for row in found), key=lambda row: (not row.live, row.name)):
            subset = "" if row.subset == EVERYTHING else str(row.subset)
            worker = workers.setdefault(row.name, Worker(row, subset))
            number = shares.get((row.name, row.ref), 0)
            share = f"{number / owned[row.ref]:.0%}" if number else ""
            worker.groups.append((row.ref, number, share, self.errors.whole(row.error, row.ref.topic)))
        known = {(row.name, row.ref) for found in rows.values() for row in found}
        return {
            "workers": list(workers.values()),
            "now": now,
            "refusals": read_refusals(session),
            "waiting": sorted(waiting.items()),
            "orphans": sorted(
                (owner, ref, number) for (owner, ref), number in shares.items() if owner and (owner, ref) not in known
            ),
        }

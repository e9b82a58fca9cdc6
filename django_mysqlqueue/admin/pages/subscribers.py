"""The pages of in-flight messages and subscribers."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from django.utils.translation import gettext_lazy

from django_mysqlqueue.admin.pages.base import Page
from django_mysqlqueue.admin.permissions import may_operate
from django_mysqlqueue.inspection import partitions
from django_mysqlqueue.inspection.partitions import InFlight
from django_mysqlqueue.inspection.subscribers import read_refusals, read_subscribers
from django_mysqlqueue.options.topics import is_dlq
from django_mysqlqueue.service.groups import registered_refs
from django_mysqlqueue.service.refs import GroupRef
from django_mysqlqueue.service.subsets import EVERYTHING
from django_mysqlqueue.sql.session import Session
from django_mysqlqueue.text.humanize import duration

SHOWN_IN_FLIGHT = 200
FILTERS = ("group", "topic", "subscriber")


@dataclass(frozen=True, slots=True)
class InFlightRow:
    """A row of the in-flight page."""

    delivery: InFlight
    value: str
    since: str
    until: str
    live: bool
    may_give_up: bool
    """True if the user may dead-letter it: the subscriber is lost, and the user may operate the topic."""


class InFlightPage(Page):
    """The list of in-flight messages."""

    name = "inflight"
    title = gettext_lazy("In flight")
    template = "inflight.html"
    shows_several_topics = True

    def context(self) -> dict[str, Any]:
        session = Session(self.using)
        now = session.now()
        group, topic = self.text("group"), self.text("topic")
        refs = [one for one in registered_refs(self.using) if self.may_view(one.topic)]
        found: list[InFlight] = []
        for one in [one for one in refs if group in (None, one.group) and topic in (None, one.topic)]:
            found += partitions.in_flight(
                session, one, subscriber=self.text("subscriber"), limit=SHOWN_IN_FLIGHT, bounds=self.bounds
            )
        found.sort(key=lambda delivery: delivery.since)
        live = {
            row.name for rows in read_subscribers(session, lease_ms=self.lease_ms).values() for row in rows if row.live
        }
        return {
            "rows": [self._row(delivery, now, live) for delivery in found[:SHOWN_IN_FLIGHT]],
            "shown": SHOWN_IN_FLIGHT,
            "more": len(found) > SHOWN_IN_FLIGHT or len(found) == SHOWN_IN_FLIGHT,
            "groups": sorted({one.group for one in refs}),
            "topics": sorted({one.topic for one in refs}),
            "given": {name: self.text(name) or "" for name in FILTERS},
            "filtered": any(self.text(name) for name in FILTERS),
        }

    def _row(self, delivery: InFlight, now: int, live: set[str]) -> InFlightRow:
        until = ""
        if delivery.visible_until > now:
            until = duration((delivery.visible_until - now) / 1000)
        return InFlightRow(
            delivery,
            json.dumps([delivery.key, delivery.offset]),
            duration((now - delivery.since) / 1000),
            until,
            delivery.subscriber in live,
            delivery.subscriber not in live
            and not is_dlq(delivery.ref.topic)
            and may_operate(self.request, delivery.ref.topic),
        )


@dataclass(slots=True)
class Worker:
    """A subscriber process on the page."""

    name: str
    live: bool
    seen: str
    """Time since its last heartbeat."""
    info: dict[str, Any]
    subset: str
    round_trip: str
    """How long the database takes to answer its polls: p50 and p95."""
    groups: list[tuple[GroupRef, int, str, str]] = field(default_factory=list)
    """For each group: the number of partitions that it owns, its share of all partitions with an owner, and the error
    because of which it cannot work for the group."""


class SubscribersPage(Page):
    """The list of subscribers."""

    name = "subscribers"
    title = gettext_lazy("Subscribers")
    template = "subscribers.html"

    def context(self) -> dict[str, Any]:
        session = Session(self.using)
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
            seen = duration((now - row.heartbeat_at) / 1000)
            took = "-" if row.round_trip is None else ", ".join(map(duration, row.round_trip))
            worker = workers.setdefault(row.name, Worker(row.name, row.live, seen, row.info, subset, took))
            number = shares.get((row.name, row.ref), 0)
            share = f"{number / owned[row.ref]:.0%}" if number else ""
            worker.groups.append((row.ref, number, share, self.errors.whole(row.error, row.ref.topic)))
        known = {(row.name, row.ref) for found in rows.values() for row in found}
        return {
            "workers": list(workers.values()),
            "refusals": [(one, duration(max(0, now - one.at) / 1000)) for one in read_refusals(session)],
            "waiting": sorted(waiting.items()),
            "orphans": sorted(
                (owner, ref, number) for (owner, ref), number in shares.items() if owner and (owner, ref) not in known
            ),
        }

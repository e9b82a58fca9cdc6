"""What the tables say while everything goes on, and when it is over; what must hold of them stands in the tests.

Imported when Django is set up. Runs in the soak's own process.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from django.db import connection

from django_mysqlqueue.service.refs import GroupRef
from soak import plan
from soak.facts import Progress, Verdict, verdict
from tests.support import invariants
from tests.support.tables import Tables


def snapshot() -> Tables:
    """All tables at one moment, although others write."""
    with connection.cursor() as cursor:
        cursor.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        cursor.execute("START TRANSACTION WITH CONSISTENT SNAPSHOT, READ ONLY")
        try:
            return Tables.read()
        finally:
            cursor.execute("COMMIT")


def progress(tables: Tables, at: float) -> Progress:
    """The watermarks and cursors, read by ``at``."""
    return Progress(
        at, {(ref.group, key): place for (ref, key), place in tables.offsets.items() if ref.topic == plan.TOPIC}
    )


class Moments:
    """Compares each moment with the one before it."""

    def __init__(self) -> None:
        self._last: Tables | None = None
        self._count = 0
        self._violations: list[str] = []

    def add(self, tables: Tables) -> None:
        self._count += 1
        found = invariants.at_any_moment(tables)
        if self._last is not None:
            found += invariants.between(self._last, tables, recorded=False)
        self._violations += [f"{one} (moment {self._count})" for one in found]
        self._last = tables

    def verdict(self) -> Verdict:
        """What is written together is seen together, and nothing that was settled comes back."""
        return verdict("the tables are sound at every moment", f"{self._count} moments", self._violations)


def check_leftovers(tables: Tables, lags: Mapping[str, int], groups: Collection[plan.Group]) -> Verdict:
    """A drained queue: nothing waits, no state rows, no leases, watermarks at the end of the log."""

    def violations() -> Iterator[str]:
        yield from invariants.at_any_moment(tables)
        yield from invariants.drained(tables)
        if tables.outbox:
            yield f"{len(tables.outbox)} rows are left in the outbox"
        for name, lag in lags.items():
            if lag:
                yield f"{name} lags by {lag}"
        for group in groups:
            if GroupRef(group.name, plan.TOPIC) not in tables.groups:
                yield f"{group.name} is not registered"

    compared = f"{len(tables.log)} messages in the log, {len(tables.offsets)} watermarks"
    return verdict("nothing is left behind", compared, violations())

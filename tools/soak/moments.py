"""Check the tables during the run and at its end. The invariants are in ``tests/support/invariants.py``.

Import this module after Django is set up. Runs in the main process of the soak test.
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
    """Return all tables at one moment, while other processes write."""
    with connection.cursor() as cursor:
        cursor.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        cursor.execute("START TRANSACTION WITH CONSISTENT SNAPSHOT, READ ONLY")
        try:
            return Tables.read()
        finally:
            cursor.execute("COMMIT")


def progress(tables: Tables, at: float) -> Progress:
    """Return the watermarks and positions that were read by the time ``at``."""
    return Progress(
        at, {(ref.group, key): place for (ref, key), place in tables.offsets.items() if ref.topic == plan.TOPIC}
    )


class Moments:
    """Check each moment, and compare it with the previous one."""

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
        """Return whether all invariants held at every moment and between moments."""
        return verdict("the tables are consistent at every moment", f"{self._count} moments", self._violations)


def check_leftovers(tables: Tables, lags: Mapping[str, int], groups: Collection[plan.Group]) -> Verdict:
    """Check a drained queue: an empty outbox, no state rows, no leases, and watermarks at the end of the log."""

    def violations() -> Iterator[str]:
        yield from invariants.at_any_moment(tables)
        yield from invariants.drained(tables)
        if tables.outbox:
            yield f"{len(tables.outbox)} rows are left in the outbox"
        for name, lag in lags.items():
            if lag:
                yield f"{name} has a lag of {lag}"
        for group in groups:
            if GroupRef(group.name, plan.TOPIC) not in tables.groups:
                yield f"{group.name} is not registered"

    compared = f"{len(tables.log)} messages in the log, {len(tables.offsets)} watermarks"
    return verdict("no rows are left behind", compared, violations())

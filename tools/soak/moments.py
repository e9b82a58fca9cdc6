"""Check the tables during the run and at its end. The invariants are in ``tests/support/invariants.py``.

Import this module after Django is set up. Runs in the main process of the soak test.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping

from django.db import connections

from django_mysqlqueue.filter_policies import parse
from django_mysqlqueue.service.refs import GroupRef
from soak import job_plan, plan
from soak.facts import Progress, Verdict, verdict
from tests.support import invariants
from tests.support.filtering import unmatched
from tests.support.tables import Tables


def snapshot(alias: str) -> Tables:
    """Return all tables of a database at one moment, while other processes write."""
    with one_moment(alias):
        return Tables.read(alias)


@contextlib.contextmanager
def one_moment(alias: str) -> Iterator[None]:
    """Let all statements inside read the tables of a database at one moment."""
    with connections[alias].cursor() as cursor:
        cursor.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        cursor.execute("START TRANSACTION WITH CONSISTENT SNAPSHOT, READ ONLY")
        try:
            yield
        finally:
            cursor.execute("COMMIT")


def progress(alias: str, tables: Tables, at: float) -> Progress:
    """Return the watermarks and positions of a database that were read by the time ``at``."""
    names = {group.name for group in plan.GROUPS}
    return Progress(
        at,
        {
            (ref.group, key): (plan.place(alias, acked), plan.place(alias, claimed))
            for (ref, key), (acked, claimed) in tables.offsets.items()
            if ref.group in names
        },
    )


MAY_GO = [
    *(GroupRef(group.name, group.topic) for group in plan.MOVED_GROUPS),
    GroupRef(job_plan.GROUP, job_plan.SOUGHT),
]
"""Groups that are dropped when they have moved, and the one that is sent back."""


NARROWED = {
    GroupRef(group.name, group.topic): [parse({"region": [*group.regions, *more]}) for more in ((), group.sometimes)]
    for group in plan.GROUPS
    if group.sometimes
}
"""The filters of the groups whose filter an operator overrides for a while: what one of them has passed has no row."""


class Moments:
    """Check each moment of a database, and compare it with the previous one."""

    def __init__(self, alias: str = plan.HOME) -> None:
        self._alias = alias
        self._last: Tables | None = None
        self._count = 0
        self._violations: list[str] = []

    def add(self, tables: Tables, deletes: Collection[str] = ()) -> None:
        """Check a moment.

        Args:
            tables: the tables.
            deletes: ids of messages that may have been cancelled by then.
        """
        self._count += 1
        narrowed = {ref: filters for ref, filters in NARROWED.items() if ref in tables.groups}
        found = invariants.at_any_moment(tables, passed=unmatched(tables, narrowed))
        if self._last is not None:
            found += invariants.between(self._last, tables, recorded=False, forgets=MAY_GO, deletes=deletes)
        self._violations += [f"{one} (moment {self._count})" for one in found]
        self._last = tables

    def verdict(self) -> Verdict:
        """Return whether all invariants held at every moment and between moments."""
        name = f"{self._alias}: the tables are consistent at every moment"
        return verdict(name, f"{self._count} moments", self._violations)


def check_leftovers(
    tables: Tables, lags: Mapping[str, int], groups: Collection[plan.Group], alias: str = plan.HOME
) -> Verdict:
    """Check a drained database: an empty outbox, no state rows, no leases, and watermarks at the end of the log."""

    def violations() -> Iterator[str]:
        yield from invariants.at_any_moment(tables)
        yield from invariants.drained(tables)
        if tables.outbox:
            yield f"{len(tables.outbox)} rows are left in the outbox"
        for name, lag in lags.items():
            if lag:
                yield f"{name} has a lag of {lag}"
        for group in groups:
            is_there = GroupRef(group.name, group.topic) in tables.groups
            if is_there != (plan.HOMES[group.topic] == alias):
                yield f"{group.name} is {'' if is_there else 'not '}registered in {alias}"

    compared = f"{len(tables.log)} messages in the log, {len(tables.offsets)} watermarks"
    return verdict(f"{alias}: no rows are left behind", compared, violations())

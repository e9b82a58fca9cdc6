"""Delete the rows that are no longer needed, table by table, in bounded steps; end jobs that nobody else ends.

Subscribers take one step per turn of their maintenance, ``queuegc`` takes them all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from django_mysqlqueue.options import job_queues
from django_mysqlqueue.service import (
    audit,
    coalescing,
    debouncing,
    delivery_events,
    heartbeats,
    job_messages,
    job_results,
    leasing,
    retention,
    rollups,
    sequencing,
    slots,
)
from django_mysqlqueue.service.retention import Orphans
from django_mysqlqueue.sql.session import Session


class Pruned(NamedTuple):
    """The result of a step."""

    kind: str
    """A key of ``KINDS``, or ``ENDED_JOBS``."""
    rows: int
    """How many rows it has deleted, or would delete; or how many jobs it has ended, or would end."""
    orphans: tuple[Orphans, ...] = ()
    """See ``retention.Collected``."""


@dataclass(slots=True)
class Search:
    """A search for jobs to end that takes several rounds, because there may be very many results."""

    after: job_messages.ResultPosition | None = None
    """Where the next round continues; None: at the start."""
    has_begun: bool = False
    """Whether a round has begun. The first one begins at a random place, so that searches which end with their
    processes, again and again, do not all look at the same results."""


def prune(using: str, *, dry_run: bool = False, search: Search | None = None) -> Iterator[Pruned]:
    """Delete everything that is no longer needed, and yield the result of each step.

    Each step looks at a bounded number of rows, and deletes those that nobody needs in a short transaction. If it is
    interrupted, the next call does the rest.

    ``dry_run``: if True, only count. Positions of partitions are not counted: they go after the messages. ``search``:
    the search for jobs to end that this round continues; None: it reads the results of all jobs.
    """
    for step in retention.steps(using, dry_run=dry_run):
        yield Pruned("messages", step.messages, step.orphans)
        if step.offsets_rows:
            yield Pruned("partition_positions", step.offsets_rows)
    for kind, (delete, count) in _HOW.items():
        for rows in (count(using),) if dry_run else delete(using):
            yield Pruned(kind, rows)
    # Last: if this takes long, or fails, the rows are deleted nevertheless.
    for rows in _end_jobs(using, search, dry_run=dry_run):
        yield Pruned(ENDED_JOBS, rows)


FEW = 100
"""Number of rows of a step below which the rest is left to the next round. All tables grow while they are pruned: a
round that continues until there is nothing left would never reach the next table, nor its end."""


def _until_few(collect: Callable[[str], int], using: str) -> Iterator[int]:
    """Call a function that deletes some of the oldest rows, as long as it finds many."""
    rows = FEW
    while rows >= FEW:
        rows = collect(using)
        yield rows


def _through(collect: Callable[..., tuple[int, Any]], using: str) -> Iterator[int]:
    """Call a function that goes through a table by its primary key."""
    after: Any = None
    while True:
        rows, after = collect(using, after=after)
        yield rows
        if after is None:
            break


def _count(outdated: Callable[[Session], tuple[str, tuple[object, ...]]], using: str) -> int:
    session = Session(using)
    rows, parameters = outdated(session)
    return int(session.one(f"SELECT COUNT(*) FROM {rows}", parameters)[0])


def _left_leases(using: str) -> int:
    return sum(_through(partial(leasing.collect, dry_run=True), using))


def forget_unreferenced(using: str) -> None:
    """Delete the rows of coalesce keys, debounced messages and limits that no message needs any more."""
    for kind in ("coalesce_keys", "debounced", "slots"):
        for _rows in _HOW[kind][0](using):
            pass


IDLE_STEPS = 4
"""Number of steps that end no job after which the search is left to the next round."""


def _end_jobs(using: str, search: Search | None, *, dry_run: bool) -> Iterator[int]:
    """End the jobs whose messages can no longer run, if this process has queues of jobs."""
    if not job_queues.topics():
        return
    if search and not search.has_begun:
        search.after, search.has_begun = job_messages.random_place(using), True
    after = search.after if search else None
    idle = 0
    while not (search and idle == IDLE_STEPS):
        rows, _, after = job_messages.end_some(using, after=after, dry_run=dry_run)
        idle += not rows
        if search:
            search.after = after
        yield rows
        if after is None:
            break


_HOW: dict[str, tuple[Callable[[str], Iterator[int]], Callable[[str], int]]] = {
    "heartbeats": (partial(_until_few, heartbeats.forget_old), partial(_count, heartbeats.outdated)),
    # After the heartbeats, which protect leases and slots.
    "leases": (partial(_through, leasing.collect), _left_leases),
    "coalesce_keys": (partial(_through, coalescing.collect), partial(_count, coalescing.outdated)),
    "debounced": (partial(_through, debouncing.collect), partial(_count, debouncing.outdated)),
    "slots": (partial(_until_few, slots.collect), partial(_count, slots.outdated)),
    "delivery_events": (partial(_until_few, delivery_events.collect), partial(_count, delivery_events.outdated)),
    "rollups": (partial(_until_few, rollups.collect), partial(_count, rollups.outdated)),
    "operations": (partial(_until_few, audit.collect), partial(_count, audit.outdated)),
    "log_marks": (partial(_until_few, sequencing.collect_marks), partial(_count, sequencing.outdated_marks)),
    "job_results": (partial(_until_few, job_results.collect), partial(_count, job_results.outdated)),
}
"""How rows of a kind are deleted, and counted. The results of jobs take the stages of their chains with them."""


ENDED_JOBS = "ended_jobs"
"""The kind of the steps that delete nothing: they end jobs whose messages can no longer run."""
KINDS = {
    "messages": "message",
    "partition_positions": "partition position",
    "heartbeats": "old heartbeat",
    "leases": "lease",
    "coalesce_keys": "coalesce key",
    "debounced": "debounced message row",
    "slots": "slot",
    "delivery_events": "delivery event",
    "rollups": "rollup",
    "operations": "audit log row",
    "log_marks": "log mark",
    "job_results": "job result",
}
"""The kinds of rows that ``prune`` deletes, each with its noun."""

"""Read the data of the checks of recurring schedules. Runs in the main process of the soak test."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from django_mysqlqueue import operations
from django_mysqlqueue.models import Schedule
from django_mysqlqueue.names.ids import RUN_PREFIX, tick_of
from soak import records, schedule_plan
from soak.evidence import rows
from soak.job_facts import Result
from soak.schedule_checker import Row, ScheduleEvidence

PATIENCE = 60.0
"""Seconds within which each schedule must have decided another tick after the disturbances."""
NOW = "SELECT CAST(UNIX_TIMESTAMP(NOW(3)) * 1000 AS SIGNED)"


def read_rows() -> dict[str, Row]:
    """Return the rows of all schedules."""
    found = Schedule.objects.using(schedule_plan.HOME)
    columns = ("name", "registered_at", "last_tick", "last_run", "skipped")
    return {name: Row(*values) for name, *values in found.values_list(*columns)}


class Ending:
    """Wait until each schedule has decided a tick after the disturbances, then pause all: the queue is to drain."""

    def __init__(self) -> None:
        self.settled_at = int(rows(NOW)[0][0])
        self._until = time.monotonic() + PATIENCE

    def is_over(self) -> bool:
        """Return whether they are paused."""
        found = read_rows()
        is_late = time.monotonic() > self._until
        if not is_late and any(row.last_tick < self.settled_at for row in found.values()):
            return False
        for name in found:
            operations.pause_recurring(name, actor="soak", using=schedule_plan.HOME)
        return True


def gather(
    folder: Path, results: Mapping[str, Result], settled_at: int, moments: Sequence[Mapping[str, Row]]
) -> ScheduleEvidence:
    published: dict[str, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    mine = "SELECT message_id, created_at FROM soak_published WHERE message_id LIKE %s AND original_id = ''"
    for message_id, at in rows(mine, [f"{RUN_PREFIX}%"]):
        published[_schedule(message_id)][tick_of(message_id)].append(int(at))
    by_tick: dict[str, dict[int, Result]] = defaultdict(dict)
    for job, result in results.items():
        if tick_of(job):
            by_tick[_schedule(job)][tick_of(job)] = result
    handled: dict[str, set[int]] = defaultdict(set)
    for step in records.steps(records.group_file(folder, schedule_plan.GROUP)):
        if step.verb == records.DONE:
            handled[_schedule(step.message_id)].add(tick_of(step.message_id))
    return ScheduleEvidence(read_rows(), published, by_tick, handled, settled_at, moments)


def _schedule(message_id: str) -> str:
    return message_id.removeprefix(RUN_PREFIX).rpartition(":")[0]

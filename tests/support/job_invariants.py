"""What holds of the results of jobs and their messages at any moment.

Each function yields what is broken, one sentence each.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from django_mysqlqueue.models import JobResult, JobStage
from tests.support import invariants
from tests.support.internals import JOB_GROUP, JOB_PREFIX, GroupRef
from tests.support.tables import Tables, Waiting


def contradictions(tables: Tables, results: Iterable[JobResult], stages: Iterable[JobStage]) -> Iterator[str]:
    """Jobs that have not ended, but whose messages will not be delivered; or before the stage before them has ended.

    Args:
        tables: the queue's tables.
        results: the results that have not ended, at the same moment.
        stages: the stages before theirs.
    """
    live = set()
    for message in invariants.messages(tables):
        ref = GroupRef(JOB_GROUP, message.topic)
        if ref not in tables.groups or message.failed_group:
            continue
        if isinstance(message, Waiting) or not invariants.is_settled(tables, ref, message):
            live.add((message.topic, message.original_id or message.id))
    remaining = {row.id: row.remaining for row in stages}
    for row in results:
        is_live = (f"{JOB_PREFIX}{row.queue_name}", row.id) in live
        waits = bool(row.stage) and remaining.get(stage_before(row.stage), 0) > 0
        if waits and (is_live or row.status != JobResult.Status.READY):
            yield f"{row.id} of the stage {row.stage} is {row.status}, but the stage before it has not ended"
        if not waits and not is_live:
            yield f"{row.id} is {row.status}, but its message will not be delivered"


def stage_before(stage: str) -> str:
    """The id of the stage before one."""
    chain, _, place = stage.rpartition(":")
    return f"{chain}:{int(place) - 1:04}"


def miscounted(results: Iterable[JobResult], stages: Iterable[JobStage]) -> Iterator[str]:
    """Stages whose count is not the number of their jobs that are not SUCCESSFUL.

    Also jobs that have not failed, although one of an earlier stage has; and jobs that have failed for that reason,
    although none of those has.

    Args:
        results: all results, at the same moment.
        stages: all stages.
    """
    of_stages: dict[str, list[JobResult]] = {}
    for row in results:
        if row.stage:
            of_stages.setdefault(row.stage, []).append(row)
    for stage in stages:
        jobs = of_stages.get(stage.id, [])
        left = sum(row.status != JobResult.Status.SUCCESSFUL for row in jobs)
        if (stage.remaining, stage.kept) != (left, len(jobs)):
            yield f"{stage.id}: {left} of {len(jobs)} jobs remain, but {stage.remaining} and {stage.kept} are stored"
    for name, jobs in of_stages.items():
        before = [row for one in _earlier(name) for row in of_stages.get(one, [])]
        has_failed = any(row.status == JobResult.Status.FAILED for row in before)
        for row in jobs:
            if has_failed and row.status != JobResult.Status.FAILED:
                yield f"{row.id} of the stage {name} is {row.status}, although an earlier job has failed"
            last = (row.errors.split("\n")[:-1] or [""])[-1]
            if row.status == JobResult.Status.FAILED and "EarlierJobFailed" in last and not has_failed:
                yield f"{row.id} of the stage {name} has failed, although no earlier job has"


def _earlier(stage: str) -> Iterator[str]:
    chain, _, place = stage.rpartition(":")
    return (f"{chain}:{number:04}" for number in range(int(place)))

"""Each invariant of the stages of chains can fail. Those of messages and results are tested with the soak's jobs."""

from __future__ import annotations

import pytest

from django_mysqlqueue.models import JobResult, JobStage
from tests.support import job_invariants
from tests.support.internals import job_rows

pytestmark = pytest.mark.any_engine

EARLIER = job_rows.error_line(f"{job_rows.EXCEPTIONS}.EarlierJobFailed", "")


def found(*stages, remaining, kept=None, error=""):
    """What is broken in a chain with the statuses of the jobs of each stage."""
    rows = [
        JobResult(id=f"{place}.{number}", stage=f"c:{place:04}", status=status, errors=error if place else "")
        for place, stage in enumerate(stages)
        for number, status in enumerate(stage)
    ]
    sizes = kept or [len(stage) for stage in stages]
    counts = [JobStage(id=f"c:{place:04}", remaining=left, kept=sizes[place]) for place, left in enumerate(remaining)]
    return list(job_invariants.miscounted(rows, counts))


def test_counts():
    assert not found(["SUCCESSFUL", "RUNNING"], ["READY"], remaining=[1, 1])
    for remaining in ([2, 1], [0, 1], [1, 0]):
        assert len(found(["SUCCESSFUL", "RUNNING"], ["READY"], remaining=remaining)) == 1
    assert len(found(["SUCCESSFUL", "RUNNING"], ["READY"], remaining=[1, 1], kept=[1, 1])) == 1


def test_after_a_failure():
    assert not found(["FAILED", "RUNNING"], ["FAILED"], ["FAILED"], remaining=[2, 1, 1], error=EARLIER)
    for status in ("READY", "RUNNING"):
        assert len(found(["FAILED"], ["FAILED"], [status], remaining=[1, 1, 1], error=EARLIER)) == 1
    assert len(found(["READY"], ["FAILED"], remaining=[1, 1], error=EARLIER)) == 1
    assert not found(["READY"], ["FAILED"], remaining=[1, 1]), "it was cancelled"

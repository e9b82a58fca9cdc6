"""Read the data of the checks of jobs from the database. Runs in the main process of the soak test."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import NamedTuple

from django_mysqlqueue.models import JobResult, JobStage, OutboxMessage
from django_mysqlqueue.service.job_rows import lines
from django_mysqlqueue.service.job_stages import job_id
from soak import job_plan, records, schedule_plan
from soak.evidence import rows
from soak.facts import Trouble, Verdict, verdict
from soak.job_facts import Enqueued, JobEvidence, Result, Stage
from tests.support.job_invariants import contradictions, stage_before
from tests.support.tables import Tables

TABLES = (
    """
    CREATE TABLE soak_jobs (
        token VARCHAR(100) CHARACTER SET ascii PRIMARY KEY, job VARCHAR(100) CHARACTER SET ascii NOT NULL,
        kind VARCHAR(20) NOT NULL, belongs_to VARCHAR(100) CHARACTER SET ascii NOT NULL, stage INT NOT NULL,
        INDEX (belongs_to)
    )
    """,
    """
    CREATE TABLE soak_job_effects (
        id BIGINT AUTO_INCREMENT PRIMARY KEY, job VARCHAR(100) CHARACTER SET ascii NOT NULL,
        token VARCHAR(100) CHARACTER SET ascii NOT NULL
    )
    """,
    """
    CREATE TABLE soak_job_cancels (
        id BIGINT AUTO_INCREMENT PRIMARY KEY, job VARCHAR(100) CHARACTER SET ascii NOT NULL, found VARCHAR(20) NOT NULL
    )
    """,
    """
    CREATE TABLE soak_published (
        id BIGINT AUTO_INCREMENT PRIMARY KEY, topic VARCHAR(255) NOT NULL, message_id VARCHAR(255) NOT NULL,
        original_id VARCHAR(255) NOT NULL, created_at BIGINT NOT NULL, deliver_at BIGINT NOT NULL
    )
    """,
    # The log drops duplicates, so only the outbox tells what was published twice.
    f"""
    CREATE TRIGGER soak_published AFTER INSERT ON {OutboxMessage._meta.db_table} FOR EACH ROW
        INSERT INTO soak_published (topic, message_id, original_id, created_at, deliver_at)
        SELECT NEW.topic, NEW.id, NEW.original_id, NEW.created_at, NEW.deliver_at FROM DUAL
        WHERE NEW.topic LIKE 'jobs.%' OR NEW.topic LIKE '{schedule_plan.PUBLISHED}'
    """,
)


def gather(folder: Path, troubles: Sequence[Trouble]) -> JobEvidence:
    cancelled: dict[str, list[str]] = defaultdict(list)
    for job, found in rows("SELECT job, found FROM soak_job_cancels ORDER BY id"):
        cancelled[job].append(found)
    effects = rows("SELECT job, COUNT(*) FROM soak_job_effects GROUP BY job")
    published = rows("SELECT message_id, original_id, deliver_at FROM soak_published WHERE topic LIKE 'jobs.%%'", [])
    return JobEvidence(
        ledger=[
            Enqueued(token, job, kind, of, int(stage))
            for token, job, kind, of, stage in rows("SELECT token, job, kind, belongs_to, stage FROM soak_jobs")
        ],
        results={row.id: _result(row) for row in JobResult.objects.all()},
        stages={
            row.id: Stage(row.id, row.remaining, row.kept, [job_id(row.id, number) for number in range(row.size)])
            for row in JobStage.objects.all()
        },
        effects={job: int(count) for job, count in effects},
        published=Counter(message for message, original, _ in published if not original),
        redriven=Counter(original for _, original, at in published if original and not at),
        moved=Counter(original for _, original, at in published if original and at),
        cancelled=cancelled,
        cancelled_at={step.message_id: step.at for step in records.steps(records.cancels_file(folder))},
        steps=records.steps(records.group_file(folder, job_plan.GROUP)),
        transactions=records.transactions(records.producers_file(folder)),
        troubles=troubles,
    )


def _result(row: JobResult) -> Result:
    errors = [json.loads(line) for line in lines(row.errors)]
    return Result(
        job=row.id,
        kind=row.task_path.rpartition(".")[2],
        status=row.status,
        errors=[(one["exception_class_path"], one["traceback"]) for one in errors],
        workers=lines(row.worker_ids),
        started_at=row.started_at,
        finished_at=row.finished_at,
        value=json.loads(row.return_value) if row.return_value else None,
        stage=row.stage,
        enqueued_at=row.enqueued_at,
    )


# -- during the run -----------------------------------------------------------


class JobRows(NamedTuple):
    """The rows of jobs at one moment."""

    results: Sequence[JobResult]
    """The results that have not ended."""
    stages: Sequence[JobStage]
    """The stages before theirs."""
    cancelled: Collection[str] = ()
    """The ids of the jobs that ``cancel_job()`` has ended, whose scheduled messages were deleted."""


class JobMoments:
    """Check at each moment that no result contradicts its message."""

    def __init__(self) -> None:
        self._count = self._jobs = 0
        self._violations: list[str] = []

    @staticmethod
    def read() -> JobRows:
        """Read the rows in the open transaction."""
        fields = ("id", "queue_name", "status", "stage")
        found = list(JobResult.objects.filter(status__in=("READY", "RUNNING")).only(*fields))
        stages = JobStage.objects.filter(id__in={stage_before(row.stage) for row in found if row.stage})
        cancelled = rows("SELECT job FROM soak_job_cancels WHERE found = %s", [records.CANCELLED])
        return JobRows(found, list(stages), {job for (job,) in cancelled})

    def add(self, tables: Tables, found: JobRows) -> None:
        self._count += 1
        self._jobs += len(found.results)
        broken = contradictions(tables, found.results, found.stages)
        self._violations += [f"{one} (moment {self._count})" for one in broken]

    def verdict(self) -> Verdict:
        """Return whether every job that had not ended was to be delivered, or waited for an earlier stage."""
        told = f"{self._count} moments, {self._jobs} results that had not ended"
        return verdict("jobs: no result contradicts its message", told, self._violations)

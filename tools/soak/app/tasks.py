"""The tasks. The token of a job decides what its task does."""

from __future__ import annotations

import asyncio
import contextlib
import time
import zlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from django.db import connection

from django_mysqlqueue.tasks import JobCancelled, JobContext, RetryLater, job, recurring
from soak import job_plan, plan, records, schedule_plan
from soak.app import traps
from soak.app.subscribers import FOLDER
from soak.job_facts import ASKED, EARLIER, LOST

if TYPE_CHECKING:
    # The frameworks' declarations refuse a task whose context is a ``JobContext``.
    def task(**options: Any) -> Callable[[Callable[..., Any]], Any]: ...
else:
    try:
        from django.tasks import task
    except ImportError:
        from django_tasks import task

INSERT_EFFECT = "INSERT INTO soak_job_effects (job, token) VALUES (%s, %s)"
STEP = 0.1
"""Seconds between two looks of a patient job at the request to stop."""


class Planned(Exception):
    """A planned failure, which is retried."""


class Refused(Exception):
    """A planned failure, which is not retried."""


@contextlib.contextmanager
def called(context: JobContext, token: str) -> Iterator[None]:
    """Record that the task starts, and how it ends."""
    note(records.STARTED, context, token)
    try:
        yield
    except BaseException:
        note(records.FAILED, context, token)
        raise
    note(records.DONE, context, token)


def note(verb: str, context: JobContext, token: str) -> None:
    step = records.Step(verb, context.task_result.id, token, 0, context.attempt, records.now(), records.me())
    records.write(records.group_file(FOLDER, job_plan.GROUP), [step])


def act(context: JobContext, kind: str, token: str) -> None:
    """Raise what the plan says."""
    failures = [one for one in context.task_result.errors if one.exception_class_path not in (LOST, EARLIER)]
    match job_plan.fate(kind, token):
        case job_plan.POISON:
            raise Planned("always")
        case job_plan.REFUSED:
            raise Refused("as planned")
        case job_plan.MENDED if len(failures) < job_plan.MAX_ATTEMPTS:
            raise Planned("until it is redriven")
        case job_plan.FLAKY if not any(one.exception_class_path.endswith("Planned") for one in failures):
            raise Planned("once")
        case job_plan.ASKING if not any(one.exception_class_path == ASKED for one in failures):
            raise RetryLater(job_plan.wait(token), reason="as planned")
        case job_plan.WAITING if _is_young(context):
            raise RetryLater(job_plan.wait(token), reason="as planned", counts=False)
        case job_plan.CONTINUING if count_effects(context) == 1:
            context.retry(job_plan.wait(token), reason="as planned")


def write(context: JobContext, token: str) -> None:
    """Leave the effect of an atomic job: a row. No constraint prevents a second one."""
    with connection.cursor() as cursor:
        cursor.execute(INSERT_EFFECT, [context.task_result.id, token])
    traps.come_by("job")


def _is_young(context: JobContext) -> bool:
    """Return whether a job that waits asks for another call."""
    at = context.task_result.enqueued_at
    return at is not None and time.time() < at.timestamp() + job_plan.WAITS_FOR


def count_effects(context: JobContext) -> int:
    """Return how many effects the job has left, with that of this call."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT COUNT(*) FROM soak_job_effects WHERE job = %s", [context.task_result.id])
        (number,) = cursor.fetchone()
    return int(number)


def look_back(context: JobContext, token: str) -> None:
    """Check that the jobs of the stage before have succeeded, and that their results are here."""
    chain, _, place = token.partition("/")
    stage = int(place.partition(".")[0]) if place else 0
    before = context.previous_results()
    sound = bool(before) == (stage > 0) and all(
        one.status == "SUCCESSFUL" and str((one.return_value or {}).get("token")).startswith(f"{chain}/{stage - 1}.")
        for one in before
    )
    if not sound:
        note(records.WRONG, context, token)


@task(takes_context=True)
@job(reject_on=Refused)
def atomic(context: JobContext, token: str) -> dict[str, Any]:
    with called(context, token):
        write(context, token)
        look_back(context, token)
        if job_plan.is_slow(token):
            time.sleep(plan.SLOW)
        act(context, job_plan.ATOMIC, token)
    return {"token": token}


@task(takes_context=True, queue_name="bulk")
@job(atomic=False, reject_on=Refused)
def plain(context: JobContext, token: str) -> dict[str, Any]:
    with called(context, token):
        if job_plan.is_slow(token):
            time.sleep(plan.SLOW)
        act(context, job_plan.PLAIN, token)
    return {"token": token}


@task(takes_context=True, queue_name="bulk")
@job(reject_on=Refused, timeout=30)
async def asynchronous(context: JobContext, token: str) -> dict[str, Any]:
    with called(context, token):
        await asyncio.sleep(plan.SLOW if job_plan.is_slow(token) else 0)
        act(context, job_plan.ASYNC, token)
    return {"token": token}


@task(takes_context=True)
@job(reject_on=Refused)
def patient(context: JobContext, token: str) -> dict[str, Any]:
    with called(context, token):
        write(context, token)
        for number in range(round(job_plan.PATIENCE / STEP)):
            context.progress(number, job_plan.PATIENCE / STEP)
            if context.cancelled:
                raise JobCancelled
            time.sleep(STEP)
        act(context, job_plan.PATIENT, token)
    return {"token": token}


@task(takes_context=True)
@job(unique="until_started")
def unique(context: JobContext, of: str) -> dict[str, Any]:
    """Return the tokens of the calls of ``enqueue()`` that it sees."""
    with called(context, of):
        with connection.cursor() as cursor:
            cursor.execute("SELECT token FROM soak_jobs WHERE belongs_to = %s", [of])
            tokens = [str(row[0]) for row in cursor.fetchall()]
        write(context, of)
        act(context, job_plan.UNIQUE, of)
    return {"token": of, "saw": tokens}


# -- of schedules -------------------------------------------------------------


@task(takes_context=True)
@job()
def on_time(context: JobContext) -> dict[str, Any]:
    token = context.task_result.id
    with called(context, token):
        write(context, token)
    return {"token": token}


@task(takes_context=True)
@job(atomic=False)
def slowly_on_time(context: JobContext) -> dict[str, Any]:
    """Last longer than an interval, sometimes."""
    token = context.task_result.id
    with called(context, token):
        time.sleep(zlib.crc32(token.encode()) / 2**32 * schedule_plan.LONGEST)
    return {"token": token}


for one, function in (
    (schedule_plan.EVERY_TICK, on_time),
    (schedule_plan.NEWEST_TICK, on_time),
    (schedule_plan.ONE_AT_A_TIME, slowly_on_time),
):
    recurring(every=one.every, name=one.name, catch_up=one.catch_up, overlap=one.overlap)(function)

"""Tasks for tests of jobs."""

from __future__ import annotations

import asyncio
import functools
import os
import signal
import time
from pathlib import Path
from typing import Any

from asgiref.sync import sync_to_async
from django.db import OperationalError, connections, transaction

from django_mysqlqueue.tasks import JobCancelled, RetryLater, job
from tests.app.models import Effect

try:
    from django.tasks import TaskContext, task
except ImportError:
    from django_tasks import TaskContext, task

log: list[Any] = []
DEEP = [functools.reduce(lambda inner, _: [inner], range(100_000), 1)]
"""Arguments that are nested too deeply for Python's JSON."""
database = "default"
"""Where tasks write."""


@task
def add(a, b=1):
    log.append((a, b))
    return a + b


@task(takes_context=True)
def whoami(context: TaskContext):
    log.append(context)
    return {"attempt": context.attempt, "id": context.task_result.id}


@task
def write(number):
    Effect.objects.using(database).create(name="jobs", value=number)
    return number


@task
@job(atomic=False)
def plain(number):
    Effect.objects.using(database).create(name="jobs", value=number)
    return number


@task
def end_transaction(number):
    log.append("end_transaction")
    Effect.objects.using(database).create(name="jobs", value=number)
    with connections[database].cursor() as cursor:
        cursor.execute("ROLLBACK")
    Effect.objects.using(database).create(name="jobs", value=number + 1)


@task
def fail_after_commit(number):
    Effect.objects.using(database).create(name="jobs", value=number)
    transaction.on_commit(lambda: 1 / 0, using=database)


@task
def fail(number=0):
    Effect.objects.using(database).create(name="jobs", value=number)
    raise ValueError(f"no {number}")


@task
def fail_too(number=0):
    raise ValueError(f"no {number}")


@job(max_attempts=3, backoff={"initial": 0.01, "maximum": 0.01})
@task
def fail_thrice():
    log.append("fail_thrice")
    raise KeyError("no")


@task
async def nap(seconds=0.0):
    await asyncio.sleep(seconds)
    return seconds


@task
@job(timeout=0.1)
async def doze():
    await asyncio.sleep(10)


async def awaiting(_):
    """Tests replace it."""


@task
async def attend(number):
    await awaiting(number)
    log.append(number)
    return number


@task
@job(max_attempts=3, backoff={"initial": 0, "maximum": 0})
async def attend_thrice(number):
    await awaiting(number)
    raise ValueError(f"no {number}")


@task(takes_context=True)
@job(max_attempts=5, backoff={"initial": 0, "maximum": 0})
async def follow(context, total):
    """Reports progress, and looks each time whether it is told to stop."""
    log.append(context.attempt)
    for done in range(total):
        context.progress(done, total, f"{done} of {total}")
        await awaiting(done)
        if context.cancelled:
            raise JobCancelled(f"after {done}")
    return {"attempt": context.attempt, "id": context.task_result.id}


waits = []
"""How long the next calls of the tasks below want to wait, in seconds."""


@task(takes_context=True)
def go_on(context, number):
    """Writes, and continues after a wait."""
    Effect.objects.using(database).create(name="jobs", value=number)
    if waits:
        context.retry(waits.pop(0))


@task(takes_context=True)
def until_stopped(context, started, ends):
    """Writes, and continues later if its process stops; it ends when there is a file."""
    Effect.objects.using(database).create(name="jobs", value=1)
    Path(started).touch()
    while not Path(ends).exists():
        if context.stopping:
            context.retry(reason="the process stops")
            return
        time.sleep(0.02)


@task
@job(max_attempts=5)
def ask_later(number):
    """Writes, and asks for another attempt."""
    Effect.objects.using(database).create(name="jobs", value=number)
    if waits:
        raise RetryLater(waits.pop(0), counts=False)


@task
@job(timeout=0.3)
async def attend_briefly(number):
    await asyncio.sleep(3600)


@task(takes_context=True)
async def gather_async(context):
    """Returns the values of the stage before, and what it does itself in the database."""
    results = await sync_to_async(context.previous_results)()
    await Effect.objects.using(database).acreate(name="jobs", value=len(results))
    return [result.return_value for result in results]


@task(takes_context=True)
async def await_file(context, path):
    context.progress(1)
    while not Path(path).exists():
        await asyncio.sleep(0.05)


def hanging(_):
    """Tests replace it."""


@task
@job(atomic=False)
def hang():
    Effect.objects.using(database).create(name="jobs", value=0)
    hanging(None)


@task
def hang_atomic():
    Effect.objects.using(database).create(name="jobs", value=0)
    hanging(None)


@task
@job(atomic=False, max_attempts=2, backoff={"initial": 0, "maximum": 0})
def hang_twice():
    Effect.objects.using(database).create(name="jobs", value=0)
    hanging(None)


@task
@job(atomic=False, max_processing_time=900)
def hang_long():
    hanging(None)


@task
@job(atomic=False, max_processing_time=1)
def hang_briefly():
    hanging(None)


@task
def returns(kind):
    return {"object": object(), "nan": float("nan"), "large": "x" * 2_000_000, "nothing": None, "deep": DEEP}[kind]


@task
def die():
    os.kill(os.getpid(), signal.SIGKILL)


@task
@job(max_attempts=2)
def die_twice():
    os.kill(os.getpid(), signal.SIGKILL)


@task
def echo(value):
    return value.replace("LONE", "\udc80")


@task
@job(max_attempts=2, backoff={"initial": 0.01, "maximum": 0.01})
def fail_with(text):
    raise ValueError(text.replace("LONE", "\udc80"))


@task
@job(max_attempts=20, backoff={"initial": 0.01, "maximum": 0.01})
def fail_often():
    raise KeyError("no")


@task
def deadlock():
    log.append("deadlock")
    raise OperationalError(1213, "Deadlock found when trying to get lock")


@task
@job(max_attempts=2, backoff={"initial": 60, "jitter": 0})
def fail_slowly():
    raise KeyError("no")


@task(takes_context=True)
@job(atomic=False)
def count_to(context, total):
    """Reports progress until it is told to stop, or has ended."""
    for done in range(total):
        context.progress(done, total, f"{done} of {total}")
        if context.cancelled:
            raise JobCancelled(f"after {done}")
        time.sleep(0.05)
    context.progress(total, total)
    return total


@task(takes_context=True)
def report(context, *arguments):
    context.progress(*arguments)
    return context.cancelled


@task
@job(unique="until_started")
def alone(number, **more):
    log.append(number)
    Effect.objects.using(database).create(name="jobs", value=number)
    return number


@task
@job(
    unique="until_started",
    unique_by=lambda number, **more: str(number % 2),
    max_attempts=2,
    backoff={"initial": 60, "jitter": 0},
)
def alone_by_parity(number, **more):
    raise KeyError(number)


@task
@job(expires_in=60, max_attempts=3, backoff={"initial": 45, "jitter": 0})
def perishable(number=0):
    log.append(number)
    if number < 0:
        raise KeyError(number)
    return number


@task(takes_context=True)
def gather(context):
    """Returns the values of the stage before."""
    return [result.return_value for result in context.previous_results()]


@task(takes_context=True)
@job(max_attempts=5, backoff={"initial": 60, "jitter": 0})
def stop_slowly(context):
    assert context.cancelled
    raise KeyError("no")


@task
@job(unique="until_finished", max_attempts=2, backoff={"initial": 60, "jitter": 0})
def single(number, **more):
    log.append(number)
    if number < 0:
        raise KeyError(number)
    return number


@task(takes_context=True)
@job(unique="until_finished", unique_by=lambda number: "")
def single_again(context, number):
    """Enqueues itself; returns the id of the job that it gets."""
    log.append(number)
    return single_again.enqueue(number + 1).id if number < 3 else ""


@task(takes_context=True)
@job(unique="until_started", unique_by=lambda number: "")
def alone_again(context, number):
    """The same."""
    log.append(number)
    return alone_again.enqueue(number + 1).id if number < 3 else ""


@task(takes_context=True)
@job(unique="until_finished")
def single_that_stops(context):
    if context.cancelled:
        raise JobCancelled("stopped")


@task
@job(unique="until_started")
def alone_too(number):
    """Another task with the same arguments."""

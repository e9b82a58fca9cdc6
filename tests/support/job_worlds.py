"""Jobs in every state, for tests of what happens to their results."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple

from django.db.models import F
from django.test import override_settings

from django_mysqlqueue import Message, publish, publish_many
from django_mysqlqueue.exceptions import StaleDelivery
from django_mysqlqueue.models import (
    ConsumerOffset,
    DeliveryState,
    JobResult,
    OutboxMessage,
    QuarantinedMessage,
    QueueMessage,
)
from django_mysqlqueue.names.ids import new_message_id
from django_mysqlqueue.tasks import handlers
from django_mysqlqueue.tasks.backend import _all_or_none
from django_mysqlqueue.tasks.framework import AnyResult, task_backends
from tests.app import jobs
from tests.support.claims import claimant_of
from tests.support.harness import USING, sequence
from tests.support.internals import (
    Action,
    Claimed,
    ClaimRequest,
    Flushed,
    GroupRef,
    JobEnd,
    JobRetry,
    NewResult,
    Session,
    Settlement,
    Want,
    claiming,
    groups,
    job_messages,
    job_results,
    job_retries,
    job_rows,
    job_stages,
    payloads,
    retrying,
    run,
    settling,
    watermarks,
)

BACKEND = "django_mysqlqueue.tasks.MySQLQueueBackend"
TASKS = {"default": {"BACKEND": BACKEND}}
JOBS = GroupRef("jobs", "jobs.default")
WORKER = "worker"
PATH = "tests.app.jobs.add"
ARGUMENTS = '{"args": [1], "kwargs": {}}'


class _Configured:
    """Settings are of the process: threads that override them in turn would restore each other's."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._number = 0
        self._override: override_settings | None = None

    def begin(self) -> None:
        with self._lock:
            self._number += 1
            if self._override is None:
                self._override = override_settings(TASKS=TASKS)
                self._override.enable()

    def end(self) -> None:
        with self._lock:
            self._number -= 1
            if not self._number and self._override is not None:
                self._override.disable()
                self._override = None


_configured = _Configured()


@contextmanager
def configured() -> Iterator[None]:
    """The backend of the queue is the default one, until all threads that need it have ended."""
    _configured.begin()
    try:
        yield
    finally:
        _configured.end()


@configured()
def enqueued(*names: str) -> None:
    """Messages in the log that stand for jobs with their ids; nobody runs them."""
    job_rows.insert(Session(USING), [NewResult(name, "default", "default", PATH, ARGUMENTS, 0, 0, 1) for name in names])
    publish_many(JOBS.topic, [Message(name, PATH, name) for name in names])
    groups.register(USING, JOBS, mode="shared", start="earliest")
    sequence()


@configured()
def scheduled(name: str) -> None:
    """A job that waits in the outbox."""
    job_rows.insert(Session(USING), [NewResult(name, "default", "default", PATH, "{}", 0, 1, 1)])
    publish(JOBS.topic, name, key=PATH, id=name, delay=60)


def set_aside() -> None:
    """The log refuses what is in the outbox."""
    columns = [
        one.attname
        for one in QuarantinedMessage._meta.local_concrete_fields
        if not (one.primary_key or one.generated or one.name in ("reason", "quarantined_at"))
    ]
    waiting = OutboxMessage.objects.using(USING)
    QuarantinedMessage.objects.using(USING).bulk_create(
        QuarantinedMessage(**row, reason="no") for row in waiting.values(*columns)
    )
    waiting.all().delete()


@configured()
def claimed(*names: str) -> dict[str, Claimed]:
    """Jobs that a subscriber has claimed."""
    enqueued(*names)
    rows = QueueMessage.objects.using(USING).filter(topic=JOBS.topic)
    (key,) = set(rows.values_list("partition_key", flat=True))
    watermarks.create_missing(USING, JOBS, [key])
    request = ClaimRequest(claimant_of(JOBS, WORKER, 5, 60_000), [Want(key, look_at=100)], token=claiming.new_token())
    claim = claiming.claim(USING, request)
    bodies = payloads.read(USING, [delivery.offset for delivery in claim.deliveries])
    job_results.begin(USING, WORKER, [body.message_id for body in bodies.values()])
    return {bodies[delivery.offset].message_id: delivery for delivery in claim.deliveries}


def ends(held: dict[str, Claimed]) -> list[Settlement]:
    """One job of each kind of end: the names are those of the ends."""
    error = job_rows.error_line("builtins.ValueError", "no")
    made = {
        "acked": (Action.ACK, JobEnd("acked", 5, 5, "2"), {}),
        "nacked": (Action.NACK, JobEnd("nacked", 5, 5, errors=error), {"is_final": False}),
        "dead": (Action.NACK, JobEnd("dead", 5, 5, errors=error), {"is_final": True}),
        "released": (Action.RELEASE, None, {}),
        "expired": (Action.EXPIRED, None, {}),
    }
    return [
        Settlement(held[name], action, error="no" if job and job.errors else "", job=job, **more)
        for name, (action, job, more) in made.items()
        if name in held
    ]


ENDS = ("acked", "nacked", "dead", "released", "expired")
AFTER = {"acked": "SUCCESSFUL", "nacked": "READY", "dead": "FAILED", "released": "READY", "expired": "FAILED"}


STAGES = ("chain:0000", "chain:0001")
FIRST, SECOND, LATER = "chain:0000:0000", "chain:0000:0001", "chain:0001:0000"
"""The jobs of the chain."""
UNIQUE = "u" * 64


@configured()
def chained() -> dict[str, Claimed]:
    """A chain whose first stage a subscriber has claimed: ``first`` and ``second``, then ``later``."""
    run(
        USING,
        lambda session: job_stages.insert(session, {STAGES[0]: 2, STAGES[1]: 1}),
    )
    held = claimed(FIRST, SECOND)
    JobResult.objects.using(USING).update(stage=STAGES[0])
    later = NewResult(LATER, "default", "default", PATH, ARGUMENTS, 0, 0, 1, stage=STAGES[1])
    job_rows.insert(Session(USING), [later])
    return held


@configured()
def waiting_chain() -> None:
    """The same chain, of which no job has been claimed."""
    run(USING, lambda session: job_stages.insert(session, {STAGES[0]: 2, STAGES[1]: 1}))
    enqueued(FIRST, SECOND)
    JobResult.objects.using(USING).update(stage=STAGES[0])
    job_rows.insert(Session(USING), [NewResult(LATER, "default", "default", PATH, ARGUMENTS, 0, 0, 1, stage=STAGES[1])])


def statuses() -> dict[str, str]:
    """The status of each job, and whether the second stage of the chain has been published."""
    found = dict(JobResult.objects.using(USING).values_list("id", "status"))
    if LATER in found:
        number = OutboxMessage.objects.using(USING).filter(message_id=LATER).count()
        found[LATER] += f", {number + QueueMessage.objects.using(USING).filter(message_id=LATER).count()} messages"
    return found


# -- what is done to them -------------------------------------------------------------


def enqueue(alias: str) -> None:
    """Two jobs."""
    with configured():
        backend = task_backends["default"]
        with _all_or_none([alias]):
            backend._store(alias, {"": [backend._result(jobs.add, [number], {}) for number in range(2)]})


@configured()
def enqueue_chain(alias: str) -> list[list[AnyResult]]:
    """A chain of three jobs."""
    backend = task_backends["default"]
    chain = new_message_id()
    stages = {}
    for place in range(3):
        stage = job_stages.stage_id(chain, place)
        stages[stage] = [backend._result(jobs.add, [place], {}, id=job_stages.job_id(stage, 0))]
    with _all_or_none([alias]):
        backend._store(alias, stages)
    return list(stages.values())


@configured()
def enqueue_unique(alias: str, *, kept: bool = False) -> str:
    """A job that is unique; returns the id of the one that holds its key then.

    ``kept``: whether it holds its key until it has ended.
    """
    row = NewResult(new_message_id(), "default", "default", PATH, ARGUMENTS, 0, 0, 1, UNIQUE, UNIQUE if kept else "")

    def write(session: Session) -> str:
        owner = job_rows.insert_unique(session, [row])[row.id].id
        if owner == row.id:
            publish_many(JOBS.topic, [job_rows.message_of(row)], using=alias)
        return owner

    return run(alias, write)


@configured()
def end_of(alias: str, held: dict[str, Claimed], name: str, *, failed: bool = False) -> Flushed:
    """Writes that a job of a chain has succeeded, or has failed for good."""
    error = job_rows.error_line("builtins.ValueError", "no")
    end = JobEnd(name, 5, 5, "" if failed else "2", error if failed else None, stage=STAGES[0])
    action = Action.NACK if failed else Action.ACK
    settlement = Settlement(held[name], action, error="no" if failed else "", job=end, is_final=failed or None)
    return settling.flush(alias, JOBS, [settlement], max_attempts=None, shared=True)


def hold_keys(*, kept: bool) -> None:
    """Gives each job a unique key of its own, and those that have not ended hold it."""
    for row in JobResult.objects.using(USING).all():
        holds = row.status in ("READY", "RUNNING") and (kept or not row.started_at)
        rows = JobResult.objects.using(USING).filter(id=row.id)
        rows.update(unique_key=row.id if holds else None, kept_key=row.id if kept else "")


def redrive_unique(alias: str, name: str) -> bool:
    """As a redrive of a dead letter does, if no other job holds its key; returns whether it was free."""

    def write(session: Session) -> bool:
        if is_free := bool(job_rows.free_keys(session, {name: UNIQUE})):
            job_results.redriven(session, {name: f"{name} again"})
        return is_free

    return run(alias, write)


class Change(NamedTuple):
    """A change of jobs, in one transaction."""

    setup: Callable[[], dict[str, Claimed]]
    make: Callable[[str, dict[str, Claimed]], object]
    """Takes the alias of the connection, and what was claimed."""
    after: dict[str, str]
    """The statuses after it."""


def _enqueued() -> dict[str, Claimed]:
    enqueued(*ENDS)
    return {}


def _claimed() -> dict[str, Claimed]:
    return claimed(*ENDS)


def _half_done() -> dict[str, Claimed]:
    held = chained()
    end_of(USING, held, FIRST)
    return held


def _failed_chain() -> dict[str, Claimed]:
    held = _half_done()
    end_of(USING, held, SECOND, failed=True)
    return held


def _old_chain() -> dict[str, Claimed]:
    _failed_chain()
    JobResult.objects.using(USING).update(finished_at=1)
    return {}


@configured()
def skipped() -> dict[str, Claimed]:
    """A chain whose first stage was claimed, and then skipped by a seek that was interrupted."""
    held = chained()
    DeliveryState.objects.using(USING).filter(topic=JOBS.topic).delete()
    ConsumerOffset.objects.using(USING).filter(topic=JOBS.topic).update(offset_acked=F("offset_claimed"))
    return held


@configured()
def end_skipped(alias: str) -> int:
    """Ends all jobs whose messages can no longer run."""
    place, number = job_messages.ResultPosition(), 0
    while place is not None:
        ended, _, place = job_messages.end_some(alias, after=place)
        number += ended
    return number


def _ended_as_skipped() -> dict[str, Claimed]:
    held = skipped()
    end_skipped(USING)
    return held


def redriven(alias: str, held: dict[str, Claimed], name: str) -> None:
    """As a redrive of a dead letter does."""
    run(alias, lambda session: job_results.redriven(session, {name: f"{name} again"}))


def insert_redriven(alias: str) -> None:
    """As the claim of redriven messages does whose results were deleted."""
    rows = [NewResult(name, "default", "default", PATH, ARGUMENTS, 0, 0, 1) for name in REDRIVEN]
    run(alias, lambda session: handlers._insert(session, rows, {name: f"{name} again" for name in REDRIVEN}))


def store_started(alias: str, names: Iterable[str]) -> None:
    """Stores that jobs have started."""
    started = [job_rows.StartedJob(name, 5, 6, "{}") for name in names]
    run(alias, lambda session: job_rows.store_started(session, started))


def request_cancel(alias: str, *names: str) -> None:
    """Asks for the end of jobs."""
    run(alias, lambda session: job_results.request_cancel(session, names))


def _ended() -> dict[str, Claimed]:
    held = _claimed()
    flush(USING, held)
    return held


def _ended_beside_one_past_its_time() -> dict[str, Claimed]:
    held = _ended()
    rows = JobResult.objects.using(USING)
    rows.filter(id="dead").update(kept_key=UNIQUE)
    rows.filter(id="nacked").update(unique_key=UNIQUE, kept_key=UNIQUE, unique_since=1, unique_for=1)
    return held


def _old() -> dict[str, Claimed]:
    _ended()
    JobResult.objects.using(USING).filter(finished_at__gt=0).update(finished_at=1)
    return {}


@configured()
def flush(alias: str, held: dict[str, Claimed]) -> Flushed:
    """Writes the end of each job."""
    return settling.flush(alias, JOBS, ends(held), max_attempts=None, shared=True)


def succeed(alias: str) -> None:
    """End a job as the handler of an atomic one does, which fails if it has ended already."""
    with suppress(StaleDelivery):
        run(alias, lambda session: job_results.succeed(session, JobEnd("acked", 7, 7, "2"), StaleDelivery))


SHORT, LONG = 5_000, 7_200_000
"""Waits for the next attempt in milliseconds: in place, and as a copy of the message."""


def _later(held: dict[str, Claimed], name: str, delay_ms: int, **retry: int) -> Settlement:
    end = JobEnd(name, worker_ids="", retry=JobRetry(delay_ms, "later", **retry))
    return Settlement(held[name], Action.SNOOZE, delay_ms, "later", job=end)


@configured()
def wait_here(alias: str, held: dict[str, Claimed], name: str, delay_ms: int) -> int:
    """Lets a job wait as its atomic task does; returns 0 if that is refused."""
    settlement = _later(held, name, delay_ms, retry_since=1)

    def write(session: Session) -> int:
        job_retries.wait_here(alias, settlement, settlement.job)
        return 1

    try:
        return run(alias, write)
    except StaleDelivery:
        return 0


@configured()
def flush_waits(alias: str, held: dict[str, Claimed]) -> Flushed:
    """Writes that one job waits for long after a failure, another one without, and a third for short."""
    error = job_rows.error_line("builtins.ValueError", "no")
    failed = JobEnd("nacked", 5, 5, errors=error, retry=JobRetry(LONG))
    waits = [
        Settlement(held["nacked"], Action.NACK, LONG, "no", job=failed, is_final=False),
        _later(held, "acked", LONG, retry_since=1),
        _later(held, "released", SHORT, retry_since=1),
    ]
    return settling.flush(alias, JOBS, waits, max_attempts=None, shared=True)


def _waiting() -> dict[str, Claimed]:
    held = claimed(*ENDS)
    flush_waits(USING, held)
    return held


@configured()
def retry(alias: str) -> int:
    """Makes all jobs that wait for their next attempts due now."""
    return retrying.make_due(alias, JOBS, actor="test", reset_attempts=True)


def waits() -> dict[str, tuple[str, int, int]]:
    """By job: the status, the number of its messages that are not settled, and that of its copies that wait.

    The result has the id of the last copy, and the copies that wait are those of settled messages.
    """
    rows = {row.id: row for row in JobResult.objects.using(USING).all()}
    waiting = OutboxMessage.objects.using(USING).filter(topic=JOBS.topic, deliver_at__gt=0).exclude(original_id="")
    copies = dict(waiting.values_list("original_id", "message_id"))
    states = DeliveryState.objects.using(USING).filter(topic=JOBS.topic, acked=False)
    offsets = set(states.values_list("message_offset", flat=True))
    messages = dict(QueueMessage.objects.using(USING).filter(topic=JOBS.topic).values_list("message_id", "offset"))
    for job, copy in copies.items():
        assert rows[job].redriven_id == copy
    return {
        job: (row.status, int(messages.get(job) in offsets), int(job in copies)) for job, row in sorted(rows.items())
    }


REDRIVEN = ("one", "two")
CANCELLED = dict.fromkeys(("acked", "dead"), JOBS.topic)
CHANGES: dict[str, Change] = {
    "begin": Change(
        _enqueued, lambda alias, held: job_results.begin(alias, WORKER, ENDS), dict.fromkeys(ENDS, "RUNNING")
    ),
    "flush": Change(_claimed, flush, AFTER),
    "succeed": Change(
        _claimed,
        lambda alias, held: succeed(alias),
        dict.fromkeys(ENDS, "RUNNING") | {"acked": "SUCCESSFUL"},
    ),
    "wait in a task": Change(
        _claimed,
        lambda alias, held: wait_here(alias, held, "acked", SHORT),
        dict.fromkeys(ENDS, "RUNNING") | {"acked": "READY"},
    ),
    "wait for long in a task": Change(
        _claimed,
        lambda alias, held: wait_here(alias, held, "acked", LONG),
        dict.fromkeys(ENDS, "RUNNING") | {"acked": "READY"},
    ),
    "flush waits": Change(
        _claimed,
        flush_waits,
        dict.fromkeys(ENDS, "RUNNING") | dict.fromkeys(("acked", "nacked", "released"), "READY"),
    ),
    "retry": Change(
        _waiting,
        lambda alias, held: retry(alias),
        dict.fromkeys(ENDS, "RUNNING") | dict.fromkeys(("acked", "nacked", "released"), "READY"),
    ),
    "restart": Change(
        _ended,
        lambda alias, held: redriven(alias, held, "dead"),
        AFTER | {"dead": "READY"},
    ),
    "restart a unique job": Change(
        _ended_beside_one_past_its_time,
        lambda alias, held: redrive_unique(alias, "dead"),
        AFTER | {"dead": "READY"},
    ),
    "cancel": Change(
        _enqueued,
        lambda alias, held: run(
            alias, lambda session: job_results.cancel(session, dict.fromkeys(("acked", "dead"), JOBS.topic))
        ),
        dict.fromkeys(ENDS, "READY") | {"acked": "FAILED", "dead": "FAILED"},
    ),
    "request_cancel": Change(
        chained,
        lambda alias, held: request_cancel(alias, FIRST, LATER),
        {FIRST: "RUNNING", SECOND: "RUNNING", LATER: "FAILED, 0 messages"},
    ),
    "end what was skipped": Change(
        skipped,
        lambda alias, held: end_skipped(alias),
        {FIRST: "FAILED", SECOND: "FAILED", LATER: "FAILED, 0 messages"},
    ),
    "begin what was skipped": Change(
        _ended_as_skipped,
        lambda alias, held: job_results.begin(alias, WORKER, (FIRST, SECOND)),
        {FIRST: "RUNNING", SECOND: "RUNNING", LATER: "READY, 0 messages"},
    ),
    "insert redriven": Change(dict, lambda alias, held: insert_redriven(alias), dict.fromkeys(REDRIVEN, "READY")),
    "store_started": Change(_claimed, lambda alias, held: store_started(alias, ENDS), dict.fromkeys(ENDS, "RUNNING")),
    "end a stage": Change(
        _half_done,
        lambda alias, held: end_of(alias, held, SECOND),
        {FIRST: "SUCCESSFUL", SECOND: "SUCCESSFUL", LATER: "READY, 1 messages"},
    ),
    "fail a stage": Change(
        _half_done,
        lambda alias, held: end_of(alias, held, SECOND, failed=True),
        {FIRST: "SUCCESSFUL", SECOND: "FAILED", LATER: "FAILED, 0 messages"},
    ),
    "revive a stage": Change(
        _failed_chain,
        lambda alias, held: redriven(alias, held, SECOND),
        {FIRST: "SUCCESSFUL", SECOND: "READY", LATER: "READY, 0 messages"},
    ),
    "collect a chain": Change(_old_chain, lambda alias, held: job_results.collect(alias), {}),
    "collect": Change(_old, lambda alias, held: job_results.collect(alias), {"nacked": "READY", "released": "READY"}),
}

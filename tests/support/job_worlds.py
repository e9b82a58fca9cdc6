"""Jobs in every state, for tests of what happens to their results."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from django.test import override_settings

from django_mysqlqueue import Message, publish, publish_many
from django_mysqlqueue.models import JobResult, QueueMessage
from django_mysqlqueue.service import claiming, groups, job_results, payloads, settling, watermarks
from django_mysqlqueue.service.claims import Claimant, ClaimRequest, Want
from django_mysqlqueue.service.deliveries import Action, Claimed, Flushed, JobEnd, Settlement
from django_mysqlqueue.service.job_results import NewResult
from django_mysqlqueue.service.refs import GroupRef
from django_mysqlqueue.sql.session import Session, run
from django_mysqlqueue.tasks.backend import _together
from django_mysqlqueue.tasks.framework import task_backends
from tests.app import jobs
from tests.support.harness import USING, sequence

BACKEND = "django_mysqlqueue.tasks.MySQLQueueBackend"
TASKS = {"default": {"BACKEND": BACKEND}}
JOBS = GroupRef("jobs", "jobs.default")
WORKER = "worker"
PATH = "tests.app.jobs.add"


@contextmanager
def configured() -> Iterator[None]:
    """The backend of the queue is the default one."""
    with override_settings(TASKS=TASKS):
        yield


@configured()
def enqueued(*names: str) -> None:
    """Messages in the log that stand for jobs with their ids; nobody runs them."""
    arguments = '{"args": [1], "kwargs": {}}'
    job_results.insert(
        Session(USING), [NewResult(name, "default", "default", PATH, arguments, 0, 0, 1) for name in names]
    )
    publish_many(JOBS.topic, [Message(name, id=name) for name in names])
    groups.register(USING, JOBS, mode="shared", start="earliest")
    sequence()


@configured()
def scheduled(name: str) -> None:
    """A job that waits in the outbox."""
    job_results.insert(Session(USING), [NewResult(name, "default", "default", PATH, "{}", 0, 1, 1)])
    publish(JOBS.topic, name, id=name, delay=60)


@configured()
def claimed(*names: str) -> dict[str, Claimed]:
    """Jobs that a subscriber has claimed."""
    enqueued(*names)
    rows = QueueMessage.objects.using(USING).filter(topic=JOBS.topic)
    (key,) = set(rows.values_list("partition_key", flat=True))
    watermarks.create_missing(USING, JOBS, [key])
    request = ClaimRequest(Claimant(JOBS, WORKER, 5, 60_000), [Want(key, look_at=100)], token=claiming.new_token())
    claim = claiming.claim(USING, request)
    bodies = payloads.read(USING, [delivery.offset for delivery in claim.deliveries])
    job_results.begin(USING, WORKER, [body.message_id for body in bodies.values()])
    return {bodies[delivery.offset].message_id: delivery for delivery in claim.deliveries}


def ends(held: dict[str, Claimed]) -> list[Settlement]:
    """One job of each kind of end: the names are those of the ends."""
    error = job_results.error_line("builtins.ValueError", "no")
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


def statuses() -> dict[str, str]:
    """The status of each job."""
    return dict(JobResult.objects.using(USING).values_list("id", "status"))


# -- what is done to them -------------------------------------------------------------


def enqueue(alias: str) -> None:
    """Two jobs."""
    with configured():
        backend = task_backends["default"]
        with _together(alias):
            backend._store(alias, {JOBS.topic: [backend._result(jobs.add, [number], {}) for number in range(2)]})


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


def _ended() -> dict[str, Claimed]:
    held = _claimed()
    flush(USING, held)
    return held


def _old() -> dict[str, Claimed]:
    _ended()
    JobResult.objects.using(USING).filter(finished_at__gt=0).update(finished_at=1)
    return {}


@configured()
def flush(alias: str, held: dict[str, Claimed]) -> Flushed:
    """Writes the end of each job."""
    return settling.flush(alias, JOBS, ends(held), max_attempts=None, shared=True)


CANCELLED = dict.fromkeys(("acked", "dead"), JOBS.topic)
CHANGES: dict[str, Change] = {
    "begin": Change(
        _enqueued, lambda alias, held: job_results.begin(alias, WORKER, ENDS), dict.fromkeys(ENDS, "RUNNING")
    ),
    "flush": Change(_claimed, flush, AFTER),
    "restart": Change(
        _ended,
        lambda alias, held: run(alias, lambda session: job_results.restart(session, [held["dead"].offset])),
        AFTER | {"dead": "READY"},
    ),
    "cancel": Change(
        _enqueued,
        lambda alias, held: run(
            alias, lambda session: job_results.cancel(session, dict.fromkeys(("acked", "dead"), JOBS.topic))
        ),
        dict.fromkeys(ENDS, "READY") | {"acked": "FAILED", "dead": "FAILED"},
    ),
    "collect": Change(_old, lambda alias, held: job_results.collect(alias), {"nacked": "READY", "released": "READY"}),
}

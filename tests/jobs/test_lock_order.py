"""Transactions that change several jobs take their locks in one order, so that none waits for another in a circle."""

from __future__ import annotations

import threading
from itertools import count

import pytest
from django.db import OperationalError, connection, transaction

from django_mysqlqueue import Message, publish_many
from django_mysqlqueue.models import (
    ConsumerOffset,
    DeliveryState,
    JobResult,
    JobStage,
    OutboxMessage,
    QueueMessage,
    Slots,
)
from django_mysqlqueue.operations import jobs
from django_mysqlqueue.options.delivery_limits import NO_KEY, DeliveryLimits
from tests.support import job_worlds
from tests.support.claims import claimant_of
from tests.support.harness import USING, sequence
from tests.support.internals import (
    Action,
    ClaimRequest,
    Holding,
    JobEnd,
    JobEnds,
    NewResult,
    Returned,
    Session,
    Settlement,
    Want,
    claiming,
    groups,
    job_results,
    job_rows,
    job_stages,
    settling,
    watermarks,
)

pytestmark = [pytest.mark.servers_only, pytest.mark.django_db(transaction=True)]

MOMENT = 0.1
"""Seconds after which a transaction that has not ended waits for the other one."""
X, Y = ([f"{chain}:000{place}" for place in range(3)] for chain in "xy")
"""The stages of two chains."""


@pytest.fixture(autouse=True)
def _backend(db, no_handlers, settings):
    settings.TASKS = job_worlds.TASKS


def job(stage, number=0):
    return job_stages.job_id(stage, number)


def two_chains():
    """Two chains, each of three stages of two jobs, which wait."""
    JobResult.objects.all().delete()
    JobStage.objects.all().delete()
    session = Session(USING)
    for stages in (X, Y):
        job_stages.insert(session, dict.fromkeys(stages, 2))
        names = [(job(stage, number), stage) for stage in stages for number in range(2)]
        job_rows.insert(
            session,
            [
                NewResult(name, "default", "default", job_worlds.PATH, job_worlds.ARGUMENTS, 0, 0, 1, stage=stage)
                for name, stage in names
            ],
        )


def plain(*names, **columns):
    """Jobs in no chain."""
    job_rows.insert(
        Session(USING),
        [NewResult(name, "default", "default", job_worlds.PATH, job_worlds.ARGUMENTS, 0, 0, 1) for name in names],
    )
    JobResult.objects.filter(id__in=names).update(**columns)


def all_old():
    """As ``two_chains``, with a job in no chain; all of them have ended long ago."""
    two_chains()
    plain("a")
    JobResult.objects.update(status="FAILED", finished_at=1)


def half_old():
    """As ``two_chains``, but all results of ``x`` are old except the one because of which the chain has failed."""
    two_chains()
    finish(job(X[0]), "SUCCESSFUL")(Session(USING))
    cancel(job(X[1]))(Session(USING))
    finish(job(X[0], 1), "FAILED")(Session(USING))
    JobResult.objects.filter(finished_at__gt=0).exclude(id=job(X[0], 1)).update(finished_at=1)


def fail(*names):
    return lambda session: job_results.follow(
        session, JobEnds(reasons=dict.fromkeys(names, ("JobExpired", "It expired.")))
    )


def finish(name, status):
    return lambda session: job_results.follow(session, JobEnds([(JobEnd(name, stage=name[:6], errors=""), status)]))


def cancel(*names):
    """As operators do."""
    return lambda session: job_results.request_cancel(session, names, wait=False)


def cancel_waiting(*names):
    return lambda session: job_results.request_cancel(session, names)


# -- with limits: two subscribers, of which one holds jobs -------------------------------------


LIMITS = DeliveryLimits(max_in_flight=10)
held = {}


@job_worlds.configured()
def limited(*names):
    """As ``two_chains``; a subscriber holds jobs, and another one of the first stage of ``x`` waits and has expired."""
    for model in (QueueMessage, OutboxMessage, DeliveryState, ConsumerOffset, Slots):
        model.objects.all().delete()
    two_chains()
    plain(*set(names) - set(JobResult.objects.values_list("id", flat=True)))
    groups.register(USING, job_worlds.JOBS, mode="shared", start="earliest")
    watermarks.create_missing(USING, job_worlds.JOBS, ["a", "b"])
    put("a", *names)
    ids = dict(QueueMessage.objects.values_list("offset", "message_id"))
    held.update({ids[one.offset]: one for one in claim("a", "one")(Session(USING)).deliveries})
    JobResult.objects.filter(id__in=names).update(status="RUNNING", worker_ids="one\n")
    put("a", "takes a slot")
    put("b", "takes another one", job(X[0], 1))
    QueueMessage.objects.filter(message_id=job(X[0], 1)).update(expires_at=1)


def hold(*names):
    return lambda: limited(*names)


def put(partition, *names):
    """Messages in a partition of the log."""
    publish_many(job_worlds.JOBS.topic, [Message(1, id=name) for name in names])
    OutboxMessage.objects.update(partition_key=partition)
    sequence()


def claim(key, who, *settlements):
    """A claim of a partition, which writes outcomes."""

    def make(session):
        request = ClaimRequest(
            claimant_of(job_worlds.JOBS, who, 5, 60_000),
            [Want(key, look_at=10)],
            claiming.new_token(),
            [settlement() for settlement in settlements],
            holding=Holding(who, LIMITS, 30_000),
            passes=True,
        )
        return claiming._claim(session, request)

    return make


def success(name):
    stage = name.rpartition(":")[0]
    return lambda: Settlement(held[name], Action.ACK, job=JobEnd(name, 5, 5, "2", stage=stage))


def release(name):
    return lambda: Settlement(held[name], Action.RELEASE)


def flush(*settlements):
    """It returns a slot, too."""

    def write(session):
        made = [settlement() for settlement in settlements]
        holding = Holding("one", LIMITS, 30_000, {NO_KEY: 0}, {NO_KEY: 1}, returned={NO_KEY: Returned(1, 1)})
        settling.flush(USING, job_worlds.JOBS, made, max_attempts=None, shared=True, holding=holding)

    return write


PAIRS = {
    "flush the end of a job, pass one of its stage": (
        hold(job(X[0])),
        flush(success(job(X[0]))),
        claim("b", "two"),
    ),
    "claim with the end of a job, pass one of its stage": (
        hold(job(X[0])),
        claim("a", "one", success(job(X[0]))),
        claim("b", "two"),
    ),
    "release a job, pass one of the stage before": (hold(job(X[1])), flush(release(job(X[1]))), claim("b", "two")),
    "flush the end of a job and release another one, cancel both": (
        hold(job(X[0]), job(Y[0])),
        flush(success(job(X[0])), release(job(Y[0]))),
        cancel_waiting(job(X[0]), job(Y[0])),
    ),
    "flush the ends of a job in no chain and of one in a chain, cancel both": (
        hold("z", job(X[0])),
        flush(success("z"), success(job(X[0]))),
        cancel_waiting("z", job(X[0])),
    ),
    "release a job in no chain and one in a chain, cancel both": (
        hold("z", job(X[0])),
        claim("a", "one", release("z"), release(job(X[0]))),
        cancel_waiting("z", job(X[0])),
    ),
    "collect a job in no chain and those of chains, cancel some": (
        all_old,
        lambda session: job_results.collect(USING),
        cancel_waiting("a", job(X[0]), job(Y[1])),
    ),
    "cancel two stages, fail the first": (two_chains, cancel(job(X[0]), job(X[1])), finish(job(X[0], 1), "FAILED")),
    "cancel three stages, cancel the first": (
        two_chains,
        cancel_waiting(job(X[2]), job(X[0]), job(X[1])),
        cancel(job(X[0], 1)),
    ),
    "cancel two stages, end the first": (two_chains, cancel(job(X[0]), job(X[1])), finish(job(X[0], 1), "SUCCESSFUL")),
    "cancel two stages, twice": (
        two_chains,
        cancel_waiting(job(X[0]), job(X[1])),
        cancel_waiting(job(X[1], 1), job(X[0], 1)),
    ),
    "fail jobs of two chains, crosswise": (
        two_chains,
        fail(job(X[0]), job(Y[1])),
        fail(job(Y[0]), job(X[1])),
    ),
    "fail jobs of two chains, cancel them": (
        two_chains,
        fail(job(X[0]), job(Y[0], 1)),
        cancel(job(Y[0]), job(X[1]), job(X[2])),
    ),
    "restart a job, collect the others": (
        half_old,
        lambda session: job_results.restart(session, {job(X[0], 1): ""}),
        lambda session: job_results.collect(USING),
    ),
}


@pytest.mark.parametrize("name", PAIRS)
def test_no_circle(in_thread, name):
    """One stops before each of its statements in turn, while the other one goes as far as it can."""
    setup, *operations = PAIRS[name]
    for first, second in (operations, operations[::-1]):
        for place in count():
            setup()
            errors, reached = meet(in_thread, first, second, place)
            assert not errors, f"statement {place}: {errors}"
            if not reached:
                break


@job_worlds.configured()
def with_a_scheduled_one():
    """As ``two_chains``, but the first stage of ``x`` has ended, and a job of the second one is scheduled."""
    OutboxMessage.objects.all().delete()
    two_chains()
    JobResult.objects.filter(id__in=[job(X[1]), job(X[1], 1)]).update(run_after=10**13)
    ends = [(JobEnd(job(X[0], number), stage=X[0]), "SUCCESSFUL") for number in range(2)]
    job_results.follow(Session(USING), JobEnds(ends))
    assert OutboxMessage.objects.filter(deliver_at__gt=1).count() == 2


def test_operators_cancel_a_scheduled_job_and_one_of_another_chain(in_thread, caplog):
    for place in count():
        with_a_scheduled_one()
        with caplog.at_level("DEBUG"):
            errors, reached = meet(
                in_thread,
                fail(job(Y[0], 1), job(X[1], 1)),
                lambda session: jobs.cancel(USING, [job(X[1]), job(Y[0])], actor="ops"),
                place,
            )
        assert not errors
        assert "transaction.retried" not in caplog.text, f"statement {place}"
        assert set(JobResult.objects.filter(id__in=[job(X[1]), job(Y[0])]).values_list("status")) == {("FAILED",)}
        if not reached:
            break


def meet(in_thread, first, second, place):
    """Returns the errors of both, and whether the first one has so many statements."""
    stopped, go_on, errors, reached = threading.Event(), threading.Event(), [], []
    numbers = count()

    def stop(execute, sql, params, many, context):
        if next(numbers) == place:
            reached.append(sql)
            stopped.set()
            assert go_on.wait(30)
        return execute(sql, params, many, context)

    def run(operation, *wrappers):
        try:
            with transaction.atomic():
                for wrapper in wrappers:
                    connection.execute_wrappers.append(wrapper)
                operation(Session(USING))
        except OperationalError as error:
            errors.append(str(error))
        finally:
            connection.execute_wrappers.clear()
            stopped.set()

    threads = [in_thread(lambda: run(first, stop))]
    assert stopped.wait(30)
    threads.append(in_thread(lambda: run(second)))
    threads[1].join(MOMENT)
    go_on.set()
    for thread in threads:
        thread.join(30)
    return errors, bool(reached)

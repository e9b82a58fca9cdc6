"""A process or a connection ends at any statement: jobs and their results stay true."""

from __future__ import annotations

import pytest
from django.db import connection, connections

from django_mysqlqueue.models import DeliveryState, JobResult, JobStage, OutboxMessage, SubscriberHeartbeat
from django_mysqlqueue.operations import dropping, seeking
from django_mysqlqueue.testing import deliver_all
from tests.app import jobs
from tests.app.models import Effect
from tests.conftest import empty
from tests.crash.crashes import ALIAS, ENDS
from tests.support import job_invariants, job_worlds
from tests.support.harness import USING, Sub
from tests.support.internals import drop_connection, registry
from tests.support.tables import Tables

pytestmark = [pytest.mark.promise("Jobs")]


def at_every_statement(crasher, mode, setup, operation, check):
    """Ends the operation at its first statement, at its second one, and so on, with a new set-up each time."""
    number, stopped = 0, True
    while stopped:
        number += 1
        empty()
        Effect.objects.all().delete()
        world = setup()
        ended = crasher.run(mode, number, lambda world=world: operation(world))
        if connection.vendor == "mysql":
            crasher.release()
        drop_connection(connections[ALIAS])
        try:
            check(world, ended)
        except BaseException as error:
            error.add_note(f"{mode}, statement {number}")
            raise
        stopped = ended.stopped
    return number


@pytest.mark.parametrize("mode", ENDS)
def test_enqueueing(db, crasher, mode):
    """A job is there with its message, or not at all."""

    def check(_, ended):
        count = OutboxMessage.objects.filter(topic=job_worlds.JOBS.topic).count()
        assert JobResult.objects.count() == count
        assert count in (0, 2)

    assert at_every_statement(crasher, mode, lambda: None, lambda _: job_worlds.enqueue(ALIAS), check) > 1


@pytest.mark.parametrize("mode", ENDS)
def test_enqueueing_a_chain(db, crasher, mode):
    """The chain is there as a whole, or not at all."""

    def check(_, ended):
        counts = (
            JobResult.objects.count(),
            JobStage.objects.count(),
            OutboxMessage.objects.filter(topic=job_worlds.JOBS.topic).count(),
        )
        assert counts in ((0, 0, 0), (3, 3, 1))

    assert at_every_statement(crasher, mode, lambda: None, lambda _: job_worlds.enqueue_chain(ALIAS), check) > 1


@pytest.mark.parametrize("mode", ENDS)
def test_enqueueing_a_unique_job(db, crasher, mode):
    """There is one with its message, or none."""

    def check(_, ended):
        assert JobResult.objects.count() == OutboxMessage.objects.filter(topic=job_worlds.JOBS.topic).count() <= 1
        owner = job_worlds.enqueue_unique(USING)
        assert list(JobResult.objects.values_list("id", flat=True)) == [owner]

    assert at_every_statement(crasher, mode, lambda: None, lambda _: job_worlds.enqueue_unique(ALIAS), check) > 1


@pytest.mark.parametrize("mode", ENDS)
def test_enqueueing_a_unique_job_beside_one_past_its_time(db, crasher, mode):
    """Either it holds the key with its message, or the other one still does."""

    def late():
        first = job_worlds.enqueue_unique(USING, kept=True)
        JobResult.objects.update(status="RUNNING", unique_since=1, unique_for=1)
        return first

    def check(first, ended):
        assert JobResult.objects.count() == OutboxMessage.objects.filter(topic=job_worlds.JOBS.topic).count()
        before = JobResult.objects.count()
        (holder,) = JobResult.objects.exclude(unique_key=None).values_list("id", flat=True)
        assert (holder == first) == (before == 1)
        owner = job_worlds.enqueue_unique(USING, kept=True)
        assert owner != first
        assert owner == holder or holder == first
        assert JobResult.objects.count() == 2

    def enqueue(_):
        return job_worlds.enqueue_unique(ALIAS, kept=True)

    assert at_every_statement(crasher, mode, late, enqueue, check) > 1


KEYED = ("begin", "flush", "succeed", "restart", "cancel")


@pytest.mark.parametrize("mode", ENDS)
@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("name", KEYED)
def test_a_key_is_held_as_long_as_its_job_says(db, crasher, name, kept, mode):
    """The transaction that starts or ends a job frees its key: they are never apart."""
    change = job_worlds.CHANGES[name]

    def setup():
        held = change.setup()
        job_worlds.hold_keys(kept=kept)
        return held

    def check(held, ended):
        for _ in range(2):
            rows = JobResult.objects.filter(status__in=("READY", "RUNNING"))
            rows = rows if kept else rows.filter(started_at=0)
            assert set(rows) == set(JobResult.objects.exclude(unique_key=None))
            change.make(ALIAS, held)

    at_every_statement(crasher, mode, setup, lambda held: change.make(ALIAS, held), check)


@pytest.mark.parametrize("mode", ENDS)
@pytest.mark.parametrize("name", job_worlds.CHANGES)
def test_a_change_is_made_or_not(db, crasher, name, mode):
    """Run again, it comes to the same."""
    change = job_worlds.CHANGES[name]

    def setup():
        held = change.setup()
        return held, job_worlds.statuses()

    def check(world, ended):
        held, before = world
        assert job_worlds.statuses() in (before, change.after)
        change.make(ALIAS, held)
        assert job_worlds.statuses() == change.after
        assert JobStage.objects.exists() == any(JobResult.objects.values_list("stage", flat=True))

    at_every_statement(crasher, mode, setup, lambda world: change.make(ALIAS, world[0]), check)


@pytest.mark.parametrize("mode", ENDS)
@pytest.mark.parametrize("how", ["seek", "drop"])
def test_jobs_that_an_operation_skips_end(db, crasher, settings, how, mode):
    """GC ends those that an interrupted one has skipped; run again, it ends all."""
    settings.TASKS = job_worlds.TASKS

    def setup():
        job_worlds.enqueue_chain(USING)
        job_worlds.enqueued("a", "b")

    def operate(alias):
        if how == "drop":
            dropping.drop(alias, job_worlds.JOBS, actor="test")
        elif how == "seek":
            seeking.move(alias, job_worlds.JOBS, seeking.position_of(USING), actor="test")

    def check(_, ended):
        job_worlds.end_skipped(USING)
        rows = JobResult.objects.exclude(status="FAILED")
        assert not list(job_invariants.contradictions(Tables.read(USING), rows, JobStage.objects.all()))
        if ended.stopped:
            operate(USING)
        assert set(JobResult.objects.values_list("status", flat=True)) == {"FAILED"}

    assert at_every_statement(crasher, mode, setup, lambda _: operate(ALIAS), check) > 3


def a_subscriber(monkeypatch):
    """A subscriber that runs the jobs, and ends with the crasher."""
    sub = Sub(registry.handlers()[job_worlds.JOBS], name="first")
    sub.use(ALIAS)
    monkeypatch.setattr(jobs, "database", ALIAS)
    return sub


def turn(world):
    _, sub = world
    sub.step()
    sub.work()
    sub.flush()


def take_over(results, **options):
    """Let another subscriber end the jobs."""
    SubscriberHeartbeat.objects.all().delete()
    DeliveryState.objects.filter(acked=False).update(invisible_until=0)
    deliver_all(raise_exceptions=False, **options)
    for result in results.values():
        result.refresh()


@pytest.mark.parametrize("mode", ENDS)
def test_a_turn_of_a_subscriber(db, crasher, mode, no_handlers, settings, monkeypatch):
    """Whatever ends it: an atomic job leaves its write once, with its result."""
    settings.TASKS = job_worlds.TASKS

    def setup():
        results = {
            "atomic": jobs.write.enqueue(1),
            "plain": jobs.plain.enqueue(2),
            "fails": jobs.fail.enqueue(3),
        }
        return results, a_subscriber(monkeypatch)

    def check(world, ended):
        results, _ = world
        monkeypatch.setattr(jobs, "database", USING)
        for result in results.values():
            result.refresh()
        written = {"atomic": Effect.objects.filter(value=1).count(), "plain": Effect.objects.filter(value=2).count()}
        assert (written["atomic"] == 1) == (results["atomic"].status == "SUCCESSFUL")
        assert results["plain"].status != "SUCCESSFUL" or written["plain"] == 1
        take_over(results)
        assert results["atomic"].status == "SUCCESSFUL"
        assert results["fails"].status == "FAILED"
        if results["plain"].status == "FAILED":
            # Its only attempt has failed, because its own connection has ended.
            assert results["plain"].errors[-1].exception_class_path == "django.db.utils.OperationalError"
        else:
            assert results["plain"].status == "SUCCESSFUL"
        assert Effect.objects.filter(value=1).count() == 1
        least = 1 if results["plain"].status == "SUCCESSFUL" else 0
        assert least <= Effect.objects.filter(value=2).count() <= 2
        assert not Effect.objects.filter(value=3).exists()
        assert [error.exception_class_path for error in results["fails"].errors][-1] == "builtins.ValueError"

    at_every_statement(crasher, mode, setup, turn, check)


LONG_WAITS = {
    "wait for long in a task": ("acked",),
    "flush waits": ("acked", "nacked"),
}


@pytest.mark.parametrize("mode", ENDS)
@pytest.mark.parametrize("name", LONG_WAITS)
def test_a_job_waits_for_long_in_its_row_or_as_a_copy(db, crasher, name, mode):
    """Never in both, never in none, and the result says which."""
    change, moved = job_worlds.CHANGES[name], LONG_WAITS[name]

    def setup():
        held = change.setup()
        return held, job_worlds.waits()

    def check(world, ended):
        held, before = world
        found = job_worlds.waits()
        after = {job: ("READY", 0, 1) if job in moved else found[job] for job in before}
        assert found in (before, after)
        change.make(ALIAS, held)
        assert {job: found for job, found in job_worlds.waits().items() if job in moved} == dict.fromkeys(
            moved, ("READY", 0, 1)
        )

    assert at_every_statement(crasher, mode, setup, lambda world: change.make(ALIAS, world[0]), check) > 1


@pytest.mark.parametrize("mode", ENDS)
def test_a_retry_changes_a_message_with_its_result(db, crasher, mode):
    """Those that wait in place, and those that wait as copies."""
    change = job_worlds.CHANGES["retry"]

    def check(held, ended):
        moved = dict(OutboxMessage.objects.values_list("original_id", "deliver_at"))
        assert set(moved) == {"acked", "nacked"}
        (in_place,) = DeliveryState.objects.filter(delivery_token=0, acked=False).values_list(
            "invisible_until", flat=True
        )
        due = {job: at == 1 for job, at in moved.items()} | {"released": in_place == 0}
        for job, is_due in due.items():
            assert (JobResult.objects.get(id=job).retry_at == 1) == is_due, job
        change.make(ALIAS, held)
        assert set(OutboxMessage.objects.values_list("deliver_at", "failure_count")) == {(1, 0)}
        assert set(JobResult.objects.filter(id__in=due).values_list("retry_at", flat=True)) == {1}

    assert at_every_statement(crasher, mode, change.setup, lambda held: change.make(ALIAS, held), check) > 3


@pytest.mark.parametrize("mode", ENDS)
def test_a_turn_with_jobs_that_ask_for_later_attempts(db, crasher, mode, no_handlers, settings, monkeypatch):
    """Whatever ends it: they run again, and what an atomic one has written is there once for each wait that is."""
    settings.TASKS = job_worlds.TASKS

    def setup():
        jobs.waits[:] = [7200, 5]
        results = {"continued": jobs.go_on.enqueue(1), "raised": jobs.ask_later.enqueue(2)}
        return results, a_subscriber(monkeypatch)

    def check(world, ended):
        results, _ = world
        monkeypatch.setattr(jobs, "database", USING)
        jobs.waits.clear()
        for result in results.values():
            result.refresh()
        waits = JobResult.objects.get(id=results["continued"].id).retry_since > 0
        assert Effect.objects.filter(value=1).count() == waits
        rows = JobResult.objects.exclude(status__in=["FAILED", "SUCCESSFUL"])
        assert not list(job_invariants.contradictions(Tables.read(USING), rows, JobStage.objects.all()))
        take_over(results, advance=7201)
        assert {result.status for result in results.values()} == {"SUCCESSFUL"}
        assert Effect.objects.filter(value=1).count() == 1 + waits
        assert Effect.objects.filter(value=2).count() == 1

    at_every_statement(crasher, mode, setup, turn, check)

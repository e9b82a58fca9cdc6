"""How results end in cases that few meet."""

from __future__ import annotations

import time

import pytest
from django.db import OperationalError, connections, transaction
from django.db.transaction import TransactionManagementError

from django_mysqlqueue import publish
from django_mysqlqueue.exceptions import TransactionMismatch
from django_mysqlqueue.models import DeliveryState, JobResult, OutboxMessage, QueueMessage, SubscriberHeartbeat
from django_mysqlqueue.tasks import exceptions, handlers, job
from django_mysqlqueue.tasks.framework import InvalidTask, task_backends
from django_mysqlqueue.tasks.handlers import Attempt
from django_mysqlqueue.testing import deliver_all
from tests.app import jobs
from tests.app.models import Effect
from tests.support import job_worlds
from tests.support.claims import claimant_of
from tests.support.harness import USING, Sub, expire, sequence
from tests.support.internals import (
    Action,
    ClaimRequest,
    JobEnd,
    JobEnds,
    NewResult,
    Session,
    Settlement,
    Want,
    claiming,
    get_settings,
    job_results,
    job_rows,
    known_topics,
    publishing,
    registry,
    releasing,
    run,
    settling,
)

JOBS = job_worlds.JOBS


@pytest.fixture(autouse=True)
def _backend(db, no_handlers, settings):
    settings.TASKS = job_worlds.TASKS
    jobs.log.clear()


def flush(*settlements):
    return settling.flush(USING, JOBS, settlements, max_attempts=None, shared=True)


def row(name):
    return JobResult.objects.get(id=name)


def errors(name):
    return [error.exception_class for error in task_backends["default"].get_result(name).errors]


# -- the service --------------------------------------------------------------


def test_what_has_ended_is_not_changed():
    """A job that was cancelled while it ran stays so, whatever its attempt comes to."""
    held = job_worlds.claimed("acked", "released")
    JobResult.objects.update(status="FAILED", finished_at=5, errors="", worker_ids="w\n")
    flush(
        Settlement(held["acked"], Action.ACK, job=JobEnd("acked", 7, 7, "2")),
        Settlement(held["released"], Action.RELEASE),
    )
    for name in held:
        assert (row(name).status, row(name).finished_at, row(name).worker_ids) == ("FAILED", 5, "w\n")


@pytest.mark.parametrize("world", [lambda: job_worlds.claimed("a", "b"), job_worlds.chained], ids=["single", "chain"])
@pytest.mark.parametrize("alone", [False, True])
def test_what_is_released_is_ready_again(world, alone):
    """By a flush, and by the last transaction of a process, which locks no slots."""
    held = world()
    assert {row(name).status for name in held} == {"RUNNING"}
    releases = [Settlement(delivery, Action.RELEASE) for delivery in held.values()]
    if alone:
        releasing.release_unfinished(USING, JOBS, releases, max_attempts=5)
    else:
        flush(*releases)
    assert {(row(name).status, row(name).worker_ids) for name in held} == {("READY", "")}


@pytest.mark.parametrize("by", ["", "orker", "other"])
def test_the_workers_of_a_released_job_stay_if_it_was_released_by_another(by):
    """It has run where it was lost; the claim that is undone, or given back, has not started it."""
    held = job_worlds.claimed("a")
    assert row("a").worker_ids == "worker\n"
    flush(Settlement(held["a"]._replace(by=by), Action.RELEASE))
    assert (row("a").status, row("a").worker_ids) == ("READY", "worker\n")


@pytest.mark.parametrize(
    ("end", "status"),
    [
        (JobEnd("", 7, 8, "2"), "SUCCESSFUL"),
        (JobEnd("", 0, 8, "2", progress='{"done": 2}'), "SUCCESSFUL"),
        (JobEnd("", 7, 8, "", "two\n", ""), "FAILED"),
        (JobEnd("", 7, 8, "", "two\n"), "READY"),
        (JobEnd("", attempted_at=8, worker_ids=""), "READY"),
        (JobEnd("", worker_ids="w\n"), "READY"),
        (JobEnd("", worker_ids=""), "READY"),
        (JobEnd(""), "READY"),
    ],
)
@pytest.mark.parametrize(("before", "expected"), [("READY", 1), ("RUNNING", 1), ("FAILED", 0), ("SUCCESSFUL", 0)])
def test_one_end_is_stored_as_several_are(end, status, before, expected):
    """One end has a statement of its own, because it is much faster."""
    names = ("alone", "with", "others")
    new = [NewResult(name, "default", "default", "p", "{}", 0, 0, 1, unique_key=name) for name in names]
    run(USING, lambda session: job_rows.insert(session, new))
    times = {"started_at": 3, "last_attempted_at": 4, "finished_at": 5}
    JobResult.objects.update(status=before, return_value="1", errors="one\n", progress='{"done": 1}', **times)
    alone, *others = [(end._replace(id=name), status) for name in names]
    assert run(USING, lambda session: job_rows.end(session, [alone])) == expected
    assert run(USING, lambda session: job_rows.end(session, others)) == 2 * expected
    rows = list(JobResult.objects.order_by("id").values())
    finished = [values.pop("finished_at") for values in rows]
    assert [values["unique_key"] for values in rows] == ([None] * 3 if expected else [values["id"] for values in rows])
    same = [{**values, "id": "", "unique_key": ""} for values in rows]
    assert same[0] == same[1] == same[2]
    assert {values["status"] for values in rows} == {status if expected else before}
    if expected and status != "READY":
        assert max(finished) - min(finished) < 60_000 < min(finished)
    else:
        assert set(finished) == {0 if expected else 5}


def test_a_stale_outcome_changes_no_result():
    held = job_worlds.claimed("acked")
    DeliveryState.objects.update(delivery_token=5)
    flushed = flush(Settlement(held["acked"], Action.ACK, job=JobEnd("acked", 7, 7, "2")))
    assert len(flushed.stale) == 1
    assert row("acked").status == "RUNNING"


def test_what_the_jobs_transaction_has_written_is_not_written_again():
    held = job_worlds.claimed("acked")
    with transaction.atomic():
        settling.ack_here(USING, held["acked"])
    flush(Settlement(held["acked"], Action.ACK, is_written=True, job=JobEnd("acked", 7, 7, "2")))
    assert row("acked").status == "RUNNING"  # That transaction would have stored it.


def test_an_attempt_without_an_end_leaves_the_job_ready():
    held = job_worlds.claimed("nacked")
    flush(Settlement(held["nacked"], Action.NACK, error="no", is_final=False))
    assert (row("nacked").status, row("nacked").worker_ids) == ("READY", "")


EXPIRED = ("JobExpired", "It expired.")


@pytest.mark.parametrize(
    ("end", "expected"),
    [
        (("SUCCESSFUL", "2", None), ("SUCCESSFUL", [])),
        (("FAILED", "", "no"), ("FAILED", ["no"])),
        (("READY", "", "no"), ("FAILED", ["no", "It expired."])),
        (("READY", "", None), ("FAILED", ["earlier", "It expired."])),
    ],
)
def test_an_attempt_and_a_message_that_ends_without_a_call(end, expected):
    """Of one job, in one transaction: what the attempt has left counts, but the job is not retried."""
    job_worlds.claimed("a")
    before = job_rows.error_line("builtins.ValueError", "earlier")
    JobResult.objects.update(errors="" if end[2] or end[1] else before)
    status, value, error = end
    made = JobEnd("a", 5, 6, value, None if error is None else job_rows.error_line("builtins.ValueError", error))
    run(USING, lambda session: job_results.follow(session, JobEnds([(made, status)], {"a": EXPIRED})))
    found = row("a")
    assert (found.status, found.started_at, found.last_attempted_at) == (expected[0], 5, 6)
    assert [error.traceback for error in task_backends["default"].get_result("a").errors] == expected[1]


def test_a_claim_that_writes_a_failure_and_passes_another_message_of_the_job():
    """It ends, as if this had come in two transactions: then its first message finds it so."""
    held = job_worlds.chained()
    first = job_worlds.FIRST
    publish(JOBS.topic, 1, id="redriven")
    OutboxMessage.objects.update(partition_key=held[first].key)
    sequence()
    QueueMessage.objects.filter(message_id="redriven").update(original_id=first, expires_at=1)
    error = job_rows.error_line("builtins.ValueError", "no")
    end = JobEnd(first, 5, 5, errors=error, stage=job_worlds.STAGES[0])
    nack = Settlement(held[first], Action.NACK, error="no", is_final=False, job=end)
    request = ClaimRequest(
        claimant_of(JOBS, job_worlds.WORKER, 5, 60_000),
        [Want(held[first].key, look_at=100)],
        claiming.new_token(),
        [nack],
        passes=True,
    )
    assert not claiming.claim(USING, request).deliveries
    assert (row(first).status, errors(first)) == ("FAILED", [ValueError, exceptions.JobExpired])
    assert row(job_worlds.LATER).status == "FAILED"


@pytest.mark.parametrize("claimed_before", [True, False])
def test_messages_that_expire(claimed_before, clock):
    """Before they are claimed, or while they wait in a process."""
    run(USING, lambda session: job_rows.insert(session, [NewResult("x", "default", "default", "p", "{}", 0, 0, 1)]))
    publish(JOBS.topic, {}, id="x", expires_in=60)
    worker = Sub(registry.handlers()[JOBS], name="w")
    if claimed_before:
        worker.step()
        assert row("x").status == "RUNNING"
        expire(worker)
    else:
        clock.advance(61)
    worker.settle()
    assert row("x").status == "FAILED"
    assert "JobExpired" in row("x").errors


def test_messages_that_are_superseded():
    rows = [NewResult(name, "default", "default", "p", "{}", 0, 0, 1) for name in "xy"]
    run(USING, lambda session: job_rows.insert(session, rows))
    for name in "xy":
        publish(JOBS.topic, {}, id=name, coalesce="c")
    Sub(registry.handlers()[JOBS], name="w").settle()
    assert "JobSuperseded" in row("x").errors
    assert "JobSuperseded" not in row("y").errors


def test_tracebacks_have_a_limit_and_errors_have_none(monkeypatch):
    """Else failures that are not stored would count as losses."""
    monkeypatch.setattr(job_rows, "MOST_ERRORS", 100)
    first = job_rows.with_error("", "a.B", "x" * 200)
    both = job_rows.with_error(first, "a.B", "y" * 200)
    assert both == first + job_rows.error_line("a.B", "")


@pytest.mark.parametrize("most", [1, 5, None])
@pytest.mark.parametrize(("own", "losses"), [(2, 1), (2, 2), (1, 1), (None, 50)])
def test_the_own_limit_of_a_job_counts_for_lost_subscribers(settings, most, own, losses):
    """The process-wide one decided."""
    settings.MYSQLQUEUE = {"MAX_ATTEMPTS": most}
    settings.TASKS = {"default": job_worlds.TASKS["default"] | {"OPTIONS": {"MAX_ATTEMPTS": own}}}
    result = jobs.add.enqueue(1)
    worker = Sub(registry.handlers()[JOBS], name="first")
    worker.step()
    SubscriberHeartbeat.objects.all().delete()
    DeliveryState.objects.update(invisible_until=0, retry_count=losses)  # As recorded starts leave it.
    worker = Sub(registry.handlers()[JOBS], name="last")
    worker.step()
    worker.work()
    worker.flush()
    if own != losses:
        assert jobs.log == [(1, 1)]
        assert row(result.id).status == "SUCCESSFUL"
        return
    assert jobs.log == []
    assert row(result.id).status == "FAILED"
    assert errors(result.id)[-1] is exceptions.WorkerLost
    number = "1 subscriber was" if losses == 1 else "2 subscribers were"
    text = f"{number} lost during an attempt at the job, in addition to the first loss (max_attempts={own})"
    assert text in row(result.id).errors


def test_the_last_worker_is_the_lost_one():
    job_worlds.enqueued("a")
    for name in ("first", "second", "third"):
        job_results.begin(USING, name, ["a"])
    assert ["'first' was lost" in line for line in job_rows.lines(row("a").errors)] == [True, False]
    assert row("a").worker_ids == "first\nsecond\nthird\n"


def test_jobs_with_different_pasts_begin_together():
    job_worlds.enqueued("new", "newer", "released", "lost", "retried", "ended")
    JobResult.objects.update(progress='{"done": 1}')
    JobResult.objects.filter(id="released").update(started_at=3)
    JobResult.objects.filter(id="lost").update(status="RUNNING", started_at=4, worker_ids="gone\n")
    JobResult.objects.filter(id="retried").update(started_at=5, last_attempted_at=5, worker_ids="w\n", errors="one\n")
    JobResult.objects.filter(id="ended").update(status="FAILED", started_at=6)
    before = dict(JobResult.objects.values_list("id", "started_at"))
    begun = job_results.begin(USING, "w", list(before))
    stored = job_rows.read(Session(USING), before)
    assert begun.rows == {
        name: row._replace(last_attempted_at=begun.rows[name].last_attempted_at) for name, row in stored.items()
    }
    attempted = {name: row.last_attempted_at for name, row in stored.items()}
    assert attempted == dict.fromkeys(stored, begun.now) | {"ended": 0}
    assert {name: found.started_at for name, found in begun.rows.items()} == {
        name: started_at or begun.now for name, started_at in before.items()
    }
    ended = begun.rows.pop("ended")
    assert (ended.status, ended.worker_ids, ended.progress) == ("FAILED", "", '{"done": 1}')
    assert {(found.status, found.progress) for found in begun.rows.values()} == {("RUNNING", "")}
    workers = {name: found.worker_ids for name, found in begun.rows.items()}
    assert workers == {"new": "w\n", "newer": "w\n", "released": "w\n", "lost": "gone\nw\n", "retried": "w\nw\n"}
    assert begun.rows["retried"].errors == "one\n"
    assert "'gone' was lost" in begun.rows["lost"].errors


def test_only_what_has_ended_is_collected(settings):
    settings.MYSQLQUEUE = {"RESULTS_RETENTION": 0}
    job_worlds.enqueued("ready")
    JobResult.objects.update(status="FAILED")
    assert job_results.collect(USING) == 0
    JobResult.objects.update(finished_at=1)
    worker = Sub(registry.handlers()[JOBS], name="w")
    worker.beat()
    for _ in worker.poller.maintenance.round():
        pass
    assert not JobResult.objects.exists()


# -- the handler --------------------------------------------------------------


def test_the_time_of_an_attempt_passes():
    attempt = Attempt(USING, None, time.monotonic() - 5, 1_000_000, 0)
    assert 1_005_000 <= attempt.now() < 1_006_000


def test_a_database_error_is_not_the_fault_of_an_atomic_job(settings):
    settings.MYSQLQUEUE = {"MAX_ATTEMPTS": 2}
    result = jobs.deadlock.enqueue()
    deliver_all(raise_exceptions=False)
    result.refresh()
    assert errors(result.id) == [OperationalError] * 2
    assert (result.status, len(jobs.log)) == ("FAILED", 2)


def test_an_atomic_job_that_ends_its_transaction_fails(settings):
    """It is not the database's fault, so there are no more attempts than those of the job."""
    settings.MYSQLQUEUE = {"MAX_ATTEMPTS": 2}
    result = jobs.end_transaction.enqueue(7)
    deliver_all(raise_exceptions=False)
    result.refresh()
    assert errors(result.id) == [TransactionManagementError]
    assert "ROLLBACK ended the transaction" in result.errors[0].traceback
    assert (result.status, len(jobs.log)) == ("FAILED", 1)
    assert not Effect.objects.exists()


def test_a_job_whose_hook_fails_after_the_commit_is_successful():
    result = jobs.fail_after_commit.enqueue(7)
    with pytest.raises(ZeroDivisionError):
        deliver_all()
    result.refresh()
    assert (result.status, result.errors) == ("SUCCESSFUL", [])
    assert Effect.objects.get().value == 7


def test_an_invalid_result_is_not_retried(settings):
    settings.TASKS = {"default": job_worlds.TASKS["default"] | {"OPTIONS": {"MAX_ATTEMPTS": 5}}}
    result = jobs.returns.enqueue("object")
    deliver_all(raise_exceptions=False)
    assert errors(result.id) == [exceptions.InvalidResult]


def test_the_backoff_of_a_job():
    result = jobs.fail_slowly.enqueue()
    worker = Sub(registry.handlers()[JOBS], name="w")
    worker.step()
    worker.work()
    worker.flush()
    state = DeliveryState.objects.get()
    assert 50_000 < state.invisible_until - row(result.id).last_attempted_at < 70_000


def test_options_of_subscribers(settings):
    settings.MYSQLQUEUE = {"GROUPS": {"jobs": {"CLAIM_SIZE": 7}}}
    handler = registry.handlers()[JOBS]
    assert (handler.claim_size, handler.priority_share, handler.mode) == (7, 0, "shared")
    assert (handler.max_attempts, handler.atomic) == (None, False)


def test_async_jobs_have_no_transaction(settings):
    settings.TASKS = {"default": job_worlds.TASKS["default"] | {"OPTIONS": {"ATOMIC": True}}}
    result = jobs.nap.enqueue(0)
    deliver_all()
    result.refresh()
    assert result.status == "SUCCESSFUL"


# -- the backend --------------------------------------------------------------


def test_a_transaction_of_another_database(queue_db):
    with transaction.atomic(using="queue"), pytest.raises(TransactionMismatch):
        jobs.add.enqueue(1)
    assert not JobResult.objects.exists()


@pytest.mark.parametrize("stage", ["", job_worlds.STAGES[0]])
def test_a_job_that_is_restarted_while_old_results_are_deleted(monkeypatch, stage):
    """Its result stays."""
    held = job_worlds.claimed("dead")
    job_worlds.flush(USING, held)
    JobResult.objects.update(finished_at=1, stage=stage)
    rows = job_results.Session.rows

    def with_restart(session, sql, parameters=()):
        found = rows(session, sql, parameters)
        if "stage FROM" in sql and found:
            job_rows.restart(session, {"dead": ""})
        return found

    monkeypatch.setattr(job_results.Session, "rows", with_restart)
    job_results.collect(USING)
    assert JobResult.objects.get().status == "READY"


@pytest.mark.parametrize("task", [jobs.add, jobs.alone])
@pytest.mark.parametrize("fails", [(job_rows, "insert"), (publishing, "publish_many")])
def test_an_error_in_the_callers_transaction_leaves_nothing(monkeypatch, task, fails):
    """A caller that catches it must not commit a result without its message."""
    monkeypatch.setattr(*fails, lambda *args, **options: 1 / 0)
    with transaction.atomic():
        with pytest.raises(ZeroDivisionError):
            task.enqueue(1)
        assert connections[USING].needs_rollback
        transaction.set_rollback(True)


def test_results_in_several_databases(queue_db, settings):
    settings.MYSQLQUEUE = {"TOPICS": {"jobs.mail": {"DATABASE": "queue"}}}
    settings.TASKS = {"default": job_worlds.TASKS["default"] | {"QUEUES": ["default", "mail"]}}
    backend = task_backends["default"]
    results = backend.enqueue_many([(jobs.add, [1], {}), (jobs.add.using(queue_name="mail"), [2], {})])
    assert [JobResult.objects.using(alias).get().id for alias in (USING, "queue")] == [one.id for one in results]
    deliver_all()
    assert [jobs.add.get_result(one.id).return_value for one in results] == [2, 3]


def test_a_path_that_is_too_long():
    def function():
        pass

    function.__module__, function.__qualname__ = "m" * 121, "f" * 60
    with pytest.raises(InvalidTask, match="may have at most 181 characters"):
        task_backends["default"].validate_task(type(jobs.add)(func=function))


def test_queues_are_declared_topics(settings):
    settings.MYSQLQUEUE = {"STRICT_TOPICS": True}
    assert JOBS.topic not in known_topics._handled
    publish(JOBS.topic, {})
    assert get_settings().strict_topics


def test_job_needs_a_task_or_a_function():
    with pytest.raises(Exception, match="@job on 5: it is not a task or a function"):
        job(max_attempts=2)(5)


def fields_of(caplog, name):
    every = [getattr(one, "mysqlqueue", {}) for one in caplog.records]
    return [fields for fields in every if fields.get("event") == name]


@pytest.mark.parametrize("task", [jobs.add, jobs.fail])
def test_a_long_transaction_is_logged_once_for_each_task(monkeypatch, caplog, task):
    monkeypatch.setattr(handlers, "_long", set())

    def logged():
        return [fields["task"] for fields in fields_of(caplog, "job.long_transaction")]

    for longest, expected in ((3600.0, []), (0.0, [task.module_path]), (0.0, [task.module_path])):
        monkeypatch.setattr(handlers, "LONG", longest)
        task.enqueue(1)
        deliver_all(raise_exceptions=False)
        assert logged() == expected


def test_a_long_job_without_a_transaction_is_not_logged(monkeypatch, caplog):
    monkeypatch.setattr(handlers, "LONG", 0.0)
    jobs.plain.enqueue(1)
    deliver_all()
    assert fields_of(caplog, "job.long_transaction") == []

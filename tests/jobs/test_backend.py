"""The backend for ``django.tasks``: enqueueing, running and results."""

from __future__ import annotations

import datetime
import json
import re

import pytest
from asgiref.sync import async_to_sync
from django.core.exceptions import ImproperlyConfigured
from django.core.management import CommandError, call_command
from django.db import transaction
from django.utils import timezone

from django_mysqlqueue import cancel, operations, publish, subscriber
from django_mysqlqueue.exceptions import InvalidMessage, SubscriberError
from django_mysqlqueue.models import DeliveryState, JobResult, OutboxMessage, QueueMessage, SubscriberHeartbeat
from django_mysqlqueue.tasks import cancel_job, exceptions, job, progress_of, wait
from django_mysqlqueue.tasks.framework import (
    BaseTaskBackend,
    InvalidTask,
    TaskResultDoesNotExist,
    TaskResultStatus,
    task_backends,
    task_enqueued,
    task_finished,
    task_started,
)
from django_mysqlqueue.tasks.results import as_result
from django_mysqlqueue.testing import deliver_all
from tests.app import jobs
from tests.app.models import Effect
from tests.support.harness import USING, Sub, handler, sequence
from tests.support.internals import GroupRef, get_settings, job_results, job_rows, registry

BACKEND = "django_mysqlqueue.tasks.MySQLQueueBackend"
DUMMY = f"{BaseTaskBackend.__module__.removesuffix('base')}dummy.DummyBackend"
QUEUES = ["default", "mail"]
READY, RUNNING = TaskResultStatus.READY, TaskResultStatus.RUNNING
FAILED, SUCCESSFUL = TaskResultStatus.FAILED, TaskResultStatus.SUCCESSFUL
REF = GroupRef("jobs", "jobs.default")


def configure(settings, **options):
    settings.TASKS = {"default": {"BACKEND": BACKEND, "QUEUES": QUEUES, "OPTIONS": options}}


@pytest.fixture(autouse=True)
def _backend(db, no_handlers, settings):
    configure(settings)
    jobs.log.clear()


def sub(name="a"):
    return Sub(registry.handlers()[REF], name=name)


def run(result):
    deliver_all(raise_exceptions=False)
    result.refresh()
    return result


# -- one run ------------------------------------------------------------------


def test_a_job_runs_and_its_result_is_stored():
    result = jobs.add.enqueue(2, b=3)
    assert (result.status, result.args, result.kwargs, result.attempts) == (READY, [2], {"b": 3}, 0)
    again = jobs.add.get_result(result.id)
    assert again == result
    with pytest.raises(ValueError, match="Task has not finished yet"):
        _ = again.return_value
    (delivered,) = deliver_all()
    assert (delivered.group, delivered.topic, delivered.outcome) == ("jobs", "jobs.default", "acked")
    result.refresh()
    assert (result.status, result.return_value, result.errors) == (SUCCESSFUL, 5, [])
    assert len(result.worker_ids) == result.attempts == 1
    assert result.started_at == result.last_attempted_at <= result.finished_at
    assert abs(result.started_at - result.enqueued_at) < datetime.timedelta(seconds=10)


@pytest.mark.parametrize("name", ["fail", "plain", "write"])
def test_the_writes_of_an_atomic_job_commit_with_its_result(name):
    result = run(getattr(jobs, name).enqueue(7))
    assert result.status == (FAILED if name == "fail" else SUCCESSFUL)
    assert Effect.objects.count() == (0 if name == "fail" else 1)


@pytest.mark.parametrize(("most", "outcomes"), [(1, ["dead_lettered"]), (3, ["failed", "failed", "dead_lettered"])])
def test_the_outcomes_that_deliver_all_tells(settings, most, outcomes):
    settings.MYSQLQUEUE = {"MAX_ATTEMPTS": 1}
    configure(settings, MAX_ATTEMPTS=most)
    jobs.fail.enqueue(1)
    assert [one.outcome for one in deliver_all(raise_exceptions=False)] == outcomes


def test_a_job_that_fails():
    result = run(jobs.fail.enqueue(7))
    (error,) = result.errors
    assert error.exception_class is ValueError
    assert "ValueError: no 7" in error.traceback
    assert QueueMessage.objects.filter(topic="jobs.default_dlq").count() == 1
    assert result.finished_at
    with pytest.raises(ValueError, match="Task failed"):
        _ = result.return_value


def test_a_job_that_is_retried():
    result = run(jobs.fail_thrice.enqueue())
    assert result.status == FAILED
    assert [error.exception_class_path for error in result.errors] == ["builtins.KeyError"] * 3
    assert len(result.worker_ids) == len(jobs.log) == 3
    assert result.started_at < result.last_attempted_at <= result.finished_at


def test_between_two_attempts_it_is_ready():
    result = jobs.fail_thrice.enqueue()
    worker = sub()
    worker.step()
    worker.work()
    worker.flush()
    result.refresh()
    assert (result.status, len(result.errors), result.finished_at) == (READY, 1, None)


def test_async_jobs():
    result = run(jobs.nap.enqueue(0.01))
    assert (result.status, result.return_value) == (SUCCESSFUL, 0.01)
    result = run(jobs.doze.enqueue())
    assert result.status == FAILED
    assert "tests.app.jobs.doze did not finish within 0.1 s (timeout)" in result.errors[0].traceback


def test_the_context():
    result = run(jobs.whoami.enqueue())
    assert result.return_value == {"attempt": 1, "id": result.id}
    (context,) = jobs.log
    assert context.task_result.task.func is jobs.whoami.func
    assert context.task_result.worker_ids == result.worker_ids


def test_priorities_come_first():
    for number, priority in enumerate((0, 5, -5, 5)):
        jobs.add.using(priority=priority).enqueue(number)
    deliver_all()
    assert jobs.log == [(1, 1), (3, 1), (0, 1), (2, 1)]


def test_a_job_that_runs_later():
    at = timezone.now() + datetime.timedelta(hours=1)
    result = jobs.add.using(run_after=at, queue_name="mail").enqueue(1)
    stored = jobs.add.get_result(result.id)
    assert abs(stored.task.run_after - at) < datetime.timedelta(milliseconds=1)
    assert stored.task.queue_name == "mail"
    assert deliver_all() == []
    assert [one.topic for one in deliver_all(advance=3601)] == ["jobs.mail"]


def test_a_job_that_runs_after_a_timedelta():
    """Its time counts from the enqueueing, not from ``using()``."""
    task = jobs.add.using(run_after=datetime.timedelta(minutes=5))
    task.enqueue(1)
    with pytest.raises(InvalidTask, match=r"run_after=.* is too far away"):
        jobs.add.using(run_after=datetime.timedelta.max)
    assert deliver_all(advance=200) == []
    task.enqueue(2)
    deliver_all(advance=200)
    assert jobs.log == [(1, 1)]


def test_it_is_enqueued_with_the_callers_transaction():
    with transaction.atomic():
        jobs.add.enqueue(1)
        transaction.set_rollback(True)
    assert not OutboxMessage.objects.exists()
    assert not JobResult.objects.exists()


def test_many_are_enqueued_together():
    backend = task_backends["default"]
    results = backend.enqueue_many(
        [(jobs.add, [n], {}) for n in range(3)] + [(jobs.add.using(queue_name="mail"), [3], {})]
    )
    assert [result.args for result in results] == [[0], [1], [2], [3]]
    deliver_all()
    assert sorted(jobs.log) == [(n, 1) for n in range(4)]
    with pytest.raises(TypeError):
        backend.enqueue_many([(jobs.add, [1], {}), (jobs.add, [object()], {})])
    assert OutboxMessage.objects.count() == 0


def test_async_callers():
    result = async_to_sync(jobs.add.aenqueue)(1)
    assert async_to_sync(jobs.add.aget_result)(result.id) == result


# -- what is refused ----------------------------------------------------------


def test_unknown_results():
    with pytest.raises(TaskResultDoesNotExist):
        jobs.add.get_result("none")
    result = jobs.add.enqueue(1)
    with pytest.raises(Exception, match="Task does not match"):
        jobs.whoami.get_result(result.id)


@pytest.mark.parametrize("value", [object(), {1, 2}])
def test_arguments_that_json_has_not(value):
    with pytest.raises(TypeError, match="Unsupported type"):
        jobs.add.enqueue(value)
    assert not JobResult.objects.exists()


@pytest.mark.parametrize("value", ["x" * 2_000_000, float("nan"), jobs.DEEP])
def test_arguments_that_cannot_be_stored(value):
    with pytest.raises(InvalidMessage):
        jobs.add.enqueue(value)
    assert not JobResult.objects.exists()


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        ("object", "tests.app.jobs.returns returned a value that is not JSON-serializable: Unsupported type"),
        ("nan", "returned a value that is not JSON-serializable: Out of range float values are not JSON compliant"),
        ("deep", "returned a value that is not JSON-serializable: maximum recursion depth exceeded"),
        (
            "large",
            r"returned a value of 2,000,002 bytes of JSON, but at most 1,048,576 are allowed \(MAX_PAYLOAD_BYTES\)",
        ),
    ],
)
def test_return_values_that_cannot_be_stored(kind, error):
    result = run(jobs.returns.enqueue(kind))
    assert result.status == FAILED
    (found,) = result.errors
    assert found.exception_class is exceptions.InvalidResult
    assert re.search(error, found.traceback)
    assert run(jobs.returns.enqueue("nothing")).return_value is None


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"ATTEMPTS": 3}, "'ATTEMPTS' is not an option. Options: ATOMIC, BACKOFF, BURST"),
        ({"max_attempts": 3}, "'max_attempts' is not an option"),
        ({"MAX_ATTEMPTS": 0}, "max_attempts=0: must be"),
        ({"QUEUES": {"unknown": {}}}, "QUEUES has options for 'unknown', which is not among the queues of 'default'"),
        ({"QUEUES": 3}, "QUEUES=3: must be a dict"),
    ],
)
def test_options_that_are_wrong(settings, options, error):
    configure(settings, **options)
    with pytest.raises(ImproperlyConfigured, match=rf"TASKS\['default'\]\['OPTIONS'\]: {error}"):
        _ = task_backends["default"]


def test_checks(settings):
    assert list(task_backends["default"].check()) == []
    settings.TASKS = {
        "a": {"BACKEND": BACKEND, "QUEUES": ["x", "y"]},
        "b": {"BACKEND": BACKEND, "QUEUES": ["y"]},
        "c": {"BACKEND": BACKEND, "QUEUES": []},
        "d": {"BACKEND": BACKEND, "QUEUES": ["not a name"]},
    }
    found = [one for alias in "abcd" for one in task_backends[alias].check()]
    assert [(one.id, one.msg) for one in found] == [
        ("django_mysqlqueue.E026", "The backends 'a' and 'b' of TASKS share queues: y."),
        ("django_mysqlqueue.E025", found[1].msg),
    ]
    assert "has the queue 'not a name': topic 'jobs.not a name'" in found[1].msg


@pytest.mark.parametrize(
    ("option", "rule"), [({"VIA": "other"}, "could not commit"), ({"PARTITIONS": 4}, "a partition of its own")]
)
def test_a_queue_of_jobs_cannot_have_every_option_of_topics(settings, option, rule):
    settings.MYSQLQUEUE = {"TOPICS": {"jobs.default": option}}
    (found,) = task_backends["default"].check()
    assert found.id == "django_mysqlqueue.E025"
    assert f"has {next(iter(option))} for 'jobs.default', the queue 'default' of jobs" in found.msg
    assert rule in found.msg


def test_tasks_are_checked_without_a_query(django_assert_num_queries):
    with django_assert_num_queries(0):
        with pytest.raises(InvalidTask, match="unknown"):
            jobs.add.using(queue_name="unknown")
        task_backends["default"].validate_task(jobs.add)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"max_attempts": 0}, "max_attempts=0"),
        ({"timeout": 5}, "timeout=5 is for async tasks"),
        ({"max_processing_time": 0}, "max_processing_time=0"),
    ],
)
def test_options_of_a_job_that_are_wrong(options, error):
    def function():
        pass

    with pytest.raises(SubscriberError, match=f"@job on .*function: {error}"):
        job(**options)(function)


def test_a_timeout_that_is_not_below_the_time_of_the_process():
    async def function():
        pass

    text = "timeout=5 must be less than max_processing_time=5, after which its whole process exits"
    with pytest.raises(SubscriberError, match=text):
        job(timeout=5, max_processing_time=5)(function)


def test_options_come_from_the_job_the_queue_and_the_backend(settings):
    configure(
        settings, MAX_ATTEMPTS=2, BACKOFF={"initial": 0.01}, QUEUES={"mail": {"MAX_ATTEMPTS": 4, "CLAIM_SIZE": 7}}
    )
    assert len(run(jobs.fail.enqueue(1)).errors) == 2
    assert len(run(jobs.fail.using(queue_name="mail").enqueue(1)).errors) == 4
    assert len(run(jobs.fail_thrice.using(queue_name="mail").enqueue()).errors) == 3
    found = registry.handlers()
    assert found[GroupRef("jobs", "jobs.mail")].claim_size == 7
    assert found[REF].claim_size is None


# -- the other ends -----------------------------------------------------------


def ended(result, exception):
    result.refresh()
    assert (result.status, bool(result.finished_at)) == (FAILED, True)
    return result.errors[-1].exception_class is exception


def test_a_cancelled_job():
    later = timezone.now() + datetime.timedelta(hours=1)
    result = jobs.add.using(run_after=later).enqueue(1)
    with transaction.atomic():
        assert cancel(result.id, topic="jobs.default") == 1
        transaction.set_rollback(True)
    result.refresh()
    assert result.status == READY
    assert operations.cancel("jobs.default", [result.id], actor="ada").changed == 1
    assert ended(result, exceptions.JobCancelled)


def test_a_message_that_an_operator_dead_letters():
    result = jobs.fail_thrice.enqueue()
    worker = sub()
    worker.step()
    worker.work()
    worker.flush()
    operations.dead_letter(*REF, ids=[result.id], actor="ada", reason="no use")
    assert ended(result, exceptions.DeadLettered)
    assert "Dead-lettered by ada: no use" in result.errors[-1].traceback
    assert len(result.errors) == 2
    sequence()
    assert operations.redrive("jobs.default", ids=[result.id], actor="ada").changed == 1
    result.refresh()
    assert (result.status, result.finished_at) == (READY, None)


def test_a_redriven_job_runs_again():
    result = run(jobs.fail.enqueue(7))
    assert operations.redrive("jobs.default", ids=[result.id], actor="ada").changed == 1
    assert run(result).status == FAILED
    assert [error.exception_class_path for error in result.errors] == ["builtins.ValueError"] * 2


def test_a_job_whose_subscriber_is_lost():
    result = jobs.add.enqueue(1)
    lost = sub("lost").step()
    result.refresh()
    assert (result.status, result.last_attempted_at) == (RUNNING, result.started_at)
    assert result.worker_ids == [lost.name]
    SubscriberHeartbeat.objects.all().delete()
    DeliveryState.objects.update(invisible_until=0)
    assert run(result).return_value == 2
    assert result.worker_ids[0] == lost.name
    assert len(result.worker_ids) == 2
    (error,) = result.errors
    assert error.exception_class is exceptions.WorkerLost
    assert f"{lost.name!r} was lost" in error.traceback


def test_what_was_not_started_is_ready_again():
    result = jobs.add.enqueue(1)
    worker = sub()
    worker.step()
    worker.leave()
    result.refresh()
    assert (result.status, result.worker_ids, result.errors, result.last_attempted_at) == (READY, [], [], None)
    assert run(result).return_value == 2


def test_a_job_that_was_done_is_not_done_again():
    result = run(jobs.write.enqueue(1))
    operations.seek(*REF, "earliest", actor="ada")
    finished = result.finished_at
    assert [one.outcome for one in deliver_all()] == ["acked"]
    assert Effect.objects.count() == 1
    result.refresh()
    assert (result.status, result.finished_at) == (SUCCESSFUL, finished)


def test_a_job_with_two_messages_does_not_run_twice_at_once():
    """It was redriven, and the queue was rewound: the message that the redrive has published runs it."""
    result = run(jobs.fail_thrice.enqueue())
    assert result.status == FAILED
    assert operations.redrive("jobs.default", ids=[result.id], actor="ada").changed == 1
    sequence()
    operations.seek(*REF, "earliest", actor="ada")
    jobs.log.clear()
    worker = sub()
    worker.step()
    assert DeliveryState.objects.count() == 2
    worker.work()
    worker.flush()
    result.refresh()
    assert (jobs.log, result.status) == (["fail_thrice"], READY)
    assert (len(result.errors), len(result.worker_ids)) == (4, 4)


def test_a_task_that_this_process_does_not_have(caplog, monkeypatch):
    result = jobs.add.enqueue(1)
    JobResult.objects.update(task_path="tests.app.jobs.later")
    deliver_all(raise_exceptions=False)
    row = JobResult.objects.get()
    assert (row.status, row.errors, row.finished_at) == (READY, "", 0)
    assert "job.unknown task=tests.app.jobs.later" in caplog.text
    JobResult.objects.update(enqueued_at=1, run_after=1)
    deliver_all(advance=60)
    assert JobResult.objects.get().status == READY  # The time in a long backlog does not count.
    JobResult.objects.update(started_at=1)
    QueueMessage.objects.update(published_at=1)
    deliver_all(raise_exceptions=False, advance=60)
    row = JobResult.objects.get()
    assert (row.status, json.loads(row.errors)["exception_class_path"]) == (
        FAILED,
        "django_mysqlqueue.tasks.exceptions.UnknownTask",
    )
    with pytest.raises(ImportError):
        task_backends["default"].get_result(result.id)


def test_a_task_that_this_process_has_no_more(monkeypatch):
    """A claim that is taken back leaves the result of the attempt before."""
    result = jobs.fail_thrice.enqueue()
    worker = sub()
    worker.step()
    worker.work()
    worker.flush()
    worker.leave()
    before = JobResult.objects.get()
    assert before.last_attempted_at > 0
    JobResult.objects.update(task_path="tests.app.jobs.later")
    deliver_all(raise_exceptions=False)
    row = JobResult.objects.get()
    for name in ("status", "errors", "started_at", "last_attempted_at", "worker_ids"):
        assert getattr(row, name) == getattr(before, name)
    DeliveryState.objects.update(invisible_until=0)
    sub("b").step()
    assert JobResult.objects.get().last_attempted_at > before.last_attempted_at
    JobResult.objects.update(task_path=before.task_path)
    result.refresh()
    assert (result.status, result.attempts) == (RUNNING, 2)


@pytest.mark.parametrize("payload", [{"task": "tests.app.jobs.add"}, 5, {"task": "x", "args": 5, "kwargs": {}}])
def test_a_message_that_is_no_job(payload):
    publish("jobs.default", payload)
    (one,) = deliver_all(raise_exceptions=False)
    assert one.outcome == "dead_lettered"
    assert "is not a job: it must be a JSON object with task" in one.error
    assert "tests.app" not in one.error  # Payloads are not logged.


@pytest.mark.parametrize("content_type", [5, None, [], "application/octet-stream", "text/plain"])
def test_a_job_whose_content_type_is_not_json(content_type):
    """Only plain SQL can store it. Without attempts: the next one would fail, too."""
    publish("jobs.default", {"task": "tests.app.jobs.add", "args": [1], "kwargs": {"b": 5}})
    OutboxMessage.objects.update(metadata={"content_type": content_type})
    (one,) = deliver_all(raise_exceptions=False)
    if content_type is None:  # As without one: it is JSON if it can be parsed.
        assert one.outcome == "acked"
    else:
        assert (one.outcome, one.attempt) == ("dead_lettered", 1)
        assert "is not a job: it must be a JSON object with task" in one.error


@pytest.mark.parametrize("content_type", [5, "application/octet-stream"])
def test_a_job_with_a_result_whose_content_type_is_not_json(content_type):
    result = jobs.add.enqueue(1, b=5)
    OutboxMessage.objects.update(metadata={"content_type": content_type})
    (one,) = deliver_all(raise_exceptions=False)
    assert (one.outcome, one.attempt) == ("dead_lettered", 1)
    result.refresh()
    assert (result.status, result.errors[-1].exception_class) == (FAILED, exceptions.InvalidJob)


@pytest.mark.parametrize(
    "options", [{"run_after": 60}, {"run_after": []}, {"priority": "x"}, {"queue_name": []}, {"queue_name": 5}]
)
def test_a_bad_option_of_a_task_is_a_clear_error(options):
    with pytest.raises(InvalidTask, match=f"{next(iter(options))}=.*: must be"):
        jobs.add.using(**options)


@pytest.mark.parametrize(("number", "written"), [(60, "60"), (0.5, "0.5"), (1_500_000, "1500000")])
def test_a_number_as_run_after_is_refused_with_what_to_write(number, written):
    text = f"for {written} seconds from now, write run_after=timedelta(seconds={written})."
    with pytest.raises(InvalidTask) as caught:
        jobs.add.using(run_after=number)
    assert str(caught.value) == f"run_after={number!r}: must be a datetime or a timedelta; {text}"
    with pytest.raises(InvalidTask, match=r"^run_after=True: must be a datetime or a timedelta\.$"):
        jobs.add.using(run_after=True)


def test_a_job_that_was_published_without_the_backend():
    """For example in plain SQL; or its result was deleted before its dead letter was redriven."""
    job = publish("jobs.default", {"task": "tests.app.jobs.add", "args": [1], "kwargs": {"b": 5}})
    deliver_all()
    result = jobs.add.get_result(job)
    assert (result.status, result.return_value, result.args, result.kwargs) == (SUCCESSFUL, 6, [1], {"b": 5})
    failed = run(jobs.fail.enqueue(7))
    JobResult.objects.all().delete()
    operations.redrive("jobs.default", ids=[failed.id], actor="ada")
    assert len(run(failed).errors) == 1


@pytest.mark.parametrize("text", ["a\u2028b\x85c\x1cd", "bad LONE text", "x" * 200_000])
def test_any_text_of_an_error_is_stored(text):
    result = run(jobs.fail_with.enqueue(text))
    assert [error.exception_class_path for error in result.errors] == ["builtins.ValueError"] * 2
    assert len(result.errors[0].traceback) <= job_rows.LONGEST_ERROR


def test_values_with_lone_surrogates():
    assert run(jobs.echo.enqueue("LONEé")).return_value == "\udc80é"
    with pytest.raises(TaskResultDoesNotExist):
        jobs.add.get_result("\udc80")


def test_other_groups_on_a_queue_do_not_change_results():
    result = jobs.fail_thrice.enqueue()
    other = Sub(handler("jobs.default", "audit", mode="shared", function=lambda delivery: delivery.reject("no")))
    other.settle()
    other.leave()
    result.refresh()
    assert (result.status, result.errors) == (READY, [])
    worker = sub()
    worker.step()
    waiting = Sub(handler("jobs.default", "audit2", mode="shared"))
    waiting.step()
    waiting.leave()
    result.refresh()
    assert result.status == RUNNING


def test_an_atomic_job_that_has_ended_meanwhile_is_rolled_back(monkeypatch):
    result = jobs.write.enqueue(1)
    worker = sub()
    worker.step()
    JobResult.objects.update(status="FAILED", finished_at=1)
    worker.work()
    worker.flush()
    assert not Effect.objects.exists()
    result.refresh()
    assert result.status == FAILED


def test_a_queue_or_a_backend_that_is_gone(settings):
    result = jobs.add.using(queue_name="mail").enqueue(1)
    settings.TASKS = {"default": {"BACKEND": BACKEND}}
    found = JobResult.objects.get(id=result.id)
    assert as_result(job_results.JobRow(*(getattr(found, name) for name in job_results.JobRow._fields))).args == [1]
    JobResult.objects.update(queue_name="default", backend="gone")
    assert task_backends["default"].get_result(result.id).backend == "default"


@pytest.mark.parametrize("left", ["the other", "another kind"])
def test_results_of_a_backend_that_is_gone_can_be_read(settings, left):
    """The queue and the alias were dropped, or the alias is now that of another kind of backend."""
    backend = {"BACKEND": BACKEND}
    settings.TASKS = {"default": backend, "old": backend | {"QUEUES": ["old"]}}
    old = jobs.add.using(backend="old", queue_name="old")
    done = run(old.enqueue(2))
    waits = old.enqueue(3)
    settings.TASKS = {"default": backend}
    if left == "another kind":
        settings.TASKS = settings.TASKS | {"old": {"BACKEND": DUMMY}}
    found = jobs.add.get_result(done.id)
    found.refresh()
    wait(found, timeout=0)
    assert (found.status, found.return_value, progress_of(found)) == (SUCCESSFUL, 3, None)
    assert (found.backend, found.task.backend, found.task.queue_name) == ("default", "default", "old")
    found = task_backends["default"].get_result(waits.id)
    cancel_job(found)
    assert found.status == FAILED


def test_results_of_a_queue_that_was_in_another_database_can_be_read(queue_db, settings):
    settings.MYSQLQUEUE = {"TOPICS": {"jobs.mail": {"DATABASE": "queue"}, "orders": {"DATABASE": "queue"}}}
    result = jobs.add.using(queue_name="mail").enqueue(2)
    deliver_all()
    settings.TASKS = {"default": {"BACKEND": BACKEND}}
    assert jobs.add.get_result(result.id).return_value == 3


def test_a_filter_is_refused(settings):
    settings.MYSQLQUEUE = {"GROUPS": {"jobs": {"FILTER": {"region": ["eu"]}}}}
    with pytest.raises(SubscriberError, match="queue 'default': filter is not possible for a queue of jobs"):
        registry.handlers()


@pytest.mark.parametrize("option", ["max_attempts=4", "backoff=initial=30s"])
def test_options_of_jobs_are_not_overridden(option):
    deliver_all()
    with pytest.raises(CommandError, match="has no effect on a queue of jobs, whose tasks have such options of"):
        call_command("queueset", "jobs", "jobs.default", option, interactive=False)


@pytest.mark.parametrize("queues", ["mail", None, [5]])
def test_queues_that_are_no_list_of_names(settings, queues):
    settings.TASKS = {"default": {"BACKEND": BACKEND, "QUEUES": queues}}
    with pytest.raises(ImproperlyConfigured, match=r"TASKS\['default'\]\['QUEUES'\] = .*: must be a list of names"):
        _ = task_backends["default"]


def test_losses_do_not_use_up_the_attempts_of_a_job(settings):
    """Nor do failures count as losses: a job that has failed often is not FAILED by the first lost subscriber."""
    settings.MYSQLQUEUE = {"MAX_ATTEMPTS": 2}
    result = jobs.fail_often.enqueue()
    for _ in range(4):
        worker = sub()
        worker.step()
        worker.work()
        worker.flush()
        worker.leave()
        DeliveryState.objects.update(invisible_until=0)
    sub("lost").step()
    SubscriberHeartbeat.objects.all().delete()
    DeliveryState.objects.update(invisible_until=0)
    worker = sub()
    worker.step()
    worker.work()
    worker.flush()
    result.refresh()
    assert result.status == READY
    names = [error.exception_class_path.rpartition(".")[2] for error in result.errors]
    assert names == ["KeyError"] * 4 + ["WorkerLost", "KeyError"]


@pytest.mark.parametrize("redrives", [1, 2])
def test_losses_after_a_redrive_are_counted_without_the_failures_before_it(settings, redrives):
    configure(settings, MAX_ATTEMPTS=2, BACKOFF={"initial": 0, "jitter": 0})
    result = run(jobs.fail.enqueue(7))
    for _ in range(redrives):
        assert operations.redrive("jobs.default", ids=[result.id], actor="ada").changed == 1
        sequence()
        sub("lost").step()
        SubscriberHeartbeat.objects.all().delete()
        # As a recorded start of a lost subscriber leaves it.
        DeliveryState.objects.update(invisible_until=0, retry_count=1)
        assert run(result).status == FAILED
    names = [error.exception_class_path.rpartition(".")[2] for error in result.errors]
    assert names == ["ValueError"] * 2 + ["WorkerLost", "ValueError", "ValueError"] * redrives
    assert operations.redrive("jobs.default", ids=[result.id], actor="ada").changed == 1
    sequence()
    sub("lost").step()
    SubscriberHeartbeat.objects.all().delete()
    DeliveryState.objects.update(invisible_until=0, retry_count=2)
    assert run(result).status == FAILED
    assert "2 subscribers were lost during an attempt at the job" in result.errors[-1].traceback


def test_cancelling_a_message_of_another_topic_with_the_same_id():
    result = jobs.add.enqueue(1)
    publish("jobs.mail", {}, id=result.id, delay=60)
    assert cancel(result.id, topic="jobs.mail") == 1
    result.refresh()
    assert result.status == READY


def test_an_enqueued_result_is_the_stored_one():
    at = timezone.now().replace(microsecond=123456) + datetime.timedelta(hours=1)
    result = jobs.add.using(run_after=at, priority=3).enqueue(1)
    assert jobs.add.get_result(result.id) == result


def test_other_topics_with_such_names_are_left_alone(settings):
    settings.MYSQLQUEUE = {"TOPICS": {"jobs.default": {"PARTITIONS": 4}}}
    settings.TASKS = {"default": {"BACKEND": f"{BaseTaskBackend.__module__.removesuffix('.base')}.dummy.DummyBackend"}}
    assert get_settings().partitions_of("jobs.default") == 4
    assert not job_results.is_of_jobs(REF)
    settings.TASKS = {"default": {"BACKEND": BACKEND}}
    assert get_settings().partitions_of("jobs.default") is None
    assert job_results.is_of_jobs(REF)
    assert not job_results.is_of_jobs(GroupRef("jobs", "jobs.default_dlq"))
    assert not job_results.is_of_jobs(GroupRef("jobs", "jobs.mail"))


def test_a_handler_of_the_same_group_is_refused():
    subscriber("jobs.mail", group="jobs")(lambda delivery: None)
    with pytest.raises(
        SubscriberError, match=r"Two handlers are declared for the group 'jobs' on 'jobs\.mail': .*TASKS"
    ):
        registry.handlers()


# -- signals ------------------------------------------------------------------


def test_signals(settings):
    got = []

    def note(sender, task_result, signal, **kwargs):
        names = {task_enqueued: "enqueued", task_started: "started", task_finished: "finished"}
        got.append((names[signal], sender.__name__, task_result.status.value))

    for signal in (task_enqueued, task_started, task_finished):
        signal.connect(note)
    try:
        run(jobs.add.enqueue(1))
        run(jobs.fail_thrice.enqueue())
    finally:
        for signal in (task_enqueued, task_started, task_finished):
            signal.disconnect(note)
    name = "MySQLQueueBackend"
    assert got == [
        ("enqueued", name, "READY"),
        ("started", name, "RUNNING"),
        ("finished", name, "SUCCESSFUL"),
        ("enqueued", name, "READY"),
        *[("started", name, "RUNNING")] * 3,
        ("finished", name, "FAILED"),
    ]


def test_receivers_that_fail(settings, caplog):
    """What they do is not the job's failure. A receiver of task_enqueued fails the enqueueing, as in Django."""
    got = []

    def broken(sender, task_result, **kwargs):
        got.append(task_result.status.value)
        raise ZeroDivisionError

    for signal in (task_started, task_finished):
        signal.connect(broken)
    try:
        assert run(jobs.write.enqueue(1)).status == SUCCESSFUL
        assert run(jobs.fail.enqueue(1)).status == FAILED
    finally:
        for signal in (task_started, task_finished):
            signal.disconnect(broken)
    assert got == ["RUNNING", "SUCCESSFUL", "RUNNING", "FAILED"]
    assert "signal_receiver.failed signal=task_finished" in caplog.text
    count = JobResult.objects.count()
    task_enqueued.connect(broken)
    try:
        with pytest.raises(ZeroDivisionError):
            jobs.write.enqueue(2)
    finally:
        task_enqueued.disconnect(broken)
    assert JobResult.objects.count() == count


def test_with_eager(settings):
    settings.MYSQLQUEUE = {"EAGER": True}
    got = []

    def note(sender, task_result, signal, **kwargs):
        got.append(signal)

    for signal in (task_enqueued, task_started, task_finished):
        signal.connect(note)
    try:
        result = jobs.add.enqueue(1)
    finally:
        for signal in (task_enqueued, task_started, task_finished):
            signal.disconnect(note)
    assert got == [task_enqueued, task_started, task_finished]
    result.refresh()
    assert result.status == SUCCESSFUL


# -- retention ----------------------------------------------------------------


def test_old_results_are_deleted(settings):
    settings.MYSQLQUEUE = {"RESULTS_RETENTION": 60}
    done, failed, waits = jobs.add.enqueue(1), jobs.fail.enqueue(1), None
    deliver_all(raise_exceptions=False)
    waits = jobs.add.enqueue(2)
    assert job_results.collect(USING) == 0
    JobResult.objects.filter(finished_at__gt=0).update(finished_at=1)
    assert job_results.collect(USING) == 2
    assert list(JobResult.objects.values_list("id", flat=True)) == [waits.id]
    for result in (done, failed):
        with pytest.raises(TaskResultDoesNotExist):
            result.refresh()


def test_a_backend_that_names_no_queues(settings):
    """Their names are not validated, and all jobs are in one."""
    settings.TASKS = {"default": {"BACKEND": BACKEND, "QUEUES": [], "OPTIONS": {"MAX_ATTEMPTS": 2}}}
    assert list(task_backends["default"].check()) == []
    result = jobs.add.using(queue_name="any").enqueue(1)
    assert result.task.queue_name == jobs.add.get_result(result.id).task.queue_name == "default"
    assert [(one.topic, one.outcome) for one in deliver_all()] == [("jobs.default", "acked")]
    assert len(run(jobs.fail.using(queue_name="x" * 300).enqueue(1)).errors) == 2

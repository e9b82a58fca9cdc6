"""``@job(rate=)``: a rate of one task, in all processes together. Other tasks of its queue are not held up."""

from __future__ import annotations

import importlib
import json
import random
import re
import signal
from dataclasses import replace

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from django_mysqlqueue import operations, publish
from django_mysqlqueue.checks import system as checks
from django_mysqlqueue.exceptions import SubscriberError
from django_mysqlqueue.inspection import get_job
from django_mysqlqueue.inspection.jobs import message_offset
from django_mysqlqueue.models import ConsumerGroup, DeliveryState, JobResult, OutboxMessage, QueueMessage, Slots
from django_mysqlqueue.options import job_queues
from django_mysqlqueue.options.delivery_limits import Rate
from django_mysqlqueue.tasks import call, enqueue_chain, enqueue_many, exceptions, handlers, job
from django_mysqlqueue.tasks.framework import InvalidTask
from django_mysqlqueue.tasks.options import ATTRIBUTE, options_of
from django_mysqlqueue.testing import deliver_all
from tests.app.models import Effect
from tests.support import job_worlds
from tests.support.harness import USING, Sub, problems_found, sequence
from tests.support.internals import Session, check_override, parse_text, register_groups, registry, slots
from tests.support.job_worlds import BACKEND, JOBS
from tests.support.processes import Worker, wait_for

pytestmark = pytest.mark.promise("Limits")

LIMITED = "tests.rated.tasks.limited"
FLAKY = "tests.rated.tasks.flaky"
FREE = "tests.rated.tasks.free"
LATE = "tests.rated.late.late"


@pytest.fixture(autouse=True)
def _patience(monkeypatch):
    """On a busy machine a step may take longer than a message has to start."""
    monkeypatch.setattr(slots, "START_WITHIN_US", 10_000_000)


@pytest.fixture
def backend(db, no_handlers, settings):
    settings.TASKS = job_worlds.TASKS


def imported(monkeypatch, name):
    """Imports a module of the app ``tests.rated``, for this test alone."""
    module = importlib.import_module(f"tests.rated.{name}")
    for one in vars(module).values():
        rate = getattr(getattr(one, "func", None), ATTRIBUTE, {}).get("rate")
        if rate is not None:
            monkeypatch.setitem(job_queues.rates, one.module_path, rate)
    return module


@pytest.fixture
def tasks(backend, monkeypatch):
    monkeypatch.setattr(job_queues, "rates", {})
    return imported(monkeypatch, "tasks")


def sub(**options):
    return Sub(*registry.handlers().values(), **{"threads": 9, **options})


def ran(name):
    return sorted(Effect.objects.filter(name=name).values_list("value", flat=True))


def slot_keys():
    return sorted(Slots.objects.values_list("limit_key", flat=True))


# -- limits -------------------------------------------------------------------


def test_a_task_has_its_rate_and_others_have_none(tasks):
    enqueue_many([call(task, n) for n in range(9) for task in (tasks.limited, tasks.free)])
    worker = sub()
    assert worker.settle() == 10
    assert (ran("limited"), ran("free")) == ([0], list(range(9)))
    assert slot_keys() == ["", f":{LIMITED}"]
    assert ConsumerGroup.objects.get().limits["rate_per_key"][LIMITED] == "1/h"
    Slots.objects.update(full_at=0)
    later(worker)
    assert worker.settle() == 1
    assert ran("limited") == [0, 1], "in the order in which they were enqueued"


def later(worker):
    """Lets a process ask for slots again at once."""
    for group in worker.poller.shared:
        group.configure(group.handler)


def test_a_rate_holds_for_all_processes_and_priorities_together(tasks):
    enqueue_many([call(tasks.limited.using(priority=priority), n) for n in range(3) for priority in (0, 10, -10)])
    workers = [sub() for _ in range(3)]
    assert sum(worker.settle() for worker in workers) == 1


def test_a_backlog_of_a_limited_task_does_not_hold_up_others(tasks, settings):
    """Though it is longer than what claims look past, and keys are hashed to few partitions."""
    settings.MYSQLQUEUE = {"TOPICS": {"jobs.default": {"PARTITIONS": 1}}}
    enqueue_many([call(tasks.limited, n) for n in range(1200)])
    enqueue_many([call(tasks.limited.using(priority=5), n) for n in range(1200, 2400)])
    enqueue_many([call(tasks.free, n) for n in range(50)])
    worker = sub()
    assert sum(worker.settle() for _ in range(5)) == 51
    assert ran("free") == list(range(50))
    assert DeliveryState.objects.count() == 0, "what waits for a slot becomes no row"


def test_retries_and_redrives_take_slots(tasks):
    result = tasks.flaky.enqueue(1)
    worker = sub()
    for attempt in (1, 2, 3):
        assert worker.settle() == 1
        assert worker.settle() == 0
        result.refresh()
        assert len(result.errors) == attempt
        Slots.objects.update(full_at=0)
        DeliveryState.objects.update(invisible_until=0)
        later(worker)
    assert result.status == "FAILED"
    tasks.flaky.enqueue(2)
    assert worker.settle() == 1
    operations.redrive("jobs.default", actor="tests")
    assert worker.settle() == 0
    Slots.objects.update(full_at=0)
    DeliveryState.objects.update(invisible_until=0)
    later(worker)
    assert worker.settle() == 1


def test_after_a_seek_the_rate_holds(tasks):
    enqueue_many([call(tasks.limited, n) for n in range(2)])
    worker = sub()
    assert worker.settle() == 1
    JobResult.objects.all().delete()
    operations.seek("jobs", "jobs.default", "earliest", actor="tests")
    worker.step()
    assert sum(worker.settle() for _ in range(3)) == 0
    Slots.objects.update(full_at=0)
    later(worker)
    assert worker.settle() == 1


def test_a_chain_keeps_the_rate(tasks):
    enqueue_chain(call(tasks.free, 1), [call(tasks.limited, n) for n in range(3)])
    worker = sub()
    assert sum(worker.settle() for _ in range(3)) == 2
    assert ran("limited") == [0]


def test_jobs_of_plain_sql_have_the_rate_with_the_path_as_the_key(tasks):
    for number in range(3):
        publish("jobs.default", {"task": LIMITED, "args": [number], "kwargs": {}}, key=LIMITED)
    assert sub().settle() == 1


def test_deliver_all_honours_the_rate(tasks):
    enqueue_many([call(tasks.limited, n) for n in range(3)])
    assert len(deliver_all()) == 1


# -- cost ---------------------------------------------------------------------


def test_tasks_without_a_rate_cost_as_much_as_before(tasks, monkeypatch):
    def statements():
        worker = sub()
        worker.settle()
        with CaptureQueriesContext(connection) as queries:
            for _ in range(3):
                enqueue_many([call(tasks.free, n) for n in range(40)])
                worker.settle()
        assert len(ran("free")) == 120
        Effect.objects.all().delete()
        ConsumerGroup.objects.all().delete()
        return len(queries), [one["sql"] for one in queries if slots.SLOTS in one["sql"]]

    with_rates, of_slots = statements()
    assert of_slots == []
    assert ConsumerGroup.objects.count() == 0
    monkeypatch.setattr(job_queues, "rates", {})
    without, _ = statements()
    # Ids are random, and so are the partitions and the number of claims.
    assert with_rates < 1.1 * without


def test_a_publisher_needs_no_more_statements(tasks):
    with CaptureQueriesContext(connection) as with_rate:
        tasks.limited.enqueue(1)
    with CaptureQueriesContext(connection) as without:
        tasks.free.enqueue(1)
    assert len(with_rate) == len(without)
    assert set(OutboxMessage.objects.values_list("partition_key", flat=True)) == {LIMITED, FREE}


@pytest.mark.parametrize("priority", [0, 5])
def test_the_page_of_a_job_finds_its_message(tasks, priority):
    result = tasks.limited.using(priority=priority).enqueue(1)
    sequence()
    summary = get_job(result.id).summary
    assert message_offset(Session(USING), summary) == QueueMessage.objects.get().offset
    assert QueueMessage.objects.get().partition_key.endswith(LIMITED)


# -- changes ------------------------------------------------------------------


def test_an_override_replaces_the_rates_of_all_tasks(tasks):
    enqueue_many([call(tasks.limited, n) for n in range(3)])
    worker = sub()
    assert worker.settle() == 1
    values = {"rate_per_key": parse_text("rate_per_key", f'{{"{LIMITED}": null, "{FLAKY}": "5/s"}}')}
    operations.settings(*JOBS, values, actor="tests")
    worker.step()
    assert worker.settle() == 2
    operations.settings(*JOBS, unset=["rate_per_key"], actor="tests")
    enqueue_many([call(tasks.limited, n) for n in range(3)])
    worker.step()
    assert sum(worker.settle() for _ in range(3)) <= 1


def test_a_rate_applies_when_migrate_has_registered_it(tasks, monkeypatch, caplog):
    """A rollout: the registered definition is from before the rate."""
    rates = dict(job_queues.rates)
    monkeypatch.setattr(job_queues, "rates", {})
    sub()
    assert ConsumerGroup.objects.get().limits == {}
    monkeypatch.setattr(job_queues, "rates", rates)
    (warning,) = checks.check_registered(databases=["default"])
    assert (warning.id, f'"{LIMITED}": "1/h"' in warning.msg) == ("django_mysqlqueue.W020", True)
    enqueue_many([call(tasks.limited, n) for n in range(3)])
    worker = sub()
    assert worker.settle() == 3
    assert "limits.not_registered" in caplog.text
    register_groups("default")
    assert checks.check_registered(databases=["default"]) == []
    enqueue_many([call(tasks.limited, n) for n in range(3)])
    worker.step()
    assert sum(worker.settle() for _ in range(3)) == 1
    # An earlier release of the project, in which the task has no rate: its processes keep to what is registered.
    Slots.objects.update(full_at=0)
    monkeypatch.setattr(job_queues, "rates", {})
    earlier = sub()
    assert sum(earlier.settle() for _ in range(3)) == 1


@pytest.mark.parametrize("atomic", [False, True])
def test_a_task_that_is_imported_too_late_does_not_run_without_its_rate(tasks, monkeypatch, caplog, atomic):
    """No process knows its rate, so ``migrate`` could not register it."""
    sub()
    late = imported(monkeypatch, "late").late
    monkeypatch.setitem(getattr(late.func, ATTRIBUTE), "atomic", atomic)
    handler = registry.handlers()[JOBS]
    monkeypatch.setattr(handlers, "job_handlers", lambda: {JOBS: replace(handler, rated=handler.rated - {LATE})})
    result = late.enqueue(1)
    deliver_all()
    result.refresh()
    assert (result.status, result.errors, ran("late")) == ("READY", [], [])
    assert f"job.unknown task={LATE}" in caplog.text
    assert "has rate='1/h', but it was imported only for this job" in caplog.text
    JobResult.objects.update(started_at=1)
    QueueMessage.objects.update(published_at=1)
    deliver_all(raise_exceptions=False, advance=60)
    result.refresh()
    assert (result.status, result.attempts) == ("FAILED", 1)
    assert [error.exception_class for error in result.errors] == [exceptions.UnknownTask]
    assert ran("late") == []


# -- refusals -----------------------------------------------------------------


def test_a_task_with_a_rate_is_refused_in_another_queue(backend, settings, monkeypatch):
    settings.TASKS = {"default": {"BACKEND": BACKEND, "QUEUES": ["default", "mail"]}}
    monkeypatch.setattr(job_queues, "rates", {})
    tasks = imported(monkeypatch, "tasks")
    rates = {ref.topic: handler.rate_per_key for ref, handler in handlers.job_handlers().items()}
    assert rates["jobs.mail"] is None
    assert dict(rates["jobs.default"].rates)[LIMITED] == Rate(1, "h")
    tasks.free.using(queue_name="mail").enqueue(1)
    text = (
        f"{LIMITED} has rate='1/h', which holds in the queue that it was declared with: it cannot be enqueued in 'mail'"
    )
    with pytest.raises(InvalidTask, match=re.escape(text)):
        tasks.limited.using(queue_name="mail").enqueue(1)


def test_rates_and_options_of_the_group_that_contradict_each_other(tasks, settings):
    settings.MYSQLQUEUE = {"GROUPS": {"jobs": {"RATE_PER_KEY": "5/s"}}}
    (error,) = checks.check_handlers()
    assert error.id == "django_mysqlqueue.E008"
    assert error.msg.startswith(
        "TASKS['default'], queue 'default': MYSQLQUEUE['GROUPS']['jobs'] has RATE_PER_KEY='5/s', but the rates per key "
        f"of this queue are those of its tasks (@job(rate=)): tests.rated.tasks.fast, {FLAKY}, {LIMITED}."
    )
    settings.MYSQLQUEUE = {"GROUPS": {"jobs": {"LIMIT_BY": "tenant"}}}
    (error,) = checks.check_handlers()
    assert "limit_by='tenant' has no effect on a queue of jobs" in error.msg
    settings.MYSQLQUEUE = {"GROUPS": {"jobs": {"RATE": "100/s", "MAX_IN_FLIGHT_PER_KEY": 2, "BURST": 3}}}
    assert checks.check_handlers() == []
    limits = handlers.job_handlers()[JOBS].limits
    assert (limits.rate, limits.rate_of(f":{LIMITED}"), limits.burst) == (Rate(100, "s"), Rate(1, "h"), 3)


def test_limit_by_cannot_be_overridden(tasks):
    with pytest.raises(ValueError, match="limit_by='tenant' has no effect on a queue of jobs"):
        check_override(handlers.job_handlers()[JOBS], "limit_by", "tenant")
    check_override(handlers.job_handlers()[JOBS], "rate_per_key", {LIMITED: "5/s"})


@pytest.mark.parametrize(("rate", "says"), [("5", "must be a number and a unit"), ({"a": "5/s"}, "must be a number")])
def test_an_invalid_rate(rate, says):
    with pytest.raises(SubscriberError, match=says) as error:

        @job(rate=rate)
        def some():
            pass

    assert "@job on tests.jobs.test_rates" in str(error.value)


def test_a_rate_of_none_is_no_rate(monkeypatch):
    monkeypatch.setattr(job_queues, "rates", {})

    def some():
        pass

    path = f"{some.__module__}.{some.__qualname__}"
    job(rate="5/s")(some)
    assert job_queues.rates == {path: Rate(5, "s")}
    assert options_of(some, {"rate": Rate(1, "s")}).rate == Rate(5, "s")
    job(rate=None)(some)
    assert job_queues.rates == {}
    assert options_of(some, {"rate": Rate(1, "s")}).rate is None, "that of OPTIONS is that of the queue"


def test_what_is_reported(tasks):
    enqueue_many([call(tasks.limited, n) for n in range(3)])
    sub().settle()
    (text,) = [problem.text for problem in problems_found() if problem.kind == "limited"]
    assert f"1/h for key '{LIMITED}'" in text
    assert "1 key is at its limit" in text


# -- processes ----------------------------------------------------------------


def most_in(times, seconds):
    """The highest number of starts within a window of some seconds."""
    times = sorted(times)
    return max(sum(moment <= one < moment + seconds for one in times) for moment in times)


@pytest.mark.processes
@pytest.mark.servers_only
def test_processes_that_are_killed_keep_to_the_rate(tasks, tmp_path, monkeypatch):
    """20/s and a burst of 4; other tasks of the queue run beside."""
    env = {"TEST_TASKS": json.dumps(job_worlds.TASKS), "TEST_APPS": "tests.rated"}
    workers = []

    def start():
        workers.append(Worker(tmp_path, "--group", "jobs", env=env, VISIBILITY_TIMEOUT=3, MAX_ATTEMPTS=None))
        return workers[-1]

    try:
        unknown = imported(monkeypatch, "late").late.enqueue(1)
        enqueue_many([call(tasks.fast, number) for number in range(120)])
        for _ in range(3):
            start()
        fast = Effect.objects.filter(name__startswith="fast|")
        wait_for(lambda: fast.count() >= 20, workers[0])
        enqueue_many([call(tasks.free, number) for number in range(200)])
        random.choice(workers).send(signal.SIGKILL)
        start()
        total = 120

        def are_done_beside_a_backlog():
            nonlocal total
            if fast.count() > total - 60:
                enqueue_many([call(tasks.fast, number) for number in range(total, total + 60)])
                total += 60
            return Effect.objects.filter(name="free").count() == 200

        wait_for(are_done_beside_a_backlog, workers[-1], timeout=60)
        assert fast.count() < total, "they did not wait for the limited ones"
        wait_for(lambda: len(set(fast.values_list("value", flat=True))) == total, workers[-1], timeout=60)
    finally:
        for worker in workers:
            worker.end()
    starts = [float(name.split("|")[1]) for name in fast.values_list("name", flat=True)]
    # A task notes its start up to a tenth of a second after it, on a busy machine.
    assert most_in(starts, 0.9) <= 24
    assert len(starts) / (max(starts) - min(starts)) > 5, "the rate is used"
    unknown.refresh()
    assert (unknown.status, ran("late")) == ("READY", [])
    assert any("has rate='1/h', but it was imported only for this job" in worker.output for worker in workers)

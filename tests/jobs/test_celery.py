"""Tasks that are declared and called as Celery's are."""

from __future__ import annotations

import datetime
import importlib.util
import subprocess
import sys
import types
import uuid
from decimal import Decimal
from unittest import mock

import pytest
from django.db import transaction
from django.utils.translation import gettext_lazy

from django_mysqlqueue.contrib import celery as package
from django_mysqlqueue.contrib.celery import (
    Celery,
    Ignore,
    MaxRetriesExceededError,
    Priorities,
    QueueOnce,
    Reject,
    Retry,
    Task,
    chain,
    chord,
    group,
    install,
    shared_task,
    signature,
    tasks,
)
from django_mysqlqueue.contrib.celery.encoding import decode, encode
from django_mysqlqueue.contrib.celery.tasks import ABSENT, ABSENT_IN_REQUESTS, REFUSED
from django_mysqlqueue.models import JobResult
from django_mysqlqueue.operations import run_recurring
from django_mysqlqueue.options import job_queues
from django_mysqlqueue.tasks import RetryLater, call, enqueue_many, exceptions, importing, schedules
from django_mysqlqueue.tasks.framework import InvalidTask
from django_mysqlqueue.testing import deliver_all, enqueued
from tests.app.models import Effect
from tests.support import job_worlds
from tests.support.documents import DOCS
from tests.support.harness import Sub, sequence
from tests.support.internals import registry

log = []
script = []
"""What the next calls of ``act`` raise."""


def act(*given):
    log.append(given)
    if script:
        raise script.pop(0)
    return "done"


@shared_task
def add(a, b=1):
    log.append((a, b))
    return a + b


@shared_task(name="shop.total")
def total(numbers, factor=1):
    return sum(numbers) * factor


@shared_task()
def echo(*args, **kwargs):
    log.append((args, kwargs))
    return [args, kwargs]


@shared_task
def render(template, context=None):
    log.append((template, context))


@shared_task
def starts(following=()):
    log.append(len(following))
    if following:
        first, *others = following
        first = signature(first)
        first.kwargs.update({"following": others})
        first.apply_async(countdown=1)


@shared_task
def write_and_fail():
    Effect.objects.create(name="jobs", value=1)
    raise KeyError("no")


@shared_task(bind=True, max_retries=2, default_retry_delay=30)
def retries_itself(self, number):
    act(self.request.retries, self.request.id, self.request.called_directly)
    raise self.retry(exc=KeyError(number))


@shared_task(bind=True, max_retries=2)
def retries_without_exception(self, **options):
    log.append(self.request.retries)
    raise self.retry(countdown=1, **options)


@shared_task(autoretry_for=(KeyError,), retry_kwargs={"max_retries": 5}, retry_backoff=10, retry_jitter=False)
def retried():
    act()


@shared_task(autoretry_for=(Exception,), dont_autoretry_for=(KeyError,), max_retries=1)
def retried_but_for_one():
    return act()


@shared_task(bind=True)
def retries_at(self, *, has_zone):
    log.append(self.request.retries)
    if self.request.retries == 0:
        at = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=1)
        raise self.retry(eta=at if has_zone else at.replace(tzinfo=None))


@shared_task(bind=True)
def retries_in(self, countdown):
    eta = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=50)
    raise self.retry(countdown=countdown, eta=eta)


@shared_task(bind=True, max_retries=1)
def does_not_count(self, *, fails=False):
    log.append(self.request.retries)
    if fails:
        self.retry(countdown=1)
    self.request.retries -= 1
    self.retry(countdown=1)


@shared_task(bind=True, name="shop.asks", priority=4)
def asks(self):
    request = self.request
    log.append(dict(vars(request)))
    return [request.get("properties"), request.get("stamps"), request.get("stamps", 3), request.is_eager]


@shared_task(max_retries=2)
def sends_again(messages):
    for message in messages:
        log.append((message, sends_again.request.retries))
        if message == "bad":
            sends_again.retry([[message]], exc=KeyError(message), throw=False)
    return len(messages)


@shared_task(ignore_result=True)
def forgets():
    return object()


@shared_task(expires=60, priority=3)
def perishable():
    log.append("perishable")


PERISHABLE = "tests.jobs.test_celery.perishable"


class Lists(QueueOnce):
    once = {"graceful": True, "keys": ["a"], "timeout": 600}


@shared_task(bind=True, base=Lists)
def once(self, a, b=None):
    log.append((self.name, a))


@shared_task(bind=True)
def replaces(self, a=1):
    self.retry(args=[a + 1])


@shared_task(bind=True, base=Lists)
def once_again(self, a, *, other=None):
    log.append((a, other, self.request.retries))
    if other is not None:
        self.retry(args=[other], kwargs={}, countdown=1)


class Tasks:
    @staticmethod
    @shared_task(bind=True, name="tasks.of_class")
    def of_class(self, a):
        log.append((self.name, a))
        return a


@pytest.fixture(autouse=True)
def _backend(db, no_handlers, settings, monkeypatch):
    settings.TASKS = {"default": {"BACKEND": job_worlds.BACKEND, "QUEUES": ["default", "mail"]}}
    monkeypatch.setattr(Priorities, "default", 0)
    monkeypatch.setattr(Priorities, "highest_first", False)
    # What a test declares is gone after it.
    monkeypatch.setattr(importing, "_declared", {**importing._declared})
    monkeypatch.setattr(job_queues, "declared", {**job_queues.declared})
    log.clear()
    script.clear()


def run(**options):
    return deliver_all(raise_exceptions=False, **options)


def outcome(result):
    result.refresh()
    return result.status, [error.exception_class for error in result.errors]


def stored(result):
    return JobResult.objects.get(id=result.id)


# -- calls ------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["delay", "apply_async", "signature", "delay_on_commit", "enqueue"])
def test_ways_to_call_a_task(way):
    result = {
        "delay": lambda: add.delay(1, b=2),
        "delay_on_commit": lambda: add.delay_on_commit(1, b=2),
        "apply_async": lambda: add.apply_async((1,), {"b": 2}),
        "signature": lambda: add.s(b=2).delay(1),
        "enqueue": lambda: add.enqueue(1, b=2),
    }[way]()
    assert result.task.module_path == "tests.jobs.test_celery.add"
    assert log == []
    run()
    assert (*outcome(result), result.return_value) == ("SUCCESSFUL", [], 3)


def test_a_direct_call_needs_no_job():
    assert (add(1), add.run(1, 2), add.s(1)(b=5), add.si(1)(5, b=6)) == (2, 3, 6, 2)
    assert Tasks.of_class(4) == 4
    assert not JobResult.objects.exists()


def test_apply_calls_the_task_now():
    result = add.apply((1,), {"b": 2}, countdown=5)
    assert (result.get(), result.result, result.state, result.status) == (3, 3, "SUCCESS", "SUCCESS")
    assert (result.successful(), result.failed(), result.ready()) == (True, False, True)
    failed = write_and_fail.apply()
    assert (failed.state, failed.failed(), type(failed.result)) == ("FAILURE", True, KeyError)
    assert failed.get(propagate=False) is failed.result
    for raises in (failed.get, lambda: write_and_fail.apply(throw=True)):
        with pytest.raises(KeyError):
            raises()
    script[:] = [Ignore(), Reject("no")]
    states = [retried.apply(), retried.apply()]
    assert [(one.state, one.get()) for one in states] == [("IGNORED", None), ("REJECTED", None)]
    with pytest.raises(InvalidTask, match="link=5"):
        add.apply((1,), link=5)
    assert not JobResult.objects.exists()


def test_a_retry_of_apply_is_at_once():
    assert isinstance(retries_itself.apply((7,)).result, KeyError)
    assert [(retries, called) for retries, _, called in log] == [(0, False), (1, False), (2, False)]
    log.clear()
    assert once_again.apply((1,), {"other": 2}).successful()
    assert log == [(1, 2, 0), (2, None, 1)]
    log.clear()
    assert sends_again.apply([["good", "bad"]]).get() == 2
    assert log == [("good", 0), ("bad", 0), ("bad", 1), ("bad", 2)]
    assert not JobResult.objects.exists()


def test_methods_can_be_patched():
    with mock.patch("tests.jobs.test_celery.add.delay") as delay:
        add.delay(1)
    delay.assert_called_once_with(1)
    with mock.patch.object(add, "apply_async") as apply_async:
        add.delay(2)
    apply_async.assert_called_once_with((2,), {})
    assert add.delay(1).id


def test_a_job_is_part_of_the_transaction():
    with transaction.atomic():
        add.delay(1)
        transaction.set_rollback(True)
    assert run() == []


def test_what_a_task_has_written_stays_when_it_fails():
    result = write_and_fail.delay()
    run()
    assert outcome(result) == ("FAILED", [KeyError])
    assert Effect.objects.count() == 1


@pytest.mark.parametrize(
    "options",
    [{"countdown": 3600}, {"eta": 3600}, {"countdown": 3600, "eta": 1}, {"countdown": 0, "eta": 3600}],
)
def test_a_delayed_job(options):
    if "eta" in options:
        eta = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=options["eta"])
        options = {**options, "eta": eta}
    add.apply_async((1,), **options)
    assert run() == []
    assert len(run(advance=3601)) == 1


@pytest.mark.parametrize(
    ("settings_of_install", "of_job"),
    [({}, [0, -3, -9]), ({"default_priority": 5}, [0, 2, -4]), ({"highest_first": True}, [0, 3, 9])],
)
def test_priorities(monkeypatch, settings_of_install, of_job):
    monkeypatch.setattr(Priorities, "default", settings_of_install.get("default_priority", 0))
    monkeypatch.setattr(Priorities, "highest_first", settings_of_install.get("highest_first", False))
    # The settings call install() before any task is declared.
    declared = shared_task(expires=60, priority=3)(perishable.__wrapped__)
    monkeypatch.setattr(sys.modules[__name__], "perishable", declared)
    results = [add.delay(1), perishable.delay(), add.apply_async((1,), priority=9)]
    assert [stored(one).priority for one in results] == of_job
    assert Priorities.of_celery(of_job[-1]) == 9


def test_every_job_of_a_task_has_its_priority_and_its_expiry():
    """Schedules, too, although they do not call the task."""
    perishable.enqueue()
    enqueue_many([call(perishable)])
    chain(add.si(1), perishable.si()).delay()
    schedules.create("s", perishable, every=60)
    schedules.create("by_path", PERISHABLE, every=60)
    run_recurring("s", actor="ada")
    run_recurring("by_path", actor="ada")
    jobs = JobResult.objects.filter(task_path=PERISHABLE).values_list("priority", "expires_in")
    assert list(jobs) == [(-3, 60_000)] * 5


def test_a_task_may_have_an_argument_with_the_name_context():
    result = render.delay("a.html", context={"b": 1})
    run()
    assert (outcome(result)[0], log) == ("SUCCESSFUL", [("a.html", {"b": 1})])


AWARE = datetime.datetime(2099, 1, 1, tzinfo=datetime.UTC)
NAIVE = AWARE.replace(tzinfo=None)


@pytest.mark.parametrize(
    "options", [{"eta": NAIVE}, {"expires": NAIVE}, {"eta": NAIVE, "expires": NAIVE.replace(year=2100)}]
)
def test_a_time_without_a_time_zone_is_refused(options, settings):
    with pytest.raises(InvalidTask, match=r"test_celery\.add: .*2099, 1, 1.*: must have a time zone"):
        add.apply_async((1,), **options)
    settings.USE_TZ = False
    assert add.apply_async((1,), **options).id


def test_times_with_a_time_zone_in_a_project_without_one(settings):
    settings.USE_TZ = False
    settings.TIME_ZONE = "Asia/Tokyo"
    stored_at = stored(add.apply_async((1,), eta=AWARE, expires=AWARE + datetime.timedelta(hours=1)))
    assert (stored_at.run_after, stored_at.expires_in) == (AWARE.timestamp() * 1000, 3_600_000)


def test_the_time_of_a_retry_needs_a_time_zone_too():
    good, bad = retries_at.delay(has_zone=True), retries_at.delay(has_zone=False)
    run()
    run(advance=5)
    assert outcome(good)[0] == "SUCCESSFUL"
    assert outcome(bad) == ("FAILED", [InvalidTask])
    assert "must have a time zone" in bad.errors[0].traceback


def test_a_time_must_be_a_datetime():
    with pytest.raises(InvalidTask, match="eta='2099-01-01': must be a datetime"):
        add.apply_async((1,), eta="2099-01-01", expires=60)


def test_a_queue_of_a_call():
    assert stored(add.apply_async((1,), queue="mail")).queue_name == "mail"
    with pytest.raises(InvalidTask):
        add.apply_async((1,), queue="elsewhere")


@pytest.mark.still_clock
def test_expiry_of_a_call_and_of_a_task(clock):
    clock.stop()
    both = add.apply_async((1,), expires=30), perishable.delay()
    assert [stored(one).expires_in for one in both] == [30_000, 60_000]
    run(advance=31)
    assert outcome(both[0]) == ("FAILED", [exceptions.JobExpired])
    assert outcome(both[1]) == ("SUCCESSFUL", [])


def test_expiry_counts_from_the_call():
    result = add.apply_async((1,), countdown=60, expires=90)
    assert stored(result).expires_in == 30_000
    with pytest.raises(InvalidTask, match="the job would expire before it is due"):
        add.apply_async((1,), countdown=60, expires=60)


@pytest.mark.parametrize("option", sorted(REFUSED))
def test_options_without_counterpart_are_refused(option):
    with pytest.raises(InvalidTask, match=r"tests\.jobs\.test_celery\.add: .*=") as refused:
        add.apply_async((1,), **{option: {"keys": []}})
    assert str(refused.value).endswith(f": {REFUSED[option]}.")


def test_an_unknown_option_is_refused():
    with pytest.raises(InvalidTask, match="shadow='x': it has no counterpart in this queue"):
        add.apply_async((1,), shadow="x")
    with pytest.raises(InvalidTask, match="resultrepr_maxsize=5: it has no counterpart"):
        shared_task(resultrepr_maxsize=5)(act)
    with pytest.raises(InvalidTask, match="soft_time_limit=5: nothing is raised in a running task"):
        shared_task(soft_time_limit=5)(act)


def test_the_text_of_a_refusal_is_short():
    with pytest.raises(InvalidTask, match=r"link=<@task: shop\.total>: use a chain"):
        add.apply_async((1,), link=total)
    with pytest.raises(InvalidTask, match=r"once=.*False.*: it belongs to the task; of calls, the only value is"):
        once.apply_async((1,), once={"graceful": False})


def test_a_name_that_celery_does_not_know_becomes_an_attribute(caplog):
    declared = shared_task(timeout=1800, name="shop.act")(act)
    assert declared.timeout == 1800
    assert "task.unknown_option task=shop.act option=timeout" in caplog.text
    with pytest.raises(InvalidTask, match="func=5: it has no counterpart"):
        shared_task(func=5)(act)


@pytest.mark.usefixtures("modules")
def test_options_that_a_project_ignores():
    install(ignore=("soft_time_limit", "headers"))
    assert shared_task(soft_time_limit=5)(act).name == "tests.jobs.test_celery.act"
    assert add.apply_async((1,), headers={"a": 1}).id
    with pytest.raises(InvalidTask, match="link=5: use a chain"):
        add.apply_async((1,), link=5)
    install()
    with pytest.raises(InvalidTask, match="soft_time_limit=5"):
        shared_task(soft_time_limit=5)(act)


@pytest.mark.usefixtures("modules")
@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("shop.act", {}, ("mail", -3)),
        ("shop.act", {"queue": "default"}, ("default", -3)),
        ("shop.act", {"priority": 5, "queue": None}, ("mail", -5)),
        ("shop.sub.act", {}, ("mail", -3)),
        ("shop.here", {}, ("default", 0)),
        ("shops.act", {}, ("default", 0)),
    ],
)
def test_routes(name, options, expected):
    install(routes={"shop.*": {"queue": "mail", "priority": 3}, "*.here": "mail", "shop.here": "default"})
    task = shared_task(name=name, **options)(act)
    install()
    assert (task.queue_name, task.priority) == expected


@pytest.mark.usefixtures("modules")
def test_a_route_without_counterpart_is_refused():
    install(routes={"shop.*": {"routing_key": "mail"}})
    with pytest.raises(InvalidTask, match=r"shop\.act: routing_key='mail': there are no routing keys"):
        shared_task(name="shop.act")(act)
    install()


@pytest.mark.parametrize("name", sorted(ABSENT))
def test_attributes_without_counterpart_say_why(name):
    with pytest.raises(AttributeError, match=name) as refused:
        getattr(add, name)
    assert str(refused.value).endswith(ABSENT[name])


# -- arguments and results ----------------------------------------------------------

VALUES = [
    datetime.datetime(2026, 1, 2, 3, 4, 5, 678, tzinfo=datetime.UTC),
    datetime.date(2026, 1, 2),
    datetime.time(3, 4, 5),
    datetime.timedelta(days=-1, microseconds=5),
    uuid.UUID(int=5),
    Decimal("1.50"),
    b"abc",
    b"\xff",
]


def test_types_of_celery_are_kept():
    result = echo.delay(*VALUES, nested={"in": [VALUES]})
    run()
    assert log == [(tuple(VALUES), {"nested": {"in": [VALUES]}})]
    assert outcome(result) == ("SUCCESSFUL", [])
    assert decode(result.return_value) == [VALUES, {"nested": {"in": [VALUES]}}]


def test_the_encoding_is_that_of_kombu():
    assert encode(VALUES[0]) == {"__type__": "datetime", "__value__": "2026-01-02T03:04:05.000678+00:00"}
    assert encode(VALUES[1]) == {"__type__": "date", "__value__": "2026-01-02"}
    assert encode(VALUES[4]) == {"__type__": "uuid", "__value__": {"hex": f"{5:032x}"}}
    assert encode(VALUES[5]) == {"__type__": "decimal", "__value__": "1.50"}
    assert encode(VALUES[7]) == {"__type__": "base64", "__value__": "/w=="}
    assert encode((gettext_lazy("Yes"), 1)) == ["Yes", 1]
    with pytest.raises(TypeError, match=r"^tests\.jobs\.test_celery\.add: Object of type object is not JSON seria"):
        add.delay(object())
    with pytest.raises(ValueError, match="'set' is unknown"):
        decode({"__type__": "set", "__value__": []})


def test_a_result_that_is_ignored_may_be_anything():
    result = forgets.delay()
    run()
    assert (*outcome(result), result.return_value) == ("SUCCESSFUL", [], None)


# -- retries ------------------------------------------------------------------------


def test_retry_ends_with_its_exception():
    result = retries_itself.delay(7)
    assert len(run()) == 3
    assert log == [(number, result.id, False) for number in range(3)]
    status, errors = outcome(result)
    assert (status, errors[-1], len(errors)) == ("FAILED", KeyError, 3)
    assert all(issubclass(one, Retry) for one in errors[:-1])
    assert "KeyError(7)" in result.errors[0].traceback


def test_retry_waits_for_the_delay_of_the_task():
    result = retries_itself.delay(7)
    sequence()
    Sub(registry.handlers()[job_worlds.JOBS], name="a").settle()
    row = stored(result)
    assert (row.status, row.retry_reason) == ("READY", "KeyError(7)")
    assert 30_000 <= row.retry_at - row.last_attempted_at < 150_000


@pytest.mark.parametrize(("countdown", "seconds"), [(30, 30), (0, 50), (None, 50)])
def test_of_a_countdown_and_a_time_of_a_retry_the_countdown_counts(countdown, seconds):
    result = retries_in.delay(countdown)
    sequence()
    Sub(registry.handlers()[job_worlds.JOBS], name="a").settle()
    row = stored(result)
    assert row.status == "READY"
    assert abs(row.retry_at - row.last_attempted_at - seconds * 1000) < 9000


def test_retry_without_an_exception():
    result = retries_without_exception.delay()
    run()
    assert (log, outcome(result)[1][-1]) == ([0, 1, 2], MaxRetriesExceededError)
    log.clear()
    fewer = retries_without_exception.delay(max_retries=1)
    run()
    assert (log, outcome(fewer)[1][-1]) == ([0, 1], MaxRetriesExceededError)
    more = retries_without_exception.delay(max_retries=9)
    run()
    assert outcome(more) == ("FAILED", [InvalidTask])


def test_a_retry_does_not_count_whose_task_has_lowered_the_number_of_retries():
    result = does_not_count.delay()
    for second in range(5):
        run(advance=2 * second)
    assert len(log) >= 5
    assert set(log) == {0}
    assert outcome(result) == ("READY", [])


def test_what_a_request_has(clock):
    clock.stop()
    result = asks.apply_async(queue="mail", countdown=60)
    run(advance=61)
    request = log[0]
    assert outcome(result) == ("SUCCESSFUL", [])
    assert result.return_value == [{"priority": 4}, None, 3, False]
    assert request["delivery_info"] == {"routing_key": "mail", "priority": 4}
    assert (request["root_id"], request["task"], request["hostname"]) == (result.id, "shop.asks", result.worker_ids[0])
    assert datetime.datetime.fromisoformat(request["eta"]) == result.task.run_after
    log.clear()
    last = chain(asks.si(), asks.si()).delay()
    run()
    (root,) = {one["root_id"] for one in log}
    assert last.id.startswith(root)


@pytest.mark.parametrize("name", sorted(ABSENT_IN_REQUESTS))
def test_attributes_of_requests_without_counterpart_say_why(name):
    with pytest.raises(AttributeError, match=name) as refused:
        getattr(add.request, name)
    assert str(refused.value).endswith(ABSENT_IN_REQUESTS[name])
    with pytest.raises(AttributeError, match=r"'stamps': use get\('stamps'\)"):
        _ = add.request.stamps


def retry_after_an_error():
    try:
        raise ValueError
    except ValueError:
        retries_without_exception()


def test_retry_in_a_direct_call_raises_the_reason():
    with pytest.raises(KeyError):
        retries_itself(7)
    with pytest.raises(Retry) as raised:
        retry_after_an_error()
    assert isinstance(raised.value.__context__, ValueError)


def test_the_function_can_be_called_with_another_self():
    function = retries_without_exception.__wrapped__.__func__
    given = mock.Mock(**{"request.retries": 3, "retry.return_value": KeyError("of a mock")})
    with pytest.raises(KeyError, match="of a mock"):
        function(given)
    assert log == [3]
    assert add.__wrapped__(1, 2) == 3


def test_autoretry():
    script[:] = [KeyError("no")] * 6
    result = retried.delay()
    assert len(run()) == 6
    assert outcome(result)[1][-1] is KeyError
    assert [error.traceback.count("Retried: in") for error in result.errors] == [1, 1, 1, 1, 1, 0]
    assert "Retried: in 10 s" in result.errors[0].traceback
    assert "Retried: in 160 s" in result.errors[4].traceback


@pytest.mark.parametrize(
    ("raised", "calls", "status"),
    [
        (ValueError("no"), 2, "SUCCESSFUL"),
        (KeyError("no"), 1, "FAILED"),
        (Ignore(), 1, "SUCCESSFUL"),
        (Reject("no"), 2, "SUCCESSFUL"),
    ],
)
def test_exceptions_of_an_attempt(raised, calls, status):
    script[:] = [raised]
    result = retried_but_for_one.delay()
    run()
    assert (len(log), outcome(result)[0]) == (calls, status)


def test_other_exceptions_are_not_retried():
    script[:] = [ValueError("no")]
    result = retried.delay()
    assert len(run()) == 1
    assert outcome(result) == ("FAILED", [ValueError])


@pytest.mark.parametrize(("requeue", "status"), [(False, "FAILED"), (True, "SUCCESSFUL")])
def test_reject(requeue, status):
    script[:] = [Reject("no", requeue=requeue)]
    result = retried.delay()
    run()
    run(advance=5)
    assert (outcome(result)[0], len(log)) == (status, 1 + requeue)


def test_a_retry_with_other_arguments_is_a_job_that_continues_to_count():
    first = sends_again.apply_async([["good", "bad"]], queue="mail", priority=5)
    run()
    run(advance=181)
    run(advance=361)
    assert log == [("good", 0), ("bad", 0), ("bad", 1), ("bad", 2)]
    others = [one for one in enqueued(sends_again) if one.id != first.id]
    assert outcome(first) == ("SUCCESSFUL", [])
    assert sorted((one.status, len(one.errors)) for one in others) == [("FAILED", 1), ("SUCCESSFUL", 0)]
    assert {(one.task.queue_name, one.task.priority) for one in others} == {("mail", -5)}


def test_a_retry_may_have_other_arguments():
    result = once_again.delay(1, other=2)
    run()
    run(advance=5)
    assert log == [(1, 2, 0), (2, None, 1)]
    assert (*outcome(result), result.return_value) == ("SUCCESSFUL", [], None)


@pytest.mark.parametrize(
    ("enqueue", "reason"),
    [
        (lambda: once_again.delay(1, other=1), "is unique, and has not ended"),
        (lambda: chain(replaces.si(), add.si(1)).delay(), "a job of a chain keeps its arguments"),
    ],
)
def test_a_retry_that_cannot_have_other_arguments(enqueue, reason):
    enqueue()
    run()
    (failed,) = [one for one in (*enqueued(once_again), *enqueued(replaces)) if one.status == "FAILED"]
    assert reason in failed.errors[0].traceback


@pytest.mark.still_clock
@pytest.mark.parametrize(
    ("options", "expires_in"),
    [({}, 0), ({"expires": 200}, 20_000), ({"expires": 90}, 1), ({"countdown": 30, "expires": 260}, 50_000)],
)
def test_the_job_of_such_a_retry_expires_when_the_first_would_have(clock, options, expires_in):
    clock.stop()
    first = sends_again.apply_async([["bad"]], **options)
    run()
    clock.advance(options.get("countdown", 0) + 1)
    run()
    (other,) = [one for one in enqueued(sends_again) if one.id != first.id]
    assert abs(stored(other).expires_in - expires_in) < (3000 if expires_in > 1 else 1)
    clock.advance(181)
    run()
    assert outcome(other) == (("FAILED", [exceptions.JobExpired]) if expires_in == 1 else ("SUCCESSFUL", []))


# -- declarations -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {"max_attempts": 4}),
        ({"max_retries": None, "rate_limit": "100/m"}, {"max_attempts": None, "rate": "100/m"}),
        ({"max_retries": 0, "rate_limit": 5, "time_limit": 60}, {"rate": "5/s", "max_processing_time": 60}),
        ({"acks_late": True, "serializer": "json", "soft_time_limit": None, "base": Task}, {"max_attempts": 4}),
        ({"base": QueueOnce}, {"unique": "until_finished"}),
        ({"once": {"unlock_before_run": True, "timeout": 9}}, {"unique": "until_started", "unique_for": 9}),
    ],
)
def test_options_of_jobs(monkeypatch, given, expected):
    """The task is not declared: its function has no name that could be imported."""

    def job(**options):
        found.update(options)
        return lambda function: function

    found = {}
    monkeypatch.setattr(tasks, "job", job)
    with pytest.raises(InvalidTask, match="module"):
        shared_task(**given)(lambda: None)
    assert found.items() >= {**expected, "atomic": False, "retry_on": RetryLater}.items()


def test_a_static_method_can_be_a_task():
    result = Tasks.of_class.delay(5)
    run()
    assert (*outcome(result), log) == ("SUCCESSFUL", [], [("tasks.of_class", 5)])


def test_once_is_unique_until_the_job_has_finished():
    first = once.delay(1, b=2)
    assert once.apply_async((1,), once={"graceful": True}).id == first.id
    assert once.delay(2).id != first.id
    assert run()
    assert once.delay(1).id != first.id


def test_a_unique_task_stays_refused_in_a_chain():
    with pytest.raises(InvalidTask, match="is unique"):
        chain(once.si(1), once.si(2)).delay()


def test_base_classes_with_code_are_refused():
    class Loud(Task):
        def on_failure(self):
            pass

    with pytest.raises(InvalidTask, match="Loud defines on_failure"):
        shared_task(base=Loud)(act)
    with pytest.raises(InvalidTask, match="base=object"):
        shared_task(base=object)(act)


def test_async_functions_are_refused():
    async def later():
        pass

    with pytest.raises(InvalidTask, match="is async"):
        shared_task(later)


def test_an_application_declares_tasks_and_nothing_else():
    app = Celery("shop")
    assert app.task is shared_task
    with pytest.raises(AttributeError, match="autodiscover_tasks: remove it"):
        app.autodiscover_tasks()


# -- signatures ---------------------------------------------------------------------


def value_of(result):
    run()
    assert outcome(result) == ("SUCCESSFUL", [])
    return result.return_value


def test_a_chain_passes_results_on():
    assert value_of(chain(add.s(1, 2), add.s(10), add.si(5, 5)).delay()) == 10
    assert log == [(1, 2), (3, 10), (5, 5)]
    assert value_of((add.s(2) | add.s(10) | add.s(100)).apply_async((1,))) == 113
    assert value_of(chain([add.s(1)]).delay()) == 2
    assert chain([]).apply_async(priority=6) is None


def test_types_are_passed_on():
    chain(echo.s(VALUES[0]), echo.s()).delay()
    run()
    assert log[1] == (([[VALUES[0]], {}],), {})


def test_a_group_and_a_chord():
    results = group(add.s(number) for number in range(3)).delay()
    run()
    assert [(*outcome(one), one.return_value) for one in results] == [
        ("SUCCESSFUL", [], number) for number in (1, 2, 3)
    ]
    assert value_of(chord([add.s(1), add.s(2)])(total.s(factor=10))) == 50
    assert value_of(chord(group(add.s(1)), total.s()).delay()) == 2
    assert value_of((add.s(1) | group(add.s(10), add.s(20)) | signature("shop.total")).delay()) == 34
    assert group([]).delay() == []


def test_an_empty_group_is_left_out():
    """A query may find nothing. With Celery, the body of such a chord gets no results."""
    assert value_of(chord([], total.s(factor=2)).delay()) == 0
    assert log == []
    assert value_of(chord([], add.si(4)).delay(9)) == 5
    assert value_of(chain(group([]), total.s(), add.s(2)).delay()) == 2
    assert value_of(chain(add.s(1), group([]), add.s(2)).delay()) == 4
    assert chain(group([]), group([])).delay() == []


def test_options_of_a_chain():
    chain(add.si(1), add.si(2).set(priority=2)).apply_async(priority=6, countdown=60, queue="mail")
    jobs = enqueued(add)
    assert [(one.task.priority, one.task.queue_name) for one in jobs] == [(-6, "mail")] * 2
    assert [one.task.run_after is None for one in jobs] == [False, True]


def test_signatures_are_copied():
    first = add.signature((1,), countdown=5)
    second = first.clone().set(countdown=None, immutable=True)
    assert (first.options, first.immutable) == ({"countdown": 5}, False)
    assert (second.options, second.immutable) == ({"countdown": None}, True)


def test_a_signature_of_a_signature_is_a_copy():
    first = add.s(1, b=2).set(countdown=5)
    second = signature(first)
    second.kwargs["b"] = 3
    assert (first.kwargs, second.kwargs, second.options) == ({"b": 2}, {"b": 3}, {"countdown": 5})


def test_a_signature_can_be_an_argument_of_a_job():
    written = encode(total.si(Decimal(1), factor=2).set(priority=3))
    assert signature(decode(written)) == total.si(Decimal(1), factor=2).set(priority=3)
    starts.delay([starts.s(), starts.s()])
    for second in range(3):
        run(advance=2 * second)
    assert log == [2, 1, 0]
    with pytest.raises(TypeError, match="starts: Object of type Chain is not JSON"):
        starts.delay([chain(starts.s())])


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: group(add.s(1) | add.s(2)), "a group of chains"),
        (lambda: chain(add.s(1), act), "is not a signature"),
        (lambda: group(act, act), "is not a signature"),
        (lambda: chain(add.s(1), add.s(2).set(countdown=5)).delay(), "a later stage starts at once"),
        (lambda: chain(forgets.s(), add.s(2)).delay(), "has ignore_result=True"),
        (lambda: chain(add.s(1), add.s(2).set(expires=AWARE)).delay(), "it must be seconds from its start"),
        (lambda: signature("shop.unknown"), "no task with the name 'shop.unknown'"),
        (lambda: signature({"task": "shop.unknown"}), "no task with the name 'shop.unknown'"),
    ],
)
def test_what_a_chain_cannot_carry_is_refused(make, reason):
    with pytest.raises(InvalidTask, match=reason):
        make()


def test_tasks_mix_with_those_of_django():
    results = enqueue_many([call(add, 1), call(total, [1, 2])])
    run()
    assert [(outcome(one)[0], one.return_value) for one in results] == [("SUCCESSFUL", 2), ("SUCCESSFUL", 3)]


# -- other packages -----------------------------------------------------------------

MODULES = ("celery", "celery.exceptions", "celery.utils", "celery.utils.log", "celery_once")


@pytest.fixture
def modules(monkeypatch):
    """Takes back what ``install()`` has put in place."""
    for name in MODULES:
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
        monkeypatch.delitem(sys.modules, name)


@pytest.mark.usefixtures("modules")
def test_install_without_celery():
    install(default_priority=5)
    install(default_priority=4)
    found = {name: importlib.import_module(name) for name in MODULES}
    assert found["celery"].shared_task is shared_task
    assert found["celery"].chain is chain
    assert isinstance(add, found["celery"].Task)
    assert found["celery.exceptions"].Retry is Retry
    assert found["celery.utils.log"].get_task_logger("a").name == "a"
    assert found["celery_once"].QueueOnce is QueueOnce
    assert Priorities.of_job(3) == 1
    assert all(importlib.util.find_spec(name) for name in MODULES)
    with pytest.raises(ImportError, match="cannot import name 'current_app' from 'celery'"):
        exec("from celery import current_app")  # noqa: S102
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'celery\.signals'"):
        importlib.import_module("celery.signals")


@pytest.mark.usefixtures("modules")
def test_install_beside_celery():
    """Signatures of Celery's own tasks stay with Celery."""

    class OfCelery:
        pass

    class OfApplication(OfCelery):
        pass

    class Lazy(types.ModuleType):
        def __getattr__(self, name):
            self.shared_task = self.Celery = self.group = self.chord = self.signature = None
            self.chain = lambda *tasks, **options: ("of Celery", tasks, options)
            self.Task = OfCelery
            return vars(self)[name]

    sys.modules["celery"] = real = Lazy("celery")
    real._is_mysqlqueue = False
    install()
    assert real.Celery is None
    real.chord = package._for_ours("chord", lambda *tasks, **options: ("of Celery", tasks, options))
    real.signature = package._for_ours("signature", lambda *tasks, **options: ("of Celery", tasks, options))

    async def later():
        pass

    with pytest.raises(InvalidTask, match="is async"):
        real.shared_task(bind=True)(later)
    assert real.chain(1, 2, a=3) == ("of Celery", (1, 2), {"a": 3})
    # Signatures of Celery are dicts.
    assert real.chain({"task": "a"}) == ("of Celery", ({"task": "a"},), {})
    assert real.signature("of.celery") == ("of Celery", ("of.celery",), {})
    assert real.signature({"task": "of.celery"}) == ("of Celery", ({"task": "of.celery"},), {})
    assert real.signature("shop.total", args=(1,)) == signature("shop.total", (1,))
    assert real.signature({"task": "shop.total", "args": [1]}) == signature("shop.total", (1,))
    for options in ({}, {"body": total.s()}):
        body = () if options else (total.s(),)
        assert real.chord([add.s(1)], *body, **options) == chord([add.s(1)], total.s())
        assert real.chord([], *body, **options) == chord([], total.s())
    assert real.chain(add.s(1), add.s(2)) == chain(add.s(1), add.s(2))
    assert real.chain(add.si(number) for number in (1, 2)).stages == chain(add.si(1), add.si(2)).stages
    assert "celery.exceptions" not in sys.modules

    class Own(real.Task):
        pass

    assert [isinstance(one, real.Task) for one in (add, OfApplication(), Own(), act)] == [True, True, True, False]
    assert [isinstance(one, Own) for one in (add, OfApplication(), Own())] == [False, False, True]
    shared_task(base=Own)(act)


def test_settings_may_install_it():
    """Nothing of the queue is loaded that needs settings."""
    code = (
        "from django_mysqlqueue.contrib.celery import install\n"
        "install()\n"
        "import sys, celery\n"
        "assert 'django_mysqlqueue.models' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_the_page_has_all_names_and_whatever_is_refused():
    page = (DOCS / "reference" / "celery.md").read_text()
    for name in package.__all__:
        assert getattr(package, name) is not None
        assert f"<!-- generated: django_mysqlqueue.contrib.celery.{name} -->" in page
    for name in (*REFUSED, *ABSENT, *ABSENT_IN_REQUESTS):
        assert f"`{name}" in page, name

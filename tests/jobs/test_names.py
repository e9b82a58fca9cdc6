"""A job is reported by the name of its task: in log lines, signals, spans and metrics."""

from __future__ import annotations

import contextlib
import logging

import pytest
from django.dispatch import Signal
from prometheus_client import CollectorRegistry, generate_latest

from django_mysqlqueue import publish
from django_mysqlqueue.metrics import labels as task_labels
from django_mysqlqueue.metrics.process import ProcessMetrics, Source
from django_mysqlqueue.models import DeliveryState, JobResult
from django_mysqlqueue.options import job_queues
from django_mysqlqueue.signals import delivery_handled, delivery_settled, delivery_started
from django_mysqlqueue.tasks import importing
from django_mysqlqueue.tasks.framework import task_backends
from django_mysqlqueue.tasks.handlers import job_handlers
from django_mysqlqueue.testing import deliver_all
from tests.app import jobs
from tests.support import job_worlds
from tests.support.harness import USING, Sub, handler
from tests.support.internals import GroupRef
from tests.support.metrics import Samples, parsed
from tests.support.tracing import Tracing

ADD, FAIL = "tests.app.jobs.add", "tests.app.jobs.fail"
SIGNALS = (delivery_started, delivery_handled, delivery_settled)


@pytest.fixture(autouse=True)
def _backend(db, no_handlers, settings):
    settings.TASKS = job_worlds.TASKS
    jobs.log.clear()


def subscriber(**options):
    return Sub(*job_handlers().values(), **options)


def lines(caplog, name):
    return [one for one in caplog.records if getattr(one, "mysqlqueue", {}).get("event") == name]


def named(record):
    return record.mysqlqueue.get("task"), record.mysqlqueue.get("id")


# -- the log ------------------------------------------------------------------


@pytest.fixture
def told(caplog):
    caplog.set_level(logging.INFO, "django_mysqlqueue")
    return caplog


def test_a_success_is_a_line(told):
    first = jobs.add.enqueue(1)
    deliver_all()
    (line,) = lines(told, "job.succeeded")
    assert (line.name, line.levelno) == ("django_mysqlqueue.jobs", logging.INFO)
    seconds = line.mysqlqueue.pop("seconds")
    assert line.mysqlqueue == {"event": "job.succeeded", "task": ADD, "id": first.id, "attempt": 1}
    assert 0 <= seconds < 60
    assert line.getMessage() == f"job.succeeded task={ADD} id={first.id} attempt=1 seconds={seconds}"


def test_the_level_of_its_logger_switches_it_off(told):
    told.set_level(logging.WARNING, "django_mysqlqueue.jobs")
    jobs.add.enqueue(1)
    deliver_all()
    assert jobs.log == [(1, 1)]
    assert not lines(told, "job.succeeded")


def test_only_what_is_written_has_succeeded(told):
    """An ack that comes too late is lost, and a job that had ended before has not succeeded now."""
    late, ended = jobs.plain.enqueue(1), jobs.add.enqueue(2)
    JobResult.objects.filter(id=ended.id).update(status="FAILED", finished_at=5)
    sub = subscriber()
    sub.step()
    held = [sub.take(), sub.take()]
    for one in held:
        if one.claimed.job.id == late.id:
            DeliveryState.objects.filter(message_offset=one.claimed.offset).update(delivery_token=12345)
    for one in held:
        sub.run(one)
    assert not lines(told, "job.succeeded")
    sub.flush()
    assert not lines(told, "job.succeeded")
    assert [named(line) for line in lines(told, "delivery.lost")] == [("tests.app.jobs.plain", late.id)]


def test_a_failure_names_the_task(told):
    first = jobs.fail.enqueue()
    deliver_all(raise_exceptions=False)
    (line,) = lines(told, "delivery.failed")
    assert named(line) == (FAIL, first.id)
    assert f"attempt=1 task={FAIL} id={first.id} error=" in line.getMessage()
    (line,) = lines(told, "delivery.dead_lettered")
    assert named(line) == (FAIL, first.id)
    assert f" task={FAIL} id={first.id} " in line.getMessage()


def test_an_error_after_the_commit_names_the_task(told):
    first = jobs.fail_after_commit.enqueue(1)
    deliver_all(raise_exceptions=False)
    assert [named(line) for line in lines(told, "on_commit.failed")] == [("tests.app.jobs.fail_after_commit", first.id)]


def test_other_deliveries_have_no_task(told):
    def fail(delivery):
        raise ValueError

    publish("t", 1)
    Sub(handler(function=fail)).settle()
    assert {named(line) for line in lines(told, "delivery.failed")} == {(None, None)}
    assert " task=" not in told.text


# -- signals ------------------------------------------------------------------


@contextlib.contextmanager
def heard():
    found = []

    def receiver(signal, task, job_id, delivery, **arguments):
        found.append((SIGNALS.index(signal), task, job_id, delivery.topic))

    for one in SIGNALS:
        assert isinstance(one, Signal)
        one.connect(receiver)
    try:
        yield found
    finally:
        for one in SIGNALS:
            one.disconnect(receiver)


def test_signals_tell_the_task():
    publish("t", 1)
    first = jobs.fail.enqueue()
    with heard() as found:
        Sub(handler()).settle()
        subscriber().settle()
    assert found == [
        *((place, "", "", "t") for place in range(3)),
        *((place, FAIL, first.id, "jobs.default") for place in range(3)),
    ]


# -- spans --------------------------------------------------------------------


def test_the_span_of_a_job_is_named_after_its_task():
    from django_mysqlqueue import otel

    made = Tracing()
    otel.instrument(tracer_provider=made.provider)
    try:
        first = jobs.add.enqueue(1)
        deliver_all()
    finally:
        otel.uninstrument()
    span = made.only(ADD)
    assert span.attributes["messaging.mysqlqueue.task"] == ADD
    assert span.attributes["messaging.message.id"] == first.id
    assert span.attributes["messaging.destination.name"] == "jobs.default"
    assert made.only("send jobs.default").context.trace_id != span.context.trace_id


# -- metrics ------------------------------------------------------------------


def measured(*handlers):
    sub, registry = Sub(*handlers), CollectorRegistry()
    metrics = ProcessMetrics([Source(USING, sub.handlers, sub.inbox)], registry)
    sub.inbox.watch.listeners.append(metrics.settled)
    return sub, lambda: Samples(parsed(generate_latest(registry).decode()))


def ended(found, task, outcome):
    return found.value("deliveries_total", topic="jobs.default", group="jobs", task=task, outcome=outcome)


def test_deliveries_by_task(monkeypatch):
    monkeypatch.setattr(job_queues, "declared", {ADD: None, "tests.app.jobs.write": None, FAIL: None})
    monkeypatch.setattr(task_labels, "TASKS", 2)
    sub, read = measured(*job_handlers().values(), handler())
    found = read()
    for task in (ADD, "tests.app.jobs.write", "other"):
        assert ended(found, task, "failed") == 0, "there from the start"
    for number in range(2):
        jobs.add.enqueue(number)
        jobs.fail.enqueue(number)
    jobs.plain.enqueue(1)  # It is imported later than the process began, or belongs to another queue.
    publish("t", 1)
    sub.settle()
    found = read()
    assert ended(found, ADD, "acked") == 2
    assert ended(found, "other", "dead_lettered") == 2
    assert ended(found, "other", "acked") == 1
    labels = {"topic": "jobs.default", "group": "jobs"}
    assert found.value("processing_seconds_count", task=ADD, **labels) == 2
    assert found.value("end_to_end_seconds_count", task="other", **labels) == 1
    assert found.value("deliveries_total", topic="t", group="g", outcome="acked") == 1, "no task, no label"
    assert {dict(labels).get("task") for _, labels in found} == {None, ADD, "tests.app.jobs.write", "other"}


def test_the_labels_of_tasks_are_those_of_the_start(monkeypatch):
    monkeypatch.setattr(job_queues, "declared", {ADD: None})
    sub, read = measured(*job_handlers().values())
    job_queues.declared[FAIL] = None
    jobs.fail.enqueue()
    sub.settle()
    assert ended(read(), "other", "dead_lettered") == 1


def test_tasks_of_a_queue_in_the_order_of_their_declaration(monkeypatch, settings):
    settings.TASKS = {"default": {"BACKEND": job_worlds.BACKEND, "QUEUES": ["default", "mail"]}}
    monkeypatch.setattr(job_queues, "declared", {})
    monkeypatch.setattr(importing, "_importable", {})
    for one in (jobs.write, jobs.add, jobs.fail, jobs.write):
        task_backends["default"].validate_task(one)
    found = job_handlers()
    assert list(job_queues.declared) == ["tests.app.jobs.write", ADD, FAIL]
    assert found[GroupRef("jobs", "jobs.default")].tasks() == ["tests.app.jobs.write", ADD, FAIL]
    assert found[GroupRef("jobs", "jobs.mail")].tasks() == []
    assert list(handler().tasks()) == []

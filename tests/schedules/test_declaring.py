"""Schedules as projects declare them: by decorator, by call and in the settings."""

from __future__ import annotations

import datetime
import importlib
import os
import subprocess
import sys

import pytest
from django.core import checks as django_checks

from django_mysqlqueue import recurring_message
from django_mysqlqueue.exceptions import SubscriberError
from django_mysqlqueue.models import JobResult, OutboxMessage, Schedule
from django_mysqlqueue.schedules import definitions, registry
from django_mysqlqueue.schedules.timetables import Timetable
from django_mysqlqueue.tasks import recurring
from django_mysqlqueue.testing import deliver_all, run_recurring
from tests.app import jobs
from tests.support import job_worlds
from tests.support.harness import USING
from tests.support.internals import declared_schedules

pytestmark = pytest.mark.any_engine
FIVE = datetime.timedelta(minutes=5)


def declared():
    """The module with schedules, imported again: not before, because other tests have none."""
    return importlib.reload(importlib.import_module("tests.app.recurring"))


@pytest.fixture(autouse=True)
def _own(monkeypatch, settings):
    monkeypatch.setattr(registry, "_declared", {})
    settings.TASKS = job_worlds.TASKS


def only():
    ((_, found),) = declared_schedules().items()
    ((name, definition),) = found.items()
    return name, definition


def run_checks():
    found = django_checks.run_checks(tags=["django_mysqlqueue"])
    return [(one.id.partition(".")[2], one.msg) for one in found if one.id.startswith("django_mysqlqueue.")]


# -- what is declared ---------------------------------------------------------


def test_decorators_above_and_below_the_task():
    module = declared()
    found = declared_schedules()[USING]
    assert set(found) == {"tests.app.recurring.above", "below", "each-second", "ping"}
    above = found["tests.app.recurring.above"]
    assert above.timetable == Timetable(cron="0 3 * * *", timezone="Europe/Berlin")
    assert (above.topic, above.task, above.backend) == ("jobs.default", "tests.app.recurring.above", "default")
    assert above.payload == {"task": "tests.app.recurring.above", "args": [1], "kwargs": {"b": {"c": [2]}}}
    assert (above.priority, above.catch_up, above.overlap) == (7, "latest", "queue")
    assert found["below"].timetable == Timetable(every_ms=300_000)
    assert (found["below"].task, found["below"].overlap) == ("tests.app.recurring.below", "skip")
    assert (found["ping"].topic, found["ping"].payload, found["ping"].key) == ("pings", {"n": 1}, "k")
    assert (found["ping"].metadata, found["ping"].task) == ({"m": True}, "")
    assert type(module.above).__name__ == "Task"
    assert run_checks() == []


def test_a_task_that_exists_stays_as_it_is(settings):
    settings.TASKS = {"default": {"BACKEND": job_worlds.BACKEND, "QUEUES": ["default", "slow"]}}
    slow = jobs.add.using(queue_name="slow", priority=3)
    assert recurring(every=FIVE, args=(1,))(slow) is slow
    name, definition = only()
    assert name == "tests.app.jobs.add"
    assert (definition.topic, definition.priority) == ("jobs.slow", 3)


def test_a_task_may_have_several_schedules():
    recurring(every=FIVE)(jobs.add)
    recurring("0 4 * * *", name="at-four", args=[2])(jobs.add)
    assert set(declared_schedules()[USING]) == {"tests.app.jobs.add", "at-four"}


def test_an_interval_may_have_a_start_or_be_spread(settings):
    start = datetime.datetime(2026, 1, 1, 3, tzinfo=datetime.UTC)
    recurring(every=FIVE, start=start)(jobs.add)
    recurring(every=FIVE, name="spread", spread=True)(jobs.add)
    recurring_message("message", every=60, topic="t", payload=1, spread=True)
    settings.MYSQLQUEUE = {
        "RECURRING": {"configured": {"EVERY": 300, "START": start, "TOPIC": "t", "PAYLOAD": 1}},
    }
    found = {name: one.timetable for name, one in declared_schedules()[USING].items()}
    assert found["tests.app.jobs.add"] == found["configured"]
    assert found["configured"].start_ms == start.timestamp() * 1000
    assert found["spread"].spread
    assert 0 <= found["spread"].start_ms < 300_000
    assert 0 <= found["message"].start_ms < 60_000


def test_none_is_as_if_an_option_was_not_given():
    recurring(every=FIVE)(jobs.add)
    name, definition = only()
    options = dict.fromkeys(("start", "timezone", "args", "kwargs", "catch_up", "overlap"))
    recurring(every=FIVE, name=name + "2", **options)(jobs.add)
    assert declared_schedules()[USING] == {name: definition, name + "2": definition}


def test_the_time_zone_of_the_project_is_the_default(settings):
    settings.TIME_ZONE = "Asia/Tokyo"
    recurring("0 4 * * *")(jobs.add)
    assert only()[1].timetable.timezone == "Asia/Tokyo"


def test_settings(settings):
    settings.MYSQLQUEUE = {
        "RECURRING": {
            "nightly": {"CRON": "0 3 * * *", "TIMEZONE": "Europe/Berlin", "TASK": "tests.app.jobs.add", "ARGS": [1]},
            "ping": {"EVERY": 300, "TOPIC": "pings", "PAYLOAD": {"a": 1}, "KEY": "k", "METADATA": {"b": 2}},
            "often": {"EVERY": FIVE, "TASK": "tests.app.jobs.add", "KWARGS": {"a": 1}, "OVERLAP": "skip"},
            "all": {"EVERY": FIVE, "TOPIC": "pings", "PAYLOAD": None, "CATCH_UP": "all"},
        }
    }
    found = declared_schedules()[USING]
    assert str(found["nightly"].timetable) == "0 3 * * *"
    assert found["nightly"].payload == {"task": "tests.app.jobs.add", "args": [1], "kwargs": {}}
    assert (found["ping"].topic, found["ping"].payload, found["ping"].key) == ("pings", {"a": 1}, "k")
    assert (found["often"].overlap, found["all"].catch_up, found["all"].payload) == ("skip", "all", None)
    assert run_checks() == []


def test_a_topic_needs_no_framework_for_tasks():
    """Django 5.2 without django-tasks: neither the name nor the schedule imports one."""
    code = """
import sys
sys.modules["django_tasks"] = sys.modules["django.tasks"] = None
import os
os.environ["TEST_MYSQLQUEUE"] = '{"RECURRING": {"ping": {"EVERY": 60, "TOPIC": "t", "PAYLOAD": 1}}}'
from django.conf import settings
settings.INSTALLED_APPS = [one for one in settings.INSTALLED_APPS if one not in ("django_tasks", "tests.app")]
import importlib.util
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, *more: None if name in ("django_tasks", "django.tasks") else found(name, *more)
import django
django.setup()
import django_mysqlqueue
django_mysqlqueue.recurring_message("pong", every=60, topic="t", payload=2)
from django_mysqlqueue.runtime.registering import declared_schedules
assert sorted(declared_schedules()["default"]) == ["ping", "pong"]
"""
    env = {**os.environ, "DJANGO_SETTINGS_MODULE": "tests.settings"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, done.stderr


def test_the_row_has_all_of_it():
    """What is parsed from the row is what was declared, and equal definitions have equal texts."""
    declared()
    for definition in declared_schedules()[USING].values():
        assert definitions.parse(definition.as_json()) == definition
        assert definitions.parse(definition.as_json()).as_json() == definition.as_json()
    deep: object = 1
    for _ in range(600):
        deep = [deep]
    definition = definitions.Definition(Timetable(every_ms=60_000), "t", deep)
    assert definitions.parse(definition.as_json()) == definition
    for text in ("[]", "5", '{"topic": "t"}', "{"):
        with pytest.raises(ValueError, match=r"This release does not know|Expecting"):
            definitions.parse(text)


# -- one name -----------------------------------------------------------------


def test_two_definitions_with_one_name_are_refused_with_both_places():
    recurring(every=FIVE)(jobs.add)
    with pytest.raises(SubscriberError, match=r"name 'tests.app.jobs.add': tests.schedules.test_declaring, line \d+, "):
        recurring(every=60)(jobs.add)


def test_the_same_definition_twice_is_one_schedule():
    declared()
    declared()
    for _ in range(2):
        recurring(every=FIVE, name="twice")(jobs.add)
    recurring(every=FIVE, name="twice")(jobs.add)
    assert "twice" in declared_schedules()[USING]


def test_code_and_settings_with_one_name(settings):
    recurring(every=FIVE, name="nightly")(jobs.add)
    settings.MYSQLQUEUE = {"RECURRING": {"nightly": {"EVERY": 60, "TASK": "tests.app.jobs.add"}}}
    ((check, text),) = run_checks()
    assert check == "E027"
    assert text.startswith("Two schedules have the name 'nightly': tests.schedules.test_declaring, line ")
    assert "MYSQLQUEUE['RECURRING']['nightly']" in text
    with pytest.raises(SubscriberError, match="Two schedules have the name"):
        declared_schedules()


# -- what is refused ----------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"cron": "0 3 * *"}, r"cron='0 3 \* \*': must have five fields"),
        ({"cron": "0 3 * * *", "timezone": "Mars"}, "timezone='Mars': must be the name of a time zone"),
        ({"every": 0.5}, "every=0.5: must be at least 1 second"),
        ({}, "pass a cron line or every"),
        ({"every": 5, "catch_up": "some"}, "catch_up='some': must be 'latest' or 'all'"),
        ({"every": 5, "overlap": "kill"}, "overlap='kill': must be 'queue' or 'skip'"),
        ({"every": 5, "overlap": "skip", "catch_up": "all"}, "catch_up='all' with overlap='skip'"),
        ({"every": 5, "args": [object()]}, r"args=\[<object.*>\]: must be JSON-serializable"),
        ({"every": 5, "args": [float("nan")]}, r"args=\[nan\]: must be JSON-serializable"),
        ({"every": 5, "args": jobs.DEEP}, r"args=<list>: must be JSON-serializable \(maximum recursion depth"),
        ({"every": 5, "args": "ab"}, "args='ab': must be a list"),
        ({"every": 5, "kwargs": [1]}, r"kwargs=\[1\]: must be a dict of names"),
        ({"every": 5, "kwargs": jobs.DEEP}, "kwargs=<list>: must be a dict of names"),
        ({"every": 5, "kwargs": {1: 2}}, "kwargs={1: 2}: must be a dict of names"),
        ({"every": 5, "kwargs": {"a": {1, 2}}}, "must be JSON-serializable"),
        ({"every": 5, "name": "a b"}, "name='a b': must be 1 to 150 letters"),
        ({"every": 5, "name": ""}, "name='': must be"),
        ({"every": 5, "name": "x" * 151}, "must be 1 to 150"),
        ({"every": 5, "name": "a:b"}, "name='a:b': must be"),
        ({"every": 5, "spread": "yes"}, "spread='yes': must be True or False"),
        ({"every": 5, "start": "soon"}, "start='soon': must be a datetime"),
        ({"every": 5, "spread": True, "start": datetime.datetime.now(datetime.UTC)}, "pass start or spread, and not"),
        ({"cron": "0 3 * * *", "spread": True}, "start and spread are for intervals"),
    ],
)
def test_an_invalid_option_names_the_schedule_its_place_and_the_rule(options, text):
    with pytest.raises(SubscriberError, match=text) as caught:
        recurring(options.pop("cron", None), **options)(jobs.add)
    assert "tests.schedules.test_declaring, line" in str(caught.value)
    assert registry._declared == {}


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"topic": "a b"}, "topic 'a b': must be"),
        ({"topic": "t_dlq"}, "reserved for dead letters"),
        ({"topic": None}, "pass a task or a topic"),
        ({"topic": "t", "payload": object()}, "payload=<object.*>: must be JSON-serializable"),
        ({"topic": "t", "payload": jobs.DEEP}, "payload=<list>: must be JSON-serializable"),
        ({"topic": "t", "payload": b"x"}, "must be JSON-serializable"),
        ({"topic": "t", "key": 5}, "key 5: must be a str"),
        ({"topic": "t", "metadata": [1]}, r"metadata=\[1\]: must be a dict"),
    ],
)
def test_an_invalid_message(options, text):
    with pytest.raises(SubscriberError, match=text):
        recurring_message("s", every=5, **{"payload": 1, **options})


def test_what_is_not_a_task_is_refused():
    with pytest.raises(SubscriberError, match=r"@recurring on 5 .*: it is not a task or a function"):
        recurring(every=5)(5)
    recurring(every=5)(test_settings)
    with pytest.raises(SubscriberError, match=r"test_settings is not a task"):
        declared_schedules()


@pytest.mark.parametrize(
    ("entry", "text"),
    [
        (5, "MYSQLQUEUE['RECURRING']['s'] must be a dict, not int."),
        ({"EVRY": 5, "TOPIC": "t", "PAYLOAD": 1}, "has the unknown key 'EVRY'. Did you mean EVERY?"),
        ({"every": 5}, "has the unknown key 'every'."),
        ({"EVERY": 5}, "pass a task or a topic, and not both"),
        (
            {"EVERY": 5, "TOPIC": "t", "TASK": "tests.app.jobs.add", "PAYLOAD": 1},
            "pass a task or a topic, and not both",
        ),
        ({"EVERY": 5, "TOPIC": "t"}, "payload is missing"),
        ({"EVERY": 5, "TOPIC": "t", "PAYLOAD": 1, "OVERLAP": "skip"}, "overlap='skip': it is for tasks"),
        ({"EVERY": 5, "TOPIC": "t", "PAYLOAD": 1, "ARGS": [1]}, "args and kwargs are for tasks"),
        ({"EVERY": 5, "TASK": "tests.app.jobs.add", "PAYLOAD": 1}, "payload, key and metadata are for topics"),
        ({"EVERY": 5, "TASK": "nowhere.task"}, "No module named 'nowhere'"),
        ({"EVERY": 5, "TASK": "tests.app.jobs.log"}, "tests.app.jobs.log is not a task"),
        ({"EVERY": 5, "TASK": 5}, "task=5: must be the dotted path of a task"),
        ({"EVERY": 5, "TOPIC": "t", "PAYLOAD": "x" * 1_100_000}, "MAX_PAYLOAD_BYTES"),
        ({"EVERY": 5, "TOPIC": "t", "PAYLOAD": 1, "METADATA": {"mysqlqueue.x": 1}}, "mysqlqueue."),
    ],
)
def test_an_invalid_entry_of_the_settings(settings, entry, text):
    settings.MYSQLQUEUE = {"RECURRING": {"s": entry}}
    ((check, message),) = run_checks()
    assert check == "E027"
    assert text in message
    assert "'s'" in message
    with pytest.raises(SubscriberError):
        declared_schedules()


def test_an_unknown_queue_is_refused(settings):
    settings.TASKS = {"default": {"BACKEND": job_worlds.BACKEND, "QUEUES": ["default", "slow"]}}
    recurring(every=5)(jobs.add.using(queue_name="slow"))
    settings.TASKS = job_worlds.TASKS
    with pytest.raises(SubscriberError, match="the backend 'default' has no queue 'slow'"):
        declared_schedules()


def test_a_task_of_another_backend_is_left_out(settings):
    """In development, TASKS may have another backend: the project runs, and check says so."""
    settings.TASKS = {"default": {"BACKEND": "django_tasks.backends.immediate.ImmediateBackend"}}
    if "django_tasks" not in settings.INSTALLED_APPS:
        settings.TASKS = {"default": {"BACKEND": "django.tasks.backends.immediate.ImmediateBackend"}}
    recurring(every=5)(jobs.add)
    recurring_message("s", every=5, topic="t", payload=1)
    assert set(declared_schedules()[USING]) == {"s"}
    ((check, text),) = run_checks()
    assert check == "W028"
    assert "the backend 'default' of the task tests.app.jobs.add in TASKS is not MySQLQueueBackend" in text


def test_declaring_touches_no_database():
    """No fixture gives access to one."""
    declared()
    assert registry.find().errors == []


def test_subscribers_import_the_tasks_of_the_apps(settings, monkeypatch):
    """As they import ``subscribers.py``; only if TASKS has queues."""
    from django_mysqlqueue.subscriptions import registry as handlers

    imported = []
    monkeypatch.setattr(handlers, "autodiscover_modules", lambda name: imported.append(name))
    handlers.discover()
    assert imported == ["subscribers", "tasks"]
    settings.TASKS = {}
    handlers.discover()
    assert imported == ["subscribers", "tasks", "subscribers"]


# -- tests of projects --------------------------------------------------------


def test_a_test_runs_a_schedule(db, no_handlers):
    declared()
    job = run_recurring("tests.app.recurring.above")
    assert JobResult.objects.get(id=job).status == "READY"
    deliver_all()
    assert JobResult.objects.get(id=job).status == "SUCCESSFUL"
    message = run_recurring("ping")
    assert OutboxMessage.objects.get(message_id=message).topic == "pings"
    assert run_recurring("ping") != message
    assert not Schedule.objects.exists()
    with pytest.raises(SubscriberError, match=r"There is no schedule 'pong'\. Schedules: below, each-second, ping,"):
        run_recurring("pong")

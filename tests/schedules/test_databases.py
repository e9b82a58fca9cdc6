"""Schedules of a queue in several databases: each row is where its messages are stored."""

from __future__ import annotations

import json

import pytest
from django.core.management.base import CommandError

from django_mysqlqueue import operations
from django_mysqlqueue.inspection import list_schedules
from django_mysqlqueue.models import JobResult, Operation, OutboxMessage, Schedule
from django_mysqlqueue.schedules import registry
from django_mysqlqueue.testing import published, run_recurring
from tests.support import job_worlds
from tests.support.commands import run as command
from tests.support.internals import Ticker, declared_schedules, register_schedules

DEFAULT, QUEUE = "default", "queue"


@pytest.fixture(autouse=True)
def _own(queue_db, no_handlers, settings, monkeypatch):
    monkeypatch.setattr(registry, "_declared", {})
    settings.TASKS = job_worlds.TASKS
    settings.MYSQLQUEUE = {
        "TOPICS": {
            "far": {"DATABASE": QUEUE},
            "via": {"DATABASE": QUEUE, "VIA": DEFAULT},
            "jobs.default": {"DATABASE": QUEUE},
        },
        "RECURRING": {
            "near": {"EVERY": 60, "TOPIC": "near", "PAYLOAD": 1},
            "far": {"EVERY": 60, "TOPIC": "far", "PAYLOAD": 2},
            "via": {"EVERY": 60, "TOPIC": "via", "PAYLOAD": 3},
            "job": {"EVERY": 60, "TASK": "tests.app.jobs.add", "ARGS": [1]},
        },
    }


def register():
    for alias, found in declared_schedules().items():
        register_schedules(alias, found)


def test_a_row_is_where_the_messages_are_stored():
    assert {alias: set(found) for alias, found in declared_schedules().items()} == {
        DEFAULT: {"near", "via"},
        QUEUE: {"far", "job"},
    }
    register()
    assert [one.name for one in list_schedules(using=DEFAULT)] == ["near", "via"]
    assert [one.name for one in list_schedules(using=QUEUE)] == ["far", "job"]


def test_each_database_ticks_its_own():
    register()
    for alias in (DEFAULT, QUEUE):
        for one in Schedule.objects.using(alias):
            one.last_tick -= 70_000
            one.save()
    for alias, found in declared_schedules().items():
        Ticker(alias, found).turn()
    stored = {
        alias: set(OutboxMessage.objects.using(alias).values_list("topic", flat=True)) for alias in (DEFAULT, QUEUE)
    }
    assert stored == {DEFAULT: {"near", "via@queue"}, QUEUE: {"far", "jobs.default"}}
    assert JobResult.objects.using(QUEUE).count() == 1
    assert not JobResult.objects.using(DEFAULT).exists()


def test_a_test_runs_each():
    for name, topic in (("near", "near"), ("far", "far"), ("via", "via"), ("job", "jobs.default")):
        message = run_recurring(name)
        assert [one.id for one in published(topic)] == [message]


def test_the_command_shows_all_and_finds_the_one():
    register()
    text = command("queuerecurring")
    assert text.index("Database 'default'") < text.index("near") < text.index("Database 'queue'") < text.index("far")
    found = json.loads(command("queuerecurring", "--format", "json"))
    assert [len(one["schedules"]) for one in found["databases"]] == [2, 2]
    assert "The schedule far is paused." in command("queuerecurring", "--pause", "far", "--noinput")
    assert Schedule.objects.using(QUEUE).get(name="far").paused_at
    assert Operation.objects.using(QUEUE).get().action == "pause recurring"
    with pytest.raises(CommandError, match=r"There is no schedule 'far'\. Schedules: near, via\."):
        command("queuerecurring", "--pause", "far", "--noinput", "--database", DEFAULT)
    with pytest.raises(
        CommandError, match=r"There is no schedule 'fra'\. Schedules: far, job, near, via\. Did you mean"
    ):
        command("queuerecurring", "--resume", "fra", "--noinput")


def test_the_api_finds_the_database():
    register()
    operations.run_recurring("job", actor="ada")
    assert JobResult.objects.using(QUEUE).count() == 1
    assert operations.pause_recurring("near", actor="ada").changed == 1
    assert Schedule.objects.using(DEFAULT).get(name="near").paused_at

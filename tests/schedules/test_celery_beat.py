"""The import of django-celery-beat: its tables as its releases make them, without the package."""

from __future__ import annotations

import datetime
import json

import pytest
from django.core.management.base import CommandError
from django.db import connection

from django_mysqlqueue.contrib.celery import QueueOnce, shared_task
from django_mysqlqueue.exceptions import OperationRefused
from django_mysqlqueue.models import Operation, Schedule
from django_mysqlqueue.operations import import_celery_beat
from django_mysqlqueue.schedules import registry
from django_mysqlqueue.schedules.definitions import parse
from django_mysqlqueue.tasks import job, schedules
from tests.support import beat_tables, job_worlds
from tests.support.commands import run as command
from tests.support.job_worlds import PATH

try:
    from django.tasks import task
except ImportError:
    from django_tasks import task

LATER = datetime.datetime(2100, 1, 1, 3, tzinfo=datetime.UTC)
EARLIER = datetime.datetime(2020, 1, 1, 3, tzinfo=datetime.UTC)


@pytest.fixture(autouse=True)
def _own(db, no_handlers, settings, monkeypatch):
    monkeypatch.setattr(registry, "_declared", {})
    settings.TASKS = job_worlds.TASKS
    settings.TIME_ZONE = "UTC"


@pytest.fixture
def beat():
    """Makes the tables, and returns a function that inserts a periodic task."""
    with beat_tables.there():
        yield periodic


_ids = iter(range(1, 10**6))


def insert(table, **values):
    values = {"id": next(_ids), **values}
    columns, marks = ", ".join(values), ", ".join(["%s"] * len(values))
    beat_tables.execute(f"INSERT INTO django_celery_beat_{table} ({columns}) VALUES ({marks})", *values.values())
    return values["id"]


def crontab(**values):
    fields = dict.fromkeys(("minute", "hour", "day_of_week", "day_of_month", "month_of_year"), "*")
    return {"crontab_id": insert("crontabschedule", **{**fields, "timezone": "UTC", **values})}


def every(number, period="minutes"):
    return {"interval_id": insert("intervalschedule", every=number, period=period)}


def clocked(time):
    return {"clocked_id": insert("clockedschedule", clocked_time=stored(time))}


def stored(time):
    """A time as Django stores it."""
    return connection.ops.adapt_datetimefield_value(time)


def periodic(name, **values):
    given = {"task": PATH, "args": "[]", "kwargs": "{}", "enabled": True, "one_off": False, **values}
    insert("periodictask", name=name, **given)


def definitions():
    return {one.name: parse(one.definition) for one in Schedule.objects.all()}


def test_intervals_crontabs_and_clocked_schedules_are_taken(beat):
    beat("every five", args="[1]", kwargs='{"b": [2]}', **every(5), enabled=False)
    beat("daily", **every(1, "days"), start_time=stored(EARLIER))
    beat("fast", **every(2_500_000, "microseconds"))
    beat("nightly", **crontab(minute="0", hour="3", day_of_week="mon-friday, 0", timezone="Europe/Berlin"))
    beat("monthly", **crontab(minute="*/5", day_of_month="1,15", month_of_year="january"), start_time=stored(EARLIER))
    beat("weekdays", **crontab(day_of_month="*/2", day_of_week="1"))
    beat("once", **clocked(LATER), one_off=True)
    preview = import_celery_beat(actor="ada", dry_run=True)
    assert not Schedule.objects.exists()
    assert (preview.planned, preview.changed, preview.not_taken) == (7, 0, ())
    done = import_celery_beat(actor="ada")
    assert done.created == preview.created
    found = definitions()
    assert set(found) == set(done.created) == {"every-five", "daily", "fast", "nightly", "monthly", "weekdays", "once"}
    times = {name: one.timetable for name, one in found.items()}
    assert (times["every-five"].every_ms, times["every-five"].spread) == (300_000, True)
    assert found["every-five"].payload == {"task": PATH, "args": [1], "kwargs": {"b": [2]}}
    assert (times["daily"].every_ms, times["daily"].start_ms) == (86_400_000, EARLIER.timestamp() * 1000)
    assert times["fast"].every_ms == 2500
    assert (times["nightly"].cron, times["nightly"].timezone) == ("0 3 * * MON-FRI,0", "Europe/Berlin")
    assert (times["monthly"].cron, times["monthly"].timezone) == ("*/5 * 1,15 JAN *", "UTC")
    assert times["weekdays"].cron == "* * */2 * 1"
    assert times["once"].start_ms == LATER.timestamp() * 1000
    paused = {one.name for one in Schedule.objects.filter(paused_at__gt=0)}
    assert paused == {"every-five"}
    assert Schedule.objects.filter(editable=True).count() == 7
    assert set(Operation.objects.values_list("action", "actor")) == {("create recurring", "ada")}
    assert Operation.objects.count() == 7
    assert any("Stop Celery beat" in one for one in done.warnings)


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        (lambda: {"solar_id": insert("solarschedule", event="sunset", latitude=1, longitude=1)}, "no solar schedules"),
        (lambda: {**every(5), "task": "celery.backend_cleanup"}, "task='celery.backend_cleanup': no module that"),
        (lambda: crontab(day_of_month="1-7", day_of_week="mon"), "'1-7' and day_of_week 'mon', Celery needs both"),
        (lambda: {**every(5), "one_off": True}, "it runs only once"),
        (lambda: {**every(5), "expires": stored(LATER)}, "expires"),
        (lambda: {**crontab(), "start_time": stored(LATER)}, "its crontab begins later"),
        (lambda: every(5, "microseconds"), "must be at least 1 second"),
        (lambda: every(5, "fortnights"), "the unit 'fortnights'"),
        (lambda: clocked(EARLIER), "this time has passed"),
        (lambda: {**every(5), "args": "{1"}, "args='{1': must be JSON"),
        (lambda: {**every(5), "kwargs": "[1]"}, "must be a JSON object"),
        (lambda: crontab(minute="61"), "cron='61 * * * *': is not a valid cron line"),
        (lambda: crontab(timezone="Mars/Olympus"), "timezone='Mars/Olympus': must be"),
        (lambda: {"interval_id": 10**9}, "its schedule is missing"),
        (dict, "it has no schedule"),
    ],
)
def test_what_has_no_counterpart_is_named_with_the_reason(beat, values, reason):
    beat("odd one", **values())
    beat("good", **every(5))
    done = import_celery_beat(actor="ada")
    assert (done.created, done.not_taken) == (("good",), ("odd one",))
    (said,) = [one for one in done.summary if one.startswith("Not taken: odd one: ")]
    assert reason in said
    assert set(definitions()) == {"good"}


@shared_task(name="discord.update_all")
def update_all(): ...


@shared_task(name="update_one", base=QueueOnce)
def update_one(): ...


@task
@job(unique="until_finished")
def unique(): ...


def test_names_in_celery_are_those_of_their_tasks(beat):
    beat("all", task="discord.update_all", **every(5))
    beat("one", task="update_one", **every(5))
    beat("unique", task=f"{__name__}.unique", **every(5))
    assert import_celery_beat(actor="ada").not_taken == ()
    schedules.create("created", "discord.update_all", every=60)
    found = {name: (one.task, one.overlap) for name, one in definitions().items()}
    assert found == {
        "all": (f"{__name__}.update_all", "queue"),
        "one": (f"{__name__}.update_one", "skip"),
        "unique": (f"{__name__}.unique", "skip"),
        "created": (f"{__name__}.update_all", "queue"),
    }


def test_a_second_import_leaves_what_is_there(beat):
    beat("a b", **every(5))
    assert import_celery_beat(actor="ada").created == ("a-b",)
    beat("a!b", **every(7))
    beat("other", **every(7))
    beat("oth er", **every(7))
    beat("oth=er", **every(7))
    done = import_celery_beat(actor="ada")
    assert (done.created, done.not_taken) == (("oth-er", "other"), ("a b", "a!b", "oth=er"))
    assert definitions()["a-b"].timetable.every_ms == 300_000
    assert import_celery_beat(actor="ada").changed == 0


def test_what_is_left_out_is_named(beat):
    beat("s", **every(5), queue="mail", priority=3, expire_seconds=60)
    warnings = import_celery_beat(actor="ada", dry_run=True).warnings
    assert [one for one in warnings if one.startswith("s: ")] == [
        "s: queue 'mail' is left out: its jobs go to the queue of the task.",
        "s: the priority 3 is left out: its jobs have that of the task.",
        "s: expire_seconds 60 is left out.",
    ]


def test_the_command_previews_first(beat):
    beat("s", **every(5))
    beat("t", **every(5), task="gone.task")
    text = command("queuerecurring", "--import-celery-beat", "--dry-run")
    assert "The schedule s will be created." in text
    assert "Not taken: t: " in text
    assert not Schedule.objects.exists()
    assert "The schedule s is created." in command("queuerecurring", "--import-celery-beat", "--noinput")
    found = json.loads(command("queuerecurring", "--format", "json"))
    assert [(one["name"], one["editable"]) for one in found["schedules"]] == [("s", True)]
    assert "not picked up yet" in command("queuerecurring")
    with pytest.raises(CommandError, match=r"Nothing was changed\. Not taken: s: .* no periodic task"):
        command("queuerecurring", "--import-celery-beat", "--noinput")


def test_the_command_reads_the_tables_in_the_database_that_it_is_given():
    with pytest.raises(CommandError, match="The database 'queue' has no table django_celery_beat_periodictask"):
        command("queuerecurring", "--import-celery-beat", "--dry-run", "--database", "queue")


def test_a_database_without_the_tables_is_named():
    with pytest.raises(OperationRefused, match="has no table django_celery_beat_periodictask"):
        import_celery_beat(actor="ada")
    with pytest.raises(OperationRefused, match="using 'nope': DATABASES has no such alias"):
        import_celery_beat(actor="ada", using="nope")

"""The forms that create and edit recurring schedules."""

from __future__ import annotations

import datetime
import re
from html import unescape

import pytest
from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import User

from django_mysqlqueue.exceptions import OperationRefused
from django_mysqlqueue.models import Operation, Schedule
from django_mysqlqueue.schedules import registry
from django_mysqlqueue.schedules.definitions import parse
from django_mysqlqueue.tasks import schedules
from tests.app import jobs
from tests.support import job_worlds
from tests.support.dashboard import HOSTILE, ROOT, page
from tests.support.job_worlds import PATH
from tests.support.schedule_worlds import MINUTE, NAME, created, of_task, registered, row
from tests.support.topic_permissions import OnTopics

pytestmark = pytest.mark.any_engine
CREATE, EDIT, DELETE = (f"{ROOT}do/{name}-recurring/" for name in ("create", "edit", "delete"))
EDITOR = ("view_dashboard", "edit_schedules", "see_payloads")


@pytest.fixture(autouse=True)
def _backend(no_handlers, settings, monkeypatch):
    monkeypatch.setattr(registry, "_declared", {})
    settings.TASKS = job_worlds.TASKS


def fields(answer):
    """What a browser would send back of the page's form, with the buttons left out."""
    text, found = answer.content.decode(), {}
    for tag in re.findall(r"<input[^>]*>", text):
        attributes = dict(re.findall(r'([\w-]+)="([^"]*)"', tag))
        kind = attributes.get("type")
        if kind == "submit" or "name" not in attributes or (kind == "checkbox" and " checked" not in tag):
            continue
        found[attributes["name"]] = unescape(attributes.get("value", "on" if kind == "checkbox" else ""))
    for name, value in re.findall(r'<textarea name="(\w+)"[^>]*>\n?(.*?)</textarea>', text, re.DOTALL):
        found[name] = unescape(value)
    for name, options in re.findall(r'<select name="(\w+)".*?>(.*?)</select>', text, re.DOTALL):
        found[name] = re.findall(r'<option value="(\w+)" selected', options)[0]
    return found


def sentences(answer):
    preview = re.findall(r'<section class="module mq-preview">.*?</section>', answer.content.decode(), re.DOTALL)
    return [unescape(one) for one in re.findall(r"<li>(.*?)</li>", "".join(preview), re.DOTALL)]


def filled(client, address, query=None, leave=(), **values):
    """Opens a form, fills it in, and returns the answer with its preview."""
    opened = client.get(address, query or {})
    assert opened.status_code == 200
    given = {name: value for name, value in fields(opened).items() if name not in leave}
    return client.post(address, {**given, **values})


def do(client, address, query=None, leave=(), **values):
    asked = filled(client, address, query, leave, **values)
    assert sentences(asked), asked.content.decode()
    done = client.post(address, {**fields(asked), "confirmed": "yes"}, follow=True)
    return [str(message) for message in done.context["messages"]]


def only():
    return parse(row().definition)


def test_a_schedule_is_created_edited_disabled_and_deleted(client):
    assert f'href="{CREATE}' in page(client, "recurring")
    asked = filled(client, CREATE, name=NAME, task=PATH, cron="0 3 * * MON", timezone="Europe/Berlin", args="[1]")
    said = sentences(asked)
    assert said[0] == "The schedule s will be created."
    assert said[1] == f"It runs {PATH}, 0 3 * * MON (Europe/Berlin). Its jobs go to the topic jobs.default."
    assert said[2].count("Monday 20") + said[2].count("Sunday 20") == 5
    assert not Schedule.objects.exists()
    (told,) = do(client, CREATE, name=NAME, task=PATH, cron="0 3 * * MON", timezone="Europe/Berlin", args="[1]")
    assert told.startswith("The schedule s is created. It runs")
    assert only().payload == {"task": PATH, "args": [1], "kwargs": {}}
    text = page(client, "recurring")
    assert ">editable</span>" in text
    assert ">not picked up yet</span>" in text
    assert f'href="{EDIT}?' in text
    opened = fields(client.get(EDIT, {"schedule": NAME}))
    shown = {name: opened[name] for name in ("task", "cron", "timezone", "args", "every", "enabled")}
    assert shown == {
        "task": PATH,
        "cron": "0 3 * * MON",
        "timezone": "Europe/Berlin",
        "args": "[\n  1\n]",
        "every": "",
        "enabled": "on",
    }
    (told,) = do(client, EDIT, {"schedule": NAME}, cron="", timezone="", every="90", kwargs='{"b": 2}')
    assert told.startswith("The schedule s is changed.")
    assert (only().timetable.every_ms, only().timetable.spread, only().payload["kwargs"]) == (90_000, True, {"b": 2})
    assert only().payload["args"] == [1]
    assert fields(client.get(EDIT, {"schedule": NAME}))["every"] == "90"
    do(client, EDIT, {"schedule": NAME}, leave=("enabled",), args="")
    assert row().paused_at
    assert only().payload["args"] == []
    assert ">paused</span>" in page(client, "recurring")
    assert do(client, DELETE, {"schedule": NAME}) == ["The schedule s is deleted."]
    actions = list(Operation.objects.order_by("pk").values_list("action", flat=True))
    assert actions == ["create recurring", "update recurring", "update recurring", "delete recurring"]
    assert set(LogEntry.objects.values_list("object_repr", flat=True)) == {NAME}
    assert "Create recurring schedule" in page(client, "operations")


def test_once_and_a_start_keep_their_times(client, settings):
    settings.TIME_ZONE = "Europe/Berlin"
    do(client, CREATE, name=NAME, task=PATH, at="2100-07-01T03:00:05")
    assert fields(client.get(EDIT, {"schedule": NAME}))["at"] == "2100-07-01T03:00:05"
    assert "The schedule s is already like this." in filled(client, EDIT, {"schedule": NAME}).content.decode()
    do(client, EDIT, {"schedule": NAME}, at="", every="3600.5", start="2026-01-01T03:00:00")
    opened = fields(client.get(EDIT, {"schedule": NAME}))
    assert (opened["every"], opened["start"], opened["at"]) == ("3600.5", "2026-01-01T03:00:00", "")
    assert "once at" not in page(client, "recurring")


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("2099-10-25T00:30:00+00:00", "2099-10-25T02:30:00+02:00"),
        ("2099-10-25T01:30:00+00:00", "2099-10-25T02:30:00+01:00"),
        ("2099-10-25T02:30:00+00:00", "2099-10-25T03:30:00"),
        ("9999-12-31T23:30:00+00:00", "9999-12-31T23:30:00+00:00"),
    ],
)
@pytest.mark.parametrize("use_tz", [True, False])
def test_a_time_that_its_clock_shows_twice_or_never_keeps_its_offset(client, settings, given, shown, use_tz):
    settings.TIME_ZONE, settings.USE_TZ = "Europe/Berlin", use_tz
    do(client, CREATE, name=NAME, task=PATH, at=given)
    moment = datetime.datetime.fromisoformat(given).timestamp() * 1000
    assert only().timetable.start_ms == moment
    opened = client.get(EDIT, {"schedule": NAME})
    assert fields(opened)["at"] == shown
    kind = "datetime-local" if shown.endswith("T03:30:00") else "text"
    assert f'<input type="{kind}" name="at" value="{shown}"' in opened.content.decode()
    assert "The schedule s is already like this." in filled(client, EDIT, {"schedule": NAME}).content.decode()
    page(client, "recurring")
    do(client, EDIT, {"schedule": NAME}, args="[1]")
    assert only().timetable.start_ms == moment
    do(client, EDIT, {"schedule": NAME}, at="", every="3600", start=given)
    assert fields(client.get(EDIT, {"schedule": NAME}))["start"] == shown


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"cron": "61 * * * *"}, "cron='61 * * * *': is not a valid cron line (Bad minute)"),
        ({"cron": "0 3 * * *", "timezone": "Mars"}, "timezone='Mars': must be the name of a time zone"),
        ({"cron": "0 3 * * *", "every": "5"}, "pass a cron line or every, and not both"),
        ({}, "Enter a cron line, an interval, or a time to run once."),
        ({"every": "0.5"}, "every=0.5: must be at least 1 second"),
        ({"every": "soon"}, "Enter a number."),
        ({"at": "2020-01-01T00:00:00"}, "this time has passed"),
        ({"every": "60", "args": "[1"}, "This must be a JSON list: "),
        ({"every": "60", "args": '{"a": 1}'}, 'This must be a JSON list: {"a": 1}'),
        ({"every": "60", "kwargs": "[1]"}, "This must be a JSON object: [1]"),
        ({"every": "60", "name": "a b"}, "name='a b': must be 1 to 150 letters"),
        ({"every": "60", "name": HOSTILE}, "must be 1 to 150 letters"),
        ({"every": "60", "task": "tests.app.jobs.ad"}, "Did you mean tests.app.jobs.add?"),
        ({"every": "60", "task": "this.s"}, "no module that subscribers import declares it"),
        ({"every": "60", "task": HOSTILE}, "must be a task, or its dotted path"),
        ({"every": "60", "catch_up": "all", "overlap": "skip"}, "catch_up='all' with overlap='skip'"),
    ],
)
def test_an_invalid_value_is_named_with_the_rule(client, values, text):
    asked = filled(client, CREATE, **{"name": NAME, "task": PATH, **values})
    assert text in unescape(asked.content.decode())
    assert HOSTILE not in asked.content.decode()
    assert sentences(asked) == []
    assert not Schedule.objects.exists()


def test_a_name_that_exists_is_refused(client, settings):
    registered(of_task())
    assert "There is a schedule with the name 's'." in unescape(
        filled(client, CREATE, name=NAME, task=PATH, every="60").content.decode()
    )
    settings.MYSQLQUEUE = {"RECURRING": {"declared": {"EVERY": 60, "TASK": PATH}}}
    text = unescape(filled(client, CREATE, name="declared", task=PATH, every="60").content.decode())
    assert "The code declares a schedule with the name 'declared'" in text
    assert "There is no such schedule that can be edited." in page(client, "do/edit-recurring", 403, schedule=NAME)


def test_of_two_people_who_edit_at_once_the_second_is_told(client):
    created(of_task())
    one, other = (client.get(EDIT, {"schedule": NAME}) for _ in range(2))
    first = client.post(EDIT, {**fields(one), "args": "[7]"})
    second = client.post(EDIT, {**fields(other), "every": "90"})
    assert sentences(first)
    assert sentences(second)
    client.post(EDIT, {**fields(first), "confirmed": "yes"})
    done = client.post(EDIT, {**fields(second), "confirmed": "yes"}, follow=True)
    told = [str(message) for message in done.context["messages"]][-1]
    assert "The schedule 's' was changed at" in told
    assert (only().payload["args"], only().timetable.every_ms) == ([7], MINUTE)
    assert Operation.objects.count() == 1


@pytest.mark.parametrize("was_enabled", [True, False])
def test_an_edit_leaves_a_schedule_that_was_paused_or_resumed_meanwhile_as_it_is(client, was_enabled):
    created(of_task(), enabled=was_enabled)
    opened = fields(client.get(EDIT, {"schedule": NAME}))
    (schedules.disable if was_enabled else schedules.enable)(NAME)
    asked = client.post(EDIT, {**opened, "args": "[7]"})
    assert sentences(asked)
    client.post(EDIT, {**fields(asked), "confirmed": "yes"})
    assert only().payload["args"] == [7]
    assert bool(row().paused_at) == was_enabled


def test_a_task_that_was_removed_is_shown_and_can_be_replaced(client):
    created(of_task())
    Schedule.objects.update(definition=row().definition.replace(PATH, "tests.app.jobs.gone"))
    text = page(client, "recurring")
    assert ">cannot run</span>" in text
    assert "task 'tests.app.jobs.gone'" in text
    assert "The recurring schedule s cannot run" in page(client)
    do(client, EDIT, {"schedule": NAME}, task=PATH)
    assert only().task == PATH


def test_the_form_suggests_the_declared_tasks(client):
    text = page(client, "do/create-recurring")
    assert '<option value="tests.app.jobs.add">' in text
    assert 'list="mq-tasks"' in text


def test_who_may_do_what(make_client):
    created(of_task())
    registered(of_task(), name="declared")
    query = {"schedule": NAME}
    operator = make_client("view_dashboard", "operate_dashboard", "see_payloads")
    for address in (CREATE, EDIT, DELETE):
        assert operator.get(address, query).status_code == 403
        assert operator.post(address, query).status_code == 403
    text = page(operator, "recurring")
    assert [name in text for name in ("create-recurring", "edit-recurring", "delete-recurring")] == [False] * 3
    editor = make_client(*EDITOR)
    assert {editor.get(address, query).status_code for address in (CREATE, EDIT, DELETE)} == {200}
    assert editor.get(DELETE, {"schedule": "declared"}).status_code == 403
    assert editor.get(f"{ROOT}do/run-recurring/", query).status_code == 403
    text = page(editor, "recurring")
    assert text.count("/do/edit-recurring/") == text.count("/do/delete-recurring/") == 1
    assert "/do/pause-recurring/" not in text
    # The form of an edit shows arguments.
    blind = make_client("view_dashboard", "edit_schedules")
    assert [blind.get(address, query).status_code for address in (CREATE, EDIT, DELETE)] == [200, 403, 200]
    assert "/do/edit-recurring/" not in page(blind, "recurring")
    for needed in ("view_dashboard", "edit_schedules"):
        client = make_client(*({*EDITOR} - {needed}))
        assert {client.get(address, query).status_code for address in (CREATE, EDIT, DELETE)} == {403}


@pytest.fixture
def on_topic(make_client, settings, monkeypatch):
    """Returns a client with permissions on topics."""
    settings.AUTHENTICATION_BACKENDS = ["tests.support.topic_permissions.OnTopics"]

    def login(*topics):
        client = make_client()
        user = User.objects.latest("pk")
        for topic in topics:
            for name in EDITOR:
                OnTopics.granted.add((user.username, f"django_mysqlqueue.{name}", topic))
        return client

    monkeypatch.setattr(OnTopics, "granted", set())
    return login


def test_permissions_on_a_queue(on_topic, settings):
    settings.TASKS = {
        "default": {"BACKEND": job_worlds.BACKEND, "QUEUES": ["default"]},
        "other": {"BACKEND": job_worlds.BACKEND, "QUEUES": ["mail"]},
    }
    created(of_task())
    schedules.create("mine", PATH, every=60)
    default, mail = on_topic("jobs.default"), on_topic("jobs.mail")
    assert default.get(EDIT, {"schedule": NAME}).status_code == 200
    assert mail.get(EDIT, {"schedule": NAME}).status_code == 403
    assert mail.get(DELETE, {"schedule": NAME}).status_code == 403
    answer = mail.post(CREATE, {"name": "x", "task": PATH, "every": "60", "asked": "yes"})
    assert answer.status_code == 403
    assert f"There is no task {PATH} that you may schedule." in answer.content.decode()
    # Its error names no task of another queue that is like the one that was typed.
    answer = mail.post(CREATE, {"name": "x", "task": "tests.app.jobs.ad", "every": "60", "asked": "yes"})
    assert "There is no task tests.app.jobs.ad that you may schedule." in answer.content.decode()
    assert PATH not in answer.content.decode().replace(f"{ROOT}", "")
    assert do(default, CREATE, name="x", task=PATH, every="60")
    assert on_topic().get(CREATE).status_code == 403


def test_a_schedule_is_in_the_database_of_its_jobs(client, queue_db, settings):
    settings.MYSQLQUEUE = {"TOPICS": {"jobs.default": {"DATABASE": "queue"}, "t": {"DATABASE": "default"}}}
    values = {"name": NAME, "task": PATH, "every": "60"}
    asked = filled(client, CREATE, {"database": "default"}, **values)
    assert "The jobs of this task are in the database queue: create the schedule there." in asked.content.decode()
    do(client, CREATE, {"database": "queue"}, **values)
    assert not Schedule.objects.using("default").exists()
    made = Schedule.objects.using("queue").get()
    do(client, EDIT, {"schedule": NAME, "database": "queue"}, every="90")
    assert parse(Schedule.objects.using("queue").get().definition).timetable.every_ms == 90_000
    assert made.registered_at < Schedule.objects.using("queue").get().registered_at
    schedules.update(NAME, args=[4])
    assert [one.name for one in schedules.list()] == [NAME]
    assert set(Operation.objects.using("queue").values_list("action", flat=True)) == {
        "create recurring",
        "update recurring",
    }
    settings.TASKS = {"default": {"BACKEND": job_worlds.BACKEND, "QUEUES": ["default", "mail"]}}
    settings.MYSQLQUEUE = {"TOPICS": {"jobs.default": {"DATABASE": "queue"}, "jobs.mail": {"DATABASE": "default"}}}
    with pytest.raises(OperationRefused, match="are in the database 'default': create a schedule there"):
        schedules.update(NAME, task=jobs.add.using(queue_name="mail"))
    schedules.delete(NAME)
    assert not Schedule.objects.using("queue").exists()

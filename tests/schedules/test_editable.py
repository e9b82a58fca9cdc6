"""Schedules that people make: with ``schedules.create``, while the project runs."""

from __future__ import annotations

import datetime
import logging
import sys
import time
from functools import partial

import pytest
from django.db import connection, transaction

from django_mysqlqueue.exceptions import OperationRefused
from django_mysqlqueue.inspection import find_problems, list_schedules
from django_mysqlqueue.models import JobResult, Operation, OutboxMessage, Schedule
from django_mysqlqueue.operations import create_recurring, run_recurring, update_recurring
from django_mysqlqueue.schedules import registry
from django_mysqlqueue.schedules.definitions import parse
from django_mysqlqueue.tasks import recurring, schedules
from tests.app import jobs
from tests.support import job_worlds, schedule_worlds
from tests.support.harness import USING, Sub, handler
from tests.support.internals import Session, Ticker, register_schedules, ticking
from tests.support.internals import registry as handlers
from tests.support.internals import schedules as service
from tests.support.job_worlds import PATH
from tests.support.schedule_worlds import MINUTE, NAME, created, of_task, of_topic, registered, row, tick

MISSING = "tests.app.jobs.gone"


@pytest.fixture(autouse=True)
def _own(db, no_handlers, settings, monkeypatch):
    monkeypatch.setattr(registry, "_declared", {})
    settings.TASKS = job_worlds.TASKS


def only():
    return parse(row().definition)


def seconds_later(monkeypatch, clock, seconds):
    real = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: real() + seconds)
    clock.advance(seconds)


def aged(seconds):
    Schedule.objects.update(last_tick=row().last_tick - seconds * 1000)


# -- create, update, enable, delete -------------------------------------------


def test_a_schedule_is_created_runs_and_is_listed():
    schedules.create(NAME, jobs.add, every=60, args=[1], kwargs={"b": 2}, actor="ada")
    (one,) = schedules.list()
    assert (one.name, one.task, one.times, one.editable, one.paused_at) == (NAME, PATH, "every 1 min", True, 0)
    assert (one.declared, one.seen_at, one.error) == (False, 0, "")
    assert one.now < one.next_tick <= one.now + MINUTE
    aged(90)
    assert len(tick(USING).published) == 1
    assert JobResult.objects.get().arguments == '{"args": [1], "kwargs": {"b": 2}}'
    recorded = Operation.objects.get()
    assert (recorded.action, recorded.actor, recorded.topic) == ("create recurring", "ada", "jobs.default")
    assert recorded.detail == f"{NAME}: {PATH}, every 1 min"
    assert recorded.ended_at


def test_a_path_is_a_task_too_and_a_cron_line_has_the_time_zone_of_the_project(settings):
    settings.TIME_ZONE = "Asia/Tokyo"
    schedules.create(NAME, PATH, cron="0  3 * * *")
    assert (only().timetable.cron, only().timetable.timezone) == ("0 3 * * *", "Asia/Tokyo")
    assert Operation.objects.get().actor == "code"


@pytest.mark.parametrize("change", [schedules.update, partial(update_recurring, actor="ada")])
def test_a_change_knows_the_tasks_that_subscribers_import(monkeypatch, change):
    """The process that makes it, such as a shell, may have imported none."""
    schedules.create(NAME, jobs.write, every=60)
    monkeypatch.delitem(sys.modules, "tests.app.jobs")
    given = {"tests.app.jobs": jobs}
    monkeypatch.setattr(handlers, "autodiscover_modules", lambda name: sys.modules.update(given))
    change(NAME, task=PATH)
    assert only().task == PATH


def test_without_names_of_queues_all_jobs_go_to_the_default_queue(settings):
    settings.TASKS = {"default": {"BACKEND": job_worlds.BACKEND, "QUEUES": []}}
    schedules.create(NAME, jobs.add.using(queue_name="mail"), every=60)
    assert only().topic == "jobs.default"
    aged(90)
    assert len(tick(USING).published) == 1


def test_jobs_go_where_those_of_the_given_task_go(settings):
    settings.TASKS = {"default": {"BACKEND": job_worlds.BACKEND, "QUEUES": ["default", "slow"]}}
    schedules.create(NAME, jobs.add.using(queue_name="slow", priority=7), every=60)
    assert (only().topic, only().priority, only().backend) == ("jobs.slow", 7, "default")
    schedules.update(NAME, args=[5])
    assert (only().topic, only().priority) == ("jobs.slow", 7)
    schedules.update(NAME, task=PATH)
    assert (only().topic, only().priority) == ("jobs.default", 0)


def test_jobs_expire_as_those_of_their_task_do():
    schedules.create(NAME, jobs.perishable, every=60)
    aged(90)
    tick(USING)
    run_recurring(NAME, actor="ada")
    assert list(JobResult.objects.values_list("expires_in", flat=True)) == [60_000, 60_000]


def test_intervals_are_spread_unless_they_have_a_start():
    start = datetime.datetime(2026, 1, 1, 3, tzinfo=datetime.UTC)
    for number in range(40):
        schedules.create(f"s.{number}", PATH, every=3600)
    due = {one.next_tick // 1000 for one in schedules.list()}
    assert len(due) == 40
    schedules.create(NAME, PATH, every=3600, start=start)
    assert only().timetable.start_ms == start.timestamp() * 1000
    schedules.update(NAME, args=[2])
    assert (only().timetable.start_ms, only().timetable.spread) == (start.timestamp() * 1000, False)
    schedules.update(NAME, every=3600)
    assert only().timetable.spread


def test_once(clock):
    at = datetime.datetime.now(datetime.UTC) + datetime.timedelta(hours=1)
    schedules.create(NAME, PATH, at=at)
    assert schedules.list()[0].times.startswith("once at 20")
    assert tick(USING).ticks == ()
    clock.advance(3700)
    assert len(tick(USING).published) == 1
    assert schedules.list()[0].next_tick is None
    assert tick(USING).ticks == ()
    with pytest.raises(OperationRefused, match=r"Schedule 'late': once at .*: this time has passed"):
        schedules.create("late", PATH, at=at)


def test_what_is_not_given_stays():
    schedules.create(NAME, PATH, cron="0 3 * * *", timezone="Europe/Berlin", args=[1], overlap="skip")
    before = only()
    schedules.update(NAME, kwargs={"b": 5})
    assert only() == before._replace(payload={"task": PATH, "args": [1], "kwargs": {"b": 5}})
    recorded = Operation.objects.order_by("pk").last()
    assert recorded.detail == f"{NAME}: {PATH}, 0 3 * * * Europe/Berlin, other arguments"
    schedules.update(NAME, timezone="Asia/Tokyo")
    assert (only().timetable.cron, only().timetable.timezone) == ("0 3 * * *", "Asia/Tokyo")
    schedules.update(NAME, every=60, catch_up="latest", overlap="queue")
    assert (only().timetable.cron, only().timetable.every_ms, only().overlap) == ("", MINUTE, "queue")
    assert only().payload["args"] == [1]
    recorded = Operation.objects.order_by("pk").last()
    assert recorded.action == "update recurring"
    assert recorded.detail == f"{NAME}: {PATH}, 0 3 * * * Asia/Tokyo -> {PATH}, every 1 min"


def test_two_changes_of_one_schedule_are_both_made():
    """Each reads the row under its lock; forms refuse what is based on an earlier version."""
    schedules.create(NAME, PATH, every=60)
    version = list_schedules()[0].registered_at
    update_recurring(NAME, args=[2], version=version, actor="ada")
    with pytest.raises(OperationRefused, match=r"The schedule 's' was changed at 20.*, after you opened it"):
        update_recurring(NAME, kwargs={"b": 3}, version=version, actor="bob")
    schedules.update(NAME, kwargs={"b": 3})
    assert only().payload == {"task": PATH, "args": [2], "kwargs": {"b": 3}}
    assert len({version, row().registered_at}) == 2


@pytest.mark.still_clock
def test_two_versions_differ_even_within_a_millisecond():
    schedules.create(NAME, PATH, every=60)
    versions = [row().registered_at]
    for number in range(3):
        schedules.update(NAME, args=[number])
        versions.append(row().registered_at)
    assert sorted(set(versions)) == versions


def test_disable_and_enable():
    schedules.create(NAME, PATH, every=60, enabled=False)
    aged(300)
    last = row().last_tick
    assert tick(USING).ticks == ()
    schedules.enable(NAME)
    assert row().last_tick > last + 3 * MINUTE, "the ticks of the pause do not run"
    assert not row().paused_at
    schedules.disable(NAME, actor="ada")
    assert row().paused_at
    schedules.update(NAME, enabled=True)
    assert not row().paused_at
    schedules.update(NAME, enabled=False)
    actions = list(Operation.objects.order_by("pk").values_list("action", "actor"))
    assert actions == [
        ("create recurring", "code"),
        ("resume recurring", "code"),
        ("pause recurring", "ada"),
        ("update recurring", "code"),
        ("update recurring", "code"),
    ]
    assert Operation.objects.order_by("pk").last().detail.endswith("every 1 min, paused")


def test_an_edit_that_enables_drops_the_ticks_of_the_pause():
    schedules.create(NAME, PATH, every=60, enabled=False)
    aged(300)
    schedules.update(NAME, enabled=True, args=[1])
    assert tick(USING).ticks == ()


def test_delete():
    schedules.create(NAME, PATH, every=60)
    Ticker(USING, ()).notice(editable=True)
    Schedule.objects.update(seen_at=row().registered_at)
    schedules.delete(NAME, actor="ada")
    assert schedules.list() == ()
    for call in (schedules.delete, schedules.enable, schedules.disable, schedules.update):
        with pytest.raises(OperationRefused, match="There is no schedule 's'"):
            call(NAME)


def test_a_change_commits_and_rolls_back_with_the_caller():
    """As ``publish`` and ``enqueue`` do: not as operations, which commit at once."""
    with transaction.atomic():
        schedules.create(NAME, PATH, every=60)
        transaction.set_rollback(True)
    assert schedules.list() == ()
    assert not Operation.objects.exists()
    with transaction.atomic():
        schedules.create(NAME, PATH, every=60)
        schedules.disable(NAME)
    assert row().paused_at
    with transaction.atomic():
        schedules.delete(NAME)
        transaction.set_rollback(True)
    assert row().paused_at


# -- refused ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"every": 60, "cron": "* * * * *"}, "pass a cron line or every, and not both"),
        ({}, "pass a cron line or every, and not both"),
        ({"cron": "61 * * * *"}, r"cron='61 \* \* \* \*': is not a valid cron line \(Bad minute\)"),
        ({"cron": "0 3 * * *", "timezone": "Mars"}, "timezone='Mars': must be the name of a time zone"),
        ({"every": 60, "timezone": "UTC"}, "timezone='UTC': it is for cron lines"),
        ({"every": 0.5}, "every=0.5: must be at least 1 second and at most 366 days"),
        ({"every": 60, "start": "now"}, "start='now': must be a datetime"),
        ({"cron": "0 3 * * *", "start": datetime.datetime.now(datetime.UTC)}, "start and spread are for intervals"),
        ({"at": "now"}, "at='now': must be a datetime"),
        ({"at": datetime.datetime.now(datetime.UTC), "every": 5}, r"at=.*: pass it without every"),
        ({"every": 60, "args": [object()]}, r"args=\[<object.*>\]: must be JSON-serializable"),
        ({"every": 60, "args": jobs.DEEP}, r"args=<list>: must be JSON-serializable \(maximum recursion depth"),
        ({"every": 60, "args": "ab"}, "args='ab': must be a list"),
        ({"every": 60, "kwargs": [1]}, r"kwargs=\[1\]: must be a dict of names"),
        ({"every": 60, "overlap": "kill"}, "overlap='kill': must be 'queue' or 'skip'"),
        ({"every": 60, "enabled": "yes"}, "enabled 'yes': must be True or False"),
        ({"every": 60, "task": MISSING}, "task='tests.app.jobs.gone': no module that subscribers import declares it"),
        ({"every": 60, "task": "this.s"}, "task='this.s': no module that subscribers import declares it"),
        ({"every": 60, "task": "tests.app.jobs.log"}, r"tests.app.jobs.log is not a task: \["),
        ({"every": 60, "task": "add"}, "task='add': must be a task, or its dotted path"),
        ({"every": 60, "task": "tests.app.jobs.ad"}, r"Did you mean tests.app.jobs.add\?"),
        ({"every": 60, "task": 5}, "task=5: must be a task, or its dotted path"),
        ({"every": 60, "name": "a b"}, "name='a b': must be 1 to 150 letters"),
        ({"every": 60, "actor": " "}, "actor ' ': must not be empty"),
        ({"every": 60, "args": ["x" * 1_100_000]}, "MAX_PAYLOAD_BYTES"),
    ],
)
def test_an_invalid_option_names_the_value_and_the_rule(options, text):
    given = {"name": NAME, "task": PATH, **options}
    with pytest.raises(OperationRefused, match=text):
        schedules.create(given.pop("name"), given.pop("task"), **given)
    assert not Schedule.objects.exists()
    assert not Operation.objects.exists()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"cron": "61 * * * *"}, "is not a valid cron line"),
        ({"timezone": "UTC"}, "timezone='UTC': it is for cron lines"),
        ({"args": "ab"}, "args='ab': must be a list"),
        ({"task": MISSING}, "no module that subscribers import declares it"),
        ({"enabled": 1}, "enabled 1: must be True or False"),
        ({"catch_up": "all", "overlap": "skip"}, "catch_up='all' with overlap='skip'"),
        ({"at": datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)}, "this time has passed"),
    ],
)
def test_an_invalid_change_changes_nothing(options, text):
    schedules.create(NAME, PATH, every=60)
    before = Schedule.objects.values().get()
    with pytest.raises(OperationRefused, match=text):
        schedules.update(NAME, **options)
    assert Schedule.objects.values().get() == before
    assert Operation.objects.count() == 1


def test_a_name_is_used_once():
    schedules.create(NAME, PATH, every=60)
    with pytest.raises(OperationRefused, match="There is a schedule with the name 's'"), transaction.atomic():
        schedules.create(NAME, PATH, every=90)
    with pytest.raises(OperationRefused, match="There is a schedule with the name 's'"):
        create_recurring(NAME, PATH, every=90, actor="ada", dry_run=True)
    assert only().timetable.every_ms == MINUTE
    recurring(every=60, name="declared")(jobs.add)
    with pytest.raises(OperationRefused, match="The code declares a schedule with the name 'declared'"):
        schedules.create("declared", PATH, every=60)


def test_what_the_code_declares_is_changed_in_the_code():
    registered(of_task())
    with pytest.raises(OperationRefused, match="The schedule 's' is declared in the code: change it there"):
        schedules.update(NAME, args=[2])
    with pytest.raises(OperationRefused, match="declares the schedule 's': remove it from the code first"):
        schedules.delete(NAME)
    schedules.disable(NAME)
    assert row().paused_at


def test_what_the_code_replaces_stays_paused():
    created(of_task(), age=70)
    schedules.disable(NAME)
    register_schedules(USING, {NAME: of_topic()})
    assert row().paused_at
    assert tick(USING).published == ()
    schedules.enable(NAME)
    assert not row().paused_at


def test_the_code_wins(caplog):
    """Subscribers start whatever people have called their schedules."""
    created(of_task(), age=70)
    register_schedules(USING, {NAME: of_topic()})
    assert not row().editable
    assert only() == of_topic()
    assert [one.mysqlqueue["event"] for one in caplog.records if "replaced" in one.message] == ["recurring.replaced"]
    register_schedules(USING, {NAME: of_topic()})
    assert len([one for one in caplog.records if "replaced" in one.message]) == 1


# -- subscribers --------------------------------------------------------------


def running(*names):
    """A subscriber that declares schedules with these names."""
    sub = Sub(handler("t", "g"))
    object.__setattr__(sub.context, "ticker", Ticker(USING, names))
    return sub


def test_a_process_without_schedules_picks_it_up_with_its_next_tick(clock, monkeypatch):
    sub = running()
    sub.step()
    schedules.create(NAME, PATH, every=60)
    aged(130)
    seconds_later(monkeypatch, clock, 11)
    sub.step()
    assert len(JobResult.objects.values()) == 1
    assert list_schedules()[0].declared


def test_a_process_with_others_picks_it_up_too_and_notices_edits(clock, monkeypatch):
    registered(of_topic(), name="declared")
    sub = running("declared")
    sub.step()
    schedules.create(NAME, PATH, every=3600)
    seconds_later(monkeypatch, clock, 11)
    sub.step()
    assert not JobResult.objects.exists()
    schedules.update(NAME, every=1)
    seconds_later(monkeypatch, clock, 11)
    sub.step()
    assert JobResult.objects.count() == 1
    schedules.delete(NAME)
    seconds_later(monkeypatch, clock, 30)
    sub.step()
    assert JobResult.objects.count() == 1
    assert row("declared").seen_at > 0


def test_one_that_runs_no_schedules_leaves_them(clock, monkeypatch):
    """With ``--drain``, and ``deliver_all``."""
    created(of_task(), age=70)
    sub = Sub(handler("t", "g"))
    sub.step(times=3)
    seconds_later(monkeypatch, clock, 11)
    sub.step()
    assert not JobResult.objects.exists()
    assert not list_schedules()[0].declared


def test_without_schedules_that_people_have_made_nothing_is_sent_for_them():
    registered(of_topic())
    sub, sent = running(), []

    def note(execute, sql, params, many, context):
        sent.append(sql)
        return execute(sql, params, many, context)

    with connection.execute_wrapper(note):
        sub.step(times=3)
    # One condition of the query of the groups, which is sent anyway.
    assert [sql for sql in sent if "queue_schedules" in sql and "queue_consumer_groups" not in sql] == []
    created(of_task(), name="made")
    sub.context.ticker.notice(editable=True)
    sent.clear()
    with connection.execute_wrapper(note):
        sub.step(times=3)
    assert (
        len([sql for sql in sent if sql.startswith("SELECT") and "e.editable" not in sql and "s.editable" in sql]) == 1
    )


def test_many_that_are_due_at_once_run_in_several_turns(monkeypatch):
    for number in range(5):
        created(of_task(), name=f"s{number}", age=70)
    monkeypatch.setattr(ticking, "MOST_RUNS", 2)
    ticker, found = Ticker(USING, ()), []
    ticker.notice(editable=True)
    for _ in range(3):
        assert ticker.next_at <= time.monotonic()
        ticker.turn()
        found.append(JobResult.objects.count())
    assert found == [2, 4, 5]


def test_all_of_many_are_read(monkeypatch):
    for number in range(7):
        created(of_task(), name=f"s{number}")
    registered(of_task(), name="declared")
    for page in (1, 2, 3, 7, 8):
        monkeypatch.setattr(service, "PAGE", page)
        assert list(service.read_editable(Session(USING))) == [f"s{number}" for number in range(7)]


def test_a_stop_ends_the_declaration(clock):
    created(of_task())
    ticker = Ticker(USING, ())
    ticker.notice(editable=True)
    ticker.turn()
    assert list_schedules()[0].declared
    clock.advance(5)
    ticker.end()
    clock.advance(16)
    assert not list_schedules()[0].declared


# -- a task that was removed --------------------------------------------------


def removed(**more):
    created(of_task(), **more)
    Schedule.objects.update(definition=row().definition.replace(PATH, MISSING))


def test_a_task_that_was_removed_fails_its_schedule_alone(caplog, clock, monkeypatch):
    caplog.set_level(logging.INFO)
    removed(age=70)
    created(of_task(), age=70, name="other")
    ticker = Ticker(USING, ())
    ticker.notice(editable=True)
    ticker.turn()
    assert [one.rsplit(":", 1)[0] for one in schedule_worlds.ids()] == ["recurring:other"]
    found = [one for one in caplog.records if getattr(one, "mysqlqueue", {}).get("event") == "recurring.failed"]
    (failed,) = found
    assert failed.mysqlqueue["schedule"] == NAME
    assert f"task '{MISSING}'" in failed.mysqlqueue["error"]
    assert not failed.exc_info
    before = row().last_tick
    # Another process has the task: a tick is left to it, not lost.
    Schedule.objects.filter(name=NAME).update(definition=of_task().as_json())
    seconds_later(monkeypatch, clock, 2)
    ticker.turn()
    assert row().last_tick > before
    assert len(schedule_worlds.ids()) == 2


def test_a_task_that_was_removed_is_a_problem():
    removed()
    (one,) = list_schedules()
    assert MISSING in one.error
    (problem,) = [one for one in find_problems() if one.kind == "recurring"]
    assert problem.severity == 1
    assert problem.text.startswith(f"The recurring schedule s cannot run: task '{MISSING}': ")
    with pytest.raises(OperationRefused, match=f"task '{MISSING}'"):
        run_recurring(NAME, actor="ada")
    with pytest.raises(OperationRefused, match=f"task '{MISSING}'"):
        schedules.update(NAME, args=[2])
    schedules.update(NAME, enabled=False)
    assert [one for one in find_problems() if one.kind == "recurring"] == []
    schedules.update(NAME, task=PATH, enabled=True)
    assert list_schedules()[0].error == ""
    assert run_recurring(NAME, actor="ada").changed == 1


def test_a_process_that_has_no_tasks_does_not_judge(settings):
    removed()
    settings.TASKS = {"default": {"BACKEND": "django_mysqlqueue.tasks.framework.BaseTaskBackend"}}
    settings.TASKS = {}
    assert [one.name for one in list_schedules()] == [NAME]


def test_one_that_no_process_runs_is_overdue(clock):
    """Not one that the code no longer declares, which is to be deleted."""
    created(of_task(), age=200)
    (problem,) = [one for one in find_problems() if one.kind == "recurring"]
    assert problem.severity == 0
    assert "has never run" in problem.text
    assert "No subscriber is running." in problem.text


def test_a_run_by_hand():
    schedules.create(NAME, PATH, every=3600, args=[4])
    done = run_recurring(NAME, actor="ada")
    assert (done.changed, done.warnings) == (1, ())
    assert OutboxMessage.objects.count() == JobResult.objects.count() == 1


def test_a_preview_has_the_next_five_runs_in_words(settings):
    settings.TIME_ZONE = "UTC"
    done = create_recurring(NAME, PATH, cron="0 3 * * MON", timezone="UTC", actor="ada", dry_run=True)
    assert not Schedule.objects.exists()
    assert done.summary[0] == "The schedule s will be created."
    assert done.summary[1] == f"It runs {PATH}, 0 3 * * MON (UTC). Its jobs go to the topic jobs.default."
    runs = done.summary[2].removeprefix("Next runs: ").rstrip(".").split("; ")
    assert len(runs) == 5
    assert all(one.startswith("Monday 20") and " 03:00:00 (in " in one for one in runs)
    assert create_recurring(NAME, PATH, every=60, enabled=False, actor="ada").changed == 1
    done = update_recurring(NAME, every=60, actor="ada", dry_run=True)
    assert (done.planned, done.summary) == (0, ("The schedule s is already like this.",))
    done = update_recurring(NAME, every=90, actor="ada", dry_run=True)
    assert "It is paused: it does not run until it is resumed." in done.summary
    assert only().timetable.every_ms == MINUTE

"""What is shown of schedules: by the command, by the API, and as problems."""

from __future__ import annotations

import json

import pytest
from django.core.management.base import CommandError

from django_mysqlqueue.exceptions import OperationRefused
from django_mysqlqueue.inspection import check_health, find_problems, list_schedules
from django_mysqlqueue.models import JobResult, Operation, Schedule, SubscriberHeartbeat
from django_mysqlqueue.operations import delete_recurring, pause_recurring, resume_recurring, run_recurring
from django_mysqlqueue.schedules import registry
from django_mysqlqueue.schedules.timetables import timetable
from django_mysqlqueue.testing import deliver_all
from tests.support import job_worlds, schedule_worlds
from tests.support.commands import run as command
from tests.support.harness import USING, Sub, handler
from tests.support.internals import declared_schedules, schedules
from tests.support.schedule_worlds import MINUTE, NAME, of_task, of_topic, registered, row, tick


@pytest.fixture(autouse=True)
def _backend(db, no_handlers, settings):
    settings.TASKS = job_worlds.TASKS


def problems():
    return [(one.severity, one.text) for one in find_problems() if one.kind == "recurring"]


# -- the list -----------------------------------------------------------------


def test_a_schedule_with_its_last_runs():
    last = registered(of_task(), age=130)
    done = tick(USING)
    run_recurring(NAME, actor="ada")
    deliver_all()
    (one,) = list_schedules(runs=5)
    assert (one.name, one.task, one.topic) == (NAME, "tests.app.jobs.add", "jobs.default")
    assert (one.times, one.timezone, one.paused_at, one.skipped) == ("every 1 min", "", 0, 0)
    assert one.declared
    assert one.last_tick == one.last_run == last + 2 * MINUTE
    assert one.next_tick == last + 3 * MINUTE
    by_hand, by_tick = one.runs
    assert (by_tick.id, by_tick.tick, by_tick.by_hand) == (done.published[0], last + 2 * MINUTE, False)
    assert (by_tick.status, by_tick.error) == ("SUCCESSFUL", "")
    assert by_tick.duration >= 0
    assert (by_hand.by_hand, by_hand.status) == (True, "SUCCESSFUL")
    assert list_schedules(runs=1)[0].runs == (by_hand,)
    assert list_schedules(runs=0)[0].runs == ()


def test_the_last_error_is_named():
    registered(of_task(), age=70)
    tick(USING)
    JobResult.objects.update(
        status="FAILED",
        started_at=1000,
        finished_at=3500,
        errors=json.dumps({"exception_class_path": "builtins.ValueError", "traceback": "x" * 6000}) + "\n",
    )
    (run,) = list_schedules()[0].runs
    assert (run.status, run.error, run.duration) == ("FAILED", "builtins.ValueError", 2.5)
    JobResult.objects.update(errors=json.dumps({"exception_class_path": "a.B", "traceback": "x" * 60_000}) + "\n")
    assert list_schedules()[0].runs[0].error == ""


def test_schedules_of_one_topic():
    registered(of_task(), name="a")
    registered(of_topic(), name="b")
    assert [one.name for one in list_schedules(topic="t")] == ["b"]
    assert [one.name for one in list_schedules()] == ["a", "b"]


def test_the_command_lists_them():
    assert "There are no recurring schedules." in command("queuerecurring")
    registered(of_topic(), age=70)
    registered(schedule_worlds.at_night(of_task()), name="nightly")
    registered(of_topic("u"), name="gone")
    Schedule.objects.filter(name="gone").update(seen_at=5)
    tick(USING)
    lines = command("queuerecurring").splitlines()
    assert lines[0].split()[:2] == ["name", "times"]
    text = {line.split()[0]: line for line in lines[1:]}
    assert "not in the code of any running process" in text["gone"]
    assert "0 3 * * *" in text["nightly"]
    assert "UTC" in text["nightly"]
    assert "tests.app.jobs.add" in text["nightly"]
    assert "topic t" in text[NAME]
    found = json.loads(command("queuerecurring", "--format", "json"))
    assert found["database"] == USING
    assert [one["name"] for one in found["schedules"]] == ["gone", "nightly", NAME]
    assert found["schedules"][2]["last_run"] == row().last_run


@pytest.fixture
def declared(settings, monkeypatch):
    """Schedules in the code and in the settings, which no subscriber has registered."""
    monkeypatch.setattr(registry, "_declared", {})
    registry.recurring_message("in-code", "0 3 * * *", topic="t", payload=1)
    settings.MYSQLQUEUE = {"RECURRING": {"in-settings": {"EVERY": 60, "TASK": "tests.app.jobs.add"}}}


def test_the_command_lists_those_that_are_not_registered_yet(declared):
    """As after ``migrate``, before the first subscriber."""
    lines = command("queuerecurring").splitlines()
    assert [line.split()[0] for line in lines[1:]] == ["in-code", "in-settings"]
    assert all("not registered yet" in line for line in lines[1:])
    assert "tests.app.jobs.add" in lines[2]
    found = json.loads(command("queuerecurring", "--format", "json"))["schedules"]
    assert [(one["name"], one["registered_at"], one["next_tick"]) for one in found] == [
        ("in-code", 0, None),
        ("in-settings", 0, None),
    ]
    assert list_schedules() == ()
    assert problems() == []
    with pytest.raises(CommandError, match="The schedule 'in-code' is not registered yet: the first subscriber"):
        command("queuerecurring", "--run-now", "in-code", "--noinput")
    schedules.register(USING, declared_schedules()[USING])
    assert "not registered yet" not in command("queuerecurring")


def test_the_command_lists_the_others_if_one_is_invalid(declared, settings):
    settings.MYSQLQUEUE = {
        "RECURRING": {"wrong": {"EVERY": 0, "TASK": "tests.app.jobs.add"}, "far": {"EVERY": 60, "TASK": "no.such"}}
    }
    registered(of_topic())
    assert [line.split()[0] for line in command("queuerecurring").splitlines()[1:]] == ["in-code", NAME]


def test_one_whose_runs_fail_is_not_active():
    registered(of_task(), age=70)
    tick(USING)
    assert "failing" not in command("queuerecurring")
    JobResult.objects.update(status="FAILED", finished_at=5)
    schedule_worlds.unfinished(row().last_tick + MINUTE)
    (one,) = list_schedules(runs=2)
    assert one.failed_run == one.runs[1]
    assert list_schedules(runs=1)[0].failed_run is None
    assert command("queuerecurring").splitlines()[1].split()[-1] == "failing"
    assert [one.severity for one in find_problems() if one.kind == "recurring_failed"] == [1]
    JobResult.objects.update(status="SUCCESSFUL", finished_at=5)
    assert "failing" not in command("queuerecurring")


def test_the_command_needs_a_schedule_for_its_options():
    with pytest.raises(CommandError, match="--dry-run and --reason require --run-now"):
        command("queuerecurring", "--dry-run")
    with pytest.raises(CommandError, match="There is no schedule 'x'"):
        command("queuerecurring", "--pause", "x", "--noinput")


# -- operations ---------------------------------------------------------------


def test_what_is_due_in_a_pause_does_not_run(clock):
    last = registered(of_topic())
    pause_recurring(NAME, actor="ada", reason="why")
    clock.advance(200)
    assert tick(USING).ticks == ()
    (one,) = list_schedules()
    assert (one.next_tick, bool(one.paused_at), problems()) == (None, True, [])
    said = resume_recurring(NAME, actor="ada").summary[0]
    assert "is resumed. Its next run is at" in said
    assert row().last_tick == last + 3 * MINUTE
    assert tick(USING).ticks == ()
    clock.advance(60)
    assert tick(USING).ticks == (last + 4 * MINUTE,)
    recorded = Operation.objects.values_list("action", "actor", "reason", "detail", "changed")
    assert list(recorded) == [("pause recurring", "ada", "why", NAME, 1), ("resume recurring", "ada", "", NAME, 1)]


def test_a_run_by_hand_leaves_the_ticks_and_never_has_their_id():
    last = registered(of_task(overlap="skip"), age=70)
    schedule_worlds.unfinished(last)
    first, second = (run_recurring(NAME, actor="ada").summary[0] for _ in range(2))
    assert first != second
    assert row().last_tick == last
    assert len(schedule_worlds.ids()) == 3
    assert tick(USING).skipped, "a job by hand counts as a job that has not ended"


def test_a_schedule_that_a_process_declares_is_not_deleted():
    registered(of_topic())
    for how in ({}, {"dry_run": True}):
        with pytest.raises(OperationRefused, match=r"A process that ran in the last 1 min declares the schedule 's'"):
            delete_recurring(NAME, actor="ada", **how)
    Schedule.objects.update(seen_at=row().seen_at - schedules.DECLARED_MS)
    (warning,) = run_recurring(NAME, actor="ada", dry_run=True).warnings
    assert "No running process declares this schedule" in warning
    assert delete_recurring(NAME, actor="ada").changed == 1
    assert not Schedule.objects.exists()


def test_a_definition_of_a_later_release_is_shown_and_refused():
    registered(of_topic(), age=700)
    Schedule.objects.update(definition='{"weather": "dry"}')
    (one,) = list_schedules()
    assert "it has weather" in one.error
    assert one.next_tick is None
    assert "it has weather" in command("queuerecurring")
    ((severity, text),) = problems()
    assert severity == 1
    assert text.startswith(
        "Subscribers of this release cannot run the recurring schedule s: This release does not know"
    )
    for call in (run_recurring, resume_recurring):
        with pytest.raises(OperationRefused, match="Schedule 's': This release does not know the definition"):
            call(NAME, actor="ada")
    assert pause_recurring(NAME, actor="ada").changed == 1
    assert problems() == []


# -- problems -----------------------------------------------------------------


@pytest.mark.still_clock
@pytest.mark.usefixtures("clock")
def test_a_tick_that_is_overdue_is_a_problem():
    registered(of_topic(), age=100)
    assert problems() == []
    Schedule.objects.update(last_tick=row().last_tick - 40_000)
    ((severity, text),) = problems()
    assert severity == 0
    assert text == "The recurring schedule s has never run. It has been due for 1 min 20 s."
    assert not check_health().healthy
    tick(USING)
    assert problems() == []
    Schedule.objects.update(last_tick=row().last_tick - 130_000)
    ((severity, text),) = problems()
    assert text.startswith("The recurring schedule s has not run since 20")
    assert "The recurring schedule s has not run since" in command("queuestatus", "--all")


def test_one_that_was_removed_from_the_code_is_for_information():
    registered(of_topic(), age=1000)
    Schedule.objects.update(seen_at=5)
    ((severity, text),) = problems()
    assert severity == 0
    assert text.endswith("No subscriber is running.")
    Sub(handler("t", "g"))
    assert SubscriberHeartbeat.objects.exists()
    ((severity, text),) = problems()
    assert severity == 2
    assert text.startswith("No running process declares the recurring schedule s, so it does not run.")


def test_a_time_zone_that_this_host_lacks():
    registered(of_topic(times=timetable("0 3 * * *", None, "Europe/Berlin", "UTC")))
    Schedule.objects.update(definition=row().definition.replace("Europe/Berlin", "Mars/Olympus"))
    (one,) = list_schedules()
    assert "Mars/Olympus" in one.error
    with pytest.raises(OperationRefused, match="Mars/Olympus"):
        resume_recurring(NAME, actor="ada")

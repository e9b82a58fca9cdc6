"""Rows of schedules, and their ticks: what is published, once, and what the row then says."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import pytest
from django.db import connections, transaction

from django_mysqlqueue.exceptions import UnknownTopic
from django_mysqlqueue.models import JobResult, OutboxMessage, QueueMessage, Schedule
from django_mysqlqueue.schedules.definitions import parse
from django_mysqlqueue.schedules.timetables import timetable
from django_mysqlqueue.tasks.framework import task_backends
from django_mysqlqueue.testing import deliver_all
from tests.support import job_worlds, schedule_worlds
from tests.support.harness import USING, in_thread, sequence
from tests.support.internals import Session, run_id, schedules
from tests.support.schedule_worlds import MINUTE, NAME, at_night, of_task, of_topic, registered, row, tick

pytestmark = [pytest.mark.promise("Recurring schedules")]
HOUR = 3600


@pytest.fixture(autouse=True)
def _backend(db, no_handlers, settings):
    settings.TASKS = job_worlds.TASKS


# -- registering --------------------------------------------------------------


def test_a_new_schedule_begins_with_its_next_tick():
    assert schedules.register(USING, {NAME: of_topic()}) == {NAME: schedules.NEW}
    assert tick(USING).ticks == ()
    assert schedule_worlds.ids() == []
    found = schedules.read(Session(USING), [NAME])[NAME]
    assert 0 < found.next_tick - found.now <= MINUTE
    assert found.is_declared
    assert parse(found.definition) == of_topic()


def test_registering_again_writes_nothing():
    registered(of_task())
    before = list(Schedule.objects.values())
    assert schedules.register(USING, {NAME: of_task()}) == {}
    assert list(Schedule.objects.values()) == before


def test_a_change_of_arguments_keeps_the_ticks():
    last = registered(of_task(), age=70)
    assert schedules.register(USING, {NAME: of_task(args=[2])}) == {NAME: schedules.CHANGED}
    assert row().last_tick == last
    assert tick(USING).ticks == (last + MINUTE,)
    assert JobResult.objects.get().arguments == '{"args": [2], "kwargs": {}}'


def test_a_change_of_times_begins_with_the_next_tick():
    last = registered(of_task(), age=70)
    schedules.register(USING, {NAME: at_night(of_task())})
    assert row().last_tick >= last + 70_000
    schedules.register(USING, {NAME: of_task()})
    assert tick(USING).ticks == ()


def test_a_change_of_times_never_moves_back(clock):
    """It was registered while the clock was an hour ahead."""
    clock.advance(HOUR)
    last = registered(of_task())
    clock.advance(-HOUR)
    schedules.register(USING, {NAME: at_night(of_task())})
    assert row().last_tick == last


def test_a_definition_of_a_later_release_is_left_to_its_processes():
    registered(of_topic(), age=70)
    later = json.loads(row().definition) | {"weather": "dry"}
    Schedule.objects.update(definition=json.dumps(later))
    with pytest.raises(ValueError, match="This release does not know the definition: it has weather"):
        tick(USING)
    assert schedule_worlds.ids() == []


def test_the_registered_definition_counts():
    """A process with other code ticks by the row."""
    last = registered(of_topic(payload="new"), age=70)
    tick(USING)
    sequence()
    assert QueueMessage.objects.get().payload == b'"new"'
    assert schedule_worlds.ids() == [run_id(NAME, last + MINUTE)]


# -- ticks --------------------------------------------------------------------


def test_a_tick_enqueues_a_job():
    last = registered(of_task(args=[2], priority=5), age=70)
    done = tick(USING)
    assert done.published == (run_id(NAME, last + MINUTE),)
    assert (row().last_tick, row().last_run) == (last + MINUTE, last + MINUTE)
    result = task_backends["default"].get_result(done.published[0])
    assert (result.status, result.args, result.kwargs, result.task.priority) == ("READY", [2], {}, 5)
    deliver_all()
    result.refresh()
    assert (result.status, result.return_value) == ("SUCCESSFUL", 3)
    assert tick(USING).ticks == ()


def test_a_tick_publishes_a_message():
    last = registered(of_topic(payload={"a": [1]}, key="k", metadata={"b": 2}), age=70)
    assert tick(USING).published == (run_id(NAME, last + MINUTE),)
    sequence()
    found = QueueMessage.objects.get()
    assert (found.topic, found.partition_key, json.loads(found.payload)) == ("t", "k", {"a": [1]})
    assert found.metadata["b"] == 2


def test_after_an_outage_the_newest_missed_tick_runs():
    last = registered(of_task(), age=HOUR + 10)
    done = tick(USING)
    assert done.ticks == (last + 60 * MINUTE,)
    assert done.missed_since == last + MINUTE
    assert schedule_worlds.ids() == [run_id(NAME, last + 60 * MINUTE)]


def test_after_an_outage_all_missed_ticks_run_if_wanted():
    last = registered(of_task(catch_up="all"), age=5 * 60 + 10)
    done = tick(USING)
    assert done.published == tuple(run_id(NAME, last + number * MINUTE) for number in range(1, 6))
    assert done.missed_since is None
    assert row().last_tick == last + 5 * MINUTE
    schedule_worlds.is_sound()


def test_of_all_missed_ticks_the_newest_hundred_run():
    last = registered(of_topic(catch_up="all"), age=150 * 60 + 10)
    done = tick(USING)
    assert done.ticks == tuple(last + number * MINUTE for number in range(51, 151))
    assert done.missed_since == last + MINUTE
    assert len(schedule_worlds.ids()) == 100


@pytest.mark.parametrize("status", ["READY", "RUNNING"])
def test_a_tick_is_skipped_while_an_earlier_job_has_not_ended(status):
    last = registered(of_task(overlap="skip"), age=70)
    schedule_worlds.unfinished(last, status)
    done = tick(USING)
    assert (done.ticks, done.published, done.skipped) == ((last + MINUTE,), (), True)
    assert (row().last_tick, row().last_run, row().skipped) == (last + MINUTE, 0, 1)
    JobResult.objects.update(status="SUCCESSFUL", finished_at=5)
    Schedule.objects.update(last_tick=last)
    assert tick(USING).published == (run_id(NAME, last + MINUTE),)
    assert row().skipped == 1


def test_jobs_of_other_schedules_are_no_reason_to_skip():
    last = registered(of_task(overlap="skip"), age=70)
    for name in ("s0", "s-", "r", "s.s"):
        registered(of_task(), age=70, name=name)
        with job_worlds.configured():
            assert schedules.tick(USING, name).published
    job_worlds.enqueue(USING)
    assert tick(USING).published == (run_id(NAME, last + MINUTE),)


def test_by_default_a_job_waits_for_the_earlier_one():
    last = registered(of_task(), age=70)
    schedule_worlds.unfinished(last)
    assert tick(USING).published == (run_id(NAME, last + MINUTE),)


# -- no tick twice ------------------------------------------------------------


def test_a_row_that_went_back_enqueues_no_job_again():
    """The id is the second fence: the job has a result."""
    last = registered(of_task(), age=70)
    first = tick(USING)
    Schedule.objects.update(last_tick=last, last_run=0)
    again = tick(USING)
    assert (again.ticks, again.published) == (first.ticks, ())
    assert row().last_tick == last + MINUTE
    assert len(schedule_worlds.ids()) == JobResult.objects.count() == 1


def test_a_row_that_went_back_publishes_no_message_again():
    """The id is the second fence: the log drops the duplicate."""
    last = registered(of_topic(), age=70)
    tick(USING)
    sequence()
    Schedule.objects.update(last_tick=last)
    tick(USING)
    sequence()
    assert QueueMessage.objects.count() == 1
    assert not OutboxMessage.objects.exists()


@pytest.mark.parametrize("times", ["every", "cron"])
@pytest.mark.parametrize("jumps", [[HOUR], [-HOUR], [HOUR, -HOUR], [-HOUR, HOUR], [HOUR, -HOUR, 90], [-HOUR, 90, HOUR]])
def test_no_tick_twice_however_the_clock_jumps(clock, times, jumps):
    line = timetable("* * * * *", None, "UTC", "UTC") if times == "cron" else timetable(None, 60, None, "UTC")
    registered(of_topic(times=line))
    ticked, last = [], row().last_tick
    for seconds in [90, *jumps, 90, 90]:
        clock.advance(seconds)
        ticked += tick(USING).ticks
        assert row().last_tick >= last
        last = row().last_tick
    sequence()
    published = list(QueueMessage.objects.values_list("message_id", flat=True))
    assert len(ticked) == len(set(ticked)) == len(published) == len(set(published))
    assert ticked
    assert sorted(ticked) == ticked


def test_after_a_clock_was_set_back_ticks_resume_when_it_has_caught_up(clock):
    registered(of_topic())
    clock.advance(90)
    assert len(tick(USING).ticks) == 1
    clock.advance(-HOUR)
    assert tick(USING).ticks == ()
    clock.advance(HOUR)
    assert tick(USING).ticks == ()
    clock.advance(60)
    assert len(tick(USING).ticks) == 1


@pytest.mark.servers_only
def test_a_locked_row_is_not_waited_for():
    registered(of_topic(), age=70)
    with transaction.atomic():
        assert schedules.lock(Session(USING), NAME) is not None
        assert in_thread(lambda: tick(USING)).row is None
    assert schedule_worlds.ids() == []
    assert in_thread(lambda: tick(USING)).published


@pytest.mark.servers_only
def test_an_edit_that_is_not_committed_holds_nobody_up(clock):
    """``schedules.update()`` is part of the caller's transaction, which may be long."""
    registered(of_topic())
    registered(of_topic(), name="other")
    clock.advance(21)
    before = row().seen_at
    with transaction.atomic():
        assert schedules.lock(Session(USING), NAME) is not None
        in_thread(lambda: schedules.note_seen(USING, [NAME, "other"]))
        in_thread(lambda: schedules.note_ended(USING, [NAME]))
        assert row("other").seen_at > before
    assert row().seen_at == before


@pytest.mark.servers_only
def test_of_many_at_once_one_ticks():
    registered(of_task(), age=70)

    def one():
        try:
            return tick(USING).published
        finally:
            connections.close_all()

    with ThreadPoolExecutor(8) as pool:
        done = [future.result() for future in [pool.submit(one) for _ in range(24)]]
    assert sum(map(len, done)) == 1
    schedule_worlds.is_sound()


# -- what goes wrong ----------------------------------------------------------


def test_a_message_that_is_refused_leaves_the_tick_due(settings):
    registered(of_topic("nobody_knows"), age=70)
    before = row().last_tick
    settings.MYSQLQUEUE = {"STRICT_TOPICS": True}
    with pytest.raises(UnknownTopic):
        tick(USING)
    assert row().last_tick == before
    settings.MYSQLQUEUE = {}
    assert tick(USING).published


def test_a_paused_or_unknown_schedule_does_not_tick():
    registered(of_topic(), age=70)
    Schedule.objects.update(paused_at=5)
    assert tick(USING).ticks == ()
    Schedule.objects.all().delete()
    assert tick(USING).row is None


def test_a_tick_in_a_transaction_of_a_test_joins_it():
    registered(of_topic(), age=70)
    with transaction.atomic():
        assert tick(USING).published
        transaction.set_rollback(True)
    assert schedule_worlds.ids() == []
    assert tick(USING).published


def test_it_is_seen_every_twenty_seconds(clock):
    registered(of_topic())
    first = row().seen_at
    schedules.note_seen(USING, [NAME])
    assert row().seen_at == first
    clock.advance(21)
    schedules.note_seen(USING, [NAME])
    assert row().seen_at > first + 20_000
    clock.advance(61)
    assert not schedules.read(Session(USING), [NAME])[NAME].is_declared

"""Who ticks: pollers, as seldom as they can, and whatever happens to one schedule."""

from __future__ import annotations

import logging
import time

import pytest
from django.db import OperationalError, connection

from django_mysqlqueue.inspection import check_health, find_problems, list_schedules
from django_mysqlqueue.inspection.bounds import STALL_TIMES
from django_mysqlqueue.models import JobResult, OutboxMessage, QueueMessage, Schedule
from django_mysqlqueue.operations import delete_recurring
from django_mysqlqueue.schedules.timetables import timetable
from django_mysqlqueue.testing import deliver_all
from tests.support import job_worlds, schedule_worlds
from tests.support.harness import USING, Sub, handler
from tests.support.internals import Row, Session, Ticker, schedules, ticking
from tests.support.schedule_worlds import NAME, of_task, of_topic, registered, row

pytestmark = [pytest.mark.promise("Recurring schedules")]


@pytest.fixture(autouse=True)
def _backend(db, no_handlers, settings):
    settings.TASKS = job_worlds.TASKS


class Sent:
    """The statements about schedules that are sent."""

    def __init__(self):
        self.texts = []

    def __call__(self, execute, sql, params, many, context):
        if "queue_schedules" in sql:
            self.texts.append(sql)
        return execute(sql, params, many, context)


@pytest.fixture
def sent():
    found = Sent()
    with connection.execute_wrapper(found):
        yield found


def with_schedules(*names):
    sub = Sub(handler("t", "g"))
    ticker = Ticker(USING, names)
    object.__setattr__(sub.context, "ticker", ticker)
    return sub, ticker


def later(monkeypatch, clock, seconds):
    """So much later by both clocks."""
    real = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: real() + seconds)
    clock.advance(seconds)


def events(caplog):
    return [one.mysqlqueue for one in caplog.records if getattr(one, "mysqlqueue", {}).get("schedule")]


def test_a_process_without_schedules_sends_nothing_for_them(sent):
    registered(of_topic(), age=70)
    sent.texts.clear()
    sub = Sub(handler("t", "g"))
    sub.step(times=3)
    # The query of the groups, which is sent anyway, tells whether people have made any.
    assert [text for text in sent.texts if "queue_consumer_groups" not in text] == []
    assert sub.context.ticker.next_at == float("inf")
    assert schedule_worlds.ids() == []


def test_a_poller_ticks_what_is_due_and_sequences_it():
    registered(of_topic(), age=70)
    registered(of_task(), age=70, name="u")
    sub, _ = with_schedules(NAME, "u")
    sub.step()
    sub.step()
    assert QueueMessage.objects.count() == 2
    assert JobResult.objects.get().status == "READY"


def test_until_a_tick_is_due_it_looks_every_ten_seconds(sent, clock, monkeypatch):
    registered(of_topic())
    _, ticker = with_schedules(NAME)
    began = time.monotonic()
    ticker.turn()
    sent.texts.clear()
    for _ in range(5):
        ticker.turn()
    assert sent.texts == []
    assert began + ticking.LOOK <= ticker.next_at <= time.monotonic() + ticking.LOOK
    later(monkeypatch, clock, 11)
    ticker.turn()
    assert len(sent.texts) == 1
    later(monkeypatch, clock, 50)
    ticker.turn()
    assert len(schedule_worlds.ids()) == 1


def test_it_sleeps_until_the_tick(clock, monkeypatch):
    began = time.monotonic()
    registered(of_topic(times=timetable(None, 3, None, "UTC")))
    sub, ticker = with_schedules(NAME)
    sub.step()
    assert began + 2 < ticker.next_at <= time.monotonic() + 3
    sub.poller.run(lambda: OutboxMessage.objects.exists() or time.monotonic() > began + 20)
    assert OutboxMessage.objects.exists()
    assert time.monotonic() - began > 2


def test_after_twenty_seconds_it_is_seen_again(clock, monkeypatch):
    registered(of_topic())
    Schedule.objects.update(seen_at=1)
    _, ticker = with_schedules(NAME)
    ticker.turn()
    first = row().seen_at
    assert first > 1
    later(monkeypatch, clock, 15)
    ticker.turn()
    assert row().seen_at == first
    later(monkeypatch, clock, 11)
    ticker.turn()
    assert row().seen_at >= first + schedules.SEEN_MS


def declared():
    return schedules.read(Session(USING), [NAME])[NAME].is_declared


def test_a_clean_stop_ends_the_declaration(clock):
    """Within fifteen seconds, and long before a tick is overdue: nothing is to be done about it."""
    registered(of_topic())
    _, ticker = with_schedules(NAME)
    ticker.turn()
    clock.advance(5)
    ticker.end()
    assert declared(), "another process may declare it, too"
    clock.advance(16)
    assert not declared()
    assert not list_schedules()[0].declared


def test_the_clean_stop_of_one_of_several_processes_does_not_end_it(clock, monkeypatch):
    """Not for a moment."""
    registered(of_topic())
    (_, one), (_, other) = with_schedules(NAME), with_schedules(NAME)
    for _ in range(3):
        one.turn()
        other.turn()
        one.end()
        for _ in range(3):
            later(monkeypatch, clock, 10.5)
            assert declared()
            other.turn()
            assert declared()


def test_a_clean_stop_does_not_revive_a_declaration(clock):
    registered(of_topic())
    _, ticker = with_schedules(NAME)
    clock.advance(61)
    assert not declared()
    before = row().seen_at
    ticker.end()
    assert (row().seen_at, declared()) == (before, False)


def test_a_process_without_schedules_ends_none(sent):
    registered(of_topic())
    sent.texts.clear()
    Ticker(USING).end()
    assert sent.texts == []


@pytest.mark.parametrize("how", ["stopped", "killed"])
@pytest.mark.parametrize("seconds", [50, 59.9, 61])
def test_a_schedule_that_was_renamed_is_never_overdue(clock, monkeypatch, how, seconds):
    """A deployment, second by second: the process that is replaced declared the former name."""
    registered(of_topic(), name="former")
    _, earlier = with_schedules("former")
    earlier.turn()
    later(monkeypatch, clock, seconds)
    earlier.turn()
    if how == "stopped":
        earlier.end()
    registered(of_topic())
    sub, _ = with_schedules(NAME)
    for _ in range(60):
        sub.beat()
        sub.settle()
        assert [one.overdue for one in list_schedules() if one.overdue >= STALL_TIMES.tick] == []
        assert check_health().healthy
        later(monkeypatch, clock, 4)
    (problem,) = [one for one in find_problems() if one.kind == "recurring"]
    assert problem.severity == 2
    assert problem.text == (
        "No running process declares the recurring schedule former, so it does not run. If it is no longer needed, "
        "delete it with queuerecurring."
    )
    assert "recurring.failed" not in problem.advice
    delete_recurring("former", actor="ada")


def test_the_time_after_which_a_tick_is_overdue_is_not_shorter_than_a_declaration():
    assert STALL_TIMES.tick * 1000 >= schedules.DECLARED_MS
    assert schedules.SEEN_MS + ticking.LOOK * 1000 < schedules.DECLARED_MS
    assert ticking.LOOK * 1000 < schedules.ENDED_MS


def test_a_pause_and_a_change_are_noticed(clock, monkeypatch):
    registered(of_topic())
    _, ticker = with_schedules(NAME)
    ticker.turn()
    Schedule.objects.update(paused_at=5)
    later(monkeypatch, clock, 70)
    ticker.turn()
    assert schedule_worlds.ids() == []
    Schedule.objects.update(paused_at=0)
    later(monkeypatch, clock, 11)
    ticker.turn()
    assert len(schedule_worlds.ids()) == 1
    Schedule.objects.all().delete()
    later(monkeypatch, clock, 70)
    ticker.turn()
    assert len(schedule_worlds.ids()) == 1


@pytest.mark.parametrize("seconds", [3600, -3600])
def test_a_jump_of_the_databases_clock_is_noticed(clock, monkeypatch, seconds):
    """Within ten seconds; and no tick comes twice."""
    registered(of_topic())
    _, ticker = with_schedules(NAME)
    ticker.turn()
    clock.advance(seconds)
    later(monkeypatch, clock, 11)
    ticker.turn()
    assert len(schedule_worlds.ids()) == (1 if seconds > 0 else 0)
    clock.advance(-seconds)
    for _ in range(4):
        later(monkeypatch, clock, 31)
        ticker.turn()
    assert len(set(schedule_worlds.ids())) == len(schedule_worlds.ids()) == (1 if seconds > 0 else 2)


def test_one_that_fails_does_not_stop_the_others(settings, caplog, clock, monkeypatch):
    caplog.set_level(logging.INFO)
    registered(of_topic("nobody_knows"), age=70)
    registered(of_task(), age=70, name="u")
    settings.MYSQLQUEUE = {"STRICT_TOPICS": True}
    _, ticker = with_schedules(NAME, "u")
    ticker.turn()
    assert [one.rsplit(":", 1)[0] for one in schedule_worlds.ids()] == ["recurring:u"]
    assert [one["event"] for one in events(caplog)] == ["recurring.failed", "recurring.tick"]
    assert "STRICT_TOPICS" in events(caplog)[0]["error"]
    assert ticker.next_at > time.monotonic() + 0.5
    settings.MYSQLQUEUE = {}
    later(monkeypatch, clock, 2)
    ticker.turn()
    assert len(schedule_worlds.ids()) == 2
    assert [one["event"] for one in events(caplog)][2:] == ["recurring.recovered", "recurring.tick"]


@pytest.mark.parametrize("where", ["tick", "next tick"])
def test_a_bug_that_one_schedule_meets_does_not_stop_the_others(monkeypatch, caplog, where):
    """Nor the poller. Its traceback is logged."""
    caplog.set_level(logging.INFO)
    registered(of_topic(), age=70)
    registered(of_task(), age=70, name="u")
    real = schedules.tick

    def tick(using, name):
        return real(using, name) if name == "u" else {}["k"]

    if where == "tick":
        monkeypatch.setattr(schedules, "tick", tick)
    else:
        following = Row.next_tick.fget
        monkeypatch.setattr(Row, "next_tick", property(lambda row: following(row) if row.name == "u" else {}["k"]))
    _, ticker = with_schedules(NAME, "u")
    ticker.turn()
    assert [one.rsplit(":", 1)[0] for one in schedule_worlds.ids()] == ["recurring:u"]
    assert {one["event"] for one in events(caplog)} == {"recurring.failed", "recurring.tick"}
    assert "KeyError: 'k'" in caplog.text
    assert "Traceback" in caplog.text


def test_a_definition_of_a_later_release(caplog):
    registered(of_topic(), age=70)
    Schedule.objects.update(definition='{"weather": "dry"}')
    _, ticker = with_schedules(NAME)
    ticker.turn()
    ticker.turn()
    (failed,) = events(caplog)
    assert failed["event"] == "recurring.failed"
    assert "This release does not know the definition: it has weather" in failed["error"]


def test_a_time_zone_that_this_host_lacks(caplog):
    registered(of_topic(times=timetable("0 3 * * *", None, "Europe/Berlin", "UTC")))
    Schedule.objects.update(definition=row().definition.replace("Europe/Berlin", "Mars/Olympus"))
    _, ticker = with_schedules(NAME)
    ticker.turn()
    (failed,) = events(caplog)
    assert "0 3 * * * in 'Mars/Olympus'" in failed["error"]


def test_an_error_of_the_statement_alone_stops_nothing_else(monkeypatch, caplog):
    registered(of_topic(), age=70)

    def fail(*arguments):
        raise OperationalError(1205, "Lock wait timeout exceeded")

    monkeypatch.setattr(schedules, "tick", fail)
    _, ticker = with_schedules(NAME)
    ticker.turn()
    assert [one["event"] for one in events(caplog)] == ["recurring.failed"]


def test_a_lost_connection_is_the_pollers(monkeypatch):
    registered(of_topic(), age=70)

    def fail(*arguments):
        connection.close()
        raise OperationalError(2006, "gone")

    _, ticker = with_schedules(NAME)
    with monkeypatch.context() as patch:
        patch.setattr(schedules, "tick", fail)
        with pytest.raises(OperationalError):
            ticker.turn()
    ticker.reset()
    ticker.turn()
    assert len(schedule_worlds.ids()) == 1


def test_what_is_logged(caplog, clock, monkeypatch):
    caplog.set_level(logging.INFO)
    registered(of_task(overlap="skip"), age=130)
    _, ticker = with_schedules(NAME)
    ticker.turn()
    later(monkeypatch, clock, 61)
    ticker.turn()
    found = events(caplog)
    assert [one["event"] for one in found] == ["recurring.missed", "recurring.tick", "recurring.skipped"]
    assert found[1]["id"] == schedule_worlds.ids()[0]
    Schedule.objects.update(last_tick=row().last_tick - 120_000, definition=of_task().as_json())
    ticker.reset()
    ticker.turn()
    assert [one["event"] for one in events(caplog)][3:] == ["recurring.missed", "recurring.tick"]


def test_deliver_all_and_eager_do_not_tick(settings):
    registered(of_task(), age=70)
    deliver_all()
    settings.MYSQLQUEUE = {"EAGER": True}
    deliver_all()
    assert schedule_worlds.ids() == []

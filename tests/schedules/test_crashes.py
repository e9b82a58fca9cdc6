"""A process or a connection ends at any statement of a tick or a registration: both are whole, or not there."""

from __future__ import annotations

import pytest
from django.db import connections

from django_mysqlqueue import operations
from django_mysqlqueue.exceptions import OperationRefused
from django_mysqlqueue.models import JobResult, Operation, Schedule
from django_mysqlqueue.schedules.timetables import timetable
from tests.crash.crashes import ALIAS, ENDS, LOST
from tests.jobs.test_crashes import at_every_statement
from tests.support import job_worlds, schedule_worlds
from tests.support.harness import USING
from tests.support.internals import drop_connection
from tests.support.job_worlds import PATH
from tests.support.schedule_worlds import MINUTE, NAME, created, of_task, registered

pytestmark = [pytest.mark.promise("Recurring schedules")]


def state():
    """What a change of a schedule changes; without times of day."""
    rows = Schedule.objects.using(USING).values_list(
        "name", "definition", "last_tick", "last_run", "skipped", "editable"
    )
    return list(rows), schedule_worlds.ids(), schedule_worlds.results()


@pytest.mark.parametrize("mode", ENDS)
@pytest.mark.parametrize("name", schedule_worlds.CHANGES)
def test_a_change_is_made_or_not(db, crasher, settings, name, mode):
    """Run again, it comes to the same, and nothing is published twice."""
    settings.TASKS = job_worlds.TASKS
    change = schedule_worlds.CHANGES[name]
    seen = []

    def setup():
        last = change.setup()
        return last, state()

    def check(world, ended):
        last, before = world
        schedule_worlds.is_sound()
        least, messages = change.after(last)
        here = state()
        if not name.startswith("register"):
            # All of it or nothing: the row has moved if and only if the messages are there.
            assert (here == before) == (not here[1]) == (Schedule.objects.get().last_tick == last)
            assert len(here[1]) in (0, messages)
        seen.append(here != before)
        change.make(USING)
        drop_connection(connections[ALIAS])
        schedule_worlds.is_sound()
        assert Schedule.objects.get().last_tick >= least
        assert len(schedule_worlds.ids()) == messages
        assert JobResult.objects.count() in (0, messages)
        after = state()
        change.make(USING)
        assert state() == after

    def operation(world):
        change.make(ALIAS)

    assert at_every_statement(crasher, mode, setup, operation, check) > (1 if mode == LOST else 3)
    # It was met before and after its COMMIT; of this mode, the answer alone is lost.
    assert seen[0] is (mode == LOST)
    assert seen[-1] is True


@pytest.mark.parametrize("mode", ENDS)
def test_a_run_by_hand(db, crasher, settings, mode):
    settings.TASKS = job_worlds.TASKS

    def check(last, ended):
        assert len(schedule_worlds.ids()) == JobResult.objects.count() <= 1
        assert Schedule.objects.get().last_tick == last

    at_every_statement(
        crasher, mode, lambda: registered(of_task()), lambda _: schedule_worlds.publish_now(ALIAS), check
    )


@pytest.mark.parametrize("mode", ENDS)
def test_a_creation_is_whole_or_not_there(db, crasher, settings, mode):
    """With its record. If its answer was lost, a second one is refused and changes nothing."""
    settings.TASKS = job_worlds.TASKS
    seen = []

    def create(using):
        return operations.create_recurring(NAME, PATH, every=60, actor="ada", using=using)

    def check(world, ended):
        there = Schedule.objects.filter(editable=True).count()
        assert there == Schedule.objects.count() == Operation.objects.filter(ended_at__gt=0).count()
        assert Operation.objects.count() == there
        seen.append(there)
        if there:
            before = state()
            with pytest.raises(OperationRefused, match="There is a schedule with the name 's'"):
                create(USING)
            assert state() == before
        else:
            assert create(USING).changed == 1

    assert at_every_statement(crasher, mode, lambda: None, lambda _: create(ALIAS), check) > (1 if mode == LOST else 3)
    assert seen[0] == (mode == LOST)
    assert seen[-1] == 1


@pytest.mark.parametrize("mode", ENDS)
@pytest.mark.parametrize(
    ("changes", "moves"), [({"args": [2]}, False), ({"every": 120}, True), ({"enabled": False}, False)]
)
def test_an_edit_is_whole_or_not_made(db, crasher, settings, changes, moves, mode):
    """With its record. No tick of the former times is left, and none of the same times is lost."""
    settings.TASKS = job_worlds.TASKS

    def change(using):
        return operations.update_recurring(NAME, **changes, actor="ada", using=using)

    def setup():
        times = timetable(None, 60, None, "UTC", spread=NAME)
        return created(of_task(times=times), age=70), Schedule.objects.get().definition

    def check(world, ended):
        last, definition = world
        row = Schedule.objects.get()
        is_done = row.definition != definition or row.paused_at > 0
        assert is_done == (Operation.objects.filter(ended_at__gt=0).count() == 1)
        assert Operation.objects.count() == is_done
        assert row.editable
        assert (row.last_tick > last) == (is_done and moves)
        assert change(USING).changed == (not is_done)

    assert at_every_statement(crasher, mode, setup, lambda _: change(ALIAS), check) > (1 if mode == LOST else 3)


@pytest.mark.parametrize("mode", ENDS)
@pytest.mark.parametrize("name", ["run", "pause", "resume", "delete"])
def test_an_operation_is_recorded_with_what_it_did(db, crasher, settings, name, mode):
    settings.TASKS = job_worlds.TASKS
    call = getattr(operations, f"{name}_recurring")

    def setup():
        last = registered(of_task(), age=10 * 60)
        Schedule.objects.update(seen_at=0, paused_at=int(name == "resume"))
        return last

    def check(last, ended):
        recorded = Operation.objects.filter(ended_at__gt=0).count()
        assert recorded == Operation.objects.count() <= 1
        row = Schedule.objects.first()
        done = {
            "run": bool(schedule_worlds.ids()),
            "pause": row is not None and row.paused_at > 0,
            "resume": row is not None and row.paused_at == 0,
            "delete": row is None,
        }[name]
        assert done == bool(recorded)
        schedule_worlds.is_sound()
        if name == "resume" and done:
            assert (row.last_tick - last) % MINUTE == 0
            assert row.last_tick >= last + 10 * MINUTE
        elif row is not None:
            assert row.last_tick == last

    number = at_every_statement(crasher, mode, setup, lambda _: call(NAME, actor="ada", using=ALIAS), check)
    assert number > (1 if mode == LOST else 3)

"""The soak's killer finds processes in the middle of the transactions of jobs."""

from __future__ import annotations

import pytest
from django.db import connection
from soak import plan
from soak.app import traps

from django_mysqlqueue.models import OutboxMessage, Schedule
from django_mysqlqueue.tasks import call, enqueue_chain
from django_mysqlqueue.testing import deliver_all
from tests.app import jobs
from tests.support import job_worlds, schedule_worlds
from tests.support.harness import USING


@pytest.mark.skipif(connection.vendor == "sqlite", reason="the soak test runs on servers")
def test_traps_are_on_the_way_of_a_chain(db, no_handlers, settings):
    settings.TASKS = job_worlds.TASKS
    places = []

    def watch(execute, sql, *more):
        places.append(traps._place(sql))
        return execute(sql, *more)

    enqueue_chain(call(jobs.add, 1), call(jobs.add, 2))
    with connection.execute_wrapper(watch):
        deliver_all()
    ours = [place for place in places if place in ("begin", "stage")]
    assert ours == ["begin", "stage", "begin", "stage"]
    assert set(ours) <= set(plan.TRAPS.values())


@pytest.mark.skipif(connection.vendor == "sqlite", reason="the soak test runs on servers")
def test_a_trap_is_inside_the_transaction_of_a_tick(db, settings):
    """Its message has been inserted, its row has not been moved."""
    settings.TASKS = job_worlds.TASKS
    last = schedule_worlds.registered(schedule_worlds.of_task(), age=70)
    places = []

    def watch(execute, sql, *more):
        if (place := traps._place(sql)) is not None:
            places.append((place, Schedule.objects.get().last_tick, OutboxMessage.objects.count()))
        return execute(sql, *more)

    with connection.execute_wrapper(watch):
        assert schedule_worlds.tick(USING).published
    assert places == [("tick", last, 1)]
    assert {"tick"} <= set(plan.TRAPS.values())

"""Recurring schedules in every state, for tests of what happens to them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest.mock import patch

from django_mysqlqueue import publish_many
from django_mysqlqueue.models import JobResult, OutboxMessage, QueueMessage, Schedule
from django_mysqlqueue.schedules.definitions import Definition, parse
from django_mysqlqueue.schedules.timetables import timetable
from tests.support.harness import USING
from tests.support.internals import NewResult, Session, celery_beat, job_rows, run, run_id, schedules
from tests.support.job_worlds import JOBS, PATH, configured

NAME = "s"
MINUTE = 60_000


def of_task(**more: Any) -> Definition:
    """A job each minute."""
    times = more.pop("times", timetable(None, 60, None, "UTC"))
    payload = {"task": PATH, "args": more.pop("args", [1]), "kwargs": {}}
    return Definition(times, JOBS.topic, payload, task=PATH, backend="default", **more)


def daily(days: int = 1, **more: Any) -> Definition:
    """A job each day, unless the last one runs."""
    return of_task(times=timetable(None, days * 86_400, None, "UTC"), overlap="skip", **more)


def of_topic(topic: str = "t", payload: Any = "tick", **more: Any) -> Definition:
    """A message each minute."""
    times = more.pop("times", timetable(None, 60, None, "UTC"))
    return Definition(times, topic, payload, **more)


def at_night(definition: Definition) -> Definition:
    """The same at other times."""
    return definition._replace(timetable=timetable("0 3 * * *", None, "UTC", "UTC"))


def created(definition: Definition, *, age: float = 0, name: str = NAME, enabled: bool = True) -> int:
    """Makes it as people do, seconds ago. Returns its ``last_tick``."""
    run(USING, lambda session: schedules.create(session, name, definition, enabled=enabled))
    found = row(name)
    last_tick = int(found.last_tick - round(age * 1000))
    Schedule.objects.using(USING).filter(name=name).update(last_tick=last_tick)
    return last_tick


@contextlib.contextmanager
def periodic_task() -> Iterator[None]:
    """A periodic task of Celery beat, in place of its tables."""
    row = {"name": "of beat", "task": PATH, "enabled": True, "interval_id": 1}
    tables = celery_beat._Tables([row], {}, {1: {"id": 1, "every": 5, "period": "minutes"}}, {})
    with configured(), patch.object(celery_beat, "_read", lambda using: tables):
        yield


def registered(definition: Definition, *, age: float = 0, name: str = NAME) -> int:
    """Registers it; it was seconds ago. Returns its ``last_tick``."""
    schedules.register(USING, {name: definition})
    row = Schedule.objects.using(USING).get(name=name)
    last_tick = row.last_tick - round(age * 1000)
    Schedule.objects.using(USING).filter(name=name).update(last_tick=last_tick)
    return int(last_tick)


def row(name: str = NAME) -> Schedule:
    return Schedule.objects.using(USING).get(name=name)


def ids(topic: str | None = None) -> list[str]:
    """The ids of the messages of schedules, in outbox and log."""
    found: list[str] = []
    for model in (QueueMessage, OutboxMessage):
        rows = model._default_manager.using(USING).filter(message_id__startswith="recurring:")
        found += (rows if topic is None else rows.filter(topic=topic)).values_list("message_id", flat=True)
    return sorted(found)


def results() -> list[str]:
    return sorted(JobResult.objects.using(USING).values_list("id", flat=True))


def is_sound(name: str = NAME) -> None:
    """What holds at any moment: each message of a job has its result, and none is of a tick that is still to come."""
    of_jobs = ids(JOBS.topic)
    assert of_jobs == [one for one in results() if one.startswith("recurring:")]
    assert len(of_jobs) == len(set(of_jobs))
    for one in Schedule.objects.using(USING).filter(name=name):
        by_ticks = [found for found in ids() if "-" not in found]
        assert all(found <= run_id(name, one.last_tick) for found in by_ticks)
        assert one.last_run in (0, *(int(found.rsplit(":", 1)[1]) for found in by_ticks))


@configured()
def unfinished(tick: int, status: str = "RUNNING") -> None:
    """The job of an earlier tick has not ended."""
    arguments = '{"args": [1], "kwargs": {}}'
    one = NewResult(run_id(NAME, tick), "default", "default", PATH, arguments, 0, 0, 1)
    job_rows.insert(Session(USING), [one])
    publish_many(JOBS.topic, [job_rows.message_of(one)], using=USING)
    JobResult.objects.using(USING).filter(id=one.id).update(status=status)


class Change(NamedTuple):
    """A change of a schedule."""

    setup: Callable[[], int]
    """Returns what ``last_tick`` was."""
    make: Callable[[str], object]
    """Takes the alias of the connection."""
    after: Callable[[int], tuple[int, int]]
    """From what ``last_tick`` was: how far it has moved at least, and how many messages there are."""


def publish_now(alias: str) -> str:
    def write(session: Session) -> str:
        found = schedules.lock(session, NAME)
        assert found is not None
        return schedules.publish_by_hand(session, NAME, parse(found.definition))

    return run(alias, write)


def tick(alias: str) -> schedules.Tick:
    with configured():
        return schedules.tick(alias, NAME)


CHANGES: dict[str, Change] = {
    "tick of a task": Change(lambda: registered(of_task(), age=70), tick, lambda last: (last + MINUTE, 1)),
    "tick of a topic": Change(lambda: registered(of_topic(), age=70), tick, lambda last: (last + MINUTE, 1)),
    "tick of all that were missed": Change(
        lambda: registered(of_task(catch_up="all"), age=190), tick, lambda last: (last + 3 * MINUTE, 3)
    ),
    "tick of the newest that was missed": Change(
        lambda: registered(of_task(), age=190), tick, lambda last: (last + 3 * MINUTE, 1)
    ),
    "tick unless a job runs": Change(
        lambda: registered(of_task(overlap="skip"), age=70), tick, lambda last: (last + MINUTE, 1)
    ),
    "register": Change(lambda: 0, lambda alias: schedules.register(alias, {NAME: of_task()}), lambda last: (1, 0)),
    "register other arguments": Change(
        lambda: registered(of_task(), age=70),
        lambda alias: schedules.register(alias, {NAME: of_task(args=[2])}),
        lambda last: (last, 0),
    ),
    "register other times": Change(
        lambda: registered(of_task(), age=70),
        lambda alias: schedules.register(alias, {NAME: at_night(of_task())}),
        lambda last: (last + 70_000, 0),
    ),
    "register one that people have made": Change(
        lambda: created(of_task(), age=70),
        lambda alias: schedules.register(alias, {NAME: of_task()}),
        lambda last: (last, 0),
    ),
    "tick of one that people have made": Change(
        lambda: created(of_task(), age=70), tick, lambda last: (last + MINUTE, 1)
    ),
}

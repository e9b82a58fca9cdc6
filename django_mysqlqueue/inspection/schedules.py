"""The recurring schedules: when they are due, and their last runs."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from django_mysqlqueue.arguments import checked
from django_mysqlqueue.db.tables import RESULTS
from django_mysqlqueue.exceptions import InvalidMessage, SubscriberError
from django_mysqlqueue.inspection.redaction import redacted
from django_mysqlqueue.models import JobResult
from django_mysqlqueue.names.ids import run_ids, tick_of
from django_mysqlqueue.schedules import registry
from django_mysqlqueue.schedules.definitions import Definition, parse
from django_mysqlqueue.service import job_rows, schedules
from django_mysqlqueue.service.databases import queue_alias
from django_mysqlqueue.service.messages import last_line
from django_mysqlqueue.service.schedules import Row
from django_mysqlqueue.sql.session import Session, built
from django_mysqlqueue.subscriptions.registry import discover

MOST = 1000
"""Maximum number of schedules that are read."""
RUNS = 3
"""Number of jobs of a schedule that are read to find its last outcome. The newest ones may not have ended."""
LAST_ERROR = 8192
"""Number of characters of the errors of a job, from their end, in which the last one is searched."""


@dataclass(frozen=True, slots=True)
class ScheduleRun:
    """A job of a schedule. Times are in epoch milliseconds of the database's clock; 0: not yet."""

    id: str
    tick: int
    """The tick, or when somebody has asked for it."""
    by_hand: bool
    """True if an operator has asked for it."""
    status: str
    """``"READY"``, ``"RUNNING"``, ``"FAILED"`` or ``"SUCCESSFUL"``."""
    enqueued_at: int
    started_at: int
    finished_at: int
    error: str
    """The class of the last exception; empty if there was none."""
    error_line: str = ""
    """The last line of the last traceback, redacted; empty if there was none, or if it is not known."""

    @property
    def duration(self) -> float | None:
        """Seconds from its first attempt to its end; None if it has not ended, or there was no attempt."""
        return (self.finished_at - self.started_at) / 1000 if self.finished_at and self.started_at else None


@dataclass(frozen=True, slots=True)
class ScheduleStatus:
    """A recurring schedule. Times are in epoch milliseconds of the database's clock; 0: never."""

    name: str
    task: str
    """The path of its task; empty: it publishes a message."""
    topic: str
    """The topic of its messages, for a task that of its queue."""
    times: str
    """Its cron line, or its interval."""
    timezone: str
    """The time zone of the cron line; empty: it has an interval."""
    now: int
    """When it was read."""
    next_tick: int | None
    """When it is due next, or since when it is overdue; None if it is paused, or never."""
    last_tick: int
    """Up to which time its ticks were decided: published, skipped or dropped."""
    last_run: int
    """The last tick that was published."""
    skipped: int
    """How many ticks were skipped, because an earlier job had not ended."""
    paused_at: int
    """When it was paused; 0: it is not."""
    registered_at: int
    """When its definition was last changed; 0: this project declares it, but no subscriber has registered it yet."""
    seen_at: int
    """When a process that declares it was last seen."""
    declared: bool
    """True if a running process declares it; of one that can be edited, if a running process runs it."""
    catch_up: str
    overlap: str
    runs: tuple[ScheduleRun, ...]
    """Its last jobs, newest first; none for messages."""
    error: str = ""
    """Why this release cannot run it, or, of one that can be edited, why its task cannot run; empty if it can."""
    editable: bool = False
    """True if people have made it, with ``schedules.create()`` or in the admin; False if it is declared in the code."""

    @property
    def overdue(self) -> float:
        """Seconds for which a tick has been due; 0 if none is, or if no running process declares the schedule."""
        return self.due if self.declared else 0.0

    @property
    def due(self) -> float:
        """Seconds for which a tick has been due, whether or not a running process declares it; 0 if none is."""
        return 0.0 if self.next_tick is None else max(0.0, (self.now - self.next_tick) / 1000)

    @property
    def failed_run(self) -> ScheduleRun | None:
        """The last of its jobs that has ended, as far as ``runs`` goes, if that one has failed; otherwise None."""
        last = next((run for run in self.runs if run.finished_at), None)
        return None if last is None or last.status != JobResult.Status.FAILED else last


@checked()
def list_schedules(*, topic: str | None = None, using: str | None = None, runs: int = 1) -> tuple[ScheduleStatus, ...]:
    """Return the recurring schedules of a database, at most the first 1,000 by name.

    Args:
        topic: only schedules that publish to this topic.
        using: alias of the database (default: that of the topic, else of the queue).
        runs: number of last jobs of each.
    """
    session = Session(queue_alias(using, topic=topic))
    rows = schedules.read_all(session, MOST)
    found = {row.name: _parsed(row) for row in rows}
    if topic is not None:
        rows = [row for row in rows if getattr(found[row.name], "topic", "") == topic]
        found = {row.name: found[row.name] for row in rows}
    of_tasks = {name: one.topic for name, one in found.items() if isinstance(one, Definition) and one.task}
    last = _runs(session, of_tasks, runs) if runs else {}
    return tuple(_status(row, found[row.name], tuple(last.get(row.name, ()))) for row in rows)


def with_declared(
    found: Sequence[ScheduleStatus], using: str, *, topic: str | None = None
) -> tuple[ScheduleStatus, ...]:
    """Return schedules with those that this project declares and no subscriber has registered yet, by name."""
    with contextlib.suppress(SubscriberError):  # check E008 reports it
        discover()
    names = {one.name for one in found}
    declared = {
        name: one
        for name, one in registry.find().definitions.items()
        if name not in names and topic in (None, one.topic) and _home_of(one) == using
    }
    if not declared:
        return tuple(found)
    session = Session(using)
    now, known = session.now(), schedules.read(session, declared)
    new = [_status(_unregistered(name, now), one) for name, one in declared.items() if name not in known]
    return tuple(sorted((*found, *new), key=lambda one: one.name))


def _unregistered(name: str, now: int) -> Row:
    times = dict.fromkeys(("last_tick", "last_run", "paused_at", "registered_at", "seen_at"), 0)
    return Row(name, "", skipped=0, editable=False, now=now, **times)


def _home_of(definition: Definition) -> str | None:
    try:
        return schedules.home_of(definition)
    except InvalidMessage:
        return None  # check E027 reports it


def _parsed(row: Row) -> Definition | str:
    try:
        return parse(row.definition)
    except ValueError as error:
        return str(error)


def _status(row: Row, definition: Definition | str, runs: tuple[ScheduleRun, ...] = ()) -> ScheduleStatus:
    known = definition if isinstance(definition, Definition) else None
    next_tick, error = None, "" if isinstance(definition, Definition) else definition
    if known is not None and row.registered_at and not row.paused_at:
        try:
            next_tick = known.timetable.following(row.last_tick)
        except ValueError as problem:  # This host has other time zones.
            error = str(problem)
    if known is not None and row.editable and not error:
        error = registry.why_not(known)
    return built(
        ScheduleStatus,
        row,
        editable=bool(row.editable),
        task=known.task if known else "",
        topic=known.topic if known else "",
        times=str(known.timetable) if known else "",
        timezone=known.timetable.timezone if known else "",
        next_tick=next_tick,
        declared=row.is_declared,
        catch_up=known.catch_up if known else "",
        overlap=known.overlap if known else "",
        runs=runs,
        error=error,
    )


def _runs(session: Session, topics: Mapping[str, str], most: int) -> dict[str, list[ScheduleRun]]:
    """Return the last jobs of schedules, newest first, along the primary key."""
    found: dict[str, list[ScheduleRun]] = {}
    errors = session.dialect.ending("errors", LAST_ERROR)
    select = (
        f"SELECT id, status, enqueued_at, started_at, finished_at, {errors} FROM {RESULTS}"
        f"{session.dialect.force_index('PRIMARY')} WHERE id >= %s AND id < %s ORDER BY id DESC LIMIT %s"
    )
    rows = session.each(select, [(*run_ids(name), most) for name in topics])
    for job, status, enqueued_at, started_at, finished_at, ends in sorted(rows, reverse=True):
        start, end = job.rsplit(":", 1)
        name = start.split(":", 1)[1]
        times = (enqueued_at, started_at, finished_at)
        run = ScheduleRun(job, tick_of(job), "-" in end, status, *times, *_last_error(ends, topics[name]))
        found.setdefault(name, []).append(run)
    return found


def _last_error(errors: str, topic: str) -> tuple[str, str]:
    """Return the class of the last exception and the last line of its traceback, redacted."""
    lines = job_rows.lines(errors)
    if not lines:
        return "", ""
    try:
        last: Any = json.loads(lines[-1])
        traceback = str(last["traceback"])
        line = last_line(redacted(traceback, topic=topic, kind="error")) if traceback else ""
        return str(last["exception_class_path"]), line
    except (ValueError, KeyError, TypeError):
        return "", ""  # Its line is longer than what was read.

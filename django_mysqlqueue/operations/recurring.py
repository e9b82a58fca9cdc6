"""Operations on recurring schedules: run now, pause, resume, delete. Each is one transaction under the row's lock."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Unpack

from django.utils.translation import gettext as _

from django_mysqlqueue.db.tables import SCHEDULES
from django_mysqlqueue.exceptions import OperationRefused
from django_mysqlqueue.names.rules import KEY_LENGTH
from django_mysqlqueue.operations.arguments import text
from django_mysqlqueue.operations.declaring import By, How, operates, operating
from django_mysqlqueue.operations.lookups import known_names
from django_mysqlqueue.operations.results import Result, result_of
from django_mysqlqueue.schedules import registry
from django_mysqlqueue.schedules.definitions import Definition, parse
from django_mysqlqueue.service import audit, schedules
from django_mysqlqueue.service.databases import queue_aliases
from django_mysqlqueue.service.schedules import Row
from django_mysqlqueue.sql.session import Session, run
from django_mysqlqueue.text.humanize import duration, moment

MOST_NAMES = 1000
"""Maximum number of schedules whose names an error is chosen from."""


@operates
def run_recurring(name: str, **how: Unpack[How]) -> Result:
    """Publish the message or the job of a recurring schedule now. Its next tick stays as it is.

    Args:
        name: the name of the schedule.
        using: alias of the queue's database (default: the one that has the schedule).

    Raises:
        OperationRefused: there is no such schedule, or this release does not know its definition.
        InvalidMessage: the message cannot be published.
    """
    ids: list[str] = []

    def change(session: Session, row: Row) -> bool:
        ids.append(schedules.publish_by_hand(session, row.name, _definition(row)))
        return True

    with _found(name, how) as (alias, row, by, dry_run):
        definition = _definition(row)
        number = _do("run recurring", alias, row, definition, change, **by, dry_run=dry_run)
        if dry_run:
            said = _("A job will be enqueued now.") if definition.task else _("A message will be published now.")
        elif not number:
            said = _("The schedule was deleted.")
        else:
            said = _("A job is enqueued: %(id)s.") if definition.task else _("A message is published: %(id)s.")
            said %= {"id": ids[-1]}
        return result_of(Result, "run recurring", number, said, dry_run=dry_run, warnings=_unseen(row))


@operates
def pause_recurring(name: str, **how: Unpack[How]) -> Result:
    """Pause a recurring schedule: its ticks are dropped until it is resumed.

    Args:
        name: the name of the schedule.
        using: alias of the queue's database (default: the one that has the schedule).

    Raises:
        OperationRefused: there is no such schedule.
    """

    def change(session: Session, row: Row) -> bool:
        if not row.paused_at:
            session.execute(f"UPDATE {SCHEDULES} SET paused_at = %s WHERE name = %s", (row.now, name))
        return not row.paused_at

    with _found(name, how) as (alias, row, by, dry_run):
        number = _do("pause recurring", alias, row, None, change, **by, dry_run=dry_run)
        if not number:
            said = _("The schedule %(name)s is already paused.")
        elif dry_run:
            said = _("The schedule %(name)s will be paused. Jobs and messages that it has published are not affected.")
        else:
            said = _("The schedule %(name)s is paused.")
        return result_of(Result, "pause recurring", number, said % {"name": name}, dry_run=dry_run)


@operates
def resume_recurring(name: str, **how: Unpack[How]) -> Result:
    """Resume a recurring schedule. It begins with its next tick: those of the pause do not run.

    Args:
        name: the name of the schedule.
        using: alias of the queue's database (default: the one that has the schedule).

    Raises:
        OperationRefused: there is no such schedule, or this release does not know its definition.
    """

    def change(session: Session, row: Row) -> bool:
        if row.paused_at:
            session.execute(
                f"UPDATE {SCHEDULES} SET paused_at = 0, last_tick = %s WHERE name = %s", (_passed(row), name)
            )
        return bool(row.paused_at)

    with _found(name, how) as (alias, row, by, dry_run):
        try:
            next_tick = _definition(row).timetable.following(_passed(row))
        except ValueError as error:
            raise OperationRefused(f"Schedule {name!r}: {error}") from None
        number = _do("resume recurring", alias, row, None, change, **by, dry_run=dry_run)
        if not number:
            said = _("The schedule %(name)s is not paused.")
        elif dry_run:
            said = _("The schedule %(name)s will be resumed. Its next run will be at %(time)s.")
        else:
            said = _("The schedule %(name)s is resumed. Its next run is at %(time)s.")
        values = {"name": name, "time": moment(next_tick)}
        return result_of(Result, "resume recurring", number, said % values, dry_run=dry_run)


@operates
def delete_recurring(name: str, **how: Unpack[How]) -> Result:
    """Delete a recurring schedule that no running process declares. Jobs and messages that it has published stay.

    Args:
        name: the name of the schedule.
        using: alias of the queue's database (default: the one that has the schedule).

    Raises:
        OperationRefused: there is no such schedule, or a running process declares it.
    """

    def change(session: Session, row: Row) -> bool:
        _refuse_declared(row)
        session.execute(f"DELETE FROM {SCHEDULES} WHERE name = %s", (name,))
        return True

    with _found(name, how) as (alias, row, by, dry_run):
        _refuse_declared(row)
        number = _do("delete recurring", alias, row, None, change, **by, dry_run=dry_run)
        if dry_run:
            said = _("The schedule %(name)s will be deleted.")
        elif number:
            said = _("The schedule %(name)s is deleted.")
        else:
            said = _("The schedule %(name)s was already deleted.")
        return result_of(Result, "delete recurring", number, said % {"name": name}, dry_run=dry_run)


def topic_of(using: str, name: str) -> str:
    """Return the topic to which a schedule publishes; empty if it does not exist, or this release cannot read it."""
    row = schedules.read(Session(using), [name]).get(name)
    return "" if row is None else _topic_of(row)


def _topic_of(row: Row) -> str:
    try:
        return parse(row.definition).topic
    except ValueError:
        return ""


@contextmanager
def _found(name: str, how: How) -> Iterator[tuple[str, Row, By, bool]]:
    """Yield the alias of the database that has a schedule, its row, and the rest as ``operating`` does.

    Raises:
        OperationRefused: an argument is invalid, or there is no such schedule.
    """
    text("name", name, most=KEY_LENGTH)
    using = how.get("using")
    aliases = queue_aliases() if using is None else [using]
    known: dict[str, str | None] = {}
    for alias in aliases:
        with operating({**how, "using": alias}) as (there, by, dry_run):
            session = Session(there)
            row = schedules.read(session, [name]).get(name)
            if row is not None:
                yield there, row, by, dry_run
                return
            known |= {one.name: _topic_of(one) or None for one in schedules.read_all(session, MOST_NAMES)}
    if using is None and name in registry.find().definitions:
        raise OperationRefused(
            f"The schedule {name!r} is not registered yet: the first subscriber that starts does that."
        )
    names = known_names("Schedules", name, dict(sorted(known.items())))
    raise OperationRefused(f"There is no schedule {name!r}.", known=names)


def _do(
    action: str,
    alias: str,
    row: Row,
    definition: Definition | None,
    change: Callable[[Session, Row], bool],
    *,
    actor: str,
    reason: str,
    dry_run: bool,
) -> int:
    """Change a row under its lock and record it, or find out what the change would be; return 1 or 0."""
    topic = "" if definition is None else definition.topic

    def write(session: Session) -> int:
        locked = schedules.lock(session, row.name)
        if locked is None or not change(session, locked):
            return 0
        audit.once(session, action, 1, actor=actor, reason=reason, topic=topic, detail=row.name)
        return 1

    if dry_run:
        is_paused = bool(row.paused_at)
        return int({"pause recurring": not is_paused, "resume recurring": is_paused}.get(action, True))
    return run(alias, write)


def _definition(row: Row) -> Definition:
    try:
        return parse(row.definition)
    except ValueError as error:
        raise OperationRefused(f"Schedule {row.name!r}: {error}") from None


def _passed(row: Row) -> int:
    """Return the last tick up to now: what comes after it is due after the pause."""
    ticks = _definition(row).timetable.latest(row.last_tick, row.now, 1)
    return ticks[0] if ticks else row.last_tick


def _refuse_declared(row: Row) -> None:
    if row.is_declared:
        raise OperationRefused(
            f"A process that ran in the last {duration(schedules.DECLARED_MS / 1000)} declares the schedule "
            f"{row.name!r}: remove it from the code first, or pause it."
        )


def _unseen(row: Row) -> tuple[str, ...]:
    if row.is_declared:
        return ()
    return (_("No running process declares this schedule: its task may not exist any more."),)

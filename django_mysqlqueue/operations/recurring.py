"""Operations on recurring schedules: run now, pause, resume, delete. Each is one transaction under the row's lock."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple, Unpack

from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from django_mysqlqueue.db.tables import SCHEDULES
from django_mysqlqueue.exceptions import OperationRefused
from django_mysqlqueue.names.rules import KEY_LENGTH
from django_mysqlqueue.operations.arguments import text
from django_mysqlqueue.operations.declaring import How, operates, operating
from django_mysqlqueue.operations.lookups import known_names
from django_mysqlqueue.operations.results import Result, result_of, sentence
from django_mysqlqueue.schedules import registry
from django_mysqlqueue.schedules.definitions import Definition, parse
from django_mysqlqueue.service import audit, schedules
from django_mysqlqueue.service.audit import By
from django_mysqlqueue.service.databases import queue_aliases
from django_mysqlqueue.service.refs import GroupRef
from django_mysqlqueue.service.schedules import Row
from django_mysqlqueue.sql.session import Session, run
from django_mysqlqueue.text.humanize import duration, moment

MOST_NAMES = 1000
"""Maximum number of schedules whose names an error is chosen from."""


RUN = audit.Action("run recurring", gettext_lazy("Run recurring schedule"))
PAUSE = audit.Action("pause recurring", gettext_lazy("Pause recurring schedule"))
RESUME = audit.Action("resume recurring", gettext_lazy("Resume recurring schedule"))
DELETE = audit.Action("delete recurring", gettext_lazy("Delete recurring schedule"))


class _Found(NamedTuple):
    """A schedule, the alias of the database that has it, and the rest as in ``Work``."""

    using: str
    row: Row
    by: By
    dry_run: bool

    def change(
        self,
        action: audit.Action,
        write: Callable[[Session, Row], bool],
        *,
        planned: bool = True,
        on: GroupRef = audit.NOTHING,
    ) -> int:
        """Change the row under its lock and record it; return 1, or 0 if there was nothing to do.

        ``planned``: whether a preview says that there is something to do.
        """

        def locked(session: Session) -> int:
            row = schedules.lock(session, self.row.name)
            if row is None or not write(session, row):
                return 0
            audit.once(session, action, 1, on, detail=row.name, **self.by)
            return 1

        return int(planned) if self.dry_run else run(self.using, locked)


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

    def publish(session: Session, row: Row) -> bool:
        ids.append(schedules.publish_by_hand(session, row.name, _definition(row)))
        return True

    with _found(name, how) as found:
        definition = _definition(found.row)
        number = found.change(RUN, publish, on=GroupRef("", definition.topic))
        is_job = bool(definition.task)
        said = sentence(
            number,
            dry_run=found.dry_run,
            planned=_("A job will be enqueued now.") if is_job else _("A message will be published now."),
            done=_("A job is enqueued: %(id)s.") if is_job else _("A message is published: %(id)s."),
            nothing=_("The schedule was deleted."),
        )
        if ids:
            said %= {"id": ids[-1]}
        return result_of(Result, RUN, number, said, dry_run=found.dry_run, warnings=_unseen(found.row))


@operates
def pause_recurring(name: str, **how: Unpack[How]) -> Result:
    """Pause a recurring schedule: its ticks are dropped until it is resumed.

    Args:
        name: the name of the schedule.
        using: alias of the queue's database (default: the one that has the schedule).

    Raises:
        OperationRefused: there is no such schedule.
    """

    def pause(session: Session, row: Row) -> bool:
        if not row.paused_at:
            session.execute(f"UPDATE {SCHEDULES} SET paused_at = %s WHERE name = %s", (row.now, name))
        return not row.paused_at

    with _found(name, how) as found:
        number = found.change(PAUSE, pause, planned=not found.row.paused_at)
        said = sentence(
            number,
            dry_run=found.dry_run,
            planned=_(
                "The schedule %(name)s will be paused. Jobs and messages that it has published are not affected."
            ),
            done=_("The schedule %(name)s is paused."),
            nothing=_("The schedule %(name)s is already paused."),
        )
        return result_of(Result, PAUSE, number, said % {"name": name}, dry_run=found.dry_run)


@operates
def resume_recurring(name: str, **how: Unpack[How]) -> Result:
    """Resume a recurring schedule. It begins with its next tick: those of the pause do not run.

    Args:
        name: the name of the schedule.
        using: alias of the queue's database (default: the one that has the schedule).

    Raises:
        OperationRefused: there is no such schedule, or this release does not know its definition.
    """

    def resume(session: Session, row: Row) -> bool:
        if row.paused_at:
            session.execute(
                f"UPDATE {SCHEDULES} SET paused_at = 0, last_tick = %s WHERE name = %s", (_passed(row), name)
            )
        return bool(row.paused_at)

    with _found(name, how) as found:
        try:
            next_tick = _definition(found.row).timetable.following(_passed(found.row))
        except ValueError as error:
            raise OperationRefused(f"Schedule {name!r}: {error}") from None
        number = found.change(RESUME, resume, planned=bool(found.row.paused_at))
        said = sentence(
            number,
            dry_run=found.dry_run,
            planned=_("The schedule %(name)s will be resumed. Its next run will be at %(time)s."),
            done=_("The schedule %(name)s is resumed. Its next run is at %(time)s."),
            nothing=_("The schedule %(name)s is not paused."),
        )
        values = {"name": name, "time": moment(next_tick)}
        return result_of(Result, RESUME, number, said % values, dry_run=found.dry_run)


@operates
def delete_recurring(name: str, **how: Unpack[How]) -> Result:
    """Delete a recurring schedule that no running process declares. Jobs and messages that it has published stay.

    Args:
        name: the name of the schedule.
        using: alias of the queue's database (default: the one that has the schedule).

    Raises:
        OperationRefused: there is no such schedule, or a running process declares it.
    """

    def delete(session: Session, row: Row) -> bool:
        _refuse_declared(row)
        session.execute(f"DELETE FROM {SCHEDULES} WHERE name = %s", (name,))
        return True

    with _found(name, how) as found:
        _refuse_declared(found.row)
        number = found.change(DELETE, delete)
        said = sentence(
            number,
            dry_run=found.dry_run,
            planned=_("The schedule %(name)s will be deleted."),
            done=_("The schedule %(name)s is deleted."),
            nothing=_("The schedule %(name)s was already deleted."),
        )
        return result_of(Result, DELETE, number, said % {"name": name}, dry_run=found.dry_run)


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
def _found(name: str, how: How) -> Iterator[_Found]:
    """Yield a schedule with what ``operating`` yields."""
    text("name", name, most=KEY_LENGTH)
    using = how.get("using")
    aliases = queue_aliases() if using is None else [using]
    known: dict[str, str | None] = {}
    for alias in aliases:
        with operating({**how, "using": alias}) as (there, by, dry_run):
            session = Session(there)
            row = schedules.read(session, [name]).get(name)
            if row is not None:
                yield _Found(there, row, by, dry_run)
                return
            known |= {one.name: _topic_of(one) or None for one in schedules.read_all(session, MOST_NAMES)}
    if using is None and name in registry.find().definitions:
        raise OperationRefused(
            f"The schedule {name!r} is not registered yet: the first subscriber that starts does that."
        )
    names = known_names("Schedules", name, dict(sorted(known.items())))
    raise OperationRefused(f"There is no schedule {name!r}.", known=names)


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

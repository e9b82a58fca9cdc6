"""Operations on recurring schedules: create, update, run now, pause, resume, delete.

Each is one transaction, under the row's lock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, NamedTuple, Unpack

from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from django_mysqlqueue.arguments import spelled_out
from django_mysqlqueue.db.tables import SCHEDULES
from django_mysqlqueue.exceptions import InvalidMessage, OperationRefused, SubscriberError
from django_mysqlqueue.names.rules import KEY_LENGTH
from django_mysqlqueue.operations.arguments import text
from django_mysqlqueue.operations.declaring import How, operating
from django_mysqlqueue.operations.lookups import known_names
from django_mysqlqueue.operations.results import Result, result_of, sentence
from django_mysqlqueue.schedules import editing, registry
from django_mysqlqueue.schedules.definitions import Definition, parse
from django_mysqlqueue.schedules.options import ScheduleOptions
from django_mysqlqueue.service import audit, schedules
from django_mysqlqueue.service.audit import By
from django_mysqlqueue.service.databases import queue_alias, queue_aliases
from django_mysqlqueue.service.refs import GroupRef
from django_mysqlqueue.service.schedules import Row
from django_mysqlqueue.sql.session import Session, run
from django_mysqlqueue.subscriptions.registry import discover
from django_mysqlqueue.text.humanize import duration, moment, run_time

MOST_NAMES = 1000
"""Maximum number of schedules whose names an error is chosen from."""
SHOWN_TICKS = 5
"""Number of next runs that a preview shows."""


CREATE = audit.Action("create recurring", gettext_lazy("Create recurring schedule"))
UPDATE = audit.Action("update recurring", gettext_lazy("Change recurring schedule"))
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
        if self.dry_run:
            return int(planned)
        return run(self.using, partial(change, self.row.name, action, write, on=on, by=self.by))


def change(
    name: str,
    action: audit.Action,
    write: Callable[[Session, Row], bool],
    session: Session,
    *,
    by: By,
    on: GroupRef = audit.NOTHING,
) -> int:
    """Change a row under its lock in the caller's transaction, and record it; return 1, or 0 if nothing was done."""
    row = schedules.lock(session, name)
    if row is None or not write(session, row):
        return 0
    audit.once(session, action, 1, on, detail=name, **by)
    return 1


class ScheduleHow(ScheduleOptions, How):
    """The options of a schedule, and the keyword arguments that all operations take."""


@spelled_out
def create_recurring(name: str, task: Any, *, enabled: bool = True, **how: Unpack[ScheduleHow]) -> Result:
    """Create a recurring schedule that can be edited. Subscribers notice it within a tick, without a restart.

    If it has an interval without a start, a hash of its name chooses it, so that schedules with the same interval do
    not all run in the same second.

    Args:
        name: the name of the schedule, which neither the code nor another schedule has.
        task: a task, or the path of one that this process has imported. Jobs go to the queue, with the priority, that
            the task has now.
        enabled: False to create it paused.
        using: alias of the queue's database (default: that of the task's queue).

    Raises:
        OperationRefused: a value breaks a rule, or there is a schedule with this name. The error names the value and
            the rule.
    """
    definition, alias = new(name, task, how, enabled=enabled)
    if how.get("using") is None:
        how["using"] = alias
    with operating(how) as (there, who, dry_run):
        session = Session(there)
        now = session.now()
        require_future(name, definition, now)
        if dry_run:
            _refuse_existing(session, name)
        else:
            run(there, partial(write_new, name, definition, enabled=enabled, by=who))
        said = _("The schedule %(name)s will be created.") if dry_run else _("The schedule %(name)s is created.")
        more = (_what(definition), *_state(definition, now, now, enabled=enabled))
        return result_of(Result, CREATE, 1, said % {"name": name}, *more, dry_run=dry_run)


@spelled_out
def update_recurring(
    name: str,
    *,
    task: Any = None,
    enabled: bool | None = None,
    version: int | None = None,
    **how: Unpack[ScheduleHow],
) -> Result:
    """Change a recurring schedule that was made with ``create_recurring``. What is None stays as it is.

    With ``cron``, ``every`` or ``at``, its times are replaced as a whole: a start or time zone that is not given has
    its default. If its times change, it begins with its next tick.

    Args:
        name: the name of the schedule.
        task: as for ``create_recurring``. Only with it, the queue and the priority of the jobs change.
        enabled: True to resume it, False to pause it.
        version: the ``registered_at`` of the ``ScheduleStatus`` that was edited: the change is refused if it has
            changed since.
        using: alias of the queue's database (default: the one that has the schedule).

    Raises:
        OperationRefused: there is no such schedule, or the code declares it; a value breaks a rule; or the schedule has
            another version.
    """
    changes = Changes(task, how, enabled, version)
    if task is not None:
        import_tasks()
    with _found(name, how) as found:
        before = found.row
        definition, is_enabled = changes.applied(before)
        if definition == _definition(before) and is_enabled == (not before.paused_at):
            said = _("The schedule %(name)s is already like this.") % {"name": name}
            return result_of(Result, UPDATE, 0, said, dry_run=found.dry_run)
        number = 1 if found.dry_run else run(found.using, partial(write_changed, name, changes, by=found.by))
        said = sentence(
            number,
            dry_run=found.dry_run,
            planned=_("The schedule %(name)s will be changed."),
            done=_("The schedule %(name)s is changed."),
            nothing=_("The schedule was deleted."),
        )
        last_tick = before.last_tick if definition.timetable == _definition(before).timetable else before.now
        more = (_what(definition), *_state(definition, last_tick, before.now, enabled=is_enabled))
        return result_of(Result, UPDATE, number, said % {"name": name}, *more, dry_run=found.dry_run)


class Changes(NamedTuple):
    """What is changed of a schedule, and what its editor has seen of it."""

    task: Any
    options: Mapping[str, Any]
    enabled: bool | None
    version: int | None = None

    def applied(self, row: Row) -> tuple[Definition, bool]:
        """Return the definition that a row gets, and whether it is enabled.

        Raises:
            OperationRefused: it may not be changed, or a value breaks a rule.
        """
        _flag("enabled", self.enabled, optional=True)
        if not row.editable:
            raise OperationRefused(f"The schedule {row.name!r} is declared in the code: change it there.")
        if self.version is not None and self.version != row.registered_at:
            raise OperationRefused(
                f"The schedule {row.name!r} was changed at {moment(row.registered_at)}, after you opened it: open it "
                "again, and repeat your change."
            )
        before = _definition(row)
        try:
            definition = editing.changed(row.name, before, self.task, self.options)
            home = schedules.home_of(definition)
        except (SubscriberError, InvalidMessage) as error:
            raise OperationRefused(str(error)) from None
        if home != queue_alias(topic=before.topic):
            raise OperationRefused(
                f"The jobs of task {definition.task!r} are in the database {home!r}: create a schedule there."
            )
        if definition.timetable != before.timetable:
            require_future(row.name, definition, row.now)
        return definition, not row.paused_at if self.enabled is None else self.enabled


def new(name: str, task: Any, options: Mapping[str, Any], *, enabled: bool) -> tuple[Definition, str]:
    """Return the definition of a schedule that is to be created, and the alias of its database.

    Raises:
        OperationRefused: a value breaks a rule, or the code declares a schedule with this name.
    """
    _flag("enabled", enabled)
    import_tasks()
    try:
        definition = editing.definition_of(name, task, options)
        alias = schedules.home_of(definition)
    except (SubscriberError, InvalidMessage) as error:
        raise OperationRefused(str(error)) from None
    if name in registry.find().definitions:
        raise OperationRefused(f"The code declares a schedule with the name {name!r}: choose another name.")
    return definition, alias


def import_tasks() -> None:
    """Import what subscribers import: a schedule may run a task of it."""
    with suppress(SubscriberError):  # check E008 reports it
        discover()


def require_future(name: str, definition: Definition, now: int) -> None:
    """Refuse a schedule that will never run, because its only time has passed."""
    if not definition.timetable.upcoming(now, now, 1):
        raise OperationRefused(f"Schedule {name!r}: {definition.timetable}: this time has passed")


def write_new(name: str, definition: Definition, session: Session, *, enabled: bool, by: By) -> None:
    """Create a schedule in the caller's transaction, and record it."""
    schedules.create(session, name, definition, enabled=enabled)
    on = GroupRef("", definition.topic)
    detail = f"{name}: {_summary(definition, enabled=enabled)}"
    audit.once(session, CREATE, 1, on, detail=detail, **by)


def write_changed(name: str, changes: Changes, session: Session, *, by: By) -> int:
    """Change a schedule in the caller's transaction, and record it unless nothing changes; return 0 if it is gone."""
    row = schedules.lock(session, name)
    if row is None:
        return 0
    former = _definition(row)
    definition, enabled = changes.applied(row)
    if definition == former and enabled == (not row.paused_at):
        return 1
    schedules.change(session, row, definition, enabled=enabled)
    before, after = _summary(former, enabled=not row.paused_at), _summary(definition, enabled=enabled)
    detail = f"{name}: {before} -> {after}" if before != after else f"{name}: {after}"
    if definition.payload != former.payload:
        detail += ", other arguments"
    audit.once(session, UPDATE, 1, GroupRef("", definition.topic), detail=detail, **by)
    return 1


def _summary(definition: Definition, *, enabled: bool) -> str:
    """Return a definition for the audit log, without its arguments, which not all of its readers may see."""
    zone = definition.timetable.timezone
    times = f"{definition.timetable} {zone}" if zone else str(definition.timetable)
    return f"{definition.task}, {times}{'' if enabled else ', paused'}"


def _what(definition: Definition) -> str:
    times, zone = str(definition.timetable), definition.timetable.timezone
    values = {"task": definition.task, "times": f"{times} ({zone})" if zone else times, "topic": definition.topic}
    return _("It runs %(task)s, %(times)s. Its jobs go to the topic %(topic)s.") % values


def _state(definition: Definition, last_tick: int, now: int, *, enabled: bool) -> Iterator[str]:
    if not enabled:
        yield _("It is paused: it does not run until it is resumed.")
    runs = definition.timetable.upcoming(last_tick, now, SHOWN_TICKS)
    if runs:
        yield _("Next runs: %(runs)s.") % {"runs": "; ".join(run_time(tick, now) for tick in runs)}


def _refuse_existing(session: Session, name: str) -> None:
    if schedules.read(session, [name]):
        raise OperationRefused(f"There is a schedule with the name {name!r}.")


def _flag(name: str, value: Any, *, optional: bool = False) -> None:
    if not (isinstance(value, bool) or (optional and value is None)):
        raise OperationRefused(f"{name} {value!r}: must be True or False")


@spelled_out
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
        if found.row.editable and (error := registry.why_not(definition)):
            raise OperationRefused(f"Schedule {name!r}: {error}")
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


@spelled_out
def pause_recurring(name: str, **how: Unpack[How]) -> Result:
    """Pause a recurring schedule: its ticks are dropped until it is resumed.

    Args:
        name: the name of the schedule.
        using: alias of the queue's database (default: the one that has the schedule).

    Raises:
        OperationRefused: there is no such schedule.
    """
    with _found(name, how) as found:
        number = found.change(PAUSE, paused, planned=not found.row.paused_at)
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


@spelled_out
def resume_recurring(name: str, **how: Unpack[How]) -> Result:
    """Resume a recurring schedule. It begins with its next tick: those of the pause do not run.

    Args:
        name: the name of the schedule.
        using: alias of the queue's database (default: the one that has the schedule).

    Raises:
        OperationRefused: there is no such schedule, or this release does not know its definition.
    """
    with _found(name, how) as found:
        try:
            next_tick = _definition(found.row).timetable.following(_passed(found.row))
        except ValueError as error:
            raise OperationRefused(f"Schedule {name!r}: {error}") from None
        number = found.change(RESUME, resumed, planned=bool(found.row.paused_at))
        said = sentence(
            number,
            dry_run=found.dry_run,
            planned=_("The schedule %(name)s will be resumed. Its next run will be at %(time)s."),
            done=_("The schedule %(name)s is resumed. Its next run is at %(time)s."),
            nothing=_("The schedule %(name)s is not paused."),
        )
        if number and next_tick is None:
            said = _("The schedule %(name)s will not run again: its only time has passed.")
        values = {"name": name, "time": moment(next_tick)}
        return result_of(Result, RESUME, number, said % values, dry_run=found.dry_run)


@spelled_out
def delete_recurring(name: str, **how: Unpack[How]) -> Result:
    """Delete a recurring schedule that can be edited, or that no running process declares.

    Jobs and messages that it has published stay.

    Args:
        name: the name of the schedule.
        using: alias of the queue's database (default: the one that has the schedule).

    Raises:
        OperationRefused: there is no such schedule, or a running process declares it.
    """
    with _found(name, how) as found:
        _refuse_declared(found.row)
        number = found.change(DELETE, deleted)
        said = sentence(
            number,
            dry_run=found.dry_run,
            planned=_("The schedule %(name)s will be deleted."),
            done=_("The schedule %(name)s is deleted."),
            nothing=_("The schedule %(name)s was already deleted."),
        )
        return result_of(Result, DELETE, number, said % {"name": name}, dry_run=found.dry_run)


def paused(session: Session, row: Row) -> bool:
    """Pause a schedule whose row is locked; return whether it was not paused."""
    if not row.paused_at:
        session.execute(f"UPDATE {SCHEDULES} SET paused_at = %s WHERE name = %s", (row.now, row.name))
    return not row.paused_at


def resumed(session: Session, row: Row) -> bool:
    """Resume a schedule whose row is locked; return whether it was paused."""
    if row.paused_at:
        session.execute(
            f"UPDATE {SCHEDULES} SET paused_at = 0, last_tick = %s WHERE name = %s", (_passed(row), row.name)
        )
    return bool(row.paused_at)


def deleted(session: Session, row: Row) -> bool:
    """Delete a schedule whose row is locked, unless a running process declares it."""
    _refuse_declared(row)
    session.execute(f"DELETE FROM {SCHEDULES} WHERE name = %s", (row.name,))
    return True


def topic_of(using: str, name: str) -> str:
    """Return the topic to which a schedule publishes; empty if it does not exist, or this release cannot read it."""
    row = schedules.read(Session(using), [name]).get(name)
    return "" if row is None else _topic_of(row)


class Stored(NamedTuple):
    """A schedule that can be edited."""

    definition: Definition
    enabled: bool
    version: int
    """Its ``registered_at``, by which ``update_recurring`` notices that it has changed."""


def stored(using: str, name: str) -> Stored | None:
    """Return a schedule that can be edited; None if there is none, or this release cannot read it."""
    row = schedules.read(Session(using), [name]).get(name)
    if row is None or not row.editable:
        return None
    try:
        return Stored(parse(row.definition), not row.paused_at, row.registered_at)
    except ValueError:
        return None


def _topic_of(row: Row) -> str:
    try:
        return parse(row.definition).topic
    except ValueError:
        return ""


def home(name: str) -> str:
    """Return the alias of the database that has a schedule.

    Raises:
        OperationRefused: none has it.
    """
    text("name", name, most=KEY_LENGTH)
    for alias in queue_aliases():
        if name in schedules.read(Session(alias), [name]):
            return alias
    raise unknown(name, queue_aliases())


def unknown(name: str, aliases: Iterable[str]) -> OperationRefused:
    """Return the error for a schedule that none of the databases has."""
    rows = [row for alias in aliases for row in schedules.read_all(Session(alias), MOST_NAMES)]
    known = {row.name: _topic_of(row) or None for row in sorted(rows)}
    return OperationRefused(f"There is no schedule {name!r}.", known=known_names("Schedules", name, known))


@contextmanager
def _found(name: str, how: How) -> Iterator[_Found]:
    """Yield a schedule with what ``operating`` yields."""
    text("name", name, most=KEY_LENGTH)
    using = how.get("using")
    aliases = queue_aliases() if using is None else [using]
    for alias in aliases:
        with operating({**how, "using": alias}) as (there, who, dry_run):
            row = schedules.read(Session(there), [name]).get(name)
            if row is not None:
                yield _Found(there, row, who, dry_run)
                return
    if using is None and name in registry.find().definitions:
        raise OperationRefused(
            f"The schedule {name!r} is not registered yet: the first subscriber that starts does that."
        )
    raise unknown(name, aliases)


def _definition(row: Row) -> Definition:
    try:
        return parse(row.definition)
    except ValueError as error:
        raise OperationRefused(f"Schedule {row.name!r}: {error}") from None


def _passed(row: Row) -> int:
    """Return the last tick up to now: what comes after it is due after the pause."""
    return schedules.passed(row, _definition(row))


def _refuse_declared(row: Row) -> None:
    if row.is_declared and not row.editable:
        raise OperationRefused(
            f"A process that ran in the last {duration(schedules.DECLARED_MS / 1000)} declares the schedule "
            f"{row.name!r}: remove it from the code first, or pause it."
        )


def _unseen(row: Row) -> tuple[str, ...]:
    if row.is_declared or row.editable:
        return ()
    return (_("No running process declares this schedule: its task may not exist any more."),)

"""Recurring schedules: rows that only move forward, in the transactions that publish.

No process is the leader. Each that runs a schedule locks its row when a tick is due, with SKIP LOCKED, decides by the
row and the database's clock what is due, publishes it, and moves ``last_tick``. So a tick and its message commit
together, and no other process finds the tick due again. The processes that declare a schedule run it; if people have
made it, all do.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from django.db import IntegrityError

from django_mysqlqueue.db.tables import SCHEDULES
from django_mysqlqueue.exceptions import OperationRefused
from django_mysqlqueue.names.ids import new_message_id, run_id, run_ids
from django_mysqlqueue.names.rules import JOB_PREFIX
from django_mysqlqueue.options import job_queues
from django_mysqlqueue.options.conf import get_settings
from django_mysqlqueue.schedules import registry
from django_mysqlqueue.schedules.definitions import ALL, SKIP, Definition, parse
from django_mysqlqueue.service import job_messages, job_rows, publishing
from django_mysqlqueue.service.databases import queue_alias
from django_mysqlqueue.service.job_rows import NewResult
from django_mysqlqueue.service.messages import Message, encode
from django_mysqlqueue.sql.session import Session, run

MOST = 100
"""Maximum number of missed ticks that run after an outage."""
SEEN_MS = 20_000
"""Milliseconds after which a process notes again which schedules it declares."""
DECLARED_MS = 60_000
"""Milliseconds without such a note after which no running process declares a schedule. A tick that is due for longer is
a problem: so a process that was killed leaves none."""
ENDED_MS = 15_000
"""Milliseconds after a clean stop in which other processes that declare a schedule note it again."""
PAGE = 1000
"""Number of schedules that people have made that one query reads."""
NEW, CHANGED, REPLACED = "new", "changed", "replaced"
"""What has become of a row when its schedule was registered. ``REPLACED``: people had made one with its name."""


class Row(NamedTuple):
    """A row of the table. Times are in epoch milliseconds."""

    name: str
    definition: str
    last_tick: int
    last_run: int
    skipped: int
    paused_at: int
    registered_at: int
    seen_at: int
    editable: bool
    """Whether people have made it. All processes run it."""
    now: int
    """The database's time when it was read."""

    @property
    def is_declared(self) -> bool:
        """Whether a running process declares it; of one that people have made, whether a running process runs it."""
        return self.now - self.seen_at < DECLARED_MS

    @property
    def next_tick(self) -> int | None:
        """When it is due next; None if it is paused, or never.

        Raises:
            ValueError: this release does not know its definition.
        """
        return None if self.paused_at else parse(self.definition).timetable.following(self.last_tick)


COLUMNS = Row._fields[:-1]


class Tick(NamedTuple):
    """The result of ``tick``."""

    row: Row | None
    """The row as it is now; None if another transaction has locked it, or there is none."""
    definition: Definition | None = None
    ticks: tuple[int, ...] = ()
    """The ticks that were decided, in epoch milliseconds."""
    published: tuple[str, ...] = ()
    """The ids of their messages."""
    skipped: bool = False
    """Whether they were skipped, because an earlier job has not ended."""
    missed_since: int | None = None
    """The first of earlier ticks that were dropped; None if none was."""


def home_of(definition: Definition) -> str:
    """Return the alias of the database that has the row of a schedule: where its messages are stored.

    If its messages could not be published, raise InvalidMessage.
    """
    encode(definition.topic, _message(definition, "id"))
    if definition.task:
        return queue_alias(topic=definition.topic)
    alias, _ = publishing.stored_at(definition.topic, None, None)
    return alias


def read(session: Session, names: Iterable[str]) -> dict[str, Row]:
    """Return rows by name, without locks."""
    join = f"{session.dialect.join_to(SCHEDULES, 's')} ON s.name = v.n"
    return {row.name: Row(*row) for row in session.joined(f"SELECT {_columns(session)}", "n", names, join)}


def read_all(session: Session, most: int, after: str = "") -> list[Row]:
    """Return rows in the order of their names, without locks."""
    rows = session.rows(
        f"SELECT {_columns(session)} FROM {SCHEDULES} s{session.dialect.force_index('PRIMARY')} "
        "WHERE s.name > %s ORDER BY s.name LIMIT %s",
        (after, most),
    )
    return [Row(*row) for row in rows]


def read_editable(session: Session) -> dict[str, Row]:
    """Return the rows that people have made by name, without locks."""
    select = (
        f"SELECT {_columns(session)} FROM {SCHEDULES} s{session.dialect.force_index('queue_schedules_editable')} "
        "WHERE s.editable = %s AND s.name > %s ORDER BY s.name LIMIT %s"
    )
    found: dict[str, Row] = {}
    rows, last = session.rows(select, (True, "", PAGE)), ""
    while rows:
        found |= {row.name: row for row in (Row(*values) for values in rows)}
        last = max(found)
        rows = session.rows(select, (True, last, PAGE)) if len(rows) == PAGE else []
    return found


def exists_editable(session: Session) -> str:
    """Return the SQL of the condition that there are schedules that people have made."""
    return (
        f"EXISTS(SELECT 1 FROM {SCHEDULES} e{session.dialect.force_index('queue_schedules_editable')} "
        "WHERE e.editable = 1)"
    )


def lock(session: Session, name: str, how: str | None = None) -> Row | None:
    """Lock a row and return it, or None if there is none.

    ``how``: the end of the statement, if it does not wait (default: to wait for other transactions).
    """
    end = session.dialect.for_update if how is None else how
    found = session.row(f"SELECT {_columns(session)} FROM {SCHEDULES} s WHERE s.name = %s{end}", (name,))
    if found is None:
        return None
    # The time of a statement is that of its beginning. It may have waited since.
    return Row(*found) if how is not None else Row(*found)._replace(now=session.now())


def _columns(session: Session) -> str:
    return f"{', '.join(f's.{column}' for column in COLUMNS)}, {session.dialect.now_ms}"


def register(using: str, wanted: Mapping[str, Definition]) -> dict[str, str]:
    """Register schedules, each in a transaction of its own; return ``NEW``, ``CHANGED`` or ``REPLACED`` by name.

    A new schedule begins with its next tick, and so does one whose times have changed. Those that stay are left out.
    """
    known = read(Session(using), wanted)
    done: dict[str, str] = {}
    for name, definition in sorted(wanted.items()):
        row = known.get(name)
        if row is None or row.editable or row.definition != definition.as_json():
            run(using, partial(_register, name=name, definition=definition))
            done[name] = NEW if row is None else REPLACED if row.editable else CHANGED
    note_seen(using, wanted)
    return done


def _register(session: Session, *, name: str, definition: Definition) -> None:
    text, now = definition.as_json(), session.dialect.now_ms
    session.execute(
        f"INSERT INTO {SCHEDULES} (name, definition, last_tick, registered_at, seen_at) "
        f"VALUES (%s, %s, {now}, {now}, {now}){session.dialect.on_conflict_keep(SCHEDULES, ('name',))}",
        (name, text),
    )
    # The INSERT has locked it, so this does not wait.
    row = lock(session, name, session.dialect.for_update)
    assert row is not None  # noqa: S101
    if row.definition == text and not row.editable:
        return
    session.execute(
        f"UPDATE {SCHEDULES} SET definition = %s, last_tick = %s, registered_at = %s, seen_at = %s, editable = %s "
        "WHERE name = %s",
        (text, _decided(row, definition), _later(row), row.now, False, name),
    )


def _decided(row: Row, definition: Definition) -> int:
    """Return up to which time the ticks of a row are decided once it has another definition."""
    try:
        is_same = parse(row.definition).timetable == definition.timetable
    except ValueError:
        is_same = False
    return row.last_tick if is_same else max(row.last_tick, row.now)


def _later(row: Row) -> int:
    """Return when a row is changed: no two of its definitions have the same time, by which editors tell them apart."""
    return max(row.now, row.registered_at + 1)


def create(session: Session, name: str, definition: Definition, *, enabled: bool) -> None:
    """Insert a schedule that people make, in the caller's transaction. It begins with its next tick.

    Raises:
        OperationRefused: there is a schedule with this name.
    """
    now = session.dialect.now_ms
    paused_at = "0" if enabled else now
    try:
        session.execute(
            f"INSERT INTO {SCHEDULES} (name, definition, last_tick, registered_at, seen_at, paused_at, editable) "
            f"VALUES (%s, %s, {now}, {now}, 0, {paused_at}, %s)",
            (name, definition.as_json(), True),
        )
    except IntegrityError:
        raise OperationRefused(f"There is a schedule with the name {name!r}.") from None


def change(session: Session, row: Row, definition: Definition, *, enabled: bool) -> None:
    """Change a schedule that people have made, in the transaction that has locked its row.

    It begins with its next tick if its times have changed, or if it is enabled again.
    """
    last_tick = _decided(row, definition)
    if enabled and row.paused_at:
        last_tick = max(last_tick, passed(row, definition))
    paused_at = 0 if enabled else row.paused_at or row.now
    session.execute(
        f"UPDATE {SCHEDULES} SET definition = %s, last_tick = %s, paused_at = %s, registered_at = %s WHERE name = %s",
        (definition.as_json(), last_tick, paused_at, _later(row), row.name),
    )


def passed(row: Row, definition: Definition) -> int:
    """Return the last tick up to now: what comes after it is due after a pause."""
    ticks = definition.timetable.latest(row.last_tick, row.now, 1)
    return ticks[0] if ticks else row.last_tick


def note_seen(using: str, names: Collection[str]) -> None:
    """Note that a running process declares schedules, unless another one has just noted it."""
    _store_seen(using, names, "{now}", f"s.seen_at < {{now}} - {SEEN_MS // 2}")


def note_ended(using: str, names: Collection[str]) -> None:
    """Note that a process that declares schedules stops: unless another one notes it again, none declares them soon."""
    seen_at = f"{{now}} - {DECLARED_MS - ENDED_MS}"
    _store_seen(using, names, seen_at, f"s.seen_at > {seen_at}")


def _store_seen(using: str, names: Collection[str], seen_at: str, where: str) -> None:
    """Store when a process that declares schedules was last seen. ``{now}`` stands for the database's time.

    Rows that others have locked are left out: ``schedules.update()`` holds its row until the caller's commit, and the
    poller must not wait for that.
    """

    def write(session: Session) -> None:
        value, condition = (sql.format(now=session.dialect.now_ms) for sql in (seen_at, where))
        join = session.dialect.join_to(SCHEDULES, "s")
        end = f"ON s.name = v.n AND {condition}{session.dialect.skip_locked}"
        free = [name for (name,) in session.joined("SELECT s.name", "n", names, f"{join} {end}", plain=True)]
        session.update(SCHEDULES, "n", sorted(free), "s.name = v.n", {"seen_at": value})

    if names:
        run(using, write)


def tick(using: str, name: str) -> Tick:
    """Publish what is due of a schedule, in one transaction that moves its row forward.

    Raises:
        ValueError: this release does not know the definition, or this process cannot run the task of a schedule that
            people have made. Nothing was changed.
        QueueError: a message cannot be published. Nothing was changed.
    """
    return run(using, partial(_tick, name=name))


def _tick(session: Session, *, name: str) -> Tick:
    row = lock(session, name, session.dialect.skip_locked)
    if row is None:
        return Tick(None)
    definition = parse(row.definition)
    times = definition.timetable
    if row.paused_at or row.last_tick >= row.now:
        return Tick(row, definition)
    ticks = times.latest(row.last_tick, row.now, MOST if definition.catch_up == ALL else 1)
    if not ticks:
        return Tick(row, definition)
    if row.editable:
        # Nothing has checked since it was made that this process can run it. The tick is left to others.
        registry.require_task(definition)
    first = times.following(row.last_tick)
    published: Sequence[str] = ()
    skipped = definition.overlap == SKIP and has_unfinished(session, name)
    if not skipped:
        published = publish(session, definition, [run_id(name, at) for at in ticks], row.now)
    row = row._replace(
        last_tick=ticks[-1],
        last_run=ticks[-1] if published else row.last_run,
        skipped=row.skipped + skipped,
    )
    session.execute(
        f"UPDATE {SCHEDULES} SET last_tick = %s, last_run = %s, skipped = %s WHERE name = %s",
        (row.last_tick, row.last_run, row.skipped, name),
    )
    missed_since = first if first is not None and first < ticks[0] else None
    return Tick(row, definition, tuple(ticks), tuple(published), skipped, missed_since)


MOST_UNFINISHED = 100
"""Number of jobs of a schedule without an end among which one that can run is looked for."""


def has_unfinished(session: Session, name: str) -> bool:
    """Return whether a job of a schedule runs or can run, be it that of a tick or one that somebody has asked for."""
    jobs = job_messages.unfinished(session, run_ids(name), MOST_UNFINISHED)
    return len(jobs) > len(job_messages.cannot_run(session, jobs))


def publish(session: Session, definition: Definition, ids: Sequence[str], now: int) -> list[str]:
    """Publish messages of a schedule in the caller's transaction, as ``enqueue`` or ``publish`` do.

    ``now``: the database's time in epoch milliseconds.

    Returns:
        The ids of those that were published: jobs whose ids have results were enqueued before.
    """
    if not definition.task:
        # As ``home_of``: where the row is.
        is_via = get_settings().topics.of(definition.topic).via is not None
        publishing.publish_many(
            definition.topic,
            [_message(definition, one) for one in ids],
            using=None if is_via else session.using,
            via=session.using if is_via else None,
        )
        return list(ids)
    known = job_rows.read(session, ids)
    new = [one for one in ids if one not in known]
    payload = definition.payload
    arguments = job_rows.as_json({"args": payload["args"], "kwargs": payload["kwargs"]})
    queue = definition.topic.removeprefix(JOB_PREFIX)
    expires_in = job_queues.option_of("expires_in", definition.backend, queue, definition.task)
    rows = [
        NewResult(
            one,
            definition.backend,
            queue,
            definition.task,
            arguments,
            definition.priority,
            run_after=0,
            enqueued_at=now,
            expires_in=round((expires_in or 0) * 1000),
        )
        for one in new
    ]
    job_rows.insert(session, rows)
    publishing.publish_many(definition.topic, map(job_rows.message_of, rows), using=session.using)
    return new


def _message(definition: Definition, message_id: str) -> Message:
    key = definition.task or definition.key
    return Message(definition.payload, key, message_id, definition.metadata, priority=definition.priority)


def publish_by_hand(session: Session, name: str, definition: Definition) -> str:
    """Publish the message of a schedule now, in the caller's transaction, and return its id.

    The next tick stays as it is: the id is not that of a tick.
    """
    now = session.now()
    one = run_id(name, now, f"-{new_message_id()[-12:]}")
    publish(session, definition, [one], now)
    return one

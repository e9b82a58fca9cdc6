"""Debouncing: of the scheduled messages with one coalesce key, only the latest enters the log.

A message that is published with a coalesce key and a delay is a row of the outbox, as every scheduled message, and one
of a table in which the messages of a key are found. Publishers only insert there, so they never wait for each other.
The sequencer decides when one of the messages comes due, under its mutex and the locks of all of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import attrgetter
from typing import NamedTuple

from django_mysqlqueue.db.sizes import LATEST_DELIVERY
from django_mysqlqueue.db.tables import DEBOUNCED, LOG, OUTBOX
from django_mysqlqueue.service.messages import OutboxRow
from django_mysqlqueue.sql.session import Session, flat, run

BY_ID = "s.outbox_id = v.i"
SAME = "{t}.topic = s.topic AND {t}.partition_key = s.partition_key AND {t}.id = s.id"
IS_THERE = f"EXISTS (SELECT 1 FROM {OUTBOX} o WHERE o.outbox_id = s.outbox_id AND {SAME.format(t='o')})"
"""Whether the outbox has the message of a row. If the outbox was emptied, another one may have the same number."""
PENDING = 10_000
"""Number of messages that a pass looks at, the latest of each key; of each at least two."""


class Key(NamedTuple):
    """A coalesce key in the outbox."""

    topic: str
    partition: str
    coalesce_key: str


class _Pending(NamedTuple):
    """A row of a key."""

    key: Key
    outbox_id: int
    is_there: bool
    """Whether the outbox has its message. Plain SQL may have cancelled it."""
    is_duplicate: bool
    """Whether the log has a message with its id, so that it will not enter the log, and replaces nothing."""


class _Locked(NamedTuple):
    """A debounced message whose rows are locked."""

    outbox_id: int
    deliver_at: int
    deliver_by: int
    size: int
    now: int


@dataclass(slots=True)
class Decision:
    """What happens to debounced messages that have come due."""

    kept: set[int] = field(default_factory=set)
    """The ids of those that do not enter the log in this pass: they were replaced, or wait."""
    added: list[int] = field(default_factory=list)
    """The ids of others that do, because the longest wait of their key is over."""
    replaced: int = 0
    """Number of messages that later ones have replaced. They were deleted."""
    more: bool = False
    """Whether there are messages that this pass has not looked at."""


# -- publishing, cancelling, rescheduling -----------------------------------------


def remember(session: Session, rows: Sequence[OutboxRow]) -> None:
    """Store which of the rows that the last INSERT has added to the outbox are debounced, in its transaction."""
    columns = "outbox_id, topic, partition_key, id, coalesce_key, deliver_by"
    values: list[str] = []
    parameters: list[object] = []
    for place, row in enumerate(rows):
        if not row.is_debounced:
            continue
        longest = row.max_delay_ms
        outbox_id = session.dialect.inserted_id(OUTBOX, "outbox_id", place, len(rows))
        deliver_by = f"{LATEST_DELIVERY}" if longest is None else f"{session.dialect.now_ms} + {longest}"
        values.append(f"({outbox_id}, %s, %s, %s, %s, {deliver_by})")
        parameters += [row.topic, row.partition_key, row.message_id, row.coalesce_key]
    # A row that was left behind, after the outbox was emptied, may have this id: then the message is only delayed.
    keep = session.dialect.on_conflict_keep(DEBOUNCED, ("outbox_id",))
    session.execute(f"INSERT INTO {DEBOUNCED} ({columns}) VALUES {', '.join(values)}{keep}", parameters)


def forget(session: Session, ids: Sequence[int]) -> None:
    """Let those of some messages that are debounced be so no longer. Their rows of the outbox are locked."""
    # At REPEATABLE READ, deleting a row that does not exist would lock a gap, and stop publishers.
    there = session.joined("SELECT s.outbox_id", "i", ids, f"{session.dialect.join_to(DEBOUNCED, 's')} ON {BY_ID}")
    _delete(session, DEBOUNCED, flat(there))


# -- the sequencer ----------------------------------------------------------------


def decide(session: Session, due: Sequence[int], *, max_bytes: int) -> Decision:
    """Decide which of the scheduled messages that have come due enter the log, and replace earlier ones.

    Only the sequencer calls this, under its mutex. If another transaction has locked a message, because it cancels or
    reschedules it, no message with its key enters the log in this pass.
    """
    decision = Decision()
    keys = _keys(session, due)
    if not keys:
        return decision
    pending, cut = _pending(session, sorted(set(keys.values())))
    there = [one.outbox_id for one in pending if one.is_there]
    locked = _lock(session, there)
    busy = _busy(session, [outbox_id for outbox_id in there if outbox_id not in locked])
    added = 0
    gone: list[int] = []
    changed: list[tuple[int, int, int]] = []
    for key, group in groupby(pending, attrgetter("key")):
        ids = [one.outbox_id for one in group if one.is_there and not one.is_duplicate]
        found = [locked[outbox_id] for outbox_id in ids if outbox_id in locked]
        if not found:
            continue
        latest, *earlier = found
        by = min(one.deliver_by for one in found)
        at = min(latest.deliver_at, by)
        if (at, by) != (latest.deliver_at, latest.deliver_by):
            changed.append((latest.outbox_id, at, by))
        if key in cut or not busy.isdisjoint(ids):
            decision.kept.add(latest.outbox_id)
        elif at <= latest.now and latest.outbox_id not in keys and (added == 0 or added + latest.size <= max_bytes):
            # In this pass: before the next one, a later message may be published, and so on.
            decision.added.append(latest.outbox_id)
            added += latest.size
        gone += [one.outbox_id for one in earlier]
    left_behind = [one.outbox_id for one in pending if not one.is_there]
    single = {one.outbox_id for one in pending if one.is_duplicate or not one.is_there}
    decision.kept.update(gone, {outbox_id for outbox_id, key in keys.items() if key in cut} - single)
    changed.sort()
    for table, column, place in ((OUTBOX, "deliver_at", 1), (DEBOUNCED, "deliver_by", 2)):
        session.update(table, ("i", "at"), [(row[0], row[place]) for row in changed], BY_ID, {column: "v.at"})
    _delete(session, OUTBOX, gone)
    done = {*gone, *left_behind, *decision.added, *(keys.keys() - decision.kept)}
    _delete(session, DEBOUNCED, done)
    decision.replaced = len(gone)
    decision.more = bool(cut and done)
    return decision


def _keys(session: Session, ids: Sequence[int]) -> dict[int, Key]:
    """Return the coalesce keys of those messages that are debounced, by id."""
    select = "SELECT s.outbox_id, s.topic, s.partition_key, s.coalesce_key"
    rows = session.joined(select, "i", ids, f"{session.dialect.join_to(DEBOUNCED, 's')} ON {BY_ID}")
    return {outbox_id: Key(*key) for outbox_id, *key in rows}


def _pending(session: Session, keys: Sequence[Key]) -> tuple[list[_Pending], set[Key]]:
    """Return the latest rows of each key, the latest first, and the keys that have more."""
    limit = max(2, PENDING // len(keys))
    # A limit for each key, so that no statement reads, or sorts, all that wait.
    term = (
        "SELECT s.topic, s.partition_key, s.coalesce_key, s.outbox_id, "
        f"{IS_THERE}, EXISTS (SELECT 1 FROM {LOG} m WHERE {SAME.format(t='m')}) "
        f"FROM {DEBOUNCED} s{session.dialect.force_index('queue_debounced_key')} WHERE s.topic = %s "
        f"AND s.partition_key = %s AND s.coalesce_key = %s ORDER BY s.outbox_id DESC LIMIT {limit}"
    )
    found = [
        _Pending(Key(*key), outbox_id, bool(is_there), bool(is_duplicate))
        for *key, outbox_id, is_there, is_duplicate in session.each(term, keys)
    ]
    found.sort(key=lambda one: (one.key, -one.outbox_id))
    numbers = Counter(one.key for one in found)
    return found, {key for key, number in numbers.items() if number == limit}


def _lock(session: Session, ids: Sequence[int]) -> dict[int, _Locked]:
    """Lock messages in both tables; return those that are locked, by id."""
    return {one.outbox_id: one for one in _read(session, ids, session.dialect.skip_locked)}


def _busy(session: Session, ids: Sequence[int]) -> set[int]:
    """Return which of some messages, which could not be locked, another transaction has locked.

    The others were cancelled or rescheduled since they were read.
    """
    return {one.outbox_id for one in _read(session, ids, "")}


def _read(session: Session, ids: Sequence[int], suffix: str) -> list[_Locked]:
    rows = session.joined(
        f"SELECT s.outbox_id, s.deliver_at, d.deliver_by, s.size, {session.dialect.now_ms}",
        "i",
        ids,
        f"{session.dialect.join_to(OUTBOX, 's')} ON {BY_ID} "
        f"{session.dialect.join_to(DEBOUNCED, 'd')} ON d.outbox_id = s.outbox_id{suffix}",
    )
    return [_Locked(*row) for row in rows]


def _delete(session: Session, table: str, ids: Iterable[int]) -> None:
    session.delete(table, "i", sorted(ids), BY_ID)


# -- GC ---------------------------------------------------------------------------


def outdated(session: Session) -> tuple[str, tuple[object, ...]]:
    """Return the FROM and WHERE of the rows that ``collect`` deletes."""
    return f"{DEBOUNCED} s WHERE NOT {IS_THERE}", ()


def collect(using: str, *, after: int | None = None, limit: int = 500) -> tuple[int, int | None]:
    """Delete the rows, among the next ones, whose message is no longer in the outbox: plain SQL has cancelled it.

    ``after``: the id after which to continue; None: from the start.

    Returns:
        How many were deleted, and the id of the last row; None if there are no more.
    """
    session = Session(using)
    rows = session.rows(
        f"SELECT s.outbox_id, NOT {IS_THERE} "
        f"FROM {DEBOUNCED} s{session.dialect.force_index('PRIMARY')} WHERE s.outbox_id > %s "
        "ORDER BY s.outbox_id LIMIT %s",
        (after or 0, limit),
    )
    gone = [outbox_id for outbox_id, is_gone in rows if is_gone]
    if gone:
        run(using, lambda session: _delete(session, DEBOUNCED, gone))
    return len(gone), rows[-1][0] if len(rows) == limit else None

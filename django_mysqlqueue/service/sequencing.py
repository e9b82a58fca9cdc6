"""The sequencer: moves committed outbox rows into the log, one transaction at a time.

AUTO_INCREMENT values are assigned before COMMIT, so if publishers wrote the log themselves, offset 2 could become
visible before offset 1. A one-row mutex lets only one transaction at a time append, so the log is final below its
highest visible offset. Watermarks, GC and all other readers depend on that.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from secrets import randbits
from types import MappingProxyType
from typing import Any, NamedTuple

from django.db import Error

from django_mysqlqueue.db.columns import COPIED_COLUMNS
from django_mysqlqueue.db.tables import LOG, MARKS, OUTBOX, SEQUENCER, SEQUENCER_ID
from django_mysqlqueue.names.rules import RELAY_MARK
from django_mysqlqueue.service import coalescing, debouncing, delivery_events, quarantine
from django_mysqlqueue.sql.session import Answer, Session, run

logger = logging.getLogger("django_mysqlqueue.service")


BATCH_ROWS = 2000
BATCH_BYTES = 8 * 1_048_576
"""Limits of one pass: 200 rows of 1 MB held the mutex for 0.4 to 1.3 s."""
ISOLATED_ROWS = 200
"""Limit of a pass that looks for the rows that the log refuses: each of them costs some statements under the mutex."""
DUE_ORDER = "deliver_at, priority DESC, outbox_id"
"""The order of the index of the outbox."""
AT_ONCE = ("deliver_at = 0 AND priority > 0", "deliver_at = 0 AND priority = 0", "deliver_at = 0 AND priority < 0")
"""Messages without a delay, as ranges of the index."""
LOCKED_PAGES = 10
"""Maximum number of pages of due rows that a pass reads if other transactions have locked rows of them."""
MARK_MS = 60_000
"""Milliseconds between marks of the log, at least."""
KEEP_MARKS_MS = 30 * 86_400_000
"""Milliseconds for which marks are kept: at most 43,200 rows. An older position cannot be compared with the log."""


class Sequenced(NamedTuple):
    """The result of a pass of the sequencer."""

    moved: int
    """Rows moved out of the outbox, including duplicates, which do not enter the log."""
    more: bool
    """Whether a limit ended the pass, so that there may be more due messages."""
    busy: bool = False
    """Whether another process has the mutex."""
    replaced: int = 0
    """Debounced messages that later ones have replaced, and that do not enter the log."""
    quarantined: int = 0
    """Those of ``moved`` that the log has refused."""


def count_due(session: Session) -> int:
    """Return how many rows of the outbox are due."""
    return int(session.one(f"SELECT COUNT(*) FROM {OUTBOX} WHERE deliver_at <= {session.dialect.now_ms}")[0])


def idle_for(session: Session) -> float:
    """Return for how many seconds nobody has moved messages into the log; 0 if nobody ever has."""
    row = session.row(
        f"SELECT CASE WHEN sequenced_at > 0 THEN {session.dialect.now_ms} - sequenced_at ELSE 0 END FROM {SEQUENCER} "
        "WHERE id = %s",
        (SEQUENCER_ID,),
    )
    return 0.0 if row is None else int(row[0]) / 1000


def sequence(using: str, *, max_rows: int = BATCH_ROWS, max_bytes: int = BATCH_BYTES) -> Sequenced:
    """Append due messages to the log, in order, and remove them from the outbox.

    If another process has the mutex, this returns at once with ``busy``. A row that the log refuses goes to the
    quarantine.

    Messages without a delay are ordered by ``outbox_id``, so that one that is published after another one's commit
    follows it in the log. If a pass cannot take all, it takes a share of each kind (``_find_due``), and of those with a
    priority the highest ones first. Scheduled messages are ordered by the time at which they come due.
    """
    try:
        return run(using, lambda session: _sequence(session, max_rows, max_bytes))
    except Error as error:
        if not Session(using).dialect.refuses_row(error):
            raise
    # The transaction was rolled back. This one has savepoints, which a pass without such rows need not pay for.
    max_rows = min(max_rows, ISOLATED_ROWS)
    done = run(using, lambda session: _sequence(session, max_rows, max_bytes, isolates=True))
    if done.quarantined:
        logger.error("sequencer.quarantined database=%r messages=%d", using, done.quarantined)
    return done


def _sequence(session: Session, max_rows: int, max_bytes: int, *, isolates: bool = False) -> Sequenced:
    asked_mutex, asked_at_once = _ask_mutex(session), _ask_at_once(session, max_rows)
    asked_scheduled = _ask_scheduled(session, START, max_rows)
    mutex = _taken(session, asked_mutex)
    if mutex is None:
        return Sequenced(0, more=False, busy=True)
    due = _find_due(session, asked_at_once(), asked_scheduled(), max_rows, max_bytes)
    debounced = debouncing.decide(session, due.keyed, max_bytes=max_bytes) if due.keyed else debouncing.Decision()
    scheduled = [outbox_id for outbox_id in due.scheduled if outbox_id not in debounced.kept] + debounced.added
    ids = sorted(due.immediate + scheduled)
    replaced = debounced.replaced
    more = debounced.more or (due.more and bool(ids or replaced))
    if replaced:
        session.execute(f"UPDATE {SEQUENCER} SET debounced = debounced + %s WHERE id = %s", (replaced, SEQUENCER_ID))
    if not ids:
        if due.scheduled or due.is_locked:
            # They wait, for example for transactions that cancel: monitoring must not report the sequencer as dead.
            session.execute(
                f"UPDATE {SEQUENCER} SET sequenced_at = {session.dialect.now_ms} WHERE id = %s", (SEQUENCER_ID,)
            )
        return Sequenced(0, more=more, replaced=replaced)
    quarantined = 0
    if isolates:
        scheduled = quarantine.in_due_order(session, scheduled)  # ``debouncing`` may have changed their times.
    for kind, order in ((due.immediate, "outbox_id"), (scheduled, DUE_ORDER)):
        append = partial(_append, session, order=order, routes=mutex.routes)
        for chunk in session.chunks(kind):
            if isolates:
                quarantined += quarantine.append_each(session, append, chunk)
            else:
                append(chunk)
    for chunk in session.chunks(ids):
        session.later(
            session.dialect.delete_joined(OUTBOX, ("outbox_id",), len(chunk), "s.outbox_id = v.outbox_id"), chunk
        )
    if due.has_keys:
        coalescing.follow(session, mutex.last_offset)
    end = f"{session.dialect.greatest}({SEQUENCER}.last_offset, (SELECT COALESCE(MAX({LOG}.`offset`), 0) FROM {LOG}))"
    now = session.dialect.now_ms
    marked = f", marked_at = {now}" if mutex.is_mark_due else ""
    session.later(
        f"UPDATE {SEQUENCER} SET last_offset = {end}, sequenced_at = {now}{marked} WHERE id = %s", (SEQUENCER_ID,)
    )
    if mutex.is_mark_due:
        _mark(session)
    return Sequenced(len(ids), more, replaced=replaced, quarantined=quarantined)


def _mark(session: Session) -> None:
    """Note a random number at the end of the log. A log that is restored, and grows again, has other ones."""
    session.later(
        f"INSERT INTO {MARKS} (marked_offset, mark, marked_at) "
        f"SELECT last_offset, %s, marked_at FROM {SEQUENCER} WHERE id = %s"
        + session.dialect.on_conflict_keep(MARKS, ("marked_offset",)),
        (randbits(63), SEQUENCER_ID),
    )


def outdated_marks(session: Session) -> tuple[str, tuple[object, ...]]:
    """Return the FROM and WHERE of the marks that are older than ``KEEP_MARKS_MS``."""
    return delivery_events.older(session, MARKS, "marked_at", KEEP_MARKS_MS)


def collect_marks(using: str) -> int:
    """Delete some of the marks that are older than ``KEEP_MARKS_MS``, from the start of the log; return how many.

    So those that are left have no gap: a later offset without its mark is one of another log.
    """
    return run(
        using,
        lambda session: delivery_events.delete_old(session, MARKS, "marked_at", KEEP_MARKS_MS, key="marked_offset"),
    )


class Mutex(NamedTuple):
    """The locked mutex row."""

    last_offset: int = 0
    routes: Mapping[str, Mapping[str, str]] = MappingProxyType({})
    """The routes of topics, see ``routing``."""
    is_mark_due: bool = False
    """Whether the last mark of the log is older than ``MARK_MS``, or later than the present time."""


def take_mutex(session: Session) -> Mutex | None:
    """Lock the mutex row if it is free, and return it, else None. A missing row (a flushed database) is inserted."""
    return _taken(session, _ask_mutex(session))


def _ask_mutex(session: Session) -> Answer:
    now = session.dialect.now_ms
    return session.ask(
        f"SELECT last_offset, routes, marked_at NOT BETWEEN {now} - %s AND {now} FROM {SEQUENCER} "
        f"WHERE id = %s{session.dialect.skip_locked}",
        (MARK_MS, SEQUENCER_ID),
    )


def _taken(session: Session, answer: Answer) -> Mutex | None:
    for last_offset, routes, is_mark_due in answer():
        return Mutex(last_offset, json.loads(routes), bool(is_mark_due))
    # With SKIP LOCKED, a missing row and a locked one look the same. A plain read tells them apart.
    if session.rows(f"SELECT id FROM {SEQUENCER} WHERE id = %s", (SEQUENCER_ID,)):
        return None
    session.execute(
        f"INSERT INTO {SEQUENCER} (id, marked_at) VALUES (%s, {session.dialect.now_ms})"
        + session.dialect.on_conflict_keep(SEQUENCER, ("id",)),
        (SEQUENCER_ID,),
    )
    return Mutex()


def log_id(session: Session) -> str:
    """Return the id of a log, which no other log has; empty if the sequencer's row is missing, as after a flush."""
    row = session.row(f"SELECT log_id FROM {SEQUENCER} WHERE id = %s", (SEQUENCER_ID,))
    return "" if row is None else str(row[0])


def identify(using: str) -> str:
    """Return the id of a log, and insert the sequencer's row if it is missing.

    It is in a flushed database, and where only the migrations' SQL was run (``sqlmigrate``).
    """

    def insert(session: Session) -> str:
        take_mutex(session)
        return log_id(session)

    return log_id(Session(using)) or run(using, insert)


class _Due(NamedTuple):
    """The messages to move now."""

    immediate: list[int]
    """The ids of those without a delay."""
    scheduled: list[int]
    """The ids of scheduled ones that have come due."""
    more: bool
    """Whether a limit cut them off."""
    is_locked: bool
    """Whether other transactions have locked all scheduled ones that have come due."""
    keyed: list[int]
    """The ids of those scheduled ones that may have a coalesce key."""
    has_keys: bool
    """Whether any of all may have a coalesce key."""


def _find_due(
    session: Session,
    at_once: list[list[tuple[int, int, bool, int]]],
    scheduled: list[_Waiting],
    max_rows: int,
    max_bytes: int,
) -> _Due:
    """Return the messages to move now, from the first ones of each kind.

    The index is always read from its start: with a lower bound, the order would break when an old transaction commits
    late. Each kind has its share, so that none starves another: of the messages without a delay, those with a priority
    above 0, without one, and with one below 0; and scheduled ones. What a kind leaves of its share, larger kinds have.
    """
    every: list[Sequence[tuple[Any, ...]]] = [*at_once, scheduled]
    kinds = sorted(filter(None, every), key=len)
    immediate: list[int] = []
    ids_due: list[int] = []
    keyed: list[int] = []
    more, rows = False, max_rows
    for place, kind in enumerate(kinds):
        most, size = max(1, rows // (len(kinds) - place)), max_bytes // len(kinds)
        if kind is scheduled:
            ids_due, cut, keyed = _take_scheduled(session, scheduled, max_rows, most, size)
            rows -= len(ids_due)
        else:
            ids, cut = _within(kind, most, size)
            immediate += ids
            rows -= len(ids)
            cut = cut or len(kind) == max_rows
        more = more or cut
    return _Due(
        sorted(immediate),
        ids_due,
        more=more,
        is_locked=bool(scheduled) and not ids_due,
        keyed=keyed,
        has_keys=bool(keyed) or any(has_key for kind in at_once for _, _, has_key, _ in kind),
    )


def _ask_at_once(session: Session, limit: int) -> Callable[[], list[list[tuple[int, int, bool, int]]]]:
    """Return the first rows of each kind without a delay, as ``Session.ask``.

    Of each, outbox_id, size, whether it may have a coalesce key, and the number of its kind.
    """
    hint = session.dialect.force_index("queue_outbox_due")
    sql = session.dialect.union(
        *(
            f"SELECT outbox_id, size, coalesce_key IS NOT NULL, {kind} AS kind FROM {OUTBOX}{hint} WHERE {condition} "
            f"ORDER BY {DUE_ORDER} LIMIT %s"
            for kind, condition in enumerate(AT_ONCE)
        )
    )
    answer = session.ask(sql, (limit,) * len(AT_ONCE))

    def read() -> list[list[tuple[int, int, bool, int]]]:
        found: list[list[tuple[int, int, bool, int]]] = [[] for _ in AT_ONCE]
        for row in answer():
            found[row[3]].append(row)
        return found

    return read


class _Place(NamedTuple):
    """A place in the order of scheduled messages."""

    deliver_at: int
    rank: int
    """The negative priority."""
    outbox_id: int


START = _Place(0, 0, 0)
"""Before all scheduled messages."""


class _Waiting(NamedTuple):
    """A scheduled message that has come due."""

    outbox_id: int
    size: int
    place: _Place


def _ask_scheduled(session: Session, after: _Place, limit: int) -> Callable[[], list[_Waiting]]:
    """Return the next rows that have come due, as ``Session.ask``."""
    at, rank, last = after
    answer = session.ask(
        "SELECT outbox_id, size, deliver_at, priority "
        f"FROM {OUTBOX}{session.dialect.force_index('queue_outbox_due')} "
        f"WHERE deliver_at >= %s AND deliver_at > 0 AND deliver_at <= {session.dialect.now_ms} "
        f"AND (deliver_at > %s OR -priority > %s OR (-priority = %s AND outbox_id > %s)) ORDER BY {DUE_ORDER} "
        "LIMIT %s",
        (at, at, rank, rank, last, limit),
    )
    return lambda: [
        _Waiting(outbox_id, size, _Place(deliver_at, -priority, outbox_id))
        for outbox_id, size, deliver_at, priority in answer()
    ]


def _take_scheduled(
    session: Session, page: list[_Waiting], limit: int, max_rows: int, max_bytes: int
) -> tuple[list[int], bool, list[int]]:
    """Lock rows that have come due; return their ids, whether there may be more, and the ids that may have a key.

    A locked row belongs to a transaction that cancels or reschedules it. It is skipped, and the rows after it are
    taken: the next pass sees the result of that transaction. Without these locks, a row could be copied into the log
    although its DELETE commits a moment later.
    """
    ids: list[int] = []
    keyed: list[int] = []
    for _ in range(LOCKED_PAGES):
        wanted, cut = _within(page, max_rows - len(ids), max_bytes)
        sizes = {one.outbox_id: one.size for one in page}
        locked = lock_scheduled(session, wanted, due=True)
        ids += locked
        keyed += [outbox_id for outbox_id, row in locked.items() if row.has_key]
        if len(locked) == len(wanted):
            return ids, cut or len(page) == limit, keyed
        max_bytes -= sum(sizes[outbox_id] for outbox_id in locked)
        if len(ids) >= max_rows or max_bytes <= 0:
            return ids, True, keyed
        if not cut and len(page) < limit:
            return ids, False, keyed
        page = _ask_scheduled(session, page[len(wanted) - 1].place, limit)()
    return ids, bool(ids), keyed


SCHEDULED_ID = "CASE WHEN s.original_id = '' THEN s.id ELSE s.original_id END"
"""SQL, with the outbox as ``s``, for the id that ``publish`` returned."""


class Scheduled(NamedTuple):
    """A locked scheduled row of the outbox."""

    has_key: bool
    """Whether it may have a coalesce key."""
    topic: str
    message_id: str


def lock_scheduled(session: Session, ids: Sequence[int], *, due: bool, wait: bool = False) -> dict[int, Scheduled]:
    """Lock scheduled rows of the outbox.

    Every transaction that reschedules, cancels or sequences a scheduled row holds this lock, and decides by the row as
    it is under the lock.

    ``due``: True for rows that have come due, False for rows that have not. ``wait``: whether to wait for rows that
    another transaction has locked, instead of skipping them.

    Returns:
        Those that are locked by their ids, in the given order.
    """
    now = session.dialect.now_ms
    time = f"s.deliver_at > 0 AND s.deliver_at <= {now}" if due else f"s.deliver_at > {now}"
    suffix = session.dialect.for_update if wait else session.dialect.skip_locked
    # By primary key: with any other index, further rows and gaps would be locked too.
    rows = session.joined(
        f"SELECT s.outbox_id, s.coalesce_key IS NOT NULL, s.topic, {SCHEDULED_ID}",
        "i",
        ids,
        f"{session.dialect.join_to(OUTBOX, 's')} ON s.outbox_id = v.i AND {time}{suffix}",
    )
    locked = {outbox_id: Scheduled(*row) for outbox_id, *row in rows}
    return {outbox_id: locked[outbox_id] for outbox_id in ids if outbox_id in locked}


def _within(rows: Sequence[tuple[Any, ...]], max_rows: int, max_bytes: int) -> tuple[list[int], bool]:
    """Return the first ids within both limits (at least one), and whether any were left out."""
    ids: list[int] = []
    total = 0
    for outbox_id, size, *_ in rows:
        total += size
        if ids and (len(ids) >= max_rows or total > max_bytes):
            return ids, True
        ids.append(outbox_id)
    return ids, False


def _append(session: Session, ids: Sequence[int], *, order: str, routes: Mapping[str, Mapping[str, str]]) -> None:
    columns = ", ".join(COPIED_COLUMNS)
    topic, names = _routed(routes)
    places = ", ".join(["%s"] * len(ids))
    # Duplicates are dropped here, by an upsert that changes nothing.
    keep = session.dialect.on_conflict_keep(LOG, ("topic", "partition_key", "id"))
    session.later(
        f"INSERT INTO {LOG} ({columns}, created_at, published_at) "
        f"SELECT {topic}{columns.removeprefix('topic')}, created_at, {session.dialect.now_ms} "
        f"FROM {OUTBOX}{session.dialect.force_index('PRIMARY')} WHERE outbox_id IN ({places}) ORDER BY {order}{keep}",
        (*names, *ids),
    )


def _routed(routes: Mapping[str, Mapping[str, str]]) -> tuple[str, list[str]]:
    """Return the SQL for the topic under which a message of the outbox enters the log, and its parameters."""
    if not routes:
        return "topic", []
    names: list[str] = []
    cases = ""
    for topic, route in routes.items():
        marked = f"{topic}{RELAY_MARK}"
        cases += f" WHEN topic = %s OR SUBSTR(topic, 1, {len(marked)}) = %s THEN %s"
        names += [topic, marked, f"{marked}{route['to']}" if route["to"] else topic]
    return f"CASE{cases} ELSE topic END", names

"""The sequencer: moves committed outbox rows into the log, one transaction at a time.

AUTO_INCREMENT values are handed out before COMMIT, so a log that publishers
wrote themselves would show offset 2 before offset 1. Here a one-row mutex lets
one transaction at a time append: what a reader sees below the highest visible
offset is final. Watermarks, GC and every other reader rest on that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from django_mysqlqueue.log_queries import SEQUENCER_ID
from django_mysqlqueue.models import COPIED_COLUMNS, OutboxMessage, QueueMessage, Sequencer
from django_mysqlqueue.sql.session import Session, run

OUTBOX = OutboxMessage._meta.db_table
LOG = QueueMessage._meta.db_table
MUTEX = Sequencer._meta.db_table
MUTEX_ID = SEQUENCER_ID

BATCH_ROWS = 2000
BATCH_BYTES = 8 * 1_048_576
"""Bounds of one pass: 200 rows of 1 MB held the mutex for 0.4 to 1.3 s."""
LOCKED_PAGES = 10
"""How many pages of due rows a pass reads while other transactions have rows of them locked."""


@dataclass(frozen=True, slots=True)
class Sequenced:
    """What one pass of the sequencer did."""

    moved: int
    """Rows taken from the outbox; repeats of an id are among them and not in the log."""
    more: bool
    """The pass was cut by a limit: there may be more that is due."""
    busy: bool = False
    """Somebody else is sequencing."""


def count_due(session: Session) -> int:
    """How many rows of the outbox are due."""
    row = session.row(f"SELECT COUNT(*) FROM {OUTBOX} WHERE deliver_at <= {session.dialect.now_ms}")
    assert row is not None  # noqa: S101  # an aggregate has one row
    return int(row[0])


def sequence(using: str, *, max_rows: int = BATCH_ROWS, max_bytes: int = BATCH_BYTES) -> Sequenced:
    """Appends what is due to the log, in order, and removes it from the outbox.

    Whoever does not get the mutex returns at once with ``busy``.

    Order: rows published at once by ``outbox_id``, so that a publish that began
    after another one's commit comes after it; scheduled rows as they come due.
    """
    return run(using, lambda session: _sequence(session, max_rows, max_bytes))


def _sequence(session: Session, max_rows: int, max_bytes: int) -> Sequenced:
    if not take_mutex(session):
        return Sequenced(0, more=False, busy=True)
    immediate, scheduled, more, is_locked = _due_ids(session, max_rows, max_bytes)
    if not immediate and not scheduled:
        if is_locked:  # by transactions that cancel or move it: monitoring must not take the sequencer for dead
            session.execute(f"UPDATE {MUTEX} SET sequenced_at = {session.dialect.now_ms} WHERE id = %s", (MUTEX_ID,))
        return Sequenced(0, more=False)
    for ids, order in ((immediate, "outbox_id"), (scheduled, "deliver_at, outbox_id")):
        for chunk in session.chunks(ids):
            _append(session, chunk, order)
    for chunk in session.chunks(sorted(immediate + scheduled)):
        session.execute(
            session.dialect.delete_joined(OUTBOX, ("outbox_id",), len(chunk), "s.outbox_id = v.outbox_id"), chunk
        )
    session.execute(
        f"UPDATE {MUTEX} SET last_offset = {session.dialect.greatest}(last_offset, "
        f"(SELECT COALESCE(MAX({LOG}.`offset`), 0) FROM {LOG})), "
        f"sequenced_at = {session.dialect.now_ms} WHERE id = %s",
        (MUTEX_ID,),
    )
    return Sequenced(len(immediate) + len(scheduled), more)


def take_mutex(session: Session) -> bool:
    """Locks the mutex row if it is free; a missing one (a flushed database) is put back first."""
    mutex = Sequencer.objects.using(session.using).filter(pk=MUTEX_ID)
    if list(mutex.select_for_update(skip_locked=True).values_list("pk")):
        return True
    # SKIP LOCKED shows a missing row and a held one alike; a plain read tells them apart.
    if mutex.exists():
        return False
    session.execute(
        f"INSERT INTO {MUTEX} (id) VALUES (%s){session.dialect.on_conflict_keep(MUTEX, ('id',))}", (MUTEX_ID,)
    )
    return True


def _due_ids(session: Session, max_rows: int, max_bytes: int) -> tuple[list[int], list[int], bool, bool]:
    """Ids to move now: published at once, come due; whether a limit cut them, and whether what came due is all locked.

    Always read from the head of the index: a lower bound would break the order
    when an old transaction commits late. Each kind has its share, so that
    neither starves the other.
    """
    hint = session.dialect.force_index("queue_outbox_due")
    # Below 0 is a time before 1970, which plain SQL may give: as good as at once.
    immediate = session.rows(
        f"SELECT outbox_id, size FROM {OUTBOX}{hint} WHERE deliver_at <= 0 ORDER BY deliver_at, outbox_id LIMIT %s",
        (max_rows,),
    )
    scheduled = _scheduled(session, (0, 0), max_rows)
    share = 2 if immediate and scheduled else 1
    rows, size = max_rows // share or 1, max_bytes // share
    ids_now, cut_now = _within(immediate, rows, size)
    ids_due, cut_due = _take_scheduled(session, scheduled, max_rows, rows, size)
    return ids_now, ids_due, cut_now or cut_due or len(immediate) == max_rows, bool(scheduled) and not ids_due


def _scheduled(session: Session, after: tuple[int, int], limit: int) -> list[tuple[int, int, int]]:
    """(outbox_id, size, deliver_at) of the next rows that have come due, behind one by its (deliver_at, outbox_id)."""
    at, last = after
    return session.rows(
        f"SELECT outbox_id, size, deliver_at FROM {OUTBOX}{session.dialect.force_index('queue_outbox_due')} "
        f"WHERE deliver_at >= %s AND deliver_at > 0 AND deliver_at <= {session.dialect.now_ms} "
        "AND (deliver_at > %s OR outbox_id > %s) ORDER BY deliver_at, outbox_id LIMIT %s",
        (at, at, last, limit),
    )


def _take_scheduled(
    session: Session, page: list[tuple[int, int, int]], limit: int, max_rows: int, max_bytes: int
) -> tuple[list[int], bool]:
    """Locks rows that have come due; returns their ids, and whether there may be more to take.

    A row that is locked belongs to a transaction that cancels or moves it. It is
    passed over, and those behind it are taken: what that transaction does with
    it, the next pass sees. Without these locks a row could be copied into the
    log whose DELETE commits a moment later.
    """
    ids: list[int] = []
    for _ in range(LOCKED_PAGES):
        wanted, cut = _within(page, max_rows - len(ids), max_bytes)
        sizes = {outbox_id: size for outbox_id, size, _ in page}
        locked = lock_scheduled(session, wanted, due=True)
        ids += locked
        if len(locked) == len(wanted):
            return ids, cut or len(page) == limit
        max_bytes -= sum(sizes[outbox_id] for outbox_id in locked)
        if len(ids) >= max_rows or max_bytes <= 0:
            return ids, True
        if not cut and len(page) < limit:
            return ids, False
        outbox_id, _size, deliver_at = page[len(wanted) - 1]
        page = _scheduled(session, (deliver_at, outbox_id), limit)
    return ids, bool(ids)


def lock_scheduled(session: Session, ids: Sequence[int], *, due: bool, wait: bool = False) -> list[int]:
    """Locks scheduled rows of the outbox; returns the ids of those that it has, in the order given.

    Whoever moves, cancels or sequences a scheduled row holds this lock on it,
    and decides by the row as it is then.

    Args:
        ids: primary keys of rows with a time of delivery.
        due: only rows that have come due, or only those that have not.
        wait: wait for rows that another transaction has locked, instead of leaving them out.
    """
    time = f"s.deliver_at > 0 AND s.deliver_at <= {session.dialect.now_ms}"
    if not due:
        time = f"s.deliver_at > {session.dialect.now_ms}"
    suffix = session.dialect.for_update if wait else session.dialect.skip_locked
    got: set[int] = set()
    for chunk in session.chunks(sorted(ids)):
        # By primary key: by any other index, rows and gaps that nobody asked for would be locked too.
        got.update(
            outbox_id
            for (outbox_id,) in session.rows(
                f"SELECT s.outbox_id FROM {session.dialect.rows(('i',), len(chunk))} "
                f"{session.dialect.join_to(OUTBOX, 's')} ON s.outbox_id = v.i AND {time}{suffix}",
                chunk,
            )
        )
    return [outbox_id for outbox_id in ids if outbox_id in got]


def _within(rows: Sequence[tuple[int, ...]], max_rows: int, max_bytes: int) -> tuple[list[int], bool]:
    """The leading ids within both bounds (at least one), and whether any were left out."""
    ids: list[int] = []
    total = 0
    for outbox_id, size, *_ in rows:
        total += size
        if ids and (len(ids) >= max_rows or total > max_bytes):
            return ids, True
        ids.append(outbox_id)
    return ids, False


def _append(session: Session, ids: Sequence[int], order: str) -> None:
    columns = ", ".join(COPIED_COLUMNS)
    places = ", ".join(["%s"] * len(ids))
    # A repeat of an id is dropped here by an upsert that changes nothing.
    keep = session.dialect.on_conflict_keep(LOG, ("topic", "partition_key", "id"))
    session.execute(
        f"INSERT INTO {LOG} ({columns}, created_at, published_at) "
        f"SELECT {columns}, created_at, {session.dialect.now_ms} FROM {OUTBOX}{session.dialect.force_index('PRIMARY')} "
        f"WHERE outbox_id IN ({places}) ORDER BY {order}{keep}",
        ids,
    )

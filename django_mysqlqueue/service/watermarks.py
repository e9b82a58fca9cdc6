"""Offsets rows: creating and locking them, moving the watermark.

The watermark of a partition stops just below its first unsettled delivery, or
at the cursor. It is stored by the transaction that deletes the state rows at or
below it: never is a row missing that would be delivered again.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from django_mysqlqueue.models import ConsumerOffset, DeliveryState
from django_mysqlqueue.service import groups
from django_mysqlqueue.service.refs import GroupRef
from django_mysqlqueue.sql.session import UNION_TERMS, Retry, Session, flat, last_row, run

OFFSETS = ConsumerOffset._meta.db_table
STATE = DeliveryState._meta.db_table

LOOK_AHEAD = 100
"""Settled rows that one flush clears of a partition beyond those it settles itself."""

BY_KEY = "s.consumer_group = %s AND s.topic = %s AND s.partition_key = v.k"
BY_ROW = f"{BY_KEY} AND s.message_offset = v.o"


@dataclass(frozen=True, slots=True)
class Offsets:
    """A partition's watermark and cursor for a group."""

    acked: int
    claimed: int


@dataclass(slots=True)
class Advanced:
    """What moving watermarks found."""

    watermarks: dict[str, int] = field(default_factory=dict)
    """The new watermarks: to be stored by the same transaction."""
    settled: set[tuple[str, int]] = field(default_factory=set)
    """Acks that are settled with their rows deleted: the watermark has passed them."""
    beyond: list[tuple[str, int, int]] = field(default_factory=list)
    """(key, offset, token) of acks behind an unsettled row: to be marked in place."""
    unfinished: set[str] = field(default_factory=set)


def create_missing(using: str, ref: GroupRef, keys: Collection[str]) -> bool:
    """Creates offsets rows that are not there, at the group's start offset; False if it was dropped.

    In a transaction of its own: an INSERT that meets an existing row and then a
    FOR UPDATE of it deadlock with another process that does the same.
    """

    def create(session: Session) -> bool:
        fence = groups.fence(session, ref)
        if fence is None:
            return False
        if fence.paused:
            return True
        for chunk in session.chunks(sorted(set(keys) - existing(session, ref, keys))):
            row = f"(%s, %s, %s, %s, %s, {session.dialect.now_ms})"
            session.execute(
                f"INSERT INTO {OFFSETS} "
                "(consumer_group, topic, partition_key, offset_acked, offset_claimed, updated_at) VALUES "
                + session.dialect.placeholders(len(chunk), row)
                + session.dialect.on_conflict_keep(OFFSETS, ("consumer_group", "topic", "partition_key")),
                flat((*ref, key, fence.start_offset, fence.start_offset) for key in chunk),
            )
        return True

    return run(using, create) if keys else True


def existing(session: Session, ref: GroupRef, keys: Collection[str]) -> set[str]:
    """The partitions that have an offsets row."""
    found: set[str] = set()
    for chunk in session.chunks(sorted(keys)):
        found.update(
            key
            for (key,) in session.rows(
                f"SELECT s.partition_key FROM {session.dialect.rows(('k',), len(chunk))} "
                f"{session.dialect.join_to(OFFSETS, 's')} ON {BY_KEY}",
                (*chunk, *ref),
            )
        )
    return found


def lock(session: Session, ref: GroupRef, keys: Collection[str], *, skip_locked: bool = False) -> dict[str, Offsets]:
    """Locks the offsets rows of some partitions in order of key."""
    suffix = session.dialect.skip_locked if skip_locked else session.dialect.for_update
    found: dict[str, Offsets] = {}
    for chunk in session.chunks(sorted(keys)):
        for key, acked, claimed in session.rows(
            f"SELECT s.partition_key, s.offset_acked, s.offset_claimed "
            f"FROM {session.dialect.rows(('k',), len(chunk))} "
            f"{session.dialect.join_to(OFFSETS, 's')} ON {BY_KEY}{suffix}",
            (*chunk, *ref),
        ):
            found[key] = Offsets(acked, claimed)
    return found


def store(
    session: Session,
    ref: GroupRef,
    offsets: Mapping[str, Offsets],
    watermarks: Mapping[str, int],
    cursors: Mapping[str, int],
) -> None:
    """Stores what has moved of partitions whose offsets rows are locked: one UPDATE for both.

    ``offsets`` are the rows as they were locked. Neither ever goes back.
    """
    places: list[tuple[str, int, int]] = []
    for key in sorted({*watermarks, *cursors}):
        place = offsets[key]
        moved = Offsets(max(place.acked, watermarks.get(key, 0)), max(place.claimed, cursors.get(key, 0)))
        if moved != place:
            places.append((key, moved.acked, moved.claimed))
    for chunk in session.chunks(places):
        session.execute(
            session.dialect.update_joined(
                OFFSETS,
                ("k", "a", "c"),
                len(chunk),
                BY_KEY,
                {"offset_acked": "v.a", "offset_claimed": "v.c", "updated_at": session.dialect.now_ms},
            ),
            (*flat(chunk), *ref),
        )


def reset_offsets(session: Session, ref: GroupRef, keys: Collection[str], offset: int) -> None:
    """Stores one offset as watermark and cursor of locked rows: for seek, which alone may take them back."""
    for chunk in session.chunks(sorted(keys)):
        session.execute(
            session.dialect.update_joined(
                OFFSETS,
                ("k", "o"),
                len(chunk),
                BY_KEY,
                {"offset_acked": "v.o", "offset_claimed": "v.o", "updated_at": session.dialect.now_ms},
            ),
            (*flat((key, offset) for key in chunk), *ref),
        )


def advance(
    session: Session, ref: GroupRef, offsets: Mapping[str, Offsets], acks: Mapping[str, Mapping[int, int]]
) -> Advanced:
    """Finds how far the watermarks of partitions go whose offsets rows are locked, and deletes the rows they pass.

    ``acks`` maps partition key → offset → token of deliveries to settle now.
    Those at the head are settled by deleting their rows, with no UPDATE before
    (2.3 times faster); the others come back in ``beyond``. The caller stores
    the new watermarks in the same transaction.

    Raises:
        Retry: a row changed hands between the look and the delete.
    """
    result = Advanced()
    heads = _heads(
        session, ref, {key: (place.acked, len(acks.get(key, ())) + LOOK_AHEAD) for key, place in offsets.items()}
    )
    passed: list[tuple[str, int, int]] = []
    for key, place in offsets.items():
        mine = acks.get(key, {})
        rows = heads.get(key, [])
        watermark = place.claimed
        for offset, acked, token in rows:
            if not acked and mine.get(offset) != token:
                watermark = min(watermark, offset - 1)
                break
            passed.append((key, offset, token))
            if offset in mine:
                result.settled.add((key, offset))
        else:
            if len(rows) == len(mine) + LOOK_AHEAD:
                # (A seek has put the cursor below rows that it has not deleted yet.)
                watermark = min(rows[-1][0], place.claimed)
                result.unfinished.add(key)
        if watermark > place.acked:
            result.watermarks[key] = watermark
        result.beyond += [(key, offset, token) for offset, token in mine.items() if (key, offset) not in result.settled]
    _delete_passed(session, ref, sorted(passed))
    return result


def _heads(
    session: Session, ref: GroupRef, places: Mapping[str, tuple[int, int]]
) -> dict[str, list[tuple[int, bool, int]]]:
    """The first rows of each partition above its watermark, in offset order: (offset, settled, token).

    ``places`` maps partition key → (watermark, limit). Without the bound a look walks the deleted rows at the
    head that purge has not removed, as many as have been settled since the oldest snapshot on the server.
    """
    if len(places) > FEW_PARTITIONS:
        joined = _all_rows(session, ref, places)
        if joined is not None:
            return joined
    found: dict[str, list[tuple[int, bool, int]]] = {}
    one = (
        "SELECT partition_key, message_offset, acked, delivery_token "
        f"FROM {STATE}{session.dialect.force_index('PRIMARY')} "
        "WHERE consumer_group = %s AND topic = %s AND partition_key = %s AND message_offset > %s "
        "ORDER BY message_offset LIMIT %s"
    )
    ordered = sorted(places.items())
    for start in range(0, len(ordered), UNION_TERMS):
        chunk = ordered[start : start + UNION_TERMS]
        sql = session.dialect.union(one, len(chunk))
        # A row that is missing counts as settled.
        for key, offset, acked, token in session.whole(
            sql + last_row(4), flat((*ref, key, *place) for key, place in chunk)
        ):
            found.setdefault(key, []).append((offset, bool(acked), token))
    for rows in found.values():
        rows.sort()
    return found


FEW_PARTITIONS = 40
"""Up to here a SELECT for each, which begins at the watermark. The join of more begins at the partition's start, where
purge may have left deleted rows; but those who take from so many at a time take little from each."""


def _all_rows(
    session: Session, ref: GroupRef, places: Mapping[str, tuple[int, int]]
) -> dict[str, list[tuple[int, bool, int]]] | None:
    """The same for many partitions by one join, at a sixth of the cost; None if they have too many rows for that."""
    found: dict[str, list[tuple[int, bool, int]]] = {}
    for chunk in session.chunks(sorted(places.items())):
        most = 1000 + 2 * sum(limit - LOOK_AHEAD for _, (_, limit) in chunk)
        joined = (
            "SELECT s.partition_key, s.message_offset, s.acked, s.delivery_token "
            f"FROM {session.dialect.rows(('k', 'w'), len(chunk))} {session.dialect.join_to(STATE, 's')} "
            f"ON {BY_KEY} AND s.message_offset > v.w LIMIT %s"
        )
        rows = session.whole(
            session.dialect.union(joined, 1) + last_row(4),
            (*flat((key, watermark) for key, (watermark, _) in chunk), *ref, most),
        )
        if len(rows) == most:
            return None
        for key, offset, acked, token in rows:
            found.setdefault(key, []).append((offset, bool(acked), token))
    return {key: sorted(rows)[: places[key][1]] for key, rows in found.items()}


def _delete_passed(session: Session, ref: GroupRef, rows: Sequence[tuple[str, int, int]]) -> None:
    """Deletes settled rows by their exact primary keys.

    A range (``message_offset <= w``) would lock the first row beyond it too.
    """
    for chunk in session.chunks(rows):
        deleted = session.execute(
            session.dialect.delete_joined(
                STATE, ("k", "o", "t"), len(chunk), BY_ROW, where="s.acked = %s OR s.delivery_token = v.t"
            ),
            (*flat(chunk), *ref, True),
        )
        if deleted != len(chunk):
            raise Retry


def behind(session: Session, ref: GroupRef, *, after: str | None, limit: int) -> tuple[list[str], str | None]:
    """Partitions whose watermark has not come up to the cursor, among the next ``limit`` offsets rows of the group.

    Returns:
        Their keys, and the key to go on from (None: at the end).
    """
    above, parameters = ("", ()) if after is None else (" AND partition_key > %s", (after,))
    rows = session.rows(
        f"SELECT partition_key, offset_acked < offset_claimed FROM {OFFSETS} "
        f"WHERE consumer_group = %s AND topic = %s{above} ORDER BY partition_key LIMIT %s",
        (*ref, *parameters, limit),
    )
    return [key for key, is_behind in rows if is_behind], rows[-1][0] if len(rows) == limit else None


def sweep(using: str, ref: GroupRef, keys: Collection[str]) -> set[str]:
    """Moves the watermarks of partitions that nobody works on; returns those with further to go."""

    def move(session: Session) -> set[str]:
        offsets = lock(session, ref, keys, skip_locked=True)
        advanced = advance(session, ref, offsets, {})
        store(session, ref, offsets, advanced.watermarks, {})
        return advanced.unfinished

    return run(using, move) if keys else set()

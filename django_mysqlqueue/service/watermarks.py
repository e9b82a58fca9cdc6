"""Offsets rows: creating and locking them, and advancing the watermark.

The watermark of a partition is just below its first unsettled delivery, or at the position ("cursor"). It is stored by
the transaction that deletes the state rows at or below it, so that a state row is never missing while its message
could be delivered again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from django_mysqlqueue.db.tables import OFFSETS, STATE
from django_mysqlqueue.service import groups
from django_mysqlqueue.service.refs import GroupRef
from django_mysqlqueue.sql.session import Session, flat, last_row, run

LOOK_AHEAD = 100
"""Number of settled rows that one flush deletes from a partition, in addition to those that it settles itself."""

BY_KEY = "s.consumer_group = %s AND s.topic = %s AND s.partition_key = v.k"
BY_ROW = f"{BY_KEY} AND s.message_offset = v.o"


class Offsets(NamedTuple):
    """A partition's watermark and position for a group."""

    acked: int
    claimed: int


@dataclass(slots=True)
class Advanced:
    """The result of advancing watermarks."""

    watermarks: dict[str, int] = field(default_factory=dict)
    """The new watermarks, to be stored by the same transaction."""
    beyond: list[tuple[str, int, int]] = field(default_factory=list)
    """(key, offset, token) of acks after an unsettled row, to be marked in place."""
    unfinished: set[str] = field(default_factory=set)
    """Partitions whose watermark can advance further."""


def create_missing(using: str, ref: GroupRef, keys: Collection[str]) -> bool:
    """Create missing offsets rows, at the group's start offset; return False if the group was dropped.

    This uses a transaction of its own: an INSERT that meets an existing row, followed by a FOR UPDATE of it, deadlocks
    with another process that does the same.
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
    """Return the partitions that have an offsets row."""
    joins = f"{session.dialect.join_to(OFFSETS, 's')} ON {BY_KEY}"
    return {key for (key,) in session.joined("SELECT s.partition_key", "k", keys, joins, after=ref, plain=True)}


def lock(session: Session, ref: GroupRef, keys: Collection[str], *, skip_locked: bool = False) -> dict[str, Offsets]:
    """Lock the offsets rows of partitions in order of key, and return them."""
    return ask_lock(session, ref, keys, skip_locked=skip_locked)()


def ask_lock(
    session: Session, ref: GroupRef, keys: Collection[str], *, skip_locked: bool
) -> Callable[[], dict[str, Offsets]]:
    """Do the same as ``lock``, and as ``Session.ask``."""
    locking = session.dialect.skip_locked if skip_locked else session.dialect.for_update
    select = "SELECT s.partition_key, s.offset_acked, s.offset_claimed"
    joins = f"{session.dialect.join_to(OFFSETS, 's')} ON {BY_KEY}{locking}"
    answer = session.ask_joined(select, "k", keys, joins, after=ref)
    return lambda: {key: Offsets(acked, claimed) for key, acked, claimed in answer()}


def store(
    session: Session,
    ref: GroupRef,
    offsets: Mapping[str, Offsets],
    watermarks: Mapping[str, int],
    cursors: Mapping[str, int],
) -> None:
    """Store new watermarks and positions of partitions whose offsets rows are locked, by one UPDATE.

    Neither ever goes back.
    """
    places: list[tuple[str, int, int]] = []
    for key in sorted({*watermarks, *cursors}):
        place = offsets[key]
        moved = max(place.acked, watermarks.get(key, 0)), max(place.claimed, cursors.get(key, 0))
        if moved != place:
            places.append((key, *moved))
    changes = {"offset_acked": "v.a", "offset_claimed": "v.c", "updated_at": session.dialect.now_ms}
    session.update_later(OFFSETS, "kac", places, BY_KEY, changes, after=ref)


def reset_offsets(session: Session, ref: GroupRef, keys: Collection[str], offset: int) -> None:
    """Store one offset as watermark and position of locked rows. Only a seek may call this: it may move them back."""
    changes = {"offset_acked": "v.o", "offset_claimed": "v.o", "updated_at": session.dialect.now_ms}
    session.update(OFFSETS, "ko", [(key, offset) for key in sorted(keys)], BY_KEY, changes, after=ref)


def advance(
    session: Session, ref: GroupRef, offsets: Mapping[str, Offsets], acks: Mapping[str, Mapping[int, int]]
) -> Advanced:
    """Find how far watermarks can advance, and delete the state rows that they then include.

    Acks at the start of a partition are settled by deleting their rows without an UPDATE before it (2.3 times faster);
    the others are returned in ``beyond``. The caller stores the new watermarks in the same transaction.

    Raises:
        Retry: a row changed between the SELECT and the DELETE.
    """
    result = Advanced()
    heads = _heads(
        session, ref, {key: (place.acked, len(acks.get(key, ())) + LOOK_AHEAD) for key, place in offsets.items()}
    )
    passed: list[tuple[str, int, int]] = []
    for key, place in offsets.items():
        mine = acks.get(key, {})
        beyond = dict(mine)
        rows = heads.get(key, [])
        watermark = place.claimed
        for offset, acked, token in rows:
            if not acked and mine.get(offset) != token:
                watermark = min(watermark, offset - 1)
                break
            passed.append((key, offset, token))
            beyond.pop(offset, None)
        else:
            if len(rows) == len(mine) + LOOK_AHEAD:
                # During a seek, the position may be below rows that the seek has not deleted yet.
                watermark = min(rows[-1][0], place.claimed)
                result.unfinished.add(key)
        if watermark > place.acked:
            result.watermarks[key] = watermark
        result.beyond += [(key, offset, token) for offset, token in beyond.items()]
    _delete_passed(session, ref, sorted(passed))
    return result


def _heads(
    session: Session, ref: GroupRef, places: Mapping[str, tuple[int, int]]
) -> dict[str, list[tuple[int, bool, int]]]:
    """Return the first rows of each partition above its watermark, in offset order: (offset, settled, token).

    ``places`` maps partition key → (watermark, limit). Without the watermark as a bound, the query would walk the
    deleted rows at the start that purge has not removed yet: all that were settled since the oldest snapshot on the
    server.
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
    # ``whole``: a row that is missing from the answer would count as settled.
    parameters = [(*ref, key, *place) for key, place in sorted(places.items())]
    for key, offset, acked, token in session.each(one, parameters, whole=4):
        found.setdefault(key, []).append((offset, bool(acked), token))
    for rows in found.values():
        rows.sort()
    return found


FEW_PARTITIONS = 40
"""Up to this number of partitions, there is a SELECT for each, which begins at the watermark. For more there is a join,
which begins at the partition's start, where purge may have left deleted rows; but a claim from many partitions takes
little from each."""


def _all_rows(
    session: Session, ref: GroupRef, places: Mapping[str, tuple[int, int]]
) -> dict[str, list[tuple[int, bool, int]]] | None:
    """Do the same for many partitions by one join, at a sixth of the cost. Return None if they have too many rows."""
    found: dict[str, list[tuple[int, bool, int]]] = {}
    for chunk in session.chunks(sorted(places.items())):
        most = 1000 + 2 * sum(limit - LOOK_AHEAD for _, (_, limit) in chunk)
        joined = (
            "SELECT s.partition_key, s.message_offset, s.acked, s.delivery_token "
            f"FROM {session.dialect.rows(('k', 'w'), len(chunk))} {session.dialect.join_to(STATE, 's')} "
            f"ON {BY_KEY} AND s.message_offset > v.w LIMIT %s"
        )
        rows = session.whole(
            session.dialect.union(joined) + last_row(4),
            (*flat((key, watermark) for key, (watermark, _) in chunk), *ref, most),
        )
        if len(rows) == most:
            return None
        for key, offset, acked, token in rows:
            found.setdefault(key, []).append((offset, bool(acked), token))
    return {key: sorted(rows)[: places[key][1]] for key, rows in found.items()}


def _delete_passed(session: Session, ref: GroupRef, rows: Sequence[tuple[str, int, int]]) -> None:
    """Delete settled rows by their exact primary keys.

    A range (``message_offset <= w``) would also lock the first row after it.
    """
    for chunk in session.chunks(rows):
        where = "s.acked = %s OR s.delivery_token = v.t"
        sql = session.dialect.delete_joined(STATE, ("k", "o", "t"), len(chunk), BY_ROW, where)
        session.later(sql, (*flat(chunk), *ref, True), rows=len(chunk))


def pass_rows(using: str, ref: GroupRef, keys: Collection[str]) -> None:
    """Move positions to the last state rows of their partitions, where these are above them.

    Only a procedure for clients in plain SQL leaves such rows: on MySQL, if it is killed (KILL QUERY) between its
    statements, and the client then commits what it has done. It inserts rows in the order of the log. During a seek,
    there are rows above positions, too: a paused group is left alone.
    """

    def move(session: Session) -> None:
        fence = groups.fence(session, ref)
        if fence is None or fence.paused:
            return
        offsets = lock(session, ref, keys)
        last = (
            f"SELECT MAX(message_offset) FROM {STATE}{session.dialect.force_index('PRIMARY')} "
            "WHERE consumer_group = %s AND topic = %s AND partition_key = %s"
        )
        found = {key: session.row(last, (*ref, key)) for key in offsets}
        tops = {key: int(row[0]) for key, row in found.items() if row is not None and row[0] is not None}
        store(session, ref, offsets, {}, tops)

    run(using, move)


def behind(session: Session, ref: GroupRef, *, after: str | None, limit: int) -> tuple[list[str], str | None]:
    """Find partitions whose watermark is below the position, among the next ``limit`` offsets rows of the group.

    Returns:
        Their keys, and the key after which to continue (None at the end).
    """
    above, parameters = ("", ()) if after is None else (" AND partition_key > %s", (after,))
    rows = session.rows(
        f"SELECT partition_key, offset_acked < offset_claimed FROM {OFFSETS} "
        f"WHERE consumer_group = %s AND topic = %s{above} ORDER BY partition_key LIMIT %s",
        (*ref, *parameters, limit),
    )
    return [key for key, is_behind in rows if is_behind], rows[-1][0] if len(rows) == limit else None


def sweep(using: str, ref: GroupRef, keys: Collection[str]) -> set[str]:
    """Advance the watermarks of partitions that no subscriber uses; return those that can advance further."""

    def move(session: Session) -> set[str]:
        offsets = lock(session, ref, keys, skip_locked=True)
        advanced = advance(session, ref, offsets, {})
        store(session, ref, offsets, advanced.watermarks, {})
        return advanced.unfinished

    return run(using, move) if keys else set()

"""Offsets rows: creating and locking them, moving the watermark.

The watermark of a partition stops just below its first unsettled delivery, or
at the cursor. It is stored before the state rows at or below it are deleted: a
crash between the two leaves rows behind that the next flush deletes, never a
row missing that would be delivered again.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from django_mysqlqueue.models import ConsumerOffset, DeliveryState
from django_mysqlqueue.service import groups
from django_mysqlqueue.service.groups import GroupRef
from django_mysqlqueue.service.transactions import UNION_TERMS, Retry, Session, flat, run

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
                f"{session.dialect.join} {OFFSETS} s ON {BY_KEY}",
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
            f"FROM {session.dialect.rows(('k',), len(chunk))} {session.dialect.join} {OFFSETS} s ON {BY_KEY}{suffix}",
            (*chunk, *ref),
        ):
            found[key] = Offsets(acked, claimed)
    return found


def move_cursors(session: Session, ref: GroupRef, cursors: Mapping[str, int]) -> None:
    """Stores the cursors of partitions whose offsets rows are locked; they never go back."""
    _raise(session, ref, "offset_claimed", sorted(cursors.items()))


def _raise(session: Session, ref: GroupRef, column: str, places: Sequence[tuple[str, int]]) -> None:
    for chunk in session.chunks(places):
        session.execute(
            session.dialect.update_joined(
                OFFSETS,
                ("k", "o"),
                len(chunk),
                BY_KEY,
                {column: "v.o", "updated_at": session.dialect.now_ms},
                where=f"s.{column} < v.o",
            ),
            (*flat(chunk), *ref),
        )


def advance(
    session: Session, ref: GroupRef, offsets: Mapping[str, Offsets], acks: Mapping[str, Mapping[int, int]]
) -> Advanced:
    """Moves the watermarks of partitions whose offsets rows are locked, as far as they go.

    ``acks`` maps partition key → offset → token of deliveries to settle now.
    Those at the head are settled by deleting their rows, with no UPDATE before
    (2.3 times faster); the others come back in ``beyond``.

    Raises:
        Retry: a row changed hands between the look and the delete.
    """
    result = Advanced()
    heads = _heads(
        session, ref, {key: (place.acked, len(acks.get(key, ())) + LOOK_AHEAD) for key, place in offsets.items()}
    )
    watermarks: list[tuple[str, int]] = []
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
                watermark = rows[-1][0]
                result.unfinished.add(key)
        if watermark > place.acked:
            watermarks.append((key, watermark))
        result.beyond += [(key, offset, token) for offset, token in mine.items() if (key, offset) not in result.settled]
    # Stored first: a crash from here on leaves rows behind, never a row missing.
    _raise(session, ref, "offset_acked", sorted(watermarks))
    _delete_passed(session, ref, sorted(passed))
    return result


def _heads(
    session: Session, ref: GroupRef, places: Mapping[str, tuple[int, int]]
) -> dict[str, list[tuple[int, bool, int]]]:
    """The first rows of each partition above its watermark, in offset order: (offset, settled, token).

    ``places`` maps partition key → (watermark, limit). Without the bound a look would walk the deleted rows at the
    head that purge has not removed, as many as have been settled since the oldest snapshot on the server.
    """
    found: dict[str, list[tuple[int, bool, int]]] = {}
    one = (
        "SELECT * FROM (SELECT partition_key, message_offset, acked, delivery_token "
        f"FROM {STATE}{session.dialect.force_index('PRIMARY')} "
        "WHERE consumer_group = %s AND topic = %s AND partition_key = %s AND message_offset > %s "
        "ORDER BY message_offset LIMIT %s) h{number}"
    )
    ordered = sorted(places.items())
    for start in range(0, len(ordered), UNION_TERMS):
        chunk = ordered[start : start + UNION_TERMS]
        sql = " UNION ALL ".join(one.replace("{number}", str(number)) for number in range(len(chunk)))
        parameters = flat((*ref, key, *place) for key, place in chunk)
        for key, offset, acked, token in session.rows(sql, parameters):
            found.setdefault(key, []).append((offset, bool(acked), token))
    for rows in found.values():
        rows.sort()
    return found


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


def sweep(using: str, ref: GroupRef, keys: Collection[str]) -> set[str]:
    """Moves the watermarks of partitions that nobody works on; returns those with further to go."""

    def move(session: Session) -> set[str]:
        offsets = lock(session, ref, keys, skip_locked=True)
        return advance(session, ref, offsets, {}).unfinished

    return run(using, move) if keys else set()

"""Coalesce keys: of the messages with one key, a group handles the latest that it has not started.

A table has, for each key of a partition, the latest message of the log, which the sequencer stores with it, and for
groups the message that a shared group has claimed last, and the one for which the group has given up others
(``superseding``).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import NamedTuple

from django_mysqlqueue.db.tables import COALESCE_KEYS, LOG
from django_mysqlqueue.service.refs import GroupRef
from django_mysqlqueue.sql.session import Session, above, above_values, flat, run

KEY = ("consumer_group", "topic", "partition_key", "coalesce_key")
BY_KEY = "s.consumer_group = v.g AND s.topic = v.t AND s.partition_key = v.k AND s.coalesce_key = v.c"
THE_LOG = ""
"""The group of the rows that have the latest message of the log."""


class Coalesced(NamedTuple):
    """A coalesce key within a partition."""

    partition: str
    key: str


# -- the sequencer ----------------------------------------------------------------


def follow(session: Session, above: int) -> None:
    """Note the keys of the messages of the log above an offset: the sequencer has appended them, under its mutex."""
    latest: dict[tuple[str, Coalesced], int] = {}
    for offset, topic, *one in session.rows(
        f"SELECT `offset`, topic, partition_key, coalesce_key FROM {LOG}{session.dialect.force_index('PRIMARY')} "
        "WHERE `offset` > %s AND target_group = %s AND coalesce_key <> %s ORDER BY `offset`",
        (above, "", ""),
    ):
        latest[topic, Coalesced(*one)] = offset
    note(session, [(THE_LOG, topic, *one, offset, 0) for (topic, one), offset in latest.items()])


class Noted(NamedTuple):
    """What the row of a key says."""

    offset: int
    """The latest message of the log, or the one that a shared group has claimed last; 0 if it has claimed none."""
    superseding: int
    """The message for which the group has given up earlier ones of the key; 0 if it has given up none."""


NOTHING = Noted(0, 0)


def note(session: Session, rows: Iterable[tuple[str, str, str, str, int, int]]) -> None:
    """Store messages of keys: the primary key, and what ``Noted`` has. An offset of 0 leaves the one that is stored.

    Each row has one writer at a time: the sequencer, or who has locked the offsets row of the partition for the group.
    """
    for chunk in session.chunks(sorted(rows)):
        # This locks the rows that are there: GC cannot delete them before the UPDATE.
        session.execute(
            f"INSERT INTO {COALESCE_KEYS} ({', '.join(KEY)}, message_offset, superseding_offset) VALUES "
            + session.dialect.placeholders(len(chunk), "(%s, %s, %s, %s, %s, %s)")
            + session.dialect.on_conflict_keep(COALESCE_KEYS, KEY),
            flat(chunk),
        )
        session.execute(
            session.dialect.update_joined(
                COALESCE_KEYS,
                ("g", "t", "k", "c", "o", "p"),
                len(chunk),
                BY_KEY,
                {
                    "message_offset": "CASE WHEN v.o = 0 THEN s.message_offset ELSE v.o END",
                    "superseding_offset": "CASE WHEN v.p = 0 THEN s.superseding_offset ELSE v.p END",
                },
            ),
            flat(chunk),
        )


def read(session: Session, keys: Collection[tuple[str, str, str, str]]) -> dict[tuple[str, str, str, str], Noted]:
    """Return what is noted about keys, each given as the primary key of its row."""
    select = f"SELECT {', '.join(f's.{name}' for name in KEY)}, s.message_offset, s.superseding_offset"
    joins = f"{session.dialect.join_to(COALESCE_KEYS, 's')} ON {BY_KEY}"
    return {row[:4]: Noted(*row[4:]) for row in session.joined(select, "gtkc", keys, joins, plain=True)}


def is_superseding(session: Session, ref: GroupRef, partition: str, offset: int, key: str) -> bool:
    """Return whether a group has given up earlier messages with a coalesce key for a message.

    ``key``: its coalesce key; empty: it has none.
    """
    row = (ref.group, ref.topic, partition, key)
    return bool(key) and read(session, [row]).get(row, NOTHING).superseding == offset


def has_key(session: Session, offsets: Collection[int]) -> bool:
    """Return whether a message of the log has a coalesce key, or its original, if that is still in the log."""
    return any(
        session.rows(
            f"SELECT 1 FROM {session.dialect.rows(('o',), len(chunk))} {session.dialect.join_to(LOG, 'm')} "
            f"ON m.`offset` = v.o {session.dialect.join_to(LOG, 'o', left=True)} ON o.`offset` = m.original_offset "
            "AND o.id = m.original_id WHERE m.coalesce_key <> %s OR o.coalesce_key <> %s LIMIT 1",
            (*chunk, "", ""),
        )
        for chunk in session.chunks(sorted(offsets))
    )


def has_keys(session: Session, topic: str) -> bool:
    """Return whether messages of a topic in the log have coalesce keys."""
    return bool(
        session.rows(
            f"SELECT 1 FROM {COALESCE_KEYS}{session.dialect.force_index('PRIMARY')} "
            "WHERE consumer_group = %s AND topic = %s LIMIT 1",
            (THE_LOG, topic),
        )
    )


# -- GC ---------------------------------------------------------------------------


START = ("", "", "", "")
"""A primary key below all others."""


def outdated(session: Session) -> tuple[str, tuple[object, ...]]:
    """Return the FROM and WHERE of the rows that ``collect`` deletes."""
    return f"{COALESCE_KEYS} s WHERE NOT {_is_there(session)}", ()


def _latest(session: Session) -> str:
    return f"{session.dialect.greatest}(s.message_offset, s.superseding_offset)"


def _is_there(session: Session) -> str:
    return f"EXISTS (SELECT 1 FROM {LOG} m WHERE m.`offset` = {_latest(session)})"


def collect(
    using: str, *, after: tuple[str, ...] | None = None, limit: int = 500
) -> tuple[int, tuple[str, ...] | None]:
    """Delete the rows, among the next ones, whose message is no longer in the log.

    GC has deleted all messages of the key then, since it deletes the earlier ones first. A row that the sequencer or a
    claim changes at the same time stays.

    ``after``: the primary key of the row after which to continue; None: from the start.

    Returns:
        How many were deleted, and the primary key of the last row; None if there are no more.
    """
    session = Session(using)
    names = ", ".join(f"s.{name}" for name in KEY)
    latest = _latest(session)
    rows = session.rows(
        f"SELECT {names}, {latest}, NOT {_is_there(session)} "
        f"FROM {COALESCE_KEYS} s{session.dialect.force_index('PRIMARY')} "
        f"WHERE {above(KEY)} ORDER BY {names} LIMIT %s",
        (*above_values(after or START), limit),
    )
    gone = [row[:5] for row in rows if row[5]]

    def delete(session: Session) -> int:
        return session.delete(COALESCE_KEYS, "gtkco", gone, BY_KEY, f"{latest} = v.o")

    deleted = run(using, delete) if gone else 0
    return deleted, tuple(rows[-1][:4]) if len(rows) == limit else None

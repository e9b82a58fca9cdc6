"""Samples of the backlog for the charts: one subscriber per minute counts it, for all.

The row of the minute is the fence: the process that sets its ``sampled_at`` counts the backlog while its maintenance
looks through the partitions anyway, and stores it in the rows of the minute and the hour. If that process is killed
before, the minute has no sample. As for all rollups, no operation depends on samples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from django_mysqlqueue.db import log_queries
from django_mysqlqueue.db.tables import GROUPS, LOG, ROLLUPS
from django_mysqlqueue.service import unclaimed
from django_mysqlqueue.service.counts import Count
from django_mysqlqueue.service.groups import waiting_since
from django_mysqlqueue.service.refs import GroupRef
from django_mysqlqueue.service.rollups import HOUR, KEY, MINUTE, insert_missing
from django_mysqlqueue.sql.session import Session, run

MOST = 100_000
"""A sample stops counting here, and is then marked as not exact."""
MOST_CLAIMED = 10_000
"""The same for messages that are claimed and not settled."""
PIECE = 100
"""Maximum number of partitions that one statement counts."""
FURTHEST = 10
"""Number of partitions of each slice in which the oldest message is searched when the count has stopped."""
ROWS = 5_000
"""Number of messages that one statement counts, of all its partitions together."""
BY_KEY = " AND ".join(f"{name} = %s" for name in KEY)


def claim(
    using: str, refs: Sequence[GroupRef], entered: Mapping[int, Mapping[tuple[str, str], int]]
) -> dict[GroupRef, int]:
    """Claim the samples of the current minute that no subscriber has claimed; return its beginning, by group.

    For these groups, the numbers of messages that entered the log in the minute before are added to its row and to that
    of its hour, without those that only another group receives.

    ``entered``: by the beginning of a minute in epoch milliseconds, the number of messages by topic and
    ``target_group``. Minutes of which this process did not read the whole log are missing.
    """
    session = Session(using)
    minute = _begin(session.now(), MINUTE)
    sampled = session.joined(
        "SELECT s.consumer_group, s.topic",
        "gt",
        refs,
        f"{session.dialect.join_to(ROLLUPS, 's')} ON s.grain = %s AND s.bucket_at = %s "
        "AND s.consumer_group = v.g AND s.topic = v.t WHERE s.sampled_at > 0",
        after=(MINUTE, minute),
    )
    wanted = sorted(set(refs).difference(sampled))
    if not wanted:
        return {}
    before = minute - MINUTE * 1000
    counted = entered.get(before)
    periods = [(MINUTE, minute), (HOUR, _begin(minute, HOUR))]
    past = [(MINUTE, before), (HOUR, _begin(before, HOUR))] if counted is not None else []

    def write(session: Session) -> dict[GroupRef, int]:
        # In the order in which rollups.add locks rows.
        insert_missing(session, sorted((*period, *ref) for period in {*periods, *past} for ref in wanted))
        won = {}
        for ref in wanted:
            if not session.execute(
                f"UPDATE {ROLLUPS} SET sampled_at = {session.dialect.now_ms} WHERE {BY_KEY} AND sampled_at = 0",
                (MINUTE, minute, *ref),
            ):
                continue
            won[ref] = minute
            for period in past:
                session.execute(
                    f"UPDATE {ROLLUPS} SET entered = entered + %s, entered_minutes = entered_minutes + 1 "
                    f"WHERE {BY_KEY}",
                    (_entered(counted or {}, ref), *period, *ref),
                )
        return won

    return run(using, write)


def _entered(counted: Mapping[tuple[str, str], int], ref: GroupRef) -> int:
    """Return how many of the messages a group receives, if its filter passes none."""
    return counted.get((ref.topic, ""), 0) + counted.get((ref.topic, ref.group), 0)


def store(using: str, ref: GroupRef, minute: int, backlog: Count, oldest_ms: int) -> None:
    """Store a sample in the row of its minute. The row of the hour keeps the highest values.

    ``minute``: the beginning of the minute, from ``claim``. ``oldest_ms``: the age of the oldest one in milliseconds; 0
    if there is none.
    """

    def write(session: Session) -> None:
        highest = session.dialect.greatest
        for grain in (MINUTE, HOUR):
            session.execute(
                f"UPDATE {ROLLUPS} SET backlog = {highest}(COALESCE(backlog, 0), %s), "
                f"oldest_ms = {highest}(oldest_ms, %s), "
                "backlog_exact = CASE WHEN %s THEN backlog_exact ELSE %s END "
                f"WHERE {BY_KEY}",
                (backlog.value, oldest_ms, backlog.exact, False, grain, _begin(minute, grain), *ref),
            )

    run(using, write)


def _begin(moment: int, grain: int) -> int:
    return moment // (grain * 1000) * grain * 1000


class Sample:
    """The backlog of a group while it is counted, partition by partition.

    Args:
        using: alias of the database.
        ref: the group.
        minute: the beginning of the minute, from ``claim``.
    """

    def __init__(self, using: str, ref: GroupRef, minute: int) -> None:
        self._using = using
        self._ref = ref
        self._minute = minute
        self._number = 0
        self._exact = True
        self._first: int | None = None
        self._start: int | None = None
        self._todo: list[tuple[int, str]] = []
        """Partitions that may have more messages, with the offsets up to which they are claimed or counted."""

    def begin(self) -> None:
        """Count the messages that are claimed and not settled."""
        session = Session(self._using)
        number, self._first, self._start = session.one(
            f"SELECT COUNT(*), MIN(w.message_offset), (SELECT start_offset FROM {GROUPS} "
            "WHERE consumer_group = %s AND topic = %s) FROM "
            f"(SELECT message_offset {log_queries.claimed(session)} LIMIT %s) w",
            (*self._ref, *self._ref, False, MOST_CLAIMED + 1),
        )
        self._number, self._exact = min(number, MOST_CLAIMED), number <= MOST_CLAIMED

    def add(self, keys: Sequence[str]) -> None:
        """Add partitions whose messages that the group has not claimed are to be counted by ``count``."""
        if self._start is None:  # The group has been dropped.
            return
        places = dict.fromkeys(keys, (0, self._start)) | unclaimed.positions(Session(self._using), self._ref, keys)
        self._todo = sorted((claimed, key) for key, (_, claimed) in places.items())

    def is_counted(self) -> bool:
        """Return whether the partitions that were added are counted."""
        return not self._todo

    def count(self) -> None:
        """Count messages by one statement."""
        piece, depth = self._todo[:PIECE], ROWS // min(PIECE, len(self._todo))
        self._todo = self._todo[PIECE:]
        if self._number > MOST:
            # Only the age is still wanted: the oldest message is most likely in the partitions furthest behind.
            piece, depth, self._todo = piece[:FURTHEST], 1, []
        for key, found in unclaimed.count(Session(self._using), self._ref, piece, depth=depth).items():
            self._number += found.number
            self._first = found.first if self._first is None else min(self._first, found.first)
            if found.number == depth and self._number <= MOST:
                self._todo.append((found.last, key))

    def end(self) -> None:
        """Store what was counted."""
        session = Session(self._using)
        backlog = Count(self._number, self._exact).capped(MOST)
        store(self._using, self._ref, self._minute, backlog, self._age(session))

    def _age(self, session: Session) -> int:
        if self._first is None:
            return 0
        row = session.row(
            f"SELECT {session.dialect.now_ms}, m.published_at, g.registered_at, g.sought_at FROM {GROUPS} g "
            f"{session.dialect.join_to(LOG, 'm')} ON m.`offset` = %s WHERE g.consumer_group = %s AND g.topic = %s",
            (self._first, *self._ref),
        )
        if row is None:  # GC has deleted the message, or the group was dropped.
            return 0
        now, *times = map(int, row)
        return max(0, now - waiting_since(*times))

"""Find the ends of the log and the offsets of times."""

from __future__ import annotations

import datetime
import difflib
import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from pyspark_mysqlqueue.databases import Database
from pyspark_mysqlqueue.errors import DataLossError, PipelineError
from pyspark_mysqlqueue.log_schema import BY_PARTITION, COLLECTED, LOG, SEQUENCER, Log
from pyspark_mysqlqueue.options import EPOCH, Edge, SourceOptions
from pyspark_mysqlqueue.reading import NEVER
from pyspark_mysqlqueue.shared import log_queries

GROUPS = "queue_consumer_groups"
CLOCK_STEP = 26 * 3_600_000
"""Times in the log are in order, except that the server's clock may have been set back by at most this much, in
milliseconds. It covers a clock that was set to a wrong time zone.
"""


def highest(database: Database) -> int:
    """Return the highest offset that is or was in the log. The log up to this offset is final.

    Raises:
        PipelineError: The server is a replica on which the log is not final.
    """
    if not database.keeps_order():
        raise PipelineError(
            "this server is a replica that may show later messages before earlier ones, so a reader could skip rows; "
            "set replica_preserve_commit_order = ON on it, or read from the primary"
        )
    return log_queries.end_of_log(database)


def identity(database: Database) -> Log:
    """Return the identity of the log; its id is empty if nothing has entered the log."""
    found = database.rows(f"SELECT log_id, epoch FROM {SEQUENCER}")
    return Log(*found[0]) if found else Log("", 0)


def lowest(database: Database, above: int = 0) -> int | None:
    """Return the lowest offset above another one that is still in the log, or None."""
    (first,) = database.row(f"SELECT MIN(`offset`) FROM {LOG} WHERE `offset` > %s", (above,))
    return None if first is None else int(first)


def collected(database: Database, topics: Sequence[str] | None) -> int:
    """Return the highest offset that GC has removed from these topics (None: from any), or 0."""
    if topics is not None and not topics:
        return 0
    among = "" if topics is None else f" WHERE topic IN ({', '.join(['%s'] * len(topics))})"
    (offset,) = database.row(f"SELECT COALESCE(MAX(collected_offset), 0) FROM {COLLECTED}{among}", topics or ())
    return int(offset)


def milliseconds(moment: datetime.datetime) -> int:
    """Return an aware time as epoch milliseconds, rounded down."""
    return (moment - EPOCH) // datetime.timedelta(milliseconds=1)


def first_since(database: Database, moment: datetime.datetime) -> int:
    """Return the lowest offset from which all messages entered the log at a time or later, or the end plus one."""
    return log_queries.first_since(database, milliseconds(moment))


def between(database: Database, since: int, before: int) -> tuple[int, int]:
    """Return a first and a last offset, outside of which no message entered the log between two times.

    Args:
        database: A connection.
        since: The first time, in epoch milliseconds.
        before: The time after the last one; ``reading.NEVER``: any.
    """
    first = 0 if since <= 0 else log_queries.first_since(database, since - CLOCK_STEP)
    last = NEVER if before == NEVER else log_queries.first_since(database, before + CLOCK_STEP) - 1
    return first, last


@dataclass(frozen=True, slots=True)
class Range:
    """What a batch reads: the offsets above ``above``, up to ``up_to``.

    Attributes:
        above: The offset before the first one.
        up_to: The last offset.
        watch: GC must not have removed anything above this offset.
        floors: For a start by topic, as in ``reading.Query.floors``.
        ceilings: For an end by topic, as in ``reading.Query.ceilings``.
    """

    above: int
    up_to: int
    watch: int
    floors: tuple[tuple[str, int, int], ...] = ()
    ceilings: tuple[tuple[str, int], ...] = ()


def resolved(database: Database, options: SourceOptions) -> SourceOptions:
    """Return options with the topics that the pattern matches now, including those that GC has emptied."""
    if options.pattern is None:
        return options
    emptied = (topic for (topic,) in database.rows(f"SELECT topic FROM {COLLECTED}"))
    names = {*log_queries.all_topics(database), *emptied}
    topics = tuple(sorted(name for name in names if re.fullmatch(options.pattern, name)))
    return replace(options, topics=topics, pattern=None)


def warn_of_unknown_topics(database: Database, topics: Sequence[str] | None) -> None:
    """Warn of topics that never had a message and have no consumer group, and name the most similar topic."""
    hint = database.force_index(BY_PARTITION)
    absent = [
        topic
        for topic in topics or ()
        if not database.rows(f"SELECT 1 FROM {LOG}{hint} WHERE topic = %s LIMIT 1", (topic,))
    ]
    if not absent:
        return
    known = {*log_queries.all_topics(database)}
    for table in (COLLECTED, GROUPS):
        known |= {topic for (topic,) in database.rows(f"SELECT topic FROM {table}")}
    for topic in absent:
        if topic not in known:
            nearest = difflib.get_close_matches(topic, sorted(known), 1)
            advice = f"; did you mean {nearest[0]!r}?" if nearest else ""
            warnings.warn(f"topic {topic!r} has no messages and no consumer group{advice}", stacklevel=2)


def batch(database: Database, options: SourceOptions) -> Range:
    """Return the range of a batch.

    Args:
        database: A connection.
        options: The options, ``resolved``.

    Raises:
        DataLossError: GC has removed messages that were published at or after ``startingTimestamp``.
        PipelineError: The server is a replica on which the log is not final.
    """
    last = highest(database)
    above, floors = _start(database, options, last)
    ceilings: tuple[tuple[str, int], ...] = ()
    if isinstance(options.end, tuple):
        ceilings = tuple((topic, before(database, edge, last)) for topic, edge in options.end)
        up_to = max(offset for _, offset in ceilings)
    else:
        up_to = before(database, options.end, last)
    if options.start == "earliest":
        # The rows that are in the log now are complete unless GC removes more while they are read.
        watch = max(above, collected(database, options.topics))
    else:
        watch = above
        _check_moment(database, options)
    return Range(above, min(last, up_to), watch, floors, ceilings)


def initial(database: Database, options: SourceOptions) -> dict[str, Any]:
    """Return the initial offset of a new stream.

    Args:
        database: A connection.
        options: The options, ``resolved``.

    Raises:
        DataLossError: GC has removed messages that were published at or after ``startingTimestamp``.
        PipelineError: The start is beyond the end of the log.
    """
    last = highest(database)
    above, floors = _start(database, options, last)
    furthest = max([above, *(floor for _, floor, _ in floors)])
    if furthest > last:
        raise log_is_behind(furthest, last)
    _check_moment(database, options)
    start: dict[str, Any] = {"offset": above}
    if options.start == "earliest":
        start["collected"] = collected(database, options.topics)
    if floors:
        start["starts"] = {topic: list(places) for topic, *places in floors}
    return moved(start, above)


def _start(database: Database, options: SourceOptions, last: int) -> tuple[int, tuple[tuple[str, int, int], ...]]:
    """Return the offset before the first one to read and, for a start by topic, the floor of each topic."""
    if not isinstance(options.start, tuple):
        return before(database, options.start, last), ()
    floors = []
    for topic, edge in options.start:
        above = before(database, edge, last)
        floors.append((topic, above, max(above, collected(database, [topic])) if edge == "earliest" else above))
    return min(above for _, above, _ in floors), tuple(floors)


def before(database: Database, edge: Edge, last: int) -> int:
    """Return the offset just before an edge.

    Args:
        database: A connection.
        edge: The edge.
        last: The end of the log, as the caller has read it.
    """
    if edge == "latest":
        return last
    if edge == "earliest":
        first = lowest(database)
        return last if first is None else first - 1
    if isinstance(edge, datetime.datetime):
        return min(last, first_since(database, edge) - 1)  # the log may have grown since
    return max(0, edge - 1)


def _check_moment(database: Database, options: SourceOptions) -> None:
    """Raise an error if GC has removed messages after the start time: a time finds only rows that are left."""
    if not isinstance(options.start, datetime.datetime) or not options.fail_on_data_loss:
        return
    among = "" if options.topics is None else f" AND topic IN ({', '.join(['%s'] * len(options.topics))})"
    lost = database.rows(
        f"SELECT topic, collected_offset FROM {COLLECTED} WHERE published_at >= %s{among} "
        "ORDER BY collected_offset DESC LIMIT 1",
        (milliseconds(options.start), *(options.topics or ())),
    )
    if lost:
        raise DataLossError(
            f"topic {lost[0][0]!r}: GC has removed messages of {options.start.isoformat()} or later, up to offset "
            f"{lost[0][1]}; read them from the archive, or set failOnDataLoss to false to skip them"
        )


def after_rows(database: Database, above: int, rows: int, last: int) -> int:
    """Return an end for a batch of at most ``rows`` rows after ``above``.

    It counts offsets, so the batch may have fewer rows. A gap at its beginning is not counted.
    """
    first = lowest(database, above)
    return last if first is None else min(last, first - 1 + rows)


def moved(start: dict[str, Any], to: int) -> dict[str, Any]:
    """Return the next offset of a stream. ``collected`` and ``starts`` are dropped once the stream has passed them."""
    end: dict[str, Any] = {"offset": to}
    if start.get("collected", 0) > to:
        end["collected"] = start["collected"]
    starts = {topic: places for topic, places in start.get("starts", {}).items() if max(places) > to}
    return {**end, "starts": starts} if starts else end


def floors_of(start: dict[str, Any]) -> tuple[tuple[str, int, int], ...]:
    """Return the floors of topics that are in the offset of a stream."""
    return tuple((topic, above, watch) for topic, (above, watch) in start.get("starts", {}).items())


def log_is_behind(above: int, last: int) -> PipelineError:
    """Return the error for a stream that has read more than the log contains."""
    return PipelineError(
        f"offset {above} is beyond the log's end, {last}: this is another database, or it was restored from a backup"
    )

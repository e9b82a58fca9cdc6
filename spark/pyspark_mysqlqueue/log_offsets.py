"""Find the ends of the log and the offsets of times."""

from __future__ import annotations

import datetime
from collections.abc import Sequence

from pyspark_mysqlqueue.databases import Database
from pyspark_mysqlqueue.errors import DataLossError, PipelineError
from pyspark_mysqlqueue.log_schema import COLLECTED, LOG, SEQUENCER, Log
from pyspark_mysqlqueue.options import Edge, SourceOptions
from pyspark_mysqlqueue.shared import log_queries

EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.timezone.utc)


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
    """Return the identity of the log.

    Raises:
        PipelineError: It has none.
    """
    found = database.rows(f"SELECT log_id, 0 FROM {SEQUENCER}")
    if not found or not found[0][0]:
        raise PipelineError(f"the log has no id in the table {SEQUENCER}: run manage.py migrate")
    return Log(str(found[0][0]), int(found[0][1]))


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


def batch(database: Database, options: SourceOptions) -> tuple[int, int, int]:
    """Return the range of a batch.

    Returns:
        The offset before its first, its last offset, and the offset above which GC must not have removed anything.

    Raises:
        DataLossError: GC has removed messages that were published at or after ``startOffset``.
        PipelineError: The server is a replica on which the log is not final.
    """
    last = highest(database)
    above = before(database, options.start, last)
    up_to = last if options.end == "latest" else min(last, before(database, options.end, last))
    if options.start == "earliest":
        # The rows that are in the log now are complete unless GC removes more while they are read.
        return above, up_to, max(above, collected(database, options.topics))
    _check_moment(database, options)
    return above, up_to, above


def initial(database: Database, options: SourceOptions) -> dict[str, int]:
    """Return the initial offset of a new stream.

    Raises:
        DataLossError: GC has removed messages that were published at or after ``startOffset``.
        PipelineError: The stream has an ``endOffset``, or its start is beyond the end of the log.
    """
    if options.end != "latest":
        raise PipelineError(f"option endOffset={options.end!r}: a stream has no end; use a batch query")
    last = highest(database)
    above = before(database, options.start, last)
    if above > last:
        raise log_is_behind(above, last)
    _check_moment(database, options)
    if options.start != "earliest":
        return {"offset": above}
    return moved({"offset": above, "collected": collected(database, options.topics)}, above)


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


def moved(start: dict[str, int], to: int) -> dict[str, int]:
    """Return the next offset of a stream. ``collected`` is dropped once the stream has passed it."""
    floor = start.get("collected", 0)
    return {"offset": to} if floor <= to else {"offset": to, "collected": floor}


def log_is_behind(above: int, last: int) -> PipelineError:
    """Return the error for a stream that has read more than the log contains."""
    return PipelineError(
        f"offset {above} is beyond the log's end, {last}: this is another database, or it was restored from a backup"
    )

"""Where the log begins and ends, and where a moment is in it."""

from __future__ import annotations

import datetime
from collections.abc import Sequence

from django_mysqlqueue import log_queries
from django_mysqlqueue.pipeline.databases import Database
from django_mysqlqueue.pipeline.errors import DataLossError, PipelineError
from django_mysqlqueue.pipeline.log_schema import COLLECTED, LOG
from django_mysqlqueue.pipeline.options import Edge, SourceOptions

EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)


def highest(database: Database) -> int:
    """The highest offset that is or was in the log: all up to it is final.

    Raises:
        PipelineError: a replica on which that does not hold.
    """
    if not database.keeps_order():
        raise PipelineError(
            "this server is a replica that may show later messages before earlier ones: rows would be passed over; set "
            "replica_preserve_commit_order = ON there, or read from the primary"
        )
    return log_queries.end_of_log(database)


def lowest(database: Database, above: int = 0) -> int | None:
    """The first offset above one that the log still holds."""
    (first,) = database.row(f"SELECT MIN(`offset`) FROM {LOG} WHERE `offset` > %s", (above,))
    return None if first is None else int(first)


def collected(database: Database, topics: Sequence[str] | None) -> int:
    """The highest offset that GC has removed from these topics; 0: it has removed nothing."""
    if topics is not None and not topics:
        return 0
    among = "" if topics is None else f" WHERE topic IN ({', '.join(['%s'] * len(topics))})"
    (offset,) = database.row(f"SELECT COALESCE(MAX(collected_offset), 0) FROM {COLLECTED}{among}", topics or ())
    return int(offset)


def milliseconds(moment: datetime.datetime) -> int:
    return (moment - EPOCH) // datetime.timedelta(milliseconds=1)


def first_since(database: Database, moment: datetime.datetime) -> int:
    """The lowest offset from which on all messages entered the log at a moment or later, or one above its end."""
    return log_queries.first_since(database, milliseconds(moment))


def batch(database: Database, options: SourceOptions) -> tuple[int, int, int]:
    """What a batch reads: above which offset, up to which, and above which nothing may have been collected."""
    last = highest(database)
    above = before(database, options.start, last)
    up_to = last if options.end == "latest" else min(last, before(database, options.end, last))
    if options.start == "earliest":
        # What is there now is complete unless GC goes further while it is read.
        return above, up_to, max(above, collected(database, options.topics))
    _check_moment(database, options)
    return above, up_to, above


def initial(database: Database, options: SourceOptions) -> dict[str, int]:
    """Where a new stream begins."""
    if options.end != "latest":
        raise PipelineError(f"option endOffset={options.end!r}: a stream has no end; read a batch")
    last = highest(database)
    above = before(database, options.start, last)
    if above > last:
        raise log_is_behind(above, last)
    _check_moment(database, options)
    if options.start != "earliest":
        return {"offset": above}
    return moved({"offset": above, "collected": collected(database, options.topics)}, above)


def before(database: Database, edge: Edge, last: int) -> int:
    """The offset just before an edge; ``last`` is the end of the log as its caller has read it."""
    if edge == "latest":
        return last
    if edge == "earliest":
        first = lowest(database)
        return last if first is None else first - 1
    if isinstance(edge, datetime.datetime):
        return min(last, first_since(database, edge) - 1)  # the log may have grown since
    return max(0, edge - 1)


def _check_moment(database: Database, options: SourceOptions) -> None:
    """A moment is found among what is left: what came since and is gone must not be passed over."""
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
            f"{lost[0][1]}; read them from the archive, or set failOnDataLoss to false to go on with what is left"
        )


def after_rows(database: Database, above: int, rows: int, last: int) -> int:
    """An offset with at most that many rows between it and ``above``: it counts offsets; a gap at first is skipped."""
    first = lowest(database, above)
    return last if first is None else min(last, first - 1 + rows)


def moved(start: dict[str, int], to: int) -> dict[str, int]:
    """The next offset of a stream; what GC had collected at its beginning is forgotten once that is behind."""
    floor = start.get("collected", 0)
    return {"offset": to} if floor <= to else {"offset": to, "collected": floor}


def log_is_behind(above: int, last: int) -> PipelineError:
    return PipelineError(
        f"offset {above} is beyond the log's end, {last}: it is another database, or an older state of it was restored"
    )

"""The manifest: the archived ranges and their files."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field

from pyspark_mysqlqueue.checksums import Sum
from pyspark_mysqlqueue.databases import Database
from pyspark_mysqlqueue.errors import PipelineError
from pyspark_mysqlqueue.log_schema import SEGMENTS
from pyspark_mysqlqueue.reading import Span

SPARE = 1000
"""Bytes that are reserved in a statement for everything except the names of files."""


@dataclass(frozen=True, slots=True)
class File:
    """A Parquet file with rows of one topic that were published on one day (UTC), in offset order."""

    path: str
    """The path below that of the segment."""
    topic: str
    day: str
    rows: int
    checksum: int
    lo: int
    """The first offset."""
    hi: int
    """The last offset."""
    size: int
    """The size in bytes."""

    @property
    def sum(self) -> Sum:
        """The number of rows and their checksum."""
        return Sum(self.rows, self.checksum)


@dataclass(frozen=True, slots=True)
class Segment:
    """A range of offsets and its files."""

    lo: int
    """The first offset of the range."""
    hi: int
    """The last offset of the range."""
    rows: int
    checksum: int
    path: str
    """The path below the archive's root."""
    files: tuple[File, ...]
    archived_at: int = field(default=0, compare=False)
    """When the range was committed, in epoch milliseconds. The database sets it."""

    @property
    def sum(self) -> Sum:
        """The number of rows and their checksum."""
        return Sum(self.rows, self.checksum)

    @property
    def last_day(self) -> str:
        """The last day on which a message of the segment was published; '' if it has no messages."""
        return max((file.day for file in self.files), default="")

    @property
    def size(self) -> int:
        """The size of the files in bytes."""
        return sum(file.size for file in self.files)


def segments(database: Database) -> list[Segment]:
    """Return all segments in offset order."""
    rows = database.rows(f"SELECT lo, hi, `rows`, checksum, path, files, archived_at FROM {SEGMENTS} ORDER BY lo")
    return [
        Segment(lo, hi, count, checksum, path, tuple(File(**one) for one in json.loads(files)), archived_at)
        for lo, hi, count, checksum, path, files, archived_at in rows
    ]


def archived(known: Sequence[Segment]) -> int:
    """Return the end of the first chain of segments without a gap: all offsets up to it are, or were, archived."""
    end = 0
    for number, segment in enumerate(known):
        if number and segment.lo != end + 1:
            break
        end = segment.hi
    return end


def missing(known: Sequence[Segment], last: int) -> list[Span]:
    """Return the spans up to an offset that are not archived, in offset order: gaps, and the end of the log."""
    spans = []
    above = known[0].lo - 1 if known else 0
    for segment in known:
        spans.append(Span(above, segment.lo - 1))
        above = segment.hi
    spans.append(Span(above, last))
    return [span for span in spans if len(span)]


def text_bytes(files: Iterable[File]) -> int:
    """Return the size of these files' description in a segment's row, in bytes."""
    return len(_text(files).encode())


def _text(files: Iterable[File]) -> str:
    return json.dumps([asdict(file) for file in files], ensure_ascii=False, separators=(",", ":"))


def add(database: Database, segment: Segment) -> None:
    """Commit a range.

    Raises:
        PipelineError: Another run has archived some of the offsets meanwhile, or the row would be too long. Nothing was
            stored.
    """
    with database.transaction():
        _insert(database, segment)


def replace(database: Database, old: Sequence[Segment], new: Segment) -> None:
    """Replace segments by one, in one transaction.

    Raises:
        PipelineError: Another run has changed one of the segments meanwhile. Nothing was changed.
    """
    with database.transaction():
        remove_rows(database, old)
        _insert(database, new)


def remove(database: Database, old: Sequence[Segment]) -> None:
    """Remove segments from the manifest, all or none.

    Raises:
        PipelineError: Another run has changed one of the segments meanwhile. Nothing was changed.
    """
    with database.transaction():
        remove_rows(database, old)


def remove_rows(database: Database, old: Iterable[Segment]) -> None:
    """Delete the rows of segments in the caller's transaction.

    Raises:
        PipelineError: Another run has changed one of the segments meanwhile.
    """
    for segment in old:
        if database.execute(f"DELETE FROM {SEGMENTS} WHERE lo = %s AND path = %s", (segment.lo, segment.path)) != 1:
            raise PipelineError(f"offsets {segment.lo} to {segment.hi}: another run has changed the segment meanwhile")


def _insert(database: Database, segment: Segment) -> None:
    # Two runs would both begin at the end of the manifest, so its primary key lets only one of them commit.
    overlapping = database.rows(
        f"SELECT lo, hi FROM {SEGMENTS} WHERE lo <= %s AND hi >= %s LIMIT 1", (segment.hi, segment.lo)
    )
    if overlapping:
        raise PipelineError(f"offsets {segment.lo} to {segment.hi}: another run has archived some of them meanwhile")
    files = _text(segment.files)
    # Quotation marks are escaped, which can double the length of a name.
    if 2 * len(files.encode()) > (most := database.max_statement_bytes() - SPARE):
        raise PipelineError(
            f"offsets {segment.lo} to {segment.hi}: the names of {len(segment.files)} files take {len(files.encode())} "
            f"bytes, but the server's max_allowed_packet allows {most // 2}: raise it, or lower --task-offsets and "
            "--segment-offsets"
        )
    try:
        database.execute(
            f"INSERT INTO {SEGMENTS} (lo, hi, `rows`, checksum, path, files, archived_at) "
            f"VALUES (%s, %s, %s, %s, %s, %s, {database.now_ms})",
            (segment.lo, segment.hi, segment.rows, segment.checksum, segment.path, files),
        )
    except Exception as error:
        if database.is_duplicate(error):
            raise PipelineError(
                f"offsets {segment.lo} to {segment.hi}: another run has archived some of them meanwhile"
            ) from error
        raise

"""The manifest: which ranges the archive holds, and in which files."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field

from django_mysqlqueue.pipeline.checksums import Sum
from django_mysqlqueue.pipeline.databases import Database
from django_mysqlqueue.pipeline.errors import PipelineError
from django_mysqlqueue.pipeline.log_schema import SEGMENTS
from django_mysqlqueue.pipeline.reading import Span

SPARE = 1000
"""Bytes of a statement besides the names of files."""


@dataclass(frozen=True, slots=True)
class File:
    """One Parquet file: rows of one topic and one day (UTC, of ``published_at``), in offset order."""

    path: str
    """Below the segment's path."""
    topic: str
    day: str
    rows: int
    checksum: int
    lo: int
    hi: int
    size: int
    """Bytes."""

    @property
    def sum(self) -> Sum:
        return Sum(self.rows, self.checksum)


@dataclass(frozen=True, slots=True)
class Segment:
    """A range of offsets, both ends included, and its files."""

    lo: int
    hi: int
    rows: int
    checksum: int
    path: str
    """Below the archive's root."""
    files: tuple[File, ...]
    archived_at: int = field(default=0, compare=False)
    """Epoch milliseconds of the database's clock; set by it."""

    @property
    def sum(self) -> Sum:
        return Sum(self.rows, self.checksum)

    @property
    def last_day(self) -> str:
        """The latest day of its messages; '' if it has none."""
        return max((file.day for file in self.files), default="")

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files)


def segments(database: Database) -> list[Segment]:
    """Every segment in offset order."""
    rows = database.rows(f"SELECT lo, hi, `rows`, checksum, path, files, archived_at FROM {SEGMENTS} ORDER BY lo")
    return [
        Segment(lo, hi, count, checksum, path, tuple(File(**one) for one in json.loads(files)), archived_at)
        for lo, hi, count, checksum, path, files, archived_at in rows
    ]


def archived(known: Sequence[Segment]) -> int:
    """All offsets up to this one are, or were, in the archive: the end of the first unbroken chain of segments."""
    end = 0
    for number, segment in enumerate(known):
        if number and segment.lo != end + 1:
            break
        end = segment.hi
    return end


def missing(known: Sequence[Segment], last: int) -> list[Span]:
    """What the archive lacks up to an offset, lowest first: holes between segments, and what comes after them."""
    spans = []
    above = known[0].lo - 1 if known else 0
    for segment in known:
        spans.append(Span(above, segment.lo - 1))
        above = segment.hi
    spans.append(Span(above, last))
    return [span for span in spans if len(span)]


def text_bytes(files: Iterable[File]) -> int:
    """How long the text of these files is in a segment's row."""
    return len(_text(files).encode())


def _text(files: Iterable[File]) -> str:
    return json.dumps([asdict(file) for file in files], ensure_ascii=False, separators=(",", ":"))


def add(database: Database, segment: Segment) -> None:
    """Commits a range.

    Raises:
        PipelineError: another run has archived some of it meanwhile; nothing was stored.
    """
    with database.transaction():
        _insert(database, segment)


def replace(database: Database, old: Sequence[Segment], new: Segment) -> None:
    """Puts one segment into the place of several, all at once.

    Raises:
        PipelineError: one of them is no longer there as it was; nothing was changed.
    """
    with database.transaction():
        remove_rows(database, old)
        _insert(database, new)


def remove(database: Database, old: Sequence[Segment]) -> None:
    """Takes segments out of the manifest, all or none."""
    with database.transaction():
        remove_rows(database, old)


def remove_rows(database: Database, old: Iterable[Segment]) -> None:
    for segment in old:
        if database.execute(f"DELETE FROM {SEGMENTS} WHERE lo = %s AND path = %s", (segment.lo, segment.path)) != 1:
            raise PipelineError(f"segment {segment.lo} to {segment.hi}: another run has changed it meanwhile")


def _insert(database: Database, segment: Segment) -> None:
    # The primary key decides between two runs: both would begin where the manifest ended.
    overlapping = database.rows(
        f"SELECT lo, hi FROM {SEGMENTS} WHERE lo <= %s AND hi >= %s LIMIT 1", (segment.hi, segment.lo)
    )
    if overlapping:
        raise PipelineError(f"offsets {segment.lo} to {segment.hi}: another run has archived some of them meanwhile")
    files = _text(segment.files)
    # Each quotation mark is escaped, and a name may be of nothing else.
    if 2 * len(files.encode()) > (most := database.max_statement_bytes() - SPARE):
        raise PipelineError(
            f"offsets {segment.lo} to {segment.hi}: the names of {len(segment.files)} files take {len(files.encode())} "
            f"bytes, and the server's max_allowed_packet allows {most // 2}: raise it, or lower --task-offsets and "
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

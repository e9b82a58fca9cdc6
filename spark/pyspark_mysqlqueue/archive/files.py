"""Write, read back and compare the archive's files. This runs in Spark's tasks; no row passes through the JVM."""

from __future__ import annotations

import contextlib
import os
import re
import time
import uuid
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.fs
import pyarrow.parquet as pq

from pyspark_mysqlqueue import checksums, databases
from pyspark_mysqlqueue.archive.manifest import File
from pyspark_mysqlqueue.batches import Selection, schema
from pyspark_mysqlqueue.checksums import Sum
from pyspark_mysqlqueue.databases import Place
from pyspark_mysqlqueue.errors import PipelineError
from pyspark_mysqlqueue.log_schema import COLUMNS, NAMES
from pyspark_mysqlqueue.reading import RECONNECT, TRIES, Query, Span, rows_of

SCHEMA = schema(COLUMNS, exact=True)
EVERYTHING = Selection(NAMES)
FLUSH_BYTES = 64 * 2**20
"""Bytes of rows that a task collects before it writes them, one file per topic and day."""
GROUP_ROWS = 1_000_000
"""Maximum number of rows in a row group of a merged file."""
READ_ROWS = 65_536
"""Number of rows that are read at a time to compute a checksum."""
CHECK_OFFSETS = 10_000
"""Number of offsets whose checksum the server computes in one statement."""
UNIQUE = ("offset", "id", "payload", "expires_at", "created_at", "published_at")
REPEATING = [name for name in NAMES if name not in UNIQUE]
"""Columns that Parquet stores as dictionaries."""
DAY_MS = 86_400_000
LONGEST_NAME = 180
"""Maximum length of a topic in the name of a folder."""
OURS = re.compile(r"[0-9a-f]{12}/\d{19}-\d{19}-[0-9a-f]{12}/topic=[^/]*/day=[^/]*/[0-9a-f]{32}\.parquet")
"""The form of a file's path below the archive's root."""


class Mismatch(PipelineError):
    """The files do not contain the same rows as the log or the manifest."""


@dataclass(frozen=True, slots=True)
class Root:
    """The root of an archive: a folder, or a URI that pyarrow supports."""

    uri: str

    def __post_init__(self) -> None:
        """Make a relative path absolute, because workers may run in another folder.

        Raises:
            PipelineError: The URI contains a password, which Spark would pickle and print, or pyarrow does not support
                its form.
        """
        if "://" not in self.uri:
            if self.uri.startswith("file:"):
                raise PipelineError(f"archive {self.uri!r}: use a path, or a URI that begins with file://")
            object.__setattr__(self, "uri", str(Path(self.uri).absolute()))
        elif urlsplit(self.uri).password is not None:
            raise PipelineError(
                f"archive {urlsplit(self.uri).scheme}://…: the URI has a password, which Spark would pickle and print; "
                "configure it where the file system looks for it (environment, profile or role)"
            )

    def open(self) -> Folder:
        """Connect to the file system.

        Raises:
            PipelineError: pyarrow does not support the URI.
        """
        if "://" not in self.uri:
            return Folder(pyarrow.fs.LocalFileSystem(), self.uri, is_local=True)
        try:
            filesystem, path = pyarrow.fs.FileSystem.from_uri(self.uri)
        except (OSError, ValueError, pa.ArrowInvalid) as error:
            raise PipelineError(f"archive {self.uri!r}: {error}") from error
        return Folder(filesystem, path, is_local=isinstance(filesystem, pyarrow.fs.LocalFileSystem))

    def spark_path(self, relative: str) -> str:
        """Return a path for Spark, which expects it without percent-encoding and with glob characters escaped."""
        if "://" not in self.uri or self.uri.startswith("file://"):
            root = f"file://{self.open().path}"
        else:
            # Hadoop calls pyarrow's scheme s3 s3a. The query string is for pyarrow only.
            root = re.sub(r"^s3://", "s3a://", self.uri.partition("?")[0].rstrip("/"))
        return re.sub(r"([\\{}\[\]*?])", r"\\\1", f"{root}/{relative}")


@dataclass(frozen=True)
class Folder:
    """An open root."""

    filesystem: Any
    path: str
    is_local: bool

    def full(self, relative: str) -> str:
        """Return the full path of a file below the root."""
        return f"{self.path}/{relative}"

    @contextlib.contextmanager
    def create(self, relative: str) -> Iterator[Any]:
        """Create a file and flush it to disk at the end of the block: the manifest's row must not outlive its files."""
        full = self.full(relative)
        parent = os.path.dirname(full)
        top = len(self.path)
        if self.is_local and not os.path.isdir(self.path):  # the first file: also flush the parents of the root
            top = len(str(next(one for one in Path(self.path).parents if one.is_dir())))
        self.filesystem.create_dir(parent, recursive=True)
        if not self.is_local:
            with self.filesystem.open_output_stream(full) as stream:
                yield stream
            return
        with open(full, "xb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        while len(parent) >= top:
            _fsync_folder(parent)
            parent, below = os.path.dirname(parent), parent
            if parent == below:
                break

    def read(self, relative: str) -> pq.ParquetFile:
        """Open a file for reading."""
        return pq.ParquetFile(self.full(relative), filesystem=self.filesystem)

    def size(self, relative: str) -> int:
        """Return the size of a file in bytes, or -1 if it does not exist."""
        return self.sizes([relative])[0]

    def sizes(self, relative: Sequence[str]) -> list[int]:
        """Return the sizes of files in bytes, in one request; -1 for a file that does not exist."""
        found = self.filesystem.get_file_info([self.full(one) for one in relative])
        return [-1 if one.size is None else int(one.size) for one in found]


def _fsync_folder(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def topic_folder(topic: str) -> str:
    """Return the name of a topic's folder. It is informational: readers take topics from the files' rows."""
    name = quote(topic, safe="")
    return f"topic={name}" if len(name) <= LONGEST_NAME else f"topic={name[:LONGEST_NAME]}~{zlib.crc32(topic.encode())}"


def day_name(day: int) -> str:
    """Return a day, counted from the epoch, as ``2026-11-22``, or as ``epoch+n`` if it has no date."""
    try:
        return time.strftime("%Y-%m-%d", time.gmtime(day * 86400)) if 0 <= day < 2_932_897 else f"epoch{day:+d}"
    except (OverflowError, ValueError, OSError):
        return f"epoch{day:+d}"


def write_span(place: Place, root: Root, segment: str, span: Span) -> list[File]:
    """Copy a span of the log into new files below a segment's path, and compare them with the log.

    Rows and the server's checksum come from the same snapshot, so that a dead letter that is redriven meanwhile makes
    no difference.

    Args:
        place: The queue's database.
        root: The archive.
        segment: The segment's path.
        span: The offsets to copy.

    Raises:
        Mismatch: The files do not contain the same rows as the log.
    """
    failures = 0
    while True:
        try:
            return _write_span(place, root.open(), segment, span)
        except Exception as error:
            failures += 1
            if failures == TRIES or not databases.is_lost(error):
                raise
            time.sleep(RECONNECT.delay(failures))


def _write_span(place: Place, folder: Folder, segment: str, span: Span) -> list[File]:
    files: list[File] = []
    waiting: list[pa.RecordBatch] = []
    size = 0
    with place.connect() as database, database.snapshot():
        for rows in rows_of(database, Query(NAMES), EVERYTHING, span):
            waiting.append(EVERYTHING.batch(rows, exact=True))
            size += waiting[-1].nbytes
            if size >= FLUSH_BYTES:
                files += _flush(folder, segment, waiting)
                waiting, size = [], 0
        files += _flush(folder, segment, waiting)
        # In pieces: a single statement could take minutes, longer than NETWORK_TIMEOUT.
        pieces = span.split(-(-len(span) // CHECK_OFFSETS))
        expected = sum((checksums.of_log(database, piece) for piece in pieces), Sum())
    found = sum((file.sum for file in files), Sum())
    if found != expected:
        raise Mismatch(
            f"offsets {span.above + 1} to {span.up_to}: the log has {expected.rows} rows with checksum "
            f"{expected.checksum}, but the files have {found.rows} with {found.checksum}; nothing was committed"
        )
    return files


def _flush(folder: Folder, segment: str, waiting: Sequence[pa.RecordBatch]) -> list[File]:
    if not waiting:
        return []
    table = pa.Table.from_batches(waiting)
    return [
        write_file(folder, segment, topic, day_name(day), (piece,)) for topic, day, piece in _by_topic_and_day(table)
    ]


def _by_topic_and_day(table: pa.Table) -> Iterator[tuple[str, int, pa.Table]]:
    """Yield the rows of each topic and day, in their order."""
    days = pc.divide(table["published_at"].cast(pa.int64()), DAY_MS)
    keys = pa.table({"topic": table["topic"], "day": days, "offset": table["offset"]})
    groups = keys.group_by(["topic", "day"]).aggregate([([], "count_all")])
    if groups.num_rows > 1:
        by = [("topic", "ascending"), ("day", "ascending")]
        table = table.take(pc.sort_indices(keys, sort_keys=[*by, ("offset", "ascending")]))
        groups = groups.take(pc.sort_indices(groups, sort_keys=by))
    start = 0
    for group in groups.to_pylist():
        yield group["topic"], group["day"], table.slice(start, group["count_all"])
        start += group["count_all"]


def write_file(folder: Folder, segment: str, topic: str, day: str, tables: Iterator[Any] | Sequence[Any]) -> File:
    """Write a file with a unique name, read it back, and return its description.

    Args:
        folder: The open root.
        segment: The segment's path.
        topic: The topic of all rows.
        day: The day on which all rows were published.
        tables: The rows, in offset order.
    """
    path = f"{topic_folder(topic)}/day={day}/{uuid.uuid4().hex}.parquet"
    relative = f"{segment}/{path}"
    lo, hi = 0, 0
    with (
        folder.create(relative) as stream,
        pq.ParquetWriter(stream, SCHEMA, compression="zstd", use_dictionary=REPEATING) as writer,
    ):
        for table in tables:
            if not table.num_rows:
                continue
            writer.write(table)
            lo = lo or table["offset"][0].as_py()
            hi = table["offset"][-1].as_py()
    found = read_sum(folder, relative)
    return File(path, topic, day, found.rows, found.checksum, lo, hi, folder.size(relative))


def read_sum(folder: Folder, relative: str) -> Sum:
    """Read a whole file and return its checksum.

    Raises:
        Mismatch: The file does not have the log's columns.
    """
    with folder.read(relative) as file:
        if not file.schema_arrow.equals(SCHEMA):
            raise Mismatch(f"file {relative!r}: its columns differ from those of the log")
        # By row group, whose size in bytes is limited. A batch across row groups would be limited in rows only.
        return sum(
            (
                checksums.of_batch(one)
                for number in range(file.num_row_groups)
                for one in file.iter_batches(READ_ROWS, row_groups=[number])
            ),
            Sum(),
        )


def gathered(tables: Iterable[pa.Table]) -> Iterator[pa.Table]:
    """Concatenate small tables into fewer large ones. Each becomes a row group, and readers pay for every row group.

    Large tables stay as they are, so that row groups do not grow with each merge.
    """
    waiting: list[pa.Table] = []
    size = rows = 0
    for table in tables:
        if waiting and (size + table.nbytes > FLUSH_BYTES or rows + len(table) > GROUP_ROWS):
            yield pa.concat_tables(waiting)
            waiting, size, rows = [], 0, 0
        waiting.append(table)
        size += table.nbytes
        rows += len(table)
    if waiting:
        yield pa.concat_tables(waiting)


def read_batches(folder: Folder, relative: str) -> Iterator[pa.Table]:
    """Yield the row groups of a file."""
    with folder.read(relative) as file:
        for number in range(file.num_row_groups):
            yield file.read_row_group(number)

"""The archive's files: written, read back and compared where the tasks run, without a way through the JVM."""

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

from django_mysqlqueue.pipeline import checksums, databases
from django_mysqlqueue.pipeline.archive.manifest import File
from django_mysqlqueue.pipeline.batches import Selection, schema
from django_mysqlqueue.pipeline.checksums import Sum
from django_mysqlqueue.pipeline.databases import Place
from django_mysqlqueue.pipeline.errors import PipelineError
from django_mysqlqueue.pipeline.log_schema import COLUMNS, NAMES
from django_mysqlqueue.pipeline.reading import RECONNECT, TRIES, Query, Span, rows_of

SCHEMA = schema(COLUMNS, exact=True)
EVERYTHING = Selection(NAMES)
FLUSH_BYTES = 64 * 2**20
"""Rows that a task keeps in memory before it writes them; one file of each topic and day at a time."""
GROUP_ROWS = 1_000_000
READ_ROWS = 65_536
CHECK_OFFSETS = 10_000
"""Offsets whose checksum the server computes in one statement."""
REPEATING = [name for name in NAMES if name not in ("offset", "id", "payload", "created_at", "published_at")]
"""Columns that Parquet keeps as dictionaries."""
DAY_MS = 86_400_000
LONGEST_NAME = 180
OURS = re.compile(r"[0-9a-f]{12}/\d{19}-\d{19}-[0-9a-f]{12}/topic=[^/]*/day=[^/]*/[0-9a-f]{32}\.parquet")
"""What the path of an archive's file looks like below the root."""


class Mismatch(PipelineError):
    """What was read back is not what the log holds."""


@dataclass(frozen=True, slots=True)
class Root:
    """Where the archive is: a folder, or a URI that pyarrow knows."""

    uri: str

    def __post_init__(self) -> None:
        """A relative path is that of the program: a worker may be elsewhere.

        Raises:
            PipelineError: a password in it would be pickled and printed; or it is a URI for others than pyarrow.
        """
        if "://" not in self.uri:
            if self.uri.startswith("file:"):
                raise PipelineError(f"archive {self.uri!r}: write the path alone, or file:// before it")
            object.__setattr__(self, "uri", str(Path(self.uri).absolute()))
        elif urlsplit(self.uri).password is not None:
            raise PipelineError(
                f"archive {urlsplit(self.uri).scheme}://…: has a password in it, which would be pickled and printed; "
                "put it where the file system looks for it (environment, profile, role)"
            )

    def open(self) -> Folder:
        if "://" not in self.uri:
            return Folder(pyarrow.fs.LocalFileSystem(), self.uri, is_local=True)
        try:
            filesystem, path = pyarrow.fs.FileSystem.from_uri(self.uri)
        except (OSError, ValueError, pa.ArrowInvalid) as error:
            raise PipelineError(f"archive {self.uri!r}: {error}") from error
        return Folder(filesystem, path, is_local=isinstance(filesystem, pyarrow.fs.LocalFileSystem))

    def spark_path(self, relative: str) -> str:
        """The path as Spark takes it: not percent-encoded as a URI is, and what would be a pattern escaped."""
        if "://" not in self.uri or self.uri.startswith("file://"):
            root = f"file://{self.open().path}"
        else:
            # Hadoop's name for what pyarrow calls s3; what stands after a question mark is for pyarrow.
            root = re.sub(r"^s3://", "s3a://", self.uri.partition("?")[0].rstrip("/"))
        return re.sub(r"([\\{}\[\]*?])", r"\\\1", f"{root}/{relative}")


@dataclass(frozen=True)
class Folder:
    """An open root."""

    filesystem: Any
    path: str
    is_local: bool

    def full(self, relative: str) -> str:
        return f"{self.path}/{relative}"

    @contextlib.contextmanager
    def create(self, relative: str) -> Iterator[Any]:
        """A new file, on disk when the block ends: the manifest's row must not outlive its files."""
        full = self.full(relative)
        parent = os.path.dirname(full)
        top = len(self.path)
        if self.is_local and not os.path.isdir(self.path):  # the first file: the root's own name must last too
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
        return pq.ParquetFile(self.full(relative), filesystem=self.filesystem)

    def size(self, relative: str) -> int:
        """Bytes of a file; -1: there is none."""
        return self.sizes([relative])[0]

    def sizes(self, relative: Sequence[str]) -> list[int]:
        """Bytes of files, asked for at once; -1: there is none."""
        found = self.filesystem.get_file_info([self.full(one) for one in relative])
        return [-1 if one.size is None else int(one.size) for one in found]


def _fsync_folder(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def topic_folder(topic: str) -> str:
    """A folder's name for any topic, for people and tools; readers take topics from the files."""
    name = quote(topic, safe="")
    return f"topic={name}" if len(name) <= LONGEST_NAME else f"topic={name[:LONGEST_NAME]}~{zlib.crc32(topic.encode())}"


def day_name(day: int) -> str:
    """A day since the epoch as ``2026-11-22``; years that no calendar has keep their number."""
    try:
        return time.strftime("%Y-%m-%d", time.gmtime(day * 86400)) if 0 <= day < 2_932_897 else f"epoch{day:+d}"
    except (OverflowError, ValueError, OSError):
        return f"epoch{day:+d}"


def write_span(place: Place, root: Root, segment: str, span: Span) -> list[File]:
    """Copies a span of the log into files of its own below a segment's path, and checks them.

    Rows and the server's checksum come from one snapshot, so that a dead letter
    which is redriven meanwhile makes no difference.

    Raises:
        Mismatch: the files do not hold what the log does.
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
        # In pieces: the server must not be silent for minutes.
        pieces = span.split(-(-len(span) // CHECK_OFFSETS))
        expected = sum((checksums.of_log(database, piece) for piece in pieces), Sum())
    found = sum((file.sum for file in files), Sum())
    if found != expected:
        raise Mismatch(
            f"offsets {span.above + 1} to {span.up_to}: the log has {expected.rows} rows with checksum "
            f"{expected.checksum}, the files {found.rows} with {found.checksum}; nothing was committed"
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
    """The table's pieces, each in the order that it had."""
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
    """Writes one file under a name that nobody else has, reads it back and says what it holds."""
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
    """Reads a file from its beginning to its end and computes its checksum."""
    with folder.read(relative) as file:
        if not file.schema_arrow.equals(SCHEMA):
            raise Mismatch(f"file {relative!r}: its columns are not those of the log")
        # A batch would reach over row groups, whose bytes are bounded; its rows alone are not.
        return sum(
            (
                checksums.of_batch(one)
                for number in range(file.num_row_groups)
                for one in file.iter_batches(READ_ROWS, row_groups=[number])
            ),
            Sum(),
        )


def gathered(tables: Iterable[pa.Table]) -> Iterator[pa.Table]:
    """Small tables as fewer large ones, each of which becomes a row group: readers pay for every one.

    A large one stays as it is, so that row groups do not grow from one merge to the next.
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
    """A file's rows in its order, a row group at a time."""
    with folder.read(relative) as file:
        for number in range(file.num_row_groups):
            yield file.read_row_group(number)

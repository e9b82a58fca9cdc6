"""Write, read back and compare the archive's files. Tasks run this; no row passes through the driver or the JVM."""

from __future__ import annotations

import datetime
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pyspark_mysqlqueue import checksums, databases
from pyspark_mysqlqueue.archive.root import Folder, Root
from pyspark_mysqlqueue.archive.table import FILE_SCHEMA, STATISTICS, File, speaking_of
from pyspark_mysqlqueue.batches import Selection
from pyspark_mysqlqueue.checksums import Sum
from pyspark_mysqlqueue.databases import Place
from pyspark_mysqlqueue.errors import PipelineError
from pyspark_mysqlqueue.log_schema import CHECKSUM, COLUMNS, LOG, NAMES, Log
from pyspark_mysqlqueue.reading import RECONNECT, TRIES, Query, Span, rows_of
from pyspark_mysqlqueue.shared.keys import lanes

EVERYTHING = Selection(NAMES, checksum=True)
FLUSH_BYTES = 64 * 2**20
"""Bytes of rows that a task collects before it writes them, one file per day."""
READ_ROWS = 65_536
"""Number of rows that are read back at a time."""
UNIQUE = ("offset", "id", "payload", "expires_at", "created_at", "published_at", CHECKSUM)
REQUIRED = set(FILE_SCHEMA.names) - {column.name for column in COLUMNS if column.nullable}
"""Columns that no row of a log lacks. A row of another program may."""
REPEATING = [name for name in FILE_SCHEMA.names if name not in UNIQUE]
"""Columns that Parquet stores as dictionaries."""


class Mismatch(PipelineError):
    """A file does not contain the same rows as the log."""


def write_span(place: Place, root: Root, log: Log, span: Span) -> list[File]:
    """Copy a span of the log into new files, and compare each row that is read back with the server's checksum.

    Args:
        place: The queue's database.
        root: The archive.
        log: The identity of the log.
        span: The offsets to copy.

    Raises:
        Mismatch: The files do not contain the same rows as the log.
    """
    failures = 0
    while True:
        try:
            with speaking_of(root):
                return _write_span(place, root.open(), log, span)
        except Exception as error:
            failures += 1
            if failures == TRIES or not databases.is_lost(error):
                raise
            time.sleep(RECONNECT.delay(failures))


def _write_span(place: Place, folder: Folder, log: Log, span: Span) -> list[File]:
    files: list[File] = []
    waiting: list[pa.RecordBatch] = []
    size = 0
    # One snapshot, so that a dead letter that is redriven meanwhile makes no difference.
    with place.connect() as database, database.snapshot():
        for rows in rows_of(database, Query(NAMES), EVERYTHING, span):
            waiting.append(EVERYTHING.batch(rows))
            size += waiting[-1].nbytes
            if size >= FLUSH_BYTES:
                files += _flush(folder, log, waiting)
                waiting, size = [], 0
        files += _flush(folder, log, waiting)
        (expected,) = database.row(
            f"SELECT COUNT(*) FROM {LOG}{database.force_index('PRIMARY')} WHERE `offset` > %s AND `offset` <= %s",
            (span.above, span.up_to),
        )
    found = sum(one.rows for file in files for one in file.sums.values())
    if found != expected:
        raise Mismatch(
            f"offsets {span.above + 1} to {span.up_to}: the log has {expected} rows, but the files have {found}; "
            "nothing was committed"
        )
    return files


def _flush(folder: Folder, log: Log, waiting: Sequence[pa.RecordBatch]) -> list[File]:
    if not waiting:
        return []
    table = pa.Table.from_batches(waiting)
    days = table["published_at"].cast(pa.date32())
    table = table.add_column(0, "log", pa.repeat(pa.scalar(log.id), len(table)))
    table = table.add_column(1, "epoch", pa.repeat(pa.scalar(log.epoch, pa.int64()), len(table)))
    return [
        write_file(folder, day, table.filter(pc.equal(days, pa.scalar(day, pa.date32()))))
        for day in sorted(pc.unique(days).to_pylist())
    ]


def write_file(folder: Folder, day: datetime.date, rows: pa.Table) -> File:
    """Write rows into a new file, by topic and offset, read them back, and return the file's description.

    Args:
        folder: The open root.
        day: The day on which all rows were published.
        rows: At least one row, with the columns of ``FILE_SCHEMA``.

    Raises:
        Mismatch: A row that was read back does not have its checksum.
    """
    if pc.count_distinct(rows["topic"]).as_py() > 1:
        rows = rows.sort_by([("topic", "ascending"), ("offset", "ascending")])
    path = f"day={day.isoformat()}/{uuid.uuid4().hex}.parquet"
    with (
        folder.create(path) as stream,
        pq.ParquetWriter(
            stream, FILE_SCHEMA, compression="zstd", use_dictionary=REPEATING, write_page_checksum=True
        ) as writer,
    ):
        writer.write(rows)
    sums, size = read_sums(folder, path), folder.sizes([path])[0]
    if (found := sum(one.rows for one in sums.values())) != len(rows):
        raise Mismatch(f"file {path}: {len(rows)} rows were written, but {found} are in it; nothing was committed")
    ranges = {name: pc.min_max(rows[name]).as_py() for name in STATISTICS}
    least, most = ({name: one[which] for name, one in ranges.items()} for which in ("min", "max"))
    return File(path, day, size, sums, least, most)


def read_sums(folder: Folder, path: str) -> dict[Log, Sum]:
    """Read a whole file, compare each row with its checksum, and return the rows and sums of each log.

    Raises:
        Mismatch: The file cannot be read or does not have the archive's columns, or a row does not have its checksum.
    """
    return merged(map(sums_of, verified(folder, path)))


def noted_sums(root: Root, path: str) -> dict[Log, Sum]:
    """Return the rows and sums of each log in a file as they are noted, without a comparison.

    Raises:
        Mismatch: The file cannot be read.
    """
    return merged(map(sums_of, batches(root.open(), path, ("log", "epoch", CHECKSUM))))


def verified(folder: Folder, path: str) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a file, each of which has its checksum.

    Raises:
        Mismatch: The file cannot be read or does not have the archive's columns, or a row does not have its checksum.
    """
    for batch in batches(folder, path):
        wrong = pc.index(pc.equal(checksums.of_rows(batch), batch[CHECKSUM]), False).as_py()
        if wrong >= 0:
            raise Mismatch(f"file {path}: the row of offset {batch['offset'][wrong]} does not have its checksum")
        yield batch


def batches(folder: Folder, path: str, columns: Sequence[str] = FILE_SCHEMA.names) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a file.

    Raises:
        Mismatch: The file cannot be read or does not have the archive's columns, or a row lacks one of them.
    """
    try:
        with folder.read(path) as file:
            if missing := set(columns) - set(file.schema_arrow.names):
                raise Mismatch(f"file {path}: it has no column {min(missing)!r}")
            # By row group, whose size in bytes is limited. A batch across row groups would be limited in rows only.
            for number in range(file.num_row_groups):
                for batch in file.iter_batches(READ_ROWS, row_groups=[number], columns=list(columns)):
                    if lacking := [name for name in columns if name in REQUIRED and batch[name].null_count]:
                        raise Mismatch(f"file {path}: a row has no {lacking[0]!r}")
                    yield batch.cast(pa.schema([FILE_SCHEMA.field(name) for name in columns]))
    except FileNotFoundError as error:
        raise Mismatch(f"file {path}: no such file") from error
    except (OSError, ValueError, pa.ArrowException) as error:
        raise Mismatch(f"file {path}: it cannot be read: {' '.join(str(error).split())}") from error


def sums_of(batch: pa.RecordBatch) -> dict[Log, Sum]:
    """Return the rows and sums of each log in a batch. Most batches have one."""
    found: dict[Log, Sum] = {}
    batch = batch.select(["log", "epoch", CHECKSUM])
    while batch.num_rows:
        log = Log(batch["log"][0].as_py(), batch["epoch"][0].as_py())
        ours = pc.and_(pc.equal(batch["log"], log.id), pc.equal(batch["epoch"], log.epoch))
        found[log] = checksums.total(batch[CHECKSUM].filter(ours))
        batch = batch.filter(pc.invert(ours))
    return found


def merged(parts: Iterable[Mapping[Log, Sum]]) -> dict[Log, Sum]:
    """Add up rows and sums by log."""
    found: dict[Log, Sum] = {}
    for part in parts:
        for log, more in part.items():
            found[log] = found.get(log, Sum()) + more
    return found


# -- erasing ------------------------------------------------------------------


class Erasure(NamedTuple):
    """The messages to erase: those of a publisher's key in some topics of a log."""

    log: str
    topics: Sequence[str]
    key: str

    def are(self, rows: Any) -> Any:
        """Return for each row whether it is one of them."""
        is_key = pc.or_(
            pc.fill_null(pc.equal(rows["publisher_key"], self.key), fill_value=False),
            pc.is_in(rows["partition_key"], value_set=pa.array(lanes(self.key))),
        )
        is_topic = pc.is_in(rows["topic"], value_set=pa.array(self.topics))
        return pc.and_(pc.equal(rows["log"], self.log), pc.and_(is_topic, is_key))


def count(root: Root, erasure: Erasure, path: str) -> int:
    """Return how many messages to erase a file has.

    Raises:
        Mismatch: The file cannot be read.
    """
    columns = ("log", "topic", "partition_key", "publisher_key")
    return sum(erasure.are(batch).true_count for batch in batches(root.open(), path, columns))


def rewrite(root: Root, erasure: Erasure, path: str) -> tuple[list[File], dict[Log, Sum]]:
    """Write the rows of a file into new files, without the messages to erase.

    Returns:
        The new files; and the numbers of rows that were left out and the sums of their checksums, by log.

    Raises:
        Mismatch: The file cannot be read, or a row does not have its checksum.
    """
    folder = root.open()
    day = datetime.date.fromisoformat(path.split("/")[0].removeprefix("day="))
    written: list[File] = []
    waiting: list[pa.RecordBatch] = []
    less: dict[Log, Sum] = {}
    size = 0

    def flush() -> None:
        if rows := pa.Table.from_batches(waiting, FILE_SCHEMA):
            written.append(write_file(folder, day, rows))
        waiting.clear()

    # Verified, or the sums of the table would hide a fault of the file.
    for batch in verified(folder, path):
        are_erased = erasure.are(batch)
        less = merged((less, sums_of(batch.filter(are_erased))))
        waiting.append(batch.filter(pc.invert(are_erased)))
        size += waiting[-1].nbytes
        if size >= FLUSH_BYTES:
            flush()
            size = 0
    flush()
    return written, less

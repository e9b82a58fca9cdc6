"""Operations on the archive: grow, verify, compact, expire, erase and vacuum.

A lock lets one operation of a database at a time change the archive. It ends with its connection. If it is lost and two
operations run, or those of two databases that share an archive, each commit is still made once: see ``table``.
"""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from pyspark_mysqlqueue import log_marks, log_offsets, readers
from pyspark_mysqlqueue.archive import files
from pyspark_mysqlqueue.archive.files import Erasure, Mismatch
from pyspark_mysqlqueue.archive.root import Root
from pyspark_mysqlqueue.archive.table import MODULO, File, Table, TableFile
from pyspark_mysqlqueue.checksums import Sum
from pyspark_mysqlqueue.databases import Database, Place
from pyspark_mysqlqueue.errors import PipelineError
from pyspark_mysqlqueue.executors import spread
from pyspark_mysqlqueue.log_schema import Log
from pyspark_mysqlqueue.readers import Reader
from pyspark_mysqlqueue.reading import Span
from pyspark_mysqlqueue.shared.tables import ARCHIVE, SEQUENCER, SEQUENCER_ID

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

LOCK = "archive"
COMMIT_OFFSETS = 2_000_000
"""Maximum number of offsets per commit."""
TASK_OFFSETS = 250_000
"""Maximum number of offsets per task."""
KEEP = datetime.timedelta(days=7)
"""How long ``vacuum`` keeps files that the table no longer has: readers of older versions may use them."""
BATCH = 64
"""Number of files that are checked between two reports of progress."""
LEAST_KEEP = datetime.timedelta(hours=1)
"""The least that it may be: a run has written files that it has not committed yet."""

Progress = Callable[[int], object]
"""Called with the number of offsets, or of files, that were processed since the last call."""


@dataclass(frozen=True, slots=True)
class Job:
    """An archive, its queue, and the Spark session to use (None: processes of this machine)."""

    spark: SparkSession | None
    place: Place
    root: Root

    @contextlib.contextmanager
    def locked(self) -> Iterator[Database]:
        """Open a connection that holds the archive's lock.

        Raises:
            PipelineError: Another run holds the lock.
        """
        with self.place.connect() as database:
            if not database.lock(LOCK):
                raise PipelineError("another run holds the archive's lock: wait until it has finished")
            yield database


@dataclass(frozen=True, slots=True)
class Grown:
    """The result of ``grow``."""

    commits: int = 0
    """The number of ranges that were added."""
    rows: int = 0
    """The number of messages in them."""
    size: int = 0
    """The size of their files in bytes."""
    archived: int = 0
    """All offsets up to this one are archived."""
    missed: int = 0
    """GC has removed messages up to this offset before they were archived; 0 if it has not."""


@dataclass(frozen=True, slots=True)
class Fault:
    """What is wrong with the archive."""

    path: str
    """The file, or '' for the table."""
    says: str
    """The description of the fault."""


def pending(database: Database, root: Root) -> int:
    """Return the number of offsets that are not archived."""
    table = Table.find(root)
    return log_offsets.highest(database) - (0 if table is None else table.archived(log_offsets.identity(database)))


def grow(
    job: Job,
    *,
    commit_offsets: int = COMMIT_OFFSETS,
    task_offsets: int = TASK_OFFSETS,
    progress: Progress = lambda offsets: None,
) -> Grown:
    """Archive the messages that are not in the archive yet, up to the current end of the log, range by range.

    If the run is interrupted, all committed ranges are kept.

    Args:
        job: The archive and its queue.
        commit_offsets: Maximum number of offsets per commit.
        task_offsets: Maximum number of offsets per task.
        progress: Called after each commit with its number of offsets.

    Raises:
        Mismatch: The files of a range do not contain the same rows as the log.
        PipelineError: Another run holds the lock, the archive is not that of this log, the log went back, or the
            workers do not share the archive's folder.
    """
    grown, missed = Grown(), 0
    with job.locked() as database:
        log, last = log_offsets.identity(database), log_offsets.highest(database)
        table = _table(job.root, database, log)
        above = table.archived(log)
        _move(database, table, log)
        while above < last:
            # Read for each range, because GC may run beside a long run.
            taken = log_offsets.collected(database, None)
            missed = max(missed, min(taken, last) if taken > above else 0)
            # A gap, for example of messages that GC removed before the first run, needs no task.
            first = log_offsets.lowest(database, above)
            held = last if first is None else min(first - 1, last)
            span = Span(held, min(last, held + commit_offsets))
            done = spread(
                job.spark,
                partial(files.write_span, job.place, job.root, log),
                span.split(-(-len(span) // task_offsets)),
            )
            written = [file for some in done for file in some]
            table.append(above, log_marks.position(database, span.up_to), written)
            _move(database, table, log)
            rows = sum(one.rows for file in written for one in file.sums.values())
            grown = Grown(grown.commits + 1, grown.rows + rows, grown.size + sum(file.size for file in written))
            progress(span.up_to - above)
            above = span.up_to
    return replace(grown, archived=above, missed=missed)


def _table(root: Root, database: Database, log: Log) -> Table:
    """Open the archive's table, or create it for the first run.

    Raises:
        PipelineError: The queue's archive is another table, or the log went back since it was archived.
    """
    reader, table = readers.find(database, ARCHIVE), Table.find(root)
    if reader is not None and (table is None or table.id != reader.owner):
        raise PipelineError(
            f"archive {root.uri!r}: this queue's archive is the table {reader.owner}, which is not there; pass its "
            "path, or, to begin a new archive, run queuedropreader archive first"
        )
    if table is None:
        return Table.create(root)
    position = table.position(log)
    is_later = table.archived(log._replace(epoch=log.epoch + 1)) > 0
    if is_later or (position.offset and log_marks.relation(database, position) == "went back"):
        raise PipelineError(
            f"archive {root.uri!r}: it has offsets up to {position.offset} of the log {position.name}, and that log "
            "was restored to an earlier state since: connect to the database that was archived, or run queuearchive "
            "new-epoch to archive this log from its beginning, beside the other one"
        )
    return table


def new_epoch(job: Job) -> Log:
    """Accept a log that was restored from a backup: the next run archives it from its beginning, beside the other one.

    Streams of the log fail, too, until they begin with a new checkpoint.

    Returns:
        The new identity of the log.

    Raises:
        PipelineError: Another run holds the lock, or there is no archive.
    """
    with job.locked() as database:
        table, log = Table.open(job.root), log_offsets.identity(database)
        new = log._replace(epoch=log.epoch + 1)
        while table.archived(new):
            new = new._replace(epoch=new.epoch + 1)
        with database.transaction():
            database.execute(f"UPDATE {SEQUENCER} SET epoch = %s WHERE id = {SEQUENCER_ID}", (new.epoch,))
        _move(database, table, new)
    return new


def _move(database: Database, table: Table, log: Log) -> None:
    """Let GC delete what is archived."""
    position = table.position(log)
    reader = Reader(position.offset, table.id, position.marked_offset, position.mark)
    if readers.find(database, ARCHIVE) != reader:
        readers.move(database, ARCHIVE, reader)


# -- checking -----------------------------------------------------------------


def verify(job: Job, *, progress: Progress = lambda files: None) -> list[Fault]:
    """Read every file, and compare each row with its checksum, and their sum with that of the table.

    Args:
        job: The archive and its queue.
        progress: Called after each file.
    """
    table = Table.open(job.root)
    with job.place.connect() as database:
        log = log_offsets.identity(database)
    faults = []
    sums: dict[Log, Sum] = {Log(log.id, epoch): Sum() for epoch in range(log.epoch + 1)}
    known = table.files()
    for start in range(0, len(known), BATCH):
        some = known[start : start + BATCH]
        for file, found in zip(some, spread(job.spark, partial(_checked, job.root), some), strict=True):
            if isinstance(found, str):
                faults.append(Fault(file.path, found))
            else:
                sums = files.merged((sums, found))
        progress(len(some))
    if not faults:
        faults = [
            Fault("", f"log {one.id}, epoch {one.epoch}: the files have {found}, but {expected} were archived")
            for one, found in sums.items()
            if Sum(found.rows, found.checksum % MODULO) != (expected := table.total(one))
        ]
    return faults


def _checked(root: Root, file: TableFile) -> dict[Log, Sum] | str:
    """Return what a file has, or its fault."""
    try:
        sums = files.read_sums(root.open(), file.path)
    except Mismatch as error:
        return str(error).removeprefix(f"file {file.path}: ")
    if (rows := sum(one.rows for one in sums.values())) != file.rows:
        return f"it has {rows} rows, but the table says {file.rows}"
    return sums


# -- upkeep -------------------------------------------------------------------


def compact(job: Job, *, progress: Progress = lambda rows: None) -> int:
    """Merge small files of each day, after a check as by ``verify``.

    The old files stay until ``vacuum`` deletes them, because readers may still use them.

    Args:
        job: The archive and its queue.
        progress: Called with numbers of rows.

    Returns:
        The number of rows that were written again.

    Raises:
        PipelineError: Another run holds the lock, there is no archive, or a file has a fault.
    """

    def check(merging: Sequence[TableFile]) -> None:
        for file in merging:
            if isinstance(found := _checked(job.root, file), str):
                raise PipelineError(
                    f"file {file.path}: {found}; it was not merged: run verify, and restore the file from a copy"
                )

    with job.locked():
        return Table.open(job.root).compact(check, progress=progress)


def expire(job: Job, *, before: datetime.date) -> int:
    """Remove the messages that were published before a day. The next ``vacuum`` deletes their files.

    Args:
        job: The archive and its queue.
        before: The day (UTC).

    Returns:
        The number of messages that were removed.

    Raises:
        PipelineError: Another run holds the lock, there is no archive, or a file cannot be read.
    """
    with job.locked():
        table = Table.open(job.root)
        removed = 0

        def old() -> tuple[Sequence[TableFile], Sequence[File], dict[Log, Sum]]:
            nonlocal removed
            gone = [file for file in table.files() if file.day < before]
            less = files.merged(spread(job.spark, partial(files.noted_sums, job.root), [file.path for file in gone]))
            removed = sum(one.rows for one in less.values())
            return gone, [], less

        table.replace(old)
    return removed


def vacuum(job: Job, *, keep: datetime.timedelta = KEEP) -> list[str]:
    """Delete files that the table no longer has, and those of runs that were killed.

    Args:
        job: The archive and its queue.
        keep: Keep files that the table still had so long ago, and younger ones. At least an hour.

    Returns:
        The paths of the deleted files.

    Raises:
        PipelineError: Another run holds the lock, or there is no archive.
    """
    with job.locked():
        return Table.open(job.root).vacuum(max(keep, LEAST_KEEP))


@dataclass(frozen=True, slots=True)
class Erased:
    """The result of ``erase``, or what it would be."""

    rows: int
    """The number of messages that were removed."""
    files: int
    """The number of files that were deleted."""


def erase(job: Job, topics: Sequence[str], key: str, *, dry_run: bool = False) -> Erased | None:
    """Erase the messages of a publisher's key: no file of the archive has them afterwards.

    Files that have some of them are written again without them. Then all files are deleted that the newest version of
    the table does not have, so that earlier versions can no longer be read. If the run is interrupted, run it again.

    Args:
        job: The archive and its queue, whose log's messages are erased.
        topics: Their topics.
        key: The key with which they were published.
        dry_run: If True, only count.

    Returns:
        What was erased; None if there is no archive.

    Raises:
        Mismatch: A file that has some of them has a fault. Nothing was changed.
        PipelineError: Another run holds the lock, or a file cannot be read or deleted.
    """
    with job.locked() as database:
        table = Table.find(job.root)
        if table is None:
            return None
        erasure = Erasure(log_offsets.identity(database).id, tuple(topics), key)
        number = 0

        def affected() -> list[TableFile]:
            nonlocal number
            known = [file for file in table.files() if file.may_have(erasure.topics)]
            counts = spread(job.spark, partial(files.count, job.root, erasure), [file.path for file in known])
            number = sum(counts)
            return [file for file, count in zip(known, counts, strict=True) if count]

        def rewritten() -> tuple[Sequence[TableFile], Sequence[File], dict[Log, Sum]]:
            old = affected()
            done = spread(job.spark, partial(files.rewrite, job.root, erasure), [file.path for file in old])
            new = [file for written, _ in done for file in written]
            return old, new, files.merged(less for _, less in done)

        if dry_run:
            affected()
            return Erased(number, len(_unneeded(table)))
        table.replace(rewritten)
        unneeded = _unneeded(table)
        table.vacuum(datetime.timedelta(0))
        if left := _unneeded(table):
            raise PipelineError(f"archive {job.root.uri!r}: {min(left)} was not deleted; run again")
        return Erased(number, len(unneeded))


def _unneeded(table: Table) -> list[str]:
    """Return the files below the root that the newest version of the table does not have."""
    # The table's log also names files that are gone.
    paths = table.vacuum(datetime.timedelta(0), dry_run=True)
    return [path for path, size in zip(paths, table.root.open().sizes(paths), strict=True) if size >= 0]

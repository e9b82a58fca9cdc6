"""The Delta table of an archive.

A message is (``log``, ``epoch``, ``offset``). For each log the table has *transaction versions*, which Delta keeps
beside the list of files: the end of what is archived and the newest mark of the log up to there, the number of its
rows, and the sum of their checksums. A commit is based on the version that it was made for. If another one has come
first, it is looked at again.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import re
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, Schema, Transaction, WriterProperties
from deltalake.exceptions import CommitFailedError, DeltaError, TableNotFoundError
from deltalake.transaction import AddAction, RemoveAction

from pyspark_mysqlqueue import log_offsets
from pyspark_mysqlqueue.archive.root import Root, sync
from pyspark_mysqlqueue.batches import schema
from pyspark_mysqlqueue.checksums import Sum
from pyspark_mysqlqueue.databases import Database
from pyspark_mysqlqueue.errors import DataLossError, PipelineError
from pyspark_mysqlqueue.log_marks import Position
from pyspark_mysqlqueue.log_schema import CHECKSUM, COLUMNS, Log

FILE_SCHEMA = pa.schema([("log", pa.string()), ("epoch", pa.int64()), *schema(COLUMNS), (CHECKSUM, pa.int64())])
"""The columns of a Parquet file."""
SCHEMA = FILE_SCHEMA.append(pa.field("day", pa.date32()))
"""The columns of the table. ``day`` is that of ``published_at`` in UTC, and the partition."""
STATISTICS = ("offset", "topic", "published_at")
"""The columns whose least and greatest values are in the table's log, in clear. No key, id or payload is."""
SETTINGS = {
    "delta.dataSkippingStatsColumns": ",".join(STATISTICS),
    "delta.logRetentionDuration": "interval 30 days",
    "delta.enableExpiredLogCleanup": "true",
}
ATTEMPTS = 20
"""How often a commit is tried: each time another writer's has come first."""
TIERS = (2**20, 2**23, 2**26, 2**28)
"""Files of a day that are smaller than one of these are merged into files of at most that many bytes."""
MANY = 8
"""Number of files of a day below a tier from which on they are merged: a row is written again about once per tier."""
WRITER = WriterProperties(compression="ZSTD", max_row_group_size=131_072)
TRIAL = pa.schema([("n", pa.int64())])
"""The columns of the table by which a store is tried."""
TRIAL_WRITERS = 4
TRIAL_ROUNDS = 5
MODULO = 2**63
"""Sums of checksums are kept modulo this number: Delta's versions are 64-bit integers."""


@dataclass(frozen=True, slots=True)
class File:
    """A file that a task has written and verified."""

    path: str
    """Below the root."""
    day: datetime.date
    size: int
    """In bytes."""
    sums: Mapping[Log, Sum]
    """The number of rows and the sum of their checksums, by log."""
    least: Mapping[str, Any]
    most: Mapping[str, Any]
    """The least and greatest values of the columns in ``STATISTICS``."""

    def statistics(self) -> str:
        """Return the statistics as Delta's log has them."""
        return json.dumps(
            {
                "numRecords": sum(one.rows for one in self.sums.values()),
                "minValues": {name: _spelled(value) for name, value in self.least.items()},
                "maxValues": {name: _spelled(value) for name, value in self.most.items()},
                "nullCount": dict.fromkeys(self.least, 0),
            },
            ensure_ascii=False,
        )


class TableFile(NamedTuple):
    """A file of the table, as the table's log describes it."""

    path: str
    size: int
    rows: int
    day: datetime.date
    offsets: tuple[int, int] | None
    """The lowest and the highest (None: not known)."""
    topics: tuple[str, str] | None
    """The least and the greatest (None: not known)."""

    def may_have(self, topics: Sequence[str]) -> bool:
        """Return whether the file may have messages of one of these topics, as far as the table's log says."""
        return self.topics is None or any(self.topics[0] <= one <= self.topics[1] for one in topics)


def _spelled(value: Any) -> Any:
    if isinstance(value, datetime.datetime):
        return value.astimezone(datetime.timezone.utc).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    return value


class Table:
    """One version of the table, and commits on top of it."""

    def __init__(self, root: Root, delta: DeltaTable) -> None:
        self.root = root
        self.delta = delta

    @classmethod
    def find(cls, root: Root) -> Table | None:
        """Open the table; None if there is none.

        Raises:
            PipelineError: The store cannot be read, or the table is not one of an archive.
        """
        with speaking_of(root):
            try:
                delta = DeltaTable(root.uri)
            except TableNotFoundError:
                return None
        names = set(pa.schema(delta.schema()).names)
        if missing := set(SCHEMA.names) - names:
            raise PipelineError(
                f"archive {root.uri!r}: the Delta table there is not an archive of a queue: it has no column "
                f"{min(missing)!r}"
            )
        return cls(root, delta)

    @classmethod
    def open(cls, root: Root) -> Table:
        """Open the table.

        Raises:
            PipelineError: There is none, or it is not one of an archive.
        """
        found = cls.find(root)
        if found is None:
            raise PipelineError(f"archive {root.uri!r}: there is no archive yet: run queuearchive")
        return found

    @classmethod
    def create(cls, root: Root) -> Table:
        """Create the table.

        Raises:
            PipelineError: The store cannot be written, or it lets two writers commit the same version.
        """
        with speaking_of(root):
            if not root.is_local:
                _check_store(root)
            else:
                Path(root.uri).mkdir(parents=True, exist_ok=True)
            delta = DeltaTable.create(
                root.uri, schema=Schema.from_arrow(SCHEMA), partition_by=["day"], configuration=SETTINGS
            )
        return cls(root, delta)._synced()

    @property
    def id(self) -> str:
        """The table's own id."""
        return str(self.delta.metadata().id)

    def archived(self, log: Log) -> int:
        """Return the offset up to which everything of a log is, or was, in the table; 0 if nothing is."""
        return self._noted(log)

    def position(self, log: Log) -> Position:
        """Return the end of what is archived of a log, with the newest mark of the log up to there."""
        return Position(self.archived(log), *log, self._noted(log, "marked_offset"), self._noted(log, "mark"))

    def total(self, log: Log) -> Sum:
        """Return the number of a log's rows and the sum of their checksums."""
        return Sum(self._noted(log, "rows"), self._noted(log, "checksum"))

    def _noted(self, log: Log, what: str = "") -> int:
        return self.delta.transaction_version(log.key(what)) or 0

    def files(self) -> list[TableFile]:
        """Return the table's files by day."""
        rows = pa.table(self.delta.get_add_actions(flatten=True)).to_pylist()
        return sorted(
            (
                TableFile(
                    row["path"],
                    row["size_bytes"],
                    row["num_records"] or 0,
                    row["partition.day"],
                    _range(row, "offset"),
                    _range(row, "topic"),
                )
                for row in rows
            ),
            key=lambda file: (file.day, file.offsets or (0, 0), file.path),
        )

    def append(self, above: int, end: Position, files: Sequence[File]) -> None:
        """Commit a range of a log, whose files are in the store.

        Raises:
            PipelineError: Another run has archived some of the range meanwhile. Nothing was committed.
        """
        log, up_to = Log(end.log, end.epoch), end.offset
        noted = {log.key(): up_to, log.key("marked_offset"): end.marked_offset, log.key("mark"): end.mark}
        sums = sum((file.sums.get(log, Sum()) for file in files), Sum())

        def change(attempt: int) -> tuple[Sequence[AddAction], dict[str, int]] | None:
            archived = self.archived(log)
            if attempt and archived == up_to:
                return None  # The answer to the commit was lost.
            if archived != above:
                raise PipelineError(
                    f"offsets {above + 1} to {up_to}: another run has archived some of them meanwhile; nothing was "
                    "committed"
                )
            return [_added(file) for file in files], {**noted, **self._totals({log: sums})}

        self._commit(change)

    def replace(self, change: Callable[[], tuple[Sequence[TableFile], Sequence[File], Mapping[Log, Sum]]]) -> None:
        """Commit that files are replaced by others.

        Args:
            change: Returns the old files, the new ones, and by how much rows and sums of checksums are less. It is
                called again if another commit comes first.
        """

        def changed(attempt: int) -> tuple[list[AddAction | RemoveAction], dict[str, int]] | None:
            old, new, less = change()
            if not old and not new:
                return None
            more = {log: Sum(-one.rows, -one.checksum) for log, one in less.items()}
            return [*map(_added, new), *map(_removed, old)], self._totals(more)

        self._commit(changed)

    def compact(
        self, check: Callable[[Sequence[TableFile]], object], *, progress: Callable[[int], object] = lambda rows: None
    ) -> int:
        """Merge small files of each day, and return the number of rows that were written again.

        Args:
            check: Called with files before they are merged. It raises an error if one has a fault.
            progress: Called with numbers of rows.
        """
        written = 0
        for day in sorted({file.day for file in self.files()}):
            for tier in TIERS:
                before = [file for file in self.files() if file.day == day]
                small = [file for file in before if file.size < tier]
                if len(small) < MANY:
                    continue
                check(small)
                with speaking_of(self.root):
                    self.delta.optimize.compact(
                        partition_filters=[("day", "=", day.isoformat())], target_size=tier, writer_properties=WRITER
                    )
                self.delta.update_incremental()
                self._synced()
                known = {file.path for file in before}
                rows = sum(file.rows for file in self.files() if file.day == day and file.path not in known)
                written += rows
                progress(rows)
        return written

    def vacuum(self, keep: datetime.timedelta, *, dry_run: bool = False) -> list[str]:
        """Delete files below the root that no version of the table of the last ``keep`` names, or only list them."""
        with speaking_of(self.root):
            gone = self.delta.vacuum(
                retention_hours=int(keep.total_seconds() // 3600),
                dry_run=dry_run,
                enforce_retention_duration=False,
                full=True,
            )
        self.delta.update_incremental()
        return gone

    def _totals(self, more: Mapping[Log, Sum]) -> dict[str, int]:
        found: dict[str, int] = {}
        for log, sums in more.items():
            total = self.total(log)
            found[log.key("rows")] = total.rows + sums.rows
            found[log.key("checksum")] = (total.checksum + sums.checksum) % MODULO
        return found

    def _commit(
        self, change: Callable[[int], tuple[Sequence[AddAction | RemoveAction], Mapping[str, int]] | None]
    ) -> None:
        """Commit what ``change`` returns for the newest version, or nothing for None."""
        for attempt in range(ATTEMPTS):
            with speaking_of(self.root):
                self.delta.update_incremental()
            found = change(attempt)
            if found is None:
                return
            actions, versions = found
            self._check_exist([one.path for one in actions if isinstance(one, AddAction)])
            properties = CommitProperties(
                max_commit_retries=0,  # A retry of the library would commit without a look at the versions.
                app_transactions=[Transaction(name, version) for name, version in versions.items()],
            )
            try:
                with speaking_of(self.root, passing=CommitFailedError):
                    self.delta.create_write_transaction(
                        list(actions), mode="append", schema=SCHEMA, partition_by=["day"], commit_properties=properties
                    )
            except CommitFailedError:
                continue
            self.delta.update_incremental()
            self._synced()
            return
        raise PipelineError(
            f"archive {self.root.uri!r}: other writers have committed {ATTEMPTS} times meanwhile; run again"
        )

    def _check_exist(self, paths: Sequence[str]) -> None:
        """Check that this program sees the files: workers may not share the folder, and a vacuum may have come by."""
        for path, size in zip(paths, self.root.open().sizes(paths), strict=True):
            if size < 0:
                raise PipelineError(
                    f"archive {self.root.uri!r}: a task has written {path}, but this program does not see the file; "
                    "use a folder that all workers share; nothing was committed"
                )

    def _synced(self) -> Table:
        """Flush the newest version to disk: what MySQL says of the archive must not be more than what is in it."""
        if self.root.is_local:
            log = Path(self.root.uri) / "_delta_log"
            sync(log / f"{self.delta.version():020}.json")
            sync(log)
            sync(log.parent)
        return self


def _added(file: File) -> AddAction:
    return AddAction(
        file.path,
        file.size,
        {"day": file.day.isoformat()},
        int(time.time() * 1000),
        data_change=True,
        stats=file.statistics(),
    )


def _removed(file: TableFile) -> RemoveAction:
    return RemoveAction(
        file.path,
        data_change=True,
        deletion_timestamp=int(time.time() * 1000),
        size=file.size,
        partition_values={"day": file.day.isoformat()},
    )


def _range(row: Mapping[str, Any], name: str) -> tuple[Any, Any] | None:
    least, most = row.get(f"min.{name}"), row.get(f"max.{name}")
    return None if least is None or most is None else (least, most)


def unarchived(database: Database, table: Table | None, log: Log, topics: Sequence[str] | None) -> int:
    """Return the offset after which the live log continues the archive.

    Raises:
        DataLossError: GC has removed messages of these topics (None: of any) after it.
    """
    end = 0 if table is None else table.archived(log)
    # Checked for all times: a removed row no longer shows its time.
    gone = log_offsets.collected(database, topics)
    if gone > end:
        raise DataLossError(
            f"GC has removed messages up to offset {gone}, but the archive ends at offset {end}: some messages "
            "are lost. Run queuearchive to continue with the others. Set ARCHIVE_REQUIRED to make GC wait for "
            "the archive"
        )
    return end


@contextlib.contextmanager
def speaking_of(root: Root, *, passing: type[Exception] | tuple[()] = ()) -> Iterator[None]:
    """Raise errors of the store and of Delta's library as ours, in one line that names the archive."""
    try:
        yield
    except passing:
        raise
    except BaseException as error:
        # A panic of Delta's library, for example in a delete from a folder with "[" in its path, is no Exception.
        if not isinstance(error, (DeltaError, OSError)) and type(error).__name__ != "PanicException":
            raise
        # The library colors the causes.
        what = " ".join(re.sub(r"\x1b\[\d+m", "", str(error)).split())
        raise PipelineError(f"archive {root.uri!r}: {what}; what was committed before stays, so run again") from error


def _check_store(root: Root) -> None:
    """Check that of two writers of the same version the store refuses one.

    Raises:
        PipelineError: It accepts both: its put has no condition, and one of two commits would be lost.
    """
    trial = f"_mysqlqueue_trial_{uuid.uuid4().hex}"
    uri = f"{root.uri.rstrip('/')}/{trial}"
    try:
        DeltaTable.create(uri, schema=Schema.from_arrow(TRIAL))
        with ThreadPoolExecutor(TRIAL_WRITERS) as pool:
            for _ in range(TRIAL_ROUNDS):
                tables = [DeltaTable(uri) for _ in range(TRIAL_WRITERS)]
                if sum(pool.map(partial(_commits, threading.Barrier(TRIAL_WRITERS)), tables)) > 1:
                    raise PipelineError(
                        f"archive {root.uri!r}: the store has no conditional put (If-None-Match): of two commits "
                        "at the same time one would be lost; use a store that has it"
                    )
    finally:
        root.open().filesystem.delete_dir(trial)


def _commits(start: threading.Barrier, table: DeltaTable) -> bool:
    """Return whether a commit of the next version is accepted, at the same time as those of the other writers.

    A later one is no trial of the store: the library looks for newer versions before it puts its own.
    """
    properties = CommitProperties(max_commit_retries=0, app_transactions=[Transaction("trial", 1)])
    start.wait()
    try:
        table.create_write_transaction([], mode="append", schema=TRIAL, commit_properties=properties)
    except CommitFailedError:
        return False
    return True

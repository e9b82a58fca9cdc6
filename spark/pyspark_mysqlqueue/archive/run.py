"""Operations on the archive: grow, verify, compact, expire and sweep.

A lock lets one operation at a time change the archive. The lock ends with its connection. If it is lost and two
operations run, the manifest's primary key lets only one of them commit.
"""

from __future__ import annotations

import contextlib
import datetime
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import pyarrow.fs

from pyspark_mysqlqueue import log_offsets
from pyspark_mysqlqueue.archive import files, manifest
from pyspark_mysqlqueue.archive.files import Folder, Mismatch, Root
from pyspark_mysqlqueue.archive.manifest import File, Segment
from pyspark_mysqlqueue.checksums import Sum
from pyspark_mysqlqueue.databases import Database, Place
from pyspark_mysqlqueue.errors import PipelineError
from pyspark_mysqlqueue.executors import spread
from pyspark_mysqlqueue.reading import Span

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

LOCK = "archive"
SEGMENT_OFFSETS = 2_000_000
"""Maximum number of offsets per segment."""
TASK_OFFSETS = 250_000
"""Maximum number of offsets per Spark task."""
COMPACT_ROWS = 5_000_000
"""Maximum number of rows per merged segment."""
FILES_BYTES = 4 * 2**20
"""Maximum size of the description of a segment's files in its row, in bytes."""
GRACE = datetime.timedelta(days=1)
"""Minimum age of the files that ``sweep`` deletes: a reader may still use the files of a merged segment."""

Progress = Callable[[int], None]
"""Called with the number of offsets that were processed since the last call."""


@dataclass(frozen=True, slots=True)
class Job:
    """An archive, its queue, and the Spark session to use."""

    spark: SparkSession
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

    segments: int = 0
    """The number of segments that were added."""
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
    """A segment or file that does not match the manifest."""

    lo: int
    """The first offset of the segment."""
    hi: int
    """The last offset of the segment."""
    path: str
    """The file, the segment, or '' for the manifest."""
    says: str
    """The description of the fault."""


def pending(database: Database) -> list[Span]:
    """Return the spans that are not archived."""
    return manifest.missing(manifest.segments(database), log_offsets.highest(database))


def grow(
    job: Job,
    *,
    segment_offsets: int = SEGMENT_OFFSETS,
    task_offsets: int = TASK_OFFSETS,
    progress: Progress = lambda offsets: None,
) -> Grown:
    """Archive the messages that are not in the archive yet, up to the current end of the log, segment by segment.

    If the run is interrupted, all finished segments are kept.

    Args:
        job: The archive and its queue.
        segment_offsets: Maximum number of offsets per segment.
        task_offsets: Maximum number of offsets per Spark task.
        progress: Called after each segment.

    Raises:
        Mismatch: The files of a segment do not contain the same rows as the log.
        PipelineError: Another run holds the lock, or the workers do not share the archive's folder.
    """
    grown = Grown()
    missed = 0
    with job.locked() as database:
        known = manifest.segments(database)
        home = _home(known)
        for span in manifest.missing(known, log_offsets.highest(database)):
            above = span.above
            while above < span.up_to:
                # Read for each segment, because GC may run beside a long run.
                taken = log_offsets.collected(database, None)
                missed = max(missed, min(taken, span.up_to) if taken > above else 0)
                # A gap, for example of messages that GC removed before the first run, needs no task.
                first = log_offsets.lowest(database, above)
                held = span.up_to if first is None else min(first - 1, span.up_to)
                piece = Span(held, min(span.up_to, held + segment_offsets))
                for segment in _copy(job, home, above + 1, piece, task_offsets):
                    manifest.add(database, segment)
                    grown = Grown(grown.segments + 1, grown.rows + segment.rows, grown.size + segment.size)
                progress(piece.up_to - above)
                above = piece.up_to
        archived = manifest.archived(manifest.segments(database))
    return replace(grown, archived=archived, missed=missed)


def _copy(job: Job, home: str, lo: int, span: Span, task_offsets: int) -> list[Segment]:
    """Write segments from ``lo`` to the end of the span. The offsets from ``lo`` to the span have no rows.

    Return one segment, or several if a large number of topics would make its row in the manifest too long.
    """
    path = _fresh_path(home, lo, span.up_to)
    pieces = span.split(-(-len(span) // task_offsets))
    done = spread(job.spark, partial(files.write_span, job.place, job.root, path), pieces)
    _check_shared(job.root, path, [file for some in done for file in some])
    segments: list[Segment] = []
    written: list[File] = []
    for number, some in enumerate(done):
        if written and manifest.text_bytes([*written, *some]) > FILES_BYTES:
            segments.append(_segment(lo, pieces[number].above, path, written))
            lo, written = pieces[number].above + 1, []
        written += some
    return [*segments, _segment(lo, span.up_to, path, written)]


def _check_shared(root: Root, path: str, written: Sequence[File]) -> None:
    """Check that this program sees the files that the tasks have written: all workers must share the folder."""
    folder = root.open()
    sizes = folder.sizes([f"{path}/{file.path}" for file in written])
    for file, size in zip(written, sizes, strict=True):
        if size != file.size:
            raise PipelineError(
                f"archive {root.uri!r}: a task has written {path}/{file.path}, but this program does not see the file; "
                "use a folder that all workers share"
            )


def _segment(lo: int, hi: int, path: str, written: Sequence[File]) -> Segment:
    total = sum((file.sum for file in written), Sum())
    return Segment(lo, hi, total.rows, total.checksum, path, tuple(written))


def _home(known: Sequence[Segment]) -> str:
    """Return the folder of this archive below the root, in which other archives may have folders too."""
    return known[-1].path.partition("/")[0] if known else uuid.uuid4().hex[:12]


def _fresh_path(home: str, lo: int, hi: int) -> str:
    return f"{home}/{lo:019}-{hi:019}-{uuid.uuid4().hex[:12]}"


# -- checking -----------------------------------------------------------------


def verify(job: Job, *, progress: Progress = lambda offsets: None) -> list[Fault]:
    """Read every file and compare it with the manifest.

    Args:
        job: The archive and its queue.
        progress: Called after each segment.

    Returns:
        The faults, which include gaps between segments.
    """
    with job.place.connect() as database:
        known = manifest.segments(database)
    faults = [
        Fault(span.above + 1, span.up_to, "", "no segment contains these offsets")
        for span in manifest.missing(known, known[-1].hi if known else 0)
    ]
    for segment in known:
        if segment.sum != sum((file.sum for file in segment.files), Sum()):
            faults.append(
                Fault(
                    segment.lo, segment.hi, segment.path, "the files do not add up to the segment's rows and checksum"
                )
            )
        work = partial(_checked, job.root, segment.path)
        for file, says in zip(segment.files, spread(job.spark, work, segment.files), strict=True):
            if says:
                faults.append(Fault(segment.lo, segment.hi, f"{segment.path}/{file.path}", says))
        progress(segment.hi - segment.lo + 1)
    return faults


def _checked(root: Root, path: str, file: File) -> str:
    """Return the fault of a file; '' if it has none."""
    try:
        found = files.read_sum(root.open(), f"{path}/{file.path}")
    except FileNotFoundError:
        return "no such file"
    except (OSError, ValueError, pyarrow.ArrowException, Mismatch) as error:
        return f"the file cannot be read: {error}"
    if found != file.sum:
        return (
            f"the file has {found.rows} rows with checksum {found.checksum}, expected {file.rows} with {file.checksum}"
        )
    return ""


# -- merging ------------------------------------------------------------------


def compact(job: Job, *, rows: int = COMPACT_ROWS, progress: Progress = lambda offsets: None) -> int:
    """Merge adjacent segments.

    A merged segment has one file per topic and day. The old files stay until ``sweep`` deletes them, because readers
    may still use them.

    Args:
        job: The archive and its queue.
        rows: Maximum number of rows per merged segment.
        progress: Called after each merged segment.

    Returns:
        The number of segments that were replaced.

    Raises:
        Mismatch: The merged files do not contain the same rows as the old ones. The old segments stay.
        PipelineError: Another run holds the lock.
    """
    merged = 0
    with job.locked() as database:
        known = manifest.segments(database)
        home = _home(known)
        for group in mergeable(known, rows):
            new = _merge(job, home, group)
            manifest.replace(database, group, new)
            merged += len(group)
            progress(new.hi - new.lo + 1)
    return merged


def mergeable(known: Sequence[Segment], rows: int) -> list[list[Segment]]:
    """Return groups of two or more adjacent segments to merge.

    The segments of a group have no gap between them and at most ``rows`` rows together. The description of the merged
    files, one per topic and day, fits into a row of the manifest.
    """
    groups: list[list[Segment]] = []
    count, merged = 0, dict[tuple[str, str], int]()
    for segment in known:
        more = {(file.topic, file.day): manifest.text_bytes([file]) for file in segment.files}
        last = groups[-1] if groups else []
        follows = last and last[-1].hi + 1 == segment.lo
        if follows and count + segment.rows <= rows and sum({**merged, **more}.values()) <= FILES_BYTES:
            last.append(segment)
            count += segment.rows
            merged |= more
        else:
            groups.append([segment])
            count, merged = segment.rows, more
    return [group for group in groups if len(group) > 1]


def _merge(job: Job, home: str, group: Sequence[Segment]) -> Segment:
    lo, hi = group[0].lo, group[-1].hi
    path = _fresh_path(home, lo, hi)
    parts: dict[tuple[str, str], list[tuple[int, str]]] = {}
    for segment in group:
        for file in segment.files:
            parts.setdefault((file.topic, file.day), []).append((file.lo, f"{segment.path}/{file.path}"))
    items = [(topic, day, tuple(path for _, path in sorted(paths))) for (topic, day), paths in sorted(parts.items())]
    new = _segment(lo, hi, path, spread(job.spark, partial(_merge_files, job.root, path), items))
    expected = sum((segment.sum for segment in group), Sum())
    if new.sum != expected:
        raise Mismatch(
            f"offsets {lo} to {hi}: the merged files have {new.rows} rows with checksum {new.checksum}, but the old "
            f"ones have {expected.rows} with {expected.checksum}; the old ones stay (run verify)"
        )
    return new


def _merge_files(root: Root, path: str, item: tuple[str, str, tuple[str, ...]]) -> File:
    topic, day, paths = item
    folder = root.open()
    tables = files.gathered(table for one in paths for table in files.read_batches(folder, one))
    return files.write_file(folder, path, topic, day, tables)


# -- expiring and sweeping ----------------------------------------------------


def expire(job: Job, *, before: datetime.date) -> list[Segment]:
    """Remove the oldest segments, as long as all of their messages were published before a day.

    The newest segment always stays, because it marks the end of the archive. The next ``sweep`` deletes the files.

    Args:
        job: The archive and its queue.
        before: The day (UTC).

    Returns:
        The removed segments.

    Raises:
        PipelineError: Another run holds the lock.
    """
    with job.locked() as database:
        known = manifest.segments(database)
        old: list[Segment] = []
        for segment in known[:-1]:
            if segment.last_day >= before.isoformat():
                break
            old.append(segment)
        manifest.remove(database, old)
    return old


def sweep(job: Job, *, grace: datetime.timedelta = GRACE) -> list[str]:
    """Delete files of the archive that the manifest does not name and that are older than ``grace``.

    All other files below the root stay, including those of a run that died before the archive had its first segment.

    Args:
        job: The archive and its queue.
        grace: The minimum age of a file.

    Returns:
        The paths of the deleted files.

    Raises:
        PipelineError: Another run holds the lock.
    """
    with job.locked() as database:
        known = manifest.segments(database)
        folder = job.root.open()
        named = {folder.full(f"{segment.path}/{file.path}") for segment in known for file in segment.files}
        before = datetime.datetime.now(datetime.timezone.utc) - grace
        homes = sorted({segment.path.partition("/")[0] for segment in known})
        return [path for home in homes for path in _sweep(folder, home, named, before)]


def _sweep(folder: Folder, home: str, named: set[str], before: datetime.datetime) -> list[str]:
    selector = pyarrow.fs.FileSelector(folder.full(home), recursive=True, allow_not_found=True)
    gone, kept, folders = [], set(named), []
    for found in folder.filesystem.get_file_info(selector):
        if found.type == pyarrow.fs.FileType.Directory:
            folders.append(found.path)
        elif found.path in named or found.mtime > before:
            kept.add(found.path)
        elif files.OURS.fullmatch(found.path[len(folder.path) :].lstrip("/")):
            folder.filesystem.delete_file(found.path)
            gone.append(found.path)
        else:
            kept.add(found.path)
    for path in sorted(folders, key=len, reverse=True):
        if not any(one.startswith(f"{path}/") for one in kept) and any(one.startswith(f"{path}/") for one in gone):
            folder.filesystem.delete_dir(path)
    return gone

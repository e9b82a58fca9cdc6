"""What is done with the archive: grow it, check it, merge small segments, let old ones go, sweep up rubbish.

One of these at a time (a lock that ends with the connection); were two to run
all the same, the manifest's primary key lets one of them commit.
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

from django_mysqlqueue.pipeline import log_offsets
from django_mysqlqueue.pipeline.archive import files, manifest
from django_mysqlqueue.pipeline.archive.files import Folder, Mismatch, Root
from django_mysqlqueue.pipeline.archive.manifest import File, Segment
from django_mysqlqueue.pipeline.checksums import Sum
from django_mysqlqueue.pipeline.databases import Database, Place
from django_mysqlqueue.pipeline.errors import PipelineError
from django_mysqlqueue.pipeline.executors import spread
from django_mysqlqueue.pipeline.reading import Span

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

LOCK = "archive"
SEGMENT_OFFSETS = 2_000_000
TASK_OFFSETS = 250_000
COMPACT_ROWS = 5_000_000
FILES_BYTES = 4 * 2**20
"""Of one segment: what the text of its files may take in its row."""
GRACE = datetime.timedelta(days=1)
"""Files that no row names are swept up when they are so old: a reader may be at those of a merged segment."""

Progress = Callable[[int], None]
"""Is told how many offsets have been dealt with since it was last told."""


@dataclass(frozen=True, slots=True)
class Job:
    """An archive, the log that it is of, and the session that does the work."""

    spark: SparkSession
    place: Place
    root: Root

    @contextlib.contextmanager
    def locked(self) -> Iterator[Database]:
        """A connection that holds the archive's lock.

        Raises:
            PipelineError: another run holds it.
        """
        with self.place.connect() as database:
            if not database.lock(LOCK):
                raise PipelineError("another run is at this archive: wait for its end")
            yield database


@dataclass(frozen=True, slots=True)
class Grown:
    """What a run has added."""

    segments: int = 0
    rows: int = 0
    size: int = 0
    archived: int = 0
    """All offsets up to this one are in the archive."""
    missed: int = 0
    """GC had taken messages up to this offset out of what was to be archived; 0: it had not."""


@dataclass(frozen=True, slots=True)
class Fault:
    """A segment that is not as the manifest says."""

    lo: int
    hi: int
    path: str
    says: str


def pending(database: Database) -> list[Span]:
    """The ranges that the archive lacks."""
    return manifest.missing(manifest.segments(database), log_offsets.highest(database))


def grow(
    job: Job,
    *,
    segment_offsets: int = SEGMENT_OFFSETS,
    task_offsets: int = TASK_OFFSETS,
    progress: Progress = lambda offsets: None,
) -> Grown:
    """Copies what the archive lacks, up to the end that the log has now, one segment after another.

    A run that ends at any point has lost at most the segment it was at.
    """
    grown = Grown()
    missed = 0
    with job.locked() as database:
        known = manifest.segments(database)
        home = _home(known)
        for span in manifest.missing(known, log_offsets.highest(database)):
            above = span.above
            while above < span.up_to:
                # Looked at for each segment: GC may go on beside a long run.
                taken = log_offsets.collected(database, None)
                missed = max(missed, min(taken, span.up_to) if taken > above else 0)
                # What GC took before the first run, or any other gap, needs no task to read it.
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
    """Segments from ``lo`` to the end of the span, with the span's rows; below it there are none.

    One, unless there are so many topics that its row would become very long.
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
    """What the tasks have written must be there for others too: a folder of each worker's own would be no archive."""
    folder = root.open()
    sizes = folder.sizes([f"{path}/{file.path}" for file in written])
    for file, size in zip(written, sizes, strict=True):
        if size != file.size:
            raise PipelineError(
                f"archive {root.uri!r}: a task has written {path}/{file.path}, and this program does not see it: the "
                "folder must be one that all workers share"
            )


def _segment(lo: int, hi: int, path: str, written: Sequence[File]) -> Segment:
    total = sum((file.sum for file in written), Sum())
    return Segment(lo, hi, total.rows, total.checksum, path, tuple(written))


def _home(known: Sequence[Segment]) -> str:
    """The folder below the root that is this archive's: others may have theirs beside it."""
    return known[-1].path.partition("/")[0] if known else uuid.uuid4().hex[:12]


def _fresh_path(home: str, lo: int, hi: int) -> str:
    return f"{home}/{lo:019}-{hi:019}-{uuid.uuid4().hex[:12]}"


# -- checking -----------------------------------------------------------------


def verify(job: Job, *, progress: Progress = lambda offsets: None) -> list[Fault]:
    """Reads every file and compares what it holds with the manifest; returns what is wrong.

    Also names ranges that are missing between segments.
    """
    with job.place.connect() as database:
        known = manifest.segments(database)
    faults = [
        Fault(span.above + 1, span.up_to, "", "no segment holds these offsets")
        for span in manifest.missing(known, known[-1].hi if known else 0)
    ]
    for segment in known:
        if segment.sum != sum((file.sum for file in segment.files), Sum()):
            faults.append(Fault(segment.lo, segment.hi, segment.path, "its files do not add up to its row"))
        work = partial(_checked, job.root, segment.path)
        for file, says in zip(segment.files, spread(job.spark, work, segment.files), strict=True):
            if says:
                faults.append(Fault(segment.lo, segment.hi, f"{segment.path}/{file.path}", says))
        progress(segment.hi - segment.lo + 1)
    return faults


def _checked(root: Root, path: str, file: File) -> str:
    """What is wrong with a file; '' if nothing is."""
    try:
        found = files.read_sum(root.open(), f"{path}/{file.path}")
    except FileNotFoundError:
        return "there is no such file"
    except (OSError, ValueError, pyarrow.ArrowException, Mismatch) as error:
        return f"it cannot be read: {error}"
    if found != file.sum:
        return f"it holds {found.rows} rows with checksum {found.checksum}, not {file.rows} with {file.checksum}"
    return ""


# -- merging ------------------------------------------------------------------


def compact(job: Job, *, rows: int = COMPACT_ROWS, progress: Progress = lambda offsets: None) -> int:
    """Merges neighbouring segments as long as the result has at most ``rows`` rows; returns how many went into others.

    One file for each topic and day of the result. The old files stay for readers that are at them, until ``sweep``.
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
    """Groups of two or more neighbours without a gap that have at most ``rows`` rows together.

    And so few files, one of each topic and day, that they go into one row.
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
            f"offsets {lo} to {hi}: the merged files hold {new.rows} rows with checksum {new.checksum}, the old ones "
            f"{expected.rows} with {expected.checksum}; the old ones stay (run verify)"
        )
    return new


def _merge_files(root: Root, path: str, item: tuple[str, str, tuple[str, ...]]) -> File:
    topic, day, paths = item
    folder = root.open()
    tables = files.gathered(table for one in paths for table in files.read_batches(folder, one))
    return files.write_file(folder, path, topic, day, tables)


# -- letting go ---------------------------------------------------------------


def expire(job: Job, *, before: datetime.date) -> list[Segment]:
    """Takes segments out of which every message was published before a day (UTC), oldest first; returns them.

    The newest segment stays: it is what says how far the archive has come. Files go with the next ``sweep``.
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
    """Deletes an archive's files that no row names and that are older than ``grace``; returns their paths.

    What else lies below the root stays, also what a run has left that died before the archive's first segment.
    """
    with job.locked() as database:
        known = manifest.segments(database)
        folder = job.root.open()
        named = {folder.full(f"{segment.path}/{file.path}") for segment in known for file in segment.files}
        before = datetime.datetime.now(datetime.UTC) - grace
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

"""Verifying, compacting, sweeping and expiring archives."""

from __future__ import annotations

import datetime

import pyarrow as pa
import pytest

from django_mysqlqueue.models import ArchiveSegment
from pyspark_mysqlqueue import checksums
from pyspark_mysqlqueue.archive import files, manifest, run
from pyspark_mysqlqueue.archive.files import Root
from pyspark_mysqlqueue.archive.run import Job
from pyspark_mysqlqueue.errors import PipelineError
from tests.support.archives import held, parquet, segments, some
from tests.support.factories import QueueMessageFactory
from tests.support.harness import USING
from tests.support.internals import Session, retention
from tests.support.spark_log import expected


@pytest.mark.any_engine
def test_verify_finds_what_is_wrong_with_files(job):
    from pathlib import Path

    some(20)
    run.grow(job, segment_offsets=7)
    paths = [Path(path) for path in parquet(job)]
    paths[0].unlink()
    whole = paths[1].read_bytes()
    paths[1].write_bytes(whole[: len(whole) // 2])
    table = next(files.read_batches(job.root.open(), str(paths[2].relative_to(job.root.uri))))
    import pyarrow.parquet as pq

    pq.write_table(table.slice(1), paths[2])
    says = sorted(fault.says for fault in run.verify(job))
    assert len(says) == 3
    assert any("no such file" in text for text in says)
    assert any("cannot be read" in text for text in says)
    assert any("the file has" in text for text in says)


def test_compact_merges_neighbours(job):
    for _ in range(4):
        some(5)
        some(2, "other")
        run.grow(job)
    files_before = parquet(job)
    assert run.compact(job) == 4
    assert ArchiveSegment.objects.count() == 1
    assert len([file for one in segments(job) for file in one.files]) == 2
    assert held(job) == expected()
    assert run.verify(job) == []
    assert run.compact(job) == 0
    assert run.sweep(job) == []  # too young
    gone = run.sweep(job, grace=datetime.timedelta(0))
    assert sorted(gone) == files_before
    assert held(job) == expected()
    some(3)
    run.grow(job)
    assert held(job) == expected()


@pytest.mark.any_engine
def test_sweep_leaves_what_is_not_of_an_archive(job):
    from pathlib import Path

    some(3)
    run.grow(job)
    some(3)
    run.grow(job)
    ArchiveSegment.objects.order_by("-lo")[0].delete()
    root = Path(job.root.uri)
    others = [root / "sales.parquet", root / "topic=t" / "day=2026-11-22" / f"{'0' * 32}.parquet", root / "notes.txt"]
    for path in others:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"PAR1")
    assert len(run.sweep(job, grace=datetime.timedelta(0))) == 1
    assert all(path.exists() for path in others)
    assert len(parquet(job)) == len(others[:2]) + 1


@pytest.mark.any_engine
@pytest.mark.promise("Archive")
def test_two_archives_in_one_root_leave_each_other_alone(job):
    some(5)
    run.grow(job)
    of_one = list(ArchiveSegment.objects.all())
    ArchiveSegment.objects.all().delete()  # as another queue's database, which has archived nothing yet
    assert run.sweep(job, grace=datetime.timedelta(0)) == []
    run.grow(job)
    assert run.sweep(job, grace=datetime.timedelta(0)) == []
    assert held(job) == expected()
    ArchiveSegment.objects.all().delete()
    ArchiveSegment.objects.bulk_create(of_one)
    assert held(job) == expected()
    assert run.verify(job) == []


@pytest.mark.any_engine
def test_roots_are_the_same_place_for_all(job, tmp_path, monkeypatch):
    """For Arrow and Spark, and for workers in another folder."""
    some(3)
    uri = f"file://{tmp_path}/a%20b%23c/"
    found = Job(job.spark, job.place, Root(uri))
    run.grow(found)
    assert run.sweep(found, grace=datetime.timedelta(0)) == []
    assert held(found) == expected()
    with monkeypatch.context() as patch:
        patch.chdir(tmp_path)
        relative = Root("a b#c")
    assert held(Job(job.spark, job.place, relative)) == expected()
    assert Root("s3://bucket/x/?region=eu-west-1").spark_path("f") == "s3a://bucket/x/f"


@pytest.mark.parametrize(("uri", "says"), [("s3://key:secret@bucket/x", "has a password"), ("file:/srv/x", "file://")])
def test_a_bad_root_is_named(uri, says):
    with pytest.raises(PipelineError, match=says) as caught:
        Root(uri)
    assert "secret" not in str(caught.value)


def test_every_new_folder_is_on_disk(tmp_path, monkeypatch):
    synced: list[str] = []
    monkeypatch.setattr(files, "_fsync_folder", synced.append)
    for name in ("one", "two"):
        with Root(str(tmp_path / "new" / "root")).open().create(f"segment/{name}"):
            pass
    root = f"{tmp_path}/new/root"
    assert synced == [f"{root}/segment", root, f"{tmp_path}/new", str(tmp_path), f"{root}/segment", root]


def test_a_merged_file_is_read_by_row_groups(tmp_path, monkeypatch):
    """However many rows of a megabyte it has."""
    row = (1, b"t", b"k", b"i", b"x" * 1000, 1000, b"{}", None, 5, 6, b"")
    table = pa.Table.from_batches([files.EVERYTHING.batch([row] * 50, exact=True)])
    seen: list[int] = []
    of_batch = checksums.of_batch
    monkeypatch.setattr(checksums, "of_batch", lambda one: seen.append(one.num_rows) or of_batch(one))
    file = files.write_file(Root(str(tmp_path)).open(), "segment", "t", "1970-01-01", [table, table, table])
    assert seen == [50, 50, 50]
    assert file.sum == of_batch(table) + of_batch(table) + of_batch(table)


def test_merged_row_groups_become_larger_ones():
    one = pa.table({"n": pa.array(range(1000))})
    assert [len(table) for table in files.gathered([one] * 1005)] == [1_000_000, 5_000]
    wide = pa.table({"x": pa.array([b"x" * 2**20] * 30)})
    assert [len(table) for table in files.gathered([wide] * 5)] == [60, 60, 30]
    # Those that are large do not grow from one merge to the next.
    wider = pa.table({"x": pa.array([b"x" * 2**20] * 80)})
    assert [len(table) for table in files.gathered([wide, wider, wide, wider])] == [30, 80, 30, 80]


def test_compact_keeps_below_its_limit():
    known = [manifest.Segment(10 * n + 1, 10 * n + 10, 10, 0, str(n), ()) for n in range(7) if n != 3]
    assert [[one.lo for one in group] for group in run.mergeable(known, 20)] == [[1, 11], [41, 51]]


@pytest.mark.any_engine
def test_compact_with_a_damaged_file_changes_nothing(job):
    from pathlib import Path

    for _ in range(2):
        some(5)
        run.grow(job)
    before = segments(job)
    path = Path(parquet(job)[0])
    import pyarrow.parquet as pq

    pq.write_table(pq.read_table(path).slice(1), path)
    with pytest.raises(files.Mismatch, match="the old ones stay"):
        run.compact(job)
    assert segments(job) == before


def test_expire_lets_old_segments_go_but_the_newest(job):
    day = 86_400_000
    for number in range(4):
        QueueMessageFactory(published_at=1_700_000_000_000 + number * day)
        run.grow(job)
    limit = datetime.datetime.fromtimestamp(1_700_000_000 + 2 * 86_400, datetime.UTC).date()
    last = retention.archived_offset(Session(USING))
    assert len(run.expire(job, before=limit)) == 2
    assert len(held(job)) == 2
    assert retention.archived_offset(Session(USING)) == last
    assert len(run.expire(job, before=datetime.date(2200, 1, 1))) == 1
    assert run.grow(job).segments == 0
    assert len(run.sweep(job, grace=datetime.timedelta(0))) == 3
    assert len(held(job)) == 1

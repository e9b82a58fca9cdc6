"""The archive equals the log, row for row, whatever happens to those who write it."""

from __future__ import annotations

import datetime
import itertools
import re
from typing import Any

import pyarrow as pa
import pytest
from django.core.management import call_command

from django_mysqlqueue import Message, publish, publish_many
from django_mysqlqueue.models import ArchiveSegment, QueueMessage
from django_mysqlqueue.pipeline import checksums, frames
from django_mysqlqueue.pipeline.archive import files, manifest, run
from django_mysqlqueue.pipeline.archive.files import Root
from django_mysqlqueue.pipeline.archive.run import Job
from django_mysqlqueue.pipeline.errors import PipelineError
from django_mysqlqueue.pipeline.reading import Span
from django_mysqlqueue.service import archiving, retention
from django_mysqlqueue.sql.session import Session
from tests.pipeline.test_source import HOSTILE, collected, expected
from tests.support.factories import QueueMessageFactory
from tests.support.harness import USING, Sub, handler, sequence


@pytest.fixture
def job(spark: Any, place: Any, tmp_path: Any) -> Job:
    return Job(spark, place, Root(str(tmp_path / "the [archive] * é %3D")))


HOME = "0123456789ab"
"""An archive's folder below its root."""


def held(job: Job, **options: Any) -> list[tuple[Any, ...]]:
    return collected(frames.archive(job.spark, job.place, job.root, **options))


def some(count: int, topic: str = "t") -> None:
    publish_many(topic, (Message({"n": n}, key=f"k{n % 3}") for n in range(count)))
    sequence()


def parquet(job: Job) -> list[str]:
    from pathlib import Path

    return sorted(str(path) for path in Path(job.root.uri).rglob("*.parquet"))


# -- growing ------------------------------------------------------------------


def test_the_archive_equals_the_log(job):
    some(30)
    publish("bytes", b"\x00\xff\xfe")
    sequence()
    for number, text in enumerate(HOSTILE):
        QueueMessageFactory(topic=text, partition_key=text, message_id=text or "-", payload=text.encode())
        QueueMessageFactory(
            topic="dead", partition_key=str(number), last_error=text, failed_group="g", failed_at=5, failure_count=2
        )
    QueueMessageFactory(topic="é" * 120, partition_key="k" * 190, published_at=1_600_000_000_000)
    grown = run.grow(job, task_offsets=7)
    assert grown.rows == QueueMessage.objects.count()
    assert grown.archived == QueueMessage.objects.order_by("-offset")[0].offset
    assert held(job) == expected()
    assert run.verify(job) == []


def test_a_time_that_no_calendar_has_is_archived_as_it_is(job):
    for moment in (2**62, -(2**62), -1, 0, 253_402_300_800_000):
        QueueMessageFactory(created_at=moment, published_at=moment)
    assert run.grow(job).rows == 5
    assert run.verify(job) == []


def test_it_goes_on_where_it_was(job):
    some(10)
    assert run.grow(job).rows == 10
    assert run.grow(job).segments == 0
    some(5, "other")
    assert (run.grow(job).rows, ArchiveSegment.objects.count()) == (5, 2)
    assert held(job) == expected()


def test_segments_are_cut_by_offsets(job):
    some(25)
    assert run.grow(job, segment_offsets=10, task_offsets=4).segments == 3
    assert held(job) == expected()
    rows = ArchiveSegment.objects.order_by("lo")
    assert [(after.lo, before.hi + 1) for before, after in itertools.pairwise(rows)] == [
        (after.lo, after.lo) for after in rows[1:]
    ]


def test_what_was_gone_before_the_first_run_costs_nothing(job, monkeypatch):
    QueueMessageFactory(offset=50_000)
    jobs = []
    monkeypatch.setattr(run, "spread", lambda spark, work, items: jobs.append(items) or [work(one) for one in items])
    assert run.grow(job, segment_offsets=10).segments == 1
    assert jobs == [[Span(50_000 - 1, 50_000)]]
    assert archiving.archived_offset(Session(USING)) == 50_000


def test_an_empty_log_is_archived_as_nothing(job):
    assert run.grow(job).segments == 0
    assert held(job) == []


def test_a_gap_in_the_log_is_archived_as_a_gap(job):
    some(20)
    known = list(QueueMessage.objects.order_by("offset").values_list("offset", flat=True))
    QueueMessage.objects.filter(offset__in=known[5:15]).delete()
    run.grow(job, segment_offsets=5)
    assert held(job) == expected()
    assert archiving.archived_offset(Session(USING)) == known[-1]


def test_topics_and_days_can_be_chosen(job):
    day = 1_700_000_000_000
    for number in range(6):
        QueueMessageFactory(topic=("a", "b")[number % 2], published_at=day + number * 86_400_000)
    run.grow(job)
    assert {row[1] for row in held(job, topics=["a"])} == {"a"}
    since = datetime.datetime.fromtimestamp(day / 1000 + 2 * 86_400, datetime.UTC)
    assert len(held(job, since=since)) == 4
    assert len(held(job, since=since, until=since + datetime.timedelta(days=2))) == 2
    assert held(job, topics=["none"]) == []


# -- nothing is committed that is not right -----------------------------------


def test_what_is_not_as_the_log_is_not_committed(job, monkeypatch):
    some(5)
    monkeypatch.setattr(checksums, "of_log", lambda database, span: checksums.Sum(5, 1))
    with pytest.raises(files.Mismatch, match="nothing was committed"):
        files.write_span(job.place, job.root, "segment", Span(0, 10**6))
    assert not ArchiveSegment.objects.exists()


@pytest.mark.parametrize("column", [column.name for column in checksums.COLUMNS if column.name != "offset"])
def test_every_column_is_in_the_checksum(place, column):
    QueueMessageFactory(
        topic="a", partition_key="b", message_id="c", payload=b"d", metadata={"e": 1}, target_group="f",
        original_id="g", original_topic="h", original_offset=1, failed_group="i", failed_at=2, failure_count=3,
        last_error="j", created_at=4, published_at=5,
    )  # fmt: skip
    offset = QueueMessage.objects.get().offset
    with place.connect() as database:
        before = checksums.of_log(database, Span(0, offset))
        changed = {"payload": b"dd"} if column in ("payload", "size") else {}
        name = {"id": "message_id"}.get(column, column)
        if not changed:
            value = getattr(QueueMessage.objects.get(), name)
            changed = {name: value + ("x" if isinstance(value, str) else 1) if name != "metadata" else {"e": 2}}
        QueueMessage.objects.update(**changed)
        assert checksums.of_log(database, Span(0, offset)) != before


def test_the_servers_checksum_is_that_of_arrow(place):
    from django_mysqlqueue.pipeline.archive.files import EVERYTHING
    from django_mysqlqueue.pipeline.log_schema import NAMES
    from django_mysqlqueue.pipeline.reading import Query, rows_of

    for number, text in enumerate(HOSTILE):
        QueueMessageFactory(topic=text, partition_key=text, message_id=text or "-", payload=text.encode() * number)
        QueueMessageFactory(topic="m", metadata={text: [number, 1.5, None, text]}, last_error=text * 3)
        QueueMessageFactory(
            topic="d",
            target_group=text,
            original_id=f"{text},",
            original_topic=text,
            original_offset=-number,
            failed_group=f",{text}",
            failed_at=number,
            failure_count=number,
        )
    known = QueueMessage.objects.order_by("offset").values_list("offset", flat=True)
    with place.connect() as database:
        for span in Span(known[0] - 1, list(known)[-1]).split(len(known)):
            rows = [row for some in rows_of(database, Query(NAMES), EVERYTHING, span) for row in some]
            found = checksums.of_batch(EVERYTHING.batch(rows, exact=True)) if rows else checksums.Sum()
            assert found == checksums.of_log(database, span)


def test_two_runs_do_not_collide(job):
    some(5)
    with job.place.connect() as other:
        assert other.lock(run.LOCK)
        with pytest.raises(PipelineError, match="another run"):
            run.grow(job)
    assert run.grow(job).rows == 5


def test_of_two_runs_without_a_lock_one_commits(job):
    some(5)
    span = Span(0, QueueMessage.objects.order_by("-offset")[0].offset)
    (first,), (second,) = (run._copy(job, HOME, 1, span, 100_000) for _ in range(2))
    with job.place.connect() as database:
        manifest.add(database, first)
        with pytest.raises(PipelineError, match="another run"):
            manifest.add(database, second)
    assert held(job) == expected()


def test_files_that_no_row_names_are_not_read(job):
    some(5)
    span = Span(0, QueueMessage.objects.order_by("-offset")[0].offset)
    run._copy(job, HOME, 1, span, 100_000)  # and died before its row
    assert held(job) == []
    run.grow(job)
    assert held(job) == expected()
    assert len(parquet(job)) > len([file for one in segments(job) for file in one.files])


def test_a_segment_with_too_many_files_becomes_several(job, monkeypatch):
    for number in range(12):
        some(2, f"t{number}")
    one = manifest.File("x" * 80, "t1", "2026-11-22", 2, 2**33, 50_000, 50_001, 5000)
    monkeypatch.setattr(run, "FILES_BYTES", manifest.text_bytes([one] * 4))
    assert run.grow(job, task_offsets=6).segments > 2
    known = segments(job)
    assert max(len(one.files) for one in known) <= 4
    assert manifest.archived(known) == known[-1].hi
    assert held(job) == expected()
    assert run.verify(job) == []
    # Nor does merging make one of them again.
    run.compact(job)
    assert max(len(one.files) for one in segments(job)) <= 4
    assert held(job) == expected()


def test_a_segment_whose_row_no_statement_takes_is_an_error(job, monkeypatch):
    for number in range(6):
        some(1, f"t{number}")
    with job.place.connect() as database:
        monkeypatch.setattr(type(database), "max_statement_bytes", lambda database: 2500)
    with pytest.raises(PipelineError, match=r"the names of 6 files take \d+ bytes, .*max_allowed_packet allows 750"):
        run.grow(job)
    assert not ArchiveSegment.objects.exists()


def segments(job: Job) -> list[manifest.Segment]:
    with job.place.connect() as database:
        return manifest.segments(database)


def test_a_hole_is_filled(job):
    some(20)
    run.grow(job, segment_offsets=5)
    lost = ArchiveSegment.objects.order_by("lo")[1].lo
    ArchiveSegment.objects.filter(lo=lost).delete()
    assert archiving.archived_offset(Session(USING)) == lost - 1
    assert [fault.says for fault in run.verify(job)] == ["no segment holds these offsets"]
    assert run.grow(job).segments == 1
    assert held(job) == expected()


# -- what GC keeps for it -----------------------------------------------------


def test_gc_deletes_nothing_that_is_not_archived(job, settings):
    settings.MYSQLQUEUE = {"RETENTION": 0, "ARCHIVE_REQUIRED": True}
    sub = Sub(handler())
    publish_many("t", range(5))
    sub.settle()
    assert retention.collect(USING).messages == 0
    before = expected()
    run.grow(job)
    publish_many("t", range(3))
    sub.settle()
    assert retention.collect(USING).messages == 5
    assert held(job) == before
    assert QueueMessage.objects.count() == 3
    assert len(collected(frames.everything(job.spark, job.place, job.root))) == 8


def test_what_gc_took_before_a_run_is_said(job, settings, capsys):
    settings.MYSQLQUEUE = {"RETENTION": 0, "ARCHIVE_PATH": job.root.uri}
    sub = Sub(handler())
    publish_many("t", range(4))
    sub.settle()
    run.grow(job)
    assert retention.collect(USING).messages == 4
    assert run.grow(job).missed == 0
    publish_many("t", range(3))
    sub.settle()
    last = QueueMessage.objects.order_by("-offset")[0].offset
    assert retention.collect(USING).messages == 3
    call_command("queuearchive")
    assert f"GC had taken messages up to offset {last}" in capsys.readouterr().out
    assert run.grow(job).missed == 0


def test_a_folder_that_is_not_shared_is_noticed(job, monkeypatch):
    some(3)
    monkeypatch.setattr(files.Folder, "sizes", lambda folder, relative: [-1] * len(relative))
    with pytest.raises(PipelineError, match="all workers share"):
        run.grow(job)
    assert not ArchiveSegment.objects.exists()


def test_what_is_wrong_in_a_task_is_said_as_it_is(job, monkeypatch):
    def wrong(*args):
        raise files.Mismatch("not as the log")

    some(3)
    monkeypatch.setattr(files, "write_span", wrong)
    with pytest.raises(files.Mismatch, match=r"^not as the log$"):
        run.grow(job)


def test_gc_stops_before_a_hole(job, settings):
    settings.MYSQLQUEUE = {"RETENTION": 0, "ARCHIVE_REQUIRED": True}
    sub = Sub(handler())
    publish_many("t", range(9))
    sub.settle()
    run.grow(job, segment_offsets=3)
    ArchiveSegment.objects.order_by("lo")[1].delete()
    assert retention.collect(USING).messages == 3


def test_what_gc_took_before_it_was_archived_is_an_error(job, settings):
    settings.MYSQLQUEUE = {"RETENTION": 0}
    sub = Sub(handler())
    publish_many("t", range(5))
    sub.settle()
    run.grow(job)
    publish_many("t", range(5))
    sub.settle()
    retention.collect(USING)
    with pytest.raises(PipelineError, match="GC has removed messages"):
        frames.everything(job.spark, job.place, job.root)


# -- checking, merging, letting go --------------------------------------------


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
    assert any("holds" in text for text in says)


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
    row = (1, b"t", b"k", b"i", b"x" * 1000, 1000, b"{}", 5, 6, b"")
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
    last = archiving.archived_offset(Session(USING))
    assert len(run.expire(job, before=limit)) == 2
    assert len(held(job)) == 2
    assert archiving.archived_offset(Session(USING)) == last
    assert len(run.expire(job, before=datetime.date(2200, 1, 1))) == 1
    assert run.grow(job).segments == 0
    assert len(run.sweep(job, grace=datetime.timedelta(0))) == 3
    assert len(held(job)) == 1


# -- a period -----------------------------------------------------------------


@pytest.mark.parametrize("step", [0, 26])
def test_of_the_log_only_the_period_is_read(job, monkeypatch, step):
    """Its beginning is found by halving, which a clock that was a day ahead for a while must not mislead."""
    begin, minute = 1_780_000_000_000, 60_000
    # A message every ten minutes; the hours from 3 to 10 were written as those of the next day.
    moments = [begin + number * 10 * minute + (1440 * minute if 18 <= number < 60 else 0) for number in range(288)]
    QueueMessage.objects.bulk_create(QueueMessageFactory.build(published_at=moment) for moment in moments)
    found: list[bool] = []
    monkeypatch.setattr(frames, "CLOCK_STEP", datetime.timedelta(hours=step))
    for first, behind in ((26, 40), (2, 9), (31, 33), (0, 80)):
        edges = [begin + hour * 60 * minute for hour in (first, behind)]
        since, until = (datetime.datetime.fromtimestamp(edge / 1000, datetime.UTC) for edge in edges)
        wanted = [moment for moment in moments if edges[0] <= moment < edges[1]]
        rows = frames.everything(job.spark, job.place, None, since=since, until=until, columns=("published_at",))
        found.append(sorted(int(row[0].timestamp() * 1000) for row in rows.collect()) == sorted(wanted))
    assert all(found) == (step > 0)
    plan = frames.everything(job.spark, job.place, None, since=since)._jdf.queryExecution()
    kept = [line for line in plan.executedPlan().toString().splitlines() if re.match(r"[-+ *():\d]*Filter ", line)]
    assert kept
    assert "offset" not in "".join(kept), "the source has taken that condition"


def test_a_moment_without_a_zone_is_named(job):
    naive = datetime.datetime(2026, 11, 22)  # noqa: DTZ001
    with pytest.raises(PipelineError, match="since 2026-11-22T00:00:00: must have a time zone"):
        frames.everything(job.spark, job.place, job.root, since=naive)
    with pytest.raises(PipelineError, match="until 2026-11-22T00:00:00: must have a time zone"):
        frames.archive(job.spark, job.place, job.root, until=naive)
    some(2)
    first = datetime.datetime.min.replace(tzinfo=datetime.UTC)
    last = datetime.datetime.max.replace(tzinfo=datetime.UTC)
    assert frames.everything(job.spark, job.place, job.root, since=first, until=last).count() == 2


def test_what_gc_took_of_a_period_is_an_error(job, settings):
    """Also if another topic's messages are left on both sides of it."""
    settings.MYSQLQUEUE = {"TOPICS": {"t": {"RETENTION": 0}, "kept": {"RETENTION": 86_400}}}
    sub = Sub(handler())
    some(2, "kept")
    run.grow(job)
    some(2, "kept")
    since = datetime.datetime.now(datetime.UTC)
    publish_many("t", range(3))
    sub.settle()
    some(2, "kept")
    retention.collect(USING)
    with pytest.raises(PipelineError, match="GC has removed messages"):
        frames.everything(job.spark, job.place, job.root, since=since)
    assert len(collected(frames.everything(job.spark, job.place, job.root, topics=["kept"], since=since))) == 2
    assert len(collected(frames.everything(job.spark, job.place, None, since=since))) == 2

"""Verifying, compacting and expiring archives, and deleting files that they no longer have."""

from __future__ import annotations

import datetime
import os
import random
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from django_mysqlqueue.models import Sequencer
from pyspark_mysqlqueue import checksums
from pyspark_mysqlqueue.archive import files, run, table
from pyspark_mysqlqueue.archive.root import Root, sync
from pyspark_mysqlqueue.archive.table import Table
from pyspark_mysqlqueue.errors import PipelineError
from pyspark_mysqlqueue.log_marks import Position
from tests.support.archives import contents, held, named, parquet, read, some
from tests.support.factories import QueueMessageFactory
from tests.support.garbage import archived_offset
from tests.support.spark_log import expected

DAY_MS = 86_400_000


@pytest.mark.any_engine
@pytest.mark.promise("Archive")
def test_verify_finds_what_is_wrong_with_files(job):
    some(20)
    run.grow(job, commit_offsets=5)
    gone, short, changed, fewer = named(job)
    gone.unlink()
    short.write_bytes(short.read_bytes()[: short.stat().st_size // 2])
    rows = pq.read_table(changed)
    payloads = [b"other", *rows["payload"].to_pylist()[1:]]
    pq.write_table(rows.set_column(rows.schema.get_field_index("payload"), "payload", pa.array(payloads)), changed)
    pq.write_table(pq.read_table(fewer).slice(1), fewer)
    says = {Path(job.root.uri, fault.path): fault.says for fault in run.verify(job)}
    assert says[gone] == "no such file"
    assert "cannot be read" in says[short]
    assert "does not have its checksum" in says[changed]
    assert says[fewer] == "it has 4 rows, but the table says 5"


@pytest.mark.any_engine
def test_verify_notices_rows_that_another_program_has_deleted(job, tmp_path):
    job = run.Job(job.spark, job.place, Root(str(tmp_path / "plain")))
    some(6)
    run.grow(job)
    first = expected()[0][0]
    Table.open(job.root).delta.delete(f"offset = {first}")
    (fault,) = run.verify(job)
    assert "the files have Sum(rows=5" in fault.says
    assert "but Sum(rows=6" in fault.says


def test_compact_merges_small_files(job):
    # Delta may shorten the least and greatest texts that it notes of a file.
    longest = "x" * 100
    for _ in range(table.MANY):
        some(5)
        some(2, longest)
        run.grow(job)
    before = parquet(job)
    assert run.compact(job) == 7 * table.MANY
    assert len(named(job)) == 1
    assert held(job) == contents(job) == expected()
    assert len(held(job, topics=[longest])) == 2 * table.MANY
    assert run.verify(job) == []
    assert run.compact(job) == 0
    assert run.vacuum(job) == []  # too young
    aged(before)
    assert run.vacuum(job, keep=datetime.timedelta(0)) == []  # The table has had them a moment ago.
    assert held(job) == expected()
    some(3)
    run.grow(job)
    assert held(job) == contents(job) == expected()


@pytest.mark.any_engine
@pytest.mark.parametrize("days", [1, 30], ids=["of one day", "of 30 days"])
def test_thirty_daily_runs_are_compacted_with_few_rows_written_again(tmp_path, days):
    """At most five rows for each new one."""
    root = Root(str(tmp_path / "archive"))
    archive, log = Table.create(root), run.Log("log", 0)
    numbers = random.Random(7)
    rows, written = 4_000, 0
    begin = datetime.datetime(2026, 11, 1, 23, tzinfo=datetime.UTC)
    for number in range(30):
        # As many before midnight as after it.
        moments = [
            begin + datetime.timedelta(days=number if days > 1 else 0, seconds=(n * 7000 // rows) if days > 1 else 1)
            for n in range(rows)
        ]
        found = pa.table(
            {
                "offset": range(number * rows + 1, (number + 1) * rows + 1),
                "topic": ["t"] * rows,
                "partition_key": ["k"] * rows,
                "id": [str(n) for n in range(rows)],
                "payload": [numbers.randbytes(200) for _ in range(rows)],
                "published_at": pa.array(moments, pa.timestamp("us", "UTC")),
            }
        )
        batch = full(found)
        done = files._flush(root.open(), log, [batch])
        archive.append(number * rows, Position((number + 1) * rows, *log), done)
        written += archive.compact(lambda merging: None)
    assert written <= 5 * 30 * rows
    kept = Table.open(root).files()
    assert sum(file.rows for file in kept) == 30 * rows
    assert len(kept) <= (2 * table.MANY * len(table.TIERS) if days == 1 else 2 * 31)


def full(found: pa.Table) -> pa.RecordBatch:
    """Rows with all columns of the log, and their checksums."""
    schema = files.EVERYTHING._schema
    (batch,) = found.combine_chunks().to_batches()
    arrays = [
        batch[field.name].cast(field.type)
        if field.name in batch.schema.names
        else pa.array([None] * batch.num_rows, field.type)
        if field.name in ("publisher_key", "coalesce_key", "expires_at", "failed_at")
        else pa.array([{"metadata": "{}"}.get(field.name, "")] * batch.num_rows, field.type)
        if pa.types.is_string(field.type)
        else batch["published_at"]
        if pa.types.is_timestamp(field.type)
        else pa.array([0] * batch.num_rows, field.type)
        for field in schema
    ]
    made = pa.RecordBatch.from_arrays(arrays, schema=schema)
    place = schema.get_field_index("crc32")
    return made.set_column(place, schema.field(place), checksums.of_rows(made))


@pytest.mark.any_engine
@pytest.mark.promise("Archive")
def test_vacuum_deletes_the_files_of_runs_that_were_killed(job):
    some(3)
    run.grow(job)
    orphan = Path(job.root.uri, "day=2026-11-22", "0" * 32 + ".parquet")
    young = orphan.with_stem("1" * 32)
    for path in (orphan, young):
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"PAR1")
    aged([orphan])
    assert [Path(path).name for path in run.vacuum(job, keep=datetime.timedelta(0))] == [orphan.name]
    assert young.exists()
    assert held(job) == contents(job) == expected()


@pytest.mark.any_engine
def test_files_that_a_vacuum_has_deleted_are_not_committed(job):
    some(5)
    log = run.log_offsets.identity(job.place.connect())
    written = files.write_span(job.place, job.root, log, run.Span(0, expected()[-1][0]))
    Path(job.root.uri, written[0].path).unlink()
    with pytest.raises(PipelineError, match="this program does not see the file"):
        Table.create(job.root).append(0, Position(expected()[-1][0], *log), written)
    assert contents(job) == []


@pytest.mark.any_engine
@pytest.mark.promise("Archive")
def test_two_logs_in_one_archive_leave_each_other_alone(job):
    some(5)
    run.grow(job)
    ours, log_id = expected(), Sequencer.objects.get().log_id
    Sequencer.objects.update(log_id="another database")
    run.grow(job)
    assert held(job) == ours
    assert read(job).num_rows == 10
    assert sorted(set(read(job)["log"].to_pylist())) == sorted({"another database", log_id})
    assert run.verify(job) == []
    Sequencer.objects.update(log_id=log_id)
    some(2)
    run.grow(job)
    assert held(job) == expected()
    assert run.verify(job) == []


@pytest.mark.any_engine
def test_roots_are_the_same_place_for_all(job, tmp_path, monkeypatch):
    """For Arrow, Delta and Spark, and for workers in another folder."""
    some(3)
    found = run.Job(job.spark, job.place, Root(f"file://{tmp_path}/a%20b%23c/"))
    run.grow(found)
    assert held(found) == contents(found) == expected()
    with monkeypatch.context() as patch:
        patch.chdir(tmp_path)
        relative = Root("a b#c")
    assert held(run.Job(job.spark, job.place, relative)) == expected()
    assert Root("s3://bucket/x/").spark_path("f") == "s3a://bucket/x/f"


@pytest.mark.parametrize(
    ("uri", "says"),
    [
        ("s3://key:secret@bucket/x", "has a password"),
        ("s3://bucket/x?region=eu", "set AWS_REGION"),
        ("s3://bucket/x#1", "no '#'"),
        ("file:/srv/x", "file://"),
        ("/srv/50%", "supports no '%'"),
        ("/srv/a\\b", "supports no"),
        ("nonsense://x", "nonsense"),
    ],
)
def test_a_bad_root_is_named(uri, says):
    with pytest.raises(PipelineError, match=says) as caught:
        Root(uri).open()
    assert "secret" not in str(caught.value)


def test_every_new_folder_is_on_disk(tmp_path, monkeypatch):
    synced: list[str] = []
    monkeypatch.setattr("pyspark_mysqlqueue.archive.root.sync", lambda path: synced.append(str(path)))
    for name in ("one", "two"):
        with Root(str(tmp_path / "new" / "root")).open().create(f"day/{name}"):
            pass
    root = f"{tmp_path}/new/root"
    assert synced == [f"{root}/day", root, f"{tmp_path}/new", str(tmp_path), f"{root}/day"]


def test_every_commit_is_on_disk(job, monkeypatch):
    """Before the row is moved on which GC rests."""
    some(3)
    run.grow(job)
    some(3)
    seen: list[Any] = []
    monkeypatch.setattr(table, "sync", lambda path: (seen.append(path.name), sync(path)))
    move = run._move
    monkeypatch.setattr(run, "_move", lambda *args: (seen.append("row"), move(*args)))
    run.grow(job)
    assert seen == ["row", f"{2:020}.json", "_delta_log", Path(job.root.uri).name, "row"]


def test_expire_removes_old_messages(job):
    for number in range(4):
        QueueMessageFactory(published_at=1_700_000_000_000 + number * DAY_MS)
        run.grow(job)
    limit = datetime.datetime.fromtimestamp(1_700_000_000 + 2 * 86_400, datetime.UTC).date()
    last = archived_offset()
    assert run.expire(job, before=limit) == 2
    assert held(job) == contents(job) == expected()[2:]
    assert run.verify(job) == []
    assert run.expire(job, before=datetime.date(2200, 1, 1)) == 2
    assert held(job) == contents(job) == []
    assert archived_offset() == last
    assert run.grow(job).commits == 0
    assert run.verify(job) == []


def aged(paths: list[Path]) -> None:
    """Set the time of files back by a month."""
    before = time.time() - 30 * 86_400
    for path in paths:
        os.utime(path, (before, before))


def test_a_file_without_statistics_may_have_any_topic():
    """As one that another program has written."""
    file = table.TableFile("day=2026-11-22/a.parquet", 1, 1, datetime.date(2026, 11, 22), None, None)
    assert file.may_have(["t"])
    assert not file._replace(topics=("a", "b")).may_have(["t"])

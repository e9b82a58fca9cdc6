"""The archive equals the log, row for row, whatever happens to its writer."""

from __future__ import annotations

import datetime
import itertools
from typing import Any

import pytest

from django_mysqlqueue import publish
from django_mysqlqueue.models import ArchiveSegment, QueueMessage
from pyspark_mysqlqueue import checksums
from pyspark_mysqlqueue.archive import files, manifest, run
from pyspark_mysqlqueue.databases import Place
from pyspark_mysqlqueue.errors import PipelineError
from pyspark_mysqlqueue.reading import Span
from tests.support.archives import HOME, held, parquet, segments, some
from tests.support.factories import QueueMessageFactory
from tests.support.harness import USING, sequence
from tests.support.internals import Session, retention
from tests.support.roles import PASSWORD, account, user_of
from tests.support.spark_log import HOSTILE, LANES, expected

# -- growing ------------------------------------------------------------------


@pytest.mark.promise("Archive")
def test_the_archive_equals_the_log(job):
    some(30)
    publish("bytes", b"\x00\xff\xfe")
    sequence()
    for number, text in enumerate(HOSTILE):
        QueueMessageFactory(topic=text, partition_key=text, message_id=text or "-", payload=text.encode())
        QueueMessageFactory(
            topic="dead", partition_key=str(number), last_error=text, failed_group="g", failed_at=5, failure_count=2
        )
        QueueMessageFactory(partition_key=LANES[number % 3], publisher_key=text, coalesce_key=text, expires_at=number)
    QueueMessageFactory(topic="é" * 120, partition_key="k" * 190, published_at=1_600_000_000_000)
    grown = run.grow(job, task_offsets=7)
    assert grown.rows == QueueMessage.objects.count()
    assert grown.archived == QueueMessage.objects.order_by("-offset")[0].offset
    assert held(job) == expected()
    assert run.verify(job) == []


def test_it_goes_on_where_it_was(job):
    some(10)
    assert run.grow(job).rows == 10
    assert run.grow(job).segments == 0
    some(5, "other")
    assert (run.grow(job).rows, ArchiveSegment.objects.count()) == (5, 2)
    assert held(job) == expected()


@pytest.mark.promise("Roles")
@pytest.mark.servers_only
def test_an_archiver_needs_no_more_than_its_role(job, tmp_path):
    some(10)
    with account("archiver") as own:
        names = {"host": "host", "port": "port", "unix_socket": "socket", "db": "database", "database": "database"}
        details = {names[name]: value for name, value in own.get_connection_params().items() if name in names}
        options = tmp_path / "archiver.cnf"
        lines = [
            f"{name} = {value}"
            for name, value in (details | {"user": user_of("archiver"), "password": PASSWORD}).items()
        ]
        options.write_text("\n".join(["[client]", *lines]))
        theirs = run.Job(job.spark, Place(defaults_file=str(options)), job.root)
        assert run.grow(theirs).rows == 10
        assert run.verify(theirs) == []
    assert held(job) == expected()


@pytest.mark.any_engine
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
    assert retention.archived_offset(Session(USING)) == 50_000


@pytest.mark.any_engine
def test_an_empty_log_is_archived_as_nothing(job):
    assert run.grow(job).segments == 0
    assert held(job) == []


def test_a_gap_in_the_log_is_archived_as_a_gap(job):
    some(20)
    known = list(QueueMessage.objects.order_by("offset").values_list("offset", flat=True))
    QueueMessage.objects.filter(offset__in=known[5:15]).delete()
    run.grow(job, segment_offsets=5)
    assert held(job) == expected()
    assert retention.archived_offset(Session(USING)) == known[-1]


@pytest.mark.any_engine
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


@pytest.mark.promise("Archive")
@pytest.mark.parametrize("column", [column.name for column in checksums.COLUMNS if column.name != "offset"])
def test_every_column_is_in_the_checksum(place, column):
    QueueMessageFactory(
        topic="a", partition_key="b", message_id="c", payload=b"d", metadata={"e": 1}, target_group="f",
        original_id="g", original_topic="h", original_offset=1, failed_group="i", failed_at=2, failure_count=3,
        last_error="j", created_at=4, published_at=5, publisher_key="k", expires_at=6, coalesce_key="l",
    )  # fmt: skip
    offset = QueueMessage.objects.get().offset
    with place.connect() as database:
        before = checksums.of_log(database, Span(0, offset))
        changed: dict[str, Any] = {"payload": b"dd"} if column in ("payload", "size") else {}
        if column == "priority":
            changed = {"partition_key": "__p:+001:b"}
        name = {"id": "message_id"}.get(column, column)
        if not changed:
            value = getattr(QueueMessage.objects.get(), name)
            changed = {name: value + ("x" if isinstance(value, str) else 1) if name != "metadata" else {"e": 2}}
        QueueMessage.objects.update(**changed)
        assert checksums.of_log(database, Span(0, offset)) != before


def test_nothing_differs_from_null_in_the_checksum(place):
    offset = QueueMessageFactory().offset
    texts = ({name: text} for name in ("publisher_key", "coalesce_key") for text in ("", ",", "0"))
    found = []
    for values in ({}, {"expires_at": 0}, *texts):
        QueueMessage.objects.update(**dict.fromkeys(("publisher_key", "coalesce_key", "expires_at")) | values)
        with place.connect() as database:
            found.append(checksums.of_log(database, Span(0, offset)))
    assert len(set(found)) == len(found) == 8


def test_the_servers_checksum_is_that_of_arrow(place):
    from pyspark_mysqlqueue.archive.files import EVERYTHING
    from pyspark_mysqlqueue.log_schema import NAMES
    from pyspark_mysqlqueue.reading import Query, rows_of

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
        for values in ({"publisher_key": text}, {"coalesce_key": text}, {"expires_at": number - 5}, {}):
            QueueMessageFactory(topic="n", partition_key=LANES[number % 3], **values)
    known = list(QueueMessage.objects.order_by("offset").values_list("offset", flat=True))
    everything = Span(known[0] - 1, known[-1])
    with place.connect() as database:
        for span in (everything, *everything.split(len(known))):
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


@pytest.mark.any_engine
def test_files_that_no_row_names_are_not_read(job):
    some(5)
    span = Span(0, QueueMessage.objects.order_by("-offset")[0].offset)
    run._copy(job, HOME, 1, span, 100_000)  # and died before its row
    assert held(job) == []
    run.grow(job)
    assert held(job) == expected()
    assert len(parquet(job)) > len([file for one in segments(job) for file in one.files])


@pytest.mark.any_engine
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


@pytest.mark.any_engine
def test_a_hole_is_filled(job):
    some(20)
    run.grow(job, segment_offsets=5)
    lost = ArchiveSegment.objects.order_by("lo")[1].lo
    ArchiveSegment.objects.filter(lo=lost).delete()
    assert retention.archived_offset(Session(USING)) == lost - 1
    assert [fault.says for fault in run.verify(job)] == ["no segment contains these offsets"]
    assert run.grow(job).segments == 1
    assert held(job) == expected()

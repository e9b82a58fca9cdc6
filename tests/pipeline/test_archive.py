"""The archive equals the log, row for row, whatever happens to its writer."""

from __future__ import annotations

import datetime
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake.exceptions import CommitFailedError

from django_mysqlqueue import publish
from django_mysqlqueue.models import QueueMessage, Reader, Sequencer
from pyspark_mysqlqueue import checksums, log_marks, log_offsets
from pyspark_mysqlqueue.archive import files, run
from pyspark_mysqlqueue.archive.root import Root
from pyspark_mysqlqueue.archive.table import Table
from pyspark_mysqlqueue.databases import Place
from pyspark_mysqlqueue.errors import PipelineError
from pyspark_mysqlqueue.reading import Span
from tests.support.archives import contents, held, named, parquet, read, some
from tests.support.backups import Backup
from tests.support.factories import QueueMessageFactory
from tests.support.garbage import archived_offset
from tests.support.harness import USING, sequence
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
    assert run.grow(job).commits == 0
    some(5, "other")
    assert run.grow(job).rows == 5
    assert held(job) == contents(job) == expected()


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
def test_ranges_are_cut_by_offsets(job):
    some(25)
    assert run.grow(job, commit_offsets=10, task_offsets=4).commits == 3
    assert held(job) == expected()
    assert len(named(job)) == 3 + 3 + 2


def test_what_was_gone_before_the_first_run_costs_nothing(job, monkeypatch):
    QueueMessageFactory(offset=50_000)
    jobs = []
    monkeypatch.setattr(run, "spread", lambda spark, work, items: jobs.append(items) or [work(one) for one in items])
    assert run.grow(job, commit_offsets=10).commits == 1
    assert jobs == [[Span(50_000 - 1, 50_000)]]
    assert archived_offset() == 50_000


@pytest.mark.any_engine
def test_an_empty_log_is_archived_as_nothing(job):
    assert run.grow(job).commits == 0
    assert held(job) == []


def test_a_gap_in_the_log_is_archived_as_a_gap(job):
    some(20)
    known = list(QueueMessage.objects.order_by("offset").values_list("offset", flat=True))
    QueueMessage.objects.filter(offset__in=known[5:15]).delete()
    run.grow(job, commit_offsets=5)
    assert held(job) == expected()
    assert archived_offset() == known[-1]


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


@pytest.mark.parametrize("column", ["payload", "metadata", "failure_count", "crc32"])
def test_what_is_not_as_the_log_is_not_committed(job, monkeypatch, column):
    """Whatever has become of a row on its way through driver, Arrow and disk."""
    some(5)
    real = files.EVERYTHING.batch

    def spoilt(rows):
        batch = real(rows)
        place = batch.schema.get_field_index(column)
        values = batch.column(place).to_pylist()
        values[3] = values[3] + (b"x" if column == "payload" else "x" if column == "metadata" else 1)
        return batch.set_column(place, batch.schema.field(place), pa.array(values, batch.schema.field(place).type))

    monkeypatch.setattr(files.EVERYTHING, "batch", spoilt)
    last = QueueMessage.objects.order_by("-offset")[0].offset
    with pytest.raises(files.Mismatch, match=f"the row of offset {last - 1} does not have its checksum"):
        files.write_span(job.place, job.root, log_of(job), Span(0, last))


def test_a_row_that_was_not_read_is_noticed(job, monkeypatch):
    some(5)
    real = files.rows_of
    monkeypatch.setattr(files, "rows_of", lambda *args: (rows[:-1] for rows in real(*args)))
    last = QueueMessage.objects.order_by("-offset")[0].offset
    with pytest.raises(files.Mismatch, match="the log has 5 rows, but the files have 4; nothing was committed"):
        files.write_span(job.place, job.root, log_of(job), Span(0, last))


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
        before = checksum(database, offset)
        changed: dict[str, Any] = {"payload": b"dd"} if column in ("payload", "size") else {}
        if column == "priority":
            changed = {"partition_key": "__p:+001:b"}
        name = {"id": "message_id"}.get(column, column)
        if not changed:
            value = getattr(QueueMessage.objects.get(), name)
            changed = {name: value + ("x" if isinstance(value, str) else 1) if name != "metadata" else {"e": 2}}
        QueueMessage.objects.update(**changed)
        assert checksum(database, offset) != before


def test_nothing_differs_from_null_in_the_checksum(place):
    offset = QueueMessageFactory().offset
    texts = ({name: text} for name in ("publisher_key", "coalesce_key") for text in ("", ",", "0"))
    found = []
    for values in ({}, {"expires_at": 0}, *texts):
        QueueMessage.objects.update(**dict.fromkeys(("publisher_key", "coalesce_key", "expires_at")) | values)
        with place.connect() as database:
            found.append(checksum(database, offset))
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
    last = QueueMessage.objects.order_by("-offset")[0].offset
    with place.connect() as database:
        for rows in rows_of(database, Query(NAMES), EVERYTHING, Span(0, last)):
            batch = EVERYTHING.batch(rows)
            assert checksums.of_rows(batch).to_pylist() == batch["crc32"].to_pylist()
            for number in range(batch.num_rows):
                assert checksums.of_rows(batch.slice(number, 1))[0] == batch["crc32"][number]


def test_two_runs_do_not_collide(job):
    some(5)
    with job.place.connect() as other:
        assert other.lock(run.LOCK)
        with pytest.raises(PipelineError, match="another run"):
            run.grow(job)
    assert run.grow(job).rows == 5


def test_of_two_runs_without_a_lock_one_commits(job):
    some(5)
    log, last = log_of(job), QueueMessage.objects.order_by("-offset")[0].offset
    end = end_of(job, last)
    Table.create(job.root)
    first, second = Table.open(job.root), Table.open(job.root)
    written = files.write_span(job.place, job.root, log, Span(0, last))
    first.append(0, end, written)
    with pytest.raises(PipelineError, match="another run has archived some of them meanwhile"):
        second.append(0, end_of(job, last - 1), files.write_span(job.place, job.root, log, Span(0, last - 1)))
    with pytest.raises(PipelineError, match="another run has archived some of them meanwhile"):
        Table.open(job.root).append(0, end, written)
    assert held(job) == contents(job) == expected()


@pytest.mark.any_engine
def test_a_commit_whose_answer_was_lost_is_not_made_again(job, monkeypatch):
    some(5)
    log, last = log_of(job), QueueMessage.objects.order_by("-offset")[0].offset
    end = end_of(job, last)
    table = Table.create(job.root)
    real = table.delta.create_write_transaction

    def lost(*args, **options):
        real(*args, **options)
        raise CommitFailedError("no answer")

    monkeypatch.setattr(table.delta, "create_write_transaction", lost, raising=False)
    table.append(0, end, files.write_span(job.place, job.root, log, Span(0, last)))
    assert held(job) == contents(job) == expected()


@pytest.mark.any_engine
def test_files_that_the_table_does_not_name_are_not_read(job):
    some(5)
    Table.create(job.root)
    last = QueueMessage.objects.order_by("-offset")[0].offset
    files.write_span(job.place, job.root, log_of(job), Span(0, last))  # and died before its commit
    assert held(job) == contents(job) == []
    run.grow(job)
    assert held(job) == contents(job) == expected()
    assert len(parquet(job)) == 2 * len(named(job))


@pytest.mark.promise("Archive")
def test_a_run_starts_from_the_end_that_the_table_has(job):
    """The row in the database is behind after a crash between the two."""
    some(5)
    run.grow(job)
    row = Reader.objects.get()
    some(5)
    run.grow(job)
    Reader.objects.update(read_offset=row.read_offset)
    assert run.grow(job).commits == 0
    assert archived_offset() == QueueMessage.objects.order_by("-offset")[0].offset
    assert held(job) == contents(job) == expected()


@pytest.mark.promise("Archive")
@pytest.mark.parametrize("grown", [False, True], ids=["shorter", "grown past the archive"])
def test_a_database_that_went_back_stops_the_archive(job, grown):
    mark_is_due()
    some(5)
    backup = Backup(USING)
    mark_is_due()
    some(5)
    run.grow(job)
    before = expected()
    backup.restore()
    if grown:
        mark_is_due()
        some(9)
    with pytest.raises(
        PipelineError, match=r"was restored to an earlier state since: connect to the database that was"
    ):
        run.grow(job)
    assert contents(job) == before
    assert run.new_epoch(job).epoch == 1
    run.grow(job)
    assert held(job) == expected()
    assert read(job).num_rows == len(before) + len(expected())
    assert len(set(zip(*(read(job)[name].to_pylist() for name in ("log", "epoch", "offset")), strict=True))) == len(
        before
    ) + len(expected())
    assert run.verify(job) == []
    backup.restore()  # which is of epoch 0, too
    with pytest.raises(PipelineError, match="was restored to an earlier state since"):
        run.grow(job)
    assert run.new_epoch(job).epoch == 2


@pytest.mark.any_engine
def test_an_archive_at_another_path_is_not_begun_by_mistake(job, tmp_path):
    some(5)
    run.grow(job)
    elsewhere = run.Job(job.spark, job.place, Root(str(tmp_path / "elsewhere")))
    with pytest.raises(PipelineError, match="run queuedropreader archive first"):
        run.grow(elsewhere)
    Reader.objects.all().delete()
    assert run.grow(elsewhere).rows == 5
    assert held(elsewhere) == expected()


@pytest.mark.any_engine
def test_a_table_of_somebody_else_is_refused(job, tmp_path):
    from deltalake import write_deltalake

    job = run.Job(job.spark, job.place, Root(str(tmp_path / "other")))
    write_deltalake(job.root.uri, pa.table({"n": [1]}))
    with pytest.raises(PipelineError, match="is not an archive of a queue: it has no column"):
        run.grow(job)


@pytest.mark.any_engine
def test_the_tables_log_has_no_key_id_or_payload(job):
    QueueMessageFactory(payload=b"payload-secret", partition_key="key-secret", message_id="id-secret")
    for number in range(9):
        some(2, f"t{number}")
        run.grow(job)
    run.compact(job)
    Table.open(job.root).delta.create_checkpoint()
    log = list(Path(job.root.uri, "_delta_log").iterdir())
    assert any(path.suffix == ".parquet" for path in log)
    text = "".join(
        str(pq.read_table(path).to_pylist()) if path.suffix == ".parquet" else path.read_text() for path in log
    )
    assert "published_at" in text
    assert "secret" not in text


@pytest.mark.any_engine
def test_where_pyspark_is_not_installed_the_archive_needs_none(place, tmp_path):
    some(5)
    root = tmp_path / "archive"
    code = (
        "import sys; sys.modules['pyspark'] = None; from pyspark_mysqlqueue.cli import main; "
        f"main(['archive', '--path', {str(root)!r}])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "Archived 5 messages in 1 commit" in done.stdout, done.stderr
    assert contents(run.Job(None, place, Root(str(root)))) == expected()


def log_of(job):
    with job.place.connect() as database:
        return log_offsets.identity(database)


def end_of(job, offset):
    with job.place.connect() as database:
        return log_marks.position(database, offset)


def mark_is_due():
    Sequencer.objects.update(marked_at=0)


def checksum(database, offset):
    return database.row(f"SELECT {checksums.sql(database)} FROM queue_messages WHERE `offset` = %s", (offset,))

"""Connections cut, writers that die between two steps, and the archive killed at random."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable
from django.db import OperationalError, connection, connections, transaction

from django_mysqlqueue import Message, publish_many
from django_mysqlqueue.models import CollectedTopic, QueueMessage
from django_mysqlqueue.options.backoff import Backoff
from pyspark_mysqlqueue import databases, frames, log_offsets, readers, reading
from pyspark_mysqlqueue.archive import files, run
from pyspark_mysqlqueue.archive.root import Root
from pyspark_mysqlqueue.archive.run import Job
from pyspark_mysqlqueue.archive.table import Table
from pyspark_mysqlqueue.batches import Selection
from pyspark_mysqlqueue.databases import Place
from pyspark_mysqlqueue.errors import DataLossError, PipelineError
from pyspark_mysqlqueue.log_marks import Position
from pyspark_mysqlqueue.log_schema import NAMES, RARE, Log
from pyspark_mysqlqueue.reading import Query, Span
from tests.support.archives import contents, held, named, parquet, readings, some
from tests.support.factories import QueueMessageFactory
from tests.support.garbage import archived_offset
from tests.support.harness import sequence
from tests.support.server_sessions import processlist
from tests.support.spark_log import collected, expected

ROOT = Path(__file__).parents[2]


@pytest.fixture
def local(place: Place, tmp_path: Path) -> Job:
    return Job(None, place, Root(str(tmp_path / "local")))


@pytest.fixture
def job(spark: Any, place: Place, tmp_path: Path) -> Job:
    return Job(spark, place, Root(str(tmp_path / "archive")))


def cut_others() -> int:
    """Ends every other connection to this database, as a failover does; returns how many, when the last is gone."""
    deadline = time.monotonic() + 60
    with connection.cursor() as cursor:

        def others() -> set[int]:
            cursor.execute(f"SELECT id FROM {processlist()} WHERE db = DATABASE() AND id <> CONNECTION_ID()")
            return {number for (number,) in cursor.fetchall()}

        cut: set[int] = set()
        for number in others():
            with contextlib.suppress(OperationalError):  # it has ended by itself
                cursor.execute(f"KILL {number}")
                cut.add(number)
        while cut & others():
            assert time.monotonic() < deadline, "connections that were killed live on"
            time.sleep(0.01)
    return len(cut)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (reading, files):
        monkeypatch.setattr(module, "RECONNECT", Backoff(initial=0.01))


# -- connections --------------------------------------------------------------


@pytest.mark.servers_only
def test_a_reader_goes_on_behind_its_last_row(place, impatient, monkeypatch):
    monkeypatch.setattr(reading, "FIRST_FETCH", 5)
    monkeypatch.setattr(reading, "FETCH_BYTES", 4 * 2**20)
    for number in range(60):
        QueueMessageFactory(payload=bytes([number]) * 600_000)
    known = list(QueueMessage.objects.order_by("offset").values_list("offset", flat=True))
    found: list[int] = []
    cuts = 0
    for batch in reading.read(place, Query(("payload", "offset")), Span(0, known[-1])):
        found += batch.column("offset").to_pylist()
        if len(found) in range(1, 50) and cuts < 3:
            cuts += cut_others() > 0
    assert found == known
    assert cuts == 3


def test_what_gc_took_is_noticed_also_when_the_connection_is_lost(place, impatient, monkeypatch):
    """GC takes the first rows between planning and reading; the connection is lost behind the next ones."""
    monkeypatch.setattr(reading, "FIRST_FETCH", 2)
    monkeypatch.setattr(reading, "FETCH_ROWS", 2)
    QueueMessageFactory.create_batch(10)
    known = list(QueueMessage.objects.order_by("offset").values_list("offset", flat=True))
    QueueMessage.objects.filter(offset__in=known[:3]).delete()
    CollectedTopic.objects.create(topic="t", collected_offset=known[2], published_at=1)
    rows_of, losses = reading.rows_of, []

    def lose_once(*args: Any) -> Iterator[Any]:
        for rows in rows_of(*args):
            yield rows
            if not losses:
                import sqlite3

                losses.append(1)
                raise sqlite3.OperationalError("database is locked")

    monkeypatch.setattr(reading, "rows_of", lose_once)
    query = Query(("offset",), watch_above=known[0] - 1)
    with pytest.raises(DataLossError):
        list(reading.read(place, query, Span(known[0] - 1, known[-1])))


def test_large_rows_behind_small_ones_do_not_fill_the_memory(place, monkeypatch):
    monkeypatch.setattr(reading, "FETCH_BYTES", 100_000)
    monkeypatch.setattr(reading, "FETCH_ROWS", 40)
    monkeypatch.setattr(reading, "FIRST_FETCH", 5)
    for number in range(120):
        QueueMessageFactory(payload=b"x" * (1 if number < 60 else 30_000))
    known = list(QueueMessage.objects.order_by("offset").values_list("offset", flat=True))
    with place.connect() as database:
        names = ("payload", "offset")
        pieces = list(reading.rows_of(database, Query(names), Selection(names), Span(0, known[-1])))
    assert [row[0] for rows in pieces for row in rows] == known
    assert max(map(len, pieces)) == 40
    assert max(sum(len(row[1]) for row in rows) for rows in pieces) <= 100_000 + 5 * 30_000


def test_a_reader_gives_up_at_last(place, impatient, monkeypatch):
    tried = []

    def refuse(self: Any, *args: Any) -> None:
        import sqlite3

        tried.append(1)
        raise sqlite3.OperationalError("database is locked")

    monkeypatch.setattr(databases.SQLiteFile, "__init__", refuse)
    monkeypatch.setattr(databases.Server, "__init__", refuse)
    with pytest.raises(Exception, match="locked"):
        list(reading.read(place, Query(NAMES), Span(0, 5)))
    assert len(tried) == reading.TRIES


@pytest.mark.servers_only
def test_a_lost_connection_is_no_fault_of_the_archive(place, impatient, tmp_path, monkeypatch):
    """The span is written anew, under other names, and only those are named."""
    for number in range(40):
        QueueMessageFactory(payload=os.urandom(600_000), topic=f"t{number % 2}")
    last = QueueMessage.objects.order_by("-offset")[0].offset
    monkeypatch.setattr(files, "FLUSH_BYTES", 2**20)
    write, cuts = files.write_file, []

    def cut_once(*args: Any) -> Any:
        if not cuts:
            cuts.append(cut_others())
        return write(*args)

    monkeypatch.setattr(files, "write_file", cut_once)
    written = files.write_span(place, Root(str(tmp_path)), Log("log", 0), Span(0, last))
    assert cuts[0] > 0
    assert sum(one.rows for file in written for one in file.sums.values()) == 40
    assert len(list(tmp_path.rglob("*.parquet"))) > len(written)


# -- between two steps --------------------------------------------------------


class Died(BaseException):
    """As a SIGKILL: nothing that would catch an Exception runs."""


def die(*args: Any, **kwargs: Any) -> Any:
    raise Died


@pytest.mark.promise("Archive")
@pytest.mark.parametrize("step", ["first", "written", "checked", "committed", "synced", "moved"])
def test_a_death_around_the_commit_leaves_all_or_nothing(job, step, monkeypatch):
    some(12)
    with monkeypatch.context() as patch:
        target, name = {
            "first": (Table, "create"),
            "written": (Table, "append"),
            "checked": (DeltaTable, "create_write_transaction"),
            "committed": (DeltaTable, "create_write_transaction"),
            "synced": (Table, "_synced"),
            "moved": (readers, "move"),
        }[step]
        real, calls = getattr(target, name), []

        def dying(*args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            found = real(*args, **kwargs) if len(calls) < later or step == "committed" else None
            return found if len(calls) < later else die()

        # The table's creation is a commit, too, and registers the archive.
        later = 2 if step in ("synced", "moved") else 1
        patch.setattr(target, name, dying)
        with pytest.raises(Died):
            run.grow(job)
    before = [] if Table.find(job.root) is None else contents(job)
    assert before == (expected() if step in ("committed", "synced", "moved") else [])
    assert archived_offset() == 0
    run.grow(job)
    assert held(job) == contents(job) == expected()
    assert archived_offset() == expected()[-1][0]
    assert run.verify(job) == []


def test_a_task_that_dies_is_run_again(job, tmp_path):
    some(40)
    marker = tmp_path / "died"
    write = files.write_span

    def dying(place: Place, root: Root, log: Log, span: Span) -> Any:
        written = write(place, root, log, span)
        try:
            marker.touch(exist_ok=False)
        except FileExistsError:
            return written
        os.kill(os.getpid(), signal.SIGKILL)
        return None

    from pyspark_mysqlqueue.executors import spread

    last = QueueMessage.objects.order_by("-offset")[0].offset
    spans = Span(last - 40, last).split(2)
    place, root = job.place, job.root
    with place.connect() as database:
        log = log_offsets.identity(database)
    found = spread(job.spark, lambda span: dying(place, root, log, span), spans)
    assert marker.exists()
    written = [file for some_files in found for file in some_files]
    Table.create(root).append(0, Position(last, *log), written)
    assert held(job) == contents(job) == expected()
    assert len(parquet(job)) > len(written)


@pytest.mark.promise("Archive")
def test_a_process_that_dies_is_an_error_and_the_next_run_goes_on(local, monkeypatch):
    some(40)
    monkeypatch.setattr(files, "write_span", kill_self)
    with pytest.raises(PipelineError, match="a process of this run was killed"):
        run.grow(local)
    monkeypatch.undo()
    run.grow(local)
    assert contents(local) == expected()


def kill_self(*args: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


# -- at random ----------------------------------------------------------------


@pytest.fixture
def busy(place: Place) -> Iterator[list[int]]:
    """Publishers with transactions that stay open and that roll back, and a sequencer; yields what they committed."""
    stop = threading.Event()
    committed: list[int] = []
    failures: list[BaseException] = []

    def work(body: Any) -> None:
        try:
            while not stop.is_set():
                body()
        except BaseException as error:
            failures.append(error)
        finally:
            connections.close_all()

    def publishing() -> None:
        count = random.randint(1, 40)
        try:
            with transaction.atomic():
                publish_many(
                    random.choice(("a", "b", "c.d")),
                    (Message({"n": n, "text": "x" * random.randint(0, 300)}, key=f"k{n % 5}") for n in range(count)),
                )
                if connection.vendor != "sqlite":  # one writer at a time: it would hold up everybody
                    time.sleep(random.random() * 0.3)
                if random.random() < 0.3:
                    raise ZeroDivisionError
            committed.append(count)
        except ZeroDivisionError:
            pass
        time.sleep(0.02)

    def sequencing() -> None:
        sequence()
        time.sleep(0.05)

    threads = [threading.Thread(target=work, args=(publishing,)) for _ in range(4)]
    threads.append(threading.Thread(target=work, args=(sequencing,)))
    for thread in threads:
        thread.start()
    yield committed
    stop.set()
    for thread in threads:
        thread.join()
    assert not failures, failures


def kill_while(command: list[str], root: Path, patience: float = 60) -> bool:
    """Starts a program with its processes in a session of their own and kills all of it a random time after it has
    begun to write, or at random before; false: it was done before."""
    before = len(list(root.rglob("*.parquet")))
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    deadline = time.monotonic() + (patience if random.random() < 0.9 else random.uniform(1, 6))
    while time.monotonic() < deadline and process.poll() is None and len(list(root.rglob("*.parquet"))) == before:
        time.sleep(0.01)
    try:
        process.wait(random.uniform(0, random.choice((0.3, 4))))
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return True
    assert process.returncode == 0
    return False


@pytest.mark.promise("Archive")
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_readers_see_each_message_once_whatever_is_killed(job, busy):
    """DuckDB, Polars and Spark at any moment, while runs, compactions and vacuums are killed, and publishers go on."""
    options = ["--path", job.root.uri, "--local"]
    command = [sys.executable, "-W", "ignore", "-m", "pyspark_mysqlqueue", "archive"]
    grow = [*command, "grow", *options, "--commit-offsets", "300", "--task-offsets", "100"]
    upkeep = [[*command, "compact", *options], [*command, "vacuum", *options, "--keep", "1"]]
    stopped, seen, problems = threading.Event(), [0], list[str]()

    def look() -> None:
        while not stopped.is_set():
            if (table := Table.find(job.root)) is None:
                continue
            for count, different in readings(table):
                if count != different or count < seen[-1]:
                    problems.append(f"{count} rows, {different} offsets, {seen[-1]} before")
                seen.append(count)

    reader = threading.Thread(target=look)
    reader.start()
    kills = 0
    try:
        while kills < 12:
            kills += kill_while(grow, Path(job.root.uri))
            kills += kill_while(random.choice(upkeep), Path(job.root.uri), patience=0)
            with job.place.connect() as database:
                deadline = time.monotonic() + 30
                while not database.lock(run.LOCK):  # the server has not noticed yet
                    assert time.monotonic() < deadline
                    time.sleep(0.1)
    finally:
        stopped.set()
        reader.join()
    assert problems == []
    assert len(set(seen)) > 5, seen
    run.grow(job)
    archived = archived_offset()
    rows = [row for row in expected() if row[0] <= archived]
    assert len(named(job)) < len(parquet(job))  # some runs died before their commit
    assert held(job) == contents(job) == rows
    assert run.verify(job) == []
    assert len(rows) > 500
    assert collected(frames.everything(job.spark, job.place, job.root))[: len(rows)] == rows


@pytest.mark.parametrize("count", [2, 3, 10])
def test_any_of_the_rare_columns_alone(place, count):
    names = [column.name for column in RARE]
    values = {
        "priority": -7,
        "expires_at": 0,
        "coalesce_key": "",
        "target_group": "g,",
        "original_id": ",é\x00",
        "original_topic": "0,0",
        "original_offset": -(2**63),
        "failed_group": "",
        "failed_at": 2**40,
        "failure_count": 3,
        "last_error": "a\nb,",
    }
    nothing: dict[str, Any] = {name: 0 if type(value) is int else "" for name, value in values.items()}
    nothing |= dict.fromkeys(("expires_at", "coalesce_key", "failed_at"))
    QueueMessageFactory()
    stored = {name: value for name, value in values.items() if name != "priority"}  # The partition has that.
    row = QueueMessageFactory(**stored, partition_key="__p:-007:k")
    assert sorted(values) == sorted(names)
    for chosen in itertools.combinations(names, count):
        selection = Selection(("offset", *chosen))
        with place.connect() as database:
            query = Query(("offset", *chosen))
            (rows,) = reading.rows_of(database, query, selection, Span(row.offset - 2, row.offset))
            found = selection.batch(rows).to_pylist()
        assert [one["offset"] for one in found] == [row.offset - 1, row.offset]
        for name in chosen:
            read = [one[name] for one in found]
            if name in ("expires_at", "failed_at"):
                read = [one and int(one.timestamp() * 1000) for one in read]
            assert read == [nothing[name], values[name]], (name, chosen)


def test_packed_values_that_do_not_fit_are_an_error():
    """As of a SQLite database in UTF-16, or one that holds a text where a number belongs."""
    row = (7, b"t", b"k", b"i", b"x", 1, b"{}", None, 5, 6)
    selection = Selection(NAMES)
    good = b"0,,1,2,3,,1,0,0,0,2,,a,,,,bc"
    read = selection.batch([(*row, good)]).to_pylist()[0]
    assert (read["expires_at"], read["coalesce_key"], read["last_error"]) == (None, None, "bc")
    with pytest.raises(
        PipelineError, match=r"offset 7: the server counts \[None, 2, 0, 0, 0, 4\] bytes in coalesce_key, target_group"
    ):
        selection.batch([(*row, b"0,,1,2,3,,2,0,0,0,4,,a,,,,bc")])
    with pytest.raises(
        PipelineError, match=r"offset 7: a numeric column contains a value that is not a number: .*b'abc'"
    ):
        selection.batch([(*row, good.replace(b"3", b"abc"))])


def test_packed_texts_that_the_server_cannot_send_are_an_error():
    """CONCAT_WS gives NULL beyond max_allowed_packet; read as empty, a dead letter would lose its error."""
    row = (7, b"t", b"k", b"i", b"x", 1, b"{}", None, 5, 6)
    selection = Selection(NAMES)
    assert selection.batch([(*row, b"")]).column("last_error").to_pylist() == [""]
    with pytest.raises(PipelineError, match=r"offset 7: coalesce_key, target_group, .*max_allowed_packet"):
        selection.batch([(*row, b""), (*row, None)])

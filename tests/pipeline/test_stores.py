"""An archive in a store that speaks S3."""

from __future__ import annotations

import datetime
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow.fs
import pytest

from pyspark_mysqlqueue import cli, executors, log_offsets
from pyspark_mysqlqueue.archive import files, run, table
from pyspark_mysqlqueue.archive.root import Root
from pyspark_mysqlqueue.archive.run import Job
from pyspark_mysqlqueue.archive.table import Table
from pyspark_mysqlqueue.databases import Place
from pyspark_mysqlqueue.errors import PipelineError
from pyspark_mysqlqueue.log_marks import Position
from pyspark_mysqlqueue.reading import Span
from tests.support.archives import contents, readings, some
from tests.support.spark_log import expected
from tests.support.stores import BUCKET, Store, running

PROJECT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-W", "ignore", "-m", "pyspark_mysqlqueue", "archive"]


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    with running() as found:
        for name, value in found.environment.items():
            monkeypatch.setenv(name, value)
        executors._pool.cache_clear()  # Its processes have the environment of their start.
        yield found
    executors._pool.cache_clear()


@pytest.fixture
def job(place: Place, store: Store) -> Job:
    return Job(None, place, Root(f"s3://{BUCKET}/archive"))


def paths(job: Job) -> list[str]:
    """The objects in the archive's folder."""
    found = job.root.open().filesystem.get_file_info(pyarrow.fs.FileSelector("", recursive=True))
    return sorted(one.path for one in found if one.is_file)


@pytest.mark.promise("Archive")
def test_an_archive_in_a_store_equals_the_log(job):
    for _ in range(table.MANY):
        some(5)
        run.grow(job, task_offsets=3)
    assert contents(job) == expected()
    assert [*readings(Table.open(job.root))] == [(40, 40)] * 2
    assert run.verify(job) == []
    assert run.compact(job) == 40
    assert len(Table.open(job.root).files()) == 1
    assert contents(job) == expected()
    assert run.grow(job).commits == 0
    assert run.expire(job, before=datetime.date(2200, 1, 1)) == 40
    assert contents(job) == []
    assert run.verify(job) == []
    assert run.vacuum(job, keep=datetime.timedelta(0)) == []  # too young


@pytest.mark.any_engine
def test_the_check_of_a_store_leaves_nothing_behind(job):
    Table.create(job.root)
    assert paths(job) == [f"_delta_log/{0:020}.json"]


@pytest.mark.any_engine
def test_a_store_without_a_conditional_put_is_refused(job, store):
    store.become("unconditional")
    some(1)
    with pytest.raises(PipelineError, match=r"no conditional put \(If-None-Match\)"):
        run.grow(job)
    assert paths(job) == []


@pytest.mark.any_engine
def test_verify_finds_what_is_wrong_with_objects(job, store):
    some(15)
    run.grow(job, commit_offsets=5)
    filesystem = job.root.open().filesystem
    gone, short, _ = (file.path for file in Table.open(job.root).files())
    filesystem.delete_file(gone)
    with filesystem.open_input_stream(short) as stream:
        half = stream.read()[:2000]
    store.put(f"archive/{short}", half)
    says = {fault.path: fault.says for fault in run.verify(job)}
    assert set(says) == {gone, short}
    assert says[gone] == "no such file"
    assert "cannot be read" in says[short]


@pytest.mark.any_engine
def test_of_two_writers_one_commits(job):
    """Without the lock, as those of two databases."""
    some(10)
    last = expected()[-1][0]
    with job.place.connect() as database:
        log = log_offsets.identity(database)
    Table.create(job.root)

    def write(_: int) -> str:
        written = files.write_span(job.place, job.root, log, Span(0, last))
        mine = Table.open(job.root)
        try:
            mine.append(0, Position(last, *log), written)
        except PipelineError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(4) as pool:
        says = sorted(pool.map(write, range(4)))
    # One that has seen none of the range before takes it for its own.
    assert {one.partition(": ")[2] for one in says} <= {
        "",
        "another run has archived some of them meanwhile; nothing was committed",
    }
    assert len(Table.open(job.root).files()) == 1
    assert contents(job) == expected()
    assert run.verify(job) == []


@pytest.mark.any_engine
def test_a_store_that_refuses_is_one_line(job, store, capsys):
    some(3)
    run.grow(job)
    store.become("refusing")
    for action in ("grow", "verify", "compact", "vacuum", "status"):
        assert cli.main(["archive", action, "--path", job.root.uri, "--local"]) == 1
        said = capsys.readouterr().err.splitlines()
        assert len(said) == 1
        assert said[0].startswith(f"Error: archive {job.root.uri!r}: ")
    store.become("usual")
    assert contents(job) == expected()


@pytest.mark.any_engine
def test_a_store_that_is_away_is_one_line_without_colors(job, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    with pytest.raises(PipelineError, match="Connection refused") as caught:
        Table.find(job.root)
    assert str(caught.value).isprintable()


@pytest.mark.processes
@pytest.mark.promise("Archive")
def test_runs_that_are_killed_leave_an_exact_archive(job):
    """At random moments: before, in and after commits."""
    numbers = random.Random(5)
    for _ in range(6):
        some(60)
        before = version(job)
        process = subprocess.Popen(
            [*COMMAND, "--path", job.root.uri, "--local", "--commit-offsets", "10", "--task-offsets", "5"],
            cwd=PROJECT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        deadline = time.monotonic() + 60
        while version(job) == before and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(numbers.uniform(0, 0.4))
        os.killpg(process.pid, signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
        if (found := Table.find(job.root)) is not None:
            rows = contents(job)
            assert rows == expected()[: len(rows)]
            assert [*readings(found)] == [(len(rows), len(rows))] * 2
        wait_for_the_lock(job)
    run.grow(job)
    assert contents(job) == expected()
    assert run.verify(job) == []


def version(job: Job) -> int:
    found = Table.find(job.root)
    return -1 if found is None else found.delta.version()


def wait_for_the_lock(job: Job) -> None:
    """Until the server has noticed that the holder is gone."""
    deadline = time.monotonic() + 30
    with job.place.connect() as database:
        while not database.lock(run.LOCK):
            assert time.monotonic() < deadline
            time.sleep(0.1)

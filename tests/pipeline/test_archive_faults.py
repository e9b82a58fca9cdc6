"""Faults of disks, servers and other programs: one line that says what to do, and an archive that stays exact."""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pyarrow as pa
import pytest
from deltalake import write_deltalake
from django.db import connection

from django_mysqlqueue.options.backoff import Backoff
from pyspark_mysqlqueue import cli, reading
from pyspark_mysqlqueue.archive import files, run, table
from pyspark_mysqlqueue.archive.root import Root
from pyspark_mysqlqueue.archive.run import Job
from pyspark_mysqlqueue.archive.table import SCHEMA, Table
from pyspark_mysqlqueue.databases import URL_VARIABLE, Place
from pyspark_mysqlqueue.errors import PipelineError
from pyspark_mysqlqueue.executors import spread
from tests.support.archives import contents, named, some
from tests.support.factories import QueueMessageFactory
from tests.support.proxy import Proxy
from tests.support.spark_log import expected

NOBODY = 65534


@pytest.fixture
def local(place: Place, tmp_path: Path) -> Job:
    return Job(None, place, Root(str(tmp_path / "local")))


@pytest.fixture
def command(local: Job, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Run the command, and return the only line of its error, or ''."""

    def call(action: str = "grow", path: str = local.root.uri, *options: str) -> str:
        status = cli.main(["archive", action, "--path", path, "--local", *options])
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == status, lines
        return lines[0].removeprefix("Error: ") if lines else ""

    return call


# -- disks --------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = shutil.which("mount") and subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder)], capture_output=True, check=False
    )
    if not mounted or mounted.returncode:
        pytest.skip("a tmpfs cannot be mounted here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.promise("Archive")
def test_a_full_disk_loses_nothing(job_on_small_disk, command):
    job = job_on_small_disk
    some(10)
    assert command("grow", job.root.uri) == ""
    before = expected()
    for _ in range(8):
        QueueMessageFactory(payload=os.urandom(500_000))
    says = command("grow", job.root.uri)
    assert says.startswith(f"archive {job.root.uri!r}: ")
    assert "No space left on device" in says
    assert says.endswith("so run again")
    assert contents(job) == before
    subprocess.run(["mount", "-o", "remount,size=20m", str(Path(job.root.uri).parent)], check=True)
    assert command("grow", job.root.uri) == ""
    assert contents(job) == expected()
    assert run.verify(job) == []


@pytest.fixture
def job_on_small_disk(place: Place, small_disk: Path) -> Job:
    return Job(None, place, Root(str(small_disk / "archive")))


def test_a_disk_that_is_full_at_the_commit_loses_nothing(job_on_small_disk, monkeypatch):
    """The files are whole, but the table's log has no room."""
    job = job_on_small_disk
    some(10)
    run.grow(job)
    before = expected()
    some(10)
    filler = Path(job.root.uri).parent / "filler"
    real = Table.append

    def append(*args: Any) -> None:
        with contextlib.suppress(OSError), filler.open("wb", buffering=0) as stream:
            while stream.write(b"x" * 4096):
                pass
        real(*args)

    monkeypatch.setattr(Table, "append", append)
    with pytest.raises(PipelineError, match="No space left on device"):
        run.grow(job)
    assert contents(job) == before
    filler.unlink()
    monkeypatch.undo()
    run.grow(job)
    assert contents(job) == expected()
    assert run.verify(job) == []


@pytest.mark.any_engine
@pytest.mark.parametrize("below", ["", "_delta_log"])
def test_an_unreadable_folder_is_named(command, below):
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        root = Root(f"{folder}/archive")
        Table.create(root)
        Path(root.uri, below).chmod(0)
        with as_nobody():
            found = [command(action, root.uri) for action in ("status", "verify")]
        Path(root.uri, below).chmod(0o755)
    for says in found:
        assert says.startswith(f"archive {root.uri!r}: ")
        assert "Permission denied" in says


@contextlib.contextmanager
def as_nobody() -> Iterator[None]:
    """Root may read everything."""
    if os.geteuid():
        yield
        return
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.mark.any_engine
def test_compact_does_not_spread_a_fault(local):
    for _ in range(table.MANY):
        some(5)
        run.grow(local)
    known = named(local)
    content = known[2].read_bytes()
    for fault, says in ((content[: len(content) // 2], "cannot be read"), (spoilt(content), "")):
        known[2].write_bytes(fault)
        with pytest.raises(PipelineError, match=f"{known[2].name}: .*{says}.*; it was not merged: run verify"):
            run.compact(local)
        assert named(local) == known
    known[2].write_bytes(content)
    assert run.compact(local) == 5 * table.MANY
    assert contents(local) == expected()


def spoilt(content: bytes) -> bytes:
    """One bit of the first page is another one."""
    return content[:60] + bytes([content[60] ^ 1]) + content[61:]


@pytest.mark.any_engine
def test_expire_names_a_file_that_cannot_be_read(local):
    some(5)
    run.grow(local)
    (known,) = named(local)
    content = known.read_bytes()
    for fault in (content[:1000], None):
        known.write_bytes(fault) if fault else known.unlink()
        with pytest.raises(PipelineError, match=f"{known.name}: (it cannot be read: Parquet magic|no such file)"):
            run.expire(local, before=cli.day("2200-01-01"))
    known.write_bytes(content)
    assert contents(local) == expected()


# -- servers ------------------------------------------------------------------


@pytest.fixture
def link(local: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Link]:
    details = connection.get_connection_params()
    if not details.get("unix_socket"):
        pytest.skip("the server has no socket")
    user, password = quote(details["user"]), quote(details.get("password") or details.get("passwd") or "")
    database = details.get("database") or details["db"]
    with tempfile.TemporaryDirectory() as folder:
        found = Link(Path(folder, "s"), Path(details["unix_socket"]))
        monkeypatch.setenv(
            URL_VARIABLE, f"mysql://{user}:{password}@localhost/{database}?unix_socket={quote(str(found.path))}"
        )
        yield found
        found.cut()


class Link:
    """The way to the server."""

    def __init__(self, path: Path, target: Path) -> None:
        self.path = path
        self._target = target
        self._proxy: Proxy | None = Proxy(path, target)

    def cut(self) -> None:
        """Close all connections, and refuse new ones."""
        if self._proxy is not None:
            self._proxy.close()
            self.path.unlink()
        self._proxy = None

    def mend(self) -> None:
        self._proxy = Proxy(self.path, self._target)


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "spread", lambda spark, work, items: [work(item) for item in items])


@pytest.mark.servers_only
@pytest.mark.promise("Archive")
def test_a_server_that_is_away_while_tasks_run_costs_one_run(local, link, command, in_process, monkeypatch):
    """The tasks connect again, but the lock is gone."""
    some(10)
    assert command() == ""
    some(10)
    real, cuts = files.write_file, []

    def away(*args: Any) -> Any:
        if not cuts:
            cuts.append(1)
            link.cut()
            threading.Timer(10, link.mend).start()
        return real(*args)

    monkeypatch.setattr(files, "write_file", away)
    says = command()
    assert says.startswith("the queue's database: ")
    assert says.endswith("; fix the cause and run again")
    assert len(contents(local)) == 10
    assert command() == ""
    assert contents(local) == expected()


@pytest.mark.servers_only
def test_a_server_that_stays_away_is_one_line(local, link, command, in_process, monkeypatch):
    some(10)
    assert command() == ""
    some(10)
    for module in (reading, files):
        monkeypatch.setattr(module, "RECONNECT", Backoff(initial=0.01))
    real = files.write_file
    monkeypatch.setattr(files, "write_file", lambda *args: (link.cut(), real(*args))[1])
    for _ in range(2):  # In a run, then from the beginning.
        assert command().startswith("the queue's database: ")
    link.mend()
    monkeypatch.setattr(files, "write_file", real)
    assert command() == ""
    assert contents(local) == expected()


@pytest.mark.any_engine
def test_a_database_without_tables_is_one_line(tmp_path, capsys):
    empty = tmp_path / "empty.sqlite3"
    empty.touch()
    assert cli.main(["archive", "--path", str(tmp_path / "a"), "--local", "--sqlite-file", str(empty)]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("Error: the queue's database: no such table")


def test_a_task_of_spark_tells_a_fault_in_one_line(spark):
    def lose(_: int) -> None:
        raise sqlite3.OperationalError(2006, "Gone away")

    with pytest.raises(PipelineError, match=r"^the queue's database: Gone away \(2006\); fix the cause and run again$"):
        spread(spark, lose, [1])


# -- other programs -----------------------------------------------------------


def foreign(**values: Any) -> pa.Table:
    """A row as another program may write it."""
    row = {field.name: pa.array([values.get(field.name)], field.type) for field in SCHEMA}
    return pa.table(row, SCHEMA)


@pytest.mark.any_engine
@pytest.mark.parametrize("log", [None, "theirs"])
def test_rows_of_another_program_are_found(local, log):
    some(5)
    run.grow(local)
    ours = expected()
    day = cli.day("2026-11-22")
    write_deltalake(local.root.uri, foreign(log=log, day=day, payload=b"x", offset=1), mode="append")
    (fault,) = run.verify(local)
    assert "day=2026-11-22" in fault.path
    assert "a row has no" in fault.says
    some(5)
    run.grow(local)
    rows = [row for row in contents(local) if row[3] is not None]
    assert rows == expected()
    assert rows[: len(ours)] == ours
    assert len(run.verify(local)) == 1


@pytest.mark.any_engine
def test_a_column_of_another_program_is_kept(local):
    some(5)
    run.grow(local)
    local_table = Table.open(local.root)
    from deltalake import Field
    from deltalake.schema import PrimitiveType

    local_table.delta.alter.add_columns([Field("note", PrimitiveType("string"), nullable=True)])
    some(5)
    run.grow(local)
    assert contents(local) == expected()
    assert run.verify(local) == []
    assert "note" in pa.schema(Table.open(local.root).delta.schema()).names


@pytest.mark.any_engine
def test_a_panic_of_the_library_is_one_line(local, tmp_path):
    root = Root(str(tmp_path / "[a]"))
    archive = Table.create(root)
    with pytest.raises(PipelineError, match=r"archive .*InvalidDomainCharacter"), table.speaking_of(root):
        archive.delta.delete("offset = 1")

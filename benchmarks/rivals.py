#!/usr/bin/env python3
"""Compare the jobs per second of this package with those of other queues in the same database.

    python tools/servers.py run mariadb -- python benchmarks/rivals.py

django-tasks-db, dj-queue, Steady Queue, django-ox, django-q2 (with its ORM broker) and this package run in turn on one
server with full durability. All have the same small payload and jobs that do nothing. Each has its own workers and the
settings that were fastest for it (see ``RIVALS`` below and ``rivals/with_*/settings.py``). The packages are installed
into ``.test/venv-rivals``, which needs the network once. They need Python 3.12 or later, because Django 6.1 does.

*Enqueued*: one process enqueues one job per transaction (``single``), one job at a time outside of a transaction
(``alone``), and with the library's own bulk call, 500 jobs at a time, if it has one.

*Processed*: the workers are running and idle. Then one transaction commits all jobs, and the time is measured from the
start of the first job to the end of the last one. django-tasks-db and django-ox store both times in their rows. For the
others, the tables are watched every 20 ms from before that COMMIT: django-q2 from the first locked row until the last
row is deleted, dj-queue and Steady Queue from the first claimed row until none waits or is claimed, this package from
the first sequenced message until all watermarks are at the ends of their partitions, so that sequencing counts as
processing. The jobs themselves do nothing for the measurement.

The results, with the settings of the server and of the machine, go to stdout as JSON (and to ``--output``), and a table
goes to stderr.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.parse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
PROJECTS = HERE / "rivals"
VENV = ROOT / ".test" / "venv-rivals"
NEEDS = (3, 12)
"""The oldest Python version that the Django version in ``rivals/requirements.txt`` supports."""
TIMEOUT = 600.0
"""Maximum duration of a measurement in seconds."""

SETTLE = 12.0
"""Seconds between the start of the workers and the jobs. This package's subscribers share the partitions every 10 s, so
that they need this time to find each other."""

Query = Callable[..., list[tuple[Any, ...]]]


# -- the environment ----------------------------------------------------------


def enter_venv() -> None:
    """Create the virtual environment if it is missing or outdated, and restart this program in it.

    Raises:
        SystemExit: The environment cannot be created. The message gives the reason.
    """
    if sys.version_info < NEEDS:
        raise SystemExit(
            f"This benchmark needs Python {NEEDS[0]}.{NEEDS[1]} or later, which Django 6.1 requires; this is "
            f"{platform.python_version()}. Run it with another interpreter: python3.12 benchmarks/rivals.py"
        )
    python = VENV / "bin" / "python"
    wanted = (PROJECTS / "requirements.txt").read_text()
    stamp = VENV / "requirements.txt"
    if not stamp.exists() or stamp.read_text() != wanted:
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(VENV)], check=True)
        install = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        if subprocess.run([*install, "-r", str(PROJECTS / "requirements.txt"), "-e", str(ROOT)]).returncode:
            raise SystemExit(f"pip could not install the packages in {PROJECTS / 'requirements.txt'}: see above.")
        stamp.write_text(wanted)
    if Path(sys.prefix).resolve() != VENV.resolve():
        os.execv(python, [str(python), *sys.argv])  # noqa: S606


# -- the contenders -----------------------------------------------------------


@dataclass(frozen=True)
class Contender:
    """A queue with one kind of job, its workers, and the queries that watch them."""

    name: str
    project: str
    workers: Sequence[Sequence[str]]
    begun: Callable[[Query, Contender], object]
    done: Callable[[Query, Contender, int], float | None]
    """Waits until all jobs are done. Returns the seconds if the rows contain them, else None."""
    settings: str
    table: str = ""
    kind: str = ""
    topic: str = ""
    """The topic of its messages, if that is not the kind."""
    jobs: float = 1.0
    """Number of jobs as a multiple of ``--messages``, so that a measurement takes seconds."""
    bulk: bool = False
    enqueues: bool = True

    @property
    def database(self) -> str:
        return f"rivals_{self.project}"

    @property
    def env(self) -> dict[str, str]:
        url = urllib.parse.urlsplit(os.environ["DATABASE_URL"])._replace(path=f"/{self.database}")
        return {
            **os.environ,
            "DATABASE_URL": urllib.parse.urlunsplit(url),
            "DJANGO_SETTINGS_MODULE": f"{self.project}.settings",
            "PYTHONPATH": str(PROJECTS),
        }


def rows_begun(query: Query, who: Contender) -> object:
    return query(f"SELECT 1 FROM {who.table} WHERE status <> 'READY' LIMIT 1")


def rows_done(query: Query, who: Contender, count: int) -> float | None:
    """Wait until all rows are done. Return the seconds from the start of the first job to the end of the last one."""
    wait_until(
        lambda: query(f"SELECT COUNT(*) FROM {who.table} WHERE status = 'SUCCESSFUL'")[0][0] >= count,
        lambda: str(query(f"SELECT status, COUNT(*) FROM {who.table} GROUP BY status")),
        every=0.5,
    )
    times = query(f"SELECT TIMESTAMPDIFF(MICROSECOND, MIN(started_at), MAX(finished_at)) FROM {who.table}")
    return float(times[0][0]) / 1e6


def q2_begun(query: Query, who: Contender) -> object:
    return query(f"SELECT 1 FROM {who.table} WHERE `lock` > UTC_TIMESTAMP(6) LIMIT 1")


def q2_done(query: Query, who: Contender, count: int) -> None:
    wait_until(
        lambda: not query(f"SELECT 1 FROM {who.table} LIMIT 1"),
        lambda: f"rows left: {query(f'SELECT COUNT(*) FROM {who.table}')}",
    )


def claims_begun(query: Query, who: Contender) -> object:
    claimed = who.table.replace("ready", "claimed")
    return query(f"SELECT 1 FROM {claimed} LIMIT 1")


def claims_done(query: Query, who: Contender, count: int) -> None:
    """Wait until no row waits, and none is claimed."""
    for table in (who.table, who.table.replace("ready", "claimed")):
        wait_until(
            lambda table=table: not query(f"SELECT 1 FROM {table} LIMIT 1"),
            lambda table=table: f"rows left in {table}: {query(f'SELECT COUNT(*) FROM {table}')}",
        )


def log_begun(query: Query, who: Contender) -> object:
    return query("SELECT 1 FROM queue_messages LIMIT 1")


def watermarks_done(query: Query, who: Contender, count: int) -> None:
    """Wait until every watermark is at the end of its partition."""
    wait_until(lambda: not query("SELECT 1 FROM queue_outbox LIMIT 1"), lambda: "the outbox is not empty")
    last = dict(
        query(
            "SELECT partition_key, MAX(`offset`) FROM queue_messages WHERE topic = %s GROUP BY partition_key", who.kind
        )
    )

    def settled() -> bool:
        marks = dict(query("SELECT partition_key, offset_acked FROM queue_offsets WHERE topic = %s", who.kind))
        return all(marks.get(key, 0) >= offset for key, offset in last.items())

    wait_until(settled, lambda: "some messages are not settled")


def check_log(query: Query, who: Contender, count: int) -> None:
    """Check that the log has all messages and no others, for example dead letters."""
    found = query("SELECT COUNT(*), SUM(topic = %s) FROM queue_messages", who.topic or who.kind)[0]
    if tuple(map(int, found)) != (count, count):
        raise SystemExit(f"{who.name}: the log has {found} messages (all, of the topic), expected {count}")


def wait_until(condition: Callable[[], object], state: Callable[[], str], *, every: float = 0.02) -> float:
    """Wait until a condition holds. Return the time at which this was seen, by the monotonic clock.

    Raises:
        SystemExit: The condition does not hold after ``TIMEOUT`` seconds.
    """
    deadline = time.monotonic() + TIMEOUT
    while not condition():
        if time.monotonic() > deadline:
            raise SystemExit(f"Timeout after {TIMEOUT:g} s: {state()}")
        time.sleep(every)
    return time.monotonic()


def _subscribers(kind: str) -> Sequence[Sequence[str]]:
    return [["runsubscriber", "--topic", kind]] * 2


OURS = "django-mysqlqueue"
RIVALS = (
    Contender(
        "django-tasks-db",
        "with_tasks_db",
        # A worker runs one job at a time. The interval matters only for an empty queue.
        [["db_worker", "--interval", "0.1", "--no-startup-delay", "--verbosity", "0", "--worker-id", w] for w in "ab"],
        rows_begun,
        rows_done,
        settings="2 x db_worker --interval 0.1 --no-startup-delay --verbosity 0, CONN_MAX_AGE=None",
        table="django_tasks_database_dbtaskresult",
    ),
    Contender(
        "dj-queue",
        "with_dj_queue",
        [["dj_queue"]],
        claims_begun,
        claims_done,
        settings="dj_queue: processes 2, threads 8, polling_interval 0.1, prefetch_multiplier 8, CONN_MAX_AGE=None",
        table="dj_queue_ready_executions",
        bulk=True,
    ),
    Contender(
        "Steady Queue",
        "with_steady_queue",
        [["steady_queue"]],
        claims_begun,
        claims_done,
        settings="steady_queue: processes 2, threads 8, polling_interval 0.1, CONN_MAX_AGE=None",
        table="steady_queue_readyexecution",
    ),
    Contender(
        "django-ox",
        "with_ox",
        # It has its own supervisor. Two threads per process were faster than one; four were not faster than two.
        [["ox_worker", "--processes", "2", "--interval", "0.1", "--verbosity", "0", "--concurrency", "2"]],
        rows_begun,
        rows_done,
        settings="ox_worker --processes 2 --concurrency 2 --interval 0.1 --verbosity 0, CONN_MAX_AGE=None",
        table="django_ox_oxtask",
        bulk=True,
    ),
    Contender(
        "django-q2 (ORM broker)",
        "with_q2",
        [["qcluster"]],
        q2_begun,
        q2_done,
        settings="qcluster: workers 2, bulk 100, queue_limit 1000, save_limit -1, no recycling, CONN_MAX_AGE=None",
        table="django_q_ormq",
    ),
)
OWN = (
    Contender(
        f"{OURS}, no-op",
        "with_mysqlqueue",
        _subscribers("noop"),
        log_begun,
        watermarks_done,
        settings="2 x runsubscriber, CLAIM_SIZE 500, PREFETCH 1000, THREADS 8",
        kind="noop",
        jobs=10,
        bulk=True,
    ),
    Contender(
        f"{OURS}, atomic no-op",
        "with_mysqlqueue",
        _subscribers("atomic"),
        log_begun,
        watermarks_done,
        settings="2 x runsubscriber, CLAIM_SIZE 500, PREFETCH 1000, THREADS 8, atomic=True",
        kind="atomic",
        jobs=2,
        enqueues=False,
    ),
    Contender(
        f"{OURS}, atomic, one update",
        "with_mysqlqueue",
        _subscribers("update"),
        log_begun,
        watermarks_done,
        settings="2 x runsubscriber, CLAIM_SIZE 500, PREFETCH 1000, THREADS 8, atomic=True, one row updated",
        kind="update",
        jobs=2,
        enqueues=False,
    ),
    Contender(
        f"{OURS}, atomic batch",
        "with_mysqlqueue",
        _subscribers("batch"),
        log_begun,
        watermarks_done,
        settings="2 x runsubscriber, CLAIM_SIZE 500, PREFETCH 1000, THREADS 8, atomic=True, batch=True, batch_size=500",
        kind="batch",
        jobs=10,
        enqueues=False,
    ),
)
BARE = "bare Django: update + delete"


# -- running ------------------------------------------------------------------


class Server:
    """A connection of the driver, to prepare the databases, watch the jobs and read the server's settings."""

    def __init__(self) -> None:
        import MySQLdb

        url = urllib.parse.urlsplit(os.environ["DATABASE_URL"])
        given = {key: values[0] for key, values in urllib.parse.parse_qs(url.query).items()}
        self._connection = MySQLdb.connect(
            user=urllib.parse.unquote(url.username or ""),
            password=urllib.parse.unquote(url.password or ""),
            **({"unix_socket": given["unix_socket"]} if "unix_socket" in given else {"host": url.hostname}),
            **({"port": url.port} if url.port else {}),
            autocommit=True,
        )
        self.statements = 0

    def query(self, sql: str, *values: object) -> list[tuple[Any, ...]]:
        with contextlib.closing(self._connection.cursor()) as cursor:
            cursor.execute(sql, values or None)
            self.statements += 1
            return list(cursor.fetchall())

    def questions(self) -> int:
        """Return the number of statements from other connections so far."""
        return int(self.query("SHOW GLOBAL STATUS LIKE 'Questions'")[0][1]) - self.statements

    @contextlib.contextmanager
    def durable(self) -> Iterator[None]:
        """Set full durability during the block: each commit is on disk before it is answered."""
        before = self.query("SELECT @@GLOBAL.innodb_flush_log_at_trx_commit, @@GLOBAL.sync_binlog")[0]
        try:
            self.query("SET GLOBAL innodb_flush_log_at_trx_commit = 1, GLOBAL sync_binlog = 1")
            yield
        finally:
            self.query("SET GLOBAL innodb_flush_log_at_trx_commit = %s, GLOBAL sync_binlog = %s", *before)

    def cpu(self) -> float:
        """Return the CPU seconds that the server has used so far; 0 if it runs on another machine."""
        path = Path(self.query("SELECT @@GLOBAL.pid_file")[0][0])
        with contextlib.suppress(OSError, ValueError):
            return sum(used for pid, _, used in processes() if pid == int(path.read_text()))
        return 0.0

    def describe(self) -> dict[str, Any]:
        names = (
            "version",
            "version_comment",
            "innodb_flush_log_at_trx_commit",
            "sync_binlog",
            "log_bin",
            "innodb_buffer_pool_size",
            "innodb_log_file_size",
            "innodb_doublewrite",
            "innodb_flush_method",
            "transaction_isolation",
        )
        rows = dict(self.query("SHOW GLOBAL VARIABLES"))
        return {name: rows.get(name, rows.get("tx_isolation" if "isolation" in name else name)) for name in names}

    def empty(self, who: Contender) -> None:
        """Empty every table of the project, except those that migrations have filled."""
        self.query(f"USE {who.database}")
        self.query("SET foreign_key_checks = 0")
        for (table,) in self.query("SHOW TABLES"):
            if table == "queue_sequencer":
                # Else workers that start now look for messages above the offsets of the log before.
                self.query("UPDATE queue_sequencer SET last_offset = 0")
            elif table not in ("django_migrations", "queue_consumer_groups", "with_mysqlqueue_account"):
                self.query(f"TRUNCATE TABLE `{table}`")


def processes() -> Iterator[tuple[int, int, float]]:
    """Yield the id, session and CPU seconds of each process, including children that have ended."""
    tick = os.sysconf("SC_CLK_TCK")
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = path.read_text().rpartition(")")[2].split()
            yield int(path.parent.name), int(fields[3]), sum(map(int, fields[11:15])) / tick


def cpu_of(sessions: set[int]) -> float:
    return sum(used for _, session, used in processes() if session in sessions)


def django(who: Contender, *arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "django", *arguments], env=who.env, check=True, stdout=subprocess.DEVNULL)


def enqueue(who: Contender, way: str, count: int) -> tuple[float, float]:
    """Run enqueue.py. Return jobs per second, and milliseconds of CPU time per job, without the server's."""
    command = [sys.executable, str(PROJECTS / "enqueue.py"), way, str(count), who.kind]
    done = subprocess.run(command, env=who.env, check=True, stdout=subprocess.PIPE, text=True)
    seconds, cpu = map(float, done.stdout.split())
    return count / seconds, 1000 * cpu / count


@contextlib.contextmanager
def preloading(who: Contender, count: int) -> Iterator[None]:
    """Run enqueue.py during the block, because the workers begin before it has ended."""
    command = [sys.executable, str(PROJECTS / "enqueue.py"), "preload", str(count), who.kind]
    with subprocess.Popen(command, env=who.env, stdout=subprocess.DEVNULL) as process:
        yield
        if process.wait():
            raise SystemExit(f"{who.name}: enqueue.py failed")


@contextlib.contextmanager
def workers(who: Contender, log: Path) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Run the contender's workers during the block. They are idle when it begins."""
    started = []
    with log.open("ab") as file:
        for arguments in who.workers:
            command = [sys.executable, "-m", "django", *arguments]
            started.append(
                subprocess.Popen(
                    command, env=who.env, stdout=file, stderr=file, stdin=subprocess.DEVNULL, start_new_session=True
                )
            )
    try:
        time.sleep(SETTLE)
        for process in started:
            if process.poll() is not None:
                raise SystemExit(f"{who.name}: a worker has exited:\n{log.read_text()[-4000:]}")
        yield started
    finally:
        for process in started:
            process.terminate()
        for process in started:
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


@dataclass
class Figures:
    """The measurements of a contender, one per round."""

    settings: str
    jobs: int
    single: list[float] = field(default_factory=list)
    alone: list[float] = field(default_factory=list)
    single_cpu: list[float] = field(default_factory=list)
    """Milliseconds of CPU time, of the publisher and of the server, for each job that is enqueued one by one."""
    bulk: list[float] = field(default_factory=list)
    processed: list[float] = field(default_factory=list)
    statements: list[float] = field(default_factory=list)
    worker_cpu: list[float] = field(default_factory=list)
    server_cpu: list[float] = field(default_factory=list)
    """Milliseconds per job. On a machine with other load, these vary less than the rates."""
    start_p50: list[float] = field(default_factory=list)
    start_p95: list[float] = field(default_factory=list)
    """Milliseconds from the COMMIT to the start of a job, if the benchmark measures it."""

    def as_json(self) -> dict[str, Any]:
        rounds = {
            "single": self.single,
            "alone": self.alone,
            "single_cpu": self.single_cpu,
            "bulk": self.bulk,
            "processed": self.processed,
            "statements": self.statements,
            "worker_cpu": self.worker_cpu,
            "server_cpu": self.server_cpu,
            "start_p50": self.start_p50,
            "start_p95": self.start_p95,
        }
        return {
            "settings": self.settings,
            "jobs": self.jobs,
            "enqueued_per_second": _median(self.single),
            "enqueued_alone_per_second": _median(self.alone),
            "bulk_enqueued_per_second": _median(self.bulk),
            "processed_per_second": _median(self.processed),
            "statements_per_job": _median(self.statements, digits=2),
            "worker_cpu_ms_per_job": _median(self.worker_cpu, digits=3),
            "server_cpu_ms_per_job": _median(self.server_cpu, digits=3),
            "start_ms": [_median(self.start_p50, digits=1), _median(self.start_p95, digits=1)],
            "rounds": {name: [round(value, 3) for value in values] for name, values in rounds.items()},
        }


def _median(values: list[float], *, digits: int | None = None) -> float | None:
    return round(statistics.median(values), digits) if values else None


Found = dict[str, Figures]
Measure = Callable[[Server, Contender, Figures, Path, argparse.Namespace], None]


def measure(server: Server, who: Contender, figures: Figures, log: Path, options: argparse.Namespace) -> None:
    if who.enqueues:
        server.empty(who)
        server_cpu = server.cpu()
        rate, cpu = enqueue(who, "single", options.messages)
        figures.single.append(rate)
        figures.single_cpu.append(cpu + 1000 * (server.cpu() - server_cpu) / options.messages)
        server.empty(who)
        figures.alone.append(enqueue(who, "alone", options.messages)[0])
        if who.bulk:
            server.empty(who)
            figures.bulk.append(enqueue(who, "bulk", options.messages * 4)[0])
    server.empty(who)
    with workers(who, log) as started:
        sessions = {process.pid for process in started}
        with preloading(who, figures.jobs):
            began = wait_until(lambda: who.begun(server.query, who), lambda: "no job was started")
            # The COMMIT is done, so from now on the server's work is for the jobs.
            asked, worker_cpu, server_cpu = server.questions(), cpu_of(sessions), server.cpu()
            seconds = who.done(server.query, who, figures.jobs) or time.monotonic() - began
            figures.worker_cpu.append(1000 * (cpu_of(sessions) - worker_cpu) / figures.jobs)
            figures.server_cpu.append(1000 * (server.cpu() - server_cpu) / figures.jobs)
            figures.statements.append((server.questions() - asked) / figures.jobs)
        figures.processed.append(figures.jobs / seconds)
        if who.kind:
            check_log(server.query, who, figures.jobs)


def measure_bare(server: Server, who: Contender, figures: Figures) -> None:
    """Measure two processes that handle half of the rows each."""
    server.empty(who)
    server.query(f"INSERT INTO with_mysqlqueue_job (id) SELECT seq FROM seq_1_to_{figures.jobs}")
    half = figures.jobs // 2
    command = [sys.executable, str(PROJECTS / "bare.py")]
    started = [
        subprocess.Popen(
            [*command, str(first), str(half)],
            env=who.env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        for first in (1, half + 1)
    ]
    for process in started:
        assert process.stdout is not None
        process.stdout.readline()
    asked, server_cpu = server.questions(), server.cpu()
    for process in started:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    times = [tuple(map(float, process.communicate()[0].split())) for process in started]
    assert not any(process.returncode for process in started)
    figures.processed.append(2 * half / (max(t[1] for t in times) - min(t[0] for t in times)))
    figures.server_cpu.append(1000 * (server.cpu() - server_cpu) / (2 * half))
    figures.worker_cpu.append(1000 * sum(t[2] for t in times) / (2 * half))
    figures.statements.append((server.questions() - asked) / (2 * half))


def machine() -> dict[str, Any]:
    model = next(
        (
            line.split(":", 1)[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in line
        ),
        platform.processor(),
    )
    return {"cpu": model, "cpus": os.cpu_count(), "system": platform.platform(), "python": platform.python_version()}


def versions() -> dict[str, str]:
    from importlib.metadata import version

    names = ("Django", "mysqlclient", "django-tasks-db", "dj-queue", "steady-queue", "django-ox", "django-q2", OURS)
    return {name: version(name) for name in names}


def _cpu(row: dict[str, Any]) -> float:
    """Return the milliseconds of CPU per job, of the workers and the server together."""
    return (row["worker_cpu_ms_per_job"] or 0.0) + (row["server_cpu_ms_per_job"] or 0.0)


def report(result: dict[str, Any]) -> str:
    found = result["results"]
    best = {name: found[name]["processed_per_second"] for name in (who.name for who in RIVALS) if name in found}
    head = [
        "",
        "enqueued/s",
        "alone/s",
        "bulk/s",
        "processed/s",
        "statements",
        "CPU ms",
        "start ms",
        *(f"x {name.split()[0]}" for name in best),
    ]
    lines = [head]
    for name, row in found.items():
        names = ("enqueued_per_second", "enqueued_alone_per_second", "bulk_enqueued_per_second", "processed_per_second")
        cells = [row[name] for name in names]
        ratios = [f"{row['processed_per_second'] / rate:.1f}" for rate in best.values()]
        lines.append(
            [
                name,
                *("-" if cell is None else f"{cell:,}" for cell in cells),
                str(row["statements_per_job"]),
                f"{_cpu(row):.2f}",
                "-" if row["start_ms"][0] is None else "{:.0f}, {:.0f}".format(*row["start_ms"]),
                *ratios,
            ]
        )
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if not column else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    )


def parser(text: str | None) -> argparse.ArgumentParser:
    """Return the parser of a comparison's options.

    Args:
        text: its description.
    """
    found = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument(
        "--messages", type=int, default=5_000, help="jobs of a rival; this package has 2 or 10 times as many"
    )
    found.add_argument("--rounds", type=int, default=3, help="number of rounds (default: 3)")
    found.add_argument(
        "--only", action="append", metavar="TEXT", help="run only contenders whose name contains TEXT; may be repeated"
    )
    found.add_argument("--output", type=Path, help="also write the JSON to this file")
    return found


def begin() -> None:
    """Restart this program in its environment, and let it stop its workers at SIGTERM."""
    if "mysql:" not in os.environ.get("DATABASE_URL", ""):
        raise SystemExit("Set DATABASE_URL to a MariaDB server: python tools/servers.py run mariadb -- …")
    enter_venv()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))


def compare(options: argparse.Namespace, contenders: Sequence[Contender], more: Measure | None = None) -> Found:
    """Measure contenders, and a plain Django transaction, in turn in each round, and print the results.

    Args:
        options: the options of ``parser``.
        contenders: the contenders.
        more: a further measurement of each.

    Returns:
        The measurements, by the names of the contenders.
    """
    names = options.only or [""]
    chosen = [who for who in contenders if any(name in who.name for name in names)]
    server = Server()
    figures = {who.name: Figures(who.settings, int(options.messages * who.jobs)) for who in chosen}
    with_bare = any(name in BARE for name in names)
    if with_bare:
        figures[BARE] = Figures(
            "2 processes, transaction.atomic() with one update and one delete", options.messages * 2
        )
    for database in {who.database: who for who in (*chosen, *(OWN[:1] if with_bare else ()))}.values():
        prepare(server, database, options.messages * 10)
    started = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    load = os.getloadavg()
    with server.durable(), tempfile.TemporaryDirectory() as folder:
        for number in range(options.rounds):
            for who in chosen:
                log = Path(folder) / f"{who.project}.log"
                measure(server, who, figures[who.name], log, options)
                if more is not None:
                    more(server, who, figures[who.name], log, options)
                print(f"round {number + 1}: {who.name}: {figures[who.name].processed[-1]:,.0f}/s", file=sys.stderr)
            if with_bare:
                measure_bare(server, OWN[0], figures[BARE])
                print(f"round {number + 1}: {BARE}: {figures[BARE].processed[-1]:,.0f}/s", file=sys.stderr)
        result = {
            "started": started,
            "machine": machine(),
            "load_before_and_after": [round(load[0], 2), round(os.getloadavg()[0], 2)],
            "server": server.describe(),
            "versions": versions(),
            "rounds": options.rounds,
            "results": {name: one.as_json() for name, one in figures.items()},
        }
    text = json.dumps(result, indent=1, ensure_ascii=False)
    print(text)
    if options.output:
        options.output.write_text(text + "\n")
    print(report(result), file=sys.stderr)
    return figures


def main() -> None:
    options = parser(__doc__).parse_args()
    begin()
    compare(options, (*RIVALS, *OWN))


def prepare(server: Server, who: Contender, accounts: int) -> None:
    server.query(f"DROP DATABASE IF EXISTS {who.database}")
    server.query(f"CREATE DATABASE {who.database} CHARACTER SET utf8mb4")
    django(who, "migrate", "--verbosity", "0", "--run-syncdb")
    if who.project == "with_mysqlqueue":
        server.query(f"USE {who.database}")
        server.query(f"INSERT INTO with_mysqlqueue_account (id, balance) SELECT seq, 0 FROM seq_1_to_{accounts}")


if __name__ == "__main__":
    main()

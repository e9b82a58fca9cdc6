#!/usr/bin/env python3
"""Compare the jobs of this package, as it is and as it was, with those of other Django queues in the same database.

    python tools/servers.py run mariadb -- python benchmarks/rivals.py --before 45a5fd54

django-tasks-db, dj-queue, Steady Queue, django-ox, django-q2 (with its ORM broker) and this package run in turn in
each round, in another order in each, on one server with full durability, and with ``--before`` an earlier revision of
this package, too. All have the same small payload and jobs that do nothing but count that they have run. Each has its
own workers in two processes, of eight threads where it has threads, persistent connections, and the settings that were
fastest for it (see ``RIVALS`` below and ``rivals/with_*/settings.py``). The packages are installed into
``.test/venv-rivals``, which needs the network once. They need Python 3.12 or later, because Django 6.1 does.

*Enqueued*: one process enqueues one job at a time outside of a transaction (``alone``), one per transaction
(``single``), and 500 jobs at a time with the package's own bulk call (``bulk``), if it has one.

*Processed*: the workers are running and idle. Then one transaction commits all jobs, and the time is measured from that
COMMIT to the end of the last job, which all but django-q2 store in their rows. Its table is watched every 20 ms until
the last row is deleted. It is an error if a job has not run exactly once.

*Start*: jobs are enqueued at a steady rate, one per transaction, while the workers are otherwise idle. The time is
measured from the answer of the COMMIT to the first line of the task, by the same clock.

*Publishers*: 64 connections in four processes publish messages at once, one by one, while eight subscriber processes
handle them.

Jobs of this package run in a transaction by default. For comparison, two processes run plain Django transactions that
write as much: one updated and one deleted row.

A report with the settings of all, as tables for docs/performance.md, goes to stdout, and the figures of each round as
JSON to the file of ``--output``. On a machine with other work, compare the ratios, which are those within rounds.
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
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

RATE, SECONDS, WARM = 10.0, 15.0, 2.0
"""The measurement of the start: jobs per second, few enough that no worker falls behind, for so many seconds, of which
the first ones are left out."""

CONNECTIONS, PUBLISHERS, SUBSCRIBERS = 64, 4, 8
"""The measurement of publishers: connections, and the processes that have them; processes that subscribe."""

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
    settings: str
    waits: str = ""
    """Returns a row as long as a job is not done."""
    ended: str = ""
    """Returns the number of jobs that have ended well, if the queue stores that."""
    last: str = ""
    """Returns when the last of them has ended, in epoch seconds."""
    kind: str = "noop"
    start: str = "start"
    """The kind of job that writes when it starts."""
    jobs: int = 1
    """Number of jobs as a multiple of ``--jobs``, so that a measurement takes seconds."""
    bulk: bool = False
    enqueues: bool = True
    package: str = ""
    """A folder with another revision of this package."""

    @property
    def database(self) -> str:
        return f"rivals_{self.project}{'_before' if self.package else ''}"

    @property
    def env(self) -> dict[str, str]:
        url = urllib.parse.urlsplit(os.environ["DATABASE_URL"])._replace(path=f"/{self.database}")
        return {
            **os.environ,
            "DATABASE_URL": urllib.parse.urlunsplit(url),
            "DJANGO_SETTINGS_MODULE": f"{self.project}.settings",
            "PYTHONPATH": os.pathsep.join(filter(None, (str(PROJECTS), self.package))),
            # Otherwise the package in the current directory would come before an earlier revision.
            "PYTHONSAFEPATH": "1",
        }


def has_ended(query: Query, who: Contender, count: int) -> float:
    """Wait until all jobs have ended. Return when the last one has, in epoch seconds."""
    if not who.ended:
        wait_until(lambda: not query(who.waits), lambda: f"{who.name}: a job is not done")
        return time.time()
    wait_until(
        lambda: query(who.ended)[0][0] >= count, lambda: f"{who.name}: {query(who.ended)} jobs are done", every=0.5
    )
    return float(query(who.last)[0][0])


def is_settled(query: Query, topic: str) -> None:
    """Wait until all messages of a topic are settled: every watermark is at the end of its partition."""
    wait_until(lambda: not query("SELECT 1 FROM queue_outbox LIMIT 1"), lambda: "the outbox is not empty")
    ends = "SELECT partition_key, MAX(`offset`) FROM queue_messages WHERE topic = %s GROUP BY partition_key"
    last = dict(query(ends, topic))

    def settled() -> bool:
        marks = dict(query("SELECT partition_key, offset_acked FROM queue_offsets WHERE topic = %s", topic))
        return all(marks.get(key, 0) >= offset for key, offset in last.items())

    wait_until(settled, lambda: "some messages are not settled")


def wait_until(condition: Callable[[], object], state: Callable[[], str], *, every: float = 0.02) -> None:
    """Wait until a condition holds.

    Raises:
        SystemExit: The condition does not hold after ``TIMEOUT`` seconds.
    """
    deadline = time.monotonic() + TIMEOUT
    while not condition():
        if time.monotonic() > deadline:
            raise SystemExit(f"Timeout after {TIMEOUT:g} s: {state()}")
        time.sleep(every)


OURS = "django-mysqlqueue"
EPOCH = "TIMESTAMPDIFF(MICROSECOND, '1970-01-01', MAX(finished_at)) / 1e6"
RIVALS = (
    Contender(
        "django-tasks-db",
        "with_tasks_db",
        # A worker runs one job at a time. The interval matters only for an empty queue.
        [["db_worker", "--interval", "0.05", "--no-startup-delay", "--verbosity", "0", "--worker-id", w] for w in "ab"],
        "2 x `db_worker --interval 0.05 --no-startup-delay`; a process runs one job at a time",
        ended="SELECT COUNT(*) FROM django_tasks_database_dbtaskresult WHERE status = 'SUCCESSFUL'",
        last=f"SELECT {EPOCH} FROM django_tasks_database_dbtaskresult",
    ),
    Contender(
        "dj-queue",
        "with_dj_queue",
        [["dj_queue"]],
        "`dj_queue`: `processes` 2, `threads` 8, `polling_interval` 0.05, `prefetch_multiplier` 8",
        ended="SELECT COUNT(*) FROM dj_queue_jobs WHERE finished_at IS NOT NULL",
        last=f"SELECT {EPOCH} FROM dj_queue_jobs",
        bulk=True,
    ),
    Contender(
        "steady-queue",
        "with_steady_queue",
        [["steady_queue"]],
        "`steady_queue`: `processes` 2, `threads` 8, `polling_interval` 0.05; connections that it cannot close",
        ended="SELECT COUNT(*) FROM steady_queue_job WHERE finished_at IS NOT NULL",
        last=f"SELECT {EPOCH} FROM steady_queue_job",
    ),
    Contender(
        "django-ox",
        "with_ox",
        # It has its own supervisor. Two threads per process were faster than one; four were not faster than two.
        [["ox_worker", "--processes", "2", "--interval", "0.05", "--verbosity", "0", "--concurrency", "2"]],
        "`ox_worker --processes 2 --concurrency 2 --interval 0.05`",
        ended="SELECT COUNT(*) FROM django_ox_oxtask WHERE status = 'SUCCESSFUL'",
        last=f"SELECT {EPOCH} FROM django_ox_oxtask",
        bulk=True,
    ),
    Contender(
        "django-q2",
        "with_q2",
        [["qcluster"]],
        "`qcluster` with the ORM broker: `workers` 2, `bulk` 100, `queue_limit` 1000, `poll` 0.05, no results, no "
        "recycling; a process runs one job at a time",
        waits="SELECT 1 FROM django_q_ormq LIMIT 1",
    ),
)
JOBS = Contender(
    f"{OURS}, default jobs",
    "with_jobs",
    [["runsubscriber", "--group", "jobs"]] * 2,
    "2 x `runsubscriber`: `THREADS` 8, `CLAIM_SIZE` 500, `PREFETCH` 1000",
    ended="SELECT COUNT(*) FROM queue_job_results WHERE status = 'SUCCESSFUL'",
    last="SELECT MAX(finished_at) / 1e3 FROM queue_job_results",
    jobs=2,
    bulk=True,
)
PLAIN = replace(
    JOBS,
    name=f"{OURS}, jobs with atomic=False",
    settings=f"{JOBS.settings}; `@job(atomic=False)`",
    kind="plain_noop",
    start="plain_start",
    jobs=4,
    enqueues=False,
)
MESSAGES = Contender(
    OURS,
    "with_mysqlqueue",
    [["runsubscriber", "--topic", "noop"]] * SUBSCRIBERS,
    f"{SUBSCRIBERS} x `runsubscriber`: `THREADS` 8, `CLAIM_SIZE` 500, `PREFETCH` 1000",
)
BARE = "plain Django transactions"


def before(who: Contender, package: str) -> Contender:
    """Return a contender as it was in the revision whose code is in a folder."""
    return replace(who, name=f"{who.name}, before", package=package)


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

    def status(self, name: str) -> int:
        return int(self.query(f"SHOW GLOBAL STATUS LIKE '{name}'")[0][1])

    def questions(self) -> int:
        """Return the number of statements from other connections so far."""
        return self.status("Questions") - self.statements

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


class Record:
    """The folder in which jobs note that they have run."""

    def __init__(self, folder: Path) -> None:
        self.log = folder / "log"
        self._runs = folder / "runs"
        self._starts = folder / "starts"
        os.environ["RIVALS_RECORD"] = str(folder)

    def expect(self, count: int) -> None:
        """Forget all jobs, and expect new ones with the numbers from 0. No worker may be running."""
        for path in (self._runs, self._starts, self.log):
            path.unlink(missing_ok=True)
        self._runs.write_bytes(bytes(count))
        self._starts.touch()

    def runs(self) -> tuple[int, int]:
        """Return how many jobs have run, and how many of them more than once."""
        found = self._runs.read_bytes()
        return len(found) - found.count(0), len(found) - found.count(0) - found.count(1)

    def starts(self) -> dict[int, float]:
        """Return when each job has started.

        Raises:
            SystemExit: One has started more than once.
        """
        text = self._starts.read_text()
        found = times(text)
        if len(found) != len(text.splitlines()):
            raise SystemExit("some jobs have started more than once")
        return found


def times(text: str) -> dict[int, float]:
    """Return times by the numbers of jobs, from lines with both."""
    return {int(number): float(at) for number, at in (line.split() for line in text.splitlines())}


def django(who: Contender, *arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "django", *arguments], env=who.env, check=True, stdout=subprocess.DEVNULL)


def script(name: str, *arguments: object) -> list[str]:
    """Return the command of a program in ``rivals``."""
    return [sys.executable, str(PROJECTS / name), *map(str, arguments)]


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


# -- measuring ----------------------------------------------------------------


@dataclass
class Figures:
    """The measurements of a contender, one per round. Times are milliseconds."""

    settings: str
    jobs: int
    alone: list[float] = field(default_factory=list)
    single: list[float] = field(default_factory=list)
    bulk: list[float] = field(default_factory=list)
    alone_cpu: list[float] = field(default_factory=list)
    """Of the publisher and of the server, for each job that is enqueued alone."""
    processed: list[float] = field(default_factory=list)
    statements: list[float] = field(default_factory=list)
    connections: list[float] = field(default_factory=list)
    """Connections that were opened while the jobs were processed."""
    cpu: list[float] = field(default_factory=list)
    """Of the workers and of the server, for each job that is processed. It varies less than the rates."""
    start_p50: list[float] = field(default_factory=list)
    start_p95: list[float] = field(default_factory=list)


@dataclass
class Published:
    """The measurements of many publishers, one per round. Times are milliseconds."""

    rate: list[float] = field(default_factory=list)
    p50: list[float] = field(default_factory=list)
    p99: list[float] = field(default_factory=list)
    longest: list[float] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    """Of all rounds."""
    deadlocks: list[int] = field(default_factory=list)
    published: list[int] = field(default_factory=list)
    handled: list[int] = field(default_factory=list)
    repeated: list[int] = field(default_factory=list)


def measure(server: Server, who: Contender, figures: Figures, record: Record, count: int) -> None:
    if who.enqueues:
        measure_enqueueing(server, who, figures, count)
    server.empty(who)
    record.expect(figures.jobs)
    with workers(who, record.log) as started:
        measure_processing(server, who, figures, {process.pid for process in started})
        check(server, who, record, figures.jobs)
        measure_start(who, figures, record)


def measure_enqueueing(server: Server, who: Contender, figures: Figures, count: int) -> None:
    server.empty(who)
    server_cpu = server.cpu()
    rate, cpu = enqueue(who, "alone", count)
    figures.alone.append(rate)
    figures.alone_cpu.append(cpu + 1000 * (server.cpu() - server_cpu) / count)
    server.empty(who)
    figures.single.append(enqueue(who, "single", count)[0])
    if who.bulk:
        server.empty(who)
        figures.bulk.append(enqueue(who, "bulk", count * 4)[0])


def enqueue(who: Contender, way: str, count: int) -> tuple[float, float]:
    """Run enqueue.py. Return jobs per second, and milliseconds of CPU time per job, without the server's."""
    done = subprocess.run(
        script("enqueue.py", way, count, who.kind), env=who.env, check=True, stdout=subprocess.PIPE, text=True
    )
    seconds, cpu = map(float, done.stdout.split())
    return count / seconds, 1000 * cpu / count


def measure_processing(server: Server, who: Contender, figures: Figures, sessions: set[int]) -> None:
    command = script("enqueue.py", "preload", figures.jobs, who.kind)
    with subprocess.Popen(command, env=who.env, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        committed = float(process.stdout.readline())
        # From now on the server's work is for the jobs.
        asked, opened, cpu = server.questions(), server.status("Connections"), cpu_of(sessions) + server.cpu()
    ended = has_ended(server.query, who, figures.jobs)
    figures.cpu.append(1000 * (cpu_of(sessions) + server.cpu() - cpu) / figures.jobs)
    figures.statements.append((server.questions() - asked) / figures.jobs)
    figures.connections.append(server.status("Connections") - opened)
    figures.processed.append(figures.jobs / (ended - committed))


def check(server: Server, who: Contender, record: Record, count: int) -> None:
    """Check that each job has run once, and has ended well.

    Raises:
        SystemExit: That is not so.
    """
    ran, repeated = record.runs()
    ended = server.query(who.ended)[0][0] if who.ended else count
    if (ran, repeated, ended) != (count, 0, count):
        raise SystemExit(
            f"{who.name}: of {count} jobs, {ran} have run, {repeated} more than once, and {ended} have ended well:\n"
            f"{record.log.read_text()[-4000:]}"
        )


def measure_start(who: Contender, figures: Figures, record: Record) -> None:
    """Measure the milliseconds from the answer of the COMMIT to the start of the job."""
    count = int(RATE * SECONDS)
    command = script("enqueue.py", "steady", count, who.start, RATE)
    done = subprocess.run(command, env=who.env, check=True, stdout=subprocess.PIPE, text=True)
    wait_until(lambda: len(record.starts()) >= count, lambda: "some jobs have not started", every=0.1)
    started = record.starts()
    waits = [1000 * (started[number] - at) for number, at in times(done.stdout).items() if number >= RATE * WARM]
    cuts = statistics.quantiles(waits, n=20)
    figures.start_p50.append(cuts[9])
    figures.start_p95.append(cuts[18])


def measure_bare(server: Server, who: Contender, figures: Figures) -> None:
    """Measure two processes that handle half of the rows each."""
    server.empty(who)
    server.query(f"INSERT INTO with_mysqlqueue_job (id) SELECT seq FROM seq_1_to_{figures.jobs}")
    half = figures.jobs // 2
    with together(who, [script("bare.py", first, half) for first in (1, half + 1)]) as started:
        asked, server_cpu = server.questions(), server.cpu()
    found = [tuple(map(float, text.split())) for text in started]
    figures.processed.append(2 * half / (max(one[1] for one in found) - min(one[0] for one in found)))
    figures.cpu.append(1000 * (server.cpu() - server_cpu + sum(one[2] for one in found)) / (2 * half))
    figures.statements.append((server.questions() - asked) / (2 * half))


@contextlib.contextmanager
def together(who: Contender, commands: Sequence[Sequence[str]]) -> Iterator[list[str]]:
    """Run programs until each says that it is ready. Let all begin after the block. Fill a list with their output."""
    started = [
        subprocess.Popen(command, env=who.env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for command in commands
    ]
    found: list[str] = []
    for process in started:
        assert process.stdout is not None
        process.stdout.readline()
    yield found
    for process in started:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    found += [process.communicate()[0] for process in started]
    assert not any(process.returncode for process in started)


def measure_publishers(server: Server, who: Contender, figures: Published, record: Record, each: int) -> None:
    """Measure connections that publish messages at once, ``each`` one by one, while others subscribe."""
    threads = CONNECTIONS // PUBLISHERS
    server.empty(who)
    record.expect(CONNECTIONS * each)
    with workers(who, record.log):
        commands = [script("publishers.py", n * threads * each, threads, each) for n in range(PUBLISHERS)]
        with together(who, commands) as started:
            deadlocks = server.status("Innodb_deadlocks")
        found = [json.loads(text) for text in started]
        is_settled(server.query, "noop")
        figures.deadlocks.append(server.status("Innodb_deadlocks") - deadlocks)
    took = sorted(one for process in found for one in process["took"])
    cuts = statistics.quantiles(took, n=100)
    figures.rate.append(len(took) / (max(one["ended"] for one in found) - min(one["began"] for one in found)))
    figures.p50.append(cuts[49])
    figures.p99.append(cuts[98])
    figures.longest.append(took[-1])
    figures.errors += [error for process in found for error in process["errors"]]
    figures.published.append(len(took))
    handled, repeated = record.runs()
    figures.handled.append(handled)
    figures.repeated.append(repeated)


# -- the report ---------------------------------------------------------------


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


def pins() -> dict[str, str]:
    """Return the version of each package that the environment has."""
    lines = (PROJECTS / "requirements.txt").read_text().splitlines()
    return dict(line.split("==") for line in lines if "==" in line)


def titled(name: str) -> str:
    """Return the name of a contender with the first two parts of its version."""
    if name.startswith(OURS):
        return f"**{OURS}**{name.removeprefix(OURS)}"
    return f"{name} {pins()[name].rpartition('.')[0]}" if name in pins() else name


def table(rows: Sequence[Sequence[str]]) -> str:
    """Return rows as a table of the documentation, of which the first one is the head."""
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([lines[0], f"|{'---|' * len(rows[0])}", *lines[1:]])


def middle(values: Sequence[float], digits: int = 0, unit: str = "") -> str:
    return f"{statistics.median(values):,.{digits}f}{unit}" if values else "-"


def absolute(found: Mapping[str, Figures]) -> str:
    """Return the table of the medians."""
    rows = [
        [
            "",
            "enqueued/s, one by one",
            "in a transaction each",
            "in bulk",
            "processed/s",
            "statements per job",
            "CPU per job",
            "CPU of enqueueing",
            "start: p50",
            "p95",
        ]
    ]
    for name, one in found.items():
        rates = (middle(rate) for rate in (one.alone, one.single, one.bulk, one.processed))
        rows.append(
            [
                titled(name),
                *rates,
                middle(one.statements, 2),
                middle(one.cpu, 2, " ms"),
                middle(one.alone_cpu, 2, " ms"),
                middle(one.start_p50, 0, " ms"),
                middle(one.start_p95, 0, " ms"),
            ]
        )
    return table(rows)


RATIOS = (
    ("enqueued per second, one by one outside of a transaction", JOBS, "alone", False),
    ("enqueued per second, in a transaction each", JOBS, "single", False),
    ("enqueued per second, in bulk", JOBS, "bulk", False),
    ("CPU time of enqueueing, one by one outside of a transaction", JOBS, "alone_cpu", True),
    ("default jobs processed per second", JOBS, "processed", False),
    ("jobs with `atomic=False` processed per second", PLAIN, "processed", False),
    ("CPU time of a default job", JOBS, "cpu", True),
    ("CPU time of a job with `atomic=False`", PLAIN, "cpu", True),
    ("time to the start of a default job, p50", JOBS, "start_p50", True),
    ("time to the start of a default job, p95", JOBS, "start_p95", True),
    ("time to the start of a job with `atomic=False`, p50", PLAIN, "start_p50", True),
    ("time to the start of a job with `atomic=False`, p95", PLAIN, "start_p95", True),
)
"""What is compared: its name, whose it is, the field of its figures, and whether less is better."""


def ratios(found: Mapping[str, Figures]) -> str:
    """Return the table of how many times better this package was within rounds: the median, the lowest, the highest."""
    others = [name for name in (*(who.name for who in RIVALS), BARE) if name in found]
    past = [before(PLAIN, "").name] if before(PLAIN, "").name in found else []
    rows = [["times better", *("before" for _ in past), *map(titled, others)]]
    for title, mine, name, less in RATIOS:
        cells = []
        for other in [before(mine, "").name] * len(past) + others:
            both = [getattr(found[one], name) for one in (mine.name, other) if one in found]
            # What the other one does not have, such as bulk calls, has no figures.
            pairs = list(zip(*both, strict=False)) if len(both) == 2 else []
            cells.append(_spread([theirs / ours if less else ours / theirs for ours, theirs in pairs]))
        rows.append([title, *cells])
    return table(rows)


def _spread(values: Sequence[float]) -> str:
    if not values:
        return "-"
    low, high = min(values), max(values)
    digits = 1 if high >= 2 else 2
    return f"{statistics.median(values):,.{digits}f} ({low:,.{digits}f} to {high:,.{digits}f})"


def publishing(found: Mapping[str, Published]) -> str:
    """Return the table of many publishers."""
    rows = [["", "published/s", "p50", "p99", "longest", "errors", "deadlocks", "published", "handled", "repeated"]]
    for name, one in found.items():
        rows.append(
            [
                titled(name),
                middle(one.rate),
                middle(one.p50, 1, " ms"),
                middle(one.p99, 0, " ms"),
                f"{max(one.longest):,.0f} ms",
                str(len(one.errors)),
                *(f"{sum(each):,}" for each in (one.deadlocks, one.published, one.handled, one.repeated)),
            ]
        )
    return table(rows)


def report(result: Mapping[str, Any], found: Mapping[str, Figures], published: Mapping[str, Published]) -> str:
    """Return everything as tables for docs/performance.md."""
    here, server = result["machine"], result["server"]
    loads = ", ".join(f"{load:.1f}" for load in result["loads"])
    about = (
        f"MariaDB {server['version'].partition('-')[0]}, {here['cpus']} cores ({here['cpu']}), Python "
        f"{here['python']}, Django {pins()['Django']}, mysqlclient {pins()['mysqlclient']}. Medians of "
        f"{result['rounds']} rounds with {result['jobs']:,} jobs of each rival. "
        f"Load of the machine (one minute), before and after each round: {loads}. "
        f"Took {result['minutes']:.0f} minutes."
    )
    text = [
        about,
        absolute(found),
        ratios(found),
    ]
    if published:
        text.append(publishing(published))
    text.append(table([["", "settings"], *([titled(name), one.settings] for name, one in found.items())]))
    errors = [error for one in published.values() for error in one.errors]
    return "\n\n".join([*text, *(["\n".join(errors)] if errors else [])])


# -- the command --------------------------------------------------------------


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument(
        "--jobs", type=int, default=2_000, help="jobs of a rival; this package has 2 or 4 times as many (default: 2000)"
    )
    found.add_argument("--rounds", type=int, default=3, help="number of rounds (default: 3)")
    found.add_argument(
        "--before", metavar="REVISION", help="also run this package as it was in this revision of the repository"
    )
    found.add_argument(
        "--publish",
        type=int,
        default=50,
        help="messages of each connection that publishes (default: 50; 0: none)",
    )
    found.add_argument(
        "--only", action="append", metavar="TEXT", help="run only contenders whose name contains TEXT; may be repeated"
    )
    found.add_argument("--output", type=Path, help="write the figures of all rounds to this file, as JSON")
    return found


def prepare(server: Server, who: Contender, accounts: int) -> None:
    server.query(f"DROP DATABASE IF EXISTS {who.database}")
    server.query(f"CREATE DATABASE {who.database} CHARACTER SET utf8mb4")
    django(who, "migrate", "--verbosity", "0", "--run-syncdb")
    if who.project == "with_mysqlqueue":
        server.query(f"USE {who.database}")
        server.query(f"INSERT INTO with_mysqlqueue_account (id, balance) SELECT seq, 0 FROM seq_1_to_{accounts}")


def unpack(revision: str, folder: Path) -> str:
    """Unpack this package as it was in a revision, into a folder, and return that."""
    command = ["git", "-C", str(ROOT), "archive", revision, "django_mysqlqueue"]
    archive = subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout
    folder.mkdir()
    subprocess.run(["tar", "-x", "-C", str(folder)], input=archive, check=True)
    return str(folder)


def compare(options: argparse.Namespace, folder: Path) -> None:
    """Measure everything in turn in each round, and print the report."""
    own, messages = [JOBS, PLAIN], [MESSAGES] if options.publish else []
    if options.before:
        package = unpack(options.before, folder / "before")
        own += [before(who, package) for who in own]
        messages += [before(who, package) for who in messages]
    names = options.only or [""]
    chosen = [who for who in (*own, *RIVALS) if any(name in who.name for name in names)]
    messages = [who for who in messages if any(name in f"{who.name}, publishers" for name in names)]
    figures = {who.name: Figures(who.settings, options.jobs * who.jobs) for who in chosen}
    published = {who.name: Published() for who in messages}
    if any(name in BARE for name in names):
        figures[BARE] = Figures("2 processes, `atomic()` with one update and one delete", options.jobs * 2)
    server, record = Server(), Record(folder)
    for who in {who.database: who for who in (*chosen, *messages, *([MESSAGES] if BARE in figures else []))}.values():
        prepare(server, who, options.jobs * 2)
    started, began = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"), time.monotonic()
    loads = [os.getloadavg()[0]]
    with server.durable():
        for who in chosen[:1]:
            enqueue(who, "alone", options.jobs)  # The server is slower at first.
        for number in range(1, options.rounds + 1):
            # Who comes first pays for what the server still does for those before.
            first = (number - 1) * len(chosen) // options.rounds
            for who in chosen[first:] + chosen[:first]:
                measure(server, who, figures[who.name], record, options.jobs)
                progress(number, who.name, figures[who.name].processed)
            if BARE in figures:
                measure_bare(server, MESSAGES, figures[BARE])
                progress(number, BARE, figures[BARE].processed)
            for who in messages:
                measure_publishers(server, who, published[who.name], record, options.publish)
                progress(number, f"{who.name}, publishers", published[who.name].rate)
            loads.append(os.getloadavg()[0])
        result: dict[str, Any] = {
            "started": started,
            "minutes": (time.monotonic() - began) / 60,
            "machine": machine(),
            "loads": loads,
            "server": server.describe(),
            "versions": pins(),
            "before": options.before,
            "rounds": options.rounds,
            "jobs": options.jobs,
        }
    if options.output:
        rounds = {name: asdict(one) for name, one in figures.items()}
        many = {name: asdict(one) for name, one in published.items()}
        text = json.dumps({**result, "results": rounds, "publishers": many}, indent=1, ensure_ascii=False)
        options.output.write_text(text + "\n")
    print(report(result, figures, published))


def progress(number: int, name: str, rates: Sequence[float]) -> None:
    print(f"round {number}: {name}: {rates[-1]:,.0f}/s", file=sys.stderr, flush=True)


def main() -> None:
    options = parser().parse_args()
    if "mysql:" not in os.environ.get("DATABASE_URL", ""):
        raise SystemExit("Set DATABASE_URL to a MariaDB server: python tools/servers.py run mariadb -- …")
    enter_venv()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    with tempfile.TemporaryDirectory() as folder:
        compare(options, Path(folder))


if __name__ == "__main__":
    main()

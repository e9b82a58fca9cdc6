"""Shared code of the benchmarks: environment, description of the machine, processes, tables of results."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAYLOAD = {"text": "x" * 180}
"""Together with a number, about 200 bytes of JSON."""


def set_up() -> None:
    """Set up Django with the benchmarks' settings, empty tables, and a server that flushes every commit."""
    if str(ROOT) not in sys.path:
        sys.path.insert(0, str(ROOT))
    os.environ["DJANGO_SETTINGS_MODULE"] = "benchmarks.settings"
    import django

    django.setup()
    from django.core.management import call_command

    call_command("migrate", verbosity=0, run_syncdb=True)
    make_durable()
    reset()


def make_durable() -> None:
    """Set the server to full durability: each COMMIT is on disk before it is answered."""
    from django.db import connection

    if connection.vendor == "mysql":
        with connection.cursor() as cursor:
            cursor.execute("SET GLOBAL innodb_flush_log_at_trx_commit = 1")
            cursor.execute("SET GLOBAL sync_binlog = 1")


def reset(using: str = "default") -> None:
    """Empty every table of the queue and of the benchmarks in a database."""
    from django.apps import apps
    from django.db import connections

    connection = connections[using]
    with connection.cursor() as cursor:
        for label in ("django_mysqlqueue", "app"):
            for model in (one for one in apps.get_app_config(label).get_models() if one._meta.managed):
                table = model._meta.db_table
                cursor.execute(f"DELETE FROM {table}" if connection.vendor == "sqlite" else f"TRUNCATE TABLE {table}")
        cursor.execute("INSERT INTO queue_sequencer (id) VALUES (1)")  # the mutex


def environment() -> dict[str, Any]:
    """Return a description of the machine, the versions and the server's settings, for the results."""
    import django
    from django.db import connection

    found: dict[str, Any] = {
        "cpus": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "django": django.get_version(),
        "load_before": os.getloadavg()[0],
    }
    if connection.vendor == "mysql":
        names = ("version", "innodb_flush_log_at_trx_commit", "sync_binlog", "log_bin", "innodb_buffer_pool_size")
        with connection.cursor() as cursor:
            cursor.execute(f"SELECT {', '.join('@@' + name for name in names)}")
            found |= dict(zip(names, cursor.fetchone(), strict=True))
    else:
        import sqlite3

        found["version"] = f"SQLite {sqlite3.sqlite_version}"
    return found


def median(values: Sequence[float]) -> float:
    return statistics.median(values)


def interleaved(cases: dict[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Run all cases in turn, so that other load on the machine affects all of them alike."""
    results: dict[str, list[float]] = {name: [] for name in cases}
    for number in range(1, rounds + 1):
        for name, case in cases.items():
            reset()
            value = case()
            results[name].append(value)
            print(f"  round {number}  {name:48}{value:>12,.0f}", file=sys.stderr, flush=True)
    return results


def report(name: str, result: dict[str, Any], table: Sequence[Sequence[str]], path: str | None) -> None:
    """Print JSON on stdout (or write it to a file), and a table on stderr."""
    text = json.dumps({"benchmark": name, "environment": environment(), **result}, indent=1, default=str)
    if path:
        Path(path).write_text(text + "\n")
    else:
        print(text)
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
    print(file=sys.stderr)
    for row in table:
        cells = [
            cell.ljust(width) if place == 0 else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        print("  ".join(cells), file=sys.stderr)


# -- processes ----------------------------------------------------------------


class Running:
    """``runsubscriber`` processes. After they have exited, ``records`` has the record of each, ``codes`` the status."""

    def __init__(self, count: int, arguments: Sequence[str], settings: dict[str, Any]) -> None:
        self.records: list[dict[str, Any]] = []
        self.codes: list[int] = []
        self._folder = tempfile.TemporaryDirectory()
        env = os.environ | {
            "BENCH_RECORD": self._folder.name,
            "BENCH_MYSQLQUEUE": json.dumps(settings),
            "PYTHONPATH": str(ROOT),
        }
        command = [sys.executable, "-m", "django", "runsubscriber", "-v", "0", *arguments]
        with Path(self._folder.name, "log").open("w") as log:
            self.processes = [
                subprocess.Popen(command, cwd=ROOT, env=env, stdout=log, stderr=log) for _ in range(count)
            ]

    def handled(self) -> int:
        """Return the number of deliveries so far of handlers that count theirs."""
        found = [path.read_bytes() for path in Path(self._folder.name).glob("*.count")]
        return sum(int.from_bytes(one, sys.byteorder) for one in found)

    def stop(self, *, check: bool = True) -> None:
        for process in self.processes:
            process.send_signal(signal.SIGTERM)
        self.codes = [process.wait(60) for process in self.processes]
        if check and any(self.codes):
            raise RuntimeError(f"exit statuses {self.codes}:\n{Path(self._folder.name, 'log').read_text()[-3000:]}")
        self.records = [json.loads(path.read_text()) for path in Path(self._folder.name).glob("*.json")]
        self._folder.cleanup()


@contextlib.contextmanager
def subscribers(count: int, *arguments: str, **settings: Any) -> Iterator[Running]:
    """Run subscriber processes during the block. ``settings`` are those of the queue."""
    running = Running(count, arguments, settings)
    try:
        yield running
    finally:
        running.stop()


def wait_for(condition: Callable[[], bool], *, timeout: float = 600, every: float = 0.02) -> float:
    """Wait until a condition holds. Return the time at which this was seen, in epoch seconds.

    Raises:
        TimeoutError: The condition does not hold after ``timeout`` seconds.
    """
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"the benchmark's work did not finish within {timeout:g} s")
        time.sleep(every)
    return time.time()


def is_drained(topic: str, groups: Sequence[str], using: str = "default") -> bool:
    """Everything published has been sequenced, claimed and settled, and the state rows are gone."""
    from django.db import connections

    with connections[using].cursor() as cursor:
        cursor.execute("SELECT EXISTS(SELECT 1 FROM queue_outbox)")
        if cursor.fetchone()[0]:
            return False
        cursor.execute("SELECT EXISTS(SELECT 1 FROM queue_delivery_state)")
        if cursor.fetchone()[0]:
            return False
        for group in groups:
            cursor.execute(
                "SELECT EXISTS(SELECT 1 FROM (SELECT topic, partition_key, MAX(`offset`) AS last FROM queue_messages "
                "WHERE topic = %s GROUP BY topic, partition_key) m LEFT JOIN queue_offsets o "
                "ON o.consumer_group = %s AND o.topic = m.topic AND o.partition_key = m.partition_key "
                "WHERE o.offset_acked IS NULL OR o.offset_acked < m.last)",
                (topic, group),
            )
            if cursor.fetchone()[0]:
                return False
    return True

#!/usr/bin/env python3
"""Measure how the pipeline's cost grows with the log: seconds, and the CPU time of the server, Spark's JVM and Python.

    python benchmarks/pipeline_growth.py --engine mariadb --rows 1000000 5000000 20000000

It starts a private server. At each size of the log it reads the whole log (rows are discarded), archives it, verifies
the archive and counts the messages by topic. JSON goes to stdout, a table to stderr. CPU times are sums over all
processes of a kind, from /proc.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]
TICK = os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=("mariadb", "mysql"), default="mariadb", help="server (default: mariadb)")
    parser.add_argument(
        "--rows", type=int, nargs="+", default=[1_000_000, 5_000_000, 20_000_000],
        help="sizes of the log, in messages (default: 1000000 5000000 20000000)",
    )  # fmt: skip
    parser.add_argument("--days", type=int, default=3, help="number of days that the messages span (default: 3)")
    parser.add_argument("--buffer-pool", default="2G", help="buffer pool of the server (default: 2G)")
    parser.add_argument("--master", default="local[2]", help="Spark's master URL (default: local[2])")
    options = parser.parse_args()
    import servers

    servers.end_servers_on_sigterm()
    extra = ("--innodb-flush-log-at-trx-commit=1", f"--innodb-buffer-pool-size={options.buffer_pool}")
    with servers.running(options.engine, extra=extra) as server, tempfile.TemporaryDirectory() as folder:
        os.environ["DATABASE_URL"] = server.url
        from benchmarks import common

        common.set_up()
        found = _measure(options, server.pid, Path(folder) / "archive")
        print(
            json.dumps(
                {
                    "benchmark": "pipeline_growth",
                    "environment": common.environment(),
                    "options": vars(options),
                    "results": found,
                }
            )
        )


def _measure(options: argparse.Namespace, server: int, path: Path) -> list[dict[str, Any]]:
    from benchmarks.pipeline import fill
    from django_mysqlqueue.management.spark import project_place
    from django_mysqlqueue.models import Reader
    from pyspark_mysqlqueue import frames
    from pyspark_mysqlqueue.archive import run
    from pyspark_mysqlqueue.archive.root import Root
    from pyspark_mysqlqueue.archive.run import Job
    from pyspark_mysqlqueue.session import session

    place = project_place("default")
    settings = {"spark.driver.memory": "4g", "spark.sql.parquet.compression.codec": "zstd"}
    spark = session(options.master, settings=settings)
    job = Job(spark, place, Root(str(path)))

    def read() -> None:
        frames.log(spark, place).write.format("noop").mode("overwrite").save()

    def count() -> None:
        frames.everything(spark, place, job.root, columns=("topic",)).groupBy("topic").count().collect()

    found, there = [], 0
    for rows in options.rows:
        fill(rows, options.days, begin=there)
        there = rows
        if not found:
            read()  # warm up
        Reader.objects.all().delete()
        shutil.rmtree(path, ignore_errors=True)
        for name, work in (
            ("read", read),
            ("archive", lambda: run.grow(job)),
            ("verify", lambda: run.verify(job)),
            ("count by topic", count),
        ):
            found.append(_timed(name, rows, server, work))
        size = sum(file.stat().st_size for file in path.rglob("*.parquet"))
        print(f"{rows:,} rows: {size / 2**20:,.0f} MiB of Parquet", file=sys.stderr)
    spark.stop()
    return found


def _timed(name: str, rows: int, server: int, work: Callable[[], object]) -> dict[str, Any]:
    before, began = _cpu(server), time.perf_counter()
    work()
    seconds = time.perf_counter() - began
    after = _cpu(server)
    row = {
        "rows": rows,
        "what": name,
        "seconds": round(seconds, 1),
        "rows_per_second": round(rows / seconds),
        **{f"{kind}_us_per_row": round((after[kind] - before[kind]) / rows * 1e6, 2) for kind in after},
    }
    print("  ".join(f"{value!s:>16}" for value in row.values()), file=sys.stderr, flush=True)
    return row


def _cpu(server: int) -> dict[str, float]:
    """Return the CPU seconds of the server, of the JVM and of Python (this program and its descendants) up to now."""
    parents: dict[int, int] = {}
    facts: dict[int, tuple[str, float]] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            text = (entry / "stat").read_text()
        except OSError:
            continue  # the process has just ended
        command, _, rest = text.partition("(")[2].rpartition(")")
        fields = rest.split()
        pid = int(entry.name)
        parents[pid] = int(fields[1])
        # Including children that the process has waited for.
        facts[pid] = (command, sum(map(int, fields[11:15])) / TICK)
    spent = {"server": facts[server][1], "jvm": 0.0, "python": 0.0}
    for pid, (command, seconds) in facts.items():
        if _is_below(pid, os.getpid(), parents) and not _is_below(pid, server, parents):
            spent["jvm" if command == "java" else "python"] += seconds
    return spent


def _is_below(pid: int, ancestor: int, parents: dict[int, int]) -> bool:
    while pid and pid != ancestor:
        pid = parents.get(pid, 0)
    return pid == ancestor


if __name__ == "__main__":
    main()

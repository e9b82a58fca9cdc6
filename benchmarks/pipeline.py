#!/usr/bin/env python3
"""Compare the pipeline with Spark's JDBC source, the driver alone and connectorx, on the same rows in one run.

    python benchmarks/pipeline.py --engine mariadb                 # a million messages of 200 bytes, local[2]
    python benchmarks/pipeline.py --engine mariadb --rows 5000000 --only read archive
    python benchmarks/pipeline.py --engine mariadb --rows 400000 --days 30 --only report

It starts a private server, fills the log, and runs all contestants in turn, so that other load on the machine affects
them alike. It measures reading (rows are discarded), one task without Spark with each driver, archiving to Parquet
(with and without verification), the sink, and the whole process that makes a report. JDBC needs Debian's
libmariadb-java, and connectorx its package; missing contestants are reported and left out. JSON goes to stdout, a table
to stderr. Rates are in rows per second; ratios are ratios of medians.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]
JAR = Path("/usr/share/java/mariadb-java-client.jar")
FILL = 250_000
MOST_WRITTEN = 500_000
DAY_MS = 86_400_000
CONTESTS = ("read", "three columns", "drivers", "archive", "sink", "report")
THREE = ("offset", "topic", "published_at")
Contests = dict[str, dict[str, Callable[[], Any]]]


def main() -> None:
    options = _options()
    import servers

    servers.end_servers_on_sigterm()
    try:
        servers.apt_install(("libmariadb-java",))
    except servers.NotAvailable as error:
        print(f"JDBC is left out: {error}", file=sys.stderr)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    extra = (
        "--skip-networking=0",
        f"--port={port}",
        "--bind-address=127.0.0.1",
        "--innodb-flush-log-at-trx-commit=1",
        f"--innodb-buffer-pool-size={options.buffer_pool}",
    )
    with servers.running(options.engine, extra=extra) as server, tempfile.TemporaryDirectory() as folder:
        os.environ["DATABASE_URL"] = server.url
        from benchmarks import common

        common.set_up()
        began = time.monotonic()
        fill(options.rows, options.days)
        _say(f"Filled {options.rows:,} rows in {time.monotonic() - began:.0f} s")
        found = _measure(options, port, Path(folder))
        print(
            json.dumps(
                {
                    "benchmark": "pipeline",
                    "environment": common.environment(),
                    "options": vars(options),
                    "results": found,
                }
            )
        )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=("mariadb", "mysql"), default="mariadb", help="server (default: mariadb)")
    parser.add_argument("--rows", type=int, default=1_000_000, help="number of messages (default: 1000000)")
    parser.add_argument("--days", type=int, default=3, help="number of days that the messages span (default: 3)")
    parser.add_argument("--rounds", type=int, default=3, help="number of rounds after the warm-up (default: 3)")
    parser.add_argument("--buffer-pool", default="2G", help="buffer pool of the server (default: 2G)")
    parser.add_argument("--master", default="local[2]", help="Spark's master URL (default: local[2])")
    parser.add_argument("--partitions", type=int, default=8, help="number of Spark partitions (default: 8)")
    parser.add_argument(
        "--only", nargs="*", choices=CONTESTS, default=CONTESTS,
        help="measurements to run (default: all)",
    )  # fmt: skip
    return parser.parse_args()


def fill(rows: int, days: int, *, begin: int = 0) -> None:
    """Insert messages of two topics and 100 keys into the log, as the sequencer would.

    Args:
        rows: The number of messages.
        days: The number of days that they span.
        begin: The number of messages that are in the log already.
    """
    from django.db import connection

    with connection.cursor() as cursor:
        if not begin:
            cursor.execute("CREATE TABLE numbers (n INT PRIMARY KEY)")
            cursor.execute(f"INSERT INTO numbers VALUES {', '.join(f'({number})' for number in range(1000))}")
        first = int(time.time() * 1000) - days * DAY_MS
        for done in range(begin, rows, FILL):
            count = min(FILL, rows - done)
            number = f"({done} + b.n * 1000 + a.n)"
            moment = f"{first} + {number} * {days * DAY_MS} DIV {rows}"
            cursor.execute(
                "INSERT INTO queue_messages (topic, partition_key, id, payload, metadata, created_at, published_at) "
                f"SELECT IF({number} MOD 4, 'orders', 'clicks'), CONCAT('k', {number} MOD 100), UUID(), "
                f"CONCAT(REPEAT('x', 190), LPAD({number}, 10, '0')), '{{\"content_type\":\"application/json\"}}', "
                f"{moment}, {moment} + 50 FROM numbers b JOIN numbers a WHERE b.n * 1000 + a.n < {count} "
                "ORDER BY b.n, a.n"
            )
        cursor.execute("UPDATE queue_sequencer SET last_offset = (SELECT MAX(`offset`) FROM queue_messages)")
        cursor.execute("ANALYZE TABLE queue_messages")
        cursor.fetchall()


def _measure(options: argparse.Namespace, port: int, folder: Path) -> list[dict[str, Any]]:
    from django.db import connection

    from django_mysqlqueue.management.spark import project_place
    from pyspark_mysqlqueue import frames
    from pyspark_mysqlqueue.session import session

    place = project_place("default")
    settings = {"spark.driver.memory": "4g", "spark.sql.parquet.compression.codec": "zstd"}
    if JAR.exists():
        settings["spark.jars"] = str(JAR)
    spark = session(options.master, settings=settings)
    with connection.cursor() as cursor:
        cursor.execute("SELECT MIN(`offset`), MAX(`offset`), COUNT(*) FROM queue_messages")
        low, high, rows = cursor.fetchone()

    url = f"jdbc:mysql://127.0.0.1:{port}/{connection.settings_dict['NAME']}?permitMysqlScheme"
    login = {"user": "root", "driver": "org.mariadb.jdbc.Driver"}

    def ours(columns: Sequence[str] | None = None) -> Any:
        return frames.log(spark, place, columns=columns, minPartitions=str(options.partitions))

    def jdbc() -> Any:
        # With mariadb: instead of mysql:, Spark would quote the column `offset` as a string.
        return spark.read.jdbc(
            url,
            "queue_messages",
            column="`offset`",
            lowerBound=low,
            upperBound=high + 1,
            numPartitions=options.partitions,
            properties={**login, "fetchsize": "2000"},
        )

    def noop(frame: Any) -> None:
        frame.write.format("noop").mode("overwrite").save()

    contests: Contests = {}
    if "read" in options.only:
        spark.dataSource.register(_ready_batches(rows, options.partitions))
        contests["read"] = {
            "mysqlqueue": lambda: noop(ours()),
            "ready batches": lambda: noop(spark.read.format("ready").load()),
            "MySQLdb alone": lambda: _driver(place, rows),
            "JDBC": lambda: noop(jdbc()),
        }
        if _has("connectorx"):
            contests["read"]["connectorx"] = lambda: _connectorx(
                f"mysql://root@127.0.0.1:{port}/{connection.settings_dict['NAME']}", options.partitions, rows
            )
    if "three columns" in options.only:
        contests["three columns"] = {
            "mysqlqueue": lambda: noop(ours(THREE)),
            "JDBC": lambda: noop(jdbc().select(*THREE)),
        }
    if "drivers" in options.only:
        contests["drivers"] = {
            name: lambda name=name: _task(place, high, rows, name) for name in ("MySQLdb", "pymysql")
        }
    if "archive" in options.only:
        contests["archive"] = {
            "queuearchive": lambda: _archive(spark, place, folder / "archive", high, verified=True),
            "queuearchive --local": lambda: _archive(None, place, folder / "archive", high, verified=True),
            "queuearchive, not verified": lambda: _archive(spark, place, folder / "archive", high, verified=False),
            "JDBC to Parquet": lambda: jdbc().write.mode("overwrite").parquet(str(folder / "jdbc")),
        }
    if "sink" in options.only:
        bulk = {**login, "batchsize": "2000", "rewriteBatchedStatements": "true"}
        contests["sink"] = {
            "mysqlqueue": lambda: _messages(spark, rows).write.format("mysqlqueue").mode("append").save(),
            "JDBC": lambda: _messages(spark, rows).write.jdbc(url, "queue_outbox", "append", bulk),
        }
    if "report" in options.only:
        archive = _archived(place, folder / "archived")
        contests["report"] = {
            "of the archive": lambda: _report(folder / "report", archive),
            "of the log": lambda: _report(folder / "report", None),
        }
    found = _run(contests, options.rounds, rows)
    spark.stop()
    return found


def _run(contests: Contests, rounds: int, rows: int) -> list[dict[str, Any]]:
    found = []
    for contest, runners in contests.items():
        count = min(rows, MOST_WRITTEN) if contest == "sink" else rows
        times: dict[str, list[float]] = {name: [] for name in runners if JAR.exists() or not name.startswith("JDBC")}
        for _ in range(rounds + 1):
            for name in times:
                began = time.perf_counter()
                runners[name]()
                times[name].append(time.perf_counter() - began)
        medians = {name: statistics.median(taken[1:]) for name, taken in times.items()}  # the first one warms up
        base = next((medians[name] for name in medians if name.startswith("JDBC")), None)
        for name, median in medians.items():
            row = {
                "contest": contest,
                "name": name,
                "rows_per_second": round(count / median),
                "seconds": [round(one, 2) for one in times[name][1:]],
                "ratio_to_jdbc": None if base is None else round(base / median, 2),
            }
            found.append(row)
            _say(*row.values())
    return found


def _has(module: str) -> bool:
    import importlib.util

    if importlib.util.find_spec(module) is None:
        print(f"{module} is left out: it is not installed", file=sys.stderr)
        return False
    return True


def _ready_batches(rows: int, partitions: int) -> Any:
    """Return a data source that yields the same batch again and again without a database: Spark's own limit."""
    from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition

    from pyspark_mysqlqueue.log_schema import ddl

    class Ready(DataSource):
        @classmethod
        def name(cls) -> str:
            return "ready"

        def schema(self) -> str:
            return ddl()

        def reader(self, schema: Any) -> DataSourceReader:
            return ReadyReader()

    class ReadyReader(DataSourceReader):
        def partitions(self) -> list[InputPartition]:
            return [InputPartition(number) for number in range(partitions)]

        def read(self, partition: InputPartition) -> Any:
            from pyspark_mysqlqueue.batches import Selection
            from pyspark_mysqlqueue.log_schema import NAMES

            moment = 1_790_000_000_000
            row = (1, b"orders", b"k1", b"i" * 36, b"x" * 200, 200, b"{}", None, moment, moment, b"")
            batch = Selection(NAMES).batch([row] * 2000)
            for _ in range(rows // partitions // 2000):
                yield batch

    return Ready


def _driver(place: Any, rows: int) -> None:
    """Read with one process and one connection, without Arrow: the limit of Python's driver."""
    from pyspark_mysqlqueue.log_schema import NAMES

    seen = 0
    with place.connect() as database:
        cursor = database.cursor(f"SELECT {', '.join(f'`{name}`' for name in NAMES)} FROM queue_messages", ())
        while some := cursor.fetchmany(2000):
            seen += len(some)
    assert seen == rows


def _task(place: Any, high: int, rows: int, driver: str) -> None:
    """Read as a task does, in this process, without Spark."""
    from unittest import mock

    from pyspark_mysqlqueue import databases, reading
    from pyspark_mysqlqueue.log_schema import NAMES

    with mock.patch.object(databases, "DRIVERS", (driver,)):
        batches = reading.read(place, reading.Query(NAMES), reading.Span(0, high))
        assert sum(batch.num_rows for batch in batches) == rows


def _connectorx(url: str, partitions: int, rows: int) -> None:
    import connectorx

    table = connectorx.read_sql(
        url, "SELECT * FROM queue_messages", partition_on="offset", partition_num=partitions, return_type="arrow"
    )
    assert table.num_rows == rows


def _archive(spark: Any, place: Any, path: Path, last: int, *, verified: bool) -> None:
    from unittest import mock

    from django_mysqlqueue.models import Reader
    from pyspark_mysqlqueue.archive import files, run
    from pyspark_mysqlqueue.archive.root import Root
    from pyspark_mysqlqueue.archive.run import Job

    Reader.objects.all().delete()
    shutil.rmtree(path, ignore_errors=True)
    if verified:
        run.grow(Job(spark, place, Root(str(path))))
        return
    work = files.write_span

    def unverified(place: Any, root: Any, log: Any, span: Any) -> Any:
        from pyspark_mysqlqueue import checksums

        def believed(folder: Any, path: str) -> Any:
            return {log: checksums.Sum(folder.read(path).metadata.num_rows)}

        with (
            mock.patch.object(checksums, "sql", return_value="0"),
            mock.patch.object(files, "read_sums", believed),
        ):
            return work(place, root, log, span)

    with mock.patch.object(files, "write_span", unverified):
        run.grow(Job(spark, place, Root(str(path))))


def _archived(place: Any, path: Path) -> Path:
    from django_mysqlqueue.models import Reader
    from pyspark_mysqlqueue.archive import run
    from pyspark_mysqlqueue.archive.root import Root
    from pyspark_mysqlqueue.archive.run import Job

    Reader.objects.all().delete()
    run.grow(Job(None, place, Root(str(path))))
    return path


def _report(out: Path, archive: Path | None) -> None:
    command = [sys.executable, "-m", "pyspark_mysqlqueue", "report", "--out", str(out)]
    subprocess.run(
        command + ([] if archive is None else ["--path", str(archive)]), check=True, stdout=subprocess.DEVNULL
    )


def _messages(spark: Any, rows: int) -> Any:
    from django.db import connection
    from pyspark.sql import functions as F  # noqa: N812

    with connection.cursor() as cursor:
        cursor.execute("TRUNCATE TABLE queue_outbox")
    return spark.range(0, min(rows, MOST_WRITTEN), 1, 4).select(
        F.lit("orders").alias("topic"),
        F.concat(F.lit("id-"), F.col("id")).alias("id"),
        F.concat(F.lit("k"), F.col("id") % 100).alias("partition_key"),
        F.lpad(F.col("id").cast("string"), 200, "x").alias("payload"),
    )


def _say(*columns: Any) -> None:
    print("  ".join(f"{column!s:>28}" for column in columns), file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()

"""``manage.py pipelinedemo``: send the demo's events through the whole pipeline and back."""

from __future__ import annotations

import datetime
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.db import connection
from django.db.models import Count, Sum

from django_mysqlqueue.models import CollectedTopic, QueueMessage, Reader
from example_project.commits.events import REPLAYED, TOPIC
from example_project.commits.management.commands.demo import positive
from example_project.commits.models import DailyStatistics, ReplayedStatistics
from example_project.paths import OUTPUT, ROOT

ARCHIVE = OUTPUT / "archive"
REPORT = OUTPUT / "report"
COUNTS = ("commits", "merges", "files", "insertions", "deletions")
EVENTS = 6_000
STEPS = 10
Figures = tuple[int, int, int, datetime.date, datetime.date]
"""The numbers of messages, of commits and of bytes of payload, and the first and last day."""


class Command(BaseCommand):
    help = (
        "Publish and handle commits, archive them, garbage-collect them, report on them, replay and handle them again, "
        "then open the archive with DuckDB, Polars and Spark."
    )
    step = 0

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument(
            "--events",
            type=positive,
            default=EVENTS,
            metavar="N",
            help="number of events to publish (default: %(default)s)",
        )

    def handle(self, *args: Any, **options: Any) -> None:
        began = time.monotonic()
        events = options["events"]
        # The demo deletes the log, so the archive of an earlier run no longer matches it.
        Reader.objects.all().delete()
        CollectedTopic.objects.all().delete()
        shutil.rmtree(ARCHIVE, ignore_errors=True)
        self.stdout.write(f"{STEPS} steps with {events:,} commits on {connection.display_name}.\n\n")
        self._run("Publish and handle", ["demo", "--events", str(events)], 10 + events / 250)
        total = self._say_what_is_in_the_log()
        self._run("Archive the log", ["queuearchive"], 10)
        self._run("Read the archive back and compare", ["queuearchive", "verify"], 10)
        self._run("Delete the archived messages from the log", ["queuegc"], 2 + events / 5000, RETENTION="0")
        left = QueueMessage.objects.filter(topic=TOPIC).count()
        if left:
            raise CommandError(f"{left} messages of {TOPIC!r} are still in the log.")
        self._run("Write a report", ["queuereport", "--since", "1d", "--out", str(REPORT)], 20)
        replay = ["queuereplay", "--topic", TOPIC, "--to", REPLAYED, "--noinput"]
        self._run("Replay the archive into another topic", replay, 15)
        self._run("Replay again, which adds no message", replay, 15)
        drain = ["runsubscriber", "--drain", "--group", "statistics"]
        self._run("Handle the replayed messages", drain, 5 + events / 1000)
        self._compare(total)
        self._run("Archive the copies, too", ["queuearchive"], 10)
        self._open()
        self.stdout.write(
            self.style.SUCCESS(
                f"Success: {total:,} commits passed through the queue, the archive and the queue again. The "
                "statistics of every repository are the same as before."
            )
        )
        self.stdout.write(f"The report is {(REPORT / 'report.html').relative_to(ROOT)}.")
        self.stdout.write(f"The archive is {ARCHIVE.relative_to(ROOT)}.")
        self.stdout.write(f"The demo took {_seconds(time.monotonic() - began)}.")

    def _begin(self, title: str, estimate: float) -> float:
        self.step += 1
        self.stdout.write(
            self.style.MIGRATE_HEADING(f"{self.step}/{STEPS} {title} (about {_seconds(estimate)} on two cores)")
        )
        self.stdout.flush()
        return time.monotonic()

    def _run(self, title: str, command: Sequence[str], estimate: float, **environment: str) -> None:
        """Run a command in a process of its own, with the pipeline's settings."""
        began = self._begin(f"{title}: manage.py {' '.join(command)}", estimate)
        done = subprocess.run(  # noqa: S603
            [sys.executable, str(ROOT / "manage.py"), *command],
            cwd=ROOT,
            env={**os.environ, "ARCHIVE_REQUIRED": "1", "RECORD_DELIVERIES": "all", **environment},
            check=False,
        )
        if done.returncode:
            raise CommandError(f"manage.py {command[0]} exited with status {done.returncode}.")
        self.stdout.write(f"  took {_seconds(time.monotonic() - began)}\n\n")

    def _say_what_is_in_the_log(self) -> int:
        """Say why the log has more messages than there are commits, and return the number of commits."""
        topics: dict[str, int] = dict(
            QueueMessage.objects.values_list("topic").annotate(Count("offset")).order_by("topic")
        )
        parts = " + ".join(f"{count:,} in {topic}" for topic, count in topics.items())
        self.stdout.write(f"The log has {sum(topics.values()):,} messages: {parts}.")
        self.stdout.write(
            "Commits that always fail have a dead letter in a topic of their own, and each job is a message, too. The "
            "archive contains all of them.\n\n"
        )
        return topics[TOPIC]

    def _compare(self, total: int) -> None:
        sums = {name: Sum(name) for name in COUNTS}
        before = {row["repository"]: row for row in DailyStatistics.objects.values("repository").annotate(**sums)}
        after = {row["repository"]: row for row in ReplayedStatistics.objects.values("repository", *COUNTS)}
        wrong = [name for name in sorted({*before, *after}) if before.get(name) != after.get(name)]
        handled = sum(row["commits"] for row in after.values())
        if wrong or handled != total:
            raise CommandError(
                f"Handled {handled} of {total} replayed commits. Repositories with different statistics: "
                f"{', '.join(wrong) or 'none'}"
            )

    def _open(self) -> None:
        """Open the table with three programs, which must see the same."""
        began = self._begin("Open the archive with DuckDB, Polars and Spark", 10)
        found: dict[str, Figures] = {}
        for name, figures in (("DuckDB", _duckdb), ("Polars", _polars), ("Spark", _spark)):
            found[name] = figures()
            messages, commits, size, first, last = found[name]
            what = f"{messages:,} messages, {commits:,} of them commits, {size:,} bytes of payload, {first} to {last}"
            self.stdout.write(f"  {name:6}  {what}")
            self.stdout.flush()
        if len(set(found.values())) > 1:
            raise CommandError(f"The programs do not see the same: {found}")
        self.stdout.write(f"  took {_seconds(time.monotonic() - began)}\n\n")


def _duckdb() -> Figures:
    import duckdb
    from deltalake import DeltaTable

    with duckdb.connect() as duck:
        duck.register("archive", DeltaTable(ARCHIVE).to_pyarrow_dataset())
        (row,) = duck.execute(
            "SELECT count(*), count(*) FILTER (topic = ?), sum(size)::BIGINT, min(day), max(day) FROM archive", [TOPIC]
        ).fetchall()
    return row


def _polars() -> Figures:
    import polars
    from deltalake import DeltaTable

    column = polars.col
    frame = polars.scan_delta(DeltaTable(ARCHIVE)).select(
        polars.len().alias("messages"),
        (column("topic") == TOPIC).sum().alias("commits"),
        column("size").sum(),
        column("day").min().alias("first"),
        column("day").max().alias("last"),
    )
    return frame.collect().row(0)


def _spark() -> Figures:
    from pyspark.sql import functions

    from django_mysqlqueue.management.spark import project_place
    from pyspark_mysqlqueue import frames
    from pyspark_mysqlqueue.archive.root import Root
    from pyspark_mysqlqueue.session import session

    place = project_place("default")
    archive = frames.archive(session(name="pipelinedemo"), place, Root(str(ARCHIVE)))
    day = functions.to_date("published_at")
    (row,) = archive.agg(
        functions.count("*"),
        functions.count_if(functions.col("topic") == TOPIC),
        functions.sum("size"),
        functions.min(day),
        functions.max(day),
    ).collect()
    return tuple(row)


def _seconds(duration: float) -> str:
    return f"{duration:.0f} s"

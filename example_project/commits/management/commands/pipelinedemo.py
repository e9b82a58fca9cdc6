"""``manage.py pipelinedemo``: send the demo's events through the whole pipeline and back."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.db.models import Sum

from django_mysqlqueue.models import CollectedTopic, QueueMessage, Reader
from example_project.commits.events import REPLAYED, TOPIC
from example_project.commits.management.commands.demo import positive
from example_project.commits.models import DailyStatistics, ReplayedStatistics
from example_project.paths import OUTPUT, ROOT

ARCHIVE = OUTPUT / "archive"
REPORT = OUTPUT / "report"
COUNTS = ("commits", "merges", "files", "insertions", "deletions")


class Command(BaseCommand):
    help = (
        "Publish and handle commits, archive them, garbage-collect them, report on them, then replay and handle them "
        "again."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--events", type=positive, metavar="N", help="number of events to publish (default: all)")

    def handle(self, *args: Any, **options: Any) -> None:
        began = time.monotonic()
        # The demo deletes the log, so the archive of an earlier run no longer matches it.
        Reader.objects.all().delete()
        CollectedTopic.objects.all().delete()
        shutil.rmtree(ARCHIVE, ignore_errors=True)
        limit = ["--events", str(options["events"])] if options["events"] else []
        self._step("Publish and handle", ["demo", *limit])
        total = QueueMessage.objects.filter(topic=TOPIC).count()
        self._step("Archive the log", ["queuearchive"])
        self._step("Read the archive back and compare", ["queuearchive", "verify"])
        self._step("Delete the archived messages from the log", ["queuegc"], RETENTION="0")
        left = QueueMessage.objects.filter(topic=TOPIC).count()
        if left:
            raise CommandError(f"{left} messages of {TOPIC!r} are still in the log.")
        self._step("Write a report", ["queuereport", "--since", "1d", "--out", str(REPORT)])
        replay = ["queuereplay", "--topic", TOPIC, "--to", REPLAYED, "--noinput"]
        self._step("Replay the archive into another topic", replay)
        self._step("Replay again, which adds no message", replay)
        self._step("Handle the replayed messages", ["runsubscriber", "--drain", "--group", "statistics"])
        self._compare(total)
        self.stdout.write(
            self.style.SUCCESS(
                f"Success: {total:,} commits passed through the queue, the archive and the queue again. The "
                "statistics of every repository are the same as before."
            )
        )
        self.stdout.write(f"The report is {(REPORT / 'report.html').relative_to(ROOT)}.")
        self.stdout.write(f"The demo took {_seconds(began)}.")

    def _step(self, title: str, command: Sequence[str], **environment: str) -> None:
        """Run a command in a process of its own, with the pipeline's settings."""
        began = time.monotonic()
        self.stdout.write(self.style.MIGRATE_HEADING(f"{title}: manage.py {' '.join(command)}"))
        self.stdout.flush()
        done = subprocess.run(  # noqa: S603
            [sys.executable, str(ROOT / "manage.py"), *command],
            cwd=ROOT,
            env={**os.environ, "ARCHIVE_REQUIRED": "1", "RECORD_DELIVERIES": "all", **environment},
            check=False,
        )
        if done.returncode:
            raise CommandError(f"manage.py {command[0]} exited with status {done.returncode}.")
        self.stdout.write(f"  took {_seconds(began)}\n\n")

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


def _seconds(began: float) -> str:
    return f"{time.monotonic() - began:.0f} s"

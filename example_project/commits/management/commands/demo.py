"""``manage.py demo``: run the queue end to end on real events and verify the results."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.db import connection
from django.db.migrations.executor import MigrationExecutor
from django.utils import timezone
from tqdm import tqdm

from example_project.commits.demo import cleaning, report, verification
from example_project.commits.demo.run import Run
from example_project.commits.events import read_events
from example_project.paths import EVENTS_FILE, OUTPUT


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value}: must be 1 or more")
    return value


class Command(BaseCommand):
    help = "Publish commits of public repositories, handle them in three consumer groups and verify the results."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--events", type=positive, metavar="N", help="number of events to publish (default: all)")
        parser.add_argument(
            "--processes", type=positive, default=2, metavar="N", help="number of subscriber processes (default: 2)"
        )
        parser.add_argument("--seed", type=int, default=0, metavar="S", help="seed of the random failures (default: 0)")

    def handle(self, *args: Any, **options: Any) -> None:
        self._check_migrations()
        try:
            with _signals_interrupt(), tempfile.TemporaryDirectory(prefix="mysqlqueue-demo-") as folder:
                self._demo(options, Path(folder))
        except KeyboardInterrupt as error:
            raise CommandError("Interrupted. The demo has stopped its subscribers.", returncode=130) from error

    def _demo(self, options: dict[str, Any], samples: Path) -> None:
        began = time.monotonic()
        expected = verification.Expected.of(read_events(EVENTS_FILE, options["events"]))
        self.stdout.write(
            self.style.MIGRATE_HEADING(
                f"Demo on {connection.display_name}: {expected.total:,} commits from {len(expected.commits)} "
                "repositories"
            )
        )
        self._empty()
        logs = OUTPUT / f"run-{timezone.localtime():%Y%m%d-%H%M%S}-{os.getpid()}"
        logs.mkdir(parents=True)
        run = Run(
            read_events(EVENTS_FILE, options["events"]),
            expected,
            processes=options["processes"],
            seed=options["seed"],
            logs=logs,
            samples_folder=samples,
        )
        run.run(self._say)
        cleaning.sequence_the_rest()
        problems = list(verification.problems(expected, run.samples, run.ranking))
        self._table(run, expected)
        self._say(f"The subscribers' logs are in {logs.relative_to(OUTPUT.parent)}/.")
        self._say(f"The demo took {time.monotonic() - began:.0f} s.")
        if problems:
            raise CommandError("\n  ".join(["The results are wrong:", *problems]))
        outliers = len(expected.outliers)
        self.stdout.write(
            self.style.SUCCESS(
                f"Success: {expected.total:,} commits and {len(expected.statistics):,} rows of statistics match the "
                "input file,\nand so do the jobs' summaries. No event was lost, counted twice or handled out of "
                "order.\n"
                + (f"The DLQ contains the {outliers} commits that always fail." if outliers else "The DLQ is empty.")
            )
        )

    def _check_migrations(self) -> None:
        executor = MigrationExecutor(connection)
        if executor.migration_plan(executor.loader.graph.leaf_nodes()):
            raise CommandError("The database has unapplied migrations. Run first: manage.py migrate")

    def _empty(self) -> None:
        cleaning.refuse_a_queue_in_use()
        rows = cleaning.empty()
        if rows:
            self._say(f"Deleted {rows:,} rows of an earlier run from the example's tables and the queue.")

    def _table(self, run: Run, expected: verification.Expected) -> None:
        self.stdout.write("")
        for row in report.rows(run, expected):
            style = self.style.MIGRATE_HEADING if not row.name else self.style.ERROR if row.is_bad else str
            self.stdout.write(style(str(row)))
        self.stdout.write("")
        for line in report.rates(run, expected):
            self._say(line)
        self.stdout.write("")

    def _say(self, text: str) -> None:
        with tqdm.external_write_mode(file=sys.stdout):  # above the progress bars
            self.stdout.write(f"  {text}".rstrip())
            self.stdout.flush()


@contextmanager
def _signals_interrupt() -> Iterator[None]:
    """Handle SIGTERM and SIGHUP like Ctrl-C, so that the subscribers do not outlive the demo."""

    def interrupt(number: int, frame: FrameType | None) -> NoReturn:
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may set signal handlers
        return
    numbers = (signal.SIGTERM, signal.SIGHUP)
    before = [signal.signal(number, interrupt) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)

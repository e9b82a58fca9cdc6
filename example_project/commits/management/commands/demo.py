"""``manage.py demo``: the whole queue at work on real events, and a check of what came out."""

from __future__ import annotations

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
from example_project.commits.events import TOPIC, read_events
from example_project.paths import EVENTS_FILE, OUTPUT


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError(f"{value} is not above 0")
    return value


class Command(BaseCommand):
    help = "Publishes commits of public repositories, handles them in three groups, and checks the results."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--events", type=positive, metavar="N", help="only the first N events (default: all)")
        parser.add_argument("--processes", type=positive, default=2, metavar="N", help="subscribers (default: 2)")
        parser.add_argument("--seed", type=int, default=0, metavar="S", help="of the failures by chance (default: 0)")

    def handle(self, *args: Any, **options: Any) -> None:
        self._check_migrations()
        try:
            with _signals_interrupt(), tempfile.TemporaryDirectory(prefix="mysqlqueue-demo-") as folder:
                self._demo(options, Path(folder))
        except KeyboardInterrupt as error:
            raise CommandError(
                "Interrupted; the subscribers that it had started have ended.", returncode=130
            ) from error

    def _demo(self, options: dict[str, Any], samples: Path) -> None:
        began = time.monotonic()
        expected = verification.Expected.of(read_events(EVENTS_FILE, options["events"]))
        self.stdout.write(
            self.style.MIGRATE_HEADING(
                f"{expected.total:,} commits of {len(expected.commits)} repositories on {connection.display_name}"
            )
        )
        self._empty()
        logs = OUTPUT / f"run-{timezone.localtime():%Y%m%d-%H%M%S}-{os.getpid()}"
        logs.mkdir(parents=True)
        run = Run(
            read_events(EVENTS_FILE, options["events"]),
            expected.total,
            processes=options["processes"],
            seed=options["seed"],
            logs=logs,
            samples_folder=samples,
        )
        run.run(self._say)
        cleaning.sequence_the_rest()
        problems = list(verification.problems(expected, run.samples))
        self._table(run, expected)
        self._say(f"Subscribers' logs: {logs.relative_to(OUTPUT.parent)}/. All took {time.monotonic() - began:.0f} s.")
        if problems:
            raise CommandError("\n  ".join(["The result is wrong:", *problems]))
        self.stdout.write(
            self.style.SUCCESS(
                f"All is well: {expected.total:,} commits and {len(expected.statistics):,} rows of statistics "
                "agree with the file; nothing is\nlost, doubled or out of order; the DLQ holds exactly the "
                f"{len(expected.outliers)} outliers."
            )
        )

    def _check_migrations(self) -> None:
        executor = MigrationExecutor(connection)
        if executor.migration_plan(executor.loader.graph.leaf_nodes()):
            raise CommandError("The database lacks tables. Please run first: manage.py migrate")

    def _empty(self) -> None:
        cleaning.refuse_a_queue_in_use()
        rows = cleaning.empty()
        if rows:
            self._say(f"Emptied the example's tables and the topic {TOPIC!r} of an earlier run: {rows:,} rows.")

    def _table(self, run: Run, expected: verification.Expected) -> None:
        self.stdout.write("")
        for row in report.rows(run, expected.total):
            style = self.style.MIGRATE_HEADING if not row.name else self.style.ERROR if row.is_bad else str
            self.stdout.write(style(str(row)))
        self.stdout.write("")
        for line in report.rates(run, expected.total):
            self._say(line)
        self.stdout.write("")

    def _say(self, text: str) -> None:
        with tqdm.external_write_mode(file=sys.stdout):  # above the progress bars
            self.stdout.write(f"  {text}".rstrip())
            self.stdout.flush()


@contextmanager
def _signals_interrupt() -> Iterator[None]:
    """SIGTERM and SIGHUP work like a Ctrl-C here: the subscribers must not outlive the demo."""

    def interrupt(number: int, frame: FrameType | None) -> NoReturn:
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield  # signals are the main thread's
        return
    numbers = (signal.SIGTERM, signal.SIGHUP)
    before = [signal.signal(number, interrupt) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)

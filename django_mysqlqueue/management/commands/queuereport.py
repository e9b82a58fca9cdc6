"""``manage.py queuereport``: what the queue did, as one page with pictures."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

from django.core.management.base import CommandError, CommandParser
from tqdm import tqdm

from django_mysqlqueue.conf import get_settings
from django_mysqlqueue.management.base import QueueCommand
from django_mysqlqueue.models import ConsumerGroup
from django_mysqlqueue.redaction import redacted


class Command(QueueCommand):
    help = "Makes an HTML page about what the queue did, and its tables as Parquet and CSV."

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        parser.add_argument(
            "--since",
            metavar="TIME",
            help="from when on: a time like 2026-11-22T06:00 (UTC unless it says otherwise), a day, or a length of "
            "time before now like 36h or 14d (default: everything)",
        )
        parser.add_argument("--until", metavar="TIME", help="until before when, written in the same way (default: now)")
        parser.add_argument("--topic", action="append", metavar="TOPIC", help="only this one; may be repeated")
        parser.add_argument("--out", required=True, metavar="DIR", help="a folder: new, empty, or an earlier report's")
        parser.add_argument(
            "--archive-path",
            metavar="ROOT",
            help="the archive's folder or URI (default: MYSQLQUEUE['ARCHIVE_PATH']; without both: the live log alone)",
        )
        parser.add_argument("--master", metavar="URL", help="Spark's master (default: spark-submit's, else local[*])")

    def run_on(self, using: str, options: dict[str, Any]) -> None:
        try:
            from django_mysqlqueue.pipeline import project
            from django_mysqlqueue.pipeline.archive.files import Root
            from django_mysqlqueue.pipeline.errors import PipelineError
            from django_mysqlqueue.pipeline.report import files, run_report
            from django_mysqlqueue.pipeline.report.options import parse_moment
            from django_mysqlqueue.pipeline.session import session
        except ImportError as error:
            raise CommandError(f"The report needs pip install django-mysqlqueue[spark]: {error}") from error
        settings = get_settings()
        path = options["archive_path"] or settings.archive_path
        read = set(ConsumerGroup.objects.using(using).values_list("topic", flat=True))
        try:
            now = datetime.datetime.now(datetime.UTC)
            since, until = (
                None if options[name] is None else parse_moment(f"--{name}", options[name], now)
                for name in ("since", "until")
            )
            files.Folder(options["out"])  # before Spark takes its seconds to start
            place = project.place(using)
            with tqdm(unit=" questions", disable=None if options["verbosity"] else True, file=self.stderr) as bar:

                def progress(what: str) -> None:
                    bar.set_description(what)
                    bar.update()

                made = run_report(
                    session(options["master"], name="queuereport"),
                    place,
                    Root(path) if path else None,
                    since,
                    until,
                    options["topic"],
                    options["out"],
                    retention=lambda topic: settings.retention_of(topic, has_groups=topic in read),
                    redact=None
                    if settings.redact is None
                    else lambda text, topic: redacted(text, topic=topic, kind="error"),
                    progress=progress,
                )
        except PipelineError as error:
            raise CommandError(str(error)) from error
        self.stdout.write(f"{made[0]}: open it in a browser. Its {len(made) - 1} tables are in {Path(made[1]).parent}.")

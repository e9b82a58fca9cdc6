"""``manage.py queuerecurring``: list recurring schedules, run, pause, resume or delete one, or import others."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

from django.core.management.base import CommandParser

from django_mysqlqueue import operations
from django_mysqlqueue.inspection import ScheduleStatus, list_schedules
from django_mysqlqueue.inspection.schedules import RUNS, with_declared
from django_mysqlqueue.management.operations import ChangesCommand
from django_mysqlqueue.management.tables import write_table
from django_mysqlqueue.operations.results import Result
from django_mysqlqueue.service.databases import queue_aliases
from django_mysqlqueue.text.humanize import duration, moment, shortened


class Command(ChangesCommand):
    """List recurring schedules, or change one."""

    help = "List the recurring schedules, with their next and last runs. With an option, run or change one."
    changes: ClassVar = {
        "run_now": operations.run_recurring,
        "pause": operations.pause_recurring,
        "resume": operations.resume_recurring,
        "delete": operations.delete_recurring,
        "import_celery_beat": operations.import_celery_beat,
    }

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        change = parser.add_mutually_exclusive_group()
        change.add_argument("--run-now", metavar="NAME", help="run this schedule now; its next tick stays as it is")
        change.add_argument("--pause", metavar="NAME", help="pause this schedule: its ticks are dropped")
        change.add_argument("--resume", metavar="NAME", help="resume this schedule; it begins with its next tick")
        change.add_argument("--delete", metavar="NAME", help="delete this schedule, which no running process declares")
        change.add_argument(
            "--import-celery-beat",
            action="store_const",
            const=True,
            help="create schedules from the tables of django-celery-beat (with --database: those in that database)",
        )

    def databases(self, options: Any) -> Sequence[str]:
        change = self.change(options)
        if not change or (options.get("database") is not None and change != "import_celery_beat"):
            return super().databases(options)
        # The operation finds the one that has the schedule. The tables of Celery beat may be in any database.
        return queue_aliases()[:1]

    def operate(self, options: dict[str, Any], **how: Any) -> Result:
        change = self.change(options)
        how["using"] = options["database"]
        given = () if change == "import_celery_beat" else (options[change],)
        return self.changes[change](*given, **how)

    def read(self, using: str, options: dict[str, Any]) -> tuple[ScheduleStatus, ...]:
        return with_declared(list_schedules(using=using, runs=RUNS), using)

    def show(self, using: str, found: Sequence[ScheduleStatus]) -> None:
        if not found:
            self.stdout.write("There are no recurring schedules.")
            return
        write_table(
            self.stdout,
            ("name", "times", "time zone", "runs", "next run", "last run", "outcome", "took", "state"),
            [
                (
                    one.name,
                    one.times,
                    one.timezone or "-",
                    one.task or f"topic {one.topic}",
                    moment(one.next_tick) or "-",
                    moment(one.last_run) or "-",
                    _outcome(one),
                    _took(one),
                    _state(one),
                )
                for one in found
            ],
        )

    def as_json(self, using: str, found: Sequence[ScheduleStatus]) -> dict[str, Any]:
        return {"database": using, "schedules": [dataclasses.asdict(one) for one in found]}


def _outcome(one: ScheduleStatus) -> str:
    if not one.runs:
        return "-"
    last = one.runs[0]
    error = shortened(last.error_line) or last.error
    return f"{last.status.lower()}{f' ({error})' if error else ''}"


def _took(one: ScheduleStatus) -> str:
    seconds = one.runs[0].duration if one.runs else None
    return "-" if seconds is None else duration(seconds)


def _state(one: ScheduleStatus) -> str:
    """Return what keeps a schedule from running, if anything does."""
    if not one.registered_at:
        return "not registered yet"
    if one.paused_at:
        return "paused"
    if not one.declared and not one.editable:
        return "not in the code of any running process"
    if one.error:
        return one.error
    if not one.declared:
        return "no running process runs it" if one.seen_at else "not picked up yet"
    if one.failed_run:
        return "failing"
    return f"skipped {one.skipped:,}" if one.skipped else "-"

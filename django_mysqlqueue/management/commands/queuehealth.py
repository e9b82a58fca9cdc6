"""``manage.py queuehealth``: exits with 0 when the queue is well and with 1 when it is not, and says why."""

from __future__ import annotations

import json
import sys
from typing import Any, ClassVar

from django.core.exceptions import ImproperlyConfigured
from django.core.management.base import CommandError, CommandParser

from django_mysqlqueue.exceptions import OperationRefused
from django_mysqlqueue.humanize import counted, duration
from django_mysqlqueue.inspection import (
    CHECKS,
    Bounds,
    HealthFinding,
    HealthLimits,
    HealthReport,
    StallTimes,
    check_health,
)
from django_mysqlqueue.management.base import QueueCommand
from django_mysqlqueue.service.counts import Count, total
from django_mysqlqueue.sql.connection import READ_SECONDS


class Command(QueueCommand):
    read_timeout = READ_SECONDS
    bounds: ClassVar[Bounds] = CHECKS
    stall_times: ClassVar[StallTimes] = StallTimes()
    help = (
        "Exit with 1 if messages are stuck, handlers fail or a limit is exceeded, and print the problems. "
        "For alerting, not for liveness probes: a database that hangs must not restart the subscribers."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        add = parser.add_argument
        add("--group", action="append", default=[], metavar="G", help="only this consumer group (repeatable)")
        add("--topic", action="append", default=[], metavar="T", help="only this topic (repeatable)")
        add("--max-lag", type=int, metavar="N", help="unsettled messages that a group may have")
        add("--max-age", type=float, metavar="SECONDS", help="how long a message may wait for its group")
        add("--max-dead-letters", type=int, metavar="N", help="dead letters that a group may have")
        add("--min-subscribers", type=int, metavar="N", help="live subscribers that a group must have")
        add(
            "--max-recent-dead-letters",
            type=int,
            metavar="N",
            help="dead letters that a group may have within the window "
            "(default: HEALTH['MAX_RECENT_DEAD_LETTERS'], 10)",
        )
        add(
            "--max-failure-ratio",
            type=float,
            metavar="R",
            help="share of a group's attempts within the window that may fail, 0 to 1 "
            "(default: HEALTH['MAX_FAILURE_RATIO'], 0.5)",
        )
        add(
            "--min-attempts",
            type=int,
            metavar="N",
            help="attempts within the window below which the ratio is not judged (default: HEALTH['MIN_ATTEMPTS'], 10)",
        )
        add(
            "--window",
            type=float,
            metavar="SECONDS",
            help="seconds that count as recent (default: HEALTH['WINDOW'], 600)",
        )
        add("--format", choices=("text", "json"), default="text")

    def run_on(self, using: str, options: dict[str, Any]) -> None:
        try:
            limits = HealthLimits(
                options["max_lag"],
                options["max_age"],
                options["max_dead_letters"],
                options["min_subscribers"],
                recent_dead_letters=options["max_recent_dead_letters"],
                failure_ratio=options["max_failure_ratio"],
                min_attempts=options["min_attempts"],
                window=options["window"],
            )
            report = check_health(
                limits,
                groups=options["group"],
                topics=options["topic"],
                using=using,
                bounds=self.bounds,
                stall_times=self.stall_times,
            )
        except (OperationRefused, ImproperlyConfigured) as error:
            raise CommandError(str(error)) from error
        if options["format"] == "json":
            self.stdout.write(json.dumps(_as_json(using, report), indent=2))
        else:
            self._text(report)
        if not report.healthy:
            sys.exit(1)

    def _text(self, report: HealthReport) -> None:
        for finding in report.findings:
            self.stdout.write(self.style.ERROR(f"PROBLEM  {finding.text}"))
        for note in report.notes:
            self.stdout.write(self.style.WARNING(f"note     {note.text}"))
        if report.healthy:
            lag = total(group.lag for group in report.groups)
            age = _outbox_age(report)
            self.stdout.write(
                f"Healthy: {counted(len(report.groups), 'group')}, lag {lag}, "
                f"{report.state.outbox.waiting} in the outbox"
                + ("." if age is None else f" (the oldest for {duration(age)}): the lag does not count them.")
            )


def _outbox_age(report: HealthReport) -> float | None:
    """Seconds that the oldest message in the outbox has been due."""
    since = report.state.outbox.waiting_since
    return None if since is None else max(0.0, (report.state.now - since) / 1000)


def _as_json(using: str, report: HealthReport) -> dict[str, Any]:
    return {
        "database": using,
        "healthy": report.healthy,
        "problems": [_finding(finding) for finding in report.findings],
        "notes": [_finding(note) for note in report.notes],
        "groups": [
            {
                "group": group.ref.group,
                "topic": group.ref.topic,
                "lag": _count(group.lag),
                "oldest_unacked_age": (
                    None if group.oldest_at is None else max(0.0, (report.state.now - group.oldest_at) / 1000)
                ),
                "in_flight": _count(group.in_flight),
                "retrying": _count(group.retrying),
                "dead_letters": _count(group.dead_letters),
                "recent_dead_letters": _count(group.recent_dead_letters),
                "subscribers": len(group.live),
                "paused": group.paused,
            }
            for group in report.groups
        ],
        "outbox": _count(report.state.outbox.waiting),
        "outbox_oldest_age": _outbox_age(report),
    }


def _count(count: Count) -> dict[str, Any]:
    return {"value": count.value, "exact": count.exact}


def _finding(finding: HealthFinding) -> dict[str, Any]:
    return {
        "kind": finding.kind,
        "text": finding.text,
        "group": finding.ref.group if finding.ref else None,
        "topic": finding.ref.topic if finding.ref else finding.topic,
        "partition": finding.key,
    }

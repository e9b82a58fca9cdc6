"""``manage.py queuehealth``: exit with 0 if the queue is healthy, otherwise print the problems and exit with 1."""

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
    """Check the queue's health."""

    read_timeout = READ_SECONDS
    bounds: ClassVar[Bounds] = CHECKS
    stall_times: ClassVar[StallTimes] = StallTimes()
    help = (
        "Print the problems and exit with status 1 if messages are stuck, handlers fail or a limit is exceeded. "
        "Use it for alerting, not for liveness probes: a hanging database must not cause the subscribers to be "
        "restarted."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        add = parser.add_argument
        add(
            "--group",
            action="append",
            default=[],
            metavar="GROUP",
            help="check only this consumer group (may be repeated)",
        )
        add("--topic", action="append", default=[], metavar="TOPIC", help="check only this topic (may be repeated)")
        add("--max-lag", type=int, metavar="N", help="maximum backlog: number of unsettled messages per group")
        add(
            "--max-age",
            type=float,
            metavar="SECONDS",
            help="maximum age, in seconds, of an unsettled message or of one that is due in the outbox",
        )
        add("--max-dead-letters", type=int, metavar="N", help="maximum number of dead letters per group")
        add("--min-subscribers", type=int, metavar="N", help="minimum number of live subscribers per group")
        add(
            "--max-recent-dead-letters",
            type=int,
            metavar="N",
            help="maximum number of dead letters per group within the window "
            "(default: HEALTH['MAX_RECENT_DEAD_LETTERS'], 10)",
        )
        add(
            "--max-failure-ratio",
            type=float,
            metavar="RATIO",
            help="maximum share of a group's attempts within the window that fail, 0 to 1 "
            "(default: HEALTH['MAX_FAILURE_RATIO'], 0.5)",
        )
        add(
            "--min-attempts",
            type=int,
            metavar="N",
            help="minimum number of attempts within the window for the ratio to be checked "
            "(default: HEALTH['MIN_ATTEMPTS'], 10)",
        )
        add(
            "--window",
            type=float,
            metavar="SECONDS",
            help="length, in seconds, of the window that ends now (default: HEALTH['WINDOW'], 600)",
        )
        add("--format", choices=("text", "json"), default="text", help="output format (default: text)")

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
            backlog = total(group.lag for group in report.groups)
            age = _outbox_age(report)
            self.stdout.write(
                f"Healthy: {counted(len(report.groups), 'group')}, backlog {backlog}, "
                f"outbox {report.state.outbox.waiting}"
                + ("." if age is None else f", the oldest message for {duration(age)} (not counted in the backlog).")
            )


def _outbox_age(report: HealthReport) -> float | None:
    """Return for how many seconds the oldest message in the outbox has been due, or None if none is."""
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

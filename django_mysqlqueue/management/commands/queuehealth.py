"""``manage.py queuehealth``: exits with 0 when the queue is well and with 1 when it is not, and says why."""

from __future__ import annotations

import json
import sys
from typing import Any

from django.core.management.base import CommandError, CommandParser
from django.db import Error

from django_mysqlqueue.exceptions import OperationRefused
from django_mysqlqueue.management.base import QueueCommand
from django_mysqlqueue.service import health
from django_mysqlqueue.service.health import Finding, Limits, Report
from django_mysqlqueue.service.overview import Count, total


class Command(QueueCommand):
    help = (
        "Exits with 1 when messages stand still or a limit is passed. For alerting; not for liveness probes: "
        "a database that hangs must not restart the subscribers."
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
        add("--format", choices=("text", "json"), default="text")

    def run_on(self, using: str, options: dict[str, Any]) -> None:
        try:
            limits = Limits(
                options["max_lag"], options["max_age"], options["max_dead_letters"], options["min_subscribers"]
            )
            report = health.check(using, limits, groups=options["group"], topics=options["topic"])
        except OperationRefused as error:
            raise CommandError(str(error)) from error
        except Error as error:
            raise CommandError(f"The database {using!r} does not answer: {error}") from error
        if options["format"] == "json":
            self.stdout.write(json.dumps(_as_json(using, report), indent=2))
        else:
            self._text(report)
        if not report.healthy:
            sys.exit(1)

    def _text(self, report: Report) -> None:
        for finding in report.findings:
            self.stdout.write(self.style.ERROR(f"PROBLEM  {finding.text}"))
        for note in report.notes:
            self.stdout.write(self.style.WARNING(f"note     {note.text}"))
        if report.healthy:
            lag = total(group.lag for group in report.groups)
            groups = len(report.groups)
            self.stdout.write(
                f"Healthy: {groups} group{'' if groups == 1 else 's'}, lag {lag}, "
                f"{report.state.outbox.waiting} in the outbox."
            )


def _as_json(using: str, report: Report) -> dict[str, Any]:
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
                "subscribers": len(group.live),
                "paused": group.paused,
            }
            for group in report.groups
        ],
        "outbox": _count(report.state.outbox.waiting),
    }


def _count(count: Count) -> dict[str, Any]:
    return {"value": count.value, "exact": count.exact}


def _finding(finding: Finding) -> dict[str, Any]:
    return {
        "kind": finding.kind,
        "text": finding.text,
        "group": finding.ref.group if finding.ref else None,
        "topic": finding.ref.topic if finding.ref else finding.topic,
        "partition": finding.key,
    }

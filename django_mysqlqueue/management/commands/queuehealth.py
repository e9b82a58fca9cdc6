"""``manage.py queuehealth``: exit with 0 if the queue is healthy, otherwise print the problems and exit with 1."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from django.core.exceptions import ImproperlyConfigured
from django.core.management.base import CommandError, CommandParser

from django_mysqlqueue.exceptions import OperationRefused
from django_mysqlqueue.inspection import (
    CHECKS,
    Bounds,
    HealthFinding,
    HealthLimits,
    HealthReport,
    StallTimes,
    check_health,
)
from django_mysqlqueue.inspection.health import check_selected, databases_of, is_alarm, require_registered
from django_mysqlqueue.management.base import ReadingCommand, add_format, database_of
from django_mysqlqueue.management.tables import details
from django_mysqlqueue.service.counts import Count, total
from django_mysqlqueue.sql.connection import READ_SECONDS
from django_mysqlqueue.text.escaping import visible
from django_mysqlqueue.text.humanize import counted, duration


class Command(ReadingCommand):
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
            help="maximum share of a group's newest attempts that fail, 0 to 1 "
            "(default: HEALTH['MAX_FAILURE_RATIO'], 0.5)",
        )
        add(
            "--min-attempts",
            type=int,
            metavar="N",
            help="number of newest attempts whose share counts; with fewer within the window, it is not checked "
            "(default: HEALTH['MIN_ATTEMPTS'], 10)",
        )
        add(
            "--window",
            type=float,
            metavar="SECONDS",
            help="length, in seconds, of the window that ends now (default: HEALTH['WINDOW'], 600)",
        )
        add_format(parser)

    def databases(self, options: Mapping[str, Any]) -> Sequence[str]:
        """Return the aliases of the databases to check."""
        if options.get("database") is not None:
            return [database_of(options["database"])]
        return databases_of(options.get("topic") or ())

    def handle(self, *args: Any, **options: Any) -> None:
        try:
            self._limits = HealthLimits(
                options["max_lag"],
                options["max_age"],
                options["max_dead_letters"],
                options["min_subscribers"],
                recent_dead_letters=options["max_recent_dead_letters"],
                failure_ratio=options["max_failure_ratio"],
                min_attempts=options["min_attempts"],
                window=options["window"],
            )
        except OperationRefused as error:
            raise CommandError(str(error)) from error
        self._selects = bool(options["group"] or options["topic"])
        # With several databases, each may have some of the groups.
        self._check = check_health if len(self.databases(options)) == 1 else check_selected
        super().handle(*args, **options)

    def read(self, using: str, options: dict[str, Any]) -> HealthReport:
        try:
            return self._check(
                self._limits,
                groups=options["group"],
                topics=options["topic"],
                using=using,
                bounds=self.bounds,
                stall_times=self.stall_times,
            )
        except (OperationRefused, ImproperlyConfigured) as error:
            raise CommandError(str(error)) from error

    def as_json(self, using: str, found: HealthReport) -> dict[str, Any]:
        return {
            "database": using,
            "healthy": found.healthy,
            "problems": [_finding(finding) for finding in found.findings],
            "notes": [_finding(note) for note in found.notes],
            "groups": [
                {
                    "group": group.ref.group,
                    "topic": group.ref.topic,
                    "lag": _count(group.lag),
                    "oldest_unacked_age": (
                        None if group.oldest_at is None else max(0.0, (found.state.now - group.oldest_at) / 1000)
                    ),
                    "in_flight": _count(group.in_flight),
                    "retrying": _count(group.retrying),
                    "dead_letters": _count(group.dead_letters),
                    "recent_dead_letters": _count(group.recent_dead_letters),
                    "subscribers": len(group.live),
                    "paused": group.paused,
                }
                for group in found.groups
            ],
            "outbox": _count(found.state.outbox.waiting),
            "outbox_oldest_age": _outbox_age(found),
        }

    def show(self, using: str, found: HealthReport) -> None:
        for finding in found.beyond:
            self.stdout.write(self.style.ERROR(f"PROBLEM  {visible(finding.text)}"))
        # The causes are in the order of severity, and a topic without a group is alarming although its severity is 1.
        for cause in sorted(found.causes, key=is_alarm, reverse=True):
            style, name = (self.style.ERROR, "PROBLEM ") if is_alarm(cause) else (self.style.WARNING, "note    ")
            self.stdout.write(style(f"{name} {visible(cause.headline())} {visible(cause.advice)}"))
            for line in details(cause, found.state.now):
                self.stdout.write(f"         {visible(line)}")
        if self._selects and not found.groups:
            self.stdout.write("None of the selected groups is registered here.")
        elif found.healthy:
            backlog = total(group.lag for group in found.groups)
            age = _outbox_age(found)
            self.stdout.write(
                f"Healthy: {counted(len(found.groups), 'group')}, backlog {backlog}, "
                f"outbox {found.state.outbox.waiting}"
                + ("." if age is None else f", the oldest message for {duration(age)} (not counted in the backlog).")
            )

    def together(self, sections: Sequence[dict[str, Any]]) -> dict[str, Any]:
        return {"healthy": all(one.get("healthy", False) for one in sections), **super().together(sections)}

    def finish(self, found: Mapping[str, HealthReport], failed: Sequence[str], options: dict[str, Any]) -> None:
        if not failed and self._check is check_selected:
            try:
                states = [report.state for report in found.values()]
                require_registered(states, groups=options["group"], topics=options["topic"])
            except OperationRefused as error:
                raise CommandError(str(error)) from error
        if failed or not all(report.healthy for report in found.values()):
            sys.exit(1)


def _outbox_age(report: HealthReport) -> float | None:
    """Return for how many seconds the oldest message in the outbox has been due, or None if none is."""
    since = report.state.outbox.waiting_since
    return None if since is None else max(0.0, (report.state.now - since) / 1000)


def _count(count: Count) -> dict[str, Any]:
    return {"value": count.value, "exact": count.exact}


def _finding(finding: HealthFinding) -> dict[str, Any]:
    return {
        "kind": finding.kind,
        "text": finding.text,
        "group": finding.ref.group if finding.ref else None,
        "topic": finding.ref.topic if finding.ref else finding.topic,
        "partition": finding.key,
        "since": finding.since,
        "error": finding.error or None,
    }

"""``manage.py queuestatus``: show topics, groups, leases and problems."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from django.core.management import call_command
from django.core.management.base import CommandError

from django_mysqlqueue.filter_policies import FilterPolicy
from django_mysqlqueue.inspection import (
    EXACT,
    Bounds,
    Cause,
    ErrorListing,
    GroupOverview,
    JobSummary,
    Problem,
    QueueOverview,
    QueueStatus,
    Spread,
    TaskListing,
    TaskPeriod,
    TaskSummary,
    find_problems,
    get_overview,
    jobs,
    list_errors,
    operations_log,
    partitions,
    summarize_tasks,
)
from django_mysqlqueue.inspection.causes import state_of
from django_mysqlqueue.inspection.operations_log import OperationEntry
from django_mysqlqueue.inspection.outbox import TopicOverview, read_topics
from django_mysqlqueue.inspection.problem import NOTE
from django_mysqlqueue.inspection.trends import GroupRow
from django_mysqlqueue.management import watching
from django_mysqlqueue.management.base import INTERRUPTED, ReadingCommand, add_format, database_errors
from django_mysqlqueue.management.group_table import COLUMNS, OF_NOW, group_table
from django_mysqlqueue.management.keys import Place
from django_mysqlqueue.management.tables import Page, details, table_lines
from django_mysqlqueue.options.delivery_limits import LIMIT_OPTIONS
from django_mysqlqueue.options.table import storable
from django_mysqlqueue.service import rollups
from django_mysqlqueue.service.job_results import is_of_jobs
from django_mysqlqueue.service.refs import GroupRef
from django_mysqlqueue.service.subsets import EVERYTHING
from django_mysqlqueue.sql.session import Session
from django_mysqlqueue.text.escaping import visible
from django_mysqlqueue.text.humanize import counted, duration, moment

if TYPE_CHECKING:
    from django_mysqlqueue.management.screen import Screen

WIDTH = 100
"""Maximum number of columns of the output, unless everything is shown."""
SHORTEST, LONGEST = 24, 40
"""Its maximum number of lines is that of the terminal, within these bounds."""
FEW_GROUPS = 3
"""Number of groups that other problems leave room for."""
WAITING_JOBS = 20
"""Maximum number of jobs that wait for their next attempts in their table."""


@dataclass(frozen=True, slots=True)
class Status:
    """The state that the command shows."""

    queue: QueueOverview
    rows: Sequence[GroupRow]
    """The groups, the worst states first, then the longest backlogs."""
    topics: Sequence[TopicOverview]
    leases: dict[GroupRef, dict[str, int]]
    """For each group, the number of partitions by owner; ``''`` stands for partitions without an owner."""
    passed: defaultdict[GroupRef, Counter[str]]
    """For each group, the number of messages of the last hour that were settled without a call, by reason
    (``rollups.PASSED``)."""
    pauses: dict[GroupRef, OperationEntry]
    """The operations that have paused groups, as far as the audit log has them."""
    waiting_jobs: Sequence[JobSummary]
    """The next ones that wait for another attempt."""
    errors: ErrorListing
    tasks: TaskListing
    problems: Sequence[Problem]
    causes: Sequence[Cause]
    summary: QueueStatus


class Command(ReadingCommand):
    """Show the state of the queue."""

    help = "Show topics, consumer groups, their backlogs, dead letters, leases and problems."
    # Exact counts read the whole log, however long it is.
    read_timeout: ClassVar[float] = 600.0

    def add_arguments(self, parser: Any) -> None:
        super().add_arguments(parser)
        add_format(parser)
        parser.add_argument("--key", help="list only errors of messages published with this key")
        parser.add_argument(
            "--all",
            action="store_true",
            help="show everything, as long and wide as it is (default: what fits on a screen of 100 columns)",
        )
        parser.add_argument(
            "--watch",
            nargs="?",
            type=watching.interval,
            const=watching.SECONDS,
            metavar="SECONDS",
            help="show the state on a full screen that is updated every SECONDS (default: 2) until you press q; h "
            "shows the keys that choose, open and pause groups; its counts have the bounds of the dashboard",
        )

    def handle(self, *args: Any, **options: Any) -> None:
        self._is_whole = options["all"]
        self._parts = len(self.databases(options))
        if options["watch"] is None:
            super().handle(*args, **options)
        else:
            self._watch(options)

    def _watch(self, options: dict[str, Any]) -> None:
        if options["key"] is not None:
            raise CommandError("--watch shows all keys: it cannot be combined with --key.")
        if options["format"] == "json":
            raise CommandError("--watch shows a screen: it cannot be combined with --format json.")
        watching.require_terminal(self.stdout, os.environ)
        try:
            from django_mysqlqueue.management import screen
        except ImportError as error:
            raise CommandError(
                f"--watch needs the extra 'watch': run pip install 'django-mysqlqueue[watch]' ({error})."
            ) from error
        complete: set[str] = set()
        """Databases that have the tables."""

        def read(using: str) -> watching.Snapshot:
            # The migrations are compared once: that takes longer than the rest.
            with database_errors(using) if using in complete else self.prepared(using):
                complete.add(using)
                return watching.read_snapshot(using)

        seconds = options["watch"]
        try:
            with screen.opened(self.stdout, seconds=seconds, color=not options["no_color"]) as shown:
                watching.watch(
                    self.databases(options),
                    read,
                    shown.show,
                    seconds=seconds,
                    size=shown.size,
                    keys=sys.stdin,
                    change=lambda place, command: self._change(shown, place, command, options),
                )
        except KeyboardInterrupt:
            sys.exit(INTERRUPTED)

    def _change(self, shown: Screen, place: Place, command: str, options: dict[str, Any]) -> None:
        """Run a command on a group, which shows what it would do and asks for confirmation."""
        with shown.left(), contextlib.suppress(EOFError):
            self.stdout.write(f"{command} {visible(place.ref.group)} {visible(place.ref.topic)}")
            reason = input("Reason for the audit log: ")
            try:
                call_command(
                    command, "--", *place.ref, database=place.alias, reason=reason, no_color=options["no_color"]
                )
            except CommandError as error:
                self.stderr.write(str(error))
            input("Press Enter to return to the screen. ")

    def read(self, using: str, options: dict[str, Any]) -> Status:
        return read_status(using, key=options["key"])

    def as_json(self, using: str, found: Status) -> dict[str, Any]:
        queue = found.queue
        return {
            "database": using,
            "now": queue.now,
            "last_offset": queue.last_offset,
            "sequenced_at": queue.sequenced_at,
            "debounced": queue.debounced,
            "topics": [dataclasses.asdict(topic) for topic in found.topics],
            "bells": [bell._asdict() for bell in queue.bells],
            "moves": [
                {
                    "topic": topic,
                    "from": route.source,
                    "to": route.planned or route.target or using,
                    "prepared": bool(route.planned),
                }
                for topic, route in sorted(queue.routes.items())
            ],
            "groups": [_group(group, found) for group in queue.groups],
            "status": {
                "state": found.summary.state,
                "text": found.summary.headline(),
                "next_step": found.summary.advice,
            },
            "causes": [
                {
                    "severity": one.severity,
                    "kind": one.kind,
                    "text": one.headline(),
                    "next_step": one.advice,
                    "error": one.error or None,
                    "groups": [{"group": ref.group, "topic": ref.topic} for ref in one.refs],
                    "partitions": one.partitions,
                    "messages": one.messages.value,
                    "since": one.since,
                    "problems": len(one.problems),
                }
                for one in found.causes
            ],
            "waiting_jobs": [
                {"id": one.id, "task": one.task, "topic": one.topic, "until": one.retry_at, "reason": one.retry_reason}
                for one in found.waiting_jobs
            ],
            "errors": [
                {
                    "group": one.ref.group,
                    "topic": one.ref.topic,
                    "error": one.text,
                    "class": one.error_class,
                    "states": one.states,
                    "retrying": one.retrying.value,
                    "dead_letters": one.dead_letters.value,
                    "failed_attempts": one.attempts.value,
                    "exact": one.is_exact,
                    "first_at": one.first_at,
                    "last_at": one.last_at,
                    "offset": one.offset,
                    "dead_letter": one.dead_letter,
                    "tasks": one.tasks,
                }
                for one in found.errors.kinds
            ],
            "tasks": [_task(one) for one in found.tasks.tasks],
            "problems": [
                {
                    "severity": one.severity,
                    "kind": one.kind,
                    "text": one.text,
                    "group": one.ref.group if one.ref else None,
                    "topic": one.ref.topic if one.ref else one.topic,
                    "partition": one.key,
                    "offset": one.offset,
                    "subscriber": one.subscriber,
                    "task": one.task,
                    "since": one.began_at,
                    "error": one.error or None,
                }
                for one in found.problems
            ],
        }

    def show(self, using: str, found: Status) -> None:
        page = self._page()
        self._head(page, using, found)
        rest = [one for one in found.causes if found.summary.state == "ok" or one is not found.summary.cause]
        serious = [one for one in rest if one.severity < NOTE]
        for title, noun, causes in (
            ("Other problems", "problem", serious),
            ("For information", "note", rest[len(serious) :]),
        ):
            if causes:
                blocks = [self._cause(page, one, found.queue.now) for one in causes]
                page.section([self._heading(title)], blocks, noun, keep=min(len(found.rows), FEW_GROUPS) + 8)
        if not found.topics and not found.rows:
            page.write(["The queue has no messages and no consumer groups."])
        if found.rows:
            columns = COLUMNS if self._is_whole else OF_NOW
            table = group_table(found.rows, page.width - 2, columns=columns, is_folded=False)
            titles = [column.title.replace("\n", " ") for column in table.columns]
            right = [column.is_number for column in table.columns]
            header, *lines = table_lines(titles, table.cells, width=page.width, right=right)
            page.section([self._heading("Groups"), header], [[line] for line in lines], "group", keep=4)
        left_out = []
        for title, names, rows in _tables(using, found):
            lines = table_lines(names, rows, width=page.width)
            if rows and len(lines) + 2 <= page.left - 4:
                page.section([self._heading(title)], [lines], "table")
            elif rows:
                left_out.append(f"{title} ({len(rows):,})")
        if left_out:
            page.write(["", *page.lines(f"With --all: {', '.join(left_out)}.", most=3)])

    def _head(self, page: Page, using: str, found: Status) -> None:
        """Write the state of the queue, with its worst problem."""
        queue, summary = found.queue, found.summary
        ago = duration((queue.now - queue.sequenced_at) / 1000)
        sequencer = f"last active {ago} ago" if queue.sequenced_at else "never active"
        page.write(page.lines(f"Queue in database {using!r}: last offset {queue.last_offset}, sequencer {sequencer}."))
        if queue.outbox.waiting_since is not None:
            oldest = duration((queue.now - queue.outbox.waiting_since) / 1000)
            waiting = counted(queue.outbox.waiting.value, "message")
            page.write(page.lines(f"{waiting} in the outbox, the oldest for {oldest} (not counted in any backlog)."))
        if queue.debounced:
            replaced = counted(queue.debounced, "debounced message")
            page.write(page.lines(f"{replaced} replaced by later ones before entering the log."))
        styles = {"ok": self.style.SUCCESS, "degraded": self.style.WARNING, "stopped": self.style.ERROR}
        page.write(page.lines(f"{summary.name}: {summary.headline()}", most=3, style=styles[summary.state]))
        if summary.state != "ok" and summary.cause is not None:
            advice = page.lines(f"Next step: {summary.advice}")
            page.write(self._details(page, summary.cause, queue.now, advice))

    def _heading(self, title: str) -> str:
        return str(self.style.MIGRATE_HEADING(title))

    def _page(self) -> Page:
        """Return a page for everything, or for what fits on a screen with the sections of other databases."""
        if self._is_whole:
            return Page(self.stdout)
        lines = shutil.get_terminal_size().lines - 1 if self.stdout.isatty() else LONGEST
        each = max(SHORTEST, min(lines, LONGEST)) // self._parts
        return Page(self.stdout, WIDTH, each - 2 if self._parts > 1 else each)

    def _cause(self, page: Page, cause: Cause, now: int) -> list[str]:
        style = self.style.ERROR if cause.severity == 0 else self.style.WARNING
        text, advice = page.lines(cause.headline(), indent=2, style=style), page.lines(cause.advice, indent=4)
        return text + self._details(page, cause, now, advice)

    def _details(self, page: Page, cause: Cause, now: int, advice: list[str]) -> list[str]:
        """Return the lines below the text of a cause."""
        lines = [line for text in details(cause, now) for line in page.lines(text, indent=4, most=1)] + advice
        if not cause.symptoms:
            return lines
        number = counted(len(cause.symptoms), "symptom")
        symptoms = [f"- {one.text}" for one in cause.symptoms] if self._is_whole else [f"{number}: --all"]
        return lines + [line for text in symptoms for line in page.lines(text, indent=4)]


def _tables(using: str, status: Status) -> Iterator[tuple[str, Sequence[str], Sequence[Sequence[object]]]]:
    """Yield the titles, columns and rows of the tables below the groups."""
    queue = status.queue
    yield (
        "Topics",
        ("topic", "in log", "partitions", "outbox", "scheduled"),
        [(one.topic, one.in_log, one.partitions, one.waiting, one.scheduled) for one in status.topics],
    )
    yield (
        "Moves",
        ("topic", "from", "to", "state"),
        [
            (
                topic,
                route.source,
                route.planned or route.target or using,
                "prepared" if route.planned else "messages go there",
            )
            for topic, route in sorted(queue.routes.items())
        ],
    )
    yield (
        "Paused groups",
        ("group", "topic", "by", "since", "reason"),
        [
            (*ref, one.actor or "-", moment(one.started_at), one.reason or "-")
            for ref, one in sorted(status.pauses.items())
        ],
    )
    yield (
        "Backlog by priority",
        ("group", "topic", "priority", "backlog"),
        [
            (*group.ref, priority, str(count))
            for group in queue.groups
            if any(group.lag_by_priority)
            for priority, count in group.lag_by_priority.items()
        ],
    )
    yield (
        "Filters",
        ("group", "topic", "filter"),
        [(*group.ref, _filter_text(group.filter)) for group in queue.groups if group.filter is not None],
    )
    yield (
        "Settled without a call in the last hour",
        ("group", "topic", *rollups.PASSED),
        [
            (*group.ref, *(found[reason] for reason in rollups.PASSED))
            for group in queue.groups
            if any((found := status.passed[group.ref]).values())
        ],
    )
    yield (
        "Overridden options",
        ("group", "topic", "option", "value", "since", "by"),
        [(*group.ref, one.name, one.text, moment(one.at), one.by) for group in queue.groups for one in group.overrides],
    )
    yield (
        "Jobs that wait for their next attempt",
        ("topic", "task", "id", "waits until", "reason"),
        [(one.topic, one.task, one.id, moment(one.retry_at), one.retry_reason or "-") for one in status.waiting_jobs],
    )
    yield (
        "Tasks",
        (
            "task",
            "waiting",
            "running",
            "scheduled",
            "in 1 h",
            "failed",
            "waited p50, p95",
            "ran p50, p95",
            "last error",
        ),
        [
            (
                one.task,
                str(one.backlog.waiting),
                str(one.backlog.running),
                str(one.backlog.scheduled),
                str(one.hour.enqueued),
                str(one.hour.failed),
                _took(one.hour.waited),
                _took(one.hour.ran),
                one.error or "-",
            )
            for one in status.tasks.tasks
        ],
    )
    yield (
        "Errors",
        ("group", "topic", "error", "retrying", "dead letters", "in 24 h", "first", "last"),
        [
            (
                *one.ref,
                one.text,
                str(one.retrying),
                str(one.dead_letters),
                str(one.attempts),
                f"{duration((queue.now - one.first_at) / 1000)} ago",
                f"{duration((queue.now - one.last_at) / 1000)} ago",
            )
            for one in status.errors.kinds
        ],
    )
    yield (
        "Leases",
        ("group", "topic", "owner", "partitions"),
        [
            (*ref, owner or "(no owner)", count)
            for ref, shares in sorted(status.leases.items())
            for owner, count in sorted(shares.items())
        ],
    )
    yield (
        "Bell",
        ("host", "subscribers", "last rung", "error"),
        [
            (
                bell.host,
                bell.subscribers,
                "never" if bell.rung_at is None else f"{duration((queue.now - bell.rung_at) / 1000)} ago",
                bell.error or "-",
            )
            for bell in queue.bells
        ],
    )


def _took(spread: Spread | None) -> str:
    return "-" if spread is None else f"{duration(spread.p50)}, {duration(spread.p95)}"


def _task(one: TaskSummary) -> dict[str, Any]:
    return {
        "task": one.task,
        "waiting": one.backlog.waiting.value,
        "scheduled": one.backlog.scheduled.value,
        "running": one.backlog.running.value,
        "hour": _task_period(one.hour),
        "day": _task_period(one.day),
        "failed_at": one.failed_at or None,
        "error": one.error,
    }


def _task_period(one: TaskPeriod) -> dict[str, Any]:
    return {
        "enqueued": one.enqueued.value,
        "failed": one.failed.value,
        "waited": None if one.waited is None else one.waited._asdict(),
        "ran": None if one.ran is None else one.ran._asdict(),
    }


def read_status(using: str, bounds: Bounds = EXACT, *, key: str | None = None) -> Status:
    """Return the state of the queue.

    ``bounds``: limits of the counts; by default they are exact. ``key``: only errors of messages with this key.
    """
    session = Session(using)
    queue = get_overview(using=using, bounds=bounds)
    leases: dict[GroupRef, dict[str, int]] = {}
    for (owner, ref), count in partitions.shares(session).items():
        leases.setdefault(ref, {})[owner] = count
    passed: defaultdict[GroupRef, Counter[str]] = defaultdict(Counter)
    for bucket in rollups.since(session, rollups.MINUTE, queue.now - rollups.HOUR * 1000):
        passed[bucket.ref] += bucket.passed
    pauses = operations_log.pauses_of(session, {one.ref: one.registered_at for one in queue.groups if one.paused})
    state = state_of(queue, find_problems(queue))
    topics, errors = read_topics(session, queue.now), list_errors(key=key, using=using)
    has_jobs = any(is_of_jobs(one.ref) for one in queue.groups)
    waiting = jobs.waiting(session, limit=WAITING_JOBS) if has_jobs else []
    tasks = summarize_tasks(using=using, bounds=bounds)
    return Status(
        queue,
        watching.sorted_rows(queue, state.problems),
        topics,
        leases,
        passed,
        pauses,
        waiting,
        errors,
        tasks,
        state.problems,
        state.causes,
        state.status,
    )


def _filter_text(policy: FilterPolicy | str) -> str:
    return f"(cannot be parsed) {policy}" if isinstance(policy, str) else str(policy)


def _group(group: GroupOverview, status: Status) -> dict[str, Any]:
    now, passed, pause = status.queue.now, status.passed[group.ref], status.pauses.get(group.ref)
    return {
        "group": group.ref.group,
        "topic": group.ref.topic,
        "mode": group.mode,
        "paused": group.paused,
        "pause": None if pause is None else {"by": pause.actor, "at": pause.started_at, "reason": pause.reason},
        "lag": group.lag.value,
        "lag_by_priority": {str(priority): count.value for priority, count in group.lag_by_priority.items()},
        "oldest_unacked_age": None if group.oldest_at is None else max(0.0, (now - group.oldest_at) / 1000),
        "in_flight": group.in_flight.value,
        "retrying": group.retrying.value,
        "dead_letters": group.dead_letters.value,
        "subscribers": [one.name for one in group.live],
        "subsets": {one.name: str(one.subset) for one in group.live if one.subset != EVERYTHING},
        "partitions_owned": status.leases.get(group.ref, {}),
        "limits": {
            name: storable(getattr(group.limits, name))
            for name in LIMIT_OPTIONS
            if getattr(group.limits, name) is not None
        },
        "filter": group.filter.as_json() if isinstance(group.filter, FilterPolicy) else group.filter,
        "passed": {reason: passed[reason] for reason in rollups.PASSED},
        "overrides": {one.name: {"value": one.value, "at": one.at, "by": one.by} for one in group.overrides},
    }

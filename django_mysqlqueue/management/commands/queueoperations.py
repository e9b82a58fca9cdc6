"""``manage.py queueoperations``: list the operations of the audit log."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from django.core.management.base import CommandError, CommandParser

from django_mysqlqueue.inspection import operations_log
from django_mysqlqueue.inspection.operations_log import STATES, OperationEntry, OperationFilter, with_dlq
from django_mysqlqueue.management.base import ReadingCommand, add_format
from django_mysqlqueue.management.tables import write_table
from django_mysqlqueue.operations import ACTIONS
from django_mysqlqueue.sql.session import Session
from django_mysqlqueue.text.humanize import moment, shortened

MOST = 100_000
"""Maximum number of operations in the list."""


@dataclass(frozen=True, slots=True)
class Listing:
    """The operations that the command shows, newest first."""

    entries: list[OperationEntry]
    now: int


class Command(ReadingCommand):
    """List the operations of the audit log."""

    help = (
        "List the operations of the audit log, newest first: who changed what, when and why, and whether it finished."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        parser.add_argument("--topic", help="only operations on this topic and its DLQ topic")
        parser.add_argument("--group", help="only operations on this consumer group")
        parser.add_argument(
            "--action",
            choices=sorted(ACTIONS),
            metavar="ACTION",
            help=f"only operations with this name in the audit log ({', '.join(sorted(ACTIONS))})",
        )
        parser.add_argument("--by", metavar="USER", help="only operations of this user, as the list shows the name")
        state = parser.add_mutually_exclusive_group()
        state.add_argument(
            "--running", action="store_const", const="running", dest="state", help="only operations that are running"
        )
        state.add_argument(
            "--interrupted",
            action="store_const",
            const="interrupted",
            dest="state",
            help="only operations that did not finish and have made no progress for a minute",
        )
        parser.add_argument(
            "--limit", type=int, default=50, metavar="N", help="maximum number of operations to list (default: 50)"
        )
        add_format(parser)

    def handle(self, *args: Any, **options: Any) -> None:
        if not 1 <= options["limit"] <= MOST:
            raise CommandError(f"--limit {options['limit']}: must be at least 1 and at most {MOST:,}.")
        super().handle(*args, **options)

    def read(self, using: str, options: dict[str, Any]) -> Listing:
        session = Session(using)
        topic, action = options["topic"], options["action"]
        wanted = OperationFilter(
            group=options["group"],
            topics=None if topic is None else with_dlq([topic]),
            actor=options["by"],
            actions=None if action is None else [action],
            state=options["state"],
        )
        entries: list[OperationEntry] = []
        before: int | None = None
        while len(entries) < options["limit"]:
            found = operations_log.look(session, wanted, before=before, limit=options["limit"] - len(entries))
            entries += found.entries
            before = found.before
            if before is None:
                break
        return Listing(entries, session.now())

    def show(self, using: str, found: Listing) -> None:
        if not found.entries:
            self.stdout.write("No operations were found.")
            return
        write_table(
            self.stdout,
            ("started at", "operation", "state", "group", "topic", "by", "reason", "changed", "duration", "arguments"),
            [_row(one, found.now) for one in found.entries],
        )

    def as_json(self, using: str, found: Listing) -> dict[str, Any]:
        return {"database": using, "now": found.now, "operations": [_as_json(one) for one in found.entries]}


def _row(one: OperationEntry, now: int) -> tuple[str, ...]:
    cells = (
        moment(one.started_at),
        one.label,
        str(STATES[one.state]),
        one.group,
        one.topic,
        one.actor,
        shortened(one.reason),
        one.changed_text,
        one.duration_text(now),
        shortened(one.detail_text),
    )
    return tuple(cell or "-" for cell in cells)


def _as_json(one: OperationEntry) -> dict[str, Any]:
    return {
        "id": one.id,
        "action": one.action,
        "state": "finished" if one.state == "ended" else one.state,
        "group": one.group,
        "topic": one.topic,
        "by": one.actor,
        "reason": one.reason,
        "arguments": one.detail_text,
        "changed": one.changed,
        "total": one.total,
        "started_at": one.started_at,
        "progress_at": one.progress_at,
        "ended_at": one.ended_at,
    }

"""``manage.py queueretry``: deliveries that wait out a backoff become due."""

from __future__ import annotations

from typing import Any

from django.core.management.base import CommandParser

from django_mysqlqueue.management.operations import (
    COUNTED,
    OperationCommand,
    Plan,
    Progress,
    add_group,
    check_known,
    counted,
    group_of,
    who,
)
from django_mysqlqueue.operations import retrying


class Command(OperationCommand):
    help = "Makes deliveries due that wait out a backoff: all of a group, or those at some offsets."

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        add_group(parser)
        parser.add_argument("--offset", type=int, action="append", help="only this message (may be given again)")
        parser.add_argument("--reset-attempts", action="store_true", help="their attempts count from one again")

    def plan(self, using: str, options: dict[str, Any]) -> Plan:
        group = group_of(using, options)
        rows = None
        if options["offset"]:
            rows = retrying.at(using, group.ref, options["offset"])
            text = f"These messages do not wait for another attempt in the group {group.ref}: {{}}."
            check_known(text, options["offset"], {offset for _, offset in rows})
        total = retrying.waiting(using, group.ref, most=COUNTED) if rows is None else len(rows)
        summary = [f"{counted(total, 'message')} that wait for another attempt in the group {group.ref} will come due."]
        if options["reset_attempts"]:
            summary.append("Their attempts count from one again.")

        def retry(progress: Progress) -> int:
            return retrying.retry_now(
                using, group.ref, by=who(), rows=rows, reset_attempts=options["reset_attempts"], progress=progress
            )

        nothing = f"no message waits for another attempt in the group {group.ref}."
        return Plan("retry", summary, total, retry, nothing=nothing)

    def done(self, plan: Plan, changed: int) -> str:
        return f"{changed} came due."

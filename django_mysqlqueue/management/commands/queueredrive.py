"""``manage.py queueredrive``: dead letters go back to the groups that failed them."""

from __future__ import annotations

from typing import Any

from django.core.management.base import CommandParser

from django_mysqlqueue.management.operations import (
    COUNTED,
    OperationCommand,
    Plan,
    Progress,
    counted,
    dlq_of,
    moment,
    who,
)
from django_mysqlqueue.service import redriving
from django_mysqlqueue.service.redriving import Letters


class LettersCommand(OperationCommand):
    """Takes a selection of dead letters."""

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        parser.add_argument("topic", help="the topic, or its DLQ topic")
        parser.add_argument("--group", help="only those that this group failed")
        parser.add_argument("--offset", type=int, action="append", help="only this one of the DLQ (may be repeated)")
        parser.add_argument("--error", metavar="TEXT", help="only those whose error has this text in it")
        parser.add_argument("--since", metavar="WHEN", help="only those that failed then (ISO 8601) or later")
        parser.add_argument("--until", metavar="WHEN", help="only those that failed then or earlier")
        parser.add_argument("--limit", type=int, metavar="N", help="at most so many")

    def letters(self, options: dict[str, Any]) -> Letters:
        return Letters(
            dlq_of(options["topic"]),
            offsets=tuple(options["offset"]) if options["offset"] else None,
            group=options["group"],
            error=options["error"],
            since=None if options["since"] is None else moment(options["since"]),
            until=None if options["until"] is None else moment(options["until"]),
        )

    def total(self, using: str, letters: Letters, options: dict[str, Any]) -> int:
        found = redriving.count(using, letters, most=COUNTED)
        return found if options["limit"] is None else min(found, options["limit"])


class Command(LettersCommand):
    help = "Sends dead letters back to the consumer group that failed them, and to that one alone."

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        parser.add_argument("--rate", type=float, metavar="N", help="at most so many a second")

    def plan(self, using: str, options: dict[str, Any]) -> Plan:
        letters = self.letters(options)
        total = self.total(using, letters, options)
        summary = [f"{counted(total, 'dead letter')} of {letters.topic} will go back to the group that failed each."]

        def redrive(progress: Progress) -> int:
            return redriving.redrive(
                using, letters, by=who(), rate=options["rate"], limit=options["limit"], progress=progress
            )

        return Plan("redrive", summary, total, redrive)

    def done(self, plan: Plan, changed: int) -> str:
        return f"{changed} sent back."

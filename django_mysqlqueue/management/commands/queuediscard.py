"""``manage.py queuediscard``: dead letters are thrown away, with a reason on record."""

from __future__ import annotations

from typing import Any

from django.core.management.base import CommandError, CommandParser

from django_mysqlqueue.management.commands.queueredrive import LettersCommand
from django_mysqlqueue.management.operations import Plan, Progress, counted, who
from django_mysqlqueue.operations import redriving


class Command(LettersCommand):
    help = "Deletes dead letters for good. The record keeps who did it, when and why."

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        parser.add_argument("--reason", help="for the record; required, except with --dry-run")

    def plan(self, using: str, options: dict[str, Any]) -> Plan:
        letters = self.letters(using, options)
        if not options["dry_run"] and not (options["reason"] or "").strip():
            raise CommandError("--reason is required: the record keeps why the messages were thrown away.")
        total = self.total(using, letters, options)
        summary = [f"{counted(total, 'dead letter')} of {letters.topic} will be deleted for good."]

        def discard(progress: Progress) -> int:
            return redriving.discard(
                using, letters, by=who(), reason=options["reason"], limit=options["limit"], progress=progress
            )

        return Plan("discard", summary, total, discard, nothing=self.nothing(letters))

    def done(self, plan: Plan, changed: int) -> str:
        return f"{changed} discarded."

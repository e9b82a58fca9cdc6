"""What the operators' commands share: preview, confirmation, progress, result."""

from __future__ import annotations

import dataclasses
import datetime
import getpass
import json
import os
import socket
import sys
from collections.abc import Collection
from typing import Any, ClassVar

from django.core.management.base import CommandError, CommandParser
from django.utils.dateparse import parse_datetime
from django.utils.timezone import is_naive, make_aware
from tqdm import tqdm

from django_mysqlqueue.exceptions import InvalidMessage, OperationRefused
from django_mysqlqueue.management.base import QueueCommand
from django_mysqlqueue.operations.lookups import check_topic
from django_mysqlqueue.operations.results import Result

COMMON = frozenset(field.name for field in dataclasses.fields(Result))


class OperationCommand(QueueCommand):
    """Shows what would change, asks, and does it: a thin caller of ``django_mysqlqueue.operations``."""

    reports_progress: ClassVar[bool] = False
    """The operation takes ``progress``."""
    question: ClassVar[str] = "Go ahead? [y/N] "

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        parser.add_argument("--dry-run", action="store_true", help="show what would change, then exit")
        parser.add_argument("--format", choices=("text", "json"), default="text")
        parser.add_argument(
            "--noinput", "--no-input", action="store_false", dest="interactive", help="do not ask for confirmation"
        )
        parser.add_argument("--reason", default="", metavar="TEXT", help="reason, for the audit log")

    def operate(self, options: dict[str, Any], **how: Any) -> Result:
        """Calls the operation.

        Args:
            how: ``using``, ``actor``, ``reason``, ``dry_run`` and, with ``reports_progress``, ``progress``.
        """
        raise NotImplementedError

    def run_on(self, using: str, options: dict[str, Any]) -> None:
        how = {"using": using, "actor": who(), "reason": options["reason"]}
        try:
            preview = self.operate(options, dry_run=True, **how)
            if options["dry_run"] or not preview.planned:
                self._finish(using, options, preview)
                return
            if options["format"] == "text":
                self._say(preview)
            if options["interactive"]:
                self._confirm(options)
            with _bar(preview, quiet=options["format"] == "json" or options["verbosity"] == 0) as bar:
                if self.reports_progress:
                    how["progress"] = bar.update
                result = self.operate(options, dry_run=False, **how)
        except (OperationRefused, InvalidMessage) as error:
            raise CommandError(str(error)) from error
        # Only the preview counts: what it has found stands beside what was changed.
        fields = {name: value for name, value in dataclasses.asdict(result).items() if value is not None}
        self._finish(using, options, dataclasses.replace(preview, **{**fields, "planned": preview.planned}))

    def _finish(self, using: str, options: dict[str, Any], result: Result) -> None:
        dry_run = options["dry_run"]
        if options["format"] == "json":
            facts = {"operation": result.operation, "dry_run": dry_run, "planned": result.planned}
            details = {name: value for name, value in dataclasses.asdict(result).items() if name not in COMMON}
            self.stdout.write(json.dumps({"database": using, **facts, "changed": result.changed, **details}))
        elif dry_run:
            self._say(result)
            self.stdout.write("Nothing was changed (--dry-run).")
        elif result.changed:
            self._say(result)
        if not (dry_run or result.changed):
            raise CommandError(f"Nothing was changed. {' '.join(result.summary)}")

    def _say(self, result: Result) -> None:
        for line in result.summary:
            self.stdout.write(line)
        for line in result.warnings:
            self.stdout.write(self.style.WARNING(line))

    def _confirm(self, options: dict[str, Any]) -> None:
        """Returns if the person agrees.

        Raises:
            CommandError: no, or nobody is there.
        """
        if options["format"] == "json":
            raise CommandError("--format json cannot ask for confirmation: pass --noinput or --dry-run.")
        try:
            answer = input(self.question)
        except EOFError:
            raise CommandError("There is no terminal to ask for confirmation: pass --noinput.") from None
        if not self.agrees(answer, options):
            raise CommandError("Nothing was changed.")

    def agrees(self, answer: str, options: dict[str, Any]) -> bool:
        """Whether an answer to the question is a yes."""
        return answer.strip().lower() in ("y", "yes")


def _bar(preview: Result, *, quiet: bool) -> tqdm[Any]:
    """A bar on a terminal; nothing where the output is read by a program."""
    hidden = quiet or not sys.stderr.isatty()
    return tqdm(desc=preview.operation, total=preview.planned, unit=" ", disable=hidden, leave=False)


def who() -> str:
    """Who runs the command, for the audit log: ``user@host``."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container's user may have no name
        user = f"uid {os.getuid()}"
    return f"{user}@{socket.gethostname()}"


def add_group(parser: CommandParser) -> None:
    """The first two arguments of every command on a group."""
    parser.add_argument("group", help="consumer group")
    parser.add_argument("topic", help="topic that the group reads")


def check_topics(using: str, topics: Collection[str]) -> None:
    """Topics that arguments name.

    Raises:
        CommandError: there is no such topic; the text names those that there are.
    """
    try:
        for topic in topics:
            check_topic(using, topic)
    except OperationRefused as error:
        raise CommandError(str(error)) from error


def moment(text: str | None) -> datetime.datetime | None:
    """A date and time in ISO 8601; without a UTC offset it is in the project's time zone. None stays None.

    Raises:
        CommandError: it is not one.
    """
    if text is None:
        return None
    try:
        value = parse_datetime(text)
    except ValueError:
        value = None
    if value is None:
        raise CommandError(
            f"{text!r} is not a valid date and time: write 2026-11-21T03:00 or 2026-11-21T03:00:00+01:00."
        )
    return make_aware(value) if is_naive(value) else value

"""The base class of the operators' commands: preview, confirmation, progress, result."""

from __future__ import annotations

import dataclasses
import datetime
import getpass
import os
import socket
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, ClassVar

from django.core.management.base import CommandError, CommandParser
from django.utils.dateparse import parse_datetime
from django.utils.timezone import is_naive, make_aware

from django_mysqlqueue.exceptions import InvalidMessage, OperationRefused
from django_mysqlqueue.management.base import QueueCommand, ReadingCommand, add_format, progress_bar
from django_mysqlqueue.names.rules import KEY_LENGTH
from django_mysqlqueue.operations.limits import COUNTED
from django_mysqlqueue.operations.lookups import check_topic
from django_mysqlqueue.operations.recurring import import_tasks
from django_mysqlqueue.operations.results import Result
from django_mysqlqueue.options import job_queues
from django_mysqlqueue.schedules import registry
from django_mysqlqueue.text.escaping import visible
from django_mysqlqueue.text.humanize import close_names, did_you_mean, shortened


class Argument:
    """An argument of a command, and of its operation.

    Args:
        names: as for ``add_argument``.
        to: the operation's argument (default: as the first name); None if only the command reads it.
        parse: turns the value of the command line into that of the operation.
        options: as for ``add_argument``.
    """

    def __init__(
        self, *names: str, to: str | None = "", parse: Callable[[Any], Any] = lambda value: value, **options: Any
    ) -> None:
        self.names, self.parse, self.options = names, parse, options
        self.name = names[0].lstrip("-").replace("-", "_")
        self.to = self.name if to == "" else to


class OperationCommand(QueueCommand):
    """Preview an operation of ``django_mysqlqueue.operations``, ask for confirmation, and run it."""

    operation: ClassVar[Callable[..., Result]]
    arguments: ClassVar[Sequence[Argument]] = ()
    """The arguments of the command, apart from those of every operation."""
    reports_progress: ClassVar[bool] = False
    """True if the operation accepts ``progress``."""
    counts_planned: ClassVar[bool] = True
    """True if it counts what ``planned`` counts, so that the progress bar has an end."""
    question: ClassVar[str] = "Continue? [y/N] "

    def add_arguments(self, parser: CommandParser) -> None:
        """Add the options of every operation."""
        super().add_arguments(parser)
        parser.add_argument("--dry-run", action="store_true", help="show what would change, then exit")
        add_format(parser)
        parser.add_argument(
            "--noinput", "--no-input", action="store_false", dest="interactive", help="do not ask for confirmation"
        )
        parser.add_argument("--reason", default="", metavar="TEXT", help="reason to record in the audit log")
        for one in self.arguments:
            parser.add_argument(*one.names, **one.options)

    def operate(self, options: dict[str, Any], **how: Any) -> Result:
        """Call the operation and return its result.

        ``how``: ``using``, ``actor``, ``reason``, ``dry_run`` and, with ``reports_progress``, ``progress``.
        """
        given = {one.to: one.parse(options[one.name]) for one in self.arguments if one.to is not None}
        return self.operation(**given, **how)

    def run_on(self, using: str, options: dict[str, Any]) -> None:
        """Preview the operation, ask for confirmation, run it, and print the result."""
        how = {"using": using, "actor": who(), "reason": options["reason"]}
        try:
            preview = self.operate(options, dry_run=True, **how)
            if options["dry_run"] or not preview.planned:
                self._finish(using, options, preview)
                return
            if options["format"] == "text":
                self.write_text(preview)
            if options["interactive"]:
                self._confirm(options)
            has_end = self.counts_planned and preview.planned < COUNTED
            total = preview.planned if has_end else None
            with progress_bar(preview.operation, total, options) as bar:
                if self.reports_progress:
                    how["progress"] = bar.update
                result = self.operate(options, dry_run=False, **how)
        except (OperationRefused, InvalidMessage) as error:
            raise CommandError(str(error)) from error
        # Only the preview counts the messages to change; show that number beside the number changed.
        fields = {name: value for name, value in dataclasses.asdict(result).items() if value is not None}
        self._finish(using, options, dataclasses.replace(preview, **{**fields, "planned": preview.planned}))

    def _finish(self, using: str, options: dict[str, Any], result: Result) -> None:
        dry_run = options["dry_run"]
        if options["format"] == "json":
            self.write_result(using, dataclasses.replace(result, dry_run=dry_run))
        elif dry_run:
            self.write_text(result)
            self.stdout.write("Nothing was changed (--dry-run).")
        elif result.changed:
            self.write_text(result)
        if not (dry_run or result.changed):
            raise CommandError(" ".join(("Nothing was changed.", *result.summary, *task_meant(options.get("task")))))

    def write_result(self, using: str, result: Result) -> None:
        """Write a result as a JSON object."""
        self.write_json({"database": using, **dataclasses.asdict(result)})

    def write_text(self, result: Result) -> None:
        """Write the sentences of a result."""
        for line in result.summary:
            self.stdout.write(visible(line))
        for line in result.warnings:
            self.stdout.write(self.style.WARNING(visible(line)))

    def _confirm(self, options: dict[str, Any]) -> None:
        """Ask for confirmation."""
        if options["format"] == "json":
            raise CommandError("--format json cannot ask for confirmation: pass --noinput or --dry-run.")
        try:
            answer = input(self.question)
        except EOFError:
            raise CommandError("There is no terminal to ask for confirmation: pass --noinput.") from None
        if not self.agrees(answer, options):
            raise CommandError("Nothing was changed.")

    def agrees(self, answer: str, options: dict[str, Any]) -> bool:
        """Return True if the answer to the question is a yes."""
        return answer.strip().lower() in ("y", "yes")


def task_meant(path: str | None) -> tuple[str, ...]:
    """Return the sentence about a task that this project does not have, with similar ones; nothing if it has it."""
    if path is None:
        return ()
    import_tasks()
    known = {*job_queues.declared, *(registry.known_tasks() if registry.known_tasks is not None else ())}
    if path in known:
        return ()
    text = f"No task of this project has the path {path!r}."
    return (f"{text} {did_you_mean(close_names(path, known))}".rstrip(),)


def who() -> str:
    """Return the user who runs the command, for the audit log: ``user@host``."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # in a container, the user may not have a name
        user = f"uid {os.getuid()}"
    return shortened(f"{user}@{socket.gethostname()}", most=KEY_LENGTH)


def check_topics(using: str, topics: Collection[str]) -> None:
    """Require that topics exist."""
    try:
        for topic in topics:
            check_topic(using, topic)
    except OperationRefused as error:
        raise CommandError(str(error)) from error


def moment(text: str | None) -> datetime.datetime | None:
    """Parse a date and time in ISO 8601; without a UTC offset it is in the project's time zone."""
    if text is None:
        return None
    try:
        value = parse_datetime(text)
    except ValueError:
        value = None
    if value is None:
        raise CommandError(f"{text!r} is not a valid date and time: use 2026-11-21T03:00 or 2026-11-21T03:00:00+01:00.")
    return make_aware(value) if is_naive(value) else value


GROUP = (Argument("group", help="consumer group"), Argument("topic", help="topic that the group reads"))
"""The first two arguments of every command on a group."""
IN_TIME_ZONE = "(ISO 8601; in TIME_ZONE if it has no UTC offset)"


class ListCommand(OperationCommand, ReadingCommand):
    """List something or, if the options ask for it, change some of it."""

    def is_change(self, options: Mapping[str, Any]) -> bool:
        """Return whether the options ask for a change."""
        raise NotImplementedError

    def run_on(self, using: str, options: dict[str, Any]) -> None:
        """Run the operation, or list."""
        if self.is_change(options):
            super().run_on(using, options)
        else:
            ReadingCommand.run_on(self, using, options)


class ChangesCommand(ListCommand):
    """List something or, with one of the options in ``changes``, change some of it."""

    changes: ClassVar[Mapping[str, Callable[..., Result]]]
    """The operations, by option."""

    @classmethod
    def change(cls, options: Mapping[str, Any]) -> str:
        """Return the given option of those in ``changes``; an empty string if there is none."""
        return next((name for name in cls.changes if options.get(name) is not None), "")

    def is_change(self, options: Mapping[str, Any]) -> bool:
        if self.change(options):
            return True
        if options["dry_run"] or options["reason"]:
            *first, last = (f"--{name.replace('_', '-')}" for name in self.changes)
            raise CommandError(f"--dry-run and --reason require {', '.join(first)} or {last}.")
        return False

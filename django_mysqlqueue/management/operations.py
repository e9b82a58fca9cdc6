"""What the operators' commands share: what is to happen is said first, asked for, done, and counted."""

from __future__ import annotations

import getpass
import json
import os
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from django.core.management.base import CommandError, CommandParser
from django.utils.dateparse import parse_datetime
from django.utils.timezone import is_naive, make_aware
from tqdm import tqdm

from django_mysqlqueue import names
from django_mysqlqueue.exceptions import InvalidMessage, OperationRefused
from django_mysqlqueue.management.base import QueueCommand
from django_mysqlqueue.models import ConsumerGroup
from django_mysqlqueue.service import groups
from django_mysqlqueue.service.groups import GroupRef

COUNTED = 10_000
"""What is counted before it is done is counted up to here."""
Progress = Callable[[int], object]


@dataclass(frozen=True, slots=True)
class Plan:
    """What a command is about to do."""

    action: str
    """Its name in the output and the record."""
    summary: list[str]
    """Lines for the person who is asked."""
    total: int
    """How many it will change, as far as is known."""
    act: Callable[[Progress], int]
    """Does it; tells the progress function how many each step has changed, and returns how many all have."""
    facts: dict[str, Any] = field(default_factory=dict)
    """What else the JSON output says."""
    warnings: list[str] = field(default_factory=list)


class OperationCommand(QueueCommand):
    """Says what would happen; does it when told to."""

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        parser.add_argument("--dry-run", action="store_true", help="say what would happen, and do nothing")
        parser.add_argument("--format", choices=("text", "json"), default="text")
        parser.add_argument("--noinput", "--no-input", action="store_false", dest="interactive", help="do not ask")

    def plan(self, using: str, options: dict[str, Any]) -> Plan:
        raise NotImplementedError

    def run_on(self, using: str, options: dict[str, Any]) -> None:
        as_json = options["format"] == "json"
        try:
            plan = self.plan(using, options)
            if not as_json:
                for line in plan.summary:
                    self.stdout.write(line)
                for line in plan.warnings:
                    self.stdout.write(self.style.WARNING(line))
            changed = 0
            if not options["dry_run"]:
                if options["interactive"] and plan.total:
                    if as_json:
                        raise CommandError("--format json cannot ask: pass --noinput to do it, or --dry-run.")
                    self.ask(plan, options)
                with _bar(plan, quiet=as_json or options["verbosity"] == 0) as bar:
                    changed = plan.act(bar.update)
        except (OperationRefused, InvalidMessage) as error:
            raise CommandError(str(error)) from error
        if as_json:
            self.stdout.write(
                json.dumps(
                    {
                        "database": using,
                        "operation": plan.action,
                        "dry_run": options["dry_run"],
                        "planned": plan.total,
                        "changed": changed,
                        **plan.facts,
                    }
                )
            )
        elif options["dry_run"]:
            self.stdout.write("Nothing was changed (--dry-run).")
        else:
            self.stdout.write(f"Done: {self.done(plan, changed)}")

    def done(self, plan: Plan, changed: int) -> str:
        """What is said at the end."""
        return f"{changed} changed."

    def ask(self, plan: Plan, options: dict[str, Any]) -> None:
        """Goes on only if the person says so.

        Raises:
            CommandError: no, or nobody is there.
        """
        try:
            answer = input("Go ahead? [y/N] ")
        except EOFError:
            raise CommandError("Nobody is there to ask: pass --noinput to do it.") from None
        if answer.strip().lower() not in ("y", "yes"):
            raise CommandError("Nothing was changed.")


def _bar(plan: Plan, *, quiet: bool) -> tqdm[Any]:
    """A bar on a terminal; nothing where the output is read by a program."""
    return tqdm(
        desc=plan.action, total=plan.total or None, unit=" ", disable=quiet or not sys.stderr.isatty(), leave=False
    )


def who() -> str:
    """Who runs the command, for the record: ``user@host``."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container's user may have no name
        user = f"uid {os.getuid()}"
    return f"{user}@{socket.gethostname()}"


def counted(number: int, what: str) -> str:
    """``1 message``, ``2 messages``, ``10,000 or more messages``."""
    if number >= COUNTED:
        return f"{number:,} or more {what}s"
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def add_group(parser: CommandParser) -> None:
    parser.add_argument("group")
    parser.add_argument("topic")


def group_of(using: str, options: dict[str, Any]) -> groups.Registered:
    """The group that the arguments name.

    Raises:
        CommandError: it is not registered; the text names those that are.
    """
    ref = GroupRef(options["group"], options["topic"])
    registered = groups.find(using, ref)
    if registered is None:
        known = ", ".join(
            f"{group} of {topic}"
            for group, topic in ConsumerGroup.objects.using(using)
            .order_by("topic", "consumer_group")
            .values_list("consumer_group", "topic")
        )
        raise CommandError(f"There is no group {ref.group!r} of {ref.topic!r}. Registered: {known or 'none'}.")
    return registered


def dlq_of(topic: str) -> str:
    """The DLQ topic of a topic; one that is a DLQ topic stands for itself."""
    return topic if names.is_dlq(topic) else names.dlq_topic(topic)


def moment(text: str) -> int:
    """Epoch milliseconds of a date and time in ISO 8601; without an offset it is in the project's time zone.

    Raises:
        CommandError: it is none.
    """
    try:
        value = parse_datetime(text)
    except ValueError:
        value = None
    if value is None:
        raise CommandError(f"{text!r} is no date and time: write 2026-11-21T03:00 or 2026-11-21T03:00:00+01:00.")
    return int((make_aware(value) if is_naive(value) else value).timestamp() * 1000)

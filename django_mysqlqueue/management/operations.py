"""What the operators' commands share: what is to happen is said first, asked for, done, and counted."""

from __future__ import annotations

import difflib
import getpass
import json
import os
import socket
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from django.core.management.base import CommandError, CommandParser
from django.utils.dateparse import parse_datetime
from django.utils.timezone import is_naive, make_aware
from tqdm import tqdm

from django_mysqlqueue import naming
from django_mysqlqueue.exceptions import InvalidMessage, OperationRefused
from django_mysqlqueue.management.base import QueueCommand
from django_mysqlqueue.service import groups, log
from django_mysqlqueue.service.refs import GroupRef
from django_mysqlqueue.sql.session import Session

COUNTED = 10_000
"""What is counted before it is done is counted up to here."""
LISTED = 20
"""An error about a name lists so many of those that there are."""
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
    nothing: str | None = "there is nothing left to change."
    """Why, where it changes nothing: the command then exits with 1. None: what ``act`` returns does not tell."""


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
        as_json, dry_run = options["format"] == "json", options["dry_run"]
        try:
            plan = self.plan(using, options)
            if not as_json:
                for line in plan.summary:
                    self.stdout.write(line)
                for line in plan.warnings:
                    self.stdout.write(self.style.WARNING(line))
            # With nothing to do nobody is asked, and nothing is done: what has come meanwhile was not shown.
            changed = self._act(plan, options) if plan.total and not dry_run else 0
        except (OperationRefused, InvalidMessage) as error:
            raise CommandError(str(error)) from error
        if as_json:
            facts = {"operation": plan.action, "dry_run": dry_run, "planned": plan.total, "changed": changed}
            self.stdout.write(json.dumps({"database": using, **facts, **plan.facts}))
        elif dry_run:
            self.stdout.write("Nothing was changed (--dry-run).")
        if not (dry_run or changed) and plan.nothing is not None:
            raise CommandError(f"Nothing was changed: {plan.nothing}")
        if not (dry_run or as_json):
            self.stdout.write(f"Done: {self.done(plan, changed)}")

    def _act(self, plan: Plan, options: dict[str, Any]) -> int:
        as_json = options["format"] == "json"
        if options["interactive"]:
            if as_json:
                raise CommandError("--format json cannot ask: pass --noinput to do it, or --dry-run.")
            self.ask(plan, options)
        with _bar(plan, quiet=as_json or options["verbosity"] == 0) as bar:
            return plan.act(bar.update)

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
    """The first two arguments of every command on a group."""
    parser.add_argument("group", help="consumer group")
    parser.add_argument("topic", help="topic that the group reads")


def group_of(using: str, options: dict[str, Any]) -> groups.Registered:
    """The group that the arguments name.

    Raises:
        CommandError: it is not registered; the text names those that are.
    """
    ref = GroupRef(options["group"], options["topic"])
    registered = groups.find(using, ref)
    if registered is not None:
        return registered
    refs = groups.registered_refs(using)
    text = f"There is no group {ref.group!r} of {ref.topic!r}. Registered: {_listed([_named(one) for one in refs])}."
    if GroupRef(ref.topic, ref.group) in refs:
        raise CommandError(f"{text} The group comes first, then the topic: {ref.topic} {ref.group}")
    meant = [
        *(GroupRef(group, ref.topic) for group in _close(ref.group, [one.group for one in refs])),
        *(GroupRef(ref.group, topic) for topic in _close(ref.topic, [one.topic for one in refs])),
    ]
    raise CommandError(text + _hint([_named(one) for one in meant if one in refs]))


def dlq_of(using: str, topic: str) -> str:
    """The DLQ topic of a topic; one that is a DLQ topic stands for itself.

    Raises:
        CommandError: there is no such topic; the text names those that there are.
    """
    check_topics(using, [topic])
    return naming.dlq_topic(topic)


def check_topics(using: str, wanted: Collection[str]) -> None:
    """Topics that arguments name: a DLQ topic is known if its topic is, and the other way round.

    Raises:
        CommandError: there is no such topic; the text names those that there are.
    """
    known = log.known(Session(using)) if wanted else []
    for topic in wanted:
        if not {topic, naming.first_topic(topic), naming.dlq_topic(topic)} & set(known):
            raise CommandError(f"There is no topic {topic!r}. Topics: {did_you_mean(topic, known)}")


def check_known(what: str, wanted: Collection[object], known: Collection[object]) -> None:
    """Offsets, partition keys or names that arguments name.

    Args:
        what: the error's text, with ``{}`` for those that are not known.

    Raises:
        CommandError: some of them are not known.
    """
    unknown = [one for one in dict.fromkeys(wanted) if one not in known]
    if unknown:
        raise CommandError(what.format(_listed([repr(one) for one in unknown])))


def did_you_mean(name: str, known: Sequence[str]) -> str:
    """The end of an error about a name: those that there are, and the nearest of them."""
    return f"{_listed(known)}.{_hint(_close(name, known))}"


def _named(ref: GroupRef) -> str:
    return f"{ref.group} of {ref.topic}"


def _listed(known: Sequence[str]) -> str:
    more = f" and {len(known) - LISTED} more" if len(known) > LISTED else ""
    return (", ".join(known[:LISTED]) or "none") + more


def _close(name: str, known: Sequence[str]) -> list[str]:
    return difflib.get_close_matches(name, sorted(set(known)), n=3)


def _hint(close: Sequence[str]) -> str:
    return f" Did you mean {' or '.join(close)}?" if close else ""


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

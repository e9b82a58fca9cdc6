"""``manage.py queuescheduled``: lists scheduled messages, delivers some now, or at another time."""

from __future__ import annotations

import datetime
import json
from collections.abc import Sequence
from typing import Any

from django.core.management.base import CommandError, CommandParser
from django.utils import timezone

from django_mysqlqueue.inspection import scheduled
from django_mysqlqueue.management.operations import OperationCommand, Plan, check_topics, counted, moment, who
from django_mysqlqueue.operations import rescheduling
from django_mysqlqueue.service import scheduling
from django_mysqlqueue.sql.session import Session


class ScheduledCommand(OperationCommand):
    """Changes scheduled messages of a topic that are named by their published ids.

    As ``rm`` does, it changes those that exist, names the others, and exits
    with 1 if there are any.
    """

    missing: list[str]

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        parser.add_argument("--key", help="only messages published with this key (default: with any)")

    def run_on(self, using: str, options: dict[str, Any]) -> None:
        self.missing = []
        super().run_on(using, options)
        if self.missing:
            raise CommandError(_not_scheduled(options["topic"], self.missing))

    def chosen(self, using: str, options: dict[str, Any]) -> list[int]:
        """Primary keys of the messages that the arguments name; sets ``missing``.

        Raises:
            CommandError: none of them is scheduled.
        """
        topic, ids = options["topic"], list(dict.fromkeys(options["id"]))
        found = scheduling.find(Session(using), topic, ids, options["key"])
        if not found:
            check_topics(using, [topic])
            raise CommandError(f"Nothing was changed. {_not_scheduled(topic, ids)}")
        there = {one.message_id for one in found}
        self.missing = [one for one in ids if one not in there]
        return [one.outbox_id for one in found]


def _not_scheduled(topic: str, ids: Sequence[str]) -> str:
    return f"Not scheduled for the topic {topic!r}: {', '.join(map(repr, ids))} (due, cancelled or unknown)."


LEFT_ALONE = "the messages came due, or another transaction is changing them; run the command again to see which."
"""Why a command that found messages has changed none."""


def left_alone(plan: Plan, changed: int) -> str:
    """How many were found but not changed, as a sentence; '' if all were changed."""
    left = plan.total - changed
    return f" {counted(left, 'message')} came due or is being changed by another transaction." if left else ""


class Command(ScheduledCommand):
    help = "List scheduled messages; with ids, deliver those messages now or at another time."

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        parser.add_argument("topic", nargs="?", help="only messages of this topic; required with ids")
        parser.add_argument("id", nargs="*", help="ids that publish() returned")
        parser.add_argument("--limit", type=int, default=50, metavar="N", help="maximum number to list (default: 50)")
        parser.add_argument("--now", action="store_true", help="deliver the messages with the given ids now")
        parser.add_argument("--at", metavar="WHEN", help="deliver them at this time (ISO 8601)")

    def run_on(self, using: str, options: dict[str, Any]) -> None:
        if options["id"]:
            super().run_on(using, options)
        elif options["now"] or options["at"]:
            raise CommandError("Name the messages: TOPIC ID…")
        elif options["key"] is not None:
            raise CommandError("--key selects among messages with the given ids: TOPIC ID…")
        else:
            self._list(using, options)

    def _list(self, using: str, options: dict[str, Any]) -> None:
        if options["limit"] < 1:
            raise CommandError(f"--limit {options['limit']}: must be at least 1.")
        found = scheduled.next_scheduled(using, topic=options["topic"], limit=options["limit"])
        if not found and options["topic"] is not None:
            check_topics(using, [options["topic"]])
        if options["format"] == "json":
            self._print_json(using, found)
            return
        if not found:
            self.stdout.write("Nothing is scheduled.")
        for one in found:
            at = timezone.localtime(datetime.datetime.fromtimestamp(one.deliver_at / 1000, datetime.UTC))
            self.stdout.write(f"{at.isoformat(' ', 'seconds')}  {one.topic}  {one.message_id}")

    def _print_json(self, using: str, found: Sequence[scheduled.Scheduled]) -> None:
        rows = [
            {
                "topic": one.topic,
                "id": one.message_id,
                "partition_key": one.key,
                "deliver_at": one.deliver_at,
            }
            for one in found
        ]
        self.stdout.write(json.dumps({"database": using, "scheduled": rows}))

    def plan(self, using: str, options: dict[str, Any]) -> Plan:
        if options["now"] == (options["at"] is not None):
            raise CommandError("Say when: --now or --at.")
        topic, at = options["topic"], None if options["at"] is None else moment(options["at"])
        rows = self.chosen(using, options)

        def move(progress: object) -> int:
            if at is None:
                return rescheduling.deliver_now(using, rows, by=who(), topic=topic)
            return rescheduling.move(using, rows, at, by=who(), topic=topic)

        action, time = ("deliver now", "now") if at is None else ("reschedule", f"at {options['at']}")
        summary = [f"{counted(len(rows), 'message')} will be delivered {time}."]
        return Plan(action, summary, len(rows), move, {"not_scheduled": self.missing}, nothing=LEFT_ALONE)

    def done(self, plan: Plan, changed: int) -> str:
        return f"{changed} changed.{left_alone(plan, changed)}"

"""``manage.py queuescheduled``: list scheduled messages, or change when some are delivered."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, cast

from django.core.management.base import CommandError

from django_mysqlqueue import operations
from django_mysqlqueue.inspection import scheduled
from django_mysqlqueue.management.operations import (
    IN_TIME_ZONE,
    Argument,
    ListCommand,
    OperationCommand,
    check_topics,
    moment,
    task_meant,
)
from django_mysqlqueue.operations.results import Result, ScheduledResult
from django_mysqlqueue.operations.scheduled import not_scheduled_text
from django_mysqlqueue.text.escaping import visible
from django_mysqlqueue.text.humanize import moment as moment_text

MOST = 100_000
"""Maximum number of messages in the list."""
KEY = Argument("--key", help="only messages published with this key (default: any key)")


class ScheduledCommand(OperationCommand):
    """Base class of commands that change scheduled messages, named by the ids that ``publish()`` returned.

    Like ``rm``, such a command changes the messages that exist. If others do not, it lists those and exits with
    status 1.
    """

    def run_on(self, using: str, options: dict[str, Any]) -> None:
        self._missing: tuple[str, ...] = ()
        super().run_on(using, options)
        if self._missing:
            raise CommandError(self.missing_text(options["topic"], self._missing))

    def operate(self, options: dict[str, Any], **how: Any) -> Result:
        result = super().operate(options, **how)
        self._missing = cast("ScheduledResult", result).not_scheduled
        return result

    @staticmethod
    def missing_text(topic: str, ids: Sequence[str]) -> str:
        """Return the error about ids that were not changed."""
        return not_scheduled_text(topic, ids)


class Command(ScheduledCommand, ListCommand):
    """List or reschedule scheduled messages."""

    json_indent: ClassVar[int | None] = None
    help = "List scheduled messages. With ids and --now or --at, deliver these messages now or at another time."

    operation = staticmethod(operations.reschedule)
    arguments = (
        KEY,
        Argument("topic", nargs="?", help="only messages of this topic; required with ids"),
        Argument("id", to="ids", nargs="*", help="id that publish() returned"),
        Argument(
            "--limit",
            to=None,
            type=int,
            default=50,
            metavar="N",
            help="maximum number of messages to list (default: 50)",
        ),
        Argument("--task", to=None, metavar="PATH", help="list only jobs of the task with this dotted path"),
        Argument("--now", to=None, action="store_true", help="deliver the messages with the given ids now"),
        Argument(
            "--at",
            to="deliver_at",
            parse=moment,  # None: now
            metavar="WHEN",
            help=f"deliver the messages with the given ids at WHEN {IN_TIME_ZONE}",
        ),
    )

    def handle(self, *args: Any, **options: Any) -> None:
        if options["id"] and options["task"] is not None:
            raise CommandError("--task is a filter of the list: it cannot be passed with ids.")
        if not options["id"]:
            if options["now"] or options["at"]:
                raise CommandError("--now and --at require the topic and ids of the messages: TOPIC ID…")
            if options["key"] is not None:
                raise CommandError("--key requires the topic and ids of the messages: TOPIC ID…")
            if not 1 <= options["limit"] <= MOST:
                raise CommandError(f"--limit {options['limit']}: must be at least 1 and at most {MOST:,}.")
        super().handle(*args, **options)

    def is_change(self, options: Mapping[str, Any]) -> bool:
        return bool(options["id"])

    def read(self, using: str, options: dict[str, Any]) -> Sequence[scheduled.ScheduledMessage]:
        self._task = options["task"]
        found = scheduled.first_scheduled(using, topic=options["topic"], task=options["task"], limit=options["limit"])
        if not found and options["topic"] is not None:
            check_topics(using, [options["topic"]])
        return found

    def show(self, using: str, found: Sequence[scheduled.ScheduledMessage]) -> None:
        if not found:
            text = (
                "No messages are scheduled."
                if self._task is None
                else f"No jobs of the task {self._task} are scheduled."
            )
            self.stdout.write(visible(" ".join((text, *task_meant(self._task)))))
        for one in found:
            debounced = f"  debounced: {one.coalesce_key}" if one.coalesce_key else ""
            task = f"  {one.task}" if one.task else ""
            text = f"{moment_text(one.deliver_at)}  {one.topic}  {one.message_id}{task}{debounced}"
            self.stdout.write(visible(text))

    def as_json(self, using: str, found: Sequence[scheduled.ScheduledMessage]) -> dict[str, Any]:
        rows = [
            {
                "topic": one.topic,
                "id": one.message_id,
                "task": one.task or None,
                "partition_key": one.key,
                "deliver_at": one.deliver_at,
                "coalesce_key": one.coalesce_key,
            }
            for one in found
        ]
        return {"database": using, "scheduled": rows}

    def operate(self, options: dict[str, Any], **how: Any) -> Result:
        if options["now"] == (options["at"] is not None):
            raise CommandError("Pass --now or --at WHEN.")
        return super().operate(options, **how)

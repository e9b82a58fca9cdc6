"""``manage.py queuequarantine``: list messages that the log has refused, requeue or delete some."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from django.core.management.base import CommandError, CommandParser

from django_mysqlqueue import operations
from django_mysqlqueue.inspection import QuarantinedRow, list_quarantined
from django_mysqlqueue.management.operations import ChangesCommand, check_topics
from django_mysqlqueue.management.tables import write_table
from django_mysqlqueue.operations.results import Result
from django_mysqlqueue.text.humanize import moment, shortened

SHOWN = 1000
"""Maximum number of messages in the list."""


class Command(ChangesCommand):
    """List messages that the log has refused, requeue or delete some."""

    help = (
        "List the messages that the log has refused, for example because of a trigger, with the error of the "
        "database. With an option, move some back into the outbox, or delete them."
    )
    changes: ClassVar = {"requeue": operations.requeue_quarantined, "delete": operations.delete_quarantined}

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        parser.add_argument("--topic", help="only messages of this topic")
        change = parser.add_mutually_exclusive_group()
        change.add_argument(
            "--requeue",
            metavar="ROW",
            nargs="*",
            type=int,
            help="move these messages back into the outbox; without rows, all of --topic",
        )
        change.add_argument(
            "--delete", metavar="ROW", nargs="*", type=int, help="delete these messages; without rows, all of --topic"
        )

    def databases(self, options: Mapping[str, Any]) -> Sequence[str]:
        found = super().databases(options)
        if self.change(options) and len(found) > 1:
            raise CommandError("--requeue and --delete require --database: each database has rows of its own.")
        return found

    def operate(self, options: dict[str, Any], **how: Any) -> Result:
        change = self.change(options)
        return self.changes[change](options[change] or None, topic=options["topic"], **how)

    def read(self, using: str, options: dict[str, Any]) -> tuple[QuarantinedRow, ...]:
        self._topic = options["topic"]
        found = list_quarantined(topic=self._topic, limit=SHOWN, using=using)
        if not found and self._topic is not None:
            check_topics(using, [self._topic])
        return found

    def show(self, using: str, found: Sequence[QuarantinedRow]) -> None:
        if not found:
            of_topic = f"has no messages of topic {self._topic!r}" if self._topic is not None else "is empty"
            self.stdout.write(f"The quarantine {of_topic}.")
            return
        write_table(
            self.stdout,
            ("row", "topic", "key", "id", "since", "reason"),
            [
                (
                    str(one.quarantine_id),
                    one.topic,
                    one.partition_key,
                    one.message_id,
                    moment(one.quarantined_at),
                    shortened(one.reason),
                )
                for one in found
            ],
        )

    def as_json(self, using: str, found: Sequence[QuarantinedRow]) -> dict[str, Any]:
        return {"database": using, "quarantined": [dataclasses.asdict(one) for one in found]}

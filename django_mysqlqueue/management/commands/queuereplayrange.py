"""``manage.py queuereplayrange``: publish a range of the log again, for one consumer group."""

from __future__ import annotations

from typing import Any

from django.core.management.base import CommandParser

from django_mysqlqueue import operations
from django_mysqlqueue.management.operations import OperationCommand, add_group
from django_mysqlqueue.operations.results import Result


class Command(OperationCommand):
    """Publish a range of the log again, for one consumer group."""

    help = (
        "Publish the messages of a range of the log again, only for one consumer group. Its position does not change, "
        "and other groups get nothing. If the command was interrupted, run it again: it publishes only the missing "
        "messages. To replay messages that are no longer in the log, use queuereplay."
    )
    reports_progress = True

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        add_group(parser)
        parser.add_argument("first", type=int, help="first offset of the range")
        parser.add_argument("last", type=int, help="last offset of the range, included")
        parser.add_argument("--key", help="only messages of the partition with this key")
        parser.add_argument(
            "--run",
            metavar="NAME",
            default="",
            help="name of the run, to replay the same messages once more (default: a digest of the other arguments)",
        )
        parser.add_argument("--limit", type=int, metavar="N", help="maximum number of messages to replay")

    def operate(self, options: dict[str, Any], **how: Any) -> Result:
        return operations.replay(
            options["group"],
            options["topic"],
            options["first"],
            options["last"],
            key=options["key"],
            run=options["run"],
            limit=options["limit"],
            **how,
        )

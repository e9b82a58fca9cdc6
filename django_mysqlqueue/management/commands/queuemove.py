"""``manage.py queuemove``: move a topic to another database."""

from __future__ import annotations

from typing import Any

from django.core.management.base import CommandParser

from django_mysqlqueue import operations
from django_mysqlqueue.management.operations import OperationCommand
from django_mysqlqueue.operations.results import Result


class Command(OperationCommand):
    """Move a topic to another database."""

    reports_progress = True
    help = (
        "Move a topic to another database while messages are published. First run it with --prepare, then deploy the "
        "settings that name the new database, then run it without --prepare: it waits until each group has settled "
        "all messages in the old database. If it is interrupted, run it again."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        parser.add_argument("topic", help="topic to move")
        parser.add_argument("--to", required=True, metavar="ALIAS", help="alias of the new database")
        parser.add_argument(
            "--prepare",
            action="store_true",
            help="register the groups in the new database, paused, and bind the topic to the old one until it moves",
        )

    def operate(self, options: dict[str, Any], **how: Any) -> Result:
        how["using"] = options["database"]  # None: that of the topic's publishers
        if not options["prepare"]:
            return operations.move_topic(options["topic"], options["to"], **how)
        how.pop("progress", None)
        return operations.prepare_move(options["topic"], options["to"], **how)

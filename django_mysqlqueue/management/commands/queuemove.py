"""``manage.py queuemove``: move a topic to another database."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from django.core.management.base import CommandParser
from django.db import connections
from tqdm import tqdm

from django_mysqlqueue import operations
from django_mysqlqueue.management.operations import OperationCommand
from django_mysqlqueue.operations.results import Result
from django_mysqlqueue.service.databases import works_on


class Command(OperationCommand):
    """Move a topic to another database."""

    reports_progress = True
    help = (
        "Move a topic to another database while messages are published. First run it with --prepare, then deploy the "
        "settings that name the new database, then run it without --prepare: it waits until each group has settled "
        "all messages in the old database. If it is interrupted, run it again."
    )
    _databases: frozenset[str] = frozenset()

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        parser.add_argument("topic", help="topic to move")
        parser.add_argument("--to", required=True, metavar="ALIAS", help="alias of the new database")
        step = parser.add_mutually_exclusive_group()
        step.add_argument(
            "--prepare",
            action="store_true",
            help="register the groups in the new database, where they wait, and keep the topic in its current one",
        )
        step.add_argument(
            "--cancel", action="store_true", help="undo --prepare, after the earlier settings have been deployed again"
        )

    def handle(self, *args: Any, **options: Any) -> None:
        self._databases = frozenset({*works_on(options["topic"]), options["to"]} & set(connections))
        super().handle(*args, **options)

    @contextmanager
    def prepared(self, using: str) -> Iterator[None]:
        """Prepare the connections to all databases in which the topic is, or will be."""
        with ExitStack() as stack:
            for alias in sorted({using} | self._databases):
                stack.enter_context(self._limited(alias))
                stack.enter_context(super().prepared(alias))
            yield

    def operate(self, options: dict[str, Any], **how: Any) -> Result:
        how["using"] = options["database"]  # None: that of the topic's publishers
        if not (options["prepare"] or options["cancel"]):
            return operations.move_topic(
                options["topic"], options["to"], report=lambda text: tqdm.write(text, file=sys.stderr), **how
            )
        how.pop("progress", None)
        step = operations.cancel_move if options["cancel"] else operations.prepare_move
        return step(options["topic"], options["to"], **how)

"""``manage.py queuecancel``: delete scheduled messages before they come due, or cancel jobs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from django.core.management.base import CommandParser

from django_mysqlqueue import operations
from django_mysqlqueue.management.commands.queuescheduled import KEY, ScheduledCommand
from django_mysqlqueue.management.operations import Argument
from django_mysqlqueue.operations.jobs import not_cancelled_text
from django_mysqlqueue.operations.scheduled import not_scheduled_text
from django_mysqlqueue.options import job_queues


class Command(ScheduledCommand):
    """Cancel scheduled messages, or jobs."""

    help = (
        "Cancel scheduled messages: delete them before they come due, so that no consumer group receives them. In a "
        "queue of jobs, cancel jobs that wait, scheduled or not, and ask those that run to stop: those with the given "
        "ids, or all of a task."
    )
    operation = staticmethod(operations.cancel)
    arguments = (
        KEY,
        Argument("topic", help="topic that the messages were published to"),
        Argument(
            "id",
            to="ids",
            nargs="*",
            parse=lambda ids: ids or None,
            help="id that publish() returned, or id of a job; required without --task",
        ),
        Argument("--task", metavar="PATH", help="all jobs of the task with this dotted path"),
        Argument("--limit", type=int, metavar="N", help="with --task: maximum number of jobs"),
    )

    def create_parser(self, prog_name: str, subcommand: str, **options: Any) -> CommandParser:
        parser = super().create_parser(prog_name, subcommand, **options)
        # Ids may stand behind options, although there may be none: argparse takes none at the first option.
        parser.parse_args = parser.parse_intermixed_args  # type: ignore[method-assign]
        return parser

    @staticmethod
    def missing_text(topic: str, ids: Sequence[str]) -> str:
        return not_cancelled_text(topic, ids) if job_queues.is_queue(topic) else not_scheduled_text(topic, ids)

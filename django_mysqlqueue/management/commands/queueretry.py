"""``manage.py queueretry``: retry messages that are in backoff, now or at another time."""

from __future__ import annotations

from django_mysqlqueue import operations
from django_mysqlqueue.management.operations import GROUP, IN_TIME_ZONE, Argument, OperationCommand, moment


class Command(OperationCommand):
    """Retry messages now, or at another time."""

    help = (
        "Retry waiting messages immediately, or with --at at another time: messages that wait for another attempt "
        "after a failure, a nack or a snooze, or because their subscribers were lost repeatedly. The command changes "
        "all of them in a consumer group, or only those with the given ids, offsets, error, key or task."
    )
    reports_progress = True
    operation = staticmethod(operations.retry)
    arguments = (
        *GROUP,
        Argument("--id", to="ids", action="append", help="only the message with this id (may be repeated)"),
        Argument(
            "--offset",
            to="offsets",
            type=int,
            action="append",
            help="only the message at this offset (may be repeated)",
        ),
        Argument("--error", metavar="TEXT", help="only messages whose last error contains TEXT"),
        Argument("--key", help="only messages published with this key"),
        Argument("--task", metavar="PATH", help="only jobs of the task with this dotted path"),
        Argument("--at", parse=moment, metavar="WHEN", help=f"retry them at WHEN instead of now {IN_TIME_ZONE}"),
        Argument("--reset-attempts", action="store_true", help="count the attempts from 1 again"),
    )

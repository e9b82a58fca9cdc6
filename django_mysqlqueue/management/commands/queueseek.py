"""``manage.py queueseek``: move a consumer group's position in its topic."""

from __future__ import annotations

from typing import Any

from django.core.management.base import CommandError

from django_mysqlqueue import operations
from django_mysqlqueue.management.operations import GROUP, IN_TIME_ZONE, Argument, OperationCommand, moment
from django_mysqlqueue.operations.results import Result


class Command(OperationCommand):
    """Move a consumer group's position."""

    reports_progress = True
    counts_planned = False
    help = (
        "Move a consumer group's position in a topic: back to replay messages, forward to skip them. Subscribers can "
        "keep running. The command shows how many messages it would replay and skip, then asks for confirmation. "
        "Deliveries in flight are revoked: their handlers run to completion, but their acks are ignored and atomic "
        "handlers roll back. An outcome that commits before its delivery is revoked is kept: the handler's writes and "
        "the dead letter stay, even if the seek replays the message. "
        "The command pauses the group while it works. If it is interrupted, the group stays paused: run the command "
        "again."
    )
    operation = staticmethod(operations.seek)
    arguments = (
        *GROUP,
        Argument(
            "position",
            parse=lambda text: int(text) if text is not None and text.isdecimal() and len(text) < 20 else text,
            nargs="?",
            help="'earliest' (the oldest message in the log), 'latest' (after the newest), or the offset to continue "
            "from; required unless you pass --time",
        ),
        Argument(
            "--time",
            parse=moment,
            metavar="WHEN",
            help=f"continue from the first message that entered the log at or after WHEN {IN_TIME_ZONE}",
        ),
    )

    def operate(self, options: dict[str, Any], **how: Any) -> Result:
        if (options["position"] is None) == (options["time"] is None):
            raise CommandError("Pass one position: earliest, latest, an offset, or --time WHEN.")
        return super().operate(options, **how)

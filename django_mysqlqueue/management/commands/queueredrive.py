"""``manage.py queueredrive``: publish dead letters again, for the groups that dead-lettered them."""

from __future__ import annotations

from django_mysqlqueue import operations
from django_mysqlqueue.management.operations import IN_TIME_ZONE, Argument, OperationCommand, moment

DEAD_LETTERS = (
    Argument("topic", help="topic of the messages, or its DLQ topic"),
    Argument("--group", help="only dead letters of this consumer group"),
    Argument("--id", to="ids", action="append", help="only dead letters of the message with this id (may be repeated)"),
    Argument(
        "--offset",
        to="offsets",
        type=int,
        action="append",
        help="only the dead letter at this offset of the DLQ (may be repeated)",
    ),
    Argument("--key", help="only dead letters of messages published with this key"),
    Argument("--task", metavar="PATH", help="only dead letters of jobs of the task with this dotted path"),
    Argument("--error", metavar="TEXT", help="only dead letters whose error contains TEXT"),
    Argument(
        "--since",
        parse=moment,
        metavar="WHEN",
        help=f"only messages dead-lettered at or after WHEN {IN_TIME_ZONE}",
    ),
    Argument("--until", parse=moment, metavar="WHEN", help="only messages dead-lettered at or before WHEN"),
    Argument("--limit", type=int, metavar="N", help="maximum number of dead letters to change"),
)
"""A selection of dead letters."""


class Command(OperationCommand):
    """Redrive dead letters."""

    help = "Publish dead letters again, each only for the consumer group that dead-lettered it."
    reports_progress = True
    operation = staticmethod(operations.redrive)
    arguments = (
        *DEAD_LETTERS,
        Argument("--rate", type=float, metavar="N", help="maximum number of messages per second"),
    )

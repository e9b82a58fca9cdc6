"""``manage.py queuereplayrange``: publish a range of the log again, for one consumer group."""

from __future__ import annotations

from django_mysqlqueue import operations
from django_mysqlqueue.management.operations import GROUP, Argument, OperationCommand


class Command(OperationCommand):
    """Publish a range of the log again, for one consumer group."""

    help = (
        "Publish the messages of a range of the log again, only for one consumer group. Its position does not change, "
        "and other groups get nothing. If the command was interrupted, run it again: it publishes only the missing "
        "messages. To replay messages that are no longer in the log, use queuereplay."
    )
    reports_progress = True
    operation = staticmethod(operations.replay)
    arguments = (
        *GROUP,
        Argument("first", type=int, help="first offset of the range"),
        Argument("last", type=int, help="last offset of the range, included"),
        Argument("--key", help="only messages of the partition with this key"),
        Argument(
            "--run",
            metavar="NAME",
            default="",
            help="name of the run, to replay the same messages once more (default: a digest of the other arguments)",
        ),
        Argument("--limit", type=int, metavar="N", help="maximum number of messages to replay"),
    )

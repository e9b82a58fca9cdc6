"""``manage.py queuedropreader``: drop a registered reader."""

from __future__ import annotations

from django_mysqlqueue import operations
from django_mysqlqueue.management.operations import Argument, OperationCommand


class Command(OperationCommand):
    """Drop a registered reader."""

    help = (
        "Drop a registered reader, such as a stream of Spark with the option reader. GC no longer keeps messages for "
        "it. A stream that still runs registers again."
    )
    operation = staticmethod(operations.drop_reader)
    arguments = (Argument("reader", help="name of the reader"),)

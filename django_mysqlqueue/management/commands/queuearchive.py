"""``manage.py queuearchive``: archive the log as Parquet files."""

from __future__ import annotations

from django_mysqlqueue.management.spark import SparkCommand


class Command(SparkCommand):
    """Archive the log."""

    help = "Archive the log as Parquet files, one range of offsets at a time; verify, compact and prune the archive."
    name = "archive"

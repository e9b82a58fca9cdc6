"""``manage.py queuearchive``: the log as Parquet files."""

from __future__ import annotations

from django_mysqlqueue.management.spark import SparkCommand


class Command(SparkCommand):
    help = "Moves the log, range by range, into Parquet files; checks, merges and lets go of them."
    name = "archive"

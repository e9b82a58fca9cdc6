"""Spark looks for data sources in top-level packages named ``pyspark_…``: this makes ``mysqlqueue`` known to it."""

from django_mysqlqueue.pipeline.source import MysqlQueueSource as DefaultSource

__all__ = ["DefaultSource"]

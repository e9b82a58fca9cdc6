"""Register the data source ``mysqlqueue``. Spark looks for data sources in top-level packages named ``pyspark_…``."""

from django_mysqlqueue.pipeline.source import MysqlQueueSource as DefaultSource

__all__ = ["DefaultSource"]

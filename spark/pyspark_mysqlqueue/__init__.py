"""The queue's log in PySpark: data source, sink, archive, report and replay. Needs no Django.

Spark looks for data sources in top-level packages named ``pyspark_…``: the class ``DefaultSource`` of each.
"""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    # Only Spark asks for it: other programs, such as "archive status", need no Spark.
    if name == "DefaultSource":
        from pyspark_mysqlqueue.source import MysqlQueueSource

        return MysqlQueueSource
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

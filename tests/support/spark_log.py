"""What Spark should read of the log."""

from __future__ import annotations

import datetime
from typing import Any

import pyspark
import pytest
from django.db import connection

from pyspark_mysqlqueue import log_schema

PYSPARK = tuple(map(int, pyspark.__version__.split(".")[:2]))
needs_filters = pytest.mark.skipif(PYSPARK < (4, 1), reason="sources have filters since PySpark 4.1")
NO_STREAMS = "streams have limits since PySpark 4.2"
needs_streams = pytest.mark.skipif(PYSPARK < (4, 2), reason=NO_STREAMS)
UTC = datetime.UTC
LANES = ["k", "__p:-007:k", "__p:+100:__p:3"]
HOSTILE = ["", "007", "a/b", "a,b", "a b ", "É\N{PILE OF POO}", "'; DROP", "%s", "\\", "\x00\n", "topic=x"]


def expected() -> list[tuple[Any, ...]]:
    """The log's rows as plain SQL has them, times in UTC."""
    with connection.cursor() as cursor:
        cursor.execute(f"SELECT {', '.join(f'`{name}`' for name in log_schema.NAMES)} FROM queue_messages ORDER BY 1")
        rows = cursor.fetchall()
    found = []
    for row in rows:
        values = dict(zip(log_schema.NAMES, row, strict=True))
        for column in log_schema.COLUMNS:
            if column.kind == "time":
                number = values[column.name]
                is_missing = number is None or number == column.absent
                values[column.name] = None if is_missing else datetime.datetime.fromtimestamp(number / 1000, UTC)
        found.append(tuple(values.values()))
    return found


def collected(frame: Any) -> list[tuple[Any, ...]]:
    rows = frame.orderBy("offset").collect()
    return [
        tuple(
            value.astimezone(UTC)
            if isinstance(value, datetime.datetime)
            else bytes(value)
            if isinstance(value, bytearray)
            else value
            for value in row
        )
        for row in rows
    ]

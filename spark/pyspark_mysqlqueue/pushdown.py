"""Filters of a query in the database. Needs PySpark 4.1."""

from __future__ import annotations

import datetime
from collections.abc import Iterable
from typing import Any

from pyspark.sql.datasource import (
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNotNull,
    LessThan,
    LessThanOrEqual,
)

from pyspark_mysqlqueue import kafka_schema, log_offsets, log_schema
from pyspark_mysqlqueue.options import EPOCH
from pyspark_mysqlqueue.source import LogReader

MOST_VALUES = 1000
"""Maximum number of values in an IN list that is pushed down. Spark evaluates longer ones."""
PUSHED_TEXTS = frozenset({"topic", "partition_key", "id"})
"""Text columns whose filters are pushed down."""


class PushingLogReader(LogReader):
    """A reader that accepts filters. Spark refuses such a class unless its setting for filter pushdown is on."""

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:  # noqa: N802
        """Add filters to the query. Yield those that Spark must evaluate."""
        for one in filters:
            if not self._takes(one):
                yield one

    def _takes(self, one: Filter) -> bool:
        attribute: tuple[str, ...] = getattr(one, "attribute", ())
        value = getattr(one, "value", None)
        if len(attribute) != 1:
            return False
        name = kafka_schema.LOG_NAMES.get(attribute[0], "") if self.query.is_kafka else attribute[0]
        if isinstance(one, IsNotNull):
            column = log_schema.BY_NAME.get(name)
            # A time that no timestamp can represent is NULL, too.
            return column is not None and column.kind != "time" and not column.nullable
        if name == "offset":
            return self._takes_offset(one, value)
        if name == "published_at":
            return self._takes_time(one, value)
        if name not in PUSHED_TEXTS:
            return False
        if not isinstance(one, (EqualTo, In)):
            return False
        values = tuple(one.value) if isinstance(one, In) else (value,)
        if len(values) > MOST_VALUES or not all(isinstance(text, str) for text in values):
            return False
        self.query = self.query.also(((name, values),))
        return True

    def _takes_offset(self, one: Filter, value: Any) -> bool:
        if isinstance(one, In):
            if not value or not all(type(number) is int for number in value):
                return False
            # Only the range is pushed down. Spark evaluates the list.
            self._narrow(min(value), max(value))
            return False
        if type(value) is not int:
            return False
        if isinstance(one, EqualTo):
            self._narrow(value, value)
        elif isinstance(one, GreaterThan):
            self._narrow(value + 1, None)
        elif isinstance(one, GreaterThanOrEqual):
            self._narrow(value, None)
        elif isinstance(one, LessThan):
            self._narrow(None, value - 1)
        elif isinstance(one, LessThanOrEqual):
            self._narrow(None, value)
        else:
            return False
        return True

    def _takes_time(self, one: Filter, value: Any) -> bool:
        if not isinstance(value, datetime.datetime) or value.tzinfo is None:
            return False
        at = log_offsets.milliseconds(value)
        # The log has whole milliseconds: the first one at or after the time, and the first one after it.
        first = at if value == EPOCH + datetime.timedelta(milliseconds=at) else at + 1
        if isinstance(one, EqualTo):
            self.since, self.before = max(self.since, first), min(self.before, at + 1)
        elif isinstance(one, GreaterThan):
            self.since = max(self.since, at + 1)
        elif isinstance(one, GreaterThanOrEqual):
            self.since = max(self.since, first)
        elif isinstance(one, LessThan):
            self.before = min(self.before, first)
        elif isinstance(one, LessThanOrEqual):
            self.before = min(self.before, at + 1)
        else:
            return False
        return True

    def _narrow(self, first: int | None, last: int | None) -> None:
        if first is not None:
            self.first = max(self.first, first)
        if last is not None:
            self.last = last if self.last is None else min(self.last, last)

"""Statistics of the queue's tables, pinned: what the optimizers believe, whatever a test has put into the tables.

A plan, and with it what a statement locks, depends on them. They are read from two tables of the server when a table
is opened, so writing there stands for filling the queue's tables.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Literal

from django.db.backends.base.base import BaseDatabaseWrapper

from tests.conftest import QUEUE_MODELS

Size = Literal["empty", "small", "large"]
SIZES: tuple[Size, ...] = ("empty", "small", "large")

TABLES = tuple(model._meta.db_table for model in QUEUE_MODELS)
FEW = {"empty": 0, "small": 2}
"""Rows of each table. Those that were empty when they were made count as empty until much is in them."""
MANY = {
    "queue_messages": 10_000_000,
    "queue_outbox": 1_000_000,
    "queue_delivery_state": 1_000_000,
    "queue_partition_leases": 100_000,
    "queue_offsets": 1_000_000,
    "queue_slots": 10_000,
    "queue_coalesce_keys": 10_000,
    "queue_debounced": 10_000,
    "queue_quarantine": 1000,
    "queue_subscriber_heartbeats": 1000,
    "queue_consumer_groups": 200,
    "queue_sequencer": 1,
    "queue_log_marks": 43_200,
    "queue_delivery_events": 1_000_000,
    "queue_operations": 10_000,
    "queue_rollups": 1_000_000,
    "queue_collected": 200,
    "queue_relay_watermarks": 3,
    "queue_relay_positions": 3,
    "queue_readers": 10,
    "queue_job_results": 1_000_000,
    "queue_job_stages": 1_000_000,
    "queue_schedules": 200,
}
DISTINCT = {"consumer_group": 50, "topic": 20, "acked": 2, "grain": 2, "partition_key": 10_000, "leased_by": 50}
"""How many values a column has where a table is large; others have one for each row."""
ROWS_A_PAGE = 100


def pin(connection: BaseDatabaseWrapper, size: Size) -> None:
    """Gives the queue's tables the statistics of a new, a small or a large queue, until ``unpin``.

    It is DDL: no transaction of the connection may be open. Without statistics of this kind (SQLite) it does nothing.
    """
    if connection.vendor != "mysql":
        return
    with connection.cursor() as cursor:
        for table in TABLES:
            rows = MANY[table] if size == "large" else FEW[size]
            # FORCE makes a new table: MySQL may have listed the old one to be analyzed, at least 10 s after the last
            # time, and would do so even after STATS_AUTO_RECALC=0.
            cursor.execute(f"ALTER TABLE {table} STATS_PERSISTENT=1, STATS_AUTO_RECALC=0, FORCE")
            cursor.execute(f"ANALYZE TABLE {table}")  # which makes the rows that are written to here
            cursor.fetchall()
            cursor.execute(
                "UPDATE mysql.innodb_table_stats SET n_rows = %s, clustered_index_size = %s, "
                "sum_of_other_index_sizes = %s WHERE database_name = DATABASE() AND table_name = %s",
                (rows, _pages(rows), _pages(rows), table),
            )
            cursor.execute(
                "SELECT index_name, stat_name, stat_description FROM mysql.innodb_index_stats "
                "WHERE database_name = DATABASE() AND table_name = %s",
                (table,),
            )
            for index, name, description in cursor.fetchall():
                cursor.execute(
                    "UPDATE mysql.innodb_index_stats SET stat_value = %s WHERE database_name = DATABASE() "
                    "AND table_name = %s AND index_name = %s AND stat_name = %s",
                    (_value(name, description, rows), table, index, name),
                )
    reread(connection)


def reread(connection: BaseDatabaseWrapper) -> None:
    """Makes what is pinned count again: InnoDB has added to it what was inserted since."""
    if connection.vendor != "mysql":
        return
    with connection.cursor() as cursor:
        # They are read when a table is opened, as one that is renamed is. (FLUSH TABLES is not enough for MariaDB.)
        there = ", ".join(f"{table} TO {table}_" for table in TABLES)
        back = ", ".join(f"{table}_ TO {table}" for table in TABLES)
        cursor.execute(f"RENAME TABLE {there}, {back}")


def unpin(connection: BaseDatabaseWrapper) -> None:
    """Takes back what ``pin`` has done: the statistics are those of what is in the tables, and follow it."""
    if connection.vendor != "mysql":
        return
    with connection.cursor() as cursor:
        for table in TABLES:
            cursor.execute(f"ALTER TABLE {table} STATS_PERSISTENT=DEFAULT, STATS_AUTO_RECALC=DEFAULT")
            cursor.execute(f"ANALYZE TABLE {table}")
            cursor.fetchall()


@contextlib.contextmanager
def pinned(connection: BaseDatabaseWrapper, size: Size) -> Iterator[None]:
    """``pin`` and, in the end, ``unpin``."""
    pin(connection, size)
    try:
        yield
    finally:
        unpin(connection)


def _pages(rows: int) -> int:
    return max(1, math.ceil(rows / ROWS_A_PAGE))


def _value(name: str, description: str, rows: int) -> int:
    if not name.startswith("n_diff"):
        return _pages(rows)
    found = math.prod(DISTINCT.get(column, rows) for column in description.split(","))
    return min(rows, found)

"""The dialect of SQLite: one host, one writer at a time.

A transaction that begins with BEGIN IMMEDIATE holds the write lock of the whole database, so there are no row locks
to take or to skip.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from django.db import Error, OperationalError
from django.db.backends.signals import connection_created

from django_mysqlqueue.db.session_variables import NOW_MS_SQLITE
from django_mysqlqueue.sql.base import Dialect

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper

    from django_mysqlqueue.sql import FailureKind

FAILURES: dict[FailureKind, tuple[str, ...]] = {
    "no_database": ("unable to open database file",),
    "read_only": ("readonly database",),
    "missing_table": ("no such table", "no such column"),
    "busy": ("locked",),
    "interrupted": ("interrupted",),
}


def failure_kind(error: Error) -> FailureKind | None:
    """Return why the database refused, or None for other errors."""
    text = str(error)
    return next((kind for kind, parts in FAILURES.items() if any(part in text for part in parts)), None)


class SQLite(Dialect):
    """The dialect of SQLite."""

    name = "sqlite"
    now_ms = NOW_MS_SQLITE
    share_lock = ""
    for_update = ""
    skip_locked = ""
    oldest_transaction = sequencer_holder = ()
    table_size = ("SELECT c.page_count * s.page_size FROM pragma_page_count() c, pragma_page_size() s WHERE %s > ''",)
    greatest = "MAX"
    # SQLite allows 32,766 parameters per statement since 3.32; derived tables have up to 8 columns.
    max_rows = 1000
    has_row_locks = False

    def rows(self, names: Sequence[str], count: int) -> str:
        named = ", ".join(f"column{number} AS {name}" for number, name in enumerate(names, 1))
        row = f"({', '.join(['%s'] * len(names))})"
        return f"(SELECT {named} FROM (VALUES {self.placeholders(count, row)})) AS v"

    def force_index(self, name: str) -> str:
        return ""  # It locks no rows.

    def join_to(self, table: str, alias: str, index: str = "PRIMARY", *, left: bool = False) -> str:
        # SQLite does not reorder a CROSS JOIN.
        return f"{'LEFT JOIN' if left else 'CROSS JOIN'} {table} {alias}"

    def ending(self, column: str, characters: int) -> str:
        return f"SUBSTR({column}, -{characters})"

    def appended(self, column: str, text: str) -> str:
        return f"{column} || '{text}'"

    def union(self, *selects: str) -> str:
        return f"SELECT * FROM ({') UNION ALL SELECT * FROM ('.join(selects)})"

    def update_joined(
        self, table: str, names: Sequence[str], count: int, on: str, assign: Mapping[str, str], where: str = ""
    ) -> str:
        sets = ", ".join(f"{column} = {value}" for column, value in assign.items())
        condition = f" AND {where}" if where else ""
        return f"UPDATE {table} AS s SET {sets} FROM {self.rows(names, count)} WHERE {on}{condition}"

    def delete_joined(self, table: str, names: Sequence[str], count: int, on: str, where: str = "") -> str:
        condition = f" WHERE {where}" if where else ""
        joined = f"SELECT s.rowid FROM {self.rows(names, count)} {self.join_to(table, 's')} ON {on}{condition}"
        return f"DELETE FROM {table} WHERE rowid IN ({joined})"

    def on_conflict(self, key: Sequence[str], assign: Mapping[str, str]) -> str:
        sets = ", ".join(f"{column} = {value}" for column, value in assign.items())
        return f" ON CONFLICT ({', '.join(key)}) DO UPDATE SET {sets}"

    def on_conflict_keep(self, table: str, key: Sequence[str]) -> str:
        return f" ON CONFLICT ({', '.join(key)}) DO NOTHING"

    def matches(self, column: str) -> str:
        return f"{column} GLOB %s"

    def pattern(self, text: str) -> str:
        return text.replace("[", "[[]")

    def shard(self, column: str) -> str:
        return f"mysqlqueue_crc32({column}) %% %s = %s"  # See ``_add_functions``.

    def inserted_id(self, table: str, column: str, place: int, count: int) -> str:
        # No other transaction inserts before this one ends. last_insert_rowid() changes with each row that is inserted.
        return f"(SELECT MAX({column}) FROM {table}) - {count - 1 - place}"

    def begin_manual(self, connection: BaseDatabaseWrapper) -> None:
        # On SQLite, an outermost SAVEPOINT is a transaction, and its RELEASE would commit.
        if not connection.connection.in_transaction:
            with connection.cursor() as cursor:
                cursor.execute("BEGIN IMMEDIATE")

    def is_retryable(self, error: Error) -> bool:
        return isinstance(error, OperationalError) and "locked" in str(error)

    def read_committed(self, connection: BaseDatabaseWrapper) -> str | None:
        return None

    def session_timeouts(self, *, idle: float, lock_wait: float, network: float) -> Mapping[str, str]:
        return {}

    def max_statement_bytes(self, connection: BaseDatabaseWrapper) -> int:
        return 1_000_000_000  # SQLITE_MAX_LENGTH


DIALECT = SQLite()


def _add_functions(*, connection: Any, **kwargs: Any) -> None:
    if connection.vendor == "sqlite":
        connection.connection.create_function(
            "mysqlqueue_crc32", 1, lambda text: zlib.crc32(text.encode()), deterministic=True
        )


connection_created.connect(_add_functions, dispatch_uid="django_mysqlqueue.sql.sqlite")

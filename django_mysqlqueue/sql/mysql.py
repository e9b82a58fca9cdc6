"""MySQL, and what MariaDB shares with it; only SQL that MySQL 8.0.19 has (``tests/sql/test_mysql_syntax.py``)."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, WeakSet

from django.db import Error, OperationalError

from django_mysqlqueue.limits import NOW_MS_MYSQL, SESSION_MYSQL
from django_mysqlqueue.sql.base import Dialect

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper

    from django_mysqlqueue.sql import FailureKind

DEADLOCK = 1213
LOCK_WAIT_TIMEOUT = 1205
NEEDS_PRIVILEGE = 1227
CHANGED_SINCE_SNAPSHOT = 1020
"""MariaDB with innodb_snapshot_isolation."""
TABLE_ACCESS_DENIED = 1142
OUT_OF_RANGE = 1690
CANNOT_CONVERT = 3854
"""MySQL fills whole rows of ``innodb_trx``, the running statements as utf8mb3: an emoji in anybody's fails all."""
READ_ONLY = frozenset({1290, 1792, 1836})
"""What a demoted primary answers to a write: it lives on, and so does the connection."""


FAILURES: dict[FailureKind, frozenset[int]] = {
    # Refused by the operating system or lost on the way; shutting down; ended by the server (KILL, idle, restart).
    "no_answer": frozenset({2002, 2003, 2005, 2006, 2013, 2055, 1053, 1927, 4031}),
    # Database, user, host, host after many errors, plug-in; table, column; PROCESS and the like; routine.
    "denied": frozenset({1044, 1045, 1130, 1129, 1698, TABLE_ACCESS_DENIED, 1143, NEEDS_PRIVILEGE, 1370}),
    "no_database": frozenset({1049}),
    "too_many_connections": frozenset({1040, 1203, 1226}),
    "read_only": READ_ONLY,
    "missing_table": frozenset({1146, 1054}),  # a column that is missing is an older table
    "busy": frozenset({DEADLOCK, LOCK_WAIT_TIMEOUT}),
}


def failure_kind(error: Error) -> FailureKind | None:
    code = error.args[0] if error.args else None
    return next((kind for kind, codes in FAILURES.items() if code in codes), None)


INNODB_TRANSACTIONS = (
    "SELECT TIMESTAMPDIFF(SECOND, trx_started, NOW()), trx_mysql_thread_id FROM information_schema.innodb_trx "
    "WHERE trx_mysql_thread_id > 0 ORDER BY trx_started LIMIT 1"
)
PERFORMANCE_SCHEMA = (
    "SELECT e.timer_wait DIV 1000000000000, t.processlist_id FROM performance_schema.events_transactions_current e "
    "JOIN performance_schema.threads t ON t.thread_id = e.thread_id "
    "WHERE e.state = 'ACTIVE' AND t.processlist_id > 0 AND e.timer_wait IS NOT NULL ORDER BY e.timer_wait DESC LIMIT 1"
)


_CHANGES_SESSION = re.compile(
    r"(?:\s|/\*.*?\*/|(?:--|#)[^\n]*\n)*"
    r"(?:BEGIN|START|SET\s+(?!TRANSACTION\b)|LOCK|FLUSH|XA|USE|CREATE\s+(?:OR\s+REPLACE\s+)?TEMPORARY)\b",
    re.IGNORECASE | re.DOTALL,
)


def changes_session(statement: str) -> bool:
    # SET TRANSACTION is for the next transaction alone. Django begins its own without any of these.
    return _CHANGES_SESSION.match(statement) is not None


STATEMENT_ERRORS = frozenset(
    {
        1048,  # a column that cannot be NULL
        1054,  # unknown column
        1062,  # duplicate entry
        1064,  # syntax
        1136,  # column count
        1146,  # no such table
        1242,  # a subquery of more than one row
        1264,  # out of range for a column
        1265,  # not a value of an ENUM
        1292,  # not a date
        1364,  # no default value
        1365,  # division by zero
        1366,  # not a number, or not in the column's character set
        1406,  # too long
        1451,  # a foreign key refers to the row
        1452,  # a foreign key refers to nothing
        1644,  # SIGNAL, in a trigger
        1690,  # out of range in an expression
        1969,  # max_statement_time (MariaDB)
        3024,  # max_execution_time (MySQL)
        3140,  # not JSON (MySQL)
        3572,  # NOWAIT (MySQL)
        3819,  # CHECK (MySQL)
        4025,  # CHECK (MariaDB)
    }
)
"""Errors that roll back their statement and leave the rest of the transaction as it was: a test provokes each.

InnoDB rolls back the whole transaction for a deadlock, for a row that changed after the snapshot (MariaDB) and, with
``innodb_rollback_on_timeout``, for a lock wait that timed out:
https://dev.mysql.com/doc/refman/8.4/en/innodb-error-handling.html
"""

_READS_OR_WRITES_ROWS = re.compile(
    r"(?:\s|\(|/\*(?!!).*?\*/|(?:--|#)[^\n]*\n)*(?:SELECT|INSERT|UPDATE|DELETE|REPLACE|WITH)\b",
    re.IGNORECASE | re.DOTALL,
)
_rolls_back_on_timeout: WeakKeyDictionary[Any, bool] = WeakKeyDictionary()
"""By the driver's connection: what its server does when a lock wait times out."""


def ends_transaction(raw: Any, error: Error) -> bool:
    code = error.args[:1]
    return code in ((DEADLOCK,), (CHANGED_SINCE_SNAPSHOT,)) or (
        code == (LOCK_WAIT_TIMEOUT,) and _has_rollback_on_timeout(raw)
    )


def keeps_transaction(raw: Any, statement: str, error: Error) -> bool:
    code = error.args[0] if error.args else None
    if not isinstance(code, int):
        return True  # the driver has refused its parameters: nothing was sent
    # A procedure, or a second statement, may have ended the transaction before it failed.
    if not _READS_OR_WRITES_ROWS.match(statement) or ";" in statement.rstrip("; \t\r\n"):
        return False
    if code == LOCK_WAIT_TIMEOUT:
        return not _has_rollback_on_timeout(raw)
    return code in STATEMENT_ERRORS


def _has_rollback_on_timeout(raw: Any) -> bool:
    """``innodb_rollback_on_timeout``, which a running server keeps; asked by the driver's own cursor, and once."""
    if raw not in _rolls_back_on_timeout:
        try:
            with raw.cursor() as cursor:
                cursor.execute("SELECT @@innodb_rollback_on_timeout")
                (value,) = cursor.fetchone()
        except Exception:  # noqa: BLE001  # whatever it is: what is not known to be kept is not kept
            return True
        _rolls_back_on_timeout[raw] = bool(int(value))
    return _rolls_back_on_timeout[raw]


def client_timeouts(*, read: float) -> dict[str, int]:
    # mysqlclient's options: without them a server that stops answering is waited for without end.
    return {"connect_timeout": 10, "read_timeout": math.ceil(read), "write_timeout": math.ceil(read)}


def is_read_only(error: BaseException) -> bool:
    # The cause is looked at for CommitOutcomeUnknown.
    return any(isinstance(one, Error) and one.args[:1] and one.args[0] in READ_ONLY for one in (error, error.__cause__))


class MySQL(Dialect):
    name = "mysql"
    # A literal percent sign would be doubled by the driver; there is none in it.
    now_ms = f"({NOW_MS_MYSQL})"
    share_lock = " LOCK IN SHARE MODE"
    for_update = " FOR UPDATE"
    skip_locked = " FOR UPDATE SKIP LOCKED"
    # The first needs the privilege PROCESS, the second SELECT on performance_schema; where that is off it has no row.
    oldest_transaction = (INNODB_TRANSACTIONS, PERFORMANCE_SCHEMA)
    greatest = "GREATEST"
    max_rows = 1000
    has_row_locks = True
    session = SESSION_MYSQL

    def __init__(self) -> None:
        self._packets: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        self._committing: WeakSet[Any] = WeakSet()
        """Driver connections that have autocommit on, as the server said."""

    def rows(self, names: Sequence[str], count: int) -> str:
        first = ", ".join(f"%s AS {name}" for name in names)
        more = f" UNION ALL SELECT {', '.join(['%s'] * len(names))}"
        return f"(SELECT {first}{more * (count - 1)}) v"

    def force_index(self, name: str) -> str:
        return f" FORCE INDEX ({name})"

    def join_to(self, table: str, alias: str, index: str = "PRIMARY", *, left: bool = False) -> str:
        return f"{'LEFT JOIN' if left else 'STRAIGHT_JOIN'} {table} {alias}{self.force_index(index)}"

    def ending(self, column: str, characters: int) -> str:
        return f"RIGHT({column}, {characters})"

    def union(self, select: str, count: int) -> str:
        return f"({select})" + f" UNION ALL ({select})" * (count - 1)

    def update_joined(
        self, table: str, names: Sequence[str], count: int, on: str, assign: Mapping[str, str], where: str = ""
    ) -> str:
        sets = ", ".join(f"s.{column} = {value}" for column, value in assign.items())
        condition = f" WHERE {where}" if where else ""
        return f"UPDATE {self.rows(names, count)} {self.join_to(table, 's')} ON {on} SET {sets}{condition}"

    def delete_joined(self, table: str, names: Sequence[str], count: int, on: str, where: str = "") -> str:
        condition = f" WHERE {where}" if where else ""
        return f"DELETE s FROM {self.rows(names, count)} {self.join_to(table, 's')} ON {on}{condition}"

    def on_conflict(self, key: Sequence[str], assign: Mapping[str, str]) -> str:
        return " ON DUPLICATE KEY UPDATE " + ", ".join(f"{column} = {value}" for column, value in assign.items())

    def on_conflict_keep(self, table: str, key: Sequence[str]) -> str:
        return f" ON DUPLICATE KEY UPDATE {key[0]} = {table}.{key[0]}"

    def matches(self, column: str) -> str:
        return f"{column} LIKE %s ESCAPE '!'"

    def pattern(self, text: str) -> str:
        return text.translate({ord("!"): "!!", ord("%"): "!%", ord("_"): "!_", ord("*"): "%", ord("?"): "_"})

    def shard(self, column: str) -> str:
        return f"MOD(CRC32({column}), %s) = %s"

    def is_retryable(self, error: Error) -> bool:
        return isinstance(error, OperationalError) and error.args[:1] in ((DEADLOCK,), (LOCK_WAIT_TIMEOUT,))

    def read_committed(self, connection: BaseDatabaseWrapper) -> str | None:
        if connection.isolation_level == "read committed":  # type: ignore[attr-defined]
            return None
        return "SET TRANSACTION ISOLATION LEVEL READ COMMITTED"

    def locks_reads(self, connection: BaseDatabaseWrapper) -> bool:
        return bool(connection.isolation_level == "serializable")  # type: ignore[attr-defined]

    def session_timeouts(self, *, idle: float, lock_wait: float, network: float) -> Mapping[str, str]:
        return {
            "wait_timeout": f"{math.ceil(idle)}",
            "net_read_timeout": f"{math.ceil(network)}",
            "net_write_timeout": f"{math.ceil(network)}",
            "innodb_lock_wait_timeout": f"{math.ceil(lock_wait)}",
        }

    def if_autocommit(self, connection: BaseDatabaseWrapper, value: str) -> str:
        connection.close_if_health_check_failed()  # as cursor() would: the statement is for the connection behind it
        connection.ensure_connection()
        raw = connection.connection
        # Once for each server connection: it adds 6% to 12% to a publish. From then on the driver sees every change.
        if raw in self._committing and raw.get_autocommit():
            return value
        # Until then it cannot tell: MySQL's status flag says "autocommit" in a session that has it off from the global
        # value. The overflow is an error in every sql_mode; NULL would be, too, but not in a multi-row INSERT.
        return f"IF(@@autocommit, {value}, ~0 + 1)"

    def has_committed(self, connection: BaseDatabaseWrapper) -> None:
        self._committing.add(connection.connection)

    def is_uncommitted(self, error: Error) -> bool:
        return error.args[:1] == (OUT_OF_RANGE,)

    def max_statement_bytes(self, connection: BaseDatabaseWrapper) -> int:
        # Asked once for each server connection: publishing must not pay for it.
        connection.ensure_connection()
        raw = connection.connection
        if raw not in self._packets:
            with connection.cursor() as cursor:
                cursor.execute("SELECT @@max_allowed_packet")
                (self._packets[raw],) = cursor.fetchone()
        return self._packets[raw]

    def hides_transactions(self, error: Error) -> bool:
        return error.args[:1] in ((NEEDS_PRIVILEGE,), (TABLE_ACCESS_DENIED,), (CANNOT_CONVERT,))


DIALECT = MySQL()

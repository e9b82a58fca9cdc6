"""The dialect of MySQL, most of which MariaDB shares.

It uses only SQL of MySQL 8.0.19 (see ``tests/sql/test_mysql_syntax.py``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, WeakSet

from django.db import Error, OperationalError

from django_mysqlqueue.db.session_variables import NOW_MS_MYSQL, SESSION_MYSQL
from django_mysqlqueue.sql.base import Dialect
from django_mysqlqueue.sql.statements import execute_unseen, is_plain

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper

    from django_mysqlqueue.sql import FailureKind

DEADLOCK = 1213
LOCK_WAIT_TIMEOUT = 1205
NEEDS_PRIVILEGE = 1227
CHANGED_SINCE_SNAPSHOT = 1020
"""An error of MariaDB with ``innodb_snapshot_isolation``."""
TABLE_ACCESS_DENIED = 1142
INCORRECT_TEXT = 1366
SIGNALLED = 1644
OUT_OF_RANGE = 1690
CANNOT_CONVERT = 3854
"""MySQL reads whole rows of ``innodb_trx``, with the running statements as utf8mb3: an emoji in any of them is an
error."""
READ_ONLY = frozenset({1290, 1792, 1836})
"""The errors of a demoted primary for writes. The server and the connection stay usable for reads."""


FAILURES: dict[FailureKind, frozenset[int]] = {
    # Refused by the operating system, or lost; shutting down; closed by the server (KILL, idle, restart).
    "no_answer": frozenset({2002, 2003, 2005, 2006, 2013, 2055, 1053, 1927, 3169, 4031}),
    # Database, user, host, host after many errors, plug-in; table, column; PROCESS and the like; routine.
    "denied": frozenset({1044, 1045, 1130, 1129, 1698, TABLE_ACCESS_DENIED, 1143, NEEDS_PRIVILEGE, 1370}),
    "no_database": frozenset({1049}),
    "too_many_connections": frozenset({1040, 1203, 1226}),
    "read_only": READ_ONLY,
    "missing_table": frozenset({1146, 1054}),  # A missing column means an older table.
    "busy": frozenset({DEADLOCK, LOCK_WAIT_TIMEOUT}),
    # KILL QUERY, max_statement_time (MariaDB), max_execution_time (MySQL).
    "interrupted": frozenset({1317, 1969, 3024}),
}


def failure_kind(error: Error) -> FailureKind | None:
    """Return why the server refused or did not answer, or None for other errors."""
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
SEQUENCER_LOCK = (
    "SELECT t.processlist_id, CONCAT(t.processlist_user, '@', t.processlist_host), "
    "e.timer_wait DIV 1000000000000, 1 FROM performance_schema.data_locks l "
    "JOIN performance_schema.threads t ON t.thread_id = l.thread_id "
    "LEFT JOIN performance_schema.events_transactions_current e ON e.thread_id = l.thread_id AND e.state = 'ACTIVE' "
    "WHERE l.object_schema = DATABASE() AND l.object_name = 'queue_sequencer' AND l.lock_type = 'RECORD' "
    "AND l.lock_status = 'GRANTED' AND t.processlist_id <> CONNECTION_ID() "
    "UNION ALL SELECT NULL, NULL, NULL, 1 FROM DUAL WHERE @@performance_schema = 1 LIMIT 1"
)
"""Without the performance schema, its tables are empty, and this returns no row."""
LOCKED_ROWS = (
    "SELECT t.trx_mysql_thread_id, CONCAT(p.user, '@', p.host), TIMESTAMPDIFF(SECOND, t.trx_started, NOW()), 0 "
    "FROM information_schema.innodb_trx t LEFT JOIN information_schema.processlist p ON p.id = t.trx_mysql_thread_id "
    "WHERE t.trx_rows_locked > 0 AND t.trx_mysql_thread_id > 0 AND t.trx_mysql_thread_id <> CONNECTION_ID() "
    "ORDER BY t.trx_started LIMIT 1"
)
"""MariaDB shows locks only while somebody waits for them."""


TABLE_SIZE = (
    "SELECT COALESCE(SUM(data_length + index_length), 0) FROM information_schema.tables "
    "WHERE table_schema = DATABASE() AND table_name = %s"
)


IN_TRANSACTION = 1568
"""The error of SET TRANSACTION while a transaction is open."""


def holds_transaction(connection: BaseDatabaseWrapper) -> bool:
    """Ask the server whether a transaction is open: only MariaDB has a variable for it.

    If none is, the statement has no effect: READ WRITE is what the next transaction would be anyway.
    """
    if not connection.connection.open:
        return False
    try:
        execute_unseen(connection, "SET TRANSACTION READ WRITE")
    except Error as error:
        if error.args[:1] == (IN_TRANSACTION,):
            return True
        raise
    return False


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
"""Errors that roll back only their statement and keep the rest of the transaction. A test provokes each.

InnoDB rolls back the whole transaction for a deadlock, for a row that changed after the snapshot (MariaDB) and, with
``innodb_rollback_on_timeout``, for a lock wait timeout:
https://dev.mysql.com/doc/refman/8.4/en/innodb-error-handling.html
"""

_rolls_back_on_timeout: WeakKeyDictionary[Any, bool] = WeakKeyDictionary()
"""By the driver's connection, whether its server rolls back the transaction after a lock wait timeout."""


def ends_transaction(raw: Any, error: Error) -> bool:
    """Return whether it is certain that the server has rolled back the whole transaction with this error."""
    code = error.args[:1]
    return code in ((DEADLOCK,), (CHANGED_SINCE_SNAPSHOT,)) or (
        code == (LOCK_WAIT_TIMEOUT,) and _has_rollback_on_timeout(raw)
    )


def keeps_transaction(raw: Any, statement: str, error: Error) -> bool:
    """Return whether it is certain that a statement's error has not changed the open transaction."""
    code = error.args[0] if error.args else None
    if not isinstance(code, int):
        return True  # The driver has refused the parameters, and sent nothing.
    # A procedure, or a second statement, may have ended the transaction before it failed.
    if not is_plain(statement):
        return False
    if code == LOCK_WAIT_TIMEOUT:
        return not _has_rollback_on_timeout(raw)
    return code in STATEMENT_ERRORS


def _has_rollback_on_timeout(raw: Any) -> bool:
    """Return ``innodb_rollback_on_timeout``, read once by the driver's cursor: a running server does not change it."""
    if raw not in _rolls_back_on_timeout:
        try:
            with raw.cursor() as cursor:
                cursor.execute("SELECT @@innodb_rollback_on_timeout")
                (value,) = cursor.fetchone()
        except Exception:  # noqa: BLE001  # After any error, assume that the transaction is rolled back.
            return True
        _rolls_back_on_timeout[raw] = bool(int(value))
    return _rolls_back_on_timeout[raw]


def idle_limit(seconds: float) -> str:
    """Return the statement that makes the server close the session when it has been idle for some seconds."""
    return f"SET SESSION wait_timeout = {math.ceil(seconds)}"


def client_timeouts(*, read: float, connect: float) -> dict[str, int]:
    """Return mysqlclient's timeout options in seconds. Without them, it waits for the server without a limit."""
    seconds = math.ceil(read)
    return {"connect_timeout": math.ceil(connect), "read_timeout": seconds, "write_timeout": seconds}


def is_read_only(error: BaseException) -> bool:
    """Return whether the server refuses writes, because it is no longer, or not yet, the primary."""
    # The cause is checked because of CommitOutcomeUnknown.
    return any(isinstance(one, Error) and one.args[:1] and one.args[0] in READ_ONLY for one in (error, error.__cause__))


class MySQL(Dialect):
    """The dialect of MySQL, and the base of that of MariaDB."""

    name = "mysql"
    # It must not contain a percent sign, which would have to be doubled for the driver.
    now_ms = f"({NOW_MS_MYSQL})"
    share_lock = " LOCK IN SHARE MODE"
    for_update = " FOR UPDATE"
    skip_locked = " FOR UPDATE SKIP LOCKED"
    # The first needs the privilege PROCESS, the second SELECT on performance_schema; if that is off, it has no rows.
    oldest_transaction = (INNODB_TRANSACTIONS, PERFORMANCE_SCHEMA)
    sequencer_holder: tuple[str, ...] = (SEQUENCER_LOCK, LOCKED_ROWS)
    # Otherwise it is what the server has remembered for up to a day.
    table_size: tuple[str, ...] = (
        "SET SESSION information_schema_stats_expiry = 0",
        TABLE_SIZE,
        "SET SESSION information_schema_stats_expiry = DEFAULT",
    )
    greatest = "GREATEST"
    max_rows = 1000
    has_row_locks = True
    current_user = "USER()"
    session = SESSION_MYSQL

    def __init__(self) -> None:
        self._packets: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        self._committing: WeakSet[Any] = WeakSet()
        """Driver connections for which the server has confirmed that autocommit is on."""

    def rows(self, names: Sequence[str], count: int) -> str:
        first = ", ".join(f"%s AS {name}" for name in names)
        more = f" UNION ALL SELECT {', '.join(['%s'] * len(names))}"
        return f"(SELECT {first}{more * (count - 1)}) v"

    def force_index(self, name: str) -> str:
        return f" FORCE INDEX ({name})"

    def explained(self, select: str) -> str | None:
        return f"EXPLAIN FORMAT=TRADITIONAL {select}"

    def join_to(self, table: str, alias: str, index: str = "PRIMARY", *, left: bool = False) -> str:
        return f"{'LEFT JOIN' if left else 'STRAIGHT_JOIN'} {table} {alias}{self.force_index(index)}"

    def ending(self, column: str, characters: int) -> str:
        return f"RIGHT({column}, {characters})"

    def appended(self, column: str, text: str) -> str:
        return f"CONCAT({column}, '{text}')"

    def union(self, *selects: str) -> str:
        return f"({') UNION ALL ('.join(selects)})"

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

    def inserted_id(self, table: str, column: str, place: int, count: int) -> str:
        """Return LAST_INSERT_ID(), which is the id of the first row, or what follows it.

        An INSERT with VALUES gets consecutive ids, in every ``innodb_autoinc_lock_mode``:
        https://dev.mysql.com/doc/refman/8.4/en/innodb-auto-increment-handling.html
        """
        return f"LAST_INSERT_ID() + {place} * @@SESSION.auto_increment_increment" if place else "LAST_INSERT_ID()"

    def is_retryable(self, error: Error) -> bool:
        return isinstance(error, OperationalError) and error.args[:1] in (
            (DEADLOCK,),
            (LOCK_WAIT_TIMEOUT,),
            (CHANGED_SINCE_SNAPSHOT,),
        )

    def refuses_row(self, error: Error) -> bool:
        return super().refuses_row(error) or (
            isinstance(error, OperationalError) and error.args[:1] in ((SIGNALLED,), (INCORRECT_TEXT,))
        )

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
        # As cursor() does: the statement is written for the connection that will execute it.
        connection.close_if_health_check_failed()
        connection.ensure_connection()
        raw = connection.connection
        # Once per server connection, because it adds 6% to 12% to a publish. After that, the driver sees every change.
        if raw in self._committing and raw.get_autocommit():
            return value
        # Before that the driver cannot tell: MySQL's status flag says "autocommit" in a session that has it off by the
        # global value. The overflow is an error in every sql_mode; NULL would not be one in a multi-row INSERT.
        return f"IF(@@autocommit, {value}, ~0 + 1)"

    def has_committed(self, connection: BaseDatabaseWrapper) -> None:
        self._committing.add(connection.connection)

    def is_uncommitted(self, error: Error) -> bool:
        return error.args[:1] == (OUT_OF_RANGE,)

    def max_statement_bytes(self, connection: BaseDatabaseWrapper) -> int:
        # Read once per server connection, so that publishing does not pay for it.
        connection.ensure_connection()
        raw = connection.connection
        if raw not in self._packets:
            with connection.cursor() as cursor:
                cursor.execute("SELECT @@max_allowed_packet")
                (self._packets[raw],) = cursor.fetchone()
        return self._packets[raw]

    def hides_transactions(self, error: Error) -> bool:
        return error.args[:1] in ((NEEDS_PRIVILEGE,), (TABLE_ACCESS_DENIED,), (CANNOT_CONVERT,))


class MariaDB(MySQL):
    """The dialect of MariaDB 10.11 and later."""

    name = "mariadb"
    sequencer_holder = (LOCKED_ROWS,)
    table_size = (TABLE_SIZE,)


DIALECT, MARIADB = MySQL(), MariaDB()

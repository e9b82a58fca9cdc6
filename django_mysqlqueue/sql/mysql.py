"""MySQL 8.4 and later, and what MariaDB shares with it."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, WeakSet

from django.db import Error, OperationalError

from django_mysqlqueue.rules import NOW_MS_MYSQL, SESSION_MYSQL
from django_mysqlqueue.sql.base import Dialect

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper

DEADLOCK = 1213
LOCK_WAIT_TIMEOUT = 1205
NEEDS_PRIVILEGE = 1227
OUT_OF_RANGE = 1690
CHANGED_SINCE_SNAPSHOT = 1020
"""MariaDB with innodb_snapshot_isolation."""
READ_ONLY = frozenset({1290, 1792, 1836})
"""What a demoted primary answers to a write: it lives on, and so does the connection."""


_CHANGES_SESSION = re.compile(
    r"(?:\s|/\*.*?\*/|(?:--|#)[^\n]*\n)*"
    r"(?:BEGIN|START|SET\s+(?!TRANSACTION\b)|LOCK|FLUSH|XA|USE|CREATE\s+(?:OR\s+REPLACE\s+)?TEMPORARY)\b",
    re.IGNORECASE | re.DOTALL,
)


def changes_session(statement: str) -> bool:
    # SET TRANSACTION is for the next transaction alone. Django begins its own without any of these.
    return _CHANGES_SESSION.match(statement) is not None


def ends_transaction(error: Error) -> bool:
    return error.args[:1] in ((DEADLOCK,), (CHANGED_SINCE_SNAPSHOT,))


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
    join = "STRAIGHT_JOIN"
    # The privilege PROCESS is needed.
    oldest_transaction = (
        "SELECT TIMESTAMPDIFF(SECOND, trx_started, NOW()), trx_mysql_thread_id FROM information_schema.innodb_trx "
        "WHERE trx_mysql_thread_id > 0 ORDER BY trx_started LIMIT 1"
    )
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

    def ending(self, column: str, characters: int) -> str:
        return f"RIGHT({column}, {characters})"

    def union(self, select: str, count: int) -> str:
        return f"({select})" + f" UNION ALL ({select})" * (count - 1)

    def update_joined(
        self, table: str, names: Sequence[str], count: int, on: str, assign: Mapping[str, str], where: str = ""
    ) -> str:
        sets = ", ".join(f"s.{column} = {value}" for column, value in assign.items())
        condition = f" WHERE {where}" if where else ""
        return f"UPDATE {self.rows(names, count)} STRAIGHT_JOIN {table} s ON {on} SET {sets}{condition}"

    def delete_joined(self, table: str, names: Sequence[str], count: int, on: str, where: str = "") -> str:
        condition = f" WHERE {where}" if where else ""
        return f"DELETE s FROM {self.rows(names, count)} STRAIGHT_JOIN {table} s ON {on}{condition}"

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

    def is_denied(self, error: Error) -> bool:
        return error.args[:1] == (NEEDS_PRIVILEGE,)


DIALECT = MySQL()

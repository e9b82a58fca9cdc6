"""Asks the server whether statements wait for locks."""

from __future__ import annotations

from typing import Any

from django.db import connections

from tests.support.harness import USING

COUNT = "SHOW GLOBAL STATUS LIKE 'Innodb_row_lock_current_waits'"
"""MariaDB: its innodb_trx shows what was up to 0.1 s ago."""
WAITS = "SELECT COUNT(DISTINCT requesting_engine_transaction_id) FROM performance_schema.data_lock_waits"


class Waiting:
    """A connection of its own to a server that nobody else uses meanwhile."""

    def __init__(self) -> None:
        self._connection = connections.create_connection(USING)
        self._connection.inc_thread_sharing()
        with self._connection.cursor() as cursor:
            cursor.execute("SELECT VERSION()")
            self.is_mariadb = "mariadb" in cursor.fetchone()[0].lower()
        self._cursor: Any = self._connection.connection.cursor()  # the driver's own, without Django's wrappers

    def count(self) -> int:
        """How many transactions wait for a row lock, or for a named one, at this moment."""
        self._cursor.execute(COUNT if self.is_mariadb else WAITS)
        rows = int(self._cursor.fetchone()[-1])
        self._cursor.execute("SHOW PROCESSLIST")
        return rows + sum(session[6] == "User lock" for session in self._cursor.fetchall())

    def kill(self, session: int) -> None:
        self._cursor.execute(f"KILL CONNECTION {session}")

    def close(self) -> None:
        self._connection.close()

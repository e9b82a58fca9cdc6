"""Several statements in one packet, on the connections of the subscriber's own threads.

A statement whose answer is not needed at once waits for the next one, and is sent with it: START TRANSACTION with the
first lock, the rows of a claim with its COMMIT. The server executes them in their order and stops at the first one that
fails: what is behind it, and so the COMMIT, is not executed.

As ``connection``, this depends on undocumented parts of Django's connections.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from django.db import Error, OperationalError
from django.db.backends.utils import debug_transaction

from django_mysqlqueue.sql.mysql import idle_limit
from django_mysqlqueue.sql.statements import execute_unseen

MOST_VALUES = 1000
"""Maximum number of values of the statements that wait. If all are keys of the greatest length, they fit into a
megabyte, the smallest ``max_allowed_packet`` in use."""
OUT_OF_RANGE = 1690
CLIENT_ERRORS = range(2000, 3000)
"""Errors of the driver, above all of a connection that was lost. The others are the server's answer."""


class Waiting:
    """A statement that waits, and its answer after it was sent."""

    __slots__ = ("raises", "rows", "sql", "values")

    def __init__(self, sql: str, values: Sequence[Any] = (), *, raises: type[Exception] | None = None) -> None:
        self.sql = sql
        self.values = values
        self.raises = raises
        """What it raises instead of the error that a value is out of range."""
        self.rows: Sequence[tuple[Any, ...]] | None = None


START = "START TRANSACTION"


class Packets:
    """What waits to be sent on a connection, whose transactions it begins and ends.

    Args:
        connection: a connection to MySQL or MariaDB on which only the queue executes statements. After one that commits
            implicitly (DDL), each further one would commit by itself, and could not be rolled back.
    """

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self._waiting: list[Waiting] = []
        self._values = 0
        self.is_usable = False
        """Whether the connection takes several statements."""
        self._rested: Any = None
        self._limit = ""
        self.undone: Error | None = None
        """The last error of a statement that was sent with a COMMIT, which the server has not executed for it."""
        # The hook is Django's own for backends (``BaseDatabaseWrapper.set_autocommit``); that of SQLite uses it. It
        # saves switching autocommit off and later on again.
        connection._start_transaction_under_autocommit = self.begin
        connection._commit = self.commit
        connection._rollback = self.rollback
        connection.execute_wrappers.append(self._send_with)

    def probe(self, statement: str) -> None:
        """Execute the first statement of a session, and find out whether the connection takes several."""
        self._take()
        self.is_usable = False
        with self._connection.cursor() as cursor:
            if self._connection.get_connection_params().get("multi_statements", True):
                with contextlib.suppress(Error):
                    cursor.execute(f"{statement}; SELECT 1")
                    cursor.nextset()
                    self.is_usable = cursor.fetchall() == ((1,),)
                    return
            cursor.execute(statement)

    # -- statements ---------------------------------------------------------------

    def add(self, sql: str, values: Sequence[Any]) -> Waiting:
        """Let a statement of the open transaction wait."""
        if self._values + len(values) > MOST_VALUES:
            self.send()
        waiting = Waiting(sql, values)
        self._waiting.append(waiting)
        self._values += len(values)
        return waiting

    def require(self, rows: int, otherwise: type[Exception]) -> None:
        """Make the transaction fail unless the statement that was added last matches so many rows."""
        self._waiting.append(Waiting(f"SELECT IF(ROW_COUNT() = {rows}, 1, ~0 + 1)", raises=otherwise))

    def send(self) -> None:
        """Send what waits."""
        if self._waiting:
            last = self._waiting.pop()
            with self._connection.cursor() as cursor:
                try:
                    cursor.execute(last.sql, last.values)
                except Error as error:
                    raise _meant(error, last) from None
                last.rows = cursor.fetchall()

    def _send_with(  # An execute wrapper of Django.
        self,
        execute: Callable[..., Any],
        sql: str,
        params: Any,
        many: bool,  # noqa: FBT001
        context: dict[str, Any],
    ) -> Any:
        """Send what waits in one packet with a statement."""
        if not self._waiting:
            return execute(sql, params, many, context)
        if many or not self._connection.in_atomic_block:
            if many:
                self.send()
            self._take()  # Of a transaction that was lost with its connection.
            return execute(sql, params, many, context)
        waiting, cursor, place = self._take(), context["cursor"], 0
        text, values = _joined(waiting, sql if params is not None else sql.replace("%", "%%"), params or ())
        try:
            found = execute(text, values, many, context)
            for one in waiting:
                one.rows = cursor.fetchall()
                place += 1
                cursor.nextset()
        except Error as error:
            raise _meant(error, *waiting[place:]) from None
        return found

    def _take(self) -> list[Waiting]:
        waiting, self._waiting, self._values = self._waiting, [], 0
        return waiting

    # -- transactions -------------------------------------------------------------

    def begin(self) -> None:
        """Begin a transaction."""
        self._take()
        statements = [self._limit, START] if self.rests() else [START]
        self._rested = None
        if self.is_usable:
            self._waiting += map(Waiting, statements)
            return
        with self._connection.wrap_database_errors:
            for statement in statements:
                self._connection.connection.query(statement)

    def commit(self) -> None:
        """Commit, with the statements that wait."""
        waiting = self._take()
        if not waiting:
            type(self._connection)._commit(self._connection)
        elif waiting[-1].sql != START:  # If it was, nothing was executed.
            self._commit_with(waiting)

    def _commit_with(self, waiting: list[Waiting]) -> None:
        connection, place = self._connection, 0
        if connection.connection is None:
            raise OperationalError("The connection was lost before the COMMIT.")
        text, values = _joined(waiting, "COMMIT", ())
        try:
            with (
                debug_transaction(connection, text),
                connection.wrap_database_errors,
                contextlib.closing(connection.connection.cursor()) as cursor,
            ):
                cursor.execute(text, values)
                for one in waiting:
                    one.rows = cursor.fetchall()
                    place += 1
                    cursor.nextset()
        except Error as error:
            meant = _meant(error, *waiting[place:])
            if place < len(waiting) and error.args[:1] and error.args[0] not in CLIENT_ERRORS:
                self.undone = error
            if meant is not error:
                self._roll_back()
            raise meant from None

    def _roll_back(self) -> None:
        """Do what ``atomic()`` does after an error of the database, and only then."""
        try:
            self._connection.rollback()
        except Error:
            self._connection.close()

    def rollback(self) -> None:
        """Roll back, if anything was executed."""
        if not any(one.sql == START for one in self._take()):
            type(self._connection)._rollback(self._connection)

    # -- idle sessions --------------------------------------------------------------

    def rests(self) -> bool:
        """Return whether no transaction was begun since the session was last told to rest."""
        return self._rested is not None and self._rested is self._connection.connection

    def rest(self, seconds: float, idle: float) -> None:
        """Make the server keep the session for some seconds, and after the begin of a transaction for ``idle``."""
        execute_unseen(self._connection, idle_limit(seconds))
        self._rested, self._limit = self._connection.connection, idle_limit(idle)


def _joined(waiting: Iterable[Waiting], sql: str, values: Sequence[Any]) -> tuple[str, list[Any]]:
    """Return the text of a packet, and its values."""
    every = [*waiting, Waiting(sql, values)]
    return "; ".join(one.sql for one in every), [value for one in every for value in one.values]


def _meant(error: Error, *failed: Waiting) -> Exception:
    """Return what the first of some statements raises if the error is that of ``require``."""
    is_required = bool(failed) and failed[0].raises is not None and error.args[:1] == (OUT_OF_RANGE,)
    return failed[0].raises() if is_required and failed[0].raises is not None else error


def use_packets(connection: Any) -> None:
    """Send statements of the queue together on a connection to a server, see ``Packets``."""
    if connection.vendor == "mysql" and packets_of(connection) is None:
        connection.queue_packets = Packets(connection)


def packets_of(connection: Any) -> Packets | None:
    """Return the packets of a connection; None if each statement is sent by itself."""
    return getattr(connection, "queue_packets", None)

"""Several statements of a transaction of the queue's in one packet.

A statement whose answer is not needed at once waits for the next one, and is sent with it: START TRANSACTION with the
first lock, the rows of a claim with its COMMIT. The server executes them in their order and stops at the first one that
fails: what is behind it, and so the COMMIT, is not executed.

As ``connection``, this depends on undocumented parts of Django's connections.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from django.db import Error, OperationalError
from django.db.backends.utils import debug_transaction

from django_mysqlqueue.sql.mysql import idle_limit
from django_mysqlqueue.sql.statements import execute_unseen

LONGEST = 131_072
"""Characters of the statements in a packet, unless it is one statement. With four bytes per character and escaped, they
fit into a megabyte, the smallest ``max_allowed_packet`` in use."""
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
AND_ON = "COMMIT; SET autocommit=1"
"""The end of a transaction that Django has begun by switching autocommit off. It then need not switch it on again."""


class Packets:
    """What waits to be sent on a connection, whose transactions it begins and ends.

    Args:
        connection: a connection to MySQL or MariaDB on which only the queue executes statements. After one that commits
            implicitly (DDL), each further one would commit by itself, and could not be rolled back.
    """

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self._waiting: list[Waiting] = []
        self._length = 0
        self.is_usable = False
        """Whether the connection takes several statements."""
        self._rested: Any = None
        self._limit = ""
        self.undone: Error | None = None
        """The last error of a statement that was sent with a COMMIT, which the server has not executed for it."""
        # The first hook is Django's own for backends (``BaseDatabaseWrapper.set_autocommit``); that of SQLite uses it.
        # It saves switching autocommit off and later on again.
        hooks = {"_start_transaction_under_autocommit": self.begin, "_commit": self.commit, "_rollback": self.rollback}
        self._before = {name: vars(connection).get(name) for name in hooks}
        vars(connection).update(hooks)
        self._is_unseen = bool(getattr(connection, "ends_together", False))
        """Whether execute wrappers watch what handlers do, and must not see what is added to it."""
        # Otherwise they see whole packets.
        wrappers = connection.execute_wrappers
        wrappers.insert(len(wrappers) if self._is_unseen else 0, self._send_with)

    # -- statements ---------------------------------------------------------------

    def add(self, sql: str, values: Sequence[Any]) -> Waiting:
        """Let a statement of the open transaction wait."""
        self._make_room(sql, values)
        waiting = Waiting(sql, values)
        self._waiting.append(waiting)
        return waiting

    def _make_room(self, sql: str, values: Iterable[Any]) -> None:
        """Send what waits if it is too long to be sent with a statement."""
        length = len(sql) + sum([len(value) for value in values if value.__class__ is str or value.__class__ is bytes])
        if self._length + length > LONGEST:
            self.send()
        self._length += length

    def require(self, rows: int, otherwise: type[Exception]) -> None:
        """Make the transaction fail unless the statement that was added last matches so many rows."""
        self._waiting.append(Waiting(f"SELECT IF(ROW_COUNT() = {rows}, 1, ~0 + 1)", raises=otherwise))

    def send(self) -> None:
        """Send what waits."""
        if self._waiting:
            last, self._length = self._waiting.pop(), 0
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
        if self._waiting and not self._connection.in_atomic_block:
            self._take()  # Of a transaction that was lost with its connection.
        if self._waiting:
            self.send() if many else self._make_room(sql, params or ())
        if not self._waiting:
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
        waiting, self._waiting, self._length = self._waiting, [], 0
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
        raw = self._connection.connection
        if waiting or (raw is not None and not raw.get_autocommit()):
            if not waiting or waiting[-1].sql != START:  # If it was, nothing was executed.
                self._commit_with(waiting)
        else:
            type(self._connection)._commit(self._connection)

    def _commit_with(self, waiting: list[Waiting]) -> None:
        connection, place = self._connection, 0
        if connection.connection is None:
            raise OperationalError("The connection was lost before the COMMIT.")
        text, values = _joined(waiting, "COMMIT" if connection.connection.get_autocommit() else AND_ON, ())
        try:
            with self._cursor(text) as cursor:
                cursor.execute(text, values)
                for one in waiting:
                    one.rows = cursor.fetchall()
                    place += 1
                    cursor.nextset()
                with contextlib.suppress(Error, connection.Database.Error):  # It has committed.
                    cursor.nextset()
        except Error as error:
            meant = _meant(error, *waiting[place:])
            if place < len(waiting) and error.args[:1] and error.args[0] not in CLIENT_ERRORS:
                self.undone = error
            if meant is not error:
                self._roll_back()
            raise meant from None

    @contextlib.contextmanager
    def _cursor(self, text: str) -> Iterator[Any]:
        """Yield a cursor for the end of a transaction."""
        connection = self._connection
        if not self._is_unseen:
            with connection.cursor() as cursor:
                yield cursor
            return
        with (
            debug_transaction(connection, text),
            connection.wrap_database_errors,
            contextlib.closing(connection.connection.cursor()) as cursor,
        ):
            yield cursor

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
        self._connection.ensure_connection()
        execute_unseen(self._connection, idle_limit(seconds))
        self._rested, self._limit = self._connection.connection, idle_limit(idle)

    def detach(self) -> None:
        """Leave the connection as it was."""
        hooks = vars(self._connection)
        for name, before in (*self._before.items(), ("queue_packets", None)):
            if before is None:
                del hooks[name]
            else:
                hooks[name] = before
        self._connection.execute_wrappers.remove(self._send_with)


def _joined(waiting: Iterable[Waiting], sql: str, values: Sequence[Any]) -> tuple[str, list[Any]]:
    """Return the text of a packet, and its values."""
    every = [*waiting, Waiting(sql, values)]
    return "; ".join(one.sql for one in every), [value for one in every for value in one.values]


def _meant(error: Error, *failed: Waiting) -> Exception:
    """Return what the first of some statements raises if the error is that of ``require``."""
    raises = failed[0].raises if failed else None
    return error if raises is None or error.args[:1] != (OUT_OF_RANGE,) else raises()


_takes: WeakKeyDictionary[Any, bool] = WeakKeyDictionary()
"""By connection of the driver, whether it takes several statements."""


def takes_several(connection: Any) -> bool:
    """Return whether a connection takes several statements, by trying it once.

    Behind a proxy that sends them where the first one leads, set ``"multi_statements": False`` in ``OPTIONS``.
    """
    raw = connection.connection
    if raw not in _takes:
        _takes[raw] = False
        if connection.get_connection_params().get("multi_statements", True):
            with contextlib.suppress(connection.Database.Error), contextlib.closing(raw.cursor()) as cursor:
                cursor.execute("SELECT 1; SELECT 2")
                cursor.nextset()
                _takes[raw] = cursor.fetchall() == ((2,),)
    return _takes[raw]


@contextlib.contextmanager
def together(connection: Any) -> Iterator[None]:
    """Send the statements of a transaction that begins and ends in the block together, if the connection takes several.

    It is a connection of the project's. What the queue executes in the transaction, and what receivers of its signals
    do, must neither begin nor end one.
    """
    connection.close_if_health_check_failed()
    if (
        connection.vendor != "mysql"
        or connection.in_atomic_block
        or not connection.get_autocommit()
        or packets_of(connection) is not None
        or not takes_several(connection)
    ):
        yield
        return
    packets = connection.queue_packets = Packets(connection)
    packets.is_usable = True
    try:
        yield
    finally:
        packets.detach()


@contextlib.contextmanager
def ending(connection: Any) -> Iterator[Callable[[], None]]:
    """Yield a function that makes the rest of the open transaction, up to its COMMIT, wait to be sent together.

    Only on connections of handlers' threads (``ends_together``).
    """
    packets: Packets | None = None

    def begin() -> None:
        nonlocal packets
        is_outermost = len(connection.atomic_blocks) == 1 and not connection.needs_rollback
        if not is_outermost or not getattr(connection, "ends_together", False) or packets_of(connection) is not None:
            return
        if takes_several(connection):
            packets = connection.queue_packets = Packets(connection)
            packets.is_usable = True

    try:
        yield begin
    finally:
        if packets is not None:
            packets.detach()


def use_packets(connection: Any) -> None:
    """Send statements of the queue together on a connection to a server, see ``Packets``."""
    if connection.vendor == "mysql" and packets_of(connection) is None:
        connection.queue_packets = Packets(connection)


def packets_of(connection: Any) -> Packets | None:
    """Return the packets of a connection; None if each statement is sent by itself."""
    return getattr(connection, "queue_packets", None)

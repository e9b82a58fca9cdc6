"""Several statements of a transaction of the queue's in one packet.

A statement whose answer is not needed at once waits for the next one, and is sent with it: START TRANSACTION with the
first lock, the rows of a claim with its COMMIT. The server executes them in their order and stops at the first one that
fails: what is behind it, and so the COMMIT, is not executed.

As ``connection``, this depends on undocumented parts of Django's connections.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from django.db import DatabaseError, Error, IntegrityError, OperationalError
from django.db.backends.utils import debug_transaction

from django_mysqlqueue.sql.mysql import idle_limit
from django_mysqlqueue.sql.statements import execute_unseen

LONGEST = 131_072
"""Characters of the statements in a packet, unless it is one statement. With four bytes per character and escaped, they
fit into a megabyte, the smallest ``max_allowed_packet`` in use."""
OUT_OF_RANGE = 1690
OF_INTEGRITY = (1048, OUT_OF_RANGE, 3819, 4025)
"""Errors that Django makes an IntegrityError, but only of the first statement in a packet."""
CLIENT_ERRORS = range(2000, 3000)
"""Errors of the driver, above all of a connection that was lost. Others, from 1000 on, are the server's answer."""
START, COMMIT = "START TRANSACTION", "COMMIT"
AUTOCOMMIT = "SET autocommit=1"
"""Ends, behind the COMMIT, what Django has begun by switching autocommit off. It then need not switch it on again."""


class Waiting:
    """A statement that waits, and its answer after it was sent."""

    __slots__ = ("raises", "rows", "sql", "values")

    def __init__(self, sql: str, values: Sequence[Any] = (), *, raises: Callable[[], Exception] | None = None) -> None:
        self.sql = sql
        self.values = values
        self.raises = raises
        """Returns what it raises instead of the error that a value is out of range."""
        self.rows: Sequence[tuple[Any, ...]] | None = None


class Packets:
    """What waits to be sent on a connection, whose transactions it begins and ends.

    Args:
        connection: a connection to MySQL or MariaDB on which only the queue executes statements. After one that commits
            implicitly (DDL), each further one would commit by itself, and could not be rolled back.
        once: whether to leave the connection as it was with the end of the transaction, before hooks run.
        unseen: whether the connection is that of a handler's thread: its session is watched by an execute wrapper, and
            none must see the end of the transaction.
        ahead: whether autocommit stays off after the COMMIT, see ``ending``.
    """

    def __init__(self, connection: Any, *, once: bool = False, unseen: bool = False, ahead: bool = False) -> None:
        self._connection = connection
        self._once = once
        self._unseen = unseen
        self._ahead = ahead
        self._waiting: list[Waiting] = []
        self._length = 0
        self._text = ""
        """The packet on its way."""
        self._sent: list[Waiting] = []
        """Its statements."""
        self._place = 0
        """The index of the one whose answer is read."""
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
        # The project's wrappers see whole packets, their errors, and how long they take. What watches a handler's
        # session is the first wrapper, and would have to take a packet for something that may have changed it.
        connection.execute_wrappers.insert(1 if unseen else 0, self._add_waiting)
        connection.execute_wrappers.append(self._read_answers)
        connection.queue_packets = self

    def detach(self) -> None:
        """Leave the connection as it was."""
        hooks = vars(self._connection)
        if hooks.pop("queue_packets", None) is None:
            return  # It has been left.
        for name, before in self._before.items():
            if before is None:
                del hooks[name]
            else:
                hooks[name] = before
        self._connection.execute_wrappers.remove(self._add_waiting)
        self._connection.execute_wrappers.remove(self._read_answers)

    # -- statements ---------------------------------------------------------------

    def add(self, sql: str, values: Sequence[Any]) -> Waiting:
        """Let a statement of the open transaction wait."""
        if self._connection.needs_rollback:
            self._connection.validate_no_broken_transaction()
        self._make_room(sql, values)
        waiting = Waiting(sql, values)
        self._waiting.append(waiting)
        return waiting

    def require(self, rows: int, otherwise: Callable[[], Exception]) -> None:
        """Make the transaction fail unless the statement that was added last matches so many rows."""
        self._waiting.append(Waiting(f"SELECT IF(ROW_COUNT() = {rows}, 1, ~0 + 1)", raises=otherwise))

    def send(self) -> None:
        """Send what waits."""
        if waiting := self._take():
            self._execute(waiting)

    def _execute(self, statements: list[Waiting]) -> None:
        """Send statements, and read all their answers."""
        self._text, values = _joined(statements)
        self._sent, self._place = statements, 0
        with self._connection.cursor() as cursor:
            cursor.execute(self._text, values)
            self._require_answers()

    def _require_answers(self) -> None:
        """Raise an error if a wrapper of the project has sent something else than the packet."""
        if self._sent[0].rows is None:
            raise OperationalError("An execute wrapper has changed a packet: its answers were not read.")

    def _make_room(self, sql: str, values: Sequence[Any]) -> None:
        """Send what waits if it is too long to be sent with a statement."""
        length = len(sql) + sum([len(value) for value in values if value.__class__ is str or value.__class__ is bytes])
        if self._length + length > LONGEST:
            self.send()
        self._length += length

    def _take(self) -> list[Waiting]:
        waiting, self._waiting, self._length = self._waiting, [], 0
        if waiting:
            self._rested = None
        return waiting

    def _drop(self) -> None:
        """Forget what waits: nothing of it was executed."""
        rested = self._rested
        self._take()
        self._rested = rested

    # -- execute wrappers -----------------------------------------------------------

    def _add_waiting(  # Outside of the project's wrappers.
        self,
        execute: Callable[..., Any],
        sql: Any,
        params: Any,
        many: bool,  # noqa: FBT001
        context: dict[str, Any],
    ) -> Any:
        """Send what waits in one packet with a statement."""
        if not self._waiting or context["connection"] is not self._connection:
            return execute(sql, params, many, context)
        if not self._connection.in_atomic_block:
            self._drop()  # Of a transaction that was lost with its connection.
        elif many or not isinstance(sql, str) or not isinstance(params, (list, tuple, type(None))):
            self.send()
        else:
            self._make_room(sql, params or ())
        waiting = self._take()
        if not waiting:
            return execute(sql, params, many, context)
        last = Waiting(sql if params is not None else sql.replace("%", "%%"), params or ())
        self._sent = [*waiting, last]
        self._text, values = _joined(self._sent)
        last.rows = ()  # The caller reads it.
        found = execute(self._text, values, many, context)
        self._require_answers()
        return found

    def _read_answers(  # The innermost wrapper.
        self,
        execute: Callable[..., Any],
        sql: Any,
        params: Any,
        many: bool,  # noqa: FBT001
        context: dict[str, Any],
    ) -> Any:
        """Read the answers of a packet."""
        # A wrapper of the project may have added a comment.
        if not self._text or self._text not in sql or context["connection"] is not self._connection:
            return execute(sql, params, many, context)
        self._text = ""
        with self._meaning(self._sent):
            execute(sql, params, many, context)
            self._read(context["cursor"], self._sent)
        return context["cursor"].rowcount

    def _read(self, cursor: Any, sent: Sequence[Waiting]) -> None:
        """Read the answers of a packet, but not that of a statement that has rows: its caller reads them."""
        for one in sent:
            if one.rows is not None:
                return
            one.rows = cursor.fetchall()
            self._place += 1
            if not cursor.nextset() and self._place < len(sent):
                raise OperationalError("The answers of some statements of a packet are missing.")

    @contextlib.contextmanager
    def _meaning(self, sent: Sequence[Waiting]) -> Iterator[None]:
        """Raise what the errors of the statements of a packet mean."""
        self._place = 0
        try:
            yield
        except Error as error:
            raises = sent[self._place].raises if self._place < len(sent) else None
            code = error.args[0] if error.args else 0
            if raises is not None and code == OUT_OF_RANGE:
                raise raises() from None
            if code in OF_INTEGRITY and isinstance(error, OperationalError):
                raise IntegrityError(*error.args) from error
            raise

    # -- transactions -------------------------------------------------------------

    def begin(self) -> None:
        """Begin a transaction."""
        self._drop()
        statements = [self._limit, START] if self.rests() else [START]
        if self.is_usable:
            self._waiting += map(Waiting, statements)
            return
        self._rested = None
        with self._connection.wrap_database_errors:
            for statement in statements:
                self._connection.connection.query(statement)

    def commit(self) -> None:
        """Commit, with the statements that wait."""
        try:
            if self._waiting and self._waiting[-1].sql == START:
                self._drop()  # Nothing was executed.
            elif self._waiting or self._unseen:
                self._commit_with(self._take())
            else:
                type(self._connection)._commit(self._connection)
        except DatabaseError:
            raise  # ``atomic()`` rolls back.
        except BaseException:
            self._roll_back()
            raise
        if self._once:
            self.detach()

    def _commit_with(self, waiting: list[Waiting]) -> None:
        connection = self._connection
        if connection.connection is None:
            raise OperationalError("The connection was lost before the COMMIT.")
        every = [*waiting, Waiting(COMMIT)]
        if not connection.connection.get_autocommit() and not self._stays_begun():
            every.append(Waiting(AUTOCOMMIT))
        try:
            if self._unseen:
                self._execute_unseen(every)
            else:
                self._execute(every)
        except Error as error:
            code = error.args[0] if error.args else 0
            if self._place > len(waiting):
                return  # It has committed, and the next statement of the session will tell that it is lost.
            if self._place < len(waiting) and isinstance(code, int) and code >= 1000 and code not in CLIENT_ERRORS:
                self.undone = error
            raise

    def _stays_begun(self) -> bool:
        """Return whether autocommit stays off after the COMMIT, because no hook of the project runs behind it."""
        return self._ahead and not self._connection.run_on_commit

    def set_autocommit(self, autocommit: bool) -> None:  # noqa: FBT001
        """Leave autocommit off after a COMMIT, where Django switches it on."""
        connection = self._connection
        if autocommit and connection.run_commit_hooks_on_set_autocommit_on and self._stays_begun():
            connection.begun_ahead = connection.connection
        else:
            type(connection)._set_autocommit(connection, autocommit)

    def _execute_unseen(self, statements: list[Waiting]) -> None:
        connection = self._connection
        text, values = _joined(statements)
        with (
            debug_transaction(connection, text),
            self._meaning(statements),
            connection.wrap_database_errors,
            contextlib.closing(connection.connection.cursor()) as cursor,
        ):
            cursor.execute(text, values)
            self._read(cursor, statements)

    def _roll_back(self) -> None:
        """Do what ``atomic()`` does after a ``DatabaseError``, and only then."""
        try:
            self._connection.rollback()
        except Error:
            self._connection.close()

    def rollback(self) -> None:
        """Roll back, if anything was executed."""
        if any(one.sql == START for one in self._waiting):
            self._drop()
        else:
            self._drop()
            type(self._connection)._rollback(self._connection)
        if self._once:
            self.detach()

    # -- idle sessions --------------------------------------------------------------

    def rests(self) -> bool:
        """Return whether no transaction was begun since the session was last told to rest."""
        return self._rested is not None and self._rested is self._connection.connection

    def rest(self, seconds: float, idle: float) -> None:
        """Make the server keep the session for some seconds, and after the begin of a transaction for ``idle``."""
        self._connection.ensure_connection()
        execute_unseen(self._connection, idle_limit(seconds))
        self._rested, self._limit = self._connection.connection, idle_limit(idle)


def _joined(statements: Sequence[Waiting]) -> tuple[str, list[Any]]:
    """Return the text of a packet, and its values."""
    return "; ".join([one.sql for one in statements]), [value for one in statements for value in one.values]


_takes: WeakKeyDictionary[Any, bool] = WeakKeyDictionary()
"""By connection of the driver, whether it takes several statements."""


def takes_several(connection: Any) -> bool:
    """Return whether a connection takes several statements, by trying it once.

    Behind a proxy that sends them where the first one leads, set ``"multi_statements": False`` in ``OPTIONS``.
    """
    raw = connection.connection
    if raw not in _takes:
        _takes[raw] = False
        if connection.settings_dict["OPTIONS"].get("multi_statements", True):
            with contextlib.suppress(connection.Database.Error), contextlib.closing(raw.cursor()) as cursor:
                cursor.execute("SELECT 1; SELECT 2")
                cursor.nextset()
                _takes[raw] = cursor.fetchall() == ((2,),)
    return _takes[raw]


@contextlib.contextmanager
def together(connection: Any) -> Iterator[None]:
    """Send the statements of a transaction that begins and ends in the block together, if the connection takes several.

    It is a connection of the project's: nothing but the queue may execute statements in the transaction.
    """
    connection.close_if_health_check_failed()
    if (
        connection.vendor != "mysql"
        or connection.in_atomic_block
        or getattr(connection, "ends_together", False)  # What handlers do is watched.
        or not connection.get_autocommit()
        or packets_of(connection) is not None
        or not takes_several(connection)
    ):
        yield
        return
    packets = Packets(connection, once=True)
    packets.is_usable = True
    try:
        yield
    finally:
        packets.detach()


@contextlib.contextmanager
def ending(connection: Any, *, ahead: bool = False) -> Iterator[Callable[[], None]]:
    """Yield a function that makes the rest of the open transaction, up to its COMMIT, wait to be sent together.

    Only on connections of handlers' threads (``ends_together``).

    ``ahead``: whether to leave autocommit off after the COMMIT. The next transaction of the thread then begins with its
    first statement, without a round trip. Before anything else is done with the connection, ``end_ahead`` must switch
    autocommit on; a connection whose owner sees to that has the attribute ``begun_ahead``.
    """
    ahead = ahead and hasattr(connection, "begun_ahead")
    packets: Packets | None = None

    def begin() -> None:
        nonlocal packets
        is_outermost = len(connection.atomic_blocks) == 1 and not connection.needs_rollback
        if not is_outermost or not getattr(connection, "ends_together", False) or packets_of(connection) is not None:
            return
        if takes_several(connection):
            packets = Packets(connection, once=True, unseen=True, ahead=ahead)
            packets.is_usable = True
            if ahead:  # Not one of the hooks: Django calls it after the COMMIT, which detaches those.
                vars(connection)["_set_autocommit"] = packets.set_autocommit

    try:
        yield begin
    finally:
        if packets is not None:
            packets.detach()
            vars(connection).pop("_set_autocommit", None)


def use_packets(connection: Any) -> None:
    """Send statements of the queue together on a connection to a server, see ``Packets``."""
    if connection.vendor == "mysql" and packets_of(connection) is None:
        Packets(connection)


def packets_of(connection: Any) -> Packets | None:
    """Return the packets of a connection; None if each statement is sent by itself."""
    return getattr(connection, "queue_packets", None)

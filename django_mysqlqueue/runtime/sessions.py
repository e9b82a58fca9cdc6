"""Database connections of the subscriber's threads.

A process can freeze at any instruction and keep its row locks. Each kind of thread therefore tells the server after
how long to close an idle session.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Any

from django.db import Error, OperationalError, connections, transaction
from django.db.backends.signals import connection_created

from django_mysqlqueue.runtime import forks
from django_mysqlqueue.sql import dialect_of
from django_mysqlqueue.sql.connection import (
    begin_in_one_statement,
    changes_session,
    drop_connection,
    ends_transaction,
    expires_at,
    forget_queries,
    has_failed,
    has_unread,
    in_savepoint,
    is_astray,
    is_read_only,
    keeps_transaction,
    left_open,
    limited_settings,
    must_roll_back,
    outermost_block,
)

_role = threading.local()
_distrusted: dict[str, float] = {}
"""By alias, a monotonic time: connections opened before may lead to a server that is no longer the primary."""


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Session timeouts in seconds."""

    idle: float
    """How long the client may send nothing; must be above its longest interval between two statements."""
    lock_wait: float
    network: float
    read: float
    """How long the client waits for an answer."""


def _timeouts() -> dict[str, Timeouts | None]:
    """Return, by alias, the timeouts of this thread's connections to databases of the queue."""
    found: dict[str, Timeouts | None] = getattr(_role, "timeouts", {})
    return found


def adopt(using: str, timeouts: Timeouts, *, watch: bool = False) -> None:
    """Set timeouts, and the variables that the queue needs, on each connection of this thread to ``using``.

    The project's ``OPTIONS`` take precedence over the timeouts. AUTOCOMMIT is switched on, since without it nothing
    that the queue does would be committed.

    Args:
        using: alias of the queue's database.
        timeouts: the session timeouts.
        watch: whether to note for ``tidy`` the statements that change a session, on connections to any database.
    """
    forks.guard()
    _take(using, timeouts)
    if watch:  # a handler's thread
        _role.changed = set()
        # After the project's receivers, which may set up its sessions.
        connection_created.connect(_watch, dispatch_uid="django_mysqlqueue.runtime.sessions.watch")
    connection = connections[using]
    connection.settings_dict = {**limited_settings(connection, read=timeouts.read), "AUTOCOMMIT": True}
    if not watch:
        begin_in_one_statement(connection)


def _take(using: str, timeouts: Timeouts | None) -> None:
    _role.timeouts = {**_timeouts(), using: timeouts}
    # After the project's receivers, which may set up its sessions.
    connection_created.connect(_set_up, dispatch_uid="django_mysqlqueue.runtime.sessions")


@contextlib.contextmanager
def sound(using: str) -> Iterator[None]:
    """Set the session variables that the queue needs on this thread's connections to ``using``, for a command.

    A connection that is already open is changed only if it has to be. At the end, a connection that was changed or
    opened here is closed: the project may run the command from a process of its own, whose next statement must find
    the project's variables. Inside a transaction (a ``TestCase``) nothing is changed.
    """
    connection = connections[using]
    if connection.in_atomic_block:
        yield
        return
    outer = _timeouts()
    _take(using, outer.get(using))
    try:
        before = connection.connection
        try:
            if before is not None and dialect_of(connection).session_faults(connection):
                _execute_set_up(connection)
                before = None
        except OperationalError:
            # The server has closed it. The command opens another one, or reports that the server does not answer.
            drop_connection(connection)
            before = None
        try:
            yield
        finally:
            if connection.connection is not before:
                drop_connection(connection)
    finally:
        _role.timeouts = outer


def _set_up(*, connection: Any, **kwargs: Any) -> None:
    if connection.alias not in _timeouts():
        return
    _role.opened_at = {**getattr(_role, "opened_at", {}), connection.alias: time.monotonic()}
    _execute_set_up(connection)


def _execute_set_up(connection: Any) -> None:
    timeouts = _timeouts()[connection.alias]
    dialect = dialect_of(connection)
    more = (
        {}
        if timeouts is None
        else dialect.session_timeouts(idle=timeouts.idle, lock_wait=timeouts.lock_wait, network=timeouts.network)
    )
    statement = dialect.set_session(more)
    if statement is not None:
        with connection.cursor() as cursor:
            cursor.execute(statement)


def _watch(*, connection: Any, **kwargs: Any) -> None:
    changed: set[str] | None = getattr(_role, "changed", None)
    if changed is None:
        return
    changed.discard(connection.alias)
    if _note_changes not in connection.execute_wrappers:
        # At the front, because ``execute_wrapper()`` of a running handler removes the last one at its end.
        connection.execute_wrappers.insert(0, _note_changes)


def _note_changes(execute: Any, sql: Any, params: Any, many: bool, context: dict[str, Any]) -> Any:  # noqa: FBT001
    connection = context["connection"]
    used: set[str] | None = getattr(_role, "used", None)
    if used is not None:
        used.add(connection.alias)
    changed: set[str] | None = getattr(_role, "changed", None)  # None if the connection was lent to another thread.
    if changed is not None and changes_session(connection, str(sql)):
        changed.add(connection.alias)
    try:
        return execute(sql, params, many, context)
    except Error as error:
        _doubt(connection, str(sql), error)
        raise


def _doubt(connection: Any, statement: str, error: Error) -> None:
    """Mark the transaction for rollback if a handler could catch the error and commit an ack without earlier writes.

    Inside a savepoint nothing has to be done: Django releases it at its end, and that raises an error if the server
    has rolled back everything. (A mark would roll back to the savepoint without an error.)
    """
    block = outermost_block(connection)
    if block is None or in_savepoint(connection):
        return
    if block is getattr(_role, "transaction", None):
        is_lost = not keeps_transaction(connection, statement, error)
    else:
        # The queue guarantees nothing for a transaction that the handler opened itself: interfere as little as needed.
        is_lost = ends_transaction(connection, error)
    if is_lost:
        must_roll_back(connection, error)


@contextlib.contextmanager
def transaction_of_handler(using: str) -> Iterator[None]:
    """Run the block in the transaction of an atomic handler."""
    block = transaction.atomic(using)
    outer, _role.transaction = getattr(_role, "transaction", None), block
    try:
        with block:
            yield
    finally:
        _role.transaction = outer


def is_sound(connection: Any, error: BaseException, *, before: Any) -> bool:
    """Return whether the connection has survived an error and leads to a server that accepts writes.

    Args:
        connection: Django's connection.
        error: the error.
        before: the driver's connection before the error. At the end of a transaction that cannot be rolled back,
            Django opens another one by itself.
    """
    if connection.connection is None or connection.connection is not before or is_read_only(connection, error):
        return False
    return bool(connection.is_usable())


def distrust(using: str) -> None:
    """Note that the server of ``using`` did not answer for a while: its name may lead to another server now.

    A connection to a demoted primary may stay open, answer every read from old data, and never fail.
    """
    _distrusted[using] = time.monotonic()


def renew() -> bool:
    """Drop this thread's connections that were opened before ``distrust`` was called; return whether there was one."""
    dropped = False
    for using in _distrusted.keys() & _timeouts().keys():
        is_open = connections[using].connection is not None
        if is_open and getattr(_role, "opened_at", {}).get(using, 0.0) <= _distrusted[using]:
            drop_connection(connections[using])
            dropped = True
    return dropped


IDLE = 0.5
"""Seconds without a message after which a connection is checked by a round trip."""


def refresh(*, idle: bool) -> None:
    """Drop, before a message, the connections that the server has closed since the previous message.

    Args:
        idle: whether to ping all connections, after a pause, because a route may be lost without a trace. If False,
            only those that have something to read are pinged.
    """
    # Not connections.all() for each message: it asks for every alias of the project.
    for connection in connections.all(initialized_only=True) if idle else getattr(_role, "open", ()):
        is_open = connection.connection is not None
        if is_open and (idle or has_unread(connection)) and not connection.is_usable():
            drop_connection(connection)


_uses: dict[Hashable, dict[str, int]] = {}
"""By handler, the aliases that its calls have used in any thread of this process, and how many calls ago."""
FORGOTTEN_AFTER = 100
"""Calls in a row without use after which an alias is no longer opened for a handler."""


def begin_call() -> set[str] | None:
    """Note from now on, before a handler's call, the aliases that this thread uses.

    Returns:
        The state of the outer call, for ``end_call``: a handler may itself run handlers (``EAGER``).
    """
    before: set[str] | None = getattr(_role, "used", None)
    _role.used = set()
    return before


def end_call(handler: Hashable, before: set[str] | None) -> None:
    """Remember for ``connect``, after a handler's call, the aliases that it used.

    Args:
        handler: identifies the handler.
        before: the return value of ``begin_call``.
    """
    used: set[str] = _role.used
    _role.used = before
    uses = _uses.get(handler)
    if uses is None:
        if not used:
            return
        uses = _uses.setdefault(handler, {})
    for alias in used:
        uses[alias] = 0
    if len(uses) == len(used):
        return
    for alias in uses.keys() - used:
        ago = uses.get(alias, 0) + 1
        if ago > FORGOTTEN_AFTER:
            uses.pop(alias, None)
        else:
            uses[alias] = ago


def connect(handler: Hashable, *, insist: bool) -> None:
    """Open the connections that the handler's latest calls have used, if they are closed.

    An error here would otherwise be an error of the handler's first query. A handler that uses no database does not
    wait for any.

    Args:
        handler: identifies the handler.
        insist: if False, ignore an alias that cannot be opened, unless it is the queue's: the handler may not need it.

    Raises:
        django.db.Error: a connection cannot be opened.
    """
    uses = _uses.get(handler)
    if not uses:
        return
    is_open = {one.alias for one in getattr(_role, "open", ()) if one.connection is not None}
    for alias in tuple(uses):
        if alias in is_open or alias not in connections:
            continue
        try:
            connections[alias].ensure_connection()
        except Error:
            if insist or alias in _timeouts():
                raise
            uses.pop(alias, None)  # The next calls do not wait for it either, until one has used it.


def tidy() -> None:
    """Clean up connections between two messages, so that nothing a handler left behind reaches the next one.

    Unlike ``close_old_connections``, this keeps sound connections if CONN_MAX_AGE is 0: in a measurement, new
    connections for each message alone cost 45%. A connection on which an error occurred is dropped without a check,
    because a demoted primary answers a ping and refuses every write, so each following message would fail too. A
    connection whose session the handler has changed by SQL is dropped too: in a transaction begun that way, the writes
    of the next handlers would never be committed.
    """
    changed: set[str] = getattr(_role, "changed", set())
    still_open: list[Any] = []
    _role.open = still_open
    for connection in connections.all(initialized_only=True):
        forget_queries(connection)
        if connection.connection is None:
            continue
        expires = expires_at(connection)
        is_expired = expires is not None and time.monotonic() >= expires
        astray = is_astray(connection) or connection.alias in changed
        if left_open(connection) or is_expired or astray or has_failed(connection):
            drop_connection(connection)
        else:
            still_open.append(connection)

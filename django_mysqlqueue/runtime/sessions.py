"""Database connections of the subscriber's threads.

A process can freeze at any instruction and keep its row locks. Each kind of
thread therefore tells the server how long a silent client may live.
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
"""By alias: connections that were opened before this (monotonic) may be to a server that is no longer the primary."""


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Session time-outs in seconds."""

    idle: float
    """How long the client may be silent; above the longest interval at which it speaks."""
    lock_wait: float
    network: float
    read: float
    """How long the client waits for an answer."""


def adopt(using: str, timeouts: Timeouts, *, watch: bool = False) -> None:
    """Set these time-outs, and the variables that the queue needs, on each connection of this thread to ``using``.

    Options of the project's own win over the time-outs. With AUTOCOMMIT off nothing
    that the queue does would ever be committed. With ``watch`` statements that change a
    session are noted for ``tidy``, on connections to any database.
    """
    forks.guard()
    _take(using, timeouts)
    if watch:  # a handler's thread
        _role.changed = set()
        # Behind the receivers of the project, which may set up its sessions.
        connection_created.connect(_watch, dispatch_uid="django_mysqlqueue.runtime.sessions.watch")
    connection = connections[using]
    connection.settings_dict = {**limited_settings(connection, read=timeouts.read), "AUTOCOMMIT": True}
    if not watch:
        begin_in_one_statement(connection)


def _take(using: str | None, timeouts: Timeouts | None) -> None:
    _role.using, _role.timeouts = using, timeouts
    # Behind the receivers of the project, which may set up its sessions.
    connection_created.connect(_set_up, dispatch_uid="django_mysqlqueue.runtime.sessions")


@contextlib.contextmanager
def sound(using: str) -> Iterator[None]:
    """Set the session variables that the queue needs on this thread's connections to ``using``, for a command.

    A connection that is open already is set only where it has to be. At the end
    one that was set or opened here is closed: the project may run the command
    from a process of its own, and its next statement finds the variables of the
    project. Inside a transaction (a ``TestCase``) nothing is changed.
    """
    connection = connections[using]
    if connection.in_atomic_block:
        yield
        return
    outer = getattr(_role, "using", None), getattr(_role, "timeouts", None)
    _take(using, outer[1] if outer[0] == using else None)
    try:
        before = connection.connection
        try:
            if before is not None and dialect_of(connection).session_faults(connection):
                _execute_set_up(connection)
                before = None
        except OperationalError:
            # The server has ended it. The command opens another one, or tells that nobody answers.
            drop_connection(connection)
            before = None
        try:
            yield
        finally:
            if connection.connection is not before:
                drop_connection(connection)
    finally:
        _role.using, _role.timeouts = outer


def _set_up(*, connection: Any, **kwargs: Any) -> None:
    if getattr(_role, "using", None) != connection.alias:
        return
    _role.opened_at = time.monotonic()
    _execute_set_up(connection)


def _execute_set_up(connection: Any) -> None:
    timeouts: Timeouts | None = _role.timeouts
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
        # In front: ``execute_wrapper()`` of a handler that is under way takes the last one away at its end.
        connection.execute_wrappers.insert(0, _note_changes)


def _note_changes(execute: Any, sql: Any, params: Any, many: bool, context: dict[str, Any]) -> Any:  # noqa: FBT001
    connection = context["connection"]
    used: set[str] | None = getattr(_role, "used", None)
    if used is not None:
        used.add(connection.alias)
    changed: set[str] | None = getattr(_role, "changed", None)  # None: another thread was lent the connection
    if changed is not None and changes_session(connection, str(sql)):
        changed.add(connection.alias)
    try:
        return execute(sql, params, many, context)
    except Error as error:
        _doubt(connection, str(sql), error)
        raise


def _doubt(connection: Any, statement: str, error: Error) -> None:
    """Whoever catches an error must not go on if what they wrote before may be gone: the ack would be committed.

    Inside a savepoint nothing is to be done: at its end Django releases it, which
    fails if the server has rolled back everything, and the error goes on from
    there. (A mark would roll back to the savepoint, without a word.)
    """
    block = outermost_block(connection)
    if block is None or in_savepoint(connection):
        return
    if block is getattr(_role, "transaction", None):
        is_lost = not keeps_transaction(connection, statement, error)
    else:
        # A transaction that the handler has opened itself is no promise of the queue's: as little as can be is changed.
        is_lost = ends_transaction(connection, error)
    if is_lost:
        must_roll_back(connection, error)


@contextlib.contextmanager
def transaction_of_handler(using: str) -> Iterator[None]:
    """The transaction around an atomic handler."""
    block = transaction.atomic(using)
    outer, _role.transaction = getattr(_role, "transaction", None), block
    try:
        with block:
            yield
    finally:
        _role.transaction = outer


def is_sound(connection: Any, error: BaseException, *, before: Any) -> bool:
    """Whether after an error the connection is still there, and leads to a server that takes writes.

    ``before`` is the driver's connection as it was: at the end of a transaction
    that cannot be rolled back Django opens another one, unasked.
    """
    if connection.connection is None or connection.connection is not before or is_read_only(connection, error):
        return False
    return bool(connection.is_usable())


def distrust(using: str) -> None:
    """Says that the server behind ``using`` was away: by now the name may stand for another one.

    A connection to a primary that was demoted may live on, answer every read
    from data that is no longer up to date, and never fail.
    """
    _distrusted[using] = time.monotonic()


def renew() -> bool:
    """Drops this thread's connection if it was opened before that was said; returns whether."""
    using = getattr(_role, "using", None)
    if using not in _distrusted or connections[using].connection is None:
        return False
    if getattr(_role, "opened_at", 0.0) > _distrusted[using]:
        return False
    drop_connection(connections[using])
    return True


IDLE = 0.5
"""Seconds after which a connection is asked whether it is still there."""


def refresh(*, idle: bool) -> None:
    """Before a message: drops connections that the server has ended since the one before.

    After a pause (``idle``) each is asked, since a route may be gone without a word; else only those that have
    something to read.
    """
    # Not connections.all() for each message: it asks for every alias of the project.
    for connection in connections.all(initialized_only=True) if idle else getattr(_role, "open", ()):
        is_open = connection.connection is not None
        if is_open and (idle or has_unread(connection)) and not connection.is_usable():
            drop_connection(connection)


_uses: dict[Hashable, dict[str, int]] = {}
"""By handler: the aliases that its calls have used, in any thread of this process, and how many calls ago."""
FORGOTTEN_AFTER = 100
"""Calls of a handler after which an alias that they did not use is not opened for it any more."""


def begin_call() -> set[str] | None:
    """Before a handler's call: from now on the aliases that this thread uses are noted.

    Returns:
        What ``end_call`` wants: a handler may itself run handlers (``EAGER``).
    """
    before: set[str] | None = getattr(_role, "used", None)
    _role.used = set()
    return before


def end_call(handler: Hashable, before: set[str] | None) -> None:
    """After the call, for ``connect``."""
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
    """Opens the connections that the handler's latest calls have used, where they are closed.

    What fails here would otherwise be the handler's first query. A handler that uses no database waits for none.

    Args:
        insist: False: an alias that cannot be opened, other than the queue's, is left to the handler, which may do
            without it.

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
            if insist or alias == getattr(_role, "using", None):
                raise
            uses.pop(alias, None)  # the next calls need not wait either, until one has used it


def tidy() -> None:
    """Between two messages: what the handler left behind must not reach the next one.

    Unlike ``close_old_connections`` it keeps sound connections at CONN_MAX_AGE 0,
    where connecting anew for each message alone cost 45%. One that an error
    occurred on it drops unseen: a demoted primary answers a ping and refuses
    every write, so each message after it would fail as well. So it does one
    whose session the handler has changed by a statement of its own: in a
    transaction begun so, what the next handlers write would never be committed.
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

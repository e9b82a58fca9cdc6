"""Database connections of the subscriber's threads.

A process can freeze at any instruction and keep its row locks. Each kind of thread therefore tells the server after
how long to close an idle session.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from django.db import Error, OperationalError, connections
from django.db.backends.signals import connection_created
from django.db.transaction import TransactionManagementError

from django_mysqlqueue.runtime import forks, transactions
from django_mysqlqueue.runtime.transactions import HandlerTransaction
from django_mysqlqueue.sql import dialect_of
from django_mysqlqueue.sql.connection import (
    drop_connection,
    end_ahead,
    ends_transaction,
    expires_at,
    forget_queries,
    has_failed,
    has_unread,
    holds_transaction,
    in_savepoint,
    is_astray,
    is_read_only,
    is_server,
    keeps_transaction,
    leave_blocks,
    left_open,
    limited_settings,
    must_roll_back,
    outermost_block,
    used_connections,
)
from django_mysqlqueue.sql.packets import packets_of, takes_several, use_packets
from django_mysqlqueue.sql.statements import is_call, is_plain, shortened

_distrusted: dict[str, float] = {}
"""By alias, a monotonic time: connections opened before may lead to a server that is no longer the primary."""


class Timeouts(NamedTuple):
    """Session timeouts in seconds."""

    idle: float
    """How long the client may send nothing; must be above its longest interval between two statements."""
    lock_wait: float
    network: float
    read: float
    """How long the client waits for an answer."""


@dataclass(slots=True)
class _Watch:
    """What handlers do to the connections of their thread. All dicts are by alias."""

    changed: dict[str, str] = field(default_factory=dict)
    """A statement after which the session is not used again."""
    clean: dict[str, tuple[list[Any], bool]] = field(default_factory=dict)
    """The wrappers and the debug flag of a connection that no handler has used."""
    depths: dict[str, int] = field(default_factory=dict)
    """The ``atomic()`` blocks that were open before the first handler (in a ``TestCase``)."""


class _Role(threading.local):
    """What a thread's connections are for."""

    timeouts: Mapping[str, Timeouts | None] = {}
    """By alias, of the connections to databases of the queue."""
    opened_at: Mapping[str, float] = {}
    """By alias, when such a connection was opened."""
    open: Mapping[str, Any] = {}
    """By alias, the connections that were open after the latest message."""
    watch: _Watch | None = None
    """None in threads without handlers."""
    used: dict[str, Any] | None = None
    """By alias, the connections that the running handler has used; None between two calls."""


_role = _Role()


def adopt(using: str, timeouts: Timeouts, *, watch: bool = False) -> None:
    """Set timeouts, and the variables that the queue needs, on each connection of this thread to ``using``.

    The project's ``OPTIONS`` take precedence over the timeouts. AUTOCOMMIT is switched on, since without it nothing
    that the queue does would be committed.

    ``watch``: whether handlers run in this thread: what they do to connections, to any database, is noted, for
    ``confirm`` and ``tidy``.
    """
    forks.guard()
    _take(using, timeouts)
    if watch:
        _begin_watch(_Watch())
    connection = connections[using]
    connection.settings_dict = {**limited_settings(connection, read=timeouts.read), "AUTOCOMMIT": True}
    if watch:
        connection.ends_together = is_server(connection)  # type: ignore[attr-defined]
        connection.begun_ahead = None  # type: ignore[attr-defined]
    else:
        use_packets(connection)


def _take(using: str, timeouts: Timeouts | None) -> None:
    _role.timeouts = {**_role.timeouts, using: timeouts}
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
    outer = _role.timeouts
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
    if connection.alias not in _role.timeouts:
        return
    _role.opened_at = {**_role.opened_at, connection.alias: time.monotonic()}
    _execute_set_up(connection)
    if _role.watch is not None:
        # Handlers that run in a process before its subscriber starts connect ``_observe`` first: it notes the set-up.
        _role.watch.changed.pop(connection.alias, None)


def _execute_set_up(connection: Any) -> None:
    timeouts = _role.timeouts[connection.alias]
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
    packets = packets_of(connection)
    if packets is not None:
        packets.is_usable = takes_several(connection)


REST = 60.0
"""Seconds for which a session may be idle while no transaction is open: a process that freezes then holds no lock."""


def rests(using: str) -> bool:
    """Return whether this thread's session rests: it has begun no transaction since ``rest``."""
    packets = packets_of(connections[using])
    return packets is not None and packets.rests()


def rest(using: str) -> None:
    """Let this thread's session be idle for ``REST`` seconds, until its next transaction, which has its own limit."""
    packets, timeouts = packets_of(connections[using]), _role.timeouts.get(using)
    if packets is not None and timeouts is not None:
        packets.rest(REST, timeouts.idle)


def _begin_watch(watch: _Watch) -> None:
    _role.watch = watch
    # After the project's receivers, which may set up its sessions.
    connection_created.connect(_observe, dispatch_uid="django_mysqlqueue.runtime.sessions.watch")


def _observe(*, connection: Any, **kwargs: Any) -> None:
    watch = _role.watch
    if watch is None:
        return
    watch.changed.pop(connection.alias, None)
    if _note_changes not in connection.execute_wrappers:
        # At the front, because ``execute_wrapper()`` of a running handler removes the last one at its end.
        connection.execute_wrappers.insert(0, _note_changes)
    if _role.used is None:  # Otherwise wrappers of the running handler may be among them.
        watch.clean[connection.alias] = _wrappers(connection)


def _wrappers(connection: Any) -> tuple[list[Any], bool]:
    return [*connection.execute_wrappers], connection.force_debug_cursor


def _clean(connection: Any, watch: _Watch) -> None:
    """Remove the execute wrappers that a handler has left on a connection, and switch its debug log off again."""
    found = watch.clean.get(connection.alias)
    if found is None:
        if connection.execute_wrappers == [_note_changes] and not connection.force_debug_cursor:
            watch.clean[connection.alias] = _wrappers(connection)
            return
        # Opened by a handler: which of the wrappers are the project's is known when it is opened again.
        drop_connection(connection)
        found = [], False
    wrappers, debug = found
    if connection.execute_wrappers != wrappers:
        connection.execute_wrappers[:] = wrappers
    connection.force_debug_cursor = debug


@contextlib.contextmanager
def watching() -> Iterator[None]:
    """Note in the block what handlers do to this thread's connections, as in a handler's thread, and undo it.

    What the caller has opened stays as it is.
    """
    watch = _Watch()
    outer, used, _role.used = _role.watch, _role.used, None
    _begin_watch(watch)
    watched: list[Any] = []
    for connection in used_connections():
        if _note_changes in connection.execute_wrappers:
            watched.append(connection)
        watch.depths[connection.alias] = len(connection.atomic_blocks)
        _observe(connection=connection)
    try:
        yield
    finally:
        _role.watch, _role.used = outer, used
        for connection in used_connections():
            depth = watch.depths.get(connection.alias, 0)
            leave_blocks(connection, depth, TransactionManagementError("A handler has left it open."))
            if not depth and connection.connection is not None and _is_changed(connection, watch):
                drop_connection(connection)
            _clean(connection, watch)
            if connection not in watched and _note_changes in connection.execute_wrappers:
                connection.execute_wrappers.remove(_note_changes)


def _note_changes(execute: Any, sql: Any, params: Any, many: bool, context: dict[str, Any]) -> Any:  # noqa: FBT001
    connection = context["connection"]
    if _role.used is not None:
        _role.used[connection.alias] = connection
    own = transactions.running()
    if own is not None and connection.connection is own.raw:
        own.prove(context["cursor"])
    elif not connection.in_atomic_block and getattr(connection, "begun_ahead", None) is not None:
        end_ahead(connection)
    statement = str(sql)
    if not is_plain(statement):
        _note(connection, statement, own)
    try:
        return execute(sql, params, many, context)
    except Error as error:
        _doubt(connection, statement, error)
        raise


def _note(connection: Any, statement: str, own: HandlerTransaction | None) -> None:
    """Note a statement, before it is executed, that may change the session or its transaction."""
    if own is not None and connection.connection is own.raw:
        own.mark(statement)
    if _role.watch is None or not is_server(connection):
        return  # The connection was lent to another thread, or the driver will know.
    changed = _role.watch.changed
    if connection.alias not in changed or not is_call(statement):  # Of several, what has most likely changed it.
        changed[connection.alias] = statement


def _doubt(connection: Any, statement: str, error: Error) -> None:
    """Mark the transaction for rollback if a handler could catch the error and commit an ack without earlier writes.

    Inside a savepoint nothing has to be done: Django releases it at its end, and that raises an error if the server
    has rolled back everything. (A mark would roll back to the savepoint without an error.)
    """
    block = outermost_block(connection)
    if block is None or in_savepoint(connection):
        return
    own = transactions.running()
    if own is not None and block is own.block:
        is_lost = not keeps_transaction(connection, statement, error)
    else:
        # The queue guarantees nothing for a transaction that the handler opened itself: interfere as little as needed.
        is_lost = ends_transaction(connection, error)
    if is_lost:
        must_roll_back(connection, error)


_LEFT_OPEN = (
    "The handler left a transaction open on the connection {!r} (by {}): what it wrote there is rolled back. Commit it "
    "before the handler returns."
)


def confirm() -> None:
    """Fail the attempt of a handler that has returned, but has not left transactions as it found them.

    An atomic handler must not have ended its transaction: its writes would be committed without the ack, or the ack
    without them. No handler may leave a transaction open: what it wrote there is rolled back. A server is asked only
    after statements that may have begun one.

    Raises:
        django.db.transaction.TransactionManagementError: the handler has ended its transaction, or left one open.
        django.db.Error: the database does not answer.
    """
    own = transactions.running()
    if own is not None:
        own.prove()
        if own.connection.atomic_blocks[-1] is not own.block:
            raise TransactionManagementError(_LEFT_OPEN.format(own.connection.alias, "atomic()"))
    for connection in (_role.used or {}).values():
        if own is None or own.connection is not connection:
            _confirm_closed(connection, _role.watch or _Watch())


def _confirm_closed(connection: Any, watch: _Watch) -> None:
    alias = connection.alias
    depth = watch.depths.get(alias, 0)
    if len(connection.atomic_blocks) > depth:
        raise TransactionManagementError(_LEFT_OPEN.format(alias, "atomic()"))
    if depth or connection.connection is None or not connection.settings_dict["AUTOCOMMIT"]:
        return
    statement = watch.changed.get(alias)
    if statement is None and connection.autocommit and not is_astray(connection):
        return
    by = shortened(statement) if statement else "SQL" if connection.autocommit else "set_autocommit(False)"
    text = _LEFT_OPEN.format(alias, by)
    try:
        is_open = holds_transaction(connection)
    except Error as error:
        raise TransactionManagementError(f"It is not known whether this has happened: {text}") from error
    if is_open:
        raise TransactionManagementError(text)
    if statement is not None and is_call(statement):
        del watch.changed[alias]  # The session may be used again.


def is_sound(connection: Any, error: BaseException, *, before: Any) -> bool:
    """Return whether the connection has survived an error and leads to a server that accepts writes."""
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
    for using in _distrusted.keys() & _role.timeouts.keys():
        is_open = connections[using].connection is not None
        if is_open and _role.opened_at.get(using, 0.0) <= _distrusted[using]:
            drop_connection(connections[using])
            dropped = True
    return dropped


IDLE = 0.5
"""Seconds without a message after which a connection is checked by a round trip."""


def refresh(*, idle: bool) -> None:
    """Drop, before a message, connections as ``renew`` does, and those that the server has closed since the last one.

    ``idle``: whether to ping all connections, after a pause, because a route may be lost without a trace. If False,
    only those that have something to read are pinged.
    """
    if _distrusted:
        renew()
    # Not used_connections() for each message: it asks for every alias of the project.
    for connection in used_connections() if idle else _role.open.values():
        is_open = connection.connection is not None
        if is_open and (idle or has_unread(connection)) and not connection.is_usable():
            drop_connection(connection)


_uses: dict[Hashable, dict[str, int]] = {}
"""By handler, the aliases that its calls have used in any thread of this process, and how many calls ago."""
FORGOTTEN_AFTER = 100
"""Calls in a row without use after which an alias is no longer opened for a handler."""


def begin_call() -> dict[str, Any] | None:
    """Note from now on, before a handler's call, the connections that this thread uses.

    Returns:
        The state of the outer call, for ``end_call``: a handler may itself run handlers (``EAGER``).
    """
    before, _role.used = _role.used, {}
    return before


def end_call(handler: Hashable, before: dict[str, Any] | None) -> None:
    """Remember for ``connect``, after a handler's call, the aliases that it used.

    ``before``: the return value of ``begin_call``.
    """
    used, _role.used = _role.used or {}, before
    uses = _uses.get(handler)
    if uses is None:
        if not used:
            return
        uses = _uses.setdefault(handler, {})
    for alias in used:
        uses[alias] = 0
    if len(uses) == len(used):
        return
    for alias in uses.keys() - used.keys():
        ago = uses.get(alias, 0) + 1
        if ago > FORGOTTEN_AFTER:
            uses.pop(alias, None)
        else:
            uses[alias] = ago


def use_autocommit(using: str) -> None:
    """Switch autocommit on, before a handler without a transaction is called, see ``packets.ending``.

    If the connection is lost, it is dropped: the handler may not need it, and its first statement opens another one.
    """
    connection = _role.open.get(using)
    if getattr(connection, "begun_ahead", None) is not None:
        try:
            end_ahead(connection)
        except Error:
            drop_connection(connection)


def are_used(handler: Hashable) -> bool:
    """Return whether the latest calls of a handler have used connections, which ``connect`` opens."""
    return bool(_uses.get(handler))


def forget_uses() -> None:
    """Forget which connections handlers have used: in the next test, they may be forbidden."""
    _uses.clear()


def connect(handler: Hashable, *, insist: bool) -> None:
    """Open the connections that the handler's latest calls have used, if they are closed.

    An error here would otherwise be an error of the handler's first query. A handler that uses no database does not
    wait for any.

    ``insist``: if False, ignore an alias that cannot be opened, unless it is the queue's: the handler may not need it.

    Raises:
        django.db.Error: a connection cannot be opened.
    """
    uses = _uses.get(handler)
    if not uses:
        return
    for alias in tuple(uses):
        known = _role.open.get(alias)
        if (known is not None and known.connection is not None) or alias not in connections:
            continue
        try:
            connections[alias].ensure_connection()
        except Error:
            if insist or alias in _role.timeouts:
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
    watch = _role.watch
    still_open: dict[str, Any] = {}
    _role.open = still_open
    for connection in used_connections():
        forget_queries(connection)
        if connection.connection is not None:
            expires = expires_at(connection)
            is_expired = expires is not None and time.monotonic() >= expires
            if is_expired or has_failed(connection) or _is_changed(connection, watch):
                drop_connection(connection)
        elif not connection.execute_wrappers and not connection.force_debug_cursor:
            continue  # The handler has not used it.
        if watch is not None:
            _clean(connection, watch)
        if connection.connection is not None:
            still_open[connection.alias] = connection


def _is_changed(connection: Any, watch: _Watch | None) -> bool:
    """Return whether a transaction was left open, or SQL may have changed the session."""
    is_noted = watch is not None and connection.alias in watch.changed
    return is_noted or left_open(connection) or is_astray(connection)

"""What is known of Django's connections beyond their documented interface, and which engine they are on.

One file to read when a new version of Django comes out: no other module of the
package touches the private parts of a connection.
"""

from __future__ import annotations

import contextlib
import select
from collections.abc import Iterator
from typing import Any

from django.db import Error, connections
from django.db.backends.base.base import BaseDatabaseWrapper

from django_mysqlqueue.sql import FailureKind, dialect_of

READ_SECONDS = 20.0
"""How long a page, a scrape or a health check waits for an answer; each statement of theirs is bounded."""
LOCK_SECONDS = 60.0
"""How long an operation waits: longer than servers let a statement wait for a lock (``innodb_lock_wait_timeout``:
50 s), so that the server's error comes first, and the transaction is run again."""


def is_server(connection: BaseDatabaseWrapper) -> bool:
    """Whether it is a connection to MySQL or MariaDB. It asks no server."""
    return connection.vendor == "mysql"


def server_version(connection: BaseDatabaseWrapper) -> tuple[int, ...]:
    """Of the server, or of the library SQLite."""
    if is_server(connection):
        return tuple(connection.mysql_version)  # type: ignore[attr-defined]
    return tuple(connection.Database.sqlite_version_info)  # type: ignore[attr-defined]


# -- what the driver and the server say ------------------------------------------


def client_timeouts(connection: BaseDatabaseWrapper, *, read: float) -> dict[str, int]:
    """Connection options after which the driver gives up on a server that does not answer (seconds).

    Unlike ``dialect_of`` this asks no server: one that is away must not keep a
    thread from starting, nor be waited for before there are time-outs.
    """
    if connection.vendor != "mysql":
        return {}
    from django_mysqlqueue.sql import mysql

    return mysql.client_timeouts(read=read)


def limited_settings(connection: BaseDatabaseWrapper, *, read: float) -> dict[str, Any]:
    """The connection's settings with ``client_timeouts``, of which the project's own ``OPTIONS`` win."""
    own = connection.settings_dict
    return {**own, "OPTIONS": {**client_timeouts(connection, read=read), **own.get("OPTIONS", {})}}


def failure_kind(connection: BaseDatabaseWrapper, error: Error) -> FailureKind | None:
    """Why the database refused or did not answer; None: some other error (asks no server)."""
    if connection.vendor == "mysql":
        from django_mysqlqueue.sql import mysql

        return mysql.failure_kind(error)
    from django_mysqlqueue.sql import sqlite

    return sqlite.failure_kind(error)


def is_read_only(connection: BaseDatabaseWrapper, error: BaseException) -> bool:
    """The server refuses writes: it is no longer the primary, or not yet."""
    if connection.vendor != "mysql":
        return False
    from django_mysqlqueue.sql import mysql

    return mysql.is_read_only(error)


def changes_session(connection: BaseDatabaseWrapper, statement: str) -> bool:
    """A statement after which the session may not be as Django has set it up, and Django does not know."""
    if connection.vendor != "mysql":
        return False
    from django_mysqlqueue.sql import mysql

    return mysql.changes_session(statement)


def ends_transaction(connection: BaseDatabaseWrapper, error: Error) -> bool:
    """Whether it is certain that the server has rolled back the whole transaction with this error."""
    if connection.connection is None:
        return True
    if connection.vendor == "mysql":
        from django_mysqlqueue.sql import mysql

        return mysql.ends_transaction(connection.connection, error)
    return not keeps_transaction(connection, "", error)


def keeps_transaction(connection: BaseDatabaseWrapper, statement: str, error: Error) -> bool:
    """Whether it is certain that a statement's error has left the open transaction as it was.

    What the engine rolls back with an error differs by error, engine and setting, so only what is known counts. The
    path without errors asks nothing.
    """
    if connection.connection is None:
        return False
    if connection.vendor == "mysql":
        from django_mysqlqueue.sql import mysql

        return mysql.keeps_transaction(connection.connection, statement, error)
    # SQLite says it itself: some errors (a full disk, say) roll back everything.
    return bool(connection.connection.in_transaction)


def is_astray(connection: BaseDatabaseWrapper) -> bool:
    """The driver's connection was closed, or lost its autocommit, behind Django's back (asks no server)."""
    raw: Any = connection.connection
    if connection.vendor == "mysql":
        return not raw.open or bool(raw.get_autocommit()) != connection.get_autocommit()
    return connection.vendor == "sqlite" and connection.get_autocommit() and bool(raw.in_transaction)


def has_unread(connection: BaseDatabaseWrapper) -> bool:
    """Whether an idle connection has something to read: most likely its end. It costs no round trip.

    A server that ends a connection closes its socket, and newer ones say why before that. (TLS may have something to
    read on a sound connection, so this is a reason to ask it, not a verdict.)
    """
    fileno = getattr(connection.connection, "fileno", None)
    if fileno is None:
        return False  # SQLite
    try:
        readable = select.poll()
        readable.register(fileno(), select.POLLIN)
        return bool(readable.poll(0))
    except Exception:  # noqa: BLE001  # drivers differ in what they raise for a connection that is closed
        return True


# -- transactions ----------------------------------------------------------------


def in_transaction(connection: BaseDatabaseWrapper) -> bool:
    """Whether the project's code has a transaction open; those around a ``TestCase``'s tests do not count."""
    if connection.in_atomic_block:
        return any(not block._from_testcase for block in connection.atomic_blocks)  # type: ignore[attr-defined]
    return connection.connection is not None and not connection.get_autocommit()


def in_testcase(connection: BaseDatabaseWrapper) -> bool:
    """Whether only a ``TestCase`` has a transaction open."""
    return connection.in_atomic_block and not in_transaction(connection)


def tells_commit(connection: BaseDatabaseWrapper) -> bool:
    """Whether Django knows when the caller commits: in ``atomic()``, or statement by statement.

    With autocommit off it does not, and ``on_commit`` is refused.
    """
    return connection.in_atomic_block or connection.get_autocommit()


def is_manual(connection: BaseDatabaseWrapper) -> bool:
    """Whether autocommit is off and the caller commits by hand."""
    return not tells_commit(connection)


def begin_in_one_statement(connection: Any) -> None:
    """Lets ``atomic()`` begin by START TRANSACTION, not by turning autocommit off and afterwards on again.

    One round trip less for each transaction, an eighth of all that a claim
    costs. The hook is Django's own, for backends
    (``BaseDatabaseWrapper.set_autocommit``): SQLite's has it. Not for handlers:
    after a statement that ends their transaction unasked (DDL) each further one
    would commit by itself, and could not be rolled back.
    """

    def begin() -> None:
        with connection.wrap_database_errors:
            connection.connection.query("START TRANSACTION")

    if connection.vendor == "mysql":
        connection._start_transaction_under_autocommit = begin


def in_savepoint(connection: BaseDatabaseWrapper) -> bool:
    """Whether a block of the open transaction has a savepoint of its own."""
    return connection.in_atomic_block and any(connection.savepoint_ids)


def outermost_block(connection: BaseDatabaseWrapper) -> Any:
    """The ``atomic()`` block that has begun the open transaction; None: there is none."""
    blocks: list[Any] = connection.atomic_blocks if connection.in_atomic_block else []
    return blocks[0] if blocks else None


def must_roll_back(connection: BaseDatabaseWrapper, error: BaseException) -> None:
    """Lets the open ``atomic()`` block end in a rollback, and every query before that raise."""
    connection.needs_rollback = True
    connection.rollback_exc = error  # type: ignore[attr-defined]


def any_needs_rollback() -> bool:
    """Whether a transaction of this thread accepts no query any more."""
    return any(connection.needs_rollback for connection in connections.all(initialized_only=True))


@contextlib.contextmanager
def without_marks() -> Iterator[None]:
    """Keeps errors inside from making the transactions that are open now unusable: those of a ``TestCase``.

    Outside a test an error would undo one statement. So it does here on MySQL and SQLite; elsewhere (PostgreSQL)
    nothing works any more before a rollback, so everything that was done inside is undone.
    """
    inside = [connection for connection in connections.all(initialized_only=True) if connection.in_atomic_block]
    savepoints = [connection.savepoint() for connection in inside]
    yield
    for connection, savepoint in zip(inside, savepoints, strict=True):
        is_broken, connection.needs_rollback = connection.needs_rollback, False
        if savepoint is None:
            continue
        if is_broken and connection.vendor not in ("mysql", "sqlite"):
            connection.savepoint_rollback(savepoint)
        else:
            connection.savepoint_commit(savepoint)


# -- other connections in the place of the thread's ------------------------------


@contextlib.contextmanager
def apart(using: str) -> Iterator[None]:
    """A connection of its own where the project's code has a transaction open.

    What is done inside commits by itself, sees what others have committed, and
    holds no lock until that transaction ends. Without row locks (SQLite) that
    transaction has the only write lock there is, and this joins it.
    """
    outer = connections[using]
    begins = outer.connection is None and not outer.settings_dict["AUTOCOMMIT"]  # with its first statement
    if not (in_transaction(outer) or begins) or not dialect_of(outer).has_row_locks:
        yield
        return
    own = outer.copy(using)
    own.settings_dict = {**own.settings_dict, "AUTOCOMMIT": True}
    with _in_its_place(outer, own):
        yield


@contextlib.contextmanager
def bounded(using: str, *, read: float = READ_SECONDS) -> Iterator[None]:
    """A connection of its own that gives up on a server that does not answer, for what web workers do.

    The request's own connection has the time limits that ``OPTIONS`` gives it, usually none, and they cannot be
    changed once it is open. Inside a ``TestCase`` this joins its transaction; on SQLite there is no server to wait for.

    Args:
        read: seconds to wait for each answer, unless ``OPTIONS`` says otherwise.
    """
    outer = connections[using]
    if in_testcase(outer) or not client_timeouts(outer, read=read):
        yield
        return
    own = outer.copy(using)
    own.settings_dict = {**limited_settings(own, read=read), "AUTOCOMMIT": True}
    # Who watches the project's connection sees these statements too.
    own.queries_log, own.force_debug_cursor = outer.queries_log, outer.force_debug_cursor
    own.execute_wrappers = outer.execute_wrappers
    with _in_its_place(outer, own):
        yield


@contextlib.contextmanager
def _in_its_place(outer: BaseDatabaseWrapper, own: BaseDatabaseWrapper) -> Iterator[None]:
    """Lets this thread use another connection for an alias, and closes it."""
    connections[outer.alias] = own
    try:
        yield
    finally:
        connections[outer.alias] = outer
        own.close()


# -- closing ---------------------------------------------------------------------


def left_open(connection: BaseDatabaseWrapper) -> bool:
    """Whether somebody has left a transaction open on it."""
    return connection.in_atomic_block or (
        not connection.get_autocommit() and bool(connection.settings_dict["AUTOCOMMIT"])
    )


def has_failed(connection: BaseDatabaseWrapper) -> bool:
    """Whether an error has occurred on it since it was last found usable."""
    return bool(connection.errors_occurred)


def expires_at(connection: BaseDatabaseWrapper) -> float | None:
    """When ``CONN_MAX_AGE`` is over, by the monotonic clock; None: never, or (at 0) after each request."""
    return connection.close_at if connection.settings_dict["CONN_MAX_AGE"] else None


def forget_queries(connection: BaseDatabaseWrapper) -> None:
    """Drops what ``DEBUG`` has logged, which nobody resets outside a request."""
    connection.queries_log.clear()


def drop_connection(connection: Any) -> None:
    """Closes a connection whatever state it is in; the next statement opens another."""
    _forget_transaction(connection)
    # Django forgets the connection also when the driver finds that it was closed already.
    with contextlib.suppress(Error):
        connection.close()


def close_connections() -> None:
    """At the end of a thread."""
    for connection in connections.all(initialized_only=True):
        drop_connection(connection)


def detach(connection: BaseDatabaseWrapper) -> Any:
    """Takes the driver's connection out without closing it: the next statement opens another.

    Returns:
        The driver's connection. While it is referred to, the session on the server is not ended.
    """
    driver = connection.connection
    connection.connection = None
    _forget_transaction(connection)
    return driver


def _forget_transaction(connection: Any) -> None:
    connection.in_atomic_block = connection.needs_rollback = connection.closed_in_transaction = False
    connection.savepoint_ids, connection.atomic_blocks, connection.run_on_commit = [], [], []

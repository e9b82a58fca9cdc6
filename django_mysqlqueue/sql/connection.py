"""Everything that depends on undocumented parts of Django's connections, or on a connection's engine.

Review this module, and ``packets``, when a new version of Django is released: no other module of the package uses
private parts of a connection.
"""

from __future__ import annotations

import contextlib
import select
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any

from django.db import Error, OperationalError, connections
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.backends.signals import connection_created

from django_mysqlqueue.sql import FailureKind, dialect_of, mysql, sqlite
from django_mysqlqueue.sql.statements import execute_unseen

CONNECT_SECONDS = 10.0
"""Seconds for which each connection with time limits waits until it is open."""
READ_SECONDS = 20.0
"""Seconds for which a page, a scrape or a health check waits for the answer to each statement."""
LOCK_SECONDS = 60.0
"""Seconds for which an operation waits: longer than the server's limit for lock waits (``innodb_lock_wait_timeout``,
50 s), so that the server's error comes first and the transaction runs again."""


def is_server(connection: BaseDatabaseWrapper) -> bool:
    """Return whether it is a connection to MySQL or MariaDB, without a query."""
    return connection.vendor == "mysql"


def server_version(connection: BaseDatabaseWrapper) -> tuple[int, ...]:
    """Return the version of the server, or of the SQLite library."""
    if is_server(connection):
        return tuple(connection.mysql_version)  # type: ignore[attr-defined]
    return tuple(connection.Database.sqlite_version_info)  # type: ignore[attr-defined]


def used_connections() -> list[BaseDatabaseWrapper]:
    """Return what ``connections.all(initialized_only=True)`` does, with half of its lookups, which are slow.

    A handler's thread does this for each message.
    """
    own = connections._connections  # type: ignore[attr-defined]
    return [connection for alias in connections if (connection := getattr(own, alias, None)) is not None]


# -- which database it is -----------------------------------------------------------


_PLACE = ("host", "port", "unix_socket", "read_default_file", "read_default_group")
"""The driver's arguments that say where a server is."""


def named_database(connection: BaseDatabaseWrapper) -> str:
    """Return the name of the database in ``DATABASES``, without a query; empty if it is left to an option file."""
    return _name_in(_arguments(connection))


def named_place(connection: BaseDatabaseWrapper) -> tuple[str, ...]:
    """Return what ``DATABASES`` says of where the database is, without a query.

    The second item is the name of the database. If it is equal for two aliases, they lead to one database. If it
    differs, they still may.
    """
    given = _arguments(connection)
    engine = connection.settings_dict["ENGINE"]
    return (engine, _name_in(given), *(str(given.get(name, "")) for name in _PLACE))


def _arguments(connection: BaseDatabaseWrapper) -> Mapping[str, Any]:
    """Return the driver's arguments; if the backend cannot tell them, what ``DATABASES`` says."""
    try:
        return connection.get_connection_params()
    except Exception:  # noqa: BLE001  # No engine, no name; or a backend's own source of passwords does not answer.
        given = connection.settings_dict
        return {"db": given["NAME"], "host": given["HOST"], "port": given["PORT"], **given["OPTIONS"]}


def _name_in(arguments: Mapping[str, Any]) -> str:
    return str(arguments.get("db") or arguments.get("database") or "")


def database_name(connection: BaseDatabaseWrapper) -> str:
    """Return the name of the database that a connection works on, as the server says it; empty if it is on none."""
    if not is_server(connection):
        return named_database(connection)
    with connection.cursor() as cursor:
        cursor.execute("SELECT DATABASE()")
        return str(cursor.fetchone()[0] or "")


# -- tables ----------------------------------------------------------------------


def _create_in_innodb(*, connection: Any, **kwargs: Any) -> None:
    """Make migrations create the queue's tables in InnoDB, regardless of the server's default engine."""
    if is_server(connection):
        connection.SchemaEditorClass = _in_innodb(type(connection).SchemaEditorClass)


@cache
def _in_innodb(editor: Any) -> Any:
    class SchemaEditor(editor):  # type: ignore[misc]
        def table_sql(self, model: Any) -> tuple[str, Any]:
            sql, parameters = super().table_sql(model)
            is_own = model._meta.app_label == "django_mysqlqueue"
            return f"{sql} ENGINE = InnoDB" if is_own else sql, parameters

    return SchemaEditor


connection_created.connect(_create_in_innodb, dispatch_uid="django_mysqlqueue.sql.connection")


# -- errors and states of the driver and the server ------------------------------


def client_timeouts(
    connection: BaseDatabaseWrapper, *, read: float, connect: float = CONNECT_SECONDS
) -> dict[str, int]:
    """Return the connection options that make the driver stop waiting for a server that does not answer.

    Unlike ``dialect_of``, this sends no query: a server that is away must not keep a thread from starting, and at
    this time the connection has no timeouts.
    """
    return mysql.client_timeouts(read=read, connect=connect) if is_server(connection) else {}


def limited_settings(
    connection: BaseDatabaseWrapper, *, read: float, connect: float = CONNECT_SECONDS
) -> dict[str, Any]:
    """Return the connection's settings with ``client_timeouts``. The project's ``OPTIONS`` take precedence."""
    own = connection.settings_dict
    limits = client_timeouts(connection, read=read, connect=connect)
    return {**own, "OPTIONS": {**limits, **own.get("OPTIONS", {})}}


def failure_kind(connection: BaseDatabaseWrapper, error: Error) -> FailureKind | None:
    """Return why the database refused or did not answer, or None for other errors, without a query."""
    return mysql.failure_kind(error) if is_server(connection) else sqlite.failure_kind(error)


def is_read_only(connection: BaseDatabaseWrapper, error: BaseException) -> bool:
    """Return whether the server refuses writes, because it is no longer, or not yet, the primary."""
    return is_server(connection) and mysql.is_read_only(error)


def ends_transaction(connection: BaseDatabaseWrapper, error: Error) -> bool:
    """Return whether it is certain that the server has rolled back the whole transaction with this error."""
    if connection.connection is None:
        return True
    if is_server(connection):
        return mysql.ends_transaction(connection.connection, error)
    return not keeps_transaction(connection, "", error)


def keeps_transaction(connection: BaseDatabaseWrapper, statement: str, error: Error) -> bool:
    """Return whether it is certain that a statement's error has not changed the open transaction.

    How much the engine rolls back after an error depends on the error, the engine and settings, so the result is True
    only for known cases.
    """
    if connection.connection is None:
        return False
    if is_server(connection):
        return mysql.keeps_transaction(connection.connection, statement, error)
    # SQLite tells it: some errors (for example a full disk) roll back everything.
    return bool(connection.connection.in_transaction)


def is_astray(connection: BaseDatabaseWrapper) -> bool:
    """Return whether the driver's connection was closed, or lost autocommit, without Django's knowledge (no query)."""
    raw: Any = connection.connection
    if is_server(connection):
        return not raw.open or (bool(raw.get_autocommit()) != connection.autocommit and not has_begun_ahead(connection))
    return connection.vendor == "sqlite" and connection.autocommit and bool(raw.in_transaction)


def has_unread(connection: BaseDatabaseWrapper) -> bool:
    """Return whether an idle connection has something to read, which most likely is its end, without a round trip.

    A server that ends a connection closes its socket, and newer servers send the reason before that. With TLS, a sound
    connection may have something to read too, so check it after this.
    """
    fileno = getattr(connection.connection, "fileno", None)
    if fileno is None:
        return False  # SQLite
    try:
        readable = select.poll()
        readable.register(fileno(), select.POLLIN)
        return bool(readable.poll(0))
    except Exception:  # noqa: BLE001  # Drivers raise different errors for a closed connection.
        return True


# -- transactions ----------------------------------------------------------------


def in_transaction(connection: BaseDatabaseWrapper) -> bool:
    """Return whether the project's code has an open transaction. The transactions of a ``TestCase`` do not count."""
    if connection.in_atomic_block:
        return any(not block._from_testcase for block in connection.atomic_blocks)  # type: ignore[attr-defined]
    return connection.connection is not None and not connection.get_autocommit()


def in_testcase(connection: BaseDatabaseWrapper) -> bool:
    """Return whether the only open transaction is that of a ``TestCase``."""
    return connection.in_atomic_block and not in_transaction(connection)


def tells_commit(connection: BaseDatabaseWrapper) -> bool:
    """Return whether Django knows when the caller commits: in ``atomic()``, or statement by statement.

    With autocommit off it does not, and refuses ``on_commit``.
    """
    return connection.in_atomic_block or connection.get_autocommit()


def last_commit_hook(connection: Any) -> Callable[[], object] | None:
    """Return the last function that waits for the commit of exactly the open savepoints, or None."""
    if not connection.run_on_commit:
        return None
    savepoints, hook, _ = connection.run_on_commit[-1]
    return hook if savepoints == set(connection.savepoint_ids) else None


def in_savepoint(connection: BaseDatabaseWrapper) -> bool:
    """Return whether a block of the open transaction has a savepoint of its own."""
    return connection.in_atomic_block and any(connection.savepoint_ids)


def outermost_block(connection: BaseDatabaseWrapper) -> Any:
    """Return the ``atomic()`` block that has begun the open transaction, or None."""
    blocks: list[Any] = connection.atomic_blocks if connection.in_atomic_block else []
    return blocks[0] if blocks else None


def must_roll_back(connection: BaseDatabaseWrapper, error: BaseException) -> None:
    """Make the open ``atomic()`` block end in a rollback, and every query before that raise an error."""
    connection.needs_rollback = True
    connection.rollback_exc = error  # type: ignore[attr-defined]


_PROOF = "mysqlqueue_same_transaction"
"""A savepoint. It exists exactly as long as the transaction in which it was set."""
NO_SUCH_SAVEPOINT = 1305


def mark_transaction(connection: BaseDatabaseWrapper) -> None:
    """Mark the open transaction for ``prove_transaction``, before a statement that may end it."""
    execute_unseen(connection, f"SAVEPOINT {_PROOF}")


def prove_transaction(connection: BaseDatabaseWrapper, cursor: Any = None) -> bool:
    """Remove the mark, and return whether the transaction that was marked is still open.

    ``cursor``: a cursor with results of a procedure that may not have been read. They are skipped.
    """
    while getattr(cursor, "nextset", bool)():  # Neither None nor a cursor of SQLite has the method.
        pass
    try:
        execute_unseen(connection, f"RELEASE SAVEPOINT {_PROOF}")
    except OperationalError as error:
        if error.args[:1] in ((NO_SUCH_SAVEPOINT,), (f"no such savepoint: {_PROOF}",)):
            return False
        raise
    return True


def holds_transaction(connection: BaseDatabaseWrapper) -> bool:
    """Return whether a transaction is open that may have been begun without Django's knowledge."""
    if is_server(connection):
        return mysql.holds_transaction(connection)
    raw: Any = connection.connection
    # Of other engines, only what Django knows.
    return bool(raw.in_transaction) if connection.vendor == "sqlite" else not connection.get_autocommit()


def leave_blocks(connection: BaseDatabaseWrapper, depth: int, error: BaseException) -> None:
    """Leave, with an error, all ``atomic()`` blocks but the first ones."""
    for block in reversed(connection.atomic_blocks[depth:]):
        block.__exit__(type(error), error, error.__traceback__)


def has_begun_ahead(connection: Any) -> bool:
    """Return whether autocommit is off on a connection of a handler's thread, for its next transaction.

    See ``packets.ending``.
    """
    return connection.connection is not None and getattr(connection, "begun_ahead", None) is connection.connection


def end_ahead(connection: Any) -> None:
    """Switch autocommit on where it was left off for the next transaction, because something else comes first."""
    if has_begun_ahead(connection):
        with connection.wrap_database_errors:
            connection.connection.autocommit(True)  # noqa: FBT003  # The driver names it ``on``, others do not.
    connection.begun_ahead = None


def expect_commit(connection: Any) -> None:
    """Forget, before a transaction of Django's, earlier ones for ``has_committed``."""
    connection.run_commit_hooks_on_set_autocommit_on = False


def has_committed(connection: Any) -> bool:
    """Return, after an error at the end of Django's transaction, whether its COMMIT was successful before that."""
    return bool(connection.run_commit_hooks_on_set_autocommit_on)


def any_needs_rollback() -> bool:
    """Return whether a transaction of this thread no longer accepts queries."""
    return any(connection.needs_rollback for connection in used_connections())


@contextlib.contextmanager
def without_marks() -> Iterator[None]:
    """Keep errors in the block from making the transactions that are open now (those of a ``TestCase``) unusable.

    Outside of a test, an error would undo one statement. Here it does the same on MySQL and SQLite. Other engines
    (PostgreSQL) accept nothing before a rollback, so everything that was done in the block is undone.
    """
    inside = [connection for connection in used_connections() if connection.in_atomic_block]
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


# -- other connections instead of the thread's -----------------------------------


@contextlib.contextmanager
def apart(using: str) -> Iterator[None]:
    """Use a connection of its own in the block if the project's code has an open transaction.

    Statements in the block commit by themselves, see everything that was committed, and hold no lock until that
    transaction ends. Without row locks (SQLite), that transaction has the only write lock, and the block joins it.
    """
    outer = connections[using]
    begins = outer.connection is None and not outer.settings_dict["AUTOCOMMIT"]  # With its first statement.
    if not (in_transaction(outer) or begins) or not dialect_of(outer).has_row_locks:
        yield
        return
    own = outer.copy(using)
    own.settings_dict = {**own.settings_dict, "AUTOCOMMIT": True}
    with _in_its_place(outer, own):
        yield


def may_be_bounded(using: str) -> bool:
    """Return whether ``bounded`` uses a connection of its own: neither inside a ``TestCase`` nor on SQLite."""
    outer = connections[using]
    return not in_testcase(outer) and bool(client_timeouts(outer, read=READ_SECONDS))


@contextlib.contextmanager
def bounded(using: str, *, read: float = READ_SECONDS, connect: float = CONNECT_SECONDS) -> Iterator[None]:
    """Use a connection of its own in the block that does not wait for the server without a time limit.

    This is for web workers: the request's own connection has the timeouts of ``OPTIONS``, usually none, and they
    cannot be changed once it is open. Inside a ``TestCase``, the block joins its transaction. On SQLite there is no
    server to wait for. A block inside of one with the same ``read`` uses its connection.

    ``read``: seconds to wait for each answer, unless ``OPTIONS`` sets another value.
    """
    outer: Any = connections[using]
    if not may_be_bounded(using) or getattr(outer, "waits_for", None) == read:
        yield
        return
    own = outer.copy(using)
    own.waits_for = read
    own.settings_dict = {**limited_settings(own, read=read, connect=connect), "AUTOCOMMIT": True}
    # Observers of the project's connection see these statements too.
    own.queries_log, own.force_debug_cursor = outer.queries_log, outer.force_debug_cursor
    own.execute_wrappers = outer.execute_wrappers
    with _in_its_place(outer, own):
        yield


@contextlib.contextmanager
def _in_its_place(outer: BaseDatabaseWrapper, own: BaseDatabaseWrapper) -> Iterator[None]:
    """Make this thread use another connection for an alias, and close it afterwards."""
    connections[outer.alias] = own
    try:
        yield
    finally:
        connections[outer.alias] = outer
        own.close()


# -- closing ---------------------------------------------------------------------


def left_open(connection: BaseDatabaseWrapper) -> bool:
    """Return whether a transaction, or something of one, was left open on the connection, as far as Django knows."""
    return bool(
        connection.in_atomic_block
        or connection.needs_rollback
        or connection.run_on_commit
        or (not connection.autocommit and connection.settings_dict["AUTOCOMMIT"])
    )


def has_failed(connection: BaseDatabaseWrapper) -> bool:
    """Return whether an error has occurred on the connection since it was last found usable."""
    return bool(connection.errors_occurred)


def expires_at(connection: BaseDatabaseWrapper) -> float | None:
    """Return when ``CONN_MAX_AGE`` is over, by the monotonic clock; None for never, or (at 0) after each request."""
    return connection.close_at if connection.settings_dict["CONN_MAX_AGE"] else None


def forget_queries(connection: BaseDatabaseWrapper) -> None:
    """Clear the log of queries that ``DEBUG`` fills, and that Django clears only for requests."""
    connection.queries_log.clear()


def drop_connection(connection: Any) -> None:
    """Close a connection in any state. The next statement opens another one."""
    _forget_transaction(connection)
    # Django forgets the connection even if the driver raises because it was closed already.
    with contextlib.suppress(Error):
        connection.close()
    if connection.connection is not None:  # An SQLite database in memory, which Django does not close.
        connection.rollback()
        connection.set_autocommit(connection.settings_dict["AUTOCOMMIT"])


def close_connections() -> None:
    """Close all connections at the end of a thread."""
    for connection in used_connections():
        drop_connection(connection)


def detach(connection: BaseDatabaseWrapper) -> Any:
    """Take the driver's connection out without closing it, and return it. The next statement opens another one.

    As long as it is referenced, the session on the server does not end.
    """
    driver = connection.connection
    connection.connection = None
    _forget_transaction(connection)
    return driver


def _forget_transaction(connection: Any) -> None:
    connection.in_atomic_block = connection.needs_rollback = connection.closed_in_transaction = False
    connection.savepoint_ids, connection.atomic_blocks, connection.run_on_commit = [], [], []

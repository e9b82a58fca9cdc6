"""What differs between the engines; nothing else in the package knows which it is on."""

from __future__ import annotations

import select
from typing import TYPE_CHECKING, Any, Literal

from django.core.exceptions import ImproperlyConfigured

if TYPE_CHECKING:
    from django.db import Error
    from django.db.backends.base.base import BaseDatabaseWrapper

    from django_mysqlqueue.sql.base import Dialect

FailureKind = Literal[
    "no_answer", "denied", "no_database", "too_many_connections", "read_only", "missing_table", "busy"
]
"""Why the database did not do what it was asked to."""


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


def dialect_of(connection: BaseDatabaseWrapper) -> Dialect:
    """The dialect of a connection's engine.

    Raises:
        ImproperlyConfigured: for an engine other than MySQL, MariaDB and SQLite.
    """
    if connection.vendor == "sqlite":
        from django_mysqlqueue.sql import sqlite

        return sqlite.DIALECT
    if connection.vendor == "mysql":
        from django_mysqlqueue.sql import mariadb, mysql

        return mariadb.DIALECT if connection.mysql_is_mariadb else mysql.DIALECT  # type: ignore[attr-defined]
    raise ImproperlyConfigured(
        f"django_mysqlqueue: the database {connection.alias!r} runs on {connection.vendor}; "
        "the queue needs MySQL, MariaDB or SQLite"
    )

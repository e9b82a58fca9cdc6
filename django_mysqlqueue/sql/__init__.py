"""The differences between the engines. ``connection`` determines the engine; a dialect writes its SQL."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from django.core.exceptions import ImproperlyConfigured

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper

    from django_mysqlqueue.sql.base import Dialect

FailureKind = Literal[
    "no_answer", "denied", "no_database", "too_many_connections", "read_only", "missing_table", "busy", "interrupted"
]
"""The reason why the database refused a statement or did not answer."""


def dialect_of(connection: BaseDatabaseWrapper) -> Dialect:
    """Return the dialect of a connection's engine.

    Raises:
        ImproperlyConfigured: the engine is not MySQL, MariaDB or SQLite.
    """
    if connection.vendor == "sqlite":
        from django_mysqlqueue.sql import sqlite

        return sqlite.DIALECT
    if connection.vendor == "mysql":
        from django_mysqlqueue.sql import mysql

        return mysql.MARIADB if connection.mysql_is_mariadb else mysql.DIALECT  # type: ignore[attr-defined]
    raise ImproperlyConfigured(
        f"django_mysqlqueue: the database {connection.alias!r} runs on {connection.vendor}; "
        "the queue needs MySQL, MariaDB or SQLite"
    )

"""What differs between the engines. ``connection`` asks which one it is; a dialect knows how it spells SQL."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from django.core.exceptions import ImproperlyConfigured

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper

    from django_mysqlqueue.sql.base import Dialect

FailureKind = Literal[
    "no_answer", "denied", "no_database", "too_many_connections", "read_only", "missing_table", "busy"
]
"""Why the database did not do what it was asked to."""


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

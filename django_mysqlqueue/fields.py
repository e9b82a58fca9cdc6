"""Fields whose columns the databases' defaults would get wrong."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django.db import models
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models.expressions import Func

from django_mysqlqueue.limits import NOW_MS_MYSQL, NOW_MS_SQLITE

if TYPE_CHECKING:
    _CharField = models.CharField[str, str]
    _TextField = models.TextField[str, str]
else:
    _CharField, _TextField = models.CharField, models.TextField


def _bytewise_collation(connection: BaseDatabaseWrapper) -> str | None:
    """Compares byte by byte without padding, so that ``a``, ``A`` and ``a `` differ.

    It also fixes the character set to utf8mb4, whatever the database's own is:
    an emoji in an error text cannot fail. SQLite's BINARY default does as much.
    """
    if connection.vendor != "mysql":
        return None
    return "utf8mb4_nopad_bin" if connection.mysql_is_mariadb else "utf8mb4_0900_bin"  # type: ignore[attr-defined]


class BytewiseCharField(_CharField):
    """A ``CharField`` with a byte-wise collation on every engine."""

    def db_parameters(self, connection: BaseDatabaseWrapper) -> Any:
        return {**super().db_parameters(connection), "collation": _bytewise_collation(connection)}


class BytewiseTextField(_TextField):
    """A ``TextField`` with a byte-wise collation on every engine."""

    def db_parameters(self, connection: BaseDatabaseWrapper) -> Any:
        return {**super().db_parameters(connection), "collation": _bytewise_collation(connection)}


class NowMilliseconds(Func):
    """The database's clock as epoch milliseconds.

    Not ``UNIX_TIMESTAMP(NOW(3))``, which jumps by an hour when summer time ends.
    """

    template = NOW_MS_SQLITE
    output_field = models.BigIntegerField()

    def as_mysql(self, compiler: Any, connection: Any, **context: Any) -> Any:
        return self.as_sql(compiler, connection, template=NOW_MS_MYSQL, **context)


class FreshId(Func):
    """A random id made by the database, for rows that plain SQL inserts without one."""

    template = "lower(hex(randomblob(16)))"
    output_field = models.CharField()

    def as_mysql(self, compiler: Any, connection: Any, **context: Any) -> Any:
        return self.as_sql(compiler, connection, template="UUID()", **context)

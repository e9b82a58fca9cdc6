"""Fields and database functions for which the defaults of the databases would be wrong."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django.db import models
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models.expressions import Func

from django_mysqlqueue.db.session_variables import NOW_MS_MYSQL, NOW_MS_SQLITE

if TYPE_CHECKING:
    _CharField = models.CharField[str, str]
    _TextField = models.TextField[str, str]
else:
    _CharField, _TextField = models.CharField, models.TextField


def _bytewise_collation(connection: BaseDatabaseWrapper) -> str | None:
    """Return a collation that compares byte by byte without padding, so that ``a``, ``A`` and ``a `` differ.

    It also sets the character set to utf8mb4 regardless of the database's own, so that an emoji in an error text can
    be stored. On SQLite, the default collation BINARY is sufficient.
    """
    if connection.vendor != "mysql":
        return None
    return "utf8mb4_nopad_bin" if connection.mysql_is_mariadb else "utf8mb4_0900_bin"  # type: ignore[attr-defined]


class BytewiseCharField(_CharField):
    """A ``CharField`` with a byte-wise collation on every engine."""

    def db_parameters(self, connection: BaseDatabaseWrapper) -> Any:
        """Return the column's parameters with the collation."""
        return {**super().db_parameters(connection), "collation": _bytewise_collation(connection)}


class BytewiseTextField(_TextField):
    """A ``TextField`` with a byte-wise collation on every engine."""

    def db_parameters(self, connection: BaseDatabaseWrapper) -> Any:
        """Return the column's parameters with the collation."""
        return {**super().db_parameters(connection), "collation": _bytewise_collation(connection)}


def json_object(name: Any, help_text: Any) -> models.JSONField[Any, Any]:
    """Return a field for a JSON object, which is empty by default."""
    return models.JSONField(name, db_default=models.Value({}, models.JSONField()), blank=True, help_text=help_text)


class NowMilliseconds(Func):
    """The current time of the database's clock in epoch milliseconds.

    It is not ``UNIX_TIMESTAMP(NOW(3))``, which jumps by an hour when daylight saving time ends.
    """

    template = NOW_MS_SQLITE
    output_field = models.BigIntegerField()

    def as_mysql(self, compiler: Any, connection: Any, **context: Any) -> Any:
        """Return the SQL for MySQL and MariaDB."""
        return self.as_sql(compiler, connection, template=NOW_MS_MYSQL, **context)


class LanePriority(Func):
    """The priority of a partition, which the name of its lane contains (``names.keys.lane``); 0 without a lane.

    It is 0 for a malformed lane, too, which a CHECK of the outbox refuses. So it compares characters: a CAST of other
    text is an error in strict mode, and a number in other modes.
    """

    arity = 1
    output_field = models.SmallIntegerField()
    template = (
        "CASE WHEN SUBSTR(%(expressions)s, 1, 5) IN ('__p:+', '__p:-') AND SUBSTR(%(expressions)s, 9, 1) = ':' "
        "AND SUBSTR(%(expressions)s, 6, 1) BETWEEN '0' AND '9' AND SUBSTR(%(expressions)s, 7, 1) BETWEEN '0' AND '9' "
        "AND SUBSTR(%(expressions)s, 8, 1) BETWEEN '0' AND '9' "
        "THEN CAST(SUBSTR(%(expressions)s, 5, 4) AS SIGNED) ELSE 0 END"
    )

    def as_sqlite(self, compiler: Any, connection: Any, **context: Any) -> Any:
        """Return the SQL for SQLite, which has no type SIGNED."""
        return self.as_sql(compiler, connection, template=self.template.replace("SIGNED", "INTEGER"), **context)


class JsonType(Func):
    """The type of a JSON value in upper case, such as ``OBJECT``. The names of other types depend on the engine."""

    function = "JSON_TYPE"
    output_field = models.CharField()

    def as_sqlite(self, compiler: Any, connection: Any, **context: Any) -> Any:
        """Return the SQL for SQLite, which returns it in lower case."""
        return self.as_sql(compiler, connection, template="UPPER(JSON_TYPE(%(expressions)s))", **context)


class FreshId(Func):
    """A random id that the database creates for rows that plain SQL inserts without an id."""

    template = "lower(hex(randomblob(16)))"
    output_field = models.CharField()

    def as_mysql(self, compiler: Any, connection: Any, **context: Any) -> Any:
        """Return the SQL for MySQL and MariaDB."""
        return self.as_sql(compiler, connection, template="UUID()", **context)

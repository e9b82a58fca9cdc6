"""MariaDB 10.11 and later."""

from __future__ import annotations

from django_mysqlqueue.sql.mysql import MySQL


class MariaDB(MySQL):
    """The dialect of MariaDB."""

    name = "mariadb"


DIALECT = MariaDB()

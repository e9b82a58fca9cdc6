"""MariaDB 10.11 and later."""

from __future__ import annotations

from django_mysqlqueue.sql.mysql import LOCKED_ROWS, MySQL


class MariaDB(MySQL):
    """The dialect of MariaDB."""

    name = "mariadb"
    sequencer_holder = (LOCKED_ROWS,)


DIALECT = MariaDB()

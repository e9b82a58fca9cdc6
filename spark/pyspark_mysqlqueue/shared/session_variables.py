# Generated from django_mysqlqueue/db/session_variables.py by tools/shared_modules.py.
"""What every session of the queue sets on its server. Nothing here depends on Django."""

from __future__ import annotations

from typing import NamedTuple

NOW_MS_MYSQL = "TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(3)) DIV 1000"
NOW_MS_SQLITE = "CAST(ROUND((julianday('now') - 2440587.5) * 86400000) AS INTEGER)"
"""The database's clock in epoch milliseconds."""


class SessionVariable(NamedTuple):
    """A server variable and the value that every session of the queue needs."""

    name: str
    value: str
    """SQL expression to set it to."""
    wrong: str
    """SQL condition that is true if the session has another value."""
    effect: str
    """The consequence of another value, as a clause for error texts."""


SESSION_MYSQL = (
    SessionVariable(
        "autocommit",
        "1",
        "@@SESSION.autocommit = 0",
        "the server does not commit writes outside a transaction, although Django relies on it",
    ),
    SessionVariable(
        "completion_type",
        "0",
        "@@SESSION.completion_type <> 'NO_CHAIN'",
        "a COMMIT opens the next transaction (1, CHAIN) or ends the connection (2, RELEASE)",
    ),
    SessionVariable(
        "sql_select_limit",
        "18446744073709551615",  # DEFAULT would be the server's
        "@@SESSION.sql_select_limit < 18446744073709551615",
        "every SELECT without a LIMIT returns only part of its rows, without an error",
    ),
    SessionVariable(
        "sql_safe_updates",
        "0",
        "@@SESSION.sql_safe_updates <> 0",
        "the server refuses UPDATE and DELETE statements that join tables (error 1175)",
    ),
    SessionVariable(
        "sql_big_selects",
        "1",
        "@@SESSION.sql_big_selects = 0",
        "the server refuses a SELECT that may examine more than max_join_size rows (error 1104)",
    ),
    SessionVariable(
        "sql_mode",
        # Not replaced by '': in this mode the empty literal is NULL, and so would be the result.
        "REPLACE(@@SESSION.sql_mode, 'EMPTY_STRING_IS_NULL', ',')",
        "FIND_IN_SET('EMPTY_STRING_IS_NULL', @@SESSION.sql_mode) > 0",
        "an empty string is stored as NULL, which the queue's columns refuse (error 1048)",
    ),
    SessionVariable(
        "timestamp",
        "DEFAULT",
        "TIMESTAMPDIFF(SECOND, NOW(), SYSDATE()) NOT BETWEEN -60 AND 60",
        "the queue uses this time as the current time",
    ),
)
"""Session variables on MySQL and MariaDB. Only MariaDB has the mode EMPTY_STRING_IS_NULL. No privilege is needed."""

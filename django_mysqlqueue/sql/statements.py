"""What the text of a statement tells about its effect, and statements that nobody sees."""

from __future__ import annotations

import contextlib
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper

_PLAIN = re.compile(
    r"""
    (?>\s | \( | /\*(?!M?!)(?>.*?\*/) | (?:--|\#)[^\n]*\n)*+
    (?: (?:SELECT|INSERT|UPDATE|DELETE|REPLACE|WITH|VALUES|TABLE|SHOW|EXPLAIN|DESCRIBE|DESC|DO|SAVEPOINT)\b
      | RELEASE\s+SAVEPOINT\b
      | ROLLBACK\s+TO\b
      | SET\s+TRANSACTION\s+ISOLATION\s+LEVEL\s+[\w\s]+$ )
    """,
    re.IGNORECASE | re.DOTALL | re.VERBOSE,
)
"""The beginnings of statements that neither begin nor end a transaction, and change nothing in the session that
outlives the next transaction. Comments that a server executes (``/*!``) are not skipped."""
_QUOTED = re.compile(r"'[^']*'|\"[^\"]*\"|`[^`]*`")
_CALL = re.compile(r"\s*CALL\b[^;]*;?\s*$", re.IGNORECASE)


def is_plain(statement: str) -> bool:
    """Return whether it is certain that a statement changes neither the session nor whether a transaction is open.

    What is not known to be plain is not: the kinds of statements that do change them grow with each server version,
    and procedures and prepared statements hide them.
    """
    return _PLAIN.match(statement) is not None and (";" not in statement or not _is_several(statement))


def _is_several(statement: str) -> bool:
    """Return whether a semicolon may separate two statements, instead of being part of a quoted text."""
    text = statement.rstrip("; \t\r\n")
    if ";" not in text:
        return False
    # What hides a quotation mark: an escape (unless the SQL mode has none), or a comment.
    return any(sign in text for sign in ("\\", "/*", "--", "#")) or ";" in _QUOTED.sub("", text)


def is_call(statement: str) -> bool:
    """Return whether a statement only calls a procedure."""
    return _CALL.match(statement) is not None


def shortened(statement: str) -> str:
    """Return the beginning of a statement, on one line, to name it in an error."""
    return " ".join(statement.split())[:80]


def execute_unseen(connection: BaseDatabaseWrapper, statement: str) -> None:
    """Execute a statement by a cursor of the driver: without execute wrappers, logs, and checks of Django."""
    with connection.wrap_database_errors, contextlib.closing(connection.connection.cursor()) as cursor:
        cursor.execute(statement)

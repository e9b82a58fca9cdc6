"""Installing, comparing and removing the stored procedures."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from django.db import connections

from django_mysqlqueue.exceptions import OperationRefused
from django_mysqlqueue.options.conf import get_settings
from django_mysqlqueue.procedures.definitions import (
    CHARACTER_SET,
    COMMENT,
    SESSION,
    SQL_MODE,
    Procedure,
    procedures,
)
from django_mysqlqueue.sql.connection import apart
from django_mysqlqueue.sql.session import Session
from django_mysqlqueue.subscriptions.registry import subscriptions

CHANGED = ("sql_mode", "character_set_client", "character_set_results", "collation_connection", "lock_wait_timeout")
"""The session variables that are set for the installation. The connection is the project's."""
WAIT = 10
"""Seconds for which a DROP waits. MySQL lets it wait for each transaction that has called the procedure, and calls
wait for the DROP meanwhile."""


SYSDATE_IS_NOW = (
    "The server was started with --sysdate-is-now, so a client in plain SQL that sets its session's timestamp changes "
    "the clock of its calls: it may take messages from their owners."
)


class State(NamedTuple):
    """How the procedures of a database compare with those of this release and its settings."""

    missing: tuple[str, ...]
    different: tuple[str, ...]
    """Procedures of another release, or for other settings."""
    unknown: tuple[str, ...]
    """Procedures of the queue that this release does not have."""

    @property
    def is_installed(self) -> bool:
        """Whether any procedure of the queue is there."""
        return not self.missing or bool(self.different or self.unknown)

    @property
    def is_current(self) -> bool:
        """Whether nothing is to be done."""
        return not (self.missing or self.different or self.unknown)


def wanted(using: str) -> list[Procedure]:
    """Return the procedures of this release, for a database and the settings.

    Raises:
        OperationRefused: the database has no stored procedures.
    """
    connection = connections[using]
    if connection.vendor != "mysql":
        raise OperationRefused(f"The database {using!r} is {connection.display_name}, which has no stored procedures.")
    return procedures(
        get_settings(),
        subscriptions().values(),
        mariadb=connection.mysql_is_mariadb,  # type: ignore[attr-defined]
    )


def state(using: str) -> State:
    """Compare the procedures of a database with those of this release and its settings."""
    expected = {one.name: (one.comment, SQL_MODE, CHARACTER_SET) for one in wanted(using)}
    found = _installed(using)
    return State(
        missing=tuple(sorted(expected.keys() - found.keys())),
        different=tuple(sorted(name for name in expected.keys() & found.keys() if found[name] != expected[name])),
        unknown=tuple(sorted(found.keys() - expected.keys())),
    )


def follows_sessions(using: str) -> bool:
    """Return whether SYSDATE(), the clock of the procedures, follows the timestamp of a session (--sysdate-is-now)."""
    row = Session(using).row("SELECT SLEEP(0.001), SYSDATE(6) = NOW(6)")
    return row is not None and bool(row[1])


def install(using: str) -> State:
    """Create the procedures, replace those that differ, and remove those that this release does not have.

    Each statement commits by itself. On MySQL, a call fails (error 1305) if it comes between the DROP and the CREATE of
    a procedure that it needs. A DROP that waits for longer than ``WAIT`` for the transaction of a client is an error:
    install them again.

    Returns:
        What was different before.
    """
    before = state(using)
    changed = {*before.missing, *before.different}
    create = [one for one in wanted(using) if one.name in changed]
    if connections[using].mysql_is_mariadb:  # type: ignore[attr-defined]
        statements = [one.sql.replace("CREATE PROCEDURE", "CREATE OR REPLACE PROCEDURE", 1) for one in create]
    else:
        statements = [sql for one in create for sql in (f"DROP PROCEDURE IF EXISTS {one.name}", one.sql)]
    _run(using, [*statements, *(f"DROP PROCEDURE IF EXISTS {name}" for name in before.unknown)])
    return before


def remove(using: str) -> list[str]:
    """Drop all procedures of the queue, and return their names."""
    names = sorted(_installed(using))
    _run(using, (f"DROP PROCEDURE IF EXISTS {name}" for name in names))
    return names


def _installed(using: str) -> dict[str, tuple[str, ...]]:
    """Return the comment, the SQL mode and the character set of each procedure of the queue that is there, by name."""
    rows = Session(using).rows(
        "SELECT routine_name, routine_comment, sql_mode, character_set_client FROM information_schema.routines "
        "WHERE routine_schema = DATABASE() AND routine_type = 'PROCEDURE' AND routine_comment LIKE %s",
        (f"{COMMENT} %",),
    )
    return {name: tuple(rest) for name, *rest in rows}


def _run(using: str, statements: Iterable[str]) -> None:
    with apart(using), connections[using].cursor() as cursor:
        cursor.execute(f"SELECT {', '.join(f'@@SESSION.{name}' for name in CHANGED)}")
        before = cursor.fetchone()
        for statement in (*SESSION, f"SET SESSION lock_wait_timeout = {WAIT}"):
            cursor.execute(statement)
        try:
            for statement in statements:
                cursor.execute(statement)
        finally:
            cursor.execute(f"SET {', '.join(f'SESSION {name} = %s' for name in CHANGED)}", before)

"""The parts of SQL that differ between engines.

A multi-row statement always joins a derived table of literal keys, in key order, to the real table by primary key.
``IN`` lists would give the same results, but with them the optimizers scan small tables, lock rows of open
transactions, and follow the end of a growing table. A join cannot do that.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from django.db import DataError, Error, IntegrityError

from django_mysqlqueue.db.session_variables import SessionVariable
from django_mysqlqueue.names.keys import LANE_LENGTH, LANE_PREFIXES

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper


def lane_partition(column: str) -> str:
    """Return the partition for priority 0, for a column of partition keys: the rule of ``names.keys.lane_of``."""
    prefixes = ", ".join(f"'{prefix}'" for prefix in LANE_PREFIXES)
    return (
        f"CASE WHEN SUBSTR({column}, 1, {len(LANE_PREFIXES[0])}) IN ({prefixes}) "
        f"THEN SUBSTR({column}, {LANE_LENGTH + 1}) ELSE {column} END"
    )


class Dialect(ABC):
    """The SQL of one engine. Methods return SQL text with ``%s`` placeholders."""

    name: str
    now_ms: str
    """The database's time in epoch milliseconds."""
    share_lock: str
    """The suffix of a SELECT that lets other transactions read and lock shared, but not write."""
    for_update: str
    skip_locked: str
    greatest: str
    max_rows: int
    """Maximum number of rows of one derived table of keys."""
    has_row_locks: bool
    oldest_transaction: tuple[str, ...]
    """SELECTs of the age in seconds and the connection's id of the transaction that has been open longest.

    If the server refuses one, the next one is tried.
    """
    sequencer_holder: tuple[str, ...]
    """SELECTs of the id, user and age in seconds of the connection that holds the sequencer's mutex, and of 1; or, with
    0, of the one whose transaction has locked rows and has been open longest.

    If the server refuses one, or it returns no row, the next one is tried. A row of NULLs says that nobody holds it.
    """
    table_size: tuple[str, ...]
    """The SELECT of about how many bytes of disk the table of the parameter takes, between what must be executed before
    and after it. SQLite tells the size of its file."""
    current_user: str | None = None
    """The expression for the user and host of the connection, or None if the engine has no users."""
    session: tuple[SessionVariable, ...] = ()
    """The variables that must have a certain value in every session of the queue."""

    def placeholders(self, rows: int, row: str) -> str:
        """Return ``row`` repeated, for a multi-row VALUES."""
        return ", ".join([row] * rows)

    @abstractmethod
    def rows(self, names: Sequence[str], count: int) -> str:
        """Return a derived table ``v`` of ``count`` rows of literals, with named columns."""

    @abstractmethod
    def force_index(self, name: str) -> str:
        """Return the hint, after a table's alias, that makes the optimizer use an index."""

    def explained(self, select: str) -> str | None:
        """Return the statement whose column ``rows`` is about how many rows a SELECT reads; None if there is none."""
        return None

    @abstractmethod
    def join_to(self, table: str, alias: str, index: str = "PRIMARY", *, left: bool = False) -> str:
        """Return a join that reads its left side first, and ``table`` by an index, regardless of statistics.

        With few rows, the optimizers consider another index, or none, as good as the given one. Then they lock rows
        that the statement does not need.
        """

    @abstractmethod
    def ending(self, column: str, characters: int) -> str:
        """Return the expression for the last characters of a text."""

    @abstractmethod
    def appended(self, column: str, text: str) -> str:
        """Return the expression for a column with a literal text at its end."""

    @abstractmethod
    def union(self, *selects: str) -> str:
        """Return one statement of SELECTs, each with an ORDER BY and a LIMIT of its own."""

    @abstractmethod
    def update_joined(
        self, table: str, names: Sequence[str], count: int, on: str, assign: Mapping[str, str], where: str = ""
    ) -> str:
        """Return an UPDATE of ``table`` (alias ``s``) joined to a derived table ``v`` by its primary key."""

    @abstractmethod
    def delete_joined(self, table: str, names: Sequence[str], count: int, on: str, where: str = "") -> str:
        """Return a DELETE from ``table`` (alias ``s``) joined to a derived table ``v`` by its primary key."""

    @abstractmethod
    def on_conflict(self, key: Sequence[str], assign: Mapping[str, str]) -> str:
        """Return the clause that makes an INSERT an upsert."""

    @abstractmethod
    def on_conflict_keep(self, table: str, key: Sequence[str]) -> str:
        """Return the clause that makes an INSERT of an existing key do nothing.

        Unlike IGNORE, it hides no other error.
        """

    @abstractmethod
    def matches(self, column: str) -> str:
        """Return the condition that a text column matches a ``pattern`` parameter, byte by byte."""

    @abstractmethod
    def pattern(self, text: str) -> str:
        """Return the parameter for ``matches`` from a pattern: ``*`` matches any text, ``?`` one character."""

    @abstractmethod
    def shard(self, column: str) -> str:
        """Return the condition that the CRC-32 of a text column, modulo one parameter, equals the next parameter."""

    @abstractmethod
    def inserted_id(self, table: str, column: str, place: int, count: int) -> str:
        """Return the expression for the id of a row of this session's last INSERT, for the next INSERT."""

    def begin_manual(self, connection: BaseDatabaseWrapper) -> None:  # noqa: B027  # Only SQLite needs it.
        """With autocommit off, make sure that a transaction is open before a savepoint is set."""

    @abstractmethod
    def is_retryable(self, error: Error) -> bool:
        """Return whether a transaction can run again after an error: it lost to another, or waited for too long."""

    def refuses_row(self, error: Error) -> bool:
        """Return whether the database refuses a row because of what is in it, by a constraint, a type or a trigger."""
        return isinstance(error, (DataError, IntegrityError))

    def hides_transactions(self, error: Error) -> bool:
        """Return whether the server refuses to show its transactions, in general or to this user."""
        return False

    @abstractmethod
    def read_committed(self, connection: BaseDatabaseWrapper) -> str | None:
        """Return the statement that makes the next transaction READ COMMITTED, or None if it is that by default."""

    def locks_reads(self, connection: BaseDatabaseWrapper) -> bool:
        """Return whether plain reads lock rows in this connection's transactions (SERIALIZABLE)."""
        return False

    @abstractmethod
    def session_timeouts(self, *, idle: float, lock_wait: float, network: float) -> Mapping[str, str]:
        """Return the session variables that make the server release the locks of a frozen client, in seconds."""

    def set_session(self, more: Mapping[str, str]) -> str | None:
        """Return the statement that sets the variables of ``session`` and more, or None if there are none."""
        values = {variable.name: variable.value for variable in self.session} | dict(more)
        if not values:
            return None
        return "SET SESSION " + ", ".join(f"{name} = {value}" for name, value in values.items())

    def session_faults(self, connection: BaseDatabaseWrapper) -> list[tuple[SessionVariable, str]]:
        """Return the variables of ``session`` that have another value on this connection, with that value.

        Autocommit is checked only if Django assumes that it is on.
        """
        wanted = [one for one in self.session if one.name != "autocommit" or connection.get_autocommit()]
        if not wanted:
            return []
        with connection.cursor() as cursor:
            # All in one row: with sql_select_limit, even SHOW VARIABLES leaves some out.
            cursor.execute(f"SELECT {', '.join(f'{one.wrong}, @@SESSION.{one.name}' for one in wanted)}")
            row = cursor.fetchone()
        return [(one, str(row[2 * place + 1])) for place, one in enumerate(wanted) if row[2 * place]]

    def if_autocommit(self, connection: BaseDatabaseWrapper, value: str) -> str:
        """Return ``value``, or an expression that raises an error if the session would not commit by itself.

        See ``is_uncommitted``.
        """
        return value

    def is_uncommitted(self, error: Error) -> bool:
        """Return whether it is the error of ``if_autocommit``."""
        return False

    def has_committed(self, connection: BaseDatabaseWrapper) -> None:  # noqa: B027  # Only servers need it.
        """Note that a statement with ``if_autocommit`` has succeeded on this connection."""

    @abstractmethod
    def max_statement_bytes(self, connection: BaseDatabaseWrapper) -> int:
        """Return the maximum length of a statement in bytes."""

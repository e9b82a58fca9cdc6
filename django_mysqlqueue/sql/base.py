"""The pieces of SQL that engines spell differently.

A multi-row statement here always joins a derived table of literal keys, in key
order, to the real table by primary key. ``IN`` lists would do for results, but
on a small table the optimizers scan it, lock rows of open transactions and run
after the tail; the join cannot.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from django.db import Error

from django_mysqlqueue.limits import SessionVariable

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper


class Dialect(ABC):
    """One engine's spelling. Methods return SQL text with ``%s`` placeholders."""

    name: str
    now_ms: str
    """The database's clock in epoch milliseconds."""
    share_lock: str
    """Suffix of a SELECT that lets others read and lock shared, but not write."""
    for_update: str
    skip_locked: str
    greatest: str
    max_rows: int
    """Rows that one derived table of keys may have."""
    has_row_locks: bool
    oldest_transaction: tuple[str, ...]
    """SELECTs of the age in seconds and the connection's id of the transaction that has been open longest.

    The next one is for when the server refuses the one before it.
    """
    session: tuple[SessionVariable, ...] = ()
    """Variables that every session of the queue needs at one value."""

    def placeholders(self, rows: int, row: str) -> str:
        """``row`` repeated, for a multi-row VALUES."""
        return ", ".join([row] * rows)

    @abstractmethod
    def rows(self, names: Sequence[str], count: int) -> str:
        """A derived table ``v`` of ``count`` rows of literals, its columns named."""

    @abstractmethod
    def force_index(self, name: str) -> str:
        """A hint after a table's alias that keeps the optimizer on one index."""

    @abstractmethod
    def join_to(self, table: str, alias: str, index: str = "PRIMARY", *, left: bool = False) -> str:
        """A join that reads its left side first, and ``table`` by that index whatever its statistics say.

        With few rows the optimizers find another index, or none, as good: then they lock rows of other people.
        """

    @abstractmethod
    def ending(self, column: str, characters: int) -> str:
        """The last characters of a text."""

    @abstractmethod
    def union(self, select: str, count: int) -> str:
        """``count`` times a SELECT that has an ORDER BY and a LIMIT of its own, as one statement."""

    @abstractmethod
    def update_joined(
        self, table: str, names: Sequence[str], count: int, on: str, assign: Mapping[str, str], where: str = ""
    ) -> str:
        """UPDATE of ``table`` (alias ``s``) joined to a derived table ``v`` by its primary key."""

    @abstractmethod
    def delete_joined(self, table: str, names: Sequence[str], count: int, on: str, where: str = "") -> str:
        """DELETE from ``table`` (alias ``s``) joined to a derived table ``v`` by its primary key."""

    @abstractmethod
    def on_conflict(self, key: Sequence[str], assign: Mapping[str, str]) -> str:
        """The clause that turns an INSERT into an upsert."""

    @abstractmethod
    def on_conflict_keep(self, table: str, key: Sequence[str]) -> str:
        """The clause that makes an INSERT of an existing key do nothing.

        Unlike IGNORE it hides no other error.
        """

    @abstractmethod
    def matches(self, column: str) -> str:
        """The condition that a text column matches a ``pattern`` parameter, byte for byte."""

    @abstractmethod
    def pattern(self, text: str) -> str:
        """A pattern with ``*`` for any text and ``?`` for one character, as ``matches`` takes it."""

    @abstractmethod
    def shard(self, column: str) -> str:
        """The condition that the CRC-32 of a text column, modulo one parameter, is the next parameter."""

    def begin_manual(self, connection: BaseDatabaseWrapper) -> None:  # noqa: B027  # only SQLite has to
        """With autocommit off: sees to it that a transaction is open before a savepoint is set."""

    @abstractmethod
    def is_retryable(self, error: Error) -> bool:
        """A deadlock or a lock wait time-out: the same transaction may succeed when run again."""

    def hides_transactions(self, error: Error) -> bool:
        """The server cannot show its transactions, or not to this user."""
        return False

    @abstractmethod
    def read_committed(self, connection: BaseDatabaseWrapper) -> str | None:
        """What makes the next transaction READ COMMITTED where the connection's default is another."""

    def locks_reads(self, connection: BaseDatabaseWrapper) -> bool:
        """Whether plain reads lock what they read inside this connection's transactions (SERIALIZABLE)."""
        return False

    @abstractmethod
    def session_timeouts(self, *, idle: float, lock_wait: float, network: float) -> Mapping[str, str]:
        """Session variables with which the server frees a frozen client's locks (seconds)."""

    def set_session(self, more: Mapping[str, str]) -> str | None:
        """The statement that sets the variables of ``session``, and more; None if there are none."""
        values = {variable.name: variable.value for variable in self.session} | dict(more)
        if not values:
            return None
        return "SET SESSION " + ", ".join(f"{name} = {value}" for name, value in values.items())

    def session_faults(self, connection: BaseDatabaseWrapper) -> list[tuple[SessionVariable, str]]:
        """The variables of ``session`` that this connection has at another value, and that value.

        Autocommit only counts where Django believes that it is on.
        """
        wanted = [one for one in self.session if one.name != "autocommit" or connection.get_autocommit()]
        if not wanted:
            return []
        with connection.cursor() as cursor:
            # One row: under sql_select_limit even SHOW VARIABLES leaves some out.
            cursor.execute(f"SELECT {', '.join(f'{one.wrong}, @@SESSION.{one.name}' for one in wanted)}")
            row = cursor.fetchone()
        return [(one, str(row[2 * place + 1])) for place, one in enumerate(wanted) if row[2 * place]]

    def if_autocommit(self, connection: BaseDatabaseWrapper, value: str) -> str:
        """``value``, or an error (``is_uncommitted``) in a session that would not commit the statement by itself."""
        return value

    def is_uncommitted(self, error: Error) -> bool:
        """The error of ``if_autocommit``."""
        return False

    def has_committed(self, connection: BaseDatabaseWrapper) -> None:  # noqa: B027  # only servers have to ask
        """A statement with ``if_autocommit`` has succeeded on this connection."""

    @abstractmethod
    def max_statement_bytes(self, connection: BaseDatabaseWrapper) -> int:
        """The longest statement that the server takes, in bytes."""

"""The pieces of SQL that engines spell differently.

A multi-row statement here always joins a derived table of literal keys, in key
order, to the real table by primary key. ``IN`` lists would do for results, but
on a small table the optimizers scan it, lock rows of open transactions and run
after the tail; the join cannot.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from django.db import Error

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
    join: str
    """A join that reads its left side first."""
    greatest: str
    max_rows: int
    """Rows that one derived table of keys may have."""
    has_row_locks: bool
    oldest_transaction: tuple[str, ...]
    """SELECTs of the age in seconds and the connection's id of the transaction that has been open longest.

    The next one is for when the server refuses the one before it.
    """

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
    def ending(self, column: str, characters: int) -> str:
        """The last characters of a text."""

    @abstractmethod
    def union(self, select: str, count: int) -> str:
        """``count`` times a SELECT that has an ORDER BY and a LIMIT of its own, as one statement."""

    @abstractmethod
    def update_joined(
        self, table: str, names: Sequence[str], count: int, on: str, assign: Mapping[str, str], where: str = ""
    ) -> str:
        """UPDATE of ``table`` (alias ``s``) joined to a derived table ``v``."""

    @abstractmethod
    def delete_joined(self, table: str, names: Sequence[str], count: int, on: str, where: str = "") -> str:
        """DELETE from ``table`` (alias ``s``) joined to a derived table ``v``."""

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
    def session_timeouts(self, *, idle: float, lock_wait: float, network: float) -> Iterable[str]:
        """Statements after which a frozen client's locks are freed by the server (seconds)."""

    @abstractmethod
    def max_statement_bytes(self, connection: BaseDatabaseWrapper) -> int:
        """The longest statement that the server takes, in bytes."""

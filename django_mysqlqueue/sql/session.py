"""One short READ COMMITTED transaction for each operation of the protocol."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

from django.db import DatabaseError, Error, connections, transaction

from django_mysqlqueue.backoff import Backoff
from django_mysqlqueue.exceptions import CommitOutcomeUnknown
from django_mysqlqueue.sql import dialect_of

logger = logging.getLogger("django_mysqlqueue.service")

ATTEMPTS = 6
"""How often a transaction is tried that meets a deadlock or a lock wait time-out."""
RETRY = Backoff(initial=0.01, jitter=1.0)
"""The pause before the next try: anything from 0 to twice the backoff, so that two that met do not meet again."""

CHUNK_BYTES = 131_072
"""Text that one statement carries beside its keys: at four bytes a character and
escaped it still fits into a megabyte, the least that servers are set to."""

UNION_TERMS = 200
"""SELECTs in one UNION ALL (SQLite allows 500)."""


T = TypeVar("T")
R = TypeVar("R")


class Retry(Exception):
    """What a transaction read has changed before it wrote: roll it back and run it again."""


def last_row(columns: int) -> str:
    """What ends a statement for ``Session.whole``."""
    return f" UNION ALL SELECT NULL{', 0' * (columns - 1)}"


class Session:
    """Executes statements on one connection; the service layer's only way to SQL."""

    def __init__(self, using: str) -> None:
        self.using = using
        self.connection = connections[using]
        self.dialect = dialect_of(self.connection)

    def execute(self, sql: str, parameters: Sequence[Any] = ()) -> int:
        """Runs a statement and returns its row count (for an UPDATE: rows matched)."""
        with self.connection.cursor() as cursor:
            cursor.execute(sql, parameters)
            return int(cursor.rowcount)

    def rows(self, sql: str, parameters: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        with self.connection.cursor() as cursor:
            cursor.execute(sql, parameters)
            return list(cursor.fetchall())

    def whole(self, sql: str, parameters: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """``rows`` where a missing row would be acted upon: the answer of a UNION ALL that ends in ``last_row()``.

        Raises:
            DatabaseError: that row has not come: something has cut the answer.
        """
        rows = self.rows(sql, parameters)
        if not rows or rows[-1][0] is not None:
            raise DatabaseError(
                f"The database has returned {len(rows)} rows and not the last one: something cuts its answers, for "
                f"example sql_select_limit. Nothing was changed. Statement: {sql[:200]}"
            )
        return rows[:-1]

    def row(self, sql: str, parameters: Sequence[Any] = ()) -> tuple[Any, ...] | None:
        with self.connection.cursor() as cursor:
            cursor.execute(sql, parameters)
            found: tuple[Any, ...] | None = cursor.fetchone()
            return found

    def force_index(self, name: str) -> str:
        """A hint after a table's alias that keeps the optimizer on one index."""
        return self.dialect.force_index(name)

    def chunks(self, items: Sequence[R], weight: Callable[[R], int] | None = None) -> Iterator[Sequence[R]]:
        """``items`` in pieces that one derived table can take.

        ``weight`` gives the bytes of an item that is more than a key: a piece
        then stays far below any server's max_allowed_packet.
        """
        start, size = 0, 0
        for place, item in enumerate(items):
            length = 0 if weight is None else weight(item)
            if place > start and (place - start >= self.dialect.max_rows or size + length > CHUNK_BYTES):
                yield items[start:place]
                start, size = place, 0
            size += length
        if items:
            yield items[start:]

    def now(self) -> int:
        """The database's clock in epoch milliseconds."""
        row = self.row(f"SELECT {self.dialect.now_ms}")
        assert row is not None  # noqa: S101  # a SELECT without FROM has one row
        return int(row[0])


def flat(rows: Iterable[Sequence[Any]]) -> list[Any]:
    """The values of some rows, one after another: the parameters of a multi-row statement."""
    return [value for row in rows for value in row]


def run(using: str, operation: Callable[[Session], T]) -> T:
    """Runs ``operation`` in a transaction of its own and commits it.

    It is rolled back whole and run again, a bounded number of times with
    jitter, on a deadlock, a lock wait time-out or ``Retry``. Inside a
    transaction that somebody else has opened (a ``TestCase``) it joins that
    one, at its isolation level, and never runs twice.

    Raises:
        CommitOutcomeUnknown: the connection broke during COMMIT.
        django.db.Error: whatever else the database refuses.
    """
    session = Session(using)
    connection = session.connection
    if connection.in_atomic_block:
        return operation(session)
    for attempt in range(1, ATTEMPTS + 1):
        committing = False
        try:
            statement = session.dialect.read_committed(connection)
            if statement is not None:
                session.execute(statement)
            with transaction.atomic(using):
                result = operation(session)
                committing = True
        except Retry:
            if attempt == ATTEMPTS:
                raise
        except Error as error:
            if committing and not session.dialect.is_retryable(error):
                raise CommitOutcomeUnknown(f"COMMIT on {using!r} failed: {error}") from error
            if attempt == ATTEMPTS or not session.dialect.is_retryable(error):
                raise
            logger.debug("transaction.retried attempt=%d error=%s", attempt, error)
        else:
            return result
        time.sleep(RETRY.delay(attempt))
    raise AssertionError("unreachable")

"""One short READ COMMITTED transaction for each operation of the protocol."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import time
from collections import namedtuple
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, TypeVar

from django.db import DatabaseError, Error, connections, transaction

from django_mysqlqueue.exceptions import CommitOutcomeUnknown
from django_mysqlqueue.options.backoff import Backoff
from django_mysqlqueue.sql import dialect_of
from django_mysqlqueue.sql.packets import Packets, packets_of

logger = logging.getLogger("django_mysqlqueue.service")

ATTEMPTS = 6
"""Maximum number of attempts at a transaction that meets deadlocks or lock wait timeouts."""
RETRY = Backoff(initial=0.01, jitter=1.0)
"""The pause before the next attempt: random, from 0 to twice the backoff, so that two that met do not meet again."""

CHUNK_BYTES = 131_072
"""Characters of text in one statement, in addition to its keys. With four bytes per character and escaped, they fit
into a megabyte, the smallest ``max_allowed_packet`` in use."""

UNION_TERMS = 200
"""Maximum number of SELECTs in one UNION ALL (SQLite allows 500)."""


T = TypeVar("T")
R = TypeVar("R")
Answer = Callable[[], list[tuple[Any, ...]]]


class Retry(Exception):
    """A row has changed since the transaction read it: roll the transaction back, and run it again."""


def last_row(columns: int) -> str:
    """Return the end of a statement for ``Session.whole``."""
    return f" UNION ALL SELECT NULL{', 0' * (columns - 1)}"


def above(key: Sequence[str]) -> str:
    """Return the condition that a row ``s`` is above a primary key; its parameters are those of ``above_values``.

    The servers read ranges of the index for it, not for row values.
    """
    terms = (
        " AND ".join([*(f"s.{name} = %s" for name in key[:number]), f"s.{key[number]} > %s"])
        for number in range(len(key))
    )
    return f"s.{key[0]} >= %s AND ({' OR '.join(f'({term})' for term in terms)})"


def above_values(place: Sequence[Any]) -> tuple[Any, ...]:
    """Return the parameters of ``above`` for a primary key."""
    return (place[0], *(value for number in range(len(place)) for value in place[: number + 1]))


def among(column: str, values: Collection[Any]) -> str:
    """Return the condition that a column has one of some values, which are its parameters."""
    return f"{column} IN ({', '.join(['%s'] * len(values))})" if values else "0 = 1"


def matches(condition: str) -> str:
    """Return the expression for whether a row meets a condition; all rows meet an empty one."""
    return f"CASE WHEN {condition} THEN 1 ELSE 0 END" if condition else "1"


class Session:
    """A connection that executes statements. The service layer sends all its SQL through it."""

    def __init__(self, using: str) -> None:
        self.using = using
        self.connection = connections[using]
        self.dialect = dialect_of(self.connection)

    def execute(self, sql: str, parameters: Sequence[Any] = ()) -> int:
        """Execute a statement, and return its row count (for an UPDATE, the number of rows that matched)."""
        with self.connection.cursor() as cursor:
            cursor.execute(sql, parameters)
            return int(cursor.rowcount)

    def _packets(self) -> Packets | None:
        packets = packets_of(self.connection)
        return packets if packets is not None and packets.is_usable and self.connection.in_atomic_block else None

    def later(
        self,
        sql: str,
        parameters: Sequence[Any] = (),
        *,
        rows: int | None = None,
        otherwise: Callable[[], Exception] = Retry,
    ) -> None:
        """Execute a statement of a transaction at the latest with its COMMIT.

        ``rows``: the number of rows that it must match. ``otherwise`` returns what is raised if it does not, now or
        then.
        """
        packets = self._packets()
        if packets is None:
            if self.execute(sql, parameters) != rows and rows is not None:
                raise otherwise()
            return
        packets.add(sql, parameters)
        if rows is not None:
            packets.require(rows, otherwise)

    def ask(self, sql: str, parameters: Sequence[Any] = ()) -> Answer:
        """Return a function that returns the rows of a SELECT, which is sent with those that were asked for before.

        Call the functions in the order in which they were asked for, before anything else is executed.
        """
        packets = self._packets()
        if packets is None:
            return lambda: self.rows(sql, parameters)
        waiting = packets.add(sql, parameters)

        def answer() -> list[tuple[Any, ...]]:
            if waiting.rows is None:
                packets.send()
            if waiting.rows is None:
                raise DatabaseError("A statement of a transaction that was lost has no answer.")
            return list(waiting.rows)

        return answer

    def rows(self, sql: str, parameters: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """Return all rows of a SELECT."""
        with self.connection.cursor() as cursor:
            cursor.execute(sql, parameters)
            return list(cursor.fetchall())

    def whole(self, sql: str, parameters: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """Return all rows of a UNION ALL that ends in ``last_row()``, if a missing row would lead to a wrong decision.

        Raises:
            DatabaseError: the last row is missing, so something has cut off the answer.
        """
        rows = self.rows(sql, parameters)
        if not rows or rows[-1][0] is not None:
            raise DatabaseError(
                f"The database returned only the first {len(rows)} rows of a result: something truncates results, for "
                f"example sql_select_limit. Nothing was changed. Statement: {sql[:200]}"
            )
        return rows[:-1]

    def row(self, sql: str, parameters: Sequence[Any] = ()) -> tuple[Any, ...] | None:
        """Return the first row of a SELECT, or None."""
        with self.connection.cursor() as cursor:
            cursor.execute(sql, parameters)
            found: tuple[Any, ...] | None = cursor.fetchone()
            return found

    def one(self, sql: str, parameters: Sequence[Any] = ()) -> tuple[Any, ...]:
        """Return the row of a SELECT that always has one, such as an aggregate."""
        row = self.row(sql, parameters)
        assert row is not None  # noqa: S101
        return row

    def named(self, sql: str, parameters: Sequence[Any] = ()) -> list[Any]:
        """Return all rows of a SELECT as named tuples, whose attributes are its columns."""
        with self.connection.cursor() as cursor:
            cursor.execute(sql, parameters)
            row = _row_class(*(column[0] for column in cursor.description))
            return list(map(row._make, cursor.fetchall()))

    def each(self, select: str, parameters: Sequence[Sequence[Any]], *, whole: int = 0) -> list[tuple[Any, ...]]:
        """Return the rows of a SELECT for each of some parameters, in as few statements as a UNION ALL allows.

        ``whole``: the number of columns, if a missing row would lead to a wrong decision.
        """
        found: list[tuple[Any, ...]] = []
        for part in pieces(parameters, UNION_TERMS):
            sql = self.dialect.union(*[select] * len(part))
            found += self.whole(sql + last_row(whole), flat(part)) if whole else self.rows(sql, flat(part))
        return found

    def joined(
        self,
        select: str,
        names: Sequence[str],
        keys: Iterable[Any],
        joins: str,
        *,
        before: Sequence[Any] = (),
        after: Sequence[Any] = (),
        plain: bool = False,
    ) -> list[Any]:
        """Return the rows of a SELECT from some keys that are joined to tables as named tuples, in chunks of the keys.

        ``names``: the columns of the keys as ``v``, such as ``"gt"``; keys are tuples if there are several. ``before``,
        ``after``: parameters of the SELECT and of the joins. ``plain``: whether to return plain tuples, which cost
        less: for claims and flushes.
        """
        read = self.rows if plain else self.named
        found: list[Any] = []
        for chunk in self.chunks(sorted(set(keys))):
            sql = f"{select} FROM {self.dialect.rows(names, len(chunk))} {joins}"
            found += read(sql, (*before, *_values(names, chunk), *after))
        return found

    def ask_joined(
        self, select: str, names: Sequence[str], keys: Iterable[Any], joins: str, *, after: Sequence[Any] = ()
    ) -> Answer:
        """Do the same as ``joined`` with plain tuples, and as ``ask``."""
        answers = [
            self.ask(f"{select} FROM {self.dialect.rows(names, len(chunk))} {joins}", (*_values(names, chunk), *after))
            for chunk in self.chunks(sorted(set(keys)))
        ]
        return lambda: [row for answer in answers for row in answer()]

    def among(
        self, sql: str, keys: Iterable[Any], *, before: Sequence[Any] = (), after: Sequence[Any] = ()
    ) -> list[tuple[Any, ...]]:
        """Return the rows of a SELECT that has ``IN {keys}``, in chunks of the keys.

        ``before``, ``after``: parameters before and after those of the keys.
        """
        found: list[tuple[Any, ...]] = []
        for chunk in self.chunks(sorted(set(keys))):
            marks = f"({self.dialect.placeholders(len(chunk), '%s')})"
            found += self.rows(sql.replace("{keys}", marks), (*before, *chunk, *after))
        return found

    def insert(
        self,
        table: str,
        columns: Sequence[str],
        rows: Sequence[Any],
        end: str = "",
        *,
        also: Mapping[str, str] | None = None,
    ) -> None:
        """Insert rows, in chunks, as ``later``.

        ``end``: the end of the statement, such as the clause for keys that exist. ``also``: further columns, with SQL.
        """
        more = also or {}
        row = f"({', '.join([*['%s'] * len(columns), *more.values()])})"
        columns = [*columns, *more]
        for chunk in self.chunks(rows):
            values = self.dialect.placeholders(len(chunk), row)
            self.later(f"INSERT INTO {table} ({', '.join(columns)}) VALUES {values}{end}", flat(chunk))

    def update(
        self,
        table: str,
        names: Sequence[str],
        rows: Sequence[Any],
        on: str,
        assign: Mapping[str, str],
        where: str = "",
        *,
        after: Sequence[Any] = (),
    ) -> int:
        """Update the rows of a table (``s``) that have the keys in rows of values (``v``); return how many matched.

        ``after``: parameters of ``on`` and of ``where``.
        """
        changed = 0
        for chunk in self.chunks(rows):
            sql = self.dialect.update_joined(table, names, len(chunk), on, assign, where)
            changed += self.execute(sql, (*_values(names, chunk), *after))
        return changed

    def update_later(
        self,
        table: str,
        names: Sequence[str],
        rows: Sequence[Any],
        on: str,
        assign: Mapping[str, str],
        *,
        after: Sequence[Any] = (),
    ) -> None:
        """Do the same as ``update`` and as ``later``."""
        for chunk in self.chunks(rows):
            sql = self.dialect.update_joined(table, names, len(chunk), on, assign)
            self.later(sql, (*_values(names, chunk), *after))

    def delete(
        self,
        table: str,
        names: Sequence[str],
        keys: Sequence[Any],
        on: str,
        where: str = "",
        *,
        after: Sequence[Any] = (),
    ) -> int:
        """Delete the rows of a table (``s``) that have some keys (``v``); return how many.

        ``after``: parameters of ``on`` and of ``where``.
        """
        deleted = 0
        for chunk in self.chunks(keys):
            sql = self.dialect.delete_joined(table, names, len(chunk), on, where)
            deleted += self.execute(sql, (*_values(names, chunk), *after))
        return deleted

    @contextlib.contextmanager
    def named_locks(self, names: Iterable[str]) -> Iterator[None]:
        """Hold locks of the server (``GET_LOCK``) while a block runs, except those that others hold for too long.

        SQLite has none, and needs none.
        """
        if not self.dialect.has_row_locks:
            yield
            return
        prefix = f"mysqlqueue/{self.connection.settings_dict['NAME']}/"
        locks = [hashlib.sha256(f"{prefix}{name}".encode()).hexdigest() for name in sorted(names)]
        take = ", ".join(["GET_LOCK(%s, @@innodb_lock_wait_timeout)"] * len(locks))
        release = ", ".join(["RELEASE_LOCK(%s)"] * len(locks))
        self.rows(f"SELECT {take}", locks)
        try:
            yield
        except BaseException:
            with contextlib.suppress(Error):  # The connection is lost, and with it the locks.
                self.rows(f"SELECT {release}", locks)
            raise
        self.rows(f"SELECT {release}", locks)

    def force_index(self, name: str) -> str:
        """Return the hint, after a table's alias, that makes the optimizer use an index."""
        return self.dialect.force_index(name)

    def chunks(self, items: Sequence[R], weight: Callable[[R], int] | None = None) -> Iterator[Sequence[R]]:
        """Yield items in chunks that fit one derived table.

        ``weight``: returns the length of an item's text, for items that are more than a key. A chunk then stays far
        below any server's ``max_allowed_packet``.
        """
        if weight is None:
            yield from pieces(items, self.dialect.max_rows)
            return
        start, size = 0, 0
        for place, item in enumerate(items):
            length = weight(item)
            if place > start and (place - start >= self.dialect.max_rows or size + length > CHUNK_BYTES):
                yield items[start:place]
                start, size = place, 0
            size += length
        if items:
            yield items[start:]

    def now(self) -> int:
        """Return the database's time in epoch milliseconds."""
        return int(self.one(f"SELECT {self.dialect.now_ms}")[0])


@functools.lru_cache
def _row_class(*names: str) -> Any:
    return namedtuple("Row", names, rename=True)


def grouped(pairs: Iterable[tuple[T, R]]) -> dict[T, list[R]]:
    """Return the second ones of some pairs by their first ones."""
    found: dict[T, list[R]] = {}
    for key, value in pairs:
        found.setdefault(key, []).append(value)
    return found


def built(cls: type[T], row: Any, **values: Any) -> T:
    """Return a dataclass: its fields are the columns with their names of a named row, and other values."""
    fields = cls.__dataclass_fields__  # type: ignore[attr-defined]
    return cls(**{name: value for name, value in row._asdict().items() if name in fields} | values)


def _values(names: Sequence[str], rows: Sequence[Any]) -> Sequence[Any]:
    """Return the values of rows, which are no tuples if there is one name."""
    return flat(rows) if len(names) > 1 else rows


def pieces(items: Sequence[R], size: int) -> Iterator[Sequence[R]]:
    """Yield items in pieces of at most ``size``."""
    for start in range(0, len(items), size):
        yield items[start : start + size]


def flat(rows: Iterable[Sequence[Any]]) -> list[Any]:
    """Return the values of rows in one list, as the parameters of a multi-row statement."""
    return list(chain.from_iterable(rows))


def run(using: str, operation: Callable[[Session], T], *, attempts: int = ATTEMPTS, alone: bool = False) -> T:
    """Run an operation in a READ COMMITTED transaction of its own, and commit it.

    After a deadlock, a lock wait timeout or ``Retry``, the transaction is rolled back and run again, up to ``attempts``
    times in all. Inside a transaction that is already open (a ``TestCase``), the operation joins it, at its isolation
    level, and runs only once. ``alone``: whether the operation is one statement, which needs no BEGIN and no COMMIT.

    Raises:
        CommitOutcomeUnknown: the connection broke during COMMIT.
        django.db.Error: any other error of the database.
    """
    session = Session(using)
    connection = session.connection
    if connection.in_atomic_block:
        return operation(session)
    for attempt in range(1, attempts + 1):
        committing = False
        try:
            statement = session.dialect.read_committed(connection)
            if statement is not None:
                session.execute(statement)
            with contextlib.nullcontext() if alone and connection.get_autocommit() else transaction.atomic(using):
                result = operation(session)
                committing = True
        except Retry:
            if attempt == attempts:
                raise
        except Error as error:
            packets = packets_of(connection)
            is_undone = packets is not None and packets.undone is error
            if committing and not is_undone and not session.dialect.is_retryable(error):
                raise CommitOutcomeUnknown(f"COMMIT on {using!r} failed: {error}") from error
            if attempt == attempts or not session.dialect.is_retryable(error):
                raise
            logger.debug("transaction.retried attempt=%d error=%s", attempt, error)
        else:
            return result
        time.sleep(RETRY.delay(attempt))
    raise AssertionError("unreachable")

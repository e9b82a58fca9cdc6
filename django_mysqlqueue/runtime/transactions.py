"""The transaction of an atomic handler: that it is the same one at its end, and that its COMMIT was successful."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from django.db import connections, transaction
from django.db.transaction import TransactionManagementError

from django_mysqlqueue.sql.connection import (
    expect_commit,
    has_committed,
    leave_blocks,
    mark_transaction,
    must_roll_back,
    prove_transaction,
)
from django_mysqlqueue.sql.statements import shortened

_ENDED = (
    "{} ended the transaction of the atomic handler. What it has committed stays; what the handler wrote after it is "
    "rolled back. A handler that commits, rolls back or executes DDL must not use atomic=True."
)


class AfterCommit(Exception):
    """The transaction of an atomic handler has committed. The cause was raised after that, by an ``on_commit`` hook."""


@dataclass(slots=True)
class HandlerTransaction:
    """The transaction of an atomic handler."""

    connection: Any
    block: Any
    raw: Any = None
    """The driver's connection. A child that the handler forks has others."""
    _unproven: str | None = None
    """A statement that may have ended it, before which it was marked."""

    def mark(self, statement: str) -> None:
        """Mark the transaction before a statement that may end it.

        Raises:
            django.db.Error: the database does not answer.
        """
        mark_transaction(self.connection)
        self._unproven = statement

    def prove(self, cursor: Any = None) -> None:
        """Raise an error if the handler has ended the transaction, and make sure that it rolls back what follows.

        ``cursor``: the cursor that executes the next statement, if there is one.

        Raises:
            TransactionManagementError: the handler has ended it.
            django.db.Error: the database does not answer.
        """
        if self.block not in self.connection.atomic_blocks:
            raise TransactionManagementError(_ENDED.format("The handler"))
        if self._unproven is None or self.connection.needs_rollback:
            return  # In the latter case, Django refuses everything but its end.
        if not prove_transaction(self.connection, cursor):
            error = TransactionManagementError(_ENDED.format(shortened(self._unproven)))
            must_roll_back(self.connection, error)
            raise error
        self._unproven = None


class _PerThread(threading.local):
    running: HandlerTransaction | None = None


_thread = _PerThread()


def running() -> HandlerTransaction | None:
    """Return the transaction of the atomic handler that is running in this thread, or None."""
    return _thread.running


@contextlib.contextmanager
def transaction_of_handler(using: str) -> Iterator[None]:
    """Run the block in the transaction of an atomic handler.

    Raises:
        AfterCommit: the transaction has committed, and there was an error after that.
    """
    connection = connections[using]
    own = HandlerTransaction(connection, transaction.atomic(using))
    is_outermost = not connection.in_atomic_block
    if is_outermost:
        expect_commit(connection)
    try:
        with own.block:
            own.raw, depth = connection.connection, len(connection.atomic_blocks)
            outer, _thread.running = running(), own
            try:
                yield
            except BaseException as error:
                leave_blocks(connection, depth, error)
                raise
            finally:
                _thread.running = outer
    except BaseException as error:
        if is_outermost and has_committed(connection):
            raise AfterCommit from error
        raise

"""Transactions of others, as far as the server shows them to the queue's user."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from django.db import Error

from django_mysqlqueue.sql.session import Session


class Holder(NamedTuple):
    """The connection that holds the sequencer's mutex, or that may hold it."""

    connection: int
    """Its id."""
    user: str
    """Its user and host; empty if they are not known."""
    age: int | None
    """Seconds for which its transaction has been open; None if this is not known."""
    is_certain: bool
    """Whether the server has shown the lock itself. Else it is the oldest transaction that has locked rows."""


def oldest(session: Session) -> tuple[int, int] | None:
    """Return the age in seconds and the connection id of the oldest transaction; None if none is visible."""
    row = next(_shown(session, session.dialect.oldest_transaction), None)
    return None if row is None else (int(row[0]), int(row[1]))


def sequencer_holder(session: Session, *, least: float) -> Holder | None:
    """Return who holds the sequencer's mutex; None if the server does not show it.

    ``least``: seconds for which a transaction that only may hold it must have been open.
    """
    # A server that does not record locks shows none.
    row = next((row for row in _shown(session, session.dialect.sequencer_holder) if row is not None), None)
    if row is None or row[0] is None:
        return None
    number, user, age, is_certain = row
    found = Holder(int(number), user or "", None if age is None else int(age), bool(is_certain))
    return found if found.is_certain or (found.age or 0) >= least else None


def _shown(session: Session, statements: Sequence[str]) -> Iterator[tuple[Any, ...] | None]:
    """Yield the first row of each statement that the server does not refuse, as far as they are asked for."""
    for sql in statements:
        try:
            row = session.row(sql)
        except Error as error:
            if not session.dialect.hides_transactions(error):
                raise
        else:
            yield row

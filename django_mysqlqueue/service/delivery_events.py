"""Recorded deliveries: the outcome of each, kept after its state row is deleted.

The setting ``RECORD_DELIVERIES`` determines what is recorded. Rows are written by the transaction that settles the
delivery, except for deliveries that an atomic handler's own transaction settles: the flush after it records those.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from django_mysqlqueue.db.tables import EVENTS
from django_mysqlqueue.names.rules import KEY_LENGTH
from django_mysqlqueue.options.conf import get_settings
from django_mysqlqueue.service.messages import cut_error
from django_mysqlqueue.sql.session import Session, flat, run

if TYPE_CHECKING:
    from django_mysqlqueue.outcomes import Outcome
    from django_mysqlqueue.service.deliveries import Claimed
    from django_mysqlqueue.service.refs import GroupRef

CHUNK = 1000


class Event(NamedTuple):
    """The outcome of a delivery, or an operator's action on a message."""

    ref: GroupRef
    key: str
    offset: int
    attempt: int
    outcome: str
    """An ``Outcome``, or an operator's action (``DeliveryEvent.Outcome``)."""
    delivered_at: int
    handled_ms: int
    by: str
    error: str = ""
    related_id: str = ""

    @classmethod
    def of(cls, delivery: Claimed, outcome: Outcome, error: str = "", handled_ms: int = 0) -> Event:
        """Return the event for the outcome of a delivery."""
        return cls(
            delivery.ref,
            delivery.key,
            delivery.offset,
            delivery.attempt,
            outcome,
            delivery.delivered_at,
            handled_ms,
            delivery.by,
            error,
        )


def level(ref: GroupRef) -> str:
    """Return what is recorded for a group: ``"all"``, ``"failures"`` or ``"none"``."""
    return get_settings().recorded_of(ref.group)


def record(session: Session, events: Sequence[Event]) -> None:
    """Insert events, with the database's time, in multi-row statements."""
    row = f"({'%s, ' * 11}{session.dialect.now_ms})"
    for chunk in session.chunks(events, weight=lambda event: len(event.error)):
        session.execute(
            f"INSERT INTO {EVENTS} (consumer_group, topic, partition_key, message_offset, attempt, outcome, "
            "delivered_at, handled_ms, settled_by, error, related_id, settled_at) VALUES "
            + session.dialect.placeholders(len(chunk), row),
            flat(
                (*event.ref, *event[1:7], event.by[:KEY_LENGTH], cut_error(event.error), event.related_id)
                for event in chunk
            ),
        )


def record_passed(session: Session, ref: GroupRef, passed: Sequence[tuple[str, int, Outcome]], by: str) -> None:
    """Record messages that a claim has settled without a call, if acks are recorded."""
    if passed and level(ref) == "all":
        record(session, [Event(ref, key, offset, 0, outcome, 0, 0, by) for key, offset, outcome in passed])


def outdated(session: Session) -> tuple[str, tuple[object, ...]]:
    """Return the FROM and WHERE of the events that are older than ``HISTORY_RETENTION``."""
    return older(session, EVENTS, "settled_at", int(get_settings().history_retention * 1000))


def collect(using: str) -> int:
    """Delete some of the events that are older than ``HISTORY_RETENTION``, by primary key; return how many."""
    keep_ms = int(get_settings().history_retention * 1000)
    return run(using, lambda session: delete_old(session, EVENTS, "settled_at", keep_ms))


def older(session: Session, table: str, column: str, keep_ms: int) -> tuple[str, tuple[object, ...]]:
    """Return the FROM and WHERE of the rows that ``delete_old`` deletes in the end."""
    return f"{table} WHERE {column} < {session.dialect.now_ms} - %s", (keep_ms,)


def delete_old(session: Session, table: str, column: str, keep_ms: int, *, key: str = "id") -> int:
    """Delete old rows of a table whose primary key is in order of time; return how many.

    The rows are read from the start of the primary key, so no index on the time is needed.
    """
    ids = session.rows(
        f"SELECT h.k FROM (SELECT {key} AS k, {column} AS at FROM {table}{session.dialect.force_index('PRIMARY')} "
        f"WHERE {key} > 0 ORDER BY {key} LIMIT %s) h WHERE h.at < {session.dialect.now_ms} - %s",
        (CHUNK, keep_ms),
    )
    return session.delete(table, "i", sorted(flat(ids)), f"s.{key} = v.i")

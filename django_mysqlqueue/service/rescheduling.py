"""Scheduled messages: looking at them, cancelling, moving, delivering now.

A scheduled message waits in the outbox. Whoever changes it takes the
sequencer's mutex first: the sequencer is not moving it at that moment.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from django_mysqlqueue.exceptions import OperationRefused
from django_mysqlqueue.models import OutboxMessage
from django_mysqlqueue.service import audit
from django_mysqlqueue.service.sequencing import take_mutex
from django_mysqlqueue.service.transactions import Session, apart, flat, run

OUTBOX = OutboxMessage._meta.db_table
CHUNK = 500
MUTEX_PAUSE = 0.02
MUTEX_ATTEMPTS = 500
"""The sequencer holds the mutex for milliseconds; under load it takes it again and again."""


@dataclass(frozen=True, slots=True)
class Scheduled:
    """A message that waits for its time."""

    outbox_id: int
    topic: str
    key: str
    """Its partition key."""
    message_id: str
    size: int
    """Payload size in bytes."""
    deliver_at: int
    """Epoch milliseconds."""
    created_at: int


def scheduled(
    using: str, *, topic: str | None = None, after: tuple[int, int] | None = None, limit: int = 50
) -> list[Scheduled]:
    """The next scheduled messages in order of their time, read along the index.

    Args:
        after: (deliver_at, outbox_id) of the last one of the page before.
    """
    session = Session(using)
    at, last = after or (0, 0)
    of_topic, parameters = ("", ()) if topic is None else (" AND topic = %s", (topic,))
    rows = session.rows(
        "SELECT outbox_id, topic, partition_key, id, size, deliver_at, created_at "
        f"FROM {OUTBOX}{session.dialect.force_index('queue_outbox_due')} WHERE deliver_at >= %s AND deliver_at > 0 "
        f"AND (deliver_at > %s OR outbox_id > %s){of_topic} ORDER BY deliver_at, outbox_id LIMIT %s",
        (at, at, last, *parameters, limit),
    )
    return [Scheduled(*row) for row in rows]


def cancel(using: str, ids: Sequence[int], *, by: str, reason: str = "") -> int:
    """Deletes scheduled messages that have not come due; returns how many there were."""
    return _each(using, "cancel", ids, None, by=by, detail=reason)


def deliver_now(using: str, ids: Sequence[int], *, by: str) -> int:
    """Lets scheduled messages come due at once; returns how many there were."""
    return _each(using, "deliver now", ids, 1, by=by, detail="")


def move(using: str, ids: Sequence[int], deliver_at: int, *, by: str) -> int:
    """Gives scheduled messages another time (epoch milliseconds); returns how many there were."""
    return _each(using, "reschedule", ids, max(1, deliver_at), by=by, detail=f"to {max(1, deliver_at)}")


def _each(using: str, action: str, ids: Sequence[int], deliver_at: int | None, *, by: str, detail: str) -> int:
    with apart(using):
        return sum(
            _with_mutex(using, action, chunk, deliver_at, by=by, detail=detail)
            for chunk in (ids[start : start + CHUNK] for start in range(0, len(ids), CHUNK))
        )


def _with_mutex(using: str, action: str, ids: Sequence[int], deliver_at: int | None, *, by: str, detail: str) -> int:
    def write(session: Session) -> int | None:
        if not take_mutex(session):
            return None
        changed = _change(session, sorted(set(ids)), deliver_at)
        if changed:
            audit.once(session, action, changed, by=by, detail=detail)
        return changed

    for _ in range(MUTEX_ATTEMPTS):
        changed = run(using, write)
        if changed is not None:
            return changed
        time.sleep(MUTEX_PAUSE)
    raise OperationRefused("The sequencer has not let go of its mutex for 10 seconds; nothing was changed.")


def _change(session: Session, ids: Sequence[int], deliver_at: int | None) -> int:
    changed = 0
    on = "s.outbox_id = v.i"
    for chunk in session.chunks(ids):
        still = [
            found
            for (found,) in session.rows(
                f"SELECT s.outbox_id FROM {session.dialect.rows(('i',), len(chunk))} {session.dialect.join} {OUTBOX} s "
                f"ON {on} AND s.deliver_at > {session.dialect.now_ms}{session.dialect.for_update}",
                chunk,
            )
        ]
        if not still:
            continue
        if deliver_at is None:
            changed += session.execute(session.dialect.delete_joined(OUTBOX, ("i",), len(still), on), still)
        else:
            session.execute(
                session.dialect.update_joined(OUTBOX, ("i", "at"), len(still), on, {"deliver_at": "v.at"}),
                flat((found, deliver_at) for found in still),
            )
            changed += len(still)
    return changed

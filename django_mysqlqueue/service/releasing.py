"""Releasing everything that a subscriber holds, so that no lease or visibility timeout has to expire first."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from functools import partial
from typing import NamedTuple

from django_mysqlqueue.db.tables import LEASES, LOG, STATE
from django_mysqlqueue.service import heartbeats, leasing, settling
from django_mysqlqueue.service.deliveries import Action, Claimed, Settlement
from django_mysqlqueue.service.refs import GroupRef
from django_mysqlqueue.service.watermarks import BY_ROW
from django_mysqlqueue.sql.session import Session, flat, pieces, run

SEARCHED = 10_000
"""Number of rows of a group that are searched for those of one subscriber: there is no index for it, and messages in
backoff are among them. Further deliveries become visible after their visibility timeout."""
RELEASED = 1000
"""Number of deliveries that one transaction releases."""
HANDLED = 20
"""Maximum number of messages of a group that are recorded with the death of a process."""
RECHECKS = 20
"""Number of checks whether handlers that were about to commit when their process exits have done so."""
RECHECK = 0.02
"""Seconds between two of them."""


class Released(NamedTuple):
    """The number of leases and deliveries that were released."""

    leases: int
    deliveries: int
    """Deliveries of shared groups. Those of ordered groups are released with their leases."""


def release_unfinished(
    using: str, ref: GroupRef, settlements: Sequence[Settlement], *, max_attempts: int | None
) -> None:
    """Write, as the last that a process does for a group, the outcomes that are left, and release what it cuts off.

    Call this before ``release_all``, which takes what the process holds after it for lost.

    Rows that another transaction has locked are skipped. Most probably a handler is about to commit its ack, so they
    are tried again for a moment, before the COMMIT: from then on, others may start what handlers of this process still
    work on.

    ``settlements``: the outcomes, and a ``RELEASE`` for each delivery that is handled. ``max_attempts``: number of
    failed attempts after which a message is dead-lettered; None for no limit.
    """

    def release(session: Session) -> None:
        # Without locks of offsets rows, which would have to be waited for. The next owner advances the watermarks.
        left = settling.settle(session, ref, settlements, {}, max_attempts=max_attempts, waits=False).locked
        for _ in range(RECHECKS):
            if not left:
                break
            time.sleep(RECHECK)
            left = settling.settle(session, ref, left, {}, max_attempts=max_attempts, waits=False).locked

    # Once: the process has little time left, in which it has to release its leases too.
    run(using, release, attempts=1)


def release_unstarted(using: str, refs: Collection[GroupRef], left: Sequence[tuple[int, int]]) -> int:
    """Release the deliveries that a dead process had claimed and not started. They are not suspected.

    Call this before ``release_all``, which takes what the process still holds for lost. Rows that another transaction
    has locked are lost, too.

    Returns:
        The number of deliveries.
    """
    released = 0
    for piece in pieces(left, RELEASED):
        for ref in sorted(refs):
            released += run(using, partial(_release_unstarted, ref=ref, left=piece))
    return released


def _release_unstarted(session: Session, ref: GroupRef, left: Sequence[tuple[int, int]]) -> int:
    rows = session.joined(
        "SELECT s.partition_key, s.message_offset, s.retry_count, s.delivery_token, s.suspect, s.delivered_by",
        "ot",
        left,
        f"{session.dialect.join_to(LOG, 'm')} ON m.`offset` = v.o "
        f"{session.dialect.join_to(STATE, 's')} ON s.consumer_group = %s AND s.topic = %s "
        "AND s.partition_key = m.partition_key AND s.message_offset = v.o "
        "AND s.delivery_token = v.t AND s.acked = %s",
        after=(*ref, False),
    )
    if not rows:
        return 0
    settlements = [
        Settlement(Claimed(ref, key, offset, token, retries + 1, suspect, size=0, by=by), Action.RELEASE)
        for key, offset, retries, token, suspect, by in rows
    ]
    done = settling.settle(session, ref, settlements, {}, max_attempts=None, waits=False)
    return len(settlements) - len(done.locked) - len(done.stale)


def release_all(
    using: str,
    subscriber: str,
    refs: Collection[GroupRef],
    *,
    shared: Collection[GroupRef],
    searched: int = SEARCHED,
    died: str = "",
) -> Released:
    """Deregister a subscriber and release its leases and deliveries for immediate redelivery.

    Call this only for a process that has ended, or that exits right after it: messages that it is still handling would
    be handled twice. The deliveries are lost with the process: their messages are suspected poison messages, so each
    further attempt at them is recorded before it starts.

    Only the lock of the subscriber's own heartbeat is waited for. Locked leases and deliveries are skipped, because a
    transaction of the subscriber may still be open on the server. Such a lease can be stolen, since its owner is
    deregistered.

    ``shared``: those of ``refs`` that are in shared mode.
    """

    def release(session: Session) -> Released:
        if died:
            handled = {ref: _handled(session, subscriber, ref, searched) for ref in refs}
            heartbeats.mark_died(session, subscriber, handled, died)
        else:
            heartbeats.mark_deregistered(session, subscriber, refs)
        leases = _release_leases(session, subscriber)
        deliveries = sum(_release_deliveries(session, subscriber, ref, searched) for ref in sorted(shared))
        return Released(leases, deliveries)

    return run(using, release)


def _handled(session: Session, subscriber: str, ref: GroupRef, searched: int) -> list[int]:
    """Return the offsets of messages that a dead process has started: what it had not has been released."""
    due = session.dialect.force_index("queue_delivery_state_due")
    rows = session.rows(
        "SELECT w.message_offset FROM (SELECT message_offset, delivered_by, delivery_token "
        f"FROM {STATE}{due} WHERE consumer_group = %s AND topic = %s AND acked = %s "
        "ORDER BY invisible_until LIMIT %s) w WHERE w.delivered_by = %s AND w.delivery_token <> 0 LIMIT %s",
        (*ref, False, searched, subscriber, HANDLED),
    )
    return [offset for (offset,) in rows]


def _release_leases(session: Session, subscriber: str) -> int:
    rows = session.rows(
        f"SELECT consumer_group, topic, partition_key FROM {LEASES}{session.dialect.force_index('queue_leases_owner')} "
        "WHERE leased_by = %s",
        (subscriber,),
    )
    keys: dict[GroupRef, list[str]] = {}
    for group, topic, key in rows:
        keys.setdefault(GroupRef(group, topic), []).append(key)
    return sum(leasing.unassign(session, ref, subscriber, keys[ref], skip_locked=True) for ref in sorted(keys))


def _release_deliveries(session: Session, subscriber: str, ref: GroupRef, searched: int) -> int:
    """Make invisible deliveries due. The others are due already, or wait since a claim has found them lost."""
    due = session.dialect.force_index("queue_delivery_state_due")
    rows = session.rows(
        "SELECT w.partition_key, w.message_offset FROM (SELECT partition_key, message_offset, delivered_by "
        f"FROM {STATE}{due} WHERE consumer_group = %s AND topic = %s AND acked = %s "
        f"AND invisible_until > {session.dialect.now_ms} ORDER BY invisible_until LIMIT %s) w "
        "WHERE w.delivered_by = %s",
        (*ref, False, searched, subscriber),
    )
    released = 0
    for chunk in session.chunks(sorted(rows)):
        held = session.rows(
            f"SELECT s.partition_key, s.message_offset FROM {session.dialect.rows(('k', 'o'), len(chunk))} "
            f"{session.dialect.join_to(STATE, 's')} ON {BY_ROW} AND s.acked = %s AND s.delivered_by = %s "
            f"AND s.delivery_token <> 0{session.dialect.skip_locked}",
            (*flat(chunk), *ref, False, subscriber),
        )
        if held:
            session.execute(
                session.dialect.update_joined(STATE, ("k", "o"), len(held), BY_ROW, {"invisible_until": "0"}),
                (*flat(held), *ref),
            )
        released += len(held)
    return released

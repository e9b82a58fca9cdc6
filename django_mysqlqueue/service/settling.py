"""Ack, nack, snooze, reject, release and extend.

Each is an UPDATE (or DELETE) by primary key, never an upsert; the token is in its WHERE, or was compared under the
row's lock before. A delivery whose token has been replaced is stale: a late outcome of it changes nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from django_mysqlqueue.db.tables import STATE
from django_mysqlqueue.exceptions import StaleDelivery
from django_mysqlqueue.outcomes import Outcome
from django_mysqlqueue.service import (
    dead_letters,
    delivery_events,
    job_retries,
    losses,
    slots,
    watermarks,
)
from django_mysqlqueue.service.dead_letters import FailedDelivery, is_final
from django_mysqlqueue.service.deliveries import (
    OUTCOMES,
    UNCALLED,
    Action,
    Claimed,
    Flushed,
    Holding,
    Settlement,
)
from django_mysqlqueue.service.delivery_events import Event
from django_mysqlqueue.service.job_outcomes import Jobs, jobs_of
from django_mysqlqueue.service.job_retries import LongWait
from django_mysqlqueue.service.messages import cut_error
from django_mysqlqueue.service.refs import GroupRef
from django_mysqlqueue.service.watermarks import BY_ROW, Advanced, Offsets
from django_mysqlqueue.sql.connection import apart
from django_mysqlqueue.sql.session import Session, flat, run

ACKS = (Action.ACK, Action.DELETED, *UNCALLED)
"""The actions that settle a message, so that the watermark can include it."""
FAILED = (Action.NACK, Action.REJECT)
LEFT_ALONE = (*ACKS, Action.STALE)
ONE_ROW = (
    "consumer_group = %s AND topic = %s AND partition_key = %s AND message_offset = %s "
    "AND delivery_token = %s AND acked = %s"
)
ACK_ONE = f"UPDATE {STATE} SET acked = %s WHERE {ONE_ROW}"


class NotAcked(Exception):
    """The delivery that a handler's transaction was to ack is stale."""


def _one(delivery: Claimed) -> tuple[object, ...]:
    return (*delivery.ref, delivery.key, delivery.offset, delivery.token, False)


# -- one delivery, on the handler's connection --------------------------------


def ack_here(using: str, delivery: Claimed) -> None:
    """Ack a delivery in the open transaction on the queue's database.

    Raises:
        StaleDelivery: the delivery was revoked, claimed again or settled.
    """
    if not Session(using).execute(ACK_ONE, (True, *_one(delivery))):
        raise StaleDelivery(_stale_text(delivery), delivery=delivery)


def settle_here(using: str, acked: Sequence[Claimed], rejected: Sequence[tuple[Claimed, str]]) -> set[Claimed]:
    """Ack and dead-letter deliveries of one group in the open transaction on the queue's database.

    Returns:
        The deliveries that are stale. If there are any, the caller must roll the transaction back.

    Raises, at the latest with the COMMIT:
        NotAcked: the only delivery is stale.
    """
    session = Session(using)
    if len(acked) == 1 and not rejected:  # A handler of single messages needs only one statement.
        session.later(ACK_ONE, (True, *_one(acked[0])), rows=1, otherwise=NotAcked)
        return set()
    everything = [*acked, *(delivery for delivery, _ in rejected)]
    ref = everything[0].ref
    places = sorted((delivery.key, delivery.offset) for delivery in everything)
    # Wait for locks: only the poller of this process locks these rows, and only for a moment.
    tokens = _lock_rows(session, ref, places, session.dialect.for_update)
    stale = {delivery for delivery in everything if tokens.get((delivery.key, delivery.offset)) != delivery.token}
    if stale:
        return stale
    _mark(session, ref, sorted((delivery.key, delivery.offset) for delivery in acked))
    if rejected:
        dead_letters.dead_letter(session, ref, [FailedDelivery.of(delivery, error) for delivery, error in rejected])
    return set()


def record_start(using: str, delivery: Claimed) -> bool:
    """Record the start of a suspected poison message, and return whether the delivery is still this process's.

    If the handler kills its process, this record is all that is left to count the attempt.
    """

    def store(session: Session) -> bool:
        return bool(
            session.execute(f"UPDATE {STATE} SET retry_count = %s WHERE {ONE_ROW}", (delivery.attempt, *_one(delivery)))
        )

    return run(using, store)


def extend(using: str, delivery: Claimed, *, milliseconds: int, shared: bool) -> None:
    """Extend a delivery; in ordered mode, only check that it is not stale.

    This uses a connection of its own: in the handler's transaction, it would read an old snapshot, and its lock would
    block the regular extensions of the poller.

    ``milliseconds``: the minimum time from now for which other subscribers must not claim it.

    Raises:
        StaleDelivery: the delivery was revoked, claimed again or settled.
    """

    def store(session: Session) -> int:
        held = len(session.rows(f"SELECT 1 FROM {STATE} WHERE {ONE_ROW}", _one(delivery)))
        # If the handler's own transaction has locked the row (by an early ack), no other subscriber can take it.
        if held and shared and session.rows(f"SELECT 1 FROM {STATE} WHERE {ONE_ROW}{skip_locked}", _one(delivery)):
            until = f"{session.dialect.greatest}(invisible_until, {session.dialect.now_ms} + %s)"
            session.execute(
                f"UPDATE {STATE} SET invisible_until = {until} WHERE {ONE_ROW}", (milliseconds, *_one(delivery))
            )
        return held

    skip_locked = Session(using).dialect.skip_locked
    with apart(using):
        held = run(using, store)
    if not held:
        raise StaleDelivery(_stale_text(delivery), delivery=delivery)


def _stale_text(delivery: Claimed) -> str:
    return (
        f"Delivery {delivery.token} of {delivery.ref.topic}[{delivery.offset}] to the group "
        f"{delivery.ref.group!r} was claimed again or settled."
    )


# -- all deliveries of a process ----------------------------------------------


def extend_all(
    using: str, ref: GroupRef, deliveries: Collection[Claimed], *, milliseconds: int, clock_stepped: bool = False
) -> set[tuple[str, int, int]]:
    """Extend all deliveries of a shared group that a process holds.

    Rows that an atomic handler has locked are skipped: its lock prevents other subscribers from claiming them.

    ``milliseconds``: the time from now for which other subscribers must not claim them. ``clock_stepped``: whether the
    database's clock has stepped. If it was set back, claims would take the deliveries for ones whose wait is over
    (``leasing.is_later``), so they are written as if they were claimed now.

    Returns:
        The (partition key, offset, token) of deliveries that this process no longer holds.
    """

    def store(session: Session) -> set[tuple[str, int, int]]:
        rows = sorted((delivery.key, delivery.offset, delivery.token) for delivery in deliveries)
        mine: set[tuple[str, int, int]] = set()
        for chunk in session.chunks(rows):
            mine.update(
                session.rows(
                    f"SELECT s.partition_key, s.message_offset, s.delivery_token "
                    f"FROM {session.dialect.rows(('k', 'o', 't'), len(chunk))} {session.dialect.join_to(STATE, 's')} "
                    f"ON {BY_ROW} AND s.delivery_token = v.t AND s.acked = %s",
                    (*flat(chunk), *ref, False),
                )
            )
            free = session.rows(
                f"SELECT s.partition_key, s.message_offset, s.delivery_token "
                f"FROM {session.dialect.rows(('k', 'o', 't'), len(chunk))} {session.dialect.join_to(STATE, 's')} "
                f"ON {BY_ROW} AND s.delivery_token = v.t AND s.acked = %s{session.dialect.skip_locked}",
                (*flat(chunk), *ref, False),
            )
            if free:
                until = f"{session.dialect.now_ms} + v.ms"
                if clock_stepped:
                    changes = {"invisible_until": until, "delivered_at": session.dialect.now_ms}
                else:
                    changes = {"invisible_until": f"{session.dialect.greatest}(s.invisible_until, {until})"}
                session.execute(
                    session.dialect.update_joined(STATE, ("k", "o", "ms"), len(free), BY_ROW, changes),
                    (*flat((key, offset, milliseconds) for key, offset, _ in free), *ref),
                )
        return set(rows) - mine

    return run(using, store)


def flush(
    using: str,
    ref: GroupRef,
    settlements: Sequence[Settlement],
    *,
    max_attempts: int | None,
    shared: bool,
    also: Collection[str] = (),
    holding: Holding | None = None,
) -> Flushed:
    """Write the settlements of a group and advance its watermarks, in one transaction.

    In shared mode, locked offsets rows are skipped: the settlements are written, and the next flush advances the
    watermark.

    ``max_attempts``: number of failed attempts after which a message is dead-lettered; None for no limit. ``holding``:
    the slots that this subscriber holds now, if that has changed.
    """

    def write(session: Session) -> Flushed:
        keys = {settlement.delivery.key for settlement in settlements} | set(also)
        offsets = watermarks.lock(session, ref, keys, skip_locked=shared)
        jobs = jobs_of(session, ref)
        flushed = apply(session, ref, settlements, offsets, max_attempts=max_attempts, also=also, jobs=jobs)
        if holding is not None:
            flushed.held = slots.settle(session, ref, holding)
        if jobs is not None:
            jobs.store()
        watermarks.store(session, ref, offsets, flushed.watermarks, {})
        return flushed

    return run(using, write)


def settle(
    session: Session,
    ref: GroupRef,
    settlements: Sequence[Settlement],
    offsets: Mapping[str, Offsets],
    *,
    max_attempts: int | None,
    waits: bool = True,
) -> Flushed:
    """Do a flush in a caller's transaction that locks no slots; it stores the new watermarks afterwards.

    Without ``waits``, results of released jobs that another transaction has locked are left.
    """
    jobs = jobs_of(session, ref, locks_slots=False, waits=waits)
    flushed = apply(session, ref, settlements, offsets, max_attempts=max_attempts, jobs=jobs)
    if jobs is not None:
        jobs.store()
    return flushed


def apply(
    session: Session,
    ref: GroupRef,
    settlements: Sequence[Settlement],
    offsets: Mapping[str, Offsets],
    *,
    max_attempts: int | None,
    also: Collection[str] = (),
    jobs: Jobs | None,
) -> Flushed:
    """Do a flush in the caller's transaction, which may lock slots afterwards.

    The caller stores the new watermarks afterwards, together with the positions that a claim has moved.

    ``max_attempts``: number of failed attempts after which a message is dead-lettered; None for no limit. ``jobs``: the
    results of the jobs of the group, if it has any. The caller stores those that are left, after it has locked slots.
    """
    flushed = Flushed()
    acked = [settlement for settlement in settlements if settlement.action in ACKS and not settlement.is_written]
    acks: dict[str, dict[int, int]] = {}
    for settlement in acked:
        delivery = settlement.delivery
        acks.setdefault(delivery.key, {})[delivery.offset] = delivery.token
    touched = {settlement.delivery.key for settlement in settlements} | set(also)
    locked = {key: offsets[key] for key in sorted(touched) if key in offsets}
    # First the statement that may wait for rows of delivery state, while none is locked here. The others skip locked
    # rows.
    advanced = watermarks.advance(session, ref, locked, acks)
    beyond = advanced.beyond + [
        (key, offset, token) for key, mine in acks.items() if key not in locked for offset, token in mine.items()
    ]
    failures = [one for one in settlements if one.action not in LEFT_ALONE and not one.is_written]
    if failures:
        _apply_failures(session, ref, failures, max_attempts, flushed)
    if beyond:
        _mark_acked(session, ref, sorted(beyond), offsets, acked, flushed)
    if flushed.dead or flushed.moved:
        settled = {delivery.key for delivery, _ in flushed.dead} | {key for key, _ in flushed.moved}
        _pass_settled(session, ref, locked, advanced, settled)
    _record_acks(session, ref, settlements, flushed)
    if jobs is not None:
        jobs.settled(settlements, flushed)
    flushed.watermarks, flushed.unfinished = advanced.watermarks, advanced.unfinished
    left = touched - set(locked)
    # A partition without an offsets row (the group was dropped, or GC deleted it) has no watermark to advance.
    flushed.skipped = watermarks.existing(session, ref, left) if left else set()
    return flushed


def _pass_settled(
    session: Session, ref: GroupRef, locked: Mapping[str, Offsets], advanced: Advanced, keys: Collection[str]
) -> None:
    """Advance the watermarks of partitions beyond the messages that this transaction has dead-lettered or moved."""
    places = {
        key: Offsets(advanced.watermarks.get(key, locked[key].acked), locked[key].claimed)
        for key in sorted(keys)
        if key in locked
    }
    further = watermarks.advance(session, ref, places, {})
    advanced.watermarks |= further.watermarks
    advanced.unfinished |= further.unfinished


def _record_acks(session: Session, ref: GroupRef, settlements: Sequence[Settlement], flushed: Flushed) -> None:
    """Record each ack that this flush, or the handler's own transaction before it, has written, and its snooze.

    Deleted messages are always recorded, because there is no other trace of their outcome.
    """
    is_all = delivery_events.level(ref) == "all"
    recorded = ACKS if is_all else (Action.DELETED,)
    acked = [
        settlement
        for settlement in settlements
        if settlement.action in recorded or (is_all and settlement.is_written and settlement.action is Action.SNOOZE)
    ]
    if not acked:
        return
    not_written = {id(settlement) for settlement in (*flushed.stale, *flushed.locked)}
    _record(
        session,
        ref,
        [
            Event.of(settlement.delivery, OUTCOMES[settlement.action], settlement.error, settlement.handled_ms)
            for settlement in acked
            if id(settlement) not in not_written
        ],
    )


def _mark_acked(
    session: Session,
    ref: GroupRef,
    rows: Sequence[tuple[str, int, int]],
    offsets: Mapping[str, Offsets],
    acked: Sequence[Settlement],
    flushed: Flushed,
) -> None:
    """Mark acks that the watermark cannot include yet, and find the stale ones."""
    held = _lock_rows(session, ref, [(key, offset) for key, offset, _ in rows], session.dialect.skip_locked)
    mine = [(key, offset) for key, offset, token in rows if held.get((key, offset)) == token]
    _mark(session, ref, mine)
    marked = set(mine)
    others = [row for row in rows if row[:2] not in marked]
    there = _read_rows(session, ref, [(key, offset) for key, offset, _ in others])
    by_row = {(settlement.delivery.key, settlement.delivery.offset): settlement for settlement in acked}
    for key, offset, token in others:
        found = there.get((key, offset))
        passed = found is None and key in offsets and offset <= offsets[key].acked
        if found == (token, False):
            flushed.locked.append(by_row[key, offset])
        # Settled with this token, or below the watermark: done already, perhaps by a COMMIT whose answer was lost.
        elif found != (token, True) and not passed:
            flushed.stale.append(by_row[key, offset])


def _mark(session: Session, ref: GroupRef, rows: Sequence[tuple[str, int]]) -> None:
    """Mark locked rows as settled."""
    session.update(STATE, "ko", rows, BY_ROW, {"acked": "1"}, after=ref)


def _read_rows(
    session: Session, ref: GroupRef, rows: Sequence[tuple[str, int]]
) -> dict[tuple[str, int], tuple[int, bool]]:
    """Return the token of each row, and whether it is settled, without locks."""
    select = "SELECT s.partition_key, s.message_offset, s.delivery_token, s.acked"
    joins = f"{session.dialect.join_to(STATE, 's')} ON {BY_ROW}"
    found = session.joined(select, "ko", rows, joins, after=ref, plain=True)
    return {(key, offset): (token, bool(acked)) for key, offset, token, acked in found}


def _apply_failures(
    session: Session, ref: GroupRef, failures: Sequence[Settlement], max_attempts: int | None, flushed: Flushed
) -> None:
    ordered = sorted(failures, key=lambda settlement: (settlement.delivery.key, settlement.delivery.offset))
    places = [(settlement.delivery.key, settlement.delivery.offset) for settlement in ordered]
    held = _lock_rows(session, ref, places, session.dialect.skip_locked)
    there = _read_rows(session, ref, [place for place in places if place not in held])
    dead: list[FailedDelivery] = []
    events: list[Event] = []
    waits: list[tuple[str, int, int, int, str | None, int]] = []
    long_waits: list[LongWait] = []
    for settlement in ordered:
        delivery, action = settlement.delivery, settlement.action
        key, offset, attempt = delivery.key, delivery.offset, delivery.attempt
        failed = action in FAILED
        if there.get((key, offset)) == (delivery.token, False):
            flushed.locked.append(settlement)
        elif held.get((key, offset)) != delivery.token:
            flushed.stale.append(settlement)
        elif failed and _is_final(settlement, ref, max_attempts):
            handled_ms, is_started = settlement.handled_ms, settlement.is_started
            dead.append(FailedDelivery.of(delivery, settlement.error, handled_ms, is_started=is_started))
            flushed.dead.append((delivery, settlement.error))
        else:
            # A nack stores the number of the attempt, which failed; the others store the number before it.
            count = attempt if failed else attempt - 1
            error = settlement.error if failed else None
            # A suspected poison message that never started remains one.
            keep = action is Action.RELEASE and delivery.suspect
            waits.append((key, offset, settlement.delay_ms, count, error and cut_error(error), int(keep)))
            if (long_wait := job_retries.long_wait(settlement, count)) is not None:
                long_waits.append(long_wait)
            if failed:
                events.append(Event.of(delivery, Outcome.FAILED, settlement.error, settlement.handled_ms))
            elif settlement.action is Action.SNOOZE:
                events.append(Event.of(delivery, Outcome.SNOOZED, settlement.error, settlement.handled_ms))
    if dead:
        dead_letters.dead_letter(session, ref, dead)
    _record(session, ref, events)
    if long_waits:
        flushed.moved = job_retries.move(session, ref, long_waits)
        waits = [wait for wait in waits if wait[:2] not in flushed.moved]
    if waits:
        _make_wait(session, ref, waits)
        now = session.now()
        for key, offset, delay, _, _, _ in waits:
            flushed.waiting[key, offset] = now + delay if delay else 0


def _is_final(settlement: Settlement, ref: GroupRef, max_attempts: int | None) -> bool:
    """Return whether a failure dead-letters the message. If its handler was told, an override since does not count."""
    if settlement.is_final is not None:
        return settlement.is_final
    return is_final(ref.topic, settlement.delivery.attempt, max_attempts, rejected=settlement.action is Action.REJECT)


def _record(session: Session, ref: GroupRef, events: Sequence[Event]) -> None:
    """Record the events that the setting asks for. Dead-lettering records its own."""
    level = delivery_events.level(ref) if events else "none"
    if level == "failures":
        events = [event for event in events if event.outcome in (Outcome.FAILED, Outcome.DELETED)]
    if level != "none":
        delivery_events.record(session, events)


def _lock_rows(
    session: Session, ref: GroupRef, rows: Sequence[tuple[str, int]], how: str
) -> dict[tuple[str, int], int]:
    """Lock unsettled rows, in order; return the token of each.

    With ``skip_locked`` as ``how``, other transactions are not waited for: a handler of the row's new holder may have
    acked in a long one.
    """
    select = "SELECT s.partition_key, s.message_offset, s.delivery_token"
    joins = f"{session.dialect.join_to(STATE, 's')} ON {BY_ROW} AND s.acked = %s{how}"
    found = session.joined(select, "ko", rows, joins, after=(*ref, False), plain=True)
    return {(key, offset): token for key, offset, token in found}


def _make_wait(session: Session, ref: GroupRef, waits: Sequence[tuple[str, int, int, int, str | None, int]]) -> None:
    now = session.dialect.now_ms
    for chunk in session.chunks(waits, weight=lambda wait: len(wait[4] or "")):
        session.execute(
            session.dialect.update_joined(
                STATE,
                ("k", "o", "delay", "n", "error", "keep"),
                len(chunk),
                BY_ROW,
                {
                    "invisible_until": f"CASE WHEN v.delay = 0 THEN 0 ELSE {now} + v.delay END",
                    "retry_count": "v.n",
                    "last_error": "COALESCE(v.error, s.last_error)",
                    "delivered_by": "CASE WHEN v.keep = 1 THEN s.delivered_by ELSE '' END",
                    "delivered_at": now,
                    **losses.NOT_HELD,
                },
            ),
            (*flat(chunk), *ref),
        )

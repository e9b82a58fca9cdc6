"""Partition leases of ordered groups: who may work on a partition.

The lease row is the record of responsibility. It exists while its partition may
have work, is given away only under its own lock, and is deleted only when the
partition is seen drained under that lock. So a subscriber that has read a live
owner in it may forget the partition: the owner either drains it or leaves the
row behind, unowned or with a stale owner.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from django_mysqlqueue.models import ConsumerGroup, ConsumerOffset, DeliveryState, PartitionLease, QueueMessage
from django_mysqlqueue.service import audit, groups, heartbeats, partitions
from django_mysqlqueue.service.refs import GroupRef
from django_mysqlqueue.sql.connection import apart
from django_mysqlqueue.sql.session import UNION_TERMS, Session, flat, run

LEASES = PartitionLease._meta.db_table
OFFSETS = ConsumerOffset._meta.db_table
STATE = DeliveryState._meta.db_table
LOG = QueueMessage._meta.db_table

CLOCK_STEP_MS = 5000
"""A row last written so far ahead of now was written by a clock that has been mended
since: the time until which it waits counts as passed. Less is ordinary slewing."""

BY_KEY = "s.consumer_group = %s AND s.topic = %s AND s.partition_key = v.k"


@dataclass(frozen=True, slots=True)
class Lease:
    """A lease row with what its owner's heartbeat says."""

    key: str
    owner: str
    """The owner's name; empty if nobody has taken it."""
    good: bool
    """The owner's heartbeat is fresh."""


@dataclass(frozen=True, slots=True)
class Unsettled:
    """A claimed delivery that a new owner finds not settled."""

    key: str
    offset: int
    token: int
    due: int
    """When it may be handed out again, epoch milliseconds; 0: its holder was lost, now."""


def fair_shares(partitions: int, subscribers: Collection[str], ref: GroupRef) -> dict[str, int]:
    """How many partitions each live subscriber may hold; the caps sum to ``partitions``.

    floor(P/n) each and one more for the first P mod n, in an order rotated by a
    hash of the group and topic, so that the extra ones of many groups do not
    all fall to the same subscriber.
    """
    names = sorted(subscribers)
    if not names:
        return {}
    share, extra = divmod(partitions, len(names))
    first = int.from_bytes(hashlib.sha256(f"{ref.group}\0{ref.topic}".encode()).digest()[:8])
    return {name: share + ((place - first) % len(names) < extra) for place, name in enumerate(names)}


def read(session: Session, refs: Sequence[GroupRef], lease_ms: int) -> dict[GroupRef, list[Lease]]:
    """All lease rows of some groups, one query, in order of key."""
    found: dict[GroupRef, list[Lease]] = {ref: [] for ref in refs}
    for group, topic, key, owner, good in session.rows(
        f"SELECT s.consumer_group, s.topic, s.partition_key, s.leased_by, h.subscriber_name IS NOT NULL "
        f"FROM {session.dialect.rows(('g', 't'), len(refs))} "
        f"{session.dialect.join_to(LEASES, 's')} ON s.consumer_group = v.g AND s.topic = v.t "
        f"{session.dialect.join_to(heartbeats.HEARTBEATS, 'h', left=True)} "
        "ON h.consumer_group = s.consumer_group AND h.topic = s.topic "
        f"AND h.subscriber_name = s.leased_by AND {heartbeats.fresh('h', session)}",
        (*flat(refs), lease_ms, lease_ms),
    ):
        found[GroupRef(group, topic)].append(Lease(key, owner, bool(good)))
    for leases in found.values():
        leases.sort(key=lambda lease: lease.key)
    return found


def lock(session: Session, ref: GroupRef, keys: Sequence[str], *, skip_locked: bool = False) -> dict[str, str]:
    """Locks lease rows in order of key; returns the owner of each that there is."""
    return owners(session, ref, keys, session.dialect.skip_locked if skip_locked else session.dialect.for_update)


def owners(session: Session, ref: GroupRef, keys: Sequence[str], locking: str = "") -> dict[str, str]:
    """Partition key → who holds its lease, ``''``: nobody; a partition without a lease row is not in it.

    Args:
        locking: the clause that locks the rows; without one nothing is locked.
    """
    found: dict[str, str] = {}
    for chunk in session.chunks(sorted(keys)):
        found.update(
            session.rows(
                f"SELECT s.partition_key, s.leased_by FROM {session.dialect.rows(('k',), len(chunk))} "
                f"{session.dialect.join_to(LEASES, 's')} ON {BY_KEY}{locking}",
                (*chunk, *ref),
            )
        )
    return found


@dataclass(frozen=True, slots=True)
class Acquired:
    """What an attempt to take leases came to; keys in neither set were locked by somebody."""

    held: set[str]
    """Leases that the subscriber now holds."""
    elsewhere: set[str]
    """Leases of a live owner, or (without ``steal``) of a stale one."""
    paused: bool = False
    """Nothing was tried: the group is paused."""
    dropped: bool = False
    """Nothing was tried: the group is not registered any more."""
    other_mode: str = ""
    """Nothing was tried: the group's mode is this one, in which there are no leases."""


def acquire(
    using: str, ref: GroupRef, subscriber: str, keys: Collection[str], *, lease_ms: int, steal: bool = True
) -> Acquired:
    """Takes the leases that are free or, with ``steal``, stale.

    A row that is locked (its owner is at work) is passed over, never waited for.
    """
    wanted = sorted(keys)

    def take(session: Session) -> Acquired:
        fence = groups.fence(session, ref)
        if fence is None or fence.paused:
            return Acquired(set(), set(), paused=fence is not None, dropped=fence is None)
        if fence.mode != ConsumerGroup.Mode.ORDERED:
            return Acquired(set(), set(), other_mode=fence.mode)
        _create_missing(session, ref, wanted)
        # The lock first, then the owner's heartbeat: what is read after the lock cannot be out of date.
        owners = lock(session, ref, wanted, skip_locked=True)
        alive = set(heartbeats.live(session, [ref], lease_ms)[ref])
        kept = {owner for owner in owners.values() if owner and (owner in alive or not steal)} - {subscriber}
        free = sorted(key for key, owner in owners.items() if owner not in kept)
        _assign(session, ref, free, subscriber)
        return Acquired(set(free), set(owners) - set(free))

    return run(using, take) if wanted else Acquired(set(), set())


def _create_missing(session: Session, ref: GroupRef, keys: Sequence[str]) -> None:
    """Inserts the rows that are not there, unowned. Existing ones are not touched: they may be locked."""
    for chunk in session.chunks(keys):
        there = owners(session, ref, chunk)
        missing = [key for key in chunk if key not in there]
        if missing:
            session.execute(
                f"INSERT INTO {LEASES} (consumer_group, topic, partition_key, leased_by, leased_at) VALUES "
                + session.dialect.placeholders(len(missing), f"(%s, %s, %s, '', {session.dialect.now_ms})")
                + session.dialect.on_conflict_keep(LEASES, ("consumer_group", "topic", "partition_key")),
                flat((*ref, key) for key in missing),
            )


def _assign(session: Session, ref: GroupRef, keys: Sequence[str], subscriber: str) -> None:
    for chunk in session.chunks(keys):
        session.execute(
            session.dialect.update_joined(
                LEASES, ("k", "who"), len(chunk), BY_KEY, {"leased_by": "v.who", "leased_at": session.dialect.now_ms}
            ),
            (*flat((key, subscriber) for key in chunk), *ref),
        )


def load(session: Session, ref: GroupRef, keys: Collection[str]) -> list[Unsettled]:
    """Every claimed delivery of some partitions that is not settled, in offset order."""
    found: list[Unsettled] = []
    for chunk in session.chunks(sorted(keys)):
        found += [
            Unsettled(key, offset, token, 0 if delivered_by or delivered_at > now + CLOCK_STEP_MS else due)
            for key, offset, token, due, delivered_by, delivered_at, now in session.rows(
                "SELECT s.partition_key, s.message_offset, s.delivery_token, s.invisible_until, s.delivered_by, "
                f"s.delivered_at, {session.dialect.now_ms} "
                f"FROM {session.dialect.rows(('k',), len(chunk))} {session.dialect.join_to(STATE, 's')} "
                f"ON {BY_KEY} WHERE s.acked = %s",
                (*chunk, *ref, False),
            )
        ]
    found.sort(key=lambda row: (row.key, row.offset))
    return found


def verify_owned(using: str, ref: GroupRef, subscriber: str, keys: Collection[str]) -> set[str]:
    """Which of these leases the subscriber still holds, read under lock (after doubt)."""

    def check(session: Session) -> set[str]:
        return {key for key, owner in lock(session, ref, sorted(keys)).items() if owner == subscriber}

    return run(using, check)


def release(using: str, ref: GroupRef, subscriber: str, keys: Collection[str]) -> None:
    """Gives back leases whose partitions still have work: the rows stay, unowned."""
    if keys:
        run(using, lambda session: unassign(session, ref, subscriber, keys))


def unassign(
    session: Session, ref: GroupRef, subscriber: str, keys: Collection[str], *, skip_locked: bool = False
) -> int:
    """The same, in the caller's transaction; returns how many of the leases were the subscriber's."""
    owners = lock(session, ref, sorted(keys), skip_locked=skip_locked)
    owned = sorted(key for key, owner in owners.items() if owner == subscriber)
    _assign(session, ref, owned, "")
    return len(owned)


def revoke(using: str, ref: GroupRef, keys: Collection[str], *, actor: str, reason: str = "") -> int:
    """Takes leases away from whoever holds them: any subscriber may have them next.

    The holder notices with its next claim or tick and starts nothing more of
    them; what it is handling ends stale if another has taken it meanwhile.

    Returns:
        How many leases there were.
    """

    def free(session: Session) -> int:
        owned = sorted(key for key, owner in lock(session, ref, sorted(keys)).items() if owner)
        _assign(session, ref, owned, "")
        if owned:
            audit.once(session, "release", len(owned), actor=actor, reason=reason, group=ref.group, topic=ref.topic)
        return len(owned)

    with apart(using):
        return run(using, free) if keys else 0


def drop_drained(using: str, ref: GroupRef, subscriber: str, keys: Collection[str]) -> set[str]:
    """Deletes the subscriber's leases whose partitions have nothing left; returns which."""

    def delete(session: Session) -> set[str]:
        owned = sorted(key for key, owner in lock(session, ref, sorted(keys)).items() if owner == subscriber)
        drained = sorted(set(owned) - with_work(session, ref, owned))
        for chunk in session.chunks(drained):
            session.execute(session.dialect.delete_joined(LEASES, ("k",), len(chunk), BY_KEY), (*chunk, *ref))
        return set(drained)

    return run(using, delete) if keys else set()


def with_work(session: Session, ref: GroupRef, keys: Iterable[str]) -> set[str]:
    """The partitions that have rows above the cursor, or a watermark that has not come up to it."""
    busy: set[str] = set()
    start = f"(SELECT start_offset FROM {groups.GROUPS} WHERE consumer_group = %s AND topic = %s)"
    # Terms of constants, since both servers read only the end of an index for MAX there: asked for any row above the
    # cursor of a joined row, they walk the settled messages that the partition still has in the log. The rest is
    # joined: as subqueries of each term it cost six times as much.
    one = f"SELECT %s AS k, MAX(`offset`) AS top FROM {LOG} WHERE topic = %s AND partition_key = %s"
    ordered = sorted(keys)
    for place in range(0, len(ordered), UNION_TERMS):
        chunk = ordered[place : place + UNION_TERMS]
        busy.update(
            key
            for (key,) in session.rows(
                f"SELECT v.k FROM ({' UNION ALL '.join([one] * len(chunk))}) v "
                f"{session.dialect.join_to(OFFSETS, 's', left=True)} ON {BY_KEY} "
                f"WHERE v.top > COALESCE(s.offset_claimed, {start}) OR s.offset_acked < s.offset_claimed "
                f"OR EXISTS (SELECT 1 FROM {STATE} d{session.dialect.force_index('PRIMARY')} "
                "WHERE d.consumer_group = %s AND d.topic = %s AND d.partition_key = v.k)",
                (*flat((key, ref.topic, key) for key in chunk), *ref, *ref, *ref),
            )
        )
    return busy


def find_work(session: Session, ref: GroupRef, *, after: str | None, limit: int) -> tuple[list[str], str | None]:
    """Partitions that may have work, read partition by partition along an index.

    Serves the start and the slow safety net, not the poll: its cost grows with
    the number of partitions in the log and of the group.

    Returns:
        The keys with work among the next ``limit`` partitions, and where to go on (None: at the end).
    """
    in_log = partitions.in_log(session, ref.topic, after=after, limit=limit)
    # A delivery may outlive its message: one that was discarded while it was in flight.
    in_state = partitions.in_state(session, ref, after=after, limit=limit)
    keys = sorted({*in_log, *in_state}, key=str.encode)[:limit]
    return sorted(with_work(session, ref, keys)), (keys[-1] if len(keys) == limit else None)

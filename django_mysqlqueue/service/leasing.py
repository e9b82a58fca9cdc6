"""Partition leases of ordered groups, which determine the owner of each partition.

The lease row is the record of responsibility. It exists while its partition may have work, changes its owner only
under its own lock, and is deleted only if the partition is found drained under that lock. So a subscriber that has
read a live owner in it may forget the partition: the owner either drains it, or leaves the row behind without an owner
or with a lost one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import NamedTuple, Unpack

from django.utils.translation import gettext_lazy

from django_mysqlqueue.db.tables import GROUPS, HEARTBEATS, LEASES, LOG, OFFSETS, STATE
from django_mysqlqueue.models import ConsumerGroup
from django_mysqlqueue.service import audit, groups, heartbeats, losses, partitions, unclaimed
from django_mysqlqueue.service.audit import By
from django_mysqlqueue.service.clocks import DatabaseClock
from django_mysqlqueue.service.refs import GroupRef
from django_mysqlqueue.sql.connection import apart
from django_mysqlqueue.sql.session import UNION_TERMS, Answer, Session, above, above_values, flat, pieces, run

RELEASE = audit.Action("release", gettext_lazy("Release leases"), audit.LEASES)

CLOCK_STEP_MS = 5000
"""Milliseconds. A row that was written further in the future was written by a clock that was corrected since: the time
until which it waits counts as over. Smaller differences are ordinary slewing."""
MAX_PENDING = 1000
"""Messages of a partition that may wait for another attempt before no new ones are claimed. Without a limit, an outage
of something that handlers need would bring the whole backlog into memory, 350 bytes per message."""


def is_later(due_at: int, delivered_at: int, now: int) -> bool:
    """Return whether a row is due later than now, unless a clock that was corrected since has written it.

    All times are in epoch milliseconds.
    """
    return due_at > now and delivered_at <= now + CLOCK_STEP_MS


KEY = ("consumer_group", "topic", "partition_key")
BY_KEY = "s.consumer_group = %s AND s.topic = %s AND s.partition_key = v.k"


class Lease(NamedTuple):
    """A lease row, with the state of its owner."""

    key: str
    owner: str
    """The owner's name; empty if it has no owner."""
    good: bool
    """Whether the owner's heartbeat is recent."""


class Unsettled(NamedTuple):
    """A claimed delivery that a new owner finds unsettled."""

    key: str
    offset: int
    token: int
    due: int
    """When it may be redelivered, in epoch milliseconds; 0 if its subscriber was lost: at once."""
    is_lost: bool
    """Whether it waits since its subscriber was lost: nothing of its partition overtakes it."""


def fair_shares(partitions: int, subscribers: Collection[str], ref: GroupRef) -> dict[str, int]:
    """Return how many partitions each live subscriber may own. The numbers sum up to ``partitions``.

    Each may own floor(P/n), and the first P mod n one more, in an order rotated by a hash of the group and topic, so
    that the extra ones of many groups do not all go to the same subscriber.
    """
    names = sorted(subscribers)
    if not names:
        return {}
    share, extra = divmod(partitions, len(names))
    first = int.from_bytes(hashlib.sha256(f"{ref.group}\0{ref.topic}".encode()).digest()[:8])
    return {name: share + ((place - first) % len(names) < extra) for place, name in enumerate(names)}


def read(session: Session, refs: Sequence[GroupRef], lease_ms: int) -> dict[GroupRef, list[Lease]]:
    """Return all lease rows of groups, in order of key, by one query."""
    found: dict[GroupRef, list[Lease]] = {ref: [] for ref in refs}
    for group, topic, key, owner, good in session.rows(
        f"SELECT s.consumer_group, s.topic, s.partition_key, s.leased_by, h.subscriber_name IS NOT NULL "
        f"FROM {session.dialect.rows(('g', 't'), len(refs))} "
        f"{session.dialect.join_to(LEASES, 's')} ON s.consumer_group = v.g AND s.topic = v.t "
        f"{session.dialect.join_to(HEARTBEATS, 'h', left=True)} "
        "ON h.consumer_group = s.consumer_group AND h.topic = s.topic "
        f"AND h.subscriber_name = s.leased_by AND {heartbeats.fresh('h', session)}",
        (*flat(refs), lease_ms, lease_ms),
    ):
        found[GroupRef(group, topic)].append(Lease(key, owner, bool(good)))
    for leases in found.values():
        leases.sort(key=lambda lease: lease.key)
    return found


def lock(session: Session, ref: GroupRef, keys: Sequence[str], *, skip_locked: bool = False) -> dict[str, str]:
    """Lock lease rows in order of key, and return the owner of each that exists."""
    return owners(session, ref, keys, session.dialect.skip_locked if skip_locked else session.dialect.for_update)


def ask_lost(session: Session, ref: GroupRef, subscriber: str, keys: Collection[str]) -> Callable[[], set[str]]:
    """Lock the leases of partitions in order of key, and return those that a subscriber does not own.

    As ``Session.ask``.
    """
    answer = _ask_owners(session, ref, keys, session.dialect.for_update)

    def read() -> set[str]:
        owned: dict[str, str] = dict(answer())
        return {key for key in keys if owned.get(key) != subscriber}

    return read


def owners(session: Session, ref: GroupRef, keys: Sequence[str], locking: str = "") -> dict[str, str]:
    """Return a dict from partition key to the owner of its lease, ``''`` if it has none. Missing rows are left out.

    ``locking``: the clause that locks the rows (default: do not lock).
    """
    return dict(_ask_owners(session, ref, keys, locking)())


def _ask_owners(session: Session, ref: GroupRef, keys: Collection[str], locking: str) -> Answer:
    joins = f"{session.dialect.join_to(LEASES, 's')} ON {BY_KEY}{locking}"
    return session.ask_joined("SELECT s.partition_key, s.leased_by", "k", keys, joins, after=ref)


class Acquired(NamedTuple):
    """The result of an attempt to acquire leases. Partitions in neither set were locked by other transactions."""

    held: set[str]
    """Partitions that the subscriber now owns."""
    elsewhere: set[str]
    """Partitions of a live owner, or (without ``steal``) of a lost one."""
    paused: bool = False
    """Whether nothing was acquired because the group is paused."""
    dropped: bool = False
    """Whether nothing was acquired because the group is no longer registered."""
    other_mode: str = ""
    """The group's mode, if nothing was acquired because it is not ordered."""


def acquire(
    using: str,
    ref: GroupRef,
    subscriber: str,
    keys: Collection[str],
    *,
    lease_ms: int,
    steal: bool = True,
    clock: DatabaseClock | None = None,
) -> Acquired:
    """Acquire leases that have no owner or, with ``steal``, a lost one.

    Locked rows are skipped, not waited for: their owner is using them.
    """
    wanted = sorted(keys)

    def take(session: Session) -> Acquired:
        fence = groups.fence(session, ref, clock)
        if fence is None or fence.paused:
            return Acquired(set(), set(), paused=fence is not None, dropped=fence is None)
        if fence.mode != ConsumerGroup.Mode.ORDERED:
            return Acquired(set(), set(), other_mode=fence.mode)
        may_steal = steal and not (clock is not None and clock.is_doubtful(lease_ms))
        _create_missing(session, ref, wanted)
        # First the lock, then the owner's heartbeat: a heartbeat that is read under the lock is not out of date. It is
        # judged by the time that was compared, because the clock may step before the next statement.
        owners = lock(session, ref, wanted, skip_locked=True)
        alive = set(heartbeats.live(session, [ref], lease_ms, now=fence.now)[ref])
        kept = {owner for owner in owners.values() if owner and (owner in alive or not may_steal)} - {subscriber}
        free = sorted(key for key, owner in owners.items() if owner not in kept)
        _assign(session, ref, free, subscriber)
        return Acquired(set(free), set(owners) - set(free))

    return run(using, take) if wanted else Acquired(set(), set())


def _create_missing(session: Session, ref: GroupRef, keys: Sequence[str]) -> None:
    """Insert missing rows without an owner. Existing rows are not touched, because they may be locked."""
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
    changes = {"leased_by": "v.who", "leased_at": session.dialect.now_ms}
    session.update(LEASES, ("k", "who"), [(key, subscriber) for key in keys], BY_KEY, changes, after=ref)


def load(session: Session, ref: GroupRef, keys: Collection[str]) -> list[Unsettled]:
    """Return the claimed and unsettled deliveries of partitions, in offset order."""
    rows = session.joined(
        "SELECT s.partition_key, s.message_offset, s.delivery_token, s.invisible_until, "
        f"s.delivered_by, s.delivered_at, {session.dialect.now_ms}",
        "k",
        keys,
        f"{session.dialect.join_to(STATE, 's')} ON {BY_KEY} WHERE s.acked = %s",
        after=(*ref, False),
        plain=True,
    )
    return [
        Unsettled(
            key,
            offset,
            token,
            0 if token or delivered_at > now + CLOCK_STEP_MS else due,
            losses.is_lost(token, delivered_by),
        )
        for key, offset, token, due, delivered_by, delivered_at, now in sorted(rows)
    ]


def verify_owned(using: str, ref: GroupRef, subscriber: str, keys: Collection[str]) -> set[str]:
    """Return which partitions the subscriber still owns, read under lock, after its leases were in doubt."""

    def check(session: Session) -> set[str]:
        return {key for key, owner in lock(session, ref, sorted(keys)).items() if owner == subscriber}

    return run(using, check)


def release(using: str, ref: GroupRef, subscriber: str, keys: Collection[str]) -> None:
    """Release the leases of partitions that still have work. The rows remain, without an owner."""
    if keys:
        run(using, lambda session: unassign(session, ref, subscriber, keys))


def unassign(
    session: Session, ref: GroupRef, subscriber: str, keys: Collection[str], *, skip_locked: bool = False
) -> int:
    """Release leases in the caller's transaction; return how many of them the subscriber owned."""
    owners = lock(session, ref, sorted(keys), skip_locked=skip_locked)
    owned = sorted(key for key, owner in owners.items() if owner == subscriber)
    _assign(session, ref, owned, "")
    return len(owned)


def revoke(using: str, ref: GroupRef, keys: Collection[str], **by: Unpack[By]) -> int:
    """Take leases away from their owners, so that any subscriber may acquire them.

    The owner notices it with its next claim or tick, and starts no more messages of the partitions. Its running
    deliveries are stale if another subscriber has claimed them in the meantime.

    Returns:
        The number of leases that had an owner.
    """

    def free(session: Session) -> int:
        owned = sorted(key for key, owner in lock(session, ref, sorted(keys)).items() if owner)
        _assign(session, ref, owned, "")
        if owned:
            audit.once(session, RELEASE, len(owned), ref, **by)
        return len(owned)

    with apart(using):
        return run(using, free) if keys else 0


def drop_drained(using: str, ref: GroupRef, subscriber: str, keys: Collection[str]) -> set[str]:
    """Delete the subscriber's leases of drained partitions; return which."""

    def delete(session: Session) -> set[str]:
        owned = sorted(key for key, owner in lock(session, ref, sorted(keys)).items() if owner == subscriber)
        drained = sorted(set(owned) - with_work(session, ref, owned))
        session.delete(LEASES, "k", drained, BY_KEY, after=ref)
        return set(drained)

    return run(using, delete) if keys else set()


def collect(
    using: str, *, after: tuple[str, ...] | None = None, limit: int = 500, dry_run: bool = False
) -> tuple[int, tuple[str, ...] | None]:
    """Delete the leases, among the next ones, of drained partitions that have had no live owner for a day.

    Their owners' heartbeats were deleted (``heartbeats.forget_old``). Subscribers take such leases over earlier, but
    clients in plain SQL look only at partitions with messages.

    ``after``: the primary key of the row after which to continue; None: from the start. ``dry_run``: if True, only
    count.

    Returns:
        How many were deleted, and the primary key of the last row; None if there are no more.
    """
    session = Session(using)
    names = ", ".join(f"s.{name}" for name in KEY)
    rows = session.rows(
        f"SELECT {names}, s.leased_by, s.leased_at < {session.dialect.now_ms} - %s AND "
        "(s.leased_by = '' OR h.subscriber_name IS NULL) "
        f"FROM {LEASES} s{session.dialect.force_index('PRIMARY')} "
        f"{session.dialect.join_to(HEARTBEATS, 'h', left=True)} ON h.consumer_group = s.consumer_group "
        f"AND h.topic = s.topic AND h.subscriber_name = s.leased_by WHERE {above(KEY)} ORDER BY {names} LIMIT %s",
        (heartbeats.FORGET_AFTER_MS, *above_values(after or ("", "", "")), limit),
    )
    left: dict[tuple[GroupRef, str], list[str]] = {}
    for group, topic, key, owner, is_left in rows:
        if is_left:
            left.setdefault((GroupRef(group, topic), owner), []).append(key)
    deleted = 0
    for (ref, owner), keys in sorted(left.items()):
        # Most have work: their leases are not locked.
        drained = set(keys) - with_work(session, ref, keys)
        deleted += len(drained if dry_run else drop_drained(using, ref, owner, drained))
    return deleted, tuple(rows[-1][:3]) if len(rows) == limit else None


def with_work(session: Session, ref: GroupRef, keys: Iterable[str]) -> set[str]:
    """Return the partitions that have messages above the position, a watermark below it, or state rows."""
    busy: set[str] = set()
    start = f"(SELECT start_offset FROM {GROUPS} WHERE consumer_group = %s AND topic = %s)"
    # With constants in each term, both servers read only the end of the index for MAX. With the position of a joined
    # row, they would walk the settled messages that the partition still has in the log. The rest is joined: as
    # subqueries of each term it cost six times as much.
    one = f"SELECT %s AS k, MAX(`offset`) AS top FROM {LOG} WHERE topic = %s AND partition_key = %s"
    for chunk in pieces(sorted(keys), UNION_TERMS):
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
    """Find partitions that may have work, by the rule of ``with_work``, partition by partition along an index.

    The cost grows with the number of partitions in the log and of the group. So this runs at the start and in the
    maintenance, not in a poll. ``with_work`` asks for each partition by its key; here ranges of the indexes are read,
    which costs a fraction.

    ``after``: the partition after which to continue; None: from the start.

    Returns:
        The partitions with work among the next ones, and the partition after which to continue (None at the end).
    """
    # The positions last: until a message that is claimed in the meantime is settled, its watermark is below them.
    ends, whole = partitions.last_offsets(session, ref.topic, limit=limit, after=after)
    # A partition may have state rows without messages in the log: of messages that were discarded while in flight.
    in_state = partitions.in_state(session, ref, after=after, limit=limit)
    unfinished = [max(ends)] if ends and not whole else []
    unfinished += in_state[-1:] if len(in_state) == limit else []
    end = min(unfinished, default=None)
    keys = {key for key in (*ends, *in_state) if end is None or key <= end}
    group = groups.find(session.using, ref)
    places = dict.fromkeys(keys, (group.start_offset, group.start_offset)) if group is not None else {}
    places |= unclaimed.many_positions(session, ref, keys, len(keys))
    busy = {key for key, (acked, claimed) in places.items() if ends.get(key, 0) > claimed or acked < claimed}
    return sorted(keys.intersection({*busy, *in_state})), end

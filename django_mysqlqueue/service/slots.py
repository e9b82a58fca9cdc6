"""Slots: the accounts of the limits of consumer groups.

A message of a group with limits starts only with a slot, which its claim reserves. A table has, for each key that is
limited, when its next slot is free, and for each subscriber how many slots of the key it holds. The row of the group as
a whole is the lock of all of them: claims of one group reserve slots one after another. A transaction that has locked
it waits only for coalesce keys, and for results and stages of jobs that are in chains, or that it passes.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from django_mysqlqueue.db.tables import HEARTBEATS, SLOTS
from django_mysqlqueue.names.keys import PARTITION_PREFIX, lane_of
from django_mysqlqueue.options.delivery_limits import AHEAD_US, NO_KEY, START_WITHIN_US, Throttle
from django_mysqlqueue.service import heartbeats
from django_mysqlqueue.service.clocks import DatabaseClock
from django_mysqlqueue.service.deliveries import Candidate, Holding, Slot
from django_mysqlqueue.service.messages import decode_metadata, publisher_key
from django_mysqlqueue.service.refs import GroupRef
from django_mysqlqueue.sql.session import Session, flat, run

KEY = ("consumer_group", "topic", "limit_key", "subscriber_name")
BY_KEY = "s.consumer_group = %s AND s.topic = %s AND s.limit_key = v.k AND s.subscriber_name = v.who"

LONGEST_LOCK = 0.02
"""Seconds for the lock of the limits, after which the database is asked for the time again."""
RECHECK_US = 100_000
"""Microseconds until a claim asks again whether messages in flight have ended. A process that gets no slot waits longer
each time."""
RECHECK_STEP_US = 10_000
"""Microseconds between the times at which messages of one key ask again."""
LONGEST_REST_US = 10_000_000
"""Microseconds after which a claim asks again at the latest, since the limits may have been changed."""
FORGET_AFTER_US = 86_400_000_000
"""Microseconds after which the rows of subscribers without a heartbeat are deleted."""


class Rest(NamedTuple):
    """Why a message gets no slot."""

    until: int
    """When to ask again, in epoch milliseconds."""
    key: str
    """The key that is limited; ``NO_KEY``: the group as a whole."""
    in_flight: bool
    """Whether too many of its messages are in flight; otherwise, its rate is used up."""
    is_certain: bool = False
    """Whether there is a slot then unless others reserve it. Otherwise, it is only the time to ask again."""


class Reservation:
    """The slots that one claim reserves.

    The first call of ``read`` or ``take`` waits for the lock of the group's limits. Claims of the group wait for each
    other from then on until they commit, so a claim finds its candidates before. Nothing is written before ``store``.
    """

    def __init__(self, session: Session, ref: GroupRef, holding: Holding, clock: DatabaseClock | None = None) -> None:
        self._session = session
        self._ref = ref
        self.limits = limits = holding.limits
        self._holding = holding
        self._clock = clock
        self._keys: dict[tuple[str, int], str] = {}
        """By partition and offset, the limited keys of messages; ``NO_KEY`` for others."""
        self._throttles: dict[str, Throttle | None] = {}
        self._most = {True: limits.max_in_flight, False: limits.max_in_flight_per_key}
        self._full_at: dict[str, int] = {}
        self._known: set[str] = set()
        """Keys that have a row."""
        self._changed: set[str] = set()
        self._elsewhere: dict[str, int] = {}
        """By key, the number of messages that other live subscribers hold."""
        self.held = dict(holding.held)
        """By key, the number of messages that this subscriber holds with those of the claim."""
        self._refused: dict[str, int] = {}
        """By key, how many messages of this claim have got no slot."""
        self._sent_at = self._received_at = 0.0
        self._now = 0
        """The database's time in epoch microseconds; 0: the limits are not locked yet."""

    def _lock(self) -> None:
        self._sent_at = time.monotonic()
        now = lock(self._session, self._ref, create=True) or 0
        self._received_at = time.monotonic()
        if self._received_at - self._sent_at > LONGEST_LOCK:
            # The time is that at which the statement began to wait. Slots of that time may already be too old to start.
            self._sent_at = self._received_at
            now = self._session.now()
            self._received_at = time.monotonic()
        if self._clock is not None:
            self._clock.check(now, self._received_at - self._sent_at)
        self._now = now * 1000
        give_back(self._session, self._ref, self._holding)

    def has_several_keys(self, partition: str) -> bool:
        """Return whether messages of a partition can have different limited keys."""
        if not self.limits.limits_keys:
            return False
        return self.limits.limit_by is not None or lane_of(partition).partition.startswith(PARTITION_PREFIX)

    def note(self, candidates: Iterable[Candidate]) -> bool:
        """Note the limited keys of messages, and return whether any of them needs a slot."""
        is_needed = False
        for one in candidates:
            metadata = decode_metadata(one.metadata) if one.metadata and self.limits.limit_by is not None else {}
            key = self.limits.key_of(publisher_key(one.key, one.publisher_key), metadata)
            self._keys[one.key, one.offset] = key
            is_needed = is_needed or self.is_needed(one.key, one.offset)
        return is_needed

    def key_of(self, partition: str, offset: int) -> str:
        """Return the limited key of a message; ``NO_KEY`` if only the limits of the group apply."""
        return self._keys.get((partition, offset), NO_KEY)

    def is_needed(self, partition: str, offset: int) -> bool:
        """Return whether a message needs a slot."""
        return self.limits.limits_group or self.key_of(partition, offset) != NO_KEY

    def read_for(self, candidates: Collection[Candidate]) -> None:
        """Note the limited keys of messages, and read their accounts if any of them needs a slot."""
        if self.limits.limits_keys and self.note(candidates):
            self.read({self.key_of(one.key, one.offset) for one in candidates})

    def take_for(self, partition: str, offset: int) -> Slot | Rest:
        """Reserve a slot for a message, or return why there is none."""
        return self.take(self.key_of(partition, offset))

    def read(self, keys: Iterable[str]) -> None:
        """Read the accounts of keys, before ``take`` is called for them."""
        if not self._now:
            self._lock()
        session, new = self._session, sorted({NO_KEY, *keys} - self._full_at.keys())
        live = ""
        parameters: tuple[object, ...] = ()
        if self.limits.counts_in_flight:
            if self._clock is not None and self._clock.is_doubtful(self._holding.lease_ms):
                alive = "h.deregistered_at = 0"  # All that hold slots may live.
            else:
                alive, parameters = heartbeats.fresh("h", session), (self._holding.lease_ms, self._holding.lease_ms)
            live = f"{_with_heartbeats(session)} WHERE s.subscriber_name = '' OR ({alive})"
        for chunk in session.chunks(new):
            self._full_at |= dict.fromkeys(chunk, 0)
            for key, subscriber, full_at, held in session.rows(
                f"SELECT s.limit_key, s.subscriber_name, s.full_at, s.held "
                f"FROM {session.dialect.rows(('k',), len(chunk))} {session.dialect.join_to(SLOTS, 's')} "
                f"ON s.consumer_group = %s AND s.topic = %s AND s.limit_key = v.k{live}",
                (*chunk, *self._ref, *parameters),
            ):
                if not subscriber:
                    self._know(key, full_at)
                elif subscriber != self._holding.subscriber:
                    self._elsewhere[key] = self._elsewhere.get(key, 0) + held

    def _throttle(self, key: str) -> Throttle | None:
        if key not in self._throttles:
            self._throttles[key] = self.limits.throttle_of(key)
        return self._throttles[key]

    def _know(self, key: str, full_at: int) -> None:
        self._known.add(key)
        throttle = self._throttle(key)
        self._full_at[key] = full_at if throttle is None else throttle.corrected(full_at, self._now)
        if self._full_at[key] != full_at:
            self._changed.add(key)  # Otherwise it would be corrected to a later time again and again.

    def take(self, key: str) -> Slot | Rest:
        """Reserve a slot for a message, or return why there is none.

        ``key``: the message's key for the limits per key; ``NO_KEY``: only those of the group apply.
        """
        keys = [NO_KEY] if key == NO_KEY else [NO_KEY, key]
        if not self._now:
            self.read([])
        for one in keys:
            rest = self._rest(one)
            if rest is not None:
                return rest
        return self._reserve(key, keys)

    def ask(self, keys: Sequence[str]) -> list[Rest | None]:
        """Return why one message of each key, one after another, would get no slot by the limits per key.

        This neither locks nor writes anything. So a claim may find it otherwise.
        """
        self._now = self._session.now() * 1000
        self.read(keys)
        found: list[Rest | None] = []
        for key in keys:
            rest = self._rest(key)
            if rest is None:
                self._reserve(key, [key])
            found.append(rest)
        return found

    def _rest(self, key: str) -> Rest | None:
        """Return why the limits of one key have no slot."""
        most, throttle = self._most[key == NO_KEY], self._throttle(key)
        if most is not None and self.held.get(key, 0) + self._elsewhere.get(key, 0) >= most:
            return self._refuse(key, self._now + RECHECK_US, RECHECK_STEP_US, in_flight=True)
        if throttle is not None:
            slot = throttle.next_slot(self._full_at[key], self._now)
            if slot > self._now + AHEAD_US:
                return self._refuse(key, slot, throttle.interval_us, in_flight=False)
        return None

    def _reserve(self, key: str, keys: Sequence[str]) -> Slot:
        """Reserve a slot for a message of a key by the limits of some keys, which have one."""
        slots = [throttle.next_slot(self._full_at[one], self._now) for one, throttle in self._applied(keys)]
        slot = max(slots, default=self._now)
        for one, throttle in self._applied(keys):
            self._full_at[one] = throttle.reserve(self._full_at[one], slot)
            self._changed.add(one)
        for one in keys:
            self.held[one] = self.held.get(one, 0) + 1
        before = self._sent_at + self._holding.lease_ms / 2000
        if slots:
            # The database's time had up to a millisecond more than the whole ones.
            before = min(before, self._sent_at + (slot + START_WITHIN_US - self._now - 1000) / 1e6)
        return Slot(key, self._received_at + (slot - self._now) / 1e6, before)

    def _applied(self, keys: Iterable[str]) -> list[tuple[str, Throttle]]:
        found = [(one, self._throttle(one)) for one in keys]
        return [(one, throttle) for one, throttle in found if throttle is not None]

    def _refuse(self, key: str, slot: int, step_us: int, *, in_flight: bool) -> Rest:
        """Return when to ask again: messages of one key, one after another."""
        before = self._refused.get(key, 0)
        self._refused[key] = before + 1
        until, latest = slot + before * step_us, self._now + LONGEST_REST_US
        return Rest(min(until, latest) // 1000 + 1, key, in_flight, is_certain=not in_flight and until <= latest)

    def store(self) -> dict[str, int]:
        """Write the accounts, and return what the subscriber's rows say."""
        if not self._now:
            return settle(self._session, self._ref, self._holding)
        rows = [(key, "", self._full_at[key]) for key in sorted(self._changed)]
        new = [row for row in rows if row[0] not in self._known]
        _insert(self._session, self._ref, [(*row, 0) for row in new])
        old = [row for row in rows if row[0] in self._known]
        self._session.update(SLOTS, ("k", "who", "at"), old, BY_KEY, {"full_at": "v.at"}, after=self._ref)
        return store_held(self._session, self._ref, self._holding, self.held)


def _with_heartbeats(session: Session) -> str:
    """Return the join of ``s`` to the heartbeats of the subscribers that hold slots."""
    return (
        f" {session.dialect.join_to(HEARTBEATS, 'h', left=True)} ON h.consumer_group = s.consumer_group "
        "AND h.topic = s.topic AND h.subscriber_name = s.subscriber_name"
    )


def keys_held(session: Session, ref: GroupRef, subscriber: str) -> set[str]:
    """Return the limited keys of which a subscriber holds slots, as its rows say."""
    rows = session.rows(
        f"SELECT limit_key FROM {SLOTS}{session.dialect.force_index('PRIMARY')} "
        "WHERE consumer_group = %s AND topic = %s AND subscriber_name = %s",
        (*ref, subscriber),
    )
    return {key for (key,) in rows}


def lock(session: Session, ref: GroupRef, *, create: bool = False) -> int | None:
    """Lock the limits of a group, and return the time of the statement in epoch milliseconds.

    ``create``: whether to create the row that is the lock. The caller has locked the group row: the row is deleted only
    with the group. Otherwise the result is None if there is none.
    """
    sql = (
        f"SELECT {session.dialect.now_ms} FROM {SLOTS}{session.dialect.force_index('PRIMARY')} "
        f"WHERE consumer_group = %s AND topic = %s AND limit_key = '' AND subscriber_name = ''"
        f"{session.dialect.for_update}"
    )
    row = session.row(sql, ref)
    if row is None and create:  # The first claim of the group.
        _insert(session, ref, [(NO_KEY, "", 0, 0)])
        row = session.row(sql, ref)
    return None if row is None else int(row[0])


def give_back(session: Session, ref: GroupRef, holding: Holding) -> None:
    """Release slots whose messages have not started. The limits of the group must be locked.

    What the throttle may have regained since they were reserved is not released a second time: otherwise, more than a
    burst could start at once. Slots behind them may have been reserved up to ``AHEAD_US`` in advance.
    """
    now = session.dialect.now_ms
    rows = []
    for key, one in sorted(holding.returned.items()):
        throttle = holding.limits.throttle_of(key)
        if throttle is not None:
            rows.append((key, "", one.number * throttle.interval_us, one.since * 1000))
    back = f"{session.dialect.greatest}(0, v.back - ({now} * 1000 + {AHEAD_US} - v.since))"
    session.update(SLOTS, ("k", "who", "back", "since"), rows, BY_KEY, {"full_at": f"s.full_at - {back}"}, after=ref)


def settle(session: Session, ref: GroupRef, holding: Holding) -> dict[str, int]:
    """Write, without a claim, what a subscriber holds, and release the slots that it returns.

    Returns:
        What the subscriber's rows say.
    """
    if holding.returned and lock(session, ref) is not None:
        give_back(session, ref, holding)
    return store_held(session, ref, holding, holding.held)


def store_held(session: Session, ref: GroupRef, holding: Holding, held: Mapping[str, int]) -> dict[str, int]:
    """Write how many slots a subscriber holds, in its own rows, if messages in flight are limited; return it.

    Only claims, under the lock of the group's limits, may write higher numbers.
    """
    held = holding.limits.counted(held)
    before = holding.stored
    keys = sorted({key for key in {*before, *held} if before.get(key, 0) != held.get(key, 0)} | set(holding.doubtful))
    holding.written.update(keys)
    there = [key for key in keys if before.get(key, 0) or key in holding.doubtful]
    now = session.dialect.now_ms
    _insert(
        session,
        ref,
        [
            (key, holding.subscriber, None, held[key])
            for key in keys
            if held.get(key, 0) and (not before.get(key, 0) or key in holding.doubtful)
        ],
    )
    kept = [(key, holding.subscriber, held[key]) for key in there if held.get(key, 0)]
    changes = {"held": "v.n", "full_at": f"{now} * 1000"}
    session.update(SLOTS, ("k", "who", "n"), kept, BY_KEY, changes, after=ref)
    ended = [(key, holding.subscriber) for key in there if not held.get(key, 0)]
    session.delete(SLOTS, ("k", "who"), ended, BY_KEY, after=ref)
    return held


def _insert(session: Session, ref: GroupRef, rows: Collection[tuple[str, str, int | None, int]]) -> None:
    """Insert rows that are not there; without a time, that of now."""
    for chunk in session.chunks(list(rows)):
        session.execute(
            f"INSERT INTO {SLOTS} ({', '.join(KEY)}, full_at, held) VALUES "
            + session.dialect.placeholders(
                len(chunk), f"(%s, %s, %s, %s, COALESCE(%s, {session.dialect.now_ms} * 1000), %s)"
            )
            + session.dialect.on_conflict_keep(SLOTS, KEY),
            flat((*ref, *row) for row in chunk),
        )


def outdated(session: Session) -> tuple[str, tuple[object, ...]]:
    """Return the FROM and WHERE of the rows that no longer limit anything.

    These are the rows of keys of which a full burst may start, and those of subscribers that have had no heartbeat for
    a day.
    """
    now = f"{session.dialect.now_ms} * 1000"
    rows = (
        f"{SLOTS} s{session.dialect.force_index('queue_slots_full_at')}{_with_heartbeats(session)} "
        f"WHERE s.full_at < {now} AND ((s.subscriber_name = '' AND s.limit_key <> '') OR (s.subscriber_name <> '' "
        f"AND s.full_at < {now} - %s AND h.subscriber_name IS NULL))"
    )
    return rows, (FORGET_AFTER_US,)


def collect(using: str, *, limit: int = 500) -> int:
    """Delete rows that no longer limit anything, by primary key; return how many."""

    def delete(session: Session) -> int:
        now = f"{session.dialect.now_ms} * 1000"
        old, parameters = outdated(session)
        rows = session.rows(
            f"SELECT {', '.join(f's.{name}' for name in KEY)} FROM {old} LIMIT %s", (*parameters, limit)
        )
        deleted = 0
        for ref in sorted({GroupRef(group, topic) for group, topic, _, _ in rows}):
            lock(session, ref)  # A claim may be about to reserve a slot of one of these keys.
            mine = sorted(row[2:] for row in rows if row[:2] == ref)
            deleted += session.delete(SLOTS, ("k", "who"), mine, BY_KEY, f"s.full_at < {now}", after=ref)
        return deleted

    return run(using, delete)

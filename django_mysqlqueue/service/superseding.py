"""Which messages with a coalesce key a group may start: one that no later one supersedes, and never two at a time."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from django_mysqlqueue.filter_policies import FilterPolicy
from django_mysqlqueue.models import ConsumerOffset, DeliveryState, QueueMessage
from django_mysqlqueue.service import leasing
from django_mysqlqueue.service.coalescing import THE_LOG, Coalesced, note, read
from django_mysqlqueue.service.messages import decode_metadata
from django_mysqlqueue.service.refs import GroupRef
from django_mysqlqueue.service.watermarks import BY_ROW
from django_mysqlqueue.sql.session import Session, flat

LOG = QueueMessage._meta.db_table
STATE = DeliveryState._meta.db_table
OFFSETS = ConsumerOffset._meta.db_table
RECHECK_MS = 100
LONGEST_RECHECK_MS = 10_000
"""Shortest and longest time until a claim asks again whether the message before has ended, in milliseconds. In between,
it is a quarter of the time that has passed since that one was claimed."""


class Coalescing:
    """The coalesce keys of messages, for one group, as the tables have them now.

    In shared mode, a claim must have locked the offsets rows of the partitions: under this lock it is decided which
    message of a key may start.
    """

    def __init__(self, session: Session, ref: GroupRef, policy: FilterPolicy | None, *, shared: bool, now: int) -> None:
        self._session = session
        self._ref = ref
        self._policy = policy
        self._shared = shared
        self._now = now
        self._keys: dict[tuple[str, int], Coalesced] = {}
        """By partition and offset."""
        self._latest: dict[Coalesced, int] = {}
        """By key, the latest message that the group gets."""
        self._claimed: dict[Coalesced, int] = {}
        """By key, the message that the group has claimed last (shared mode)."""
        self._until: dict[Coalesced, int] = {}
        """By key, until when another message waits because that one is in flight."""
        self._took: dict[Coalesced, int] = {}
        """By key, the message that this claim has taken last (shared mode)."""

    def read(self, messages: Mapping[tuple[str, int], str], *, were_claimed: bool = False) -> None:
        """Read what is known about the coalesce keys of messages, given by partition and offset.

        Args:
            messages: the key of each.
            were_claimed: whether they are below the position. Then later ones may be, too: the group has got or passed
                them under its filter of that time, whether or not that of now matches them.
        """
        new = {place: Coalesced(place[0], key) for place, key in messages.items() if key}
        if not new:
            return
        self._keys |= new
        groups = (THE_LOG, self._ref.group) if self._shared else (THE_LOG,)
        ones = set(new.values())
        rows = read(self._session, [(group, self._ref.topic, *one) for one in ones for group in groups])
        others = {(partition, offset) for (_, _, partition, _), offset in rows.items()} - self._keys.keys()
        claimed = _claimed(self._session, self._ref, others) if were_claimed else {}
        ahead = {offset for _, offset in others - claimed.keys()}
        gets = ahead if self._policy is None else _matching(self._session, self._policy, ahead)
        for (group, _, partition, key), offset in rows.items():
            one = Coalesced(partition, key)
            if claimed.get((partition, offset), offset in gets):
                self._latest[one] = max(self._latest.get(one, 0), offset)
            if group and one not in self._took:
                self._claimed[one] = offset
        # Those that were looked at, too: an earlier release may have appended them, and they are not noted yet.
        for (_, offset), one in new.items():
            self._latest[one] = max(self._latest.get(one, 0), offset)
        self._read_in_flight({one: self._claimed[one] for one in ones if one in self._claimed})

    def _read_in_flight(self, claimed: Mapping[Coalesced, int]) -> None:
        """Read which of the messages that the group has claimed last are in flight."""
        session = self._session
        keys = {(one.partition, offset): one for one, offset in claimed.items()}
        due: dict[tuple[str, int], int] = {}
        for chunk in session.chunks(sorted(keys)):
            for partition, offset, due_at, delivered_at in session.rows(
                "SELECT s.partition_key, s.message_offset, s.invisible_until, s.delivered_at "
                f"FROM {session.dialect.rows(('k', 'o'), len(chunk))} {session.dialect.join_to(STATE, 's')} "
                f"ON {BY_ROW} AND s.acked = %s AND s.delivery_token <> 0",
                (*flat(chunk), *self._ref, False),
            ):
                wait = min(max(RECHECK_MS, (self._now - delivered_at) // 4), LONGEST_RECHECK_MS)
                if leasing.is_later(due_at, delivered_at, self._now):
                    self._until[keys[partition, offset]] = self._now + wait
                else:
                    due[partition, offset] = self._now + wait
        # A handler that has acked in a transaction of its own has locked the row, so that nobody can extend it.
        for chunk in session.chunks(sorted(due)):
            lost = session.rows(
                f"SELECT s.partition_key, s.message_offset FROM {session.dialect.rows(('k', 'o'), len(chunk))} "
                f"{session.dialect.join_to(STATE, 's')} ON {BY_ROW}{session.dialect.skip_locked}",
                (*flat(chunk), *self._ref),
            )
            self._until |= {keys[place]: due[place] for place in set(chunk) - set(lost)}

    def is_superseded(self, partition: str, offset: int) -> bool:
        """Return whether a later message has the coalesce key of a message."""
        one = self._keys.get((partition, offset))
        return one is not None and self._latest[one] > offset

    def waits_until(self, partition: str, offset: int) -> int | None:
        """Return until when a message waits because another one with its key is in flight, in epoch milliseconds.

        It is None if none is.
        """
        one = self._keys.get((partition, offset))
        if one is None or not self._shared or self._claimed.get(one) == offset:
            return None
        return self._until.get(one)

    def took(self, partition: str, offset: int) -> None:
        """Note that the claim has taken a message."""
        one = self._keys.get((partition, offset))
        if one is not None and self._shared:
            self._took[one] = self._claimed[one] = offset
            self._until[one] = self._now + RECHECK_MS

    def store(self) -> None:
        """Store which messages the claim has taken."""
        if self._took:
            note(self._session, [(self._ref.group, self._ref.topic, *one, at) for one, at in self._took.items()])


def _matching(session: Session, policy: FilterPolicy, offsets: Collection[int]) -> set[int]:
    """Return the messages that a group with a filter gets."""
    found: set[int] = set()
    for chunk in session.chunks(sorted(offsets)):
        found.update(
            offset
            for offset, metadata in session.rows(
                f"SELECT m.`offset`, m.metadata FROM {session.dialect.rows(('o',), len(chunk))} "
                f"{session.dialect.join_to(LOG, 'm')} ON m.`offset` = v.o",
                chunk,
            )
            if policy.matches(decode_metadata(metadata))
        )
    return found


def _claimed(session: Session, ref: GroupRef, places: Collection[tuple[str, int]]) -> dict[tuple[str, int], bool]:
    """Return which messages are at or below the positions of a group, and whether it has got each or passed it.

    Those that it has got have delivery state, as long as an earlier message of the partition is unsettled.

    Args:
        session: the current transaction.
        ref: the group.
        places: partition and offset of each message.
    """
    found: dict[tuple[str, int], bool] = {}
    for chunk in session.chunks(sorted(places)):
        for partition, offset, has_state in session.rows(
            f"SELECT v.k, v.o, s.message_offset IS NOT NULL FROM {session.dialect.rows(('k', 'o'), len(chunk))} "
            f"{session.dialect.join_to(OFFSETS, 'f')} ON f.consumer_group = %s AND f.topic = %s "
            f"AND f.partition_key = v.k AND f.offset_claimed >= v.o "
            f"{session.dialect.join_to(STATE, 's', left=True)} ON {BY_ROW}",
            (*flat(chunk), *ref, *ref),
        ):
            found[partition, offset] = bool(has_state)
    return found


def superseded(
    using: str, ref: GroupRef, policy: FilterPolicy | None, messages: Mapping[tuple[str, int], str]
) -> set[tuple[str, int]]:
    """Return which messages are superseded now, before they start.

    Args:
        using: alias of the queue's database.
        ref: the group.
        policy: its filter.
        messages: the coalesce key of each message, by partition and offset.
    """
    coalescing = Coalescing(Session(using), ref, policy, shared=False, now=0)
    coalescing.read(messages, were_claimed=True)
    return {place for place in messages if coalescing.is_superseded(*place)}

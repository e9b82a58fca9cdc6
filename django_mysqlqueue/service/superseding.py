"""Which messages with a coalesce key a group may start: one that no later one supersedes, and never two at a time."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from django_mysqlqueue.db.tables import LOG, OFFSETS, STATE
from django_mysqlqueue.filter_policies import FilterPolicy
from django_mysqlqueue.service import groups, leasing, watermarks
from django_mysqlqueue.service.coalescing import THE_LOG, Coalesced, note, read
from django_mysqlqueue.service.groups import OptionColumns
from django_mysqlqueue.service.messages import decode_metadata
from django_mysqlqueue.service.refs import GroupRef
from django_mysqlqueue.service.watermarks import BY_ROW
from django_mysqlqueue.sql.session import Session, run

RECHECK_MS = 100
LONGEST_RECHECK_MS = 10_000
"""Shortest and longest time until a claim asks again whether the message before has ended, in milliseconds. In between,
it is a quarter of the time that has passed since that one was claimed."""


class Coalescing:
    """The coalesce keys of messages, for one group, as the tables have them now.

    The transaction must have locked the offsets rows of the partitions: under this lock it is decided which message of
    a key may start (shared mode), and noted for which one the group gives up others.
    """

    def __init__(
        self,
        session: Session,
        ref: GroupRef,
        policy: FilterPolicy | None,
        *,
        shared: bool,
        now: int,
        is_doubtful: bool = False,
    ) -> None:
        self._session = session
        self._ref = ref
        self._policy = policy
        self._shared = shared
        self._now = now
        self._is_doubtful = is_doubtful
        """Whether the database's clock has stepped, so that deliveries that others hold look over (shared mode)."""
        self._keys: dict[tuple[str, int], Coalesced] = {}
        """By partition and offset."""
        self._latest: dict[Coalesced, int] = {}
        """By key, the latest message that the group gets."""
        self._claimed: dict[Coalesced, int] = {}
        """By key, the message that the group has claimed last (shared mode)."""
        self._until: dict[Coalesced, int] = {}
        """By key, until when another message waits because that one is in flight."""
        self._took: dict[Coalesced, int] = {}
        """By key, the message that this claim has taken last."""
        self._superseding: dict[Coalesced, int] = {}
        """By key, the message for which the group has given up others before this claim."""
        self._rows: set[tuple[str, int]] = set()
        """Partition and offset of messages that have delivery state: no filter is asked about them again."""
        self._given_up: set[Coalesced] = set()
        """Keys of which this claim gives up messages."""

    def read(
        self,
        messages: Mapping[tuple[str, int], str],
        *,
        unmatched: Collection[tuple[str, int]] = (),
        were_claimed: bool = False,
    ) -> set[tuple[str, int]]:
        """Read what is known about the coalesce keys of messages, given by partition and offset.

        ``unmatched``: those that the group's filter does not match. ``were_claimed``: whether they are below the
        position. Then later ones may be, too: the group has got or passed them under its filter of that time, whether
        or not that of now matches them.

        Returns:
            Those of ``unmatched`` that the group gets nevertheless, because it has given up others for them.
        """
        new = {place: Coalesced(place[0], key) for place, key in messages.items() if key}
        if not new:
            return set()
        ones = set(new.values())
        of_groups = (THE_LOG, self._ref.group)
        rows = read(self._session, [(group, self._ref.topic, *one) for one in ones for group in of_groups])
        others: set[tuple[str, int]] = set()
        for (group, _, partition, key), noted in rows.items():
            one = Coalesced(partition, key)
            others |= {(partition, offset) for offset in noted if offset}
            if group:
                self._superseding[one] = noted.superseding
                if self._shared and noted.offset and one not in self._took:
                    self._claimed[one] = noted.offset
        passed = {place for place in unmatched if place in new and not self._is_superseding(new[place], place[1])}
        new = {place: one for place, one in new.items() if place not in passed}
        self._keys |= new
        if were_claimed:
            self._rows |= new.keys()
        others -= self._keys.keys()
        claimed = _claimed(self._session, self._ref, others) if were_claimed else {}
        self._rows |= {place for place, has_state in claimed.items() if has_state}
        ahead = {offset for _, offset in others - claimed.keys()}
        gets = ahead if self._policy is None else _matching(self._session, self._policy, ahead)
        for (_, _, partition, key), noted in rows.items():
            one = Coalesced(partition, key)
            for offset in noted:
                is_got = offset in ahead and (offset in gets or self._is_superseding(one, offset))
                if is_got or (partition, offset) in self._rows:
                    self._latest[one] = max(self._latest.get(one, 0), offset)
        # Those that were looked at, too: the group gets them.
        for (_, offset), one in new.items():
            self._latest[one] = max(self._latest.get(one, 0), offset)
        self._read_in_flight({one: self._claimed[one] for one in ones if one in self._claimed})
        return new.keys() & set(unmatched)

    def _read_in_flight(self, claimed: Mapping[Coalesced, int]) -> None:
        """Read which of the messages that the group has claimed last are in flight."""
        session = self._session
        keys = {(one.partition, offset): one for one, offset in claimed.items()}
        due: dict[tuple[str, int], int] = {}
        for partition, offset, due_at, delivered_at in session.joined(
            "SELECT s.partition_key, s.message_offset, s.invisible_until, s.delivered_at",
            "ko",
            keys,
            f"{session.dialect.join_to(STATE, 's')} ON {BY_ROW} AND s.acked = %s AND s.delivery_token <> 0",
            after=(*self._ref, False),
            plain=True,
        ):
            wait = min(max(RECHECK_MS, (self._now - delivered_at) // 4), LONGEST_RECHECK_MS)
            if self._is_doubtful or leasing.is_later(due_at, delivered_at, self._now):
                self._until[keys[partition, offset]] = self._now + wait
            else:
                due[partition, offset] = self._now + wait
        # A handler that has acked in a transaction of its own has locked the row, so that nobody can extend it.
        joins = f"{session.dialect.join_to(STATE, 's')} ON {BY_ROW}{session.dialect.skip_locked}"
        lost = session.joined("SELECT s.partition_key, s.message_offset", "ko", due, joins, after=self._ref, plain=True)
        self._until |= {keys[place]: due[place] for place in due.keys() - set(lost)}

    def _is_superseding(self, one: Coalesced, offset: int) -> bool:
        return self._superseding.get(one) == offset

    def is_superseded(self, partition: str, offset: int) -> bool:
        """Return whether a later message has the coalesce key of a message."""
        one = self._keys.get((partition, offset))
        return one is not None and self._latest[one] > offset

    def waits_until(self, partition: str, offset: int) -> int | None:
        """Return until when a message waits because another one with its key is in flight, in epoch milliseconds.

        It is None if none is, or if the message is superseded.
        """
        one = self._keys.get((partition, offset))
        if one is None or not self._shared or self._claimed.get(one) == offset or self._latest[one] > offset:
            return None
        return self._until.get(one)

    def took(self, partition: str, offset: int) -> None:
        """Note that the claim has taken a message. One that is superseded counts for nothing."""
        one = self._keys.get((partition, offset))
        if one is None or self._latest[one] > offset:
            return
        self._took[one] = offset
        if self._shared:
            self._claimed[one] = offset
            self._until[one] = self._now + RECHECK_MS

    def gave_up(self, partition: str, offset: int) -> None:
        """Note that a message is settled because it is superseded."""
        self._given_up.add(self._keys[partition, offset])

    def unnoted(self) -> dict[Coalesced, int]:
        """Return for which messages, by key, the group gives up others, if that is to be noted.

        A message that has been claimed needs no note: it passes any filter anyway.
        """
        return {
            one: offset
            for one in self._given_up
            if (offset := self._latest[one]) != self._took.get(one)
            and (one.partition, offset) not in self._rows
            and not self._is_superseding(one, offset)
        }

    def store(self) -> None:
        """Store which messages the claim has taken (shared mode), and for which ones it has given up others."""
        claimed = self._took if self._shared else {}
        superseding = self.unnoted()
        ones = claimed.keys() | superseding.keys()
        if ones:
            ref = self._ref
            rows = [(ref.group, ref.topic, *one, claimed.get(one, 0), superseding.get(one, 0)) for one in ones]
            note(self._session, rows)


def _matching(session: Session, policy: FilterPolicy, offsets: Collection[int]) -> set[int]:
    """Return the messages that a group with a filter gets."""
    joins = f"{session.dialect.join_to(LOG, 'm')} ON m.`offset` = v.o"
    found = session.joined("SELECT m.`offset`, m.metadata", "o", offsets, joins, plain=True)
    return {offset for offset, metadata in found if policy.matches(decode_metadata(metadata))}


def _claimed(session: Session, ref: GroupRef, places: Collection[tuple[str, int]]) -> dict[tuple[str, int], bool]:
    """Return which messages are at or below the positions of a group, and whether it has got each or passed it.

    Those that it has got have delivery state, as long as an earlier message of the partition is unsettled.
    """
    found = session.joined(
        "SELECT v.k, v.o, s.message_offset IS NOT NULL",
        "ko",
        places,
        f"{session.dialect.join_to(OFFSETS, 'f')} ON f.consumer_group = %s AND f.topic = %s "
        "AND f.partition_key = v.k AND f.offset_claimed >= v.o "
        f"{session.dialect.join_to(STATE, 's', left=True)} ON {BY_ROW}",
        after=(*ref, *ref),
        plain=True,
    )
    return {(partition, offset): bool(has_state) for partition, offset, has_state in found}


def give_up(
    using: str,
    ref: GroupRef,
    filter_of: Callable[[OptionColumns], FilterPolicy | None],
    messages: Mapping[tuple[str, int], str],
) -> set[tuple[str, int]]:
    """Return which messages are superseded now, before they start. Their process settles them without a call.

    This is decided, and noted, as in a claim. If there is nothing to note, it is only read.

    Raises:
        CommitOutcomeUnknown: it is unknown whether this is noted.
        django.db.Error: the database refuses or does not answer.
    """

    def read(session: Session, policy: FilterPolicy | None) -> tuple[Coalescing, set[tuple[str, int]]]:
        coalescing = Coalescing(session, ref, policy, shared=False, now=0)
        coalescing.read(messages, were_claimed=True)
        found = {place for place in messages if coalescing.is_superseded(*place)}
        for place in found:
            coalescing.gave_up(*place)
        return coalescing, found

    def decide(session: Session) -> set[tuple[str, int]]:
        fence = groups.fence(session, ref)
        if fence is None or fence.operation:
            return set()  # A seek or drop revokes the deliveries.
        watermarks.lock(session, ref, {partition for partition, _ in messages})
        coalescing, found = read(session, filter_of(fence.options))
        coalescing.store()
        return found

    coalescing, found = read(Session(using), None)
    return run(using, decide) if coalescing.unnoted() else found

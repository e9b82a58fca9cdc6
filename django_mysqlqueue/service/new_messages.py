"""Claims of messages above the positions of partitions: first attempts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from django_mysqlqueue.delivery_limits import NO_KEY
from django_mysqlqueue.models import DeliveryState, QueueMessage
from django_mysqlqueue.outcomes import Outcome
from django_mysqlqueue.service import delivery_events, job_results, watermarks
from django_mysqlqueue.service.deliveries import Claimed
from django_mysqlqueue.service.messages import decode_metadata
from django_mysqlqueue.service.slots import Rest
from django_mysqlqueue.service.taking import Candidate, Taking
from django_mysqlqueue.service.watermarks import Offsets
from django_mysqlqueue.sql.session import UNION_TERMS, flat

STATE = DeliveryState._meta.db_table
LOG = QueueMessage._meta.db_table
LOOKED_PAST = 100
"""Number of messages to look at in a partition of a shared group whose messages have several limited keys."""
MAX_PARKED = 1000
"""Number of a shared group's unsettled messages at which claims no longer look past messages without a slot."""


MAX_LOOKED_AT = 10_000
MAX_METADATA = 4_194_304
"""Maximum number of messages, and of bytes of their metadata, that a claim looks at in addition because it passes those
before them: it holds locks meanwhile."""
DEEPER = 4
"""How many times as many messages a claim looks at in a partition at most after it has passed some."""


class _Row(NamedTuple):
    """A message above the position."""

    offset: int
    target: str
    """The only group that gets it; empty: all."""
    size: int
    expires_at: int | None
    coalesce_key: str | None
    publisher_key: str | None
    """None if it is not needed."""
    metadata: str
    """As JSON text; empty if it is not needed."""


@dataclass(slots=True)
class _Place:
    """Where a claim looks in a partition."""

    cursor: int
    look_at: int
    """Number of messages to look at."""
    wanted: int
    """Number of messages to take."""
    looked_at: int = 0
    taken: int = 0


def take_new(taking: Taking, offsets: Mapping[str, Offsets]) -> tuple[list[Claimed], dict[str, int]]:
    """Take messages above the positions, and return them with the new positions by partition.

    A position moves to the last message that was looked at, even past messages with another ``target_group`` and those
    that are passed because of the filter or their expiry: otherwise the watermark and GC would stop there. A partition
    of which messages were passed is looked at again, further on.
    """
    places = _places(taking, offsets)
    taking.result.looked_at |= set(places)
    new = _New(taking)
    reach = _Reach()
    while places:
        found = _look(taking, places)
        reach.read(found)
        new.read(found)
        deeper: dict[str, _Place] = {}
        for key, place in places.items():
            rows = found.get(key, [])
            passed = new.take(key, place, rows)
            if rows and new.positions.get(key) != rows[-1].offset:
                continue
            if len(rows) < place.look_at:
                taking.result.drained.add(key)
            elif passed and place.taken < place.wanted and not taking.budget.is_spent:
                place.cursor = rows[-1].offset
                deeper[key] = place
        places = reach.limit(deeper)
    _insert_rows(taking, new.taken)
    _park(taking, new.parked)
    delivery_events.record_passed(taking.session, taking.claimant.ref, new.ended, taking.claimant.subscriber)
    taking.result.flushed.jobs.reasons |= job_results.passed(taking.session, taking.claimant.ref, new.ended)
    return new.taken, new.positions


def _places(taking: Taking, offsets: Mapping[str, Offsets]) -> dict[str, _Place]:
    """Return the partitions to look at."""
    claimant, result = taking.claimant, taking.result
    places: dict[str, _Place] = {}
    for want in taking.wants():
        if want.look_at <= 0 or (want.key in taking.closed and not claimant.shared):
            continue
        if want.key in offsets:
            # More than the claim takes: those in front may have no slot.
            past = LOOKED_PAST if claimant.shared and taking.has_several_keys(want.key) else 0
            look_at = max(want.look_at, past)
            places[want.key] = _Place(offsets[want.key].claimed, look_at, look_at)
        else:
            result.missing.add(want.key)
    if claimant.shared and result.missing:
        # SKIP LOCKED hides locked rows. These are not missing, and the partition stays in the poller's list.
        result.missing -= watermarks.existing(taking.session, claimant.ref, result.missing)
    return places


class _New:
    """The messages that a claim takes, parks or passes, and the positions behind them."""

    def __init__(self, taking: Taking) -> None:
        self._taking = taking
        self._passed: dict[tuple[str, int], str] = {}
        """Messages that are passed, and why: ``"filtered"``, or an outcome."""
        self._limit_keys: dict[tuple[str, int], str] = {}
        self._may_park: int | None = None if taking.claimant.shared else 0
        self.taken: list[Claimed] = []
        self.parked: list[tuple[str, int, int]] = []
        """Messages of a shared group that wait like retries, and until when: for a slot, or for the message before with
        their coalesce key."""
        self.ended: list[tuple[str, int, Outcome]] = []
        """Messages that were passed because of an outcome."""
        self.positions: dict[str, int] = {}

    def read(self, found: Mapping[str, Sequence[_Row]]) -> None:
        """Read what is known about messages: which ones are passed, and the limits of the keys of the others."""
        taking, passes, mine = self._taking, self._taking.request.passes, self._taking.claimant.ref.group
        self._passed = {}
        keys: dict[tuple[str, int], str] = {}
        unmatched: dict[tuple[str, int], _Row] = {}
        is_filtered = taking.claimant.filter is not None
        for key, row in _each(found):
            if row.target not in ("", mine):
                continue
            if not is_filtered and row.expires_at is None and not row.coalesce_key:
                continue
            place = key, row.offset
            if not _matches(taking, row):
                self._passed[place] = "filtered"
                unmatched[place] = row
            elif _has_expired(taking, row):
                self._passed[place] = Outcome.EXPIRED
                continue
            if row.coalesce_key:
                keys[place] = row.coalesce_key
        for place in taking.coalescing.read(keys, unmatched=unmatched.keys()):
            del self._passed[place]
            if _has_expired(taking, unmatched[place]):
                self._passed[place] = Outcome.EXPIRED
        if Outcome.SUPERSEDED in passes:
            for place in keys:
                if taking.coalescing.is_superseded(*place):
                    self._passed[place] = Outcome.SUPERSEDED
        self._limit_keys = taking.limit_keys(
            [
                Candidate(key, row.offset, row.publisher_key, row.metadata)
                for key, row in _each(found)
                if (key, row.offset) not in self._passed
            ]
        )

    def take(self, key: str, place: _Place, rows: Sequence[_Row]) -> bool:
        """Take messages of a partition in the order of the log, until there are enough, or one does not fit.

        One that has no slot stops it, too, unless it can be parked.

        Returns:
            Whether some were passed.
        """
        taking, mine = self._taking, self._taking.claimant.ref.group
        more, passed = len(rows) == place.look_at, False
        place.looked_at += len(rows)
        for number, row in enumerate(rows):
            if reason := self._passed.get((key, row.offset)):
                passed = True
                self._pass(key, row, reason)
            elif row.target in ("", mine):
                if place.taken == place.wanted:
                    break
                is_superseded = taking.coalescing.is_superseded(key, row.offset)
                until = taking.coalescing.waits_until(key, row.offset)
                if until is not None and not is_superseded:
                    self.parked.append((key, row.offset, until))
                    self.positions[key] = row.offset
                    continue
                claimed = taking.claimed(key, row.offset, row.size)
                one = taking.take(claimed, self._limit_keys.get((key, row.offset), NO_KEY))
                if isinstance(one, Claimed):
                    self.taken.append(one)
                    place.taken += 1
                    if not is_superseded:
                        taking.coalescing.took(key, row.offset)
                elif isinstance(one, Rest) and self._parks(key, rows[number:], more=more):
                    self.parked.append((key, row.offset, one.until))
                else:
                    if isinstance(one, Rest):
                        taking.result.limited[key] = one
                    break
            self.positions[key] = row.offset
        return passed

    def _pass(self, key: str, row: _Row, reason: str) -> None:
        self._taking.result.passed[reason] += 1
        if isinstance(reason, Outcome):
            self.ended.append((key, row.offset, reason))
        if reason == Outcome.SUPERSEDED:
            self._taking.coalescing.gave_up(key, row.offset)

    def _parks(self, key: str, rows: Sequence[_Row], *, more: bool) -> bool:
        """Return whether to look past a message without a slot, because messages behind it may have other keys."""
        if self._may_park == 0 or not self._taking.has_several_keys(key):
            return False
        if not more and len({self._limit_keys.get((key, row.offset), "") for row in rows}) < 2:
            return False
        if self._may_park is None:
            self._may_park = max(0, MAX_PARKED - _count_unsettled(self._taking))
        return len(self.parked) < self._may_park


class _Reach:
    """How much further a claim may look."""

    def __init__(self) -> None:
        self._rows = MAX_LOOKED_AT
        self._bytes = MAX_METADATA
        self._average = 1
        """Bytes of metadata per message."""

    def read(self, found: Mapping[str, Sequence[_Row]]) -> None:
        """Note what was looked at."""
        sizes = [len(row.metadata) for rows in found.values() for row in rows]
        self._bytes -= sum(sizes)
        self._average = max(self._average, sum(sizes) // (len(sizes) or 1))

    def limit(self, places: Mapping[str, _Place]) -> dict[str, _Place]:
        """Return where to look further: at about as many messages as are expected to contain those that are wanted."""
        found: dict[str, _Place] = {}
        left = min(self._rows, self._bytes // self._average)
        for key, place in places.items():
            if left <= 0:
                break
            most = DEEPER * place.look_at
            if place.taken:
                expected = (place.wanted - place.taken) * place.looked_at // place.taken
                most = min(most, max(place.look_at // 2, expected, 1))
            place.look_at = min(most, left)
            left -= place.look_at
            self._rows -= place.look_at
            found[key] = place
        return found


def _look(taking: Taking, places: Mapping[str, _Place]) -> dict[str, list[_Row]]:
    """Return the next messages of each partition, by offset."""
    session, topic = taking.session, taking.claimant.ref.topic
    one = (
        f"SELECT partition_key, `offset`, target_group, {taking.columns(places)} FROM {LOG}"
        f"{session.dialect.force_index('queue_messages_partition')} "
        "WHERE topic = %s AND partition_key = %s AND `offset` > %s ORDER BY `offset` LIMIT %s"
    )
    found: dict[str, list[_Row]] = {}
    items = sorted(places.items())
    for start in range(0, len(items), UNION_TERMS):
        piece = items[start : start + UNION_TERMS]
        sql = session.dialect.union(*[one] * len(piece))
        parameters = flat((topic, key, place.cursor, place.look_at) for key, place in piece)
        for key, *row in session.rows(sql, parameters):
            found.setdefault(key, []).append(_Row(*row))
    for rows in found.values():
        rows.sort()
    return found


def _each(found: Mapping[str, Sequence[_Row]]) -> Iterator[tuple[str, _Row]]:
    return ((key, row) for key, rows in found.items() for row in rows)


def _matches(taking: Taking, row: _Row) -> bool:
    """Return whether the group's filter matches a message. Those that are only for this group were redriven."""
    policy = taking.claimant.filter
    return policy is None or bool(row.target) or policy.matches(decode_metadata(row.metadata))


def _has_expired(taking: Taking, row: _Row) -> bool:
    """Return whether the claim passes a message because it has expired."""
    return row.expires_at is not None and row.expires_at <= taking.now and Outcome.EXPIRED in taking.request.passes


def _insert_rows(taking: Taking, taken: Sequence[Claimed]) -> None:
    session, claimant = taking.session, taking.claimant
    common = (*claimant.ref, taking.request.token, claimant.subscriber, taking.now, taking.until)
    for chunk in session.chunks(taken):
        # The values that all rows share are sent only once: this takes 0.6 of the time of a multi-row VALUES.
        session.execute(
            f"INSERT INTO {STATE} (consumer_group, topic, partition_key, message_offset, delivery_token, "
            "delivered_by, delivered_at, invisible_until) "
            f"SELECT %s, %s, v.k, v.o, %s, %s, %s, %s FROM {session.dialect.rows(('k', 'o'), len(chunk))}",
            (*common, *flat((one.key, one.offset) for one in chunk)),
        )


def _count_unsettled(taking: Taking) -> int:
    """Return how many unsettled messages of the group have been claimed, up to ``MAX_PARKED``."""
    session = taking.session
    row = session.row(
        f"SELECT COUNT(*) FROM (SELECT 1 FROM {STATE}{session.dialect.force_index('queue_delivery_state_due')} "
        "WHERE consumer_group = %s AND topic = %s AND acked = %s LIMIT %s) n",
        (*taking.claimant.ref, False, MAX_PARKED),
    )
    return int(row[0]) if row is not None else MAX_PARKED


def _park(taking: Taking, parked: Sequence[tuple[str, int, int]]) -> None:
    """Make messages wait like retries, so that the position can move past them."""
    session, ref = taking.session, taking.claimant.ref
    for chunk in session.chunks(parked):
        session.execute(
            f"INSERT INTO {STATE} (consumer_group, topic, partition_key, message_offset, delivered_at, "
            f"invisible_until) SELECT %s, %s, v.k, v.o, %s, v.until "
            f"FROM {session.dialect.rows(('k', 'o', 'until'), len(chunk))}",
            (*ref, taking.now, *flat(chunk)),
        )

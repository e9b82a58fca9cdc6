"""Claims of messages above the positions of partitions: first attempts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from django_mysqlqueue.db.tables import LOG, STATE
from django_mysqlqueue.outcomes import Outcome
from django_mysqlqueue.service import watermarks
from django_mysqlqueue.service.claims import Seen
from django_mysqlqueue.service.deliveries import Candidate, Claimed
from django_mysqlqueue.service.taking import Taking, Verdicts
from django_mysqlqueue.sql.session import flat

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


@dataclass(slots=True)
class _Reading:
    """Where a claim reads in a partition."""

    cursor: int
    look_at: int
    """Number of messages to look at next; at first one more than to take."""
    wanted: int
    """Number of messages to take."""
    looked_at: int = 0
    taken: int = 0


def take_new(taking: Taking) -> tuple[list[Claimed], dict[str, int]]:
    """Take messages above the positions, and return them with the new positions by partition.

    A position moves to the last message that was looked at, even past messages with another ``target_group`` and those
    that are passed because of the filter or their expiry: otherwise the watermark and GC would stop there. A partition
    of which messages were passed is read again, further on.
    """
    readings = _readings(taking)
    seen = taking.claim.partitions
    seen |= dict.fromkeys(readings, Seen.MORE)
    new = _New(taking)
    reach = _Reach()
    while readings:
        messages = _look(taking, readings)
        new.verdicts = taking.judge(messages)
        further: dict[str, _Reading] = {}
        for key, reading in readings.items():
            candidates = messages.get(key)
            if candidates is None:
                seen[key] = Seen.DRAINED
                continue
            passed = new.take(key, reading, candidates)
            if new.positions.get(key) != candidates[-1].offset:
                continue
            if len(candidates) < reading.look_at:
                seen[key] = Seen.DRAINED
            elif passed and reading.taken < reading.wanted and not taking.budget.is_spent:
                reading.cursor = candidates[-1].offset
                further[key] = reading
        if not further:
            break
        reach.read(messages)
        readings = reach.limit(further)
    _insert_rows(taking, new.taken)
    if new.parked:
        _park(taking, new.parked)
    taking.record_passed(new.ended)
    return new.taken, new.positions


def _readings(taking: Taking) -> dict[str, _Reading]:
    """Return where to read in each partition."""
    missing: set[str] = set()
    readings: dict[str, _Reading] = {}
    for want in taking.wants:
        if want.look_at <= 0 or (want.key in taking.closed and not taking.shared):
            continue
        if want.key in taking.offsets:
            wanted = want.look_at
            if taking.shared and taking.slots is not None and taking.slots.has_several_keys(want.key):
                # More than the claim takes: those in front may have no slot.
                wanted = max(wanted, LOOKED_PAST)
            # One more, to see whether there are more. Otherwise another claim would have to lock and read for that.
            readings[want.key] = _Reading(taking.offsets[want.key].claimed, wanted + 1, wanted)
        else:
            missing.add(want.key)
    if taking.shared and missing:
        # SKIP LOCKED hides locked rows. These are not missing, and the partition stays in the poller's list.
        missing -= watermarks.existing(taking.session, taking.ref, missing)
    taking.claim.partitions |= dict.fromkeys(missing, Seen.MISSING)
    return readings


class _New:
    """The messages that a claim takes, parks or passes, and the positions behind them."""

    def __init__(self, taking: Taking) -> None:
        self._taking = taking
        self._mine = ("", taking.ref.group)
        """The groups whose messages it takes: all, or only this one."""
        self.verdicts: Verdicts = {}
        """The messages of the last look that are passed."""
        self._may_park: int | None = None if taking.shared else 0
        self.taken: list[Claimed] = []
        self.parked: list[tuple[str, int, int, int]] = []
        """Messages of a shared group that wait like retries, until when, and their attempts: for a slot, or for the
        message before with their coalesce key."""
        self.ended: list[tuple[str, int, Outcome]] = []
        """Messages that were passed because of an outcome."""
        self.positions: dict[str, int] = {}

    def take(self, key: str, reading: _Reading, candidates: Sequence[Candidate]) -> bool:
        """Take messages of a partition in the order of the log, until there are enough, or one does not fit.

        One that has no slot stops it, too, unless it can be parked.

        Returns:
            Whether some were passed.
        """
        taking, verdicts, coalescing = self._taking, self.verdicts, self._taking.coalescing
        left = reading.wanted - reading.taken
        last, passed = 0, False
        for number, candidate in enumerate(candidates):
            if verdicts and (reason := verdicts.get((key, candidate.offset))):
                passed = True
                self._pass(candidate, reason)
            elif candidate.target in self._mine:
                if not left:
                    break
                until = None if coalescing is None else coalescing.waits_until(key, candidate.offset)
                if until is None:
                    taken = taking.take(candidate, retries=candidate.attempts)
                    if isinstance(taken, Claimed):
                        self.taken.append(taken)
                        left -= 1
                    elif taken is None:
                        break
                    elif self._parks(candidates[number:], more=len(candidates) == reading.look_at):
                        until = taken.until
                    else:
                        taking.claim.partitions[key] = taken
                        break
                if until is not None:
                    self.parked.append((key, candidate.offset, until, candidate.attempts))
            last = candidate.offset
        if last:
            self.positions[key] = last
        reading.looked_at += len(candidates)
        reading.taken = reading.wanted - left
        return passed

    def _pass(self, candidate: Candidate, reason: str) -> None:
        self._taking.claim.count_passed(reason)
        if isinstance(reason, Outcome):
            self.ended.append((candidate.key, candidate.offset, reason))
        if self._taking.coalescing is not None and reason == Outcome.SUPERSEDED:
            self._taking.coalescing.gave_up(candidate.key, candidate.offset)

    def _parks(self, candidates: Sequence[Candidate], *, more: bool) -> bool:
        """Return whether to look past a message without a slot, because messages behind it may have other keys."""
        slots = self._taking.slots
        if self._may_park == 0 or slots is None or not slots.has_several_keys(candidates[0].key):
            return False
        if not more and len({slots.key_of(one.key, one.offset) for one in candidates}) < 2:
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

    def read(self, messages: Mapping[str, Sequence[Candidate]]) -> None:
        """Note what was looked at."""
        sizes = [len(candidate.metadata) for candidates in messages.values() for candidate in candidates]
        self._bytes -= sum(sizes)
        self._average = max(self._average, sum(sizes) // (len(sizes) or 1))

    def limit(self, readings: Mapping[str, _Reading]) -> dict[str, _Reading]:
        """Return where to look further: at about as many messages as are expected to contain those that are wanted."""
        further: dict[str, _Reading] = {}
        left = min(self._rows, self._bytes // self._average)
        for key, reading in readings.items():
            if left <= 0:
                break
            most = DEEPER * reading.look_at
            if reading.taken:
                expected = (reading.wanted - reading.taken) * reading.looked_at // reading.taken
                most = min(most, max(reading.look_at // 2, expected, 1))
            reading.look_at = min(most, left)
            left -= reading.look_at
            self._rows -= reading.look_at
            further[key] = reading
        return further


def _look(taking: Taking, readings: Mapping[str, _Reading]) -> dict[str, list[Candidate]]:
    """Return the next messages of each partition, by offset."""
    session, topic = taking.session, taking.ref.topic
    one = (
        f"SELECT partition_key, `offset`, target_group, {taking.columns(readings)} FROM {LOG}"
        f"{session.dialect.force_index('queue_messages_partition')} "
        "WHERE topic = %s AND partition_key = %s AND `offset` > %s ORDER BY `offset` LIMIT %s"
    )
    parameters = [(topic, key, reading.cursor, reading.look_at) for key, reading in sorted(readings.items())]
    messages: dict[str, list[Candidate]] = {}
    for row in session.each(one, parameters):
        messages.setdefault(row[0], []).append(Candidate(*row))
    for candidates in messages.values():
        candidates.sort()
    return messages


def _insert_rows(taking: Taking, taken: Sequence[Claimed]) -> None:
    session, request = taking.session, taking.request
    common = (*taking.ref, request.token, request.claimant.subscriber, taking.now, taking.until)
    names: tuple[str, ...] = ("k", "o")
    rows: list[tuple[object, ...]] = [(one.key, one.offset) for one in taken]
    if counts := any(one.attempt > 1 for one in taken):  # Jobs that have waited for long (``job_retries``).
        names, rows = ("k", "o", "n"), [(one.key, one.offset, one.attempt - 1) for one in taken]
    column, value = (", retry_count", ", v.n") if counts else ("", "")
    for chunk in session.chunks(rows):
        # The values that all rows share are sent only once: this takes 0.6 of the time of a multi-row VALUES.
        session.later(
            f"INSERT INTO {STATE} (consumer_group, topic, partition_key, message_offset, delivery_token, "
            f"delivered_by, delivered_at, invisible_until{column}) "
            f"SELECT %s, %s, v.k, v.o, %s, %s, %s, %s{value} FROM {session.dialect.rows(names, len(chunk))}",
            (*common, *flat(chunk)),
        )


def _count_unsettled(taking: Taking) -> int:
    """Return how many unsettled messages of the group have been claimed, up to ``MAX_PARKED``."""
    session = taking.session
    row = session.row(
        f"SELECT COUNT(*) FROM (SELECT 1 FROM {STATE}{session.dialect.force_index('queue_delivery_state_due')} "
        "WHERE consumer_group = %s AND topic = %s AND acked = %s LIMIT %s) n",
        (*taking.ref, False, MAX_PARKED),
    )
    return int(row[0]) if row is not None else MAX_PARKED


def _park(taking: Taking, parked: Sequence[tuple[str, int, int, int]]) -> None:
    """Make messages wait like retries, so that the position can move past them."""
    session, ref = taking.session, taking.ref
    for chunk in session.chunks(parked):
        session.execute(
            f"INSERT INTO {STATE} (consumer_group, topic, partition_key, message_offset, delivered_at, "
            f"invisible_until, retry_count) SELECT %s, %s, v.k, v.o, %s, v.until, v.n "
            f"FROM {session.dialect.rows(('k', 'o', 'until', 'n'), len(chunk))}",
            (*ref, taking.now, *flat(chunk)),
        )

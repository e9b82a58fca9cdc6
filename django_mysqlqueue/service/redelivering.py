"""Claims of messages that were claimed before: after a failure, a loss, a release, or the wait for a slot."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from django_mysqlqueue.db.tables import LOG, STATE
from django_mysqlqueue.options.delivery_limits import NO_KEY
from django_mysqlqueue.outcomes import Outcome
from django_mysqlqueue.service import dead_letters, delivery_events, losses, watermarks
from django_mysqlqueue.service.claims import Due, Later, Left
from django_mysqlqueue.service.dead_letters import FailedDelivery
from django_mysqlqueue.service.deliveries import Candidate, Claimed
from django_mysqlqueue.service.delivery_events import Event
from django_mysqlqueue.service.leasing import CLOCK_STEP_MS, is_later
from django_mysqlqueue.service.refs import GroupRef
from django_mysqlqueue.service.slots import Rest
from django_mysqlqueue.service.superseding import RECHECK_MS
from django_mysqlqueue.service.taking import Taking
from django_mysqlqueue.service.watermarks import BY_ROW
from django_mysqlqueue.sql.session import Session

SUSPECTS = 10
"""Number of suspected poison messages of a shared group that a claim looks at to take one; more in a long window."""


def redeliver(taking: Taking) -> list[Claimed]:
    """Take rows again, by primary key, without waiting for locked ones.

    In ordered mode, a locked row excludes its whole partition from this claim, so that no later message overtakes it.
    """
    due = _due(taking)
    if not due:
        return []
    session, ref, claim = taking.session, taking.ref, taking.claim
    candidates: dict[tuple[str, int], Candidate] = {}
    if taking.slots is not None:
        is_needed = taking.slots.limits.limits_group
        if not is_needed:
            candidates = _candidates(taking, due)
            is_needed = taking.slots.note(candidates.values())
        if is_needed:
            # Before the rows: otherwise, claims that wait for the slots would hide the rows from each other. The claims
            # before this one have taken some of the rows.
            taking.slots.read([])
            due = _due(taking)
    rows = _lock_due(session, ref, due)
    if len(rows) < len(due):
        unsettled = _still_unsettled(session, ref, [row for row in due if row not in rows])
        claim.left |= {row: Left.LOCKED if row in unsettled else Left.SETTLED for row in due if row not in rows}
        taking.closed.update(key for key, _ in unsettled)
    candidates |= _candidates(taking, [row for row in rows if row not in candidates])
    if taking.slots is not None:
        taking.slots.read_for([candidates[row] for row in rows])
    undecided = _read_coalesce_keys(taking, [candidates[row] for row in rows])
    judgement = _Judgement(taking, undecided, most=taking.request.due.most if taking.request.due else len(due))
    for place in filter(rows.__contains__, due):  # The oldest first in shared mode.
        if taking.shared or place[0] not in taking.closed:
            judgement.judge(candidates[place], rows[place])
    judgement.write()
    return judgement.taken


class _Row(NamedTuple):
    """The locked row of a message."""

    due_at: int
    token: int
    suspect: bool
    delivered_by: str
    delivered_at: int
    retries: int
    error: str


@dataclass(slots=True)
class _Judgement:
    """What becomes of each row: it is taken, waits, or is dead-lettered. Its lost delivery is recorded.

    A row with a token was lost with its subscriber; if that was not the first time, it waits instead.
    """

    taking: Taking
    undecided: Collection[tuple[str, int]]
    """Messages with a coalesce key of which nothing can be decided now (shared mode)."""
    most: int
    """Maximum number of rows to take."""
    taken: list[Claimed] = field(default_factory=list)
    _limited: int = 0
    """Number of messages of limited keys among them."""
    failed: list[FailedDelivery] = field(default_factory=list)
    lost: list[Event] = field(default_factory=list)
    waits: list[tuple[str, int, int]] = field(default_factory=list)
    """Rows that wait after a loss, and until when."""
    rests: list[tuple[str, int, int]] = field(default_factory=list)
    """Rows that wait for a slot, or for the message before with their coalesce key, and until when."""
    passed: list[tuple[str, int]] = field(default_factory=list)
    """Rows of messages that are superseded."""

    def judge(self, candidate: Candidate, row: _Row) -> None:
        """Decide about a row. Rows of a partition must be judged in the order of their offsets in ordered mode."""
        taking, now = self.taking, self.taking.now
        key, offset = place = candidate.key, candidate.offset
        if is_later(row.due_at, row.delivered_at, now) and (taking.shared or not row.token):
            self._wait(place, row.due_at, is_lost=losses.is_lost(row.token, row.delivered_by))
            return
        if place in self.undecided:
            self._rest(place, now + RECHECK_MS)
            return
        if (coalescing := taking.coalescing) is not None:
            if taking.request.passes and coalescing.is_superseded(key, offset):
                coalescing.gave_up(key, offset)
                self._pass(place, row)
                return
            if (until := coalescing.waits_until(key, offset)) is not None:
                self._rest(place, until)
                return
        if not row.delivered_by:
            self._take(candidate, row)
            return
        # The delivery with which its subscriber was lost.
        last = Claimed(
            taking.ref,
            *place,
            taking.request.token,
            row.retries,
            suspect=True,
            size=candidate.size,
            delivered_at=row.delivered_at,
            by=row.delivered_by,
        )
        rules = taking.rules
        if dead_letters.is_final(taking.ref.topic, row.retries, rules.max_attempts):
            text = f"The subscriber {row.delivered_by!r} was lost while it handled attempt {row.retries}."
            self.failed.append(FailedDelivery.of(last, f"{row.error}\n{text}" if row.error else text))
            taking.claim.dead.append((last, text))
        elif wait := losses.wait_ms(row.retries, rules.backoff, suspect=row.suspect):
            self.waits.append((*place, now + wait))
            self.lost.append(Event.of(last, Outcome.LOST))
            self._wait(place, now + wait, is_lost=True)
        elif self._take(candidate, row) and row.token:
            self.lost.append(Event.of(last, Outcome.LOST))

    def _pass(self, place: tuple[str, int], row: _Row) -> None:
        """Settle a superseded message without a call."""
        claim = self.taking.claim
        if row.token:
            lost = Event(self.taking.ref, *place, row.retries, Outcome.LOST, row.delivered_at, 0, row.delivered_by)
            self.lost.append(lost)
        self.passed.append(place)
        claim.left[place] = Left.SETTLED
        claim.count_passed(Outcome.SUPERSEDED)
        claim.flushed.unfinished.add(place[0])

    def _wait(self, place: tuple[str, int], until: int, *, is_lost: bool) -> None:
        """Leave a row for later. If it was lost, or in strict order, nothing of its partition overtakes it."""
        taking = self.taking
        taking.claim.left[place] = Later(until, is_lost)
        if is_lost or (taking.rules.on_failure == "block" and not taking.shared):
            taking.closed.add(place[0])

    def _take(self, candidate: Candidate, row: _Row) -> bool:
        """Take a row if it fits and has a slot. Otherwise nothing of its partition overtakes it in ordered mode."""
        taking, suspect = self.taking, bool(row.delivered_by)
        key, offset = candidate.key, candidate.offset
        limited = taking.slots is not None and taking.slots.key_of(key, offset) != NO_KEY
        if len(self.taken) >= self.most:
            return False
        if limited and taking.request.due is not None and self._limited >= taking.request.due.with_slots:
            taking.claim.left[key, offset] = Left.NEEDS_SLOT
            return False
        if suspect and not taking.budget.takes_suspects():
            taking.closed.add(key)
            taking.claim.left[key, offset] = Left.SUSPECT
            return False
        taken = taking.take(candidate, retries=row.retries, suspect=suspect)
        if isinstance(taken, Claimed):
            self.taken.append(taken)
            self._limited += limited
            return True
        taking.closed.add(key)
        if isinstance(taken, Rest):
            if taking.shared:
                self._rest((key, offset), taken.until)
            else:
                # It stays due, so that nothing overtakes it when the partition is asked for again.
                taking.claim.partitions[key] = taken
        return False

    def _rest(self, place: tuple[str, int], until: int) -> None:
        """Make a row of a shared group due later."""
        self.taking.claim.left[place] = Later(until)
        self.rests.append((*place, until))

    def write(self) -> None:
        """Write what was decided."""
        session, ref = self.taking.session, self.taking.ref
        if self.lost and delivery_events.level(ref) != "none":
            delivery_events.record(session, self.lost)
        if self.failed:
            dead_letters.dead_letter(session, ref, self.failed)
        losses.make_wait(session, ref, self.waits, self.taking.now)
        _settle(self.taking, self.passed)
        _make_rest(self.taking, self.rests)
        _renew_rows(self.taking, self.taken)


def _due(taking: Taking) -> list[tuple[str, int]]:
    """Return rows that are probably due for redelivery: those of a partition by offset, or the oldest first."""
    if not taking.shared:
        return [(want.key, offset) for want in taking.wants for offset in want.due]
    asked, suspects = taking.request.due, 0
    if asked is None or asked.most <= 0:
        return []
    most = max(SUSPECTS, asked.window // 10)  # It grows while others have locked the first rows.
    due: list[tuple[str, int]] = []
    for key, offset, suspect in _due_shared(taking, asked):
        # Others take the rest. Some more than it takes, because the first ones may be locked, or wait after a loss.
        if (key, offset) not in asked.exclude and not (suspect and suspects >= most):
            suspects += suspect
            due.append((key, offset))
    return due


def _due_shared(taking: Taking, asked: Due) -> list[tuple[str, int, int]]:
    """Return rows that look due, and whether they are suspected, read without locks from the start of the index."""
    session, now = taking.session, taking.now
    # Deliveries that the claimant holds must not use up the limit.
    limit = max(asked.most, asked.window) + len(asked.exclude)
    inside, parameters = asked.subset.condition(session.dialect, "partition_key")
    if taking.is_doubtful:
        inside += " AND delivery_token = 0"  # What waits for another attempt: nobody holds it.
    if not taking.budget.takes_suspects():
        inside += " AND delivered_by = ''"
    select = (
        "SELECT partition_key, message_offset, CASE WHEN delivered_by = '' THEN 0 ELSE 1 END "
        f"FROM {STATE}{session.dialect.force_index('queue_delivery_state_due')} "
        f"WHERE consumer_group = %s AND topic = %s AND acked = %s{inside} AND invisible_until "
    )
    place = (*taking.ref, False, *parameters, now)
    found = session.rows(f"{select} <= %s ORDER BY invisible_until LIMIT %s", (*place, limit))
    if asked.after_clock_step:
        found = [
            *found,
            *session.rows(
                f"{select} > %s AND delivered_at > %s ORDER BY invisible_until LIMIT %s",
                (*place, now + CLOCK_STEP_MS, limit),
            ),
        ]
    return found


def _lock_due(session: Session, ref: GroupRef, due: Sequence[tuple[str, int]]) -> dict[tuple[str, int], _Row]:
    rows = session.joined(
        "SELECT s.partition_key, s.message_offset, s.invisible_until, s.delivery_token, s.suspect, s.delivered_by, "
        "s.delivered_at, s.retry_count, s.last_error",
        "ko",
        due,
        f"{session.dialect.join_to(STATE, 's')} ON {BY_ROW} AND s.acked = %s{session.dialect.skip_locked}",
        after=(*ref, False),
        plain=True,
    )
    return {(key, offset): _Row(*rest) for key, offset, *rest in rows}


def _still_unsettled(session: Session, ref: GroupRef, rows: Sequence[tuple[str, int]]) -> set[tuple[str, int]]:
    """Return those of the rows that SKIP LOCKED left out that exist unsettled: another transaction has locked them."""
    joins = f"{session.dialect.join_to(STATE, 's')} ON {BY_ROW} AND s.acked = %s"
    select = "SELECT s.partition_key, s.message_offset"
    return set(session.joined(select, "ko", rows, joins, after=(*ref, False), plain=True))


def _settle(taking: Taking, passed: Sequence[tuple[str, int]]) -> None:
    """Settle superseded messages."""
    settled = {"acked": "1", **losses.NOT_HELD, "delivered_by": "''"}
    taking.session.update(STATE, "ko", passed, BY_ROW, settled, after=taking.ref)
    taking.record_passed([(*place, Outcome.SUPERSEDED) for place in passed])


def _make_rest(taking: Taking, rests: Sequence[tuple[str, int, int]]) -> None:
    """Make rows of a shared group that may not start yet due later, so that others are found before them."""
    changes = {"invisible_until": "v.until"}
    taking.session.update(STATE, ("k", "o", "until"), rests, BY_ROW, changes, after=taking.ref)


def _candidates(taking: Taking, rows: Collection[tuple[str, int]]) -> dict[tuple[str, int], Candidate]:
    """Return what is needed of the message of each row."""
    select = f"SELECT m.`offset`, {taking.columns([key for key, _ in rows], 'm.')}"
    joins = f"{taking.session.dialect.join_to(LOG, 'm')} ON m.`offset` = v.o"
    messages = taking.session.joined(select, "o", [offset for _, offset in rows], joins, plain=True)
    contents = {offset: ("", *content) for offset, *content in messages}
    return {row: Candidate(*row, *contents.get(row[1], ())) for row in rows}


def _read_coalesce_keys(taking: Taking, candidates: Collection[Candidate]) -> set[tuple[str, int]]:
    """Read what is known about the coalesce keys of messages.

    Returns:
        The messages of which nothing can be decided, because another claim has locked their offsets row (shared mode).
    """
    keys = {(one.key, one.offset): one.coalesce_key for one in candidates if one.coalesce_key}
    if not keys:
        return set()
    undecided: set[tuple[str, int]] = set()
    if taking.shared:
        mine = set(taking.offsets)
        more = {partition for partition, _ in keys} - mine
        mine |= watermarks.lock(taking.session, taking.ref, more, skip_locked=True).keys()
        undecided = {row for row in keys if row[0] not in mine}
    taking.read_coalesce_keys({row: key for row, key in keys.items() if row not in undecided}, were_claimed=True)
    return undecided


def _renew_rows(taking: Taking, taken: Sequence[Claimed]) -> None:
    request = taking.request
    names = ["k", "o", "t", "who", "at", "until"]
    changes = {
        "delivery_token": "v.t",
        "delivered_by": "v.who",
        "delivered_at": "v.at",
        "invisible_until": "v.until",
    }
    common = (request.token, request.claimant.subscriber, taking.now, taking.until)
    rows: list[tuple[Any, ...]] = [(delivery.key, delivery.offset, *common) for delivery in taken]
    if any(delivery.suspect for delivery in taken):  # Otherwise none was held, and ``suspect`` is False in all rows.
        names.append("suspect")
        changes["suspect"] = "v.suspect"
        rows = [(*row, delivery.suspect) for row, delivery in zip(rows, taken, strict=True)]
    taking.session.update(STATE, names, rows, BY_ROW, changes, after=taking.ref)

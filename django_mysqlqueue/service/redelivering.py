"""Claims of messages that were claimed before: after a failure, a loss, a release, or the wait for a slot."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from django_mysqlqueue.delivery_limits import NO_KEY
from django_mysqlqueue.models import DeliveryState, QueueMessage
from django_mysqlqueue.outcomes import Outcome
from django_mysqlqueue.service import dead_letters, delivery_events, job_results, losses, watermarks
from django_mysqlqueue.service.dead_letters import FailedDelivery
from django_mysqlqueue.service.deliveries import Claimed
from django_mysqlqueue.service.delivery_events import Event
from django_mysqlqueue.service.leasing import CLOCK_STEP_MS, is_later
from django_mysqlqueue.service.refs import GroupRef
from django_mysqlqueue.service.slots import Rest
from django_mysqlqueue.service.superseding import RECHECK_MS
from django_mysqlqueue.service.taking import Candidate, Taking
from django_mysqlqueue.service.watermarks import BY_ROW
from django_mysqlqueue.sql.session import Session, flat

STATE = DeliveryState._meta.db_table
LOG = QueueMessage._meta.db_table
SUSPECTS = 10
"""Number of suspected poison messages of a shared group that a claim looks at to take one; more in a long window."""


def redeliver(taking: Taking) -> list[Claimed]:
    """Take rows again, by primary key, without waiting for locked ones.

    In ordered mode, a locked row excludes its whole partition from this claim, so that no later message overtakes it.
    """
    due = _due(taking)
    if not due:
        return []
    session, claimant, result = taking.session, taking.claimant, taking.result
    contents: defaultdict[int, _Content] = defaultdict(_Content)
    if taking.slots is not None:
        needs_slots = claimant.limits.limits_group
        if not needs_slots:
            contents = _contents(taking, due)
            keys = map(taking.limit_key, _candidates(contents, due))
            needs_slots = any(map(taking.needs_slot, keys))
        if needs_slots:
            # Before the rows: otherwise, claims that wait for the slots would hide the rows from each other. The claims
            # before this one have taken some of the rows.
            taking.slots.read([])
            due = _due(taking)
    rows = _lock_due(session, claimant.ref, due)
    if len(rows) < len(due):
        unsettled = _still_unsettled(session, claimant.ref, [row for row in due if row not in rows])
        result.locked |= {key for key, _ in unsettled}
        taking.closed.update(result.locked)
        result.settled |= set(due) - set(rows) - unsettled
    contents.update(_contents(taking, [row for row in rows if row[1] not in contents]))
    limit_keys = taking.limit_keys(_candidates(contents, rows))
    undecided = _read_coalesce_keys(taking, contents, rows)
    judgement = _Judgement(taking, undecided, most=taking.request.max_due if claimant.shared else len(due))
    for key, offset in filter(rows.__contains__, due):  # The oldest first in shared mode.
        if claimant.shared or key not in taking.closed:
            limit_key = limit_keys.get((key, offset), NO_KEY)
            judgement.judge(key, offset, rows[key, offset], contents[offset].size, limit_key)
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
    _suspects: int = 0
    """Number of suspected poison messages among them."""
    _slots: int = 0
    """Number of messages of limited keys among them."""
    failed: list[FailedDelivery] = field(default_factory=list)
    lost: list[Event] = field(default_factory=list)
    waits: list[tuple[str, int, int]] = field(default_factory=list)
    """Rows that wait after a loss, and until when."""
    rests: list[tuple[str, int, int]] = field(default_factory=list)
    """Rows that wait for a slot, or for the message before with their coalesce key, and until when."""
    passed: list[tuple[str, int]] = field(default_factory=list)
    """Rows of messages that are superseded."""

    def judge(self, key: str, offset: int, row: _Row, size: int, limit_key: str) -> None:
        """Decide about a row. Rows of a partition must be judged in the order of their offsets in ordered mode."""
        claimant, now, result = self.taking.claimant, self.taking.now, self.taking.result
        if is_later(row.due_at, row.delivered_at, now) and (claimant.shared or not row.token):
            self._wait(key, offset, row.due_at, is_lost=losses.is_lost(row.token, row.delivered_by))
            return
        if (key, offset) in self.undecided:
            self.rest(key, offset, now + RECHECK_MS)
            return
        is_superseded = self.taking.coalescing.is_superseded(key, offset)
        if is_superseded and Outcome.SUPERSEDED in self.taking.request.passes:
            self._pass(key, offset, row)
            return
        until = self.taking.coalescing.waits_until(key, offset)
        if until is not None and not is_superseded:
            self.rest(key, offset, until)
            return
        suspect = bool(row.delivered_by)
        claimed = self.taking.claimed(key, offset, size, retries=row.retries, suspect=suspect)
        if not suspect:
            self._take(claimed, limit_key)
            return
        # The delivery with which its subscriber was lost.
        last = claimed._replace(attempt=row.retries, delivered_at=row.delivered_at, by=row.delivered_by)
        if dead_letters.is_final(claimant.ref.topic, row.retries, claimant.max_attempts):
            text = f"The subscriber {row.delivered_by!r} was lost while it handled attempt {row.retries}."
            self.failed.append(FailedDelivery.of(last, f"{row.error}\n{text}" if row.error else text))
            result.dead.append((last, text))
        elif wait := losses.wait_ms(row.retries, claimant.backoff, suspect=row.suspect):
            self.waits.append((key, offset, now + wait))
            self.lost.append(Event.of(last, Outcome.LOST))
            self._wait(key, offset, now + wait, is_lost=True)
        elif self._take(claimed, limit_key) and row.token:
            self.lost.append(Event.of(last, Outcome.LOST))

    def _pass(self, key: str, offset: int, row: _Row) -> None:
        """Settle a superseded message without a call."""
        ref, result = self.taking.claimant.ref, self.taking.result
        if row.token:
            self.lost.append(Event(ref, key, offset, row.retries, Outcome.LOST, row.delivered_at, 0, row.delivered_by))
        self.passed.append((key, offset))
        self.taking.coalescing.gave_up(key, offset)
        result.settled.add((key, offset))
        result.passed[Outcome.SUPERSEDED] += 1
        result.flushed.unfinished.add(key)

    def _wait(self, key: str, offset: int, until: int, *, is_lost: bool) -> None:
        """Leave a row for later. If it was lost, or in strict order, nothing of its partition overtakes it."""
        self.taking.result.later[key, offset] = until
        if is_lost:
            self.taking.result.lost_later.add((key, offset))
        if is_lost or self.taking.claimant.strict:
            self.taking.closed.add(key)

    def _take(self, claimed: Claimed, limit_key: str) -> bool:
        """Take a row if it fits and has a slot. Otherwise nothing of its partition overtakes it in ordered mode."""
        if len(self.taken) >= self.most:
            return False
        if limit_key != NO_KEY and self._slots >= self.taking.request.max_slots:
            self.taking.result.has_due = True
            return False
        if claimed.suspect and self._suspects >= self.taking.request.max_suspects:
            self.taking.closed.add(claimed.key)
            self.taking.result.held_up.add(claimed.key)
            return False
        taken = self.taking.take(claimed, limit_key)
        if isinstance(taken, Claimed):
            self.taken.append(taken)
            self._suspects += claimed.suspect
            self._slots += limit_key != NO_KEY
            if not self.taking.coalescing.is_superseded(claimed.key, claimed.offset):
                self.taking.coalescing.took(claimed.key, claimed.offset)
            return True
        self.taking.closed.add(claimed.key)
        if isinstance(taken, Rest):
            if self.taking.claimant.shared:
                self.rest(claimed.key, claimed.offset, taken.until)
            else:
                # It stays due, so that nothing overtakes it when the partition is asked for again.
                self.taking.result.limited[claimed.key] = taken
        return False

    def rest(self, key: str, offset: int, until: int) -> None:
        """Make a row of a shared group due later."""
        self.taking.result.later[key, offset] = until
        self.rests.append((key, offset, until))

    def write(self) -> None:
        """Write what was decided."""
        session, ref = self.taking.session, self.taking.claimant.ref
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
    if not taking.claimant.shared:
        return [(want.key, offset) for want in taking.wants() for offset in want.due]
    exclude, suspects = taking.request.exclude, 0
    most = max(SUSPECTS, taking.request.due_window // 10)  # It grows while others have locked the first rows.
    due: list[tuple[str, int]] = []
    for key, offset, suspect in _due_shared(taking):
        # Others take the rest. Some more than it takes, because the first ones may be locked, or wait after a loss.
        if (key, offset) not in exclude and not (suspect and suspects >= most):
            suspects += suspect
            due.append((key, offset))
    return due


def _due_shared(taking: Taking) -> list[tuple[str, int, int]]:
    """Return rows that look due, and whether they are suspected, read without locks from the start of the index."""
    session, claimant, request, now = taking.session, taking.claimant, taking.request, taking.now
    if request.max_due <= 0:
        return []
    # Deliveries that the claimant holds must not use up the limit.
    limit = max(request.max_due, request.due_window) + len(request.exclude)
    inside, parameters = claimant.subset.condition(session.dialect, "partition_key")
    if taking.is_doubtful:
        inside += " AND delivery_token = 0"  # What waits for another attempt: nobody holds it.
    if not request.max_suspects:
        inside += " AND delivered_by = ''"
    select = (
        "SELECT partition_key, message_offset, CASE WHEN delivered_by = '' THEN 0 ELSE 1 END "
        f"FROM {STATE}{session.dialect.force_index('queue_delivery_state_due')} "
        f"WHERE consumer_group = %s AND topic = %s AND acked = %s{inside} AND invisible_until "
    )
    place = (*claimant.ref, False, *parameters, now)
    found = session.rows(f"{select} <= %s ORDER BY invisible_until LIMIT %s", (*place, limit))
    if request.after_clock_step:
        found = [
            *found,
            *session.rows(
                f"{select} > %s AND delivered_at > %s ORDER BY invisible_until LIMIT %s",
                (*place, now + CLOCK_STEP_MS, limit),
            ),
        ]
    return found


def _lock_due(session: Session, ref: GroupRef, due: Sequence[tuple[str, int]]) -> dict[tuple[str, int], _Row]:
    rows: dict[tuple[str, int], _Row] = {}
    for chunk in session.chunks(sorted(due)):
        for key, offset, *rest in session.rows(
            "SELECT s.partition_key, s.message_offset, s.invisible_until, s.delivery_token, s.suspect, s.delivered_by, "
            f"s.delivered_at, s.retry_count, s.last_error FROM {session.dialect.rows(('k', 'o'), len(chunk))} "
            f"{session.dialect.join_to(STATE, 's')} ON {BY_ROW} AND s.acked = %s{session.dialect.skip_locked}",
            (*flat(chunk), *ref, False),
        ):
            rows[key, offset] = _Row(*rest)
    return rows


def _still_unsettled(session: Session, ref: GroupRef, rows: Sequence[tuple[str, int]]) -> set[tuple[str, int]]:
    """Return those of the rows that SKIP LOCKED left out that exist unsettled: another transaction has locked them."""
    found: set[tuple[str, int]] = set()
    for chunk in session.chunks(sorted(rows)):
        found.update(
            session.rows(
                f"SELECT s.partition_key, s.message_offset FROM {session.dialect.rows(('k', 'o'), len(chunk))} "
                f"{session.dialect.join_to(STATE, 's')} ON {BY_ROW} AND s.acked = %s",
                (*flat(chunk), *ref, False),
            )
        )
    return found


def _settle(taking: Taking, passed: Sequence[tuple[str, int]]) -> None:
    """Settle superseded messages."""
    session, ref = taking.session, taking.claimant.ref
    for chunk in session.chunks(passed):
        session.execute(
            session.dialect.update_joined(
                STATE, ("k", "o"), len(chunk), BY_ROW, {"acked": "1", **losses.NOT_HELD, "delivered_by": "''"}
            ),
            (*flat(chunk), *ref),
        )
    ended = [(*one, Outcome.SUPERSEDED) for one in passed]
    delivery_events.record_passed(session, ref, ended, taking.claimant.subscriber)
    taking.result.flushed.jobs.reasons |= job_results.passed(session, ref, ended)


def _make_rest(taking: Taking, rests: Sequence[tuple[str, int, int]]) -> None:
    """Make rows of a shared group that may not start yet due later, so that others are found before them."""
    session = taking.session
    for chunk in session.chunks(rests):
        session.execute(
            session.dialect.update_joined(
                STATE, ("k", "o", "until"), len(chunk), BY_ROW, {"invisible_until": "v.until"}
            ),
            (*flat(chunk), *taking.claimant.ref),
        )


class _Content(NamedTuple):
    """What a claim needs of a message. If it was deleted, it is claimed, and the process finds out."""

    size: int = 0
    expires_at: int | None = None
    coalesce_key: str | None = None
    publisher_key: str | None = None
    """None if it is not needed."""
    metadata: str = ""
    """As JSON text; empty if it is not needed."""


def _contents(taking: Taking, rows: Collection[tuple[str, int]]) -> defaultdict[int, _Content]:
    """Return what is needed of each message, by offset."""
    session = taking.session
    columns = taking.columns([key for key, _ in rows], "m.")
    found: defaultdict[int, _Content] = defaultdict(_Content)
    for chunk in session.chunks([offset for _, offset in rows]):
        for offset, *content in session.rows(
            f"SELECT m.`offset`, {columns} FROM {session.dialect.rows(('o',), len(chunk))} "
            f"{session.dialect.join_to(LOG, 'm')} ON m.`offset` = v.o",
            chunk,
        ):
            found[offset] = _Content(*content)
    return found


def _candidates(contents: Mapping[int, _Content], rows: Collection[tuple[str, int]]) -> list[Candidate]:
    found = []
    for key, offset in rows:
        content = contents[offset]
        found.append(Candidate(key, offset, content.publisher_key, content.metadata))
    return found


def _read_coalesce_keys(
    taking: Taking, contents: Mapping[int, _Content], rows: Collection[tuple[str, int]]
) -> set[tuple[str, int]]:
    """Read what is known about the coalesce keys of messages.

    Returns:
        The messages of which nothing can be decided, because another claim has locked their offsets row (shared mode).
    """
    keys = {row: key for row in rows if (key := contents[row[1]].coalesce_key)}
    undecided: set[tuple[str, int]] = set()
    if keys and taking.claimant.shared:
        mine = set(taking.locked)
        more = {partition for partition, _ in keys} - mine
        mine |= watermarks.lock(taking.session, taking.claimant.ref, more, skip_locked=True).keys()
        undecided = {row for row in keys if row[0] not in mine}
    taking.coalescing.read({row: key for row, key in keys.items() if row not in undecided}, were_claimed=True)
    return undecided


def _renew_rows(taking: Taking, taken: Sequence[Claimed]) -> None:
    session, claimant = taking.session, taking.claimant
    names = ["k", "o", "t", "who", "at", "until"]
    changes = {
        "delivery_token": "v.t",
        "delivered_by": "v.who",
        "delivered_at": "v.at",
        "invisible_until": "v.until",
    }
    if any(one.suspect for one in taken):  # Otherwise none of the rows was held, and ``suspect`` is False in all.
        names.append("suspect")
        changes["suspect"] = "v.suspect"
    common = (taking.request.token, claimant.subscriber, taking.now, taking.until)
    for chunk in session.chunks(taken):
        session.execute(
            session.dialect.update_joined(STATE, names, len(chunk), BY_ROW, changes),
            (
                *flat((one.key, one.offset, *common, one.suspect)[: len(names)] for one in chunk),
                *claimant.ref,
            ),
        )

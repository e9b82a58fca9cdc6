"""Claims of messages that were claimed before: after a failure, a loss, a release, or the wait for a slot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from django_mysqlqueue.delivery_limits import NO_KEY
from django_mysqlqueue.models import DeliveryState, QueueMessage
from django_mysqlqueue.outcomes import Outcome
from django_mysqlqueue.service import dead_letters, delivery_events, losses
from django_mysqlqueue.service.dead_letters import FailedDelivery
from django_mysqlqueue.service.deliveries import Claimed
from django_mysqlqueue.service.delivery_events import Event
from django_mysqlqueue.service.leasing import CLOCK_STEP_MS
from django_mysqlqueue.service.refs import GroupRef
from django_mysqlqueue.service.slots import Rest
from django_mysqlqueue.service.taking import Taking
from django_mysqlqueue.service.watermarks import BY_ROW
from django_mysqlqueue.sql.session import Session, flat

STATE = DeliveryState._meta.db_table
LOG = QueueMessage._meta.db_table


def redeliver(taking: Taking) -> list[Claimed]:
    """Take rows again, by primary key, without waiting for locked ones.

    In ordered mode, a locked row excludes its whole partition from this claim, so that no later message overtakes it.
    """
    due = _due(taking)
    if not due:
        return []
    session, claimant, result = taking.session, taking.claimant, taking.result
    rows = _lock_due(session, claimant.ref, due)
    judgement = _Judgement(taking, most=taking.request.max_due if claimant.shared else len(due))
    if len(rows) < len(due):
        unsettled = _still_unsettled(session, claimant.ref, [row for row in due if row not in rows])
        judgement.closed |= {key for key, _ in unsettled}
        result.locked |= judgement.closed
        result.settled |= set(due) - set(rows) - unsettled
    sizes = _sizes(session, [offset for _, offset in rows], metadata=taking.needs_metadata([key for key, _ in rows]))
    limit_keys = taking.limit_keys([(key, offset, sizes.get(offset, (0, ""))[1]) for key, offset in rows])
    for (key, offset), row in sorted(rows.items()):
        if claimant.shared or key not in judgement.closed:
            size, _ = sizes.get(offset, (0, ""))
            judgement.judge(key, offset, row, size, limit_keys.get((key, offset), NO_KEY))
    judgement.write()
    return judgement.taken


class _Row(NamedTuple):
    """The locked row of a message."""

    due_at: int
    token: int
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
    most: int
    """Maximum number of rows to take."""
    taken: list[Claimed] = field(default_factory=list)
    failed: list[FailedDelivery] = field(default_factory=list)
    lost: list[Event] = field(default_factory=list)
    waits: list[tuple[str, int, int]] = field(default_factory=list)
    """Rows that wait after a loss, and until when."""
    rests: list[tuple[str, int, int]] = field(default_factory=list)
    """Rows that wait for a slot, and until when."""
    closed: set[str] = field(default_factory=set)
    """Partitions of which nothing more is taken (ordered mode)."""

    def judge(self, key: str, offset: int, row: _Row, size: int, limit_key: str) -> None:
        """Decide about a row. Rows of a partition must be judged in the order of their offsets."""
        claimant, now, result = self.taking.claimant, self.taking.now, self.taking.result
        is_later = row.due_at > now and row.delivered_at <= now + CLOCK_STEP_MS
        if is_later and (claimant.shared or not row.token):
            self._wait(key, offset, row.due_at)
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
        elif wait := losses.wait_ms(row.token, row.retries, claimant.backoff):
            self.waits.append((key, offset, now + wait))
            self.lost.append(Event.of(last, Outcome.LOST))
            self._wait(key, offset, now + wait)
        elif self._take(claimed, limit_key) and row.token:
            self.lost.append(Event.of(last, Outcome.LOST))

    def _wait(self, key: str, offset: int, until: int) -> None:
        self.taking.result.later[key, offset] = until
        if self.taking.claimant.strict:
            self.closed.add(key)

    def _take(self, claimed: Claimed, limit_key: str) -> bool:
        """Take a row if it fits and has a slot. Otherwise nothing of its partition overtakes it in ordered mode."""
        if len(self.taken) >= self.most:
            return False
        taken = self.taking.take(claimed, limit_key)
        if isinstance(taken, Claimed):
            self.taken.append(taken)
            return True
        self.closed.add(claimed.key)
        if isinstance(taken, Rest):
            result = self.taking.result
            if self.taking.claimant.shared:
                result.later[claimed.key, claimed.offset] = taken.until
                self.rests.append((claimed.key, claimed.offset, taken.until))
            else:
                # It stays due, so that nothing overtakes it when the partition is asked for again.
                result.limited[claimed.key] = taken
        return False

    def write(self) -> None:
        """Write what was decided."""
        session, ref = self.taking.session, self.taking.claimant.ref
        if self.lost and delivery_events.level(ref) != "none":
            delivery_events.record(session, self.lost)
        if self.failed:
            dead_letters.dead_letter(session, ref, self.failed)
        losses.make_wait(session, ref, self.waits, self.taking.now)
        _make_rest(self.taking, self.rests)
        _renew_rows(self.taking, self.taken)


def _due(taking: Taking) -> list[tuple[str, int]]:
    """Return rows that are probably due for redelivery."""
    if not taking.claimant.shared:
        return [(want.key, offset) for want in taking.wants() for offset in want.due]
    exclude = taking.request.exclude
    return [row for row in _due_shared(taking) if row not in exclude]


def _due_shared(taking: Taking) -> list[tuple[str, int]]:
    """Return rows that look due, read without locks from the start of the index."""
    session, claimant, request, now = taking.session, taking.claimant, taking.request, taking.now
    if request.max_due <= 0:
        return []
    # Deliveries that the claimant holds must not use up the limit.
    limit = max(request.max_due, request.due_window) + len(request.exclude)
    inside, parameters = claimant.subset.condition(session.dialect, "partition_key")
    select = (
        f"SELECT partition_key, message_offset FROM {STATE}{session.dialect.force_index('queue_delivery_state_due')} "
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
    return [(key, offset) for key, offset in found]


def _lock_due(session: Session, ref: GroupRef, due: Sequence[tuple[str, int]]) -> dict[tuple[str, int], _Row]:
    rows: dict[tuple[str, int], _Row] = {}
    for chunk in session.chunks(sorted(due)):
        for key, offset, *rest in session.rows(
            "SELECT s.partition_key, s.message_offset, s.invisible_until, s.delivery_token, s.delivered_by, "
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


def _make_rest(taking: Taking, rests: Sequence[tuple[str, int, int]]) -> None:
    """Make rows of a shared group that have got no slot due later, so that others are found before them."""
    session = taking.session
    for chunk in session.chunks(rests):
        session.execute(
            session.dialect.update_joined(
                STATE, ("k", "o", "until"), len(chunk), BY_ROW, {"invisible_until": "v.until"}
            ),
            (*flat(chunk), *taking.claimant.ref),
        )


def _sizes(session: Session, offsets: Sequence[int], *, metadata: bool) -> dict[int, tuple[int, str]]:
    """Return the size of each message, and its metadata if it is needed."""
    column = ", m.metadata" if metadata else ""
    sizes: dict[int, tuple[int, str]] = {}
    for chunk in session.chunks(offsets):
        for offset, size, *more in session.rows(
            f"SELECT m.`offset`, m.size{column} FROM {session.dialect.rows(('o',), len(chunk))} "
            f"{session.dialect.join_to(LOG, 'm')} ON m.`offset` = v.o",
            chunk,
        ):
            sizes[offset] = (size, more[0] if more else "")
    return sizes


def _renew_rows(taking: Taking, taken: Sequence[Claimed]) -> None:
    session, claimant = taking.session, taking.claimant
    for chunk in session.chunks(taken):
        session.execute(
            session.dialect.update_joined(
                STATE,
                ("k", "o", "t", "who", "at", "until"),
                len(chunk),
                BY_ROW,
                {
                    "delivery_token": "v.t",
                    "delivered_by": "v.who",
                    "delivered_at": "v.at",
                    "invisible_until": "v.until",
                },
            ),
            (
                *flat((one.key, one.offset, one.token, claimant.subscriber, taking.now, taking.until) for one in chunk),
                *claimant.ref,
            ),
        )

"""Claims: taking messages for one group, from many partitions, in one transaction.

Locks are taken in this order everywhere: group (shared), leases, offsets, delivery state, outbox; within a table by
primary key, in key order.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from secrets import randbits

from django_mysqlqueue.backoff import Backoff
from django_mysqlqueue.models import ConsumerGroup, DeliveryState, QueueMessage
from django_mysqlqueue.outcomes import Outcome
from django_mysqlqueue.service import dead_letters, delivery_events, groups, leasing, losses, settling, watermarks
from django_mysqlqueue.service.dead_letters import FailedDelivery
from django_mysqlqueue.service.deliveries import Action, Claimed, Flushed, Settlement
from django_mysqlqueue.service.delivery_events import Event
from django_mysqlqueue.service.leasing import CLOCK_STEP_MS
from django_mysqlqueue.service.refs import GroupRef
from django_mysqlqueue.service.subsets import EVERYTHING, Subset
from django_mysqlqueue.service.watermarks import BY_ROW, Offsets
from django_mysqlqueue.sql.session import UNION_TERMS, Session, flat, run

STATE = DeliveryState._meta.db_table
LOG = QueueMessage._meta.db_table


@dataclass(frozen=True, slots=True)
class Claimant:
    """A subscriber's right to claim for a group, and the rules of the group."""

    ref: GroupRef
    subscriber: str
    max_attempts: int | None
    visibility_ms: int | None
    """The visibility timeout in milliseconds in shared mode; None in ordered mode, in which the lease protects."""
    strict: bool = False
    """Whether ``on_failure="block"``: nothing of a partition is taken before its lowest unsettled row."""
    subset: Subset = EVERYTHING
    """The partitions from which redeliveries are taken in shared mode."""
    backoff: Backoff = losses.NO_WAIT
    """The wait after the loss of a suspected poison message."""

    @property
    def shared(self) -> bool:
        """Whether the group is in shared mode."""
        return self.visibility_ms is not None

    @property
    def mode(self) -> str:
        """The mode of the group."""
        return ConsumerGroup.Mode.SHARED if self.shared else ConsumerGroup.Mode.ORDERED


@dataclass(frozen=True, slots=True)
class Want:
    """A request for messages of one partition: redeliveries, or else messages above its position."""

    key: str
    due: tuple[int, ...] = ()
    """Offsets that are probably due for redelivery, in ascending order (ordered mode)."""
    look_at: int = 0
    """Number of messages above the position to look at."""


@dataclass(slots=True)
class Claim:
    """The result of a claim. After the COMMIT, this process holds the deliveries."""

    flushed: Flushed
    deliveries: list[Claimed] = field(default_factory=list)
    dead: list[tuple[Claimed, str]] = field(default_factory=list)
    """Suspected poison messages that had used up their attempts, with the error. They are in the DLQ now."""
    lost: set[str] = field(default_factory=set)
    """Partitions whose lease the claimant no longer owns."""
    missing: set[str] = field(default_factory=set)
    """Partitions without an offsets row: create the row, and claim again."""
    looked_at: set[str] = field(default_factory=set)
    """Partitions whose messages above the position were looked at."""
    drained: set[str] = field(default_factory=set)
    """Partitions that had, under their lock, no messages above the position."""
    settled: set[tuple[str, int]] = field(default_factory=set)
    """Expected redeliveries that are already settled."""
    locked: set[str] = field(default_factory=set)
    """Partitions that were left out because another transaction has locked a due row (ordered mode)."""
    later: dict[tuple[str, int], int] = field(default_factory=dict)
    """Redeliveries that are not due yet, or wait after a loss → when they are due, in epoch milliseconds."""
    dropped: bool = False
    paused: bool = False
    other_mode: str = ""
    """The group's mode, if it differs from the claimant's: then nothing was taken."""


@dataclass(frozen=True, slots=True)
class ClaimRequest:
    """The settlements that a claim transaction writes, and the messages that it takes."""

    claimant: Claimant
    wants: Sequence[Want]
    """The messages to take, by partition. In ordered mode, the claimant must own the partitions."""
    token: int
    """The token of the new deliveries (``losses.token_of``), from ``new_token``. It must never have been used."""
    settlements: Sequence[Settlement] = ()
    """Settlements of earlier deliveries of the group. They are written first, as by ``settling.flush``."""
    also: Collection[str] = ()
    """Further partitions whose watermarks can advance."""
    max_due: int = 0
    """Maximum number of redeliveries to take in shared mode, oldest first, from any partition."""
    due_window: int = 0
    """Number of due rows to look at for that, because the first ones may be locked."""
    exclude: Collection[tuple[str, int]] = ()
    """The (partition key, offset) of deliveries that the claimant already holds (shared mode)."""
    max_bytes: int = 2**62
    """Maximum number of payload bytes to take. The first message is always taken."""
    max_rows: int = 2**62
    """Maximum number of messages to take."""
    after_clock_step: bool = False
    """In shared mode, whether to look for rows that a clock, since corrected, left far in the future."""


def new_token() -> int:
    """Return a random 63-bit token above 0 for the deliveries of one claim. It is never used again."""
    return randbits(63) or 1


def claim(using: str, request: ClaimRequest) -> Claim:
    """Write the group's pending settlements and take new deliveries, in one transaction.

    Raises:
        CommitOutcomeUnknown: it is unknown whether this process holds the deliveries; see ``undo``.
    """
    return run(using, lambda session: _claim(session, request))


def _claim(session: Session, request: ClaimRequest) -> Claim:
    claimant, ref, shared = request.claimant, request.claimant.ref, request.claimant.shared
    fence = groups.fence(session, ref)
    keys = {want.key for want in request.wants}
    lost: set[str] = set()
    if not shared:
        owners = leasing.lock(session, ref, sorted(keys))
        lost = {key for key in keys if owners.get(key) != claimant.subscriber}
    touched = keys | set(request.also) | {settlement.delivery.key for settlement in request.settlements}
    offsets = watermarks.lock(session, ref, touched, skip_locked=shared)
    flushed = settling.apply(
        session, ref, request.settlements, offsets, max_attempts=claimant.max_attempts, also=request.also
    )
    result = Claim(flushed, lost=lost, dropped=fence is None, paused=fence is not None and fence.paused)
    if fence is not None and fence.mode != claimant.mode:
        result.other_mode = fence.mode
    if fence is None or fence.paused or result.other_mode:
        watermarks.store(session, ref, offsets, flushed.watermarks, {})
        return result
    taking = _Taking(session, request, fence.now, _Budget(request.max_bytes, request.max_rows), result)
    redelivered = _redeliver(taking, _due(taking))
    fresh, cursors = _above_cursors(taking, offsets)
    # If a position has only moved past messages for other groups, no later settlement will advance the watermark.
    flushed.unfinished |= cursors.keys() - {delivery.key for delivery in fresh}
    _insert_rows(taking, fresh)
    watermarks.store(session, ref, offsets, flushed.watermarks, cursors)
    result.deliveries = sorted([*redelivered, *fresh], key=lambda delivery: (delivery.key, delivery.offset))
    return result


@dataclass(frozen=True, slots=True)
class _Taking:
    """The state of a claim's transaction, under the group's lock."""

    session: Session
    request: ClaimRequest
    now: int
    """The database's time in epoch milliseconds."""
    budget: _Budget
    result: Claim

    @property
    def claimant(self) -> Claimant:
        return self.request.claimant

    @property
    def until(self) -> int:
        """When the deliveries become visible to other subscribers (shared mode)."""
        return self.now + (self.claimant.visibility_ms or 0)

    def wants(self) -> list[Want]:
        """Return the wants of partitions that the claimant still owns."""
        return [want for want in self.request.wants if want.key not in self.result.lost]

    def claimed(self, key: str, offset: int, size: int, *, retries: int = 0, suspect: bool = False) -> Claimed:
        """Return a delivery that this claim takes."""
        return Claimed(
            self.claimant.ref,
            key,
            offset,
            losses.token_of(self.request.token, suspect=suspect),
            retries + 1,
            suspect,
            size,
            self.now,
            self.claimant.subscriber,
        )


class _Budget:
    """The payload bytes and messages that a claim may still take. The first message always fits."""

    def __init__(self, max_bytes: int, max_rows: int) -> None:
        self._left = max_bytes
        self._rows = max_rows
        self._any = False
        self._full = False

    def takes(self, size: int) -> bool:
        """Take a message if it fits. After one was refused, all are: a smaller message must not overtake it."""
        self._full = self._full or (self._any and (size > self._left or self._rows <= 0))
        if self._full:
            return False
        self._any = True
        self._left -= size
        self._rows -= 1
        return True


# -- redeliveries -------------------------------------------------------------


def _due(taking: _Taking) -> list[tuple[str, int]]:
    """Return rows that are probably due for redelivery."""
    if not taking.claimant.shared:
        return [(want.key, offset) for want in taking.wants() for offset in want.due]
    exclude = taking.request.exclude
    return [row for row in _due_shared(taking) if row not in exclude]


def _due_shared(taking: _Taking) -> list[tuple[str, int]]:
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


def _redeliver(taking: _Taking, due: Sequence[tuple[str, int]]) -> list[Claimed]:
    """Take rows again, by primary key, without waiting for locked ones.

    In ordered mode, a locked row excludes its whole partition from this claim, so that no later message overtakes it.
    A row with a token was lost with its subscriber; if that was not the first time, it waits instead.
    """
    if not due:
        return []
    session, claimant, now, result = taking.session, taking.claimant, taking.now, taking.result
    most = taking.request.max_due if claimant.shared else len(due)
    ref = claimant.ref
    rows = _lock_due(session, ref, due)
    locked: set[str] = set()
    if len(rows) < len(due):
        unsettled = _still_unsettled(session, ref, [row for row in due if row not in rows])
        locked = {key for key, _ in unsettled}
        result.locked |= locked
        result.settled |= set(due) - set(rows) - unsettled
    sizes = _sizes(session, [offset for _, offset in rows])
    taken: list[Claimed] = []
    failed: list[FailedDelivery] = []
    lost: list[Event] = []
    waits: list[tuple[str, int, int]] = []
    for (key, offset), (due_at, token, delivered_by, delivered_at, retries, error) in sorted(rows.items()):
        if not claimant.shared and key in locked:
            continue
        if due_at > now and delivered_at <= now + CLOCK_STEP_MS and (claimant.shared or not token):
            result.later[key, offset] = due_at
            if claimant.strict:
                locked.add(key)
            continue
        suspect = bool(delivered_by)
        size = sizes.get(offset, 0)
        claimed = taking.claimed(key, offset, size, retries=retries, suspect=suspect)
        # The delivery with which its subscriber was lost.
        last = claimed._replace(attempt=retries, delivered_at=delivered_at, by=delivered_by) if suspect else None
        if last is not None and dead_letters.is_final(ref.topic, retries, claimant.max_attempts):
            text = f"The subscriber {delivered_by!r} was lost while it handled attempt {retries}."
            failed.append(FailedDelivery.of(last, f"{error}\n{text}" if error else text))
            result.dead.append((last, text))
        elif last is not None and (wait := losses.wait_ms(token, retries, claimant.backoff)):
            waits.append((key, offset, now + wait))
            result.later[key, offset] = now + wait
            lost.append(Event.of(last, Outcome.LOST))
            if claimant.strict:
                locked.add(key)
        elif len(taken) < most and taking.budget.takes(size):
            taken.append(claimed)
            if last is not None and token:
                lost.append(Event.of(last, Outcome.LOST))
    _write_losses(taking, lost, failed, waits)
    _renew_rows(taking, taken)
    return taken


def _write_losses(
    taking: _Taking, lost: Sequence[Event], failed: Sequence[FailedDelivery], waits: Sequence[tuple[str, int, int]]
) -> None:
    session, ref = taking.session, taking.claimant.ref
    if lost and delivery_events.level(ref) != "none":
        delivery_events.record(session, lost)
    if failed:
        dead_letters.dead_letter(session, ref, failed)
    losses.make_wait(session, ref, waits, taking.now)


def _lock_due(
    session: Session, ref: GroupRef, due: Sequence[tuple[str, int]]
) -> dict[tuple[str, int], tuple[int, int, str, int, int, str]]:
    rows: dict[tuple[str, int], tuple[int, int, str, int, int, str]] = {}
    for chunk in session.chunks(sorted(due)):
        for key, offset, *rest in session.rows(
            "SELECT s.partition_key, s.message_offset, s.invisible_until, s.delivery_token, s.delivered_by, "
            f"s.delivered_at, s.retry_count, s.last_error FROM {session.dialect.rows(('k', 'o'), len(chunk))} "
            f"{session.dialect.join_to(STATE, 's')} ON {BY_ROW} AND s.acked = %s{session.dialect.skip_locked}",
            (*flat(chunk), *ref, False),
        ):
            rows[key, offset] = tuple(rest)
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


def _sizes(session: Session, offsets: Sequence[int]) -> dict[int, int]:
    sizes: dict[int, int] = {}
    for chunk in session.chunks(offsets):
        sizes.update(
            session.rows(
                f"SELECT m.`offset`, m.size FROM {session.dialect.rows(('o',), len(chunk))} "
                f"{session.dialect.join_to(LOG, 'm')} ON m.`offset` = v.o",
                chunk,
            )
        )
    return sizes


def _renew_rows(taking: _Taking, taken: Sequence[Claimed]) -> None:
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


# -- messages above the position ----------------------------------------------


def _above_cursors(taking: _Taking, offsets: Mapping[str, Offsets]) -> tuple[list[Claimed], dict[str, int]]:
    """Take messages above the positions ("cursors"), and return them with the new positions.

    A position moves to the last message that was looked at, even past messages with another ``target_group``:
    otherwise the watermark and GC would stop there.
    """
    session, claimant, result = taking.session, taking.claimant, taking.result
    places: dict[str, tuple[int, int]] = {}
    for want in taking.wants():
        if want.look_at <= 0:
            continue
        if want.key in offsets:
            places[want.key] = (offsets[want.key].claimed, want.look_at)
        else:
            result.missing.add(want.key)
    if claimant.shared and result.missing:
        # SKIP LOCKED hides locked rows. These are not missing, and the partition stays in the poller's list.
        result.missing -= watermarks.existing(session, claimant.ref, result.missing)
    taken: list[Claimed] = []
    cursors: dict[str, int] = {}
    result.looked_at |= set(places)
    found = _look(session, claimant.ref.topic, places)
    for key, (_, look_at) in places.items():
        rows = found.get(key, [])
        for offset, target, size in rows:
            if target and target != claimant.ref.group:
                cursors[key] = offset
                continue
            if not taking.budget.takes(size):
                break
            taken.append(taking.claimed(key, offset, size))
            cursors[key] = offset
        if len(rows) < look_at and (not rows or cursors.get(key) == rows[-1][0]):
            result.drained.add(key)
    return taken, cursors


def _look(session: Session, topic: str, places: Mapping[str, tuple[int, int]]) -> dict[str, list[tuple[int, str, int]]]:
    """Return the next messages of each partition: (offset, target group, size), in offset order."""
    one = (
        f"SELECT partition_key, `offset`, target_group, size FROM {LOG}"
        f"{session.dialect.force_index('queue_messages_partition')} "
        "WHERE topic = %s AND partition_key = %s AND `offset` > %s ORDER BY `offset` LIMIT %s"
    )
    found: dict[str, list[tuple[int, str, int]]] = {}
    items = sorted(places.items())
    for start in range(0, len(items), UNION_TERMS):
        piece = items[start : start + UNION_TERMS]
        sql = session.dialect.union(one, len(piece))
        parameters = flat((topic, key, cursor, limit) for key, (cursor, limit) in piece)
        for key, offset, target, size in session.rows(sql, parameters):
            found.setdefault(key, []).append((offset, target, size))
    for rows in found.values():
        rows.sort()
    return found


def _insert_rows(taking: _Taking, taken: Sequence[Claimed]) -> None:
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


# -- after the COMMIT ---------------------------------------------------------


def undo(using: str, ref: GroupRef, token: int) -> None:
    """Release the deliveries that a claim with an unknown outcome may have taken. No attempt is counted.

    The exclusive lock on the group row waits until the claim's transaction, which holds it shared, has ended on the
    server.
    """

    def release(session: Session) -> None:
        groups.wait_for_claims(session, ref)
        rows = session.rows(
            f"SELECT partition_key, message_offset, retry_count, delivery_token FROM {STATE}"
            f"{session.dialect.force_index('queue_delivery_state_due')} "
            "WHERE consumer_group = %s AND topic = %s AND acked = %s AND delivery_token IN (%s, %s)",
            (*ref, False, token, -token),
        )
        unstarted = [
            Settlement(Claimed(ref, key, offset, mine, retries + 1, suspect=mine < 0, size=0), Action.RELEASE)
            for key, offset, retries, mine in rows
        ]
        settling.apply(session, ref, unstarted, {}, max_attempts=None)

    run(using, release)

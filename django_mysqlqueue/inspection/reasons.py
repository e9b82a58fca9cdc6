"""The reason why a consumer group has not started a message that is in the log.

All reads are by primary key or along an index, for one message and one group at a time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from django_mysqlqueue.db.tables import COALESCE_KEYS, STATE
from django_mysqlqueue.inspection.bounds import PAGES, Bounds
from django_mysqlqueue.inspection.limited import read_reached
from django_mysqlqueue.inspection.message_history import GroupState, MessageContent
from django_mysqlqueue.inspection.subscribers import SubscriberStatus
from django_mysqlqueue.models import ConsumerGroup
from django_mysqlqueue.names.keys import lane_of
from django_mysqlqueue.options.delivery_limits import NO_KEY
from django_mysqlqueue.service import messages, unclaimed
from django_mysqlqueue.service.leasing import MAX_PENDING
from django_mysqlqueue.service.losses import HELD_BY, is_lost
from django_mysqlqueue.service.slots import LONGEST_REST_US
from django_mysqlqueue.sql.session import Session
from django_mysqlqueue.subscriptions.effective import blocks_on_failure
from django_mysqlqueue.subscriptions.handler import Handler

LONGEST_REST_MS = LONGEST_REST_US // 1000 + 1
"""Maximum number of milliseconds for which a claim in shared mode puts off a message that may not start yet, because of
a limit or of another message with its coalesce key. A message that waits for longer is in backoff or snoozed."""


@dataclass(frozen=True, slots=True)
class WaitReason:
    """Why a group has not started a message."""

    kind: Literal[
        "unfinished",
        "paused",
        "paused_task",
        "filter",
        "no_subscriber",
        "unserved",
        "in_flight",
        "blocked",
        "lost",
        "behind",
        "pending",
        "filtered",
        "superseded",
        "coalesced",
        "rate",
        "held",
        "expired",
        "may_block",
        "unknown",
        "none",
    ]
    """``filter``: this release cannot parse the group's filter; ``unserved``: no live subscriber claims the partition;
    ``in_flight``: in ordered mode, another message of the partition is in flight; ``blocked``: another one waits, and
    the group blocks on failure; ``lost``: another one waits because its subscriber was lost; ``behind``: another one is
    claimed first; ``pending``: too many others of the partition
    wait for another attempt; ``filtered``, ``superseded``, ``expired``: the handler will not be called; ``coalesced``:
    in shared mode, another message with the coalesce key is in flight; ``rate``, ``held``: a limit is reached, of a
    rate or of messages in flight; ``may_block``: another message of the partition waits, and this project does not
    know whether the group blocks on failure; ``unknown``: not all messages that may hold it up were read; ``none``: a
    subscriber claims it when it has room."""
    offset: int = 0
    """The other message (``in_flight``, ``blocked``, ``lost``, ``behind``, ``superseded``, ``coalesced``,
    ``may_block``)."""
    by: str = ""
    """The subscriber that holds it (``in_flight``, ``coalesced``)."""
    limit_key: str = NO_KEY
    """The key of the limit that is reached; ``NO_KEY`` for one of the group as a whole."""
    until: int = 0
    """When the next slot of the rate is free, in epoch milliseconds (``rate``)."""


class _Other(NamedTuple):
    """Another unsettled message of the partition: a subscriber holds it, or it waits, perhaps because one was lost."""

    offset: int
    due_at: int
    by: str
    is_lost: bool


def why(
    session: Session,
    content: MessageContent,
    state: GroupState,
    live: Mapping[str, SubscriberStatus],
    now: int,
    *,
    latest: int = 0,
    handler: Handler | None = None,
    bounds: Bounds = PAGES,
) -> WaitReason | None:
    """Return why a group does not start a message; None if it is settled, in flight, delayed, or not for the group."""
    if state.standing not in ("in_flight", "waits", "unclaimed"):
        return None
    if state.unfinished:
        return WaitReason("unfinished")
    if state.paused or (state.paused_tasks and lane_of(content.entry.key).partition in state.paused_tasks):
        return WaitReason("paused" if state.paused else "paused_task")
    ordered = state.mode == ConsumerGroup.Mode.ORDERED
    left = state.until - now if state.standing == "waits" else 0
    if state.standing == "in_flight" or left > (0 if ordered else LONGEST_REST_MS):
        return None
    if isinstance(state.filter, str):
        return WaitReason("filter")
    if not live:
        return WaitReason("no_subscriber")
    if not any(content.entry.key in one.subset for one in live.values()):
        return WaitReason("unserved")
    others = _others(session, content, state, bounds) if ordered else []
    before = [one for one in others if one.offset < content.entry.offset and not one.by]
    blocks = blocks_on_failure(state.mode, handler)
    reason = (
        _first(others, before, now, blocks=bool(blocks))
        or _unclaimed(session, content, state, others)
        or _without_call(content, state, now, latest, handler)
        or _limit(session, content, state, live, now)
    )
    if reason is not None or left > 0:
        return reason
    if _has_expired(content, now):
        return WaitReason("expired")
    if before and blocks is None:
        return WaitReason("may_block", offset=before[0].offset)
    if ordered and _has_more(session, state, bounds):
        return WaitReason("unknown")
    return WaitReason("none")


def _others(session: Session, content: MessageContent, state: GroupState, bounds: Bounds) -> list[_Other]:
    """Return others of the partition that are due first, by offset: those in flight are, in ordered mode."""
    rows = session.rows(
        f"SELECT s.message_offset, s.invisible_until, {HELD_BY}, s.delivery_token, s.delivered_by "
        "FROM (SELECT partition_key AS k, message_offset AS o "
        f"FROM {STATE}{session.dialect.force_index('queue_delivery_state_due')} "
        "WHERE consumer_group = %s AND topic = %s AND acked = %s ORDER BY invisible_until LIMIT %s) w "
        f"{session.dialect.join_to(STATE, 's')} ON s.consumer_group = %s AND s.topic = %s AND s.partition_key = w.k "
        "AND s.message_offset = w.o WHERE w.k = %s AND w.o <> %s",
        (*state.ref, False, bounds.in_flight, *state.ref, content.entry.key, content.entry.offset),
    )
    return sorted(_Other(offset, due_at, by, is_lost(*row)) for offset, due_at, by, *row in rows)


def _has_more(session: Session, state: GroupState, bounds: Bounds) -> bool:
    """Return whether the group has as many unsettled messages as are read at most."""
    (number,) = session.one(
        f"SELECT COUNT(*) FROM (SELECT 1 FROM {STATE}{session.dialect.force_index('queue_delivery_state_due')} "
        "WHERE consumer_group = %s AND topic = %s AND acked = %s LIMIT %s) n",
        (*state.ref, False, bounds.in_flight),
    )
    return bool(number == bounds.in_flight)


def _first(others: Sequence[_Other], before: Sequence[_Other], now: int, *, blocks: bool) -> WaitReason | None:
    """Return the claimed message of the partition that has to end, or to be claimed again, first."""
    for one in others:
        if one.by:
            return WaitReason("in_flight", offset=one.offset, by=one.by)
    if before and blocks:
        return WaitReason("blocked", offset=before[0].offset)
    for one in before:
        if one.is_lost:
            return WaitReason("lost", offset=one.offset)
        if one.due_at <= now:
            return WaitReason("behind", offset=one.offset)
    return None


def _unclaimed(
    session: Session, content: MessageContent, state: GroupState, others: Sequence[_Other]
) -> WaitReason | None:
    """Return why the group does not claim an unclaimed message although none that it has claimed has to end first."""
    if state.standing != "unclaimed":
        return None
    if len(others) >= MAX_PENDING:
        return WaitReason("pending")
    key, offset = content.entry.key, content.entry.offset
    _, position = unclaimed.positions(session, state.ref, [key]).get(key, (0, state.start_offset))
    found = unclaimed.count(session, state.ref, [(max(position, state.start_offset), key)], depth=1).get(key)
    return WaitReason("behind", offset=found.first) if found is not None and found.first < offset else None


def _without_call(
    content: MessageContent, state: GroupState, now: int, latest: int, handler: Handler | None
) -> WaitReason | None:
    """Return why the handler will not be called, if the message needs no slot for that."""
    if state.standing == "unclaimed" and state.matches is False:
        return WaitReason("filtered")
    # If the group has a filter, the latest message might not be one that it gets.
    if latest > content.entry.offset and state.filter is None:
        return WaitReason("superseded", offset=latest)
    # A claim passes only unclaimed messages because they have expired.
    passes = state.standing == "unclaimed" and (handler is None or handler.on_expiry == "skip")
    return WaitReason("expired") if passes and _has_expired(content, now) else None


def _has_expired(content: MessageContent, now: int) -> bool:
    return content.expires_at is not None and content.expires_at <= now


def _limit(
    session: Session, content: MessageContent, state: GroupState, live: Mapping[str, SubscriberStatus], now: int
) -> WaitReason | None:
    """Return the message in flight, or the limit, because of which the message may not start."""
    if state.mode == ConsumerGroup.Mode.SHARED and (found := _coalesced(session, content, state, now)):
        return found
    limits = state.limits
    key = limits.key_of(messages.publisher_key(content.entry.key, content.publisher_key), content.metadata)
    if limits.limits_group or key != NO_KEY:
        reached = read_reached(session, state.ref, limits, key, now, live)
        # A slot of a rate that is free before the message is due is not what it waits for.
        if reached is not None and not 0 < reached.until <= state.until:
            return WaitReason("rate" if reached.until else "held", limit_key=reached.key, until=reached.until)
    return None


def _coalesced(session: Session, content: MessageContent, state: GroupState, now: int) -> WaitReason | None:
    """Return the message with the coalesce key that the group has claimed last, if it is in flight (shared mode)."""
    if not content.stored_coalesce_key:
        return None
    row = session.row(
        f"SELECT s.message_offset, {HELD_BY} FROM {COALESCE_KEYS} c {session.dialect.join_to(STATE, 's')} "
        "ON s.consumer_group = c.consumer_group AND s.topic = c.topic AND s.partition_key = c.partition_key "
        "AND s.message_offset = c.message_offset AND s.acked = %s AND s.delivery_token <> 0 AND s.invisible_until > %s "
        "WHERE c.consumer_group = %s AND c.topic = %s AND c.partition_key = %s AND c.coalesce_key = %s",
        (False, now, *state.ref, content.entry.key, content.stored_coalesce_key),
    )
    return None if row is None else WaitReason("coalesced", offset=row[0], by=row[1])

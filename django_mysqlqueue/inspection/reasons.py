"""The reason why a consumer group has not started a message that is in the log.

All reads are by primary key or along an index, for one message and one group at a time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from django_mysqlqueue.delivery_limits import NO_KEY
from django_mysqlqueue.inspection.bounds import PAGES, Bounds
from django_mysqlqueue.inspection.limited import read_reached
from django_mysqlqueue.inspection.message_history import GroupState, MessageContent
from django_mysqlqueue.inspection.subscribers import SubscriberStatus
from django_mysqlqueue.models import ConsumerGroup, DeliveryState
from django_mysqlqueue.service import messages, unclaimed
from django_mysqlqueue.service.losses import HELD_BY
from django_mysqlqueue.sql.session import Session

STATE = DeliveryState._meta.db_table


@dataclass(frozen=True, slots=True)
class WaitReason:
    """Why a group has not started a message."""

    kind: Literal[
        "unfinished",
        "paused",
        "filter",
        "no_subscriber",
        "unserved",
        "in_flight",
        "blocked",
        "behind",
        "filtered",
        "expired",
        "superseded",
        "rate",
        "held",
        "none",
    ]
    """``filter``: this release cannot parse the group's filter; ``unserved``: no live subscriber claims the partition;
    ``in_flight``: in ordered mode, another message of the partition is in flight; ``blocked``: another one has failed,
    and the group blocks on failure; ``behind``: another one is claimed first; ``filtered``, ``expired``,
    ``superseded``: it will be settled without a call; ``rate``, ``held``: a limit is reached, of a rate or of messages
    in flight; ``none``: a subscriber claims it when it has room."""
    offset: int = 0
    """The other message (``in_flight``, ``blocked``, ``behind``, ``superseded``)."""
    by: str = ""
    """The subscriber that holds it (``in_flight``)."""
    limit_key: str = NO_KEY
    """The key of the limit that is reached; ``NO_KEY`` for one of the group as a whole."""
    until: int = 0
    """When the next slot of the rate is free, in epoch milliseconds (``rate``)."""


def why(
    session: Session,
    content: MessageContent,
    state: GroupState,
    live: Mapping[str, SubscriberStatus],
    now: int,
    *,
    latest: int = 0,
    blocks: bool | None = False,
    bounds: Bounds = PAGES,
) -> WaitReason | None:
    """Return the first reason why a group does not start a message, or why its delivery is not followed by another.

    Args:
        session: session on the queue's database.
        content: the message.
        state: its state for the group.
        live: the group's live subscribers, by name.
        now: the database's time in epoch milliseconds.
        latest: the offset of the latest message with its coalesce key.
        blocks: whether messages of a partition wait for one that has failed; None if that is not known.
        bounds: limits of what is read.

    Returns:
        The reason; None if the group has settled the message or does not receive it, or if the delivery itself is the
        reason: it is in flight, in backoff or snoozed.
    """
    if state.standing not in ("in_flight", "waits", "unclaimed"):
        return None
    if state.unfinished:
        return WaitReason("unfinished")
    if state.paused:
        return WaitReason("paused")
    waits_for_slot = state.standing == "waits" and not state.failed and bool(state.limits)
    if state.standing == "in_flight" or (state.standing == "waits" and state.until > now and not waits_for_slot):
        return None
    if isinstance(state.filter, str):
        return WaitReason("filter")
    if not live:
        return WaitReason("no_subscriber")
    if not any(content.entry.key in one.subset for one in live.values()):
        return WaitReason("unserved")
    first = _first(session, content, state, bounds, blocks=bool(blocks))
    return first or _without_call(content, state, now, latest) or _limit(session, content, state, live, now)


def _first(
    session: Session, content: MessageContent, state: GroupState, bounds: Bounds, *, blocks: bool
) -> WaitReason | None:
    """Return the message of the partition that has to end, or to be claimed, first."""
    key, offset = content.entry.key, content.entry.offset
    if state.mode == ConsumerGroup.Mode.ORDERED:
        rows = session.rows(
            "SELECT w.place, w.held_by FROM (SELECT s.message_offset AS place, s.acked, "
            f"{HELD_BY} AS held_by FROM {STATE} s{session.dialect.force_index('PRIMARY')} WHERE s.consumer_group = %s "
            "AND s.topic = %s AND s.partition_key = %s ORDER BY s.message_offset LIMIT %s) w "
            "WHERE w.acked = %s AND w.place <> %s AND (w.held_by <> '' OR w.place < %s)",
            (*state.ref, key, bounds.partition_count, False, offset, offset if blocks else 0),
        )
        if rows:
            place, by = min(rows)
            return WaitReason("in_flight" if by else "blocked", offset=int(place), by=by)
    if state.standing == "unclaimed":
        _, position = unclaimed.positions(session, state.ref, [key]).get(key, (0, state.start_offset))
        found = unclaimed.count(session, state.ref, [(max(position, state.start_offset), key)], depth=1).get(key)
        if found is not None and found.first < offset:
            return WaitReason("behind", offset=found.first)
    return None


def _without_call(content: MessageContent, state: GroupState, now: int, latest: int) -> WaitReason | None:
    """Return why the group will settle the message without calling the handler."""
    if state.standing == "unclaimed" and state.matches is False:
        return WaitReason("filtered")
    # If the group has a filter, the latest message might not be one that it gets.
    if latest > content.entry.offset and state.filter is None:
        return WaitReason("superseded", offset=latest)
    if content.expires_at is not None and content.expires_at <= now:
        return WaitReason("expired")
    return None


def _limit(
    session: Session, content: MessageContent, state: GroupState, live: Mapping[str, SubscriberStatus], now: int
) -> WaitReason:
    limits = state.limits
    key = limits.key_of(messages.publisher_key(content.entry.key, content.metadata), content.metadata)
    if limits.limits_group or key != NO_KEY:
        reached = read_reached(session, state.ref, limits, key, now, live)
        if reached is not None:
            return WaitReason("rate" if reached.until else "held", limit_key=reached.key, until=reached.until)
    return WaitReason("none")

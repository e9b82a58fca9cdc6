"""Dead-letter now: an operator gives up on messages that a group is retrying.

It is a reject in the operator's name. It is written as a subscriber's is
(``settling.apply``), so state, watermark and dead letter change together, or not
at all. The group's revision rises: owners of ordered partitions keep backoffs in
memory, and under ``on_failure="block"`` wait for the message.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from django_mysqlqueue import naming
from django_mysqlqueue.conf import get_settings
from django_mysqlqueue.exceptions import OperationRefused
from django_mysqlqueue.models import ConsumerOffset, DeliveryState, QueueMessage
from django_mysqlqueue.service import audit, groups, heartbeats, settling, watermarks
from django_mysqlqueue.service.deliveries import Action, Claimed, Settlement
from django_mysqlqueue.service.refs import GroupRef
from django_mysqlqueue.sql.connection import apart
from django_mysqlqueue.sql.session import Session, run

LOG = QueueMessage._meta.db_table
STATE = DeliveryState._meta.db_table
OFFSETS = ConsumerOffset._meta.db_table
MOST = 500
"""Messages that one transaction takes."""
REASONS = 5
"""Of so many messages a refusal says why."""


@dataclass(frozen=True, slots=True)
class RetriedMessage:
    """A message that its group has claimed and not settled, and that no live subscriber holds."""

    key: str
    offset: int
    failed: int
    """Attempts that count."""
    token: int
    held_by: str
    """The subscriber that was lost with it, or ''."""
    last_error: str


def find(using: str, ref: GroupRef, offsets: Collection[int]) -> list[RetriedMessage]:
    """The messages that ``dead_letter_now`` would dead-letter; it changes nothing.

    Raises:
        OperationRefused: as ``dead_letter_now``.
    """
    session = Session(using)
    if groups.find(using, ref) is None:
        raise OperationRefused(groups.no_group_text(ref))
    return _find(session, ref, offsets)


def dead_letter_now(using: str, ref: GroupRef, offsets: Collection[int], *, actor: str, reason: str = "") -> int:
    """Dead-letters messages that a group is retrying: all of them, or none.

    A message qualifies while it waits for another attempt, or when the subscriber
    that held it has been lost. One that a live subscriber holds may take effect at
    any moment, so it is refused. Other groups are not concerned.

    Args:
        using: the queue's database alias.
        ref: the group and its topic.
        offsets: of the messages in the log; at most ``MOST``.
        actor: who does it, for the audit log and the dead letter.
        reason: why; it ends the dead letter's ``last_error``, behind the last attempt's error.

    Returns:
        How many messages were dead-lettered.

    Raises:
        OperationRefused: there is no such group, a seek or drop of it has not finished, its topic
            is a DLQ topic, or one of the messages does not qualify; the text says which and why.
        CommitOutcomeUnknown: the connection broke during COMMIT. Run it again: messages that
            were dead-lettered are then refused as settled.
    """

    def give_up(session: Session) -> int:
        groups.refuse_unfinished(ref, groups.lock(session, ref).after_seek)
        found = _find(session, ref, offsets)
        rejects = [Settlement(_claimed(ref, one, actor), Action.REJECT, 0, _error(one, actor, reason)) for one in found]
        # Not waited for: whoever holds a partition's offsets row will move its watermark.
        locked = watermarks.lock(session, ref, {one.key for one in found}, skip_locked=True)
        flushed = settling.apply(session, ref, rejects, locked, max_attempts=None)
        changed = sorted(outcome.delivery.offset for outcome in (*flushed.locked, *flushed.stale))
        if changed:
            raise OperationRefused(f"{_listed(changed)}: being settled at this moment. Nothing was changed; try again.")
        watermarks.store(session, ref, locked, flushed.watermarks, {})
        groups.change(session, ref, revise=True)
        detail = _listed([one.offset for one in found])
        audit.once(
            session,
            "dead_letter",
            len(found),
            actor=actor,
            reason=reason,
            group=ref.group,
            topic=ref.topic,
            detail=detail,
        )
        return len(found)

    with apart(using):
        return run(using, give_up)


def _claimed(ref: GroupRef, one: RetriedMessage, actor: str) -> Claimed:
    # No attempt was begun for it, so ``delivered_at`` stays 0: the record of deliveries tells it by that.
    return Claimed(ref, one.key, one.offset, one.token, one.failed, suspect=False, size=0, by=actor)


def _error(one: RetriedMessage, actor: str, reason: str) -> str:
    text = f"Dead-lettered by {actor}" + (f": {reason}" if reason else ".")
    return f"{one.last_error.rstrip()}\n{text}" if one.last_error else text


def _find(session: Session, ref: GroupRef, offsets: Collection[int]) -> list[RetriedMessage]:
    if naming.is_dlq(ref.topic):
        raise OperationRefused(
            f"{ref.topic!r} is a DLQ topic and has no DLQ of its own: discard the message (queuediscard), or skip it "
            "(queueseek)."
        )
    wanted = sorted(set(offsets))
    if not wanted:
        raise OperationRefused("No message is named: give at least one offset.")
    if len(wanted) > MOST:
        raise OperationRefused(f"{len(wanted):,} messages are named: at most {MOST} at a time.")
    rows = {row[0]: row[1:] for row in _rows(session, ref, wanted)}
    live = heartbeats.live(session, [ref], int(get_settings().lease_duration * 1000))[ref]
    found: list[RetriedMessage] = []
    refused: dict[int, str] = {}
    for offset in wanted:
        key, target, watermark, acked, failed, held_by, token, last_error = rows.get(offset, (None,) * 8)
        if key is None:
            refused[offset] = f"is not in the log of {ref.topic!r}"
        elif target not in ("", ref.group):
            refused[offset] = f"is for the group {target!r} alone"
        elif acked is None and (watermark is None or offset > watermark):
            refused[offset] = "has not been claimed yet: to skip it use queueseek"
        elif acked is None or acked:
            refused[offset] = "is settled already"
        elif held_by in live:
            refused[offset] = f"is held by the live subscriber {held_by!r}: wait for its end, or stop that subscriber"
        else:
            found.append(RetriedMessage(key, offset, failed, token, held_by, last_error))
    if refused:
        raise OperationRefused(_refusal(ref, refused))
    return found


def _rows(session: Session, ref: GroupRef, offsets: Sequence[int]) -> Iterator[tuple[Any, ...]]:
    for chunk in session.chunks(offsets):
        yield from session.rows(
            "SELECT m.`offset`, m.partition_key, m.target_group, o.offset_acked, s.acked, s.retry_count, "
            "s.delivered_by, s.delivery_token, s.last_error "
            f"FROM {session.dialect.rows(('o',), len(chunk))} "
            f"{session.dialect.join_to(LOG, 'm')} ON m.`offset` = v.o AND m.topic = %s "
            f"{session.dialect.join_to(OFFSETS, 'o', left=True)} ON o.consumer_group = %s AND o.topic = %s "
            "AND o.partition_key = m.partition_key "
            f"{session.dialect.join_to(STATE, 's', left=True)} ON s.consumer_group = %s AND s.topic = %s "
            "AND s.partition_key = m.partition_key AND s.message_offset = m.`offset`",
            (*chunk, ref.topic, *ref, *ref),
        )


def _refusal(ref: GroupRef, refused: Mapping[int, str]) -> str:
    said = [f"message {offset} {why}" for offset, why in list(refused.items())[:REASONS]]
    more = f"; and {len(refused) - REASONS} more" if len(refused) > REASONS else ""
    return f"Nothing was dead-lettered for {ref}: {'; '.join(said)}{more}."


def _listed(offsets: Sequence[int]) -> str:
    return ("message " if len(offsets) == 1 else "messages ") + ", ".join(map(str, offsets))

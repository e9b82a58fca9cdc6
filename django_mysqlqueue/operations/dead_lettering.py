"""Dead-letter: an operator rejects messages that a group is retrying.

The reject is written like a subscriber's (``settling.settle``), so state, watermark and dead letter change together or
not at all. The group's revision increases, because owners of ordered partitions keep backoffs in memory, and with
``on_failure="block"`` wait for the message.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Unpack

from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext

from django_mysqlqueue.arguments import spelled_out
from django_mysqlqueue.db.tables import LOG, OFFSETS, STATE
from django_mysqlqueue.exceptions import OperationRefused
from django_mysqlqueue.operations.arguments import offsets_of, texts
from django_mysqlqueue.operations.declaring import How, Work, operating
from django_mysqlqueue.operations.lookups import check_known, group_of, unsettled_by_id
from django_mysqlqueue.operations.results import Result, ends_keys, result_of
from django_mysqlqueue.options.conf import get_settings
from django_mysqlqueue.options.topics import dlq_topic, is_dlq
from django_mysqlqueue.service import audit, coalescing, groups, heartbeats, settling, watermarks
from django_mysqlqueue.service.audit import By
from django_mysqlqueue.service.deliveries import Action, Claimed, Settlement
from django_mysqlqueue.service.losses import HELD_BY
from django_mysqlqueue.service.messages import ERROR_LENGTH
from django_mysqlqueue.service.refs import GroupRef
from django_mysqlqueue.sql.connection import apart
from django_mysqlqueue.sql.session import Session, run
from django_mysqlqueue.text.error_texts import BY_OPERATOR

DEAD_LETTER = audit.Action("dead_letter", gettext_lazy("Dead-letter"), audit.DELIVERIES)
MOST = 500
"""Maximum number of messages per call, which is one transaction."""
NAMED = 5
"""Maximum number of messages that a preview describes one by one."""
REASONS = 5
"""Maximum number of messages for which a refusal says why."""


@dataclass(frozen=True, slots=True)
class RetriedMessage:
    """A message that its group has claimed and not settled, and that no live subscriber holds."""

    key: str
    offset: int
    failed: int
    """Number of failed attempts."""
    token: int
    held_by: str
    """The lost subscriber that held it; empty if it waits."""
    last_error: str


@spelled_out
def dead_letter(
    group: str,
    topic: str,
    *,
    ids: Sequence[str] | None = None,
    offsets: Sequence[int] | None = None,
    missing_ok: bool = False,
    **how: Unpack[How],
) -> Result:
    """Move messages of a consumer group to the DLQ instead of retrying them.

    Their remaining attempts are skipped.

    A message qualifies while it waits for another attempt, or if the subscriber that held it was lost.

    Args:
        group: the consumer group.
        topic: the topic that it reads.
        ids: ids of the messages, as ``publish`` returned them.
        offsets: offsets of the messages in the log; together with ``ids``, at most 500.
        missing_ok: ignore messages at ``offsets`` that do not qualify, instead of refusing the operation. It is refused
            if none qualifies.
        reason: why, for the audit log and the dead letters' ``last_error``.

    Raises:
        OperationRefused: there is no such group; its topic is a DLQ topic; a seek or drop of it has not finished; or a
            message does not qualify. The text says which and why; nothing was changed.
        CommitOutcomeUnknown: the connection was lost during COMMIT. Run it again: messages that were dead-lettered are
            then refused as settled.
    """
    with operating(how, group=group, topic=topic) as work:
        ref = group_of(work.using, group, topic).ref
        if ids is None and offsets is None:
            raise OperationRefused("ids or offsets: pass at least one message")
        ids = [] if ids is None else texts("ids", ids)
        by_id = unsettled_by_id(work.using, ref, ids)
        check_known(f"The group {ref} has not claimed these messages, or has settled them: {{}}.", ids, by_id)
        wanted = [offset for found in by_id.values() for offset in found]
        wanted += [] if offsets is None else offsets_of(offsets)
        return _dead_letter(work, ref, wanted, missing_ok=missing_ok)


@spelled_out
def dead_letter_found(group: str, topic: str, offsets: Sequence[int], kind: str, **how: Unpack[How]) -> Result:
    """Dead-letter messages that somebody has found by the kind of their error, if they still qualify."""
    with operating(how, group=group, topic=topic) as work:
        ref = group_of(work.using, group, topic).ref
        return _dead_letter(work, ref, offsets, kind=kind, missing_ok=True)


def _dead_letter(
    work: Work, ref: GroupRef, wanted: Sequence[int], *, kind: str | None = None, missing_ok: bool
) -> Result:
    (alias, by, dry_run), dlq = work, dlq_topic(ref.topic)
    if not dry_run:
        changed = dead_letter_now(alias, ref, wanted, **by, kind=kind, missing_ok=missing_ok)
        said = _("Messages dead-lettered to %(topic)s: %(number)s.") % {
            "topic": dlq,
            "number": f"{changed:,}",
        }
        return result_of(Result, DEAD_LETTER, changed, said, dry_run=False)
    found = find(alias, ref, wanted, missing_ok=missing_ok)
    summary = [
        _("Messages of the group %(ref)s that will be dead-lettered to %(topic)s: %(number)s.")
        % {"ref": ref, "topic": dlq, "number": f"{len(found):,}"},
        *(
            ngettext(
                "Message %(offset)s has failed %(failed)s time.",
                "Message %(offset)s has failed %(failed)s times.",
                one.failed,
            )
            % {"offset": one.offset, "failed": one.failed}
            for one in found[:NAMED]
        ),
        _("Dead letters get no further attempts until they are redriven."),
    ]
    warnings = (ends_keys(),) if coalescing.has_key(Session(alias), [one.offset for one in found]) else ()
    return result_of(Result, DEAD_LETTER, len(found), *summary, dry_run=True, warnings=warnings)


def find(using: str, ref: GroupRef, offsets: Collection[int], *, missing_ok: bool = False) -> list[RetriedMessage]:
    """Return the messages that ``dead_letter_now`` would dead-letter, or refuse as it does."""
    session = Session(using)
    if groups.find(using, ref) is None:
        raise OperationRefused(groups.no_group_text(ref))
    return _find(session, ref, offsets, missing_ok=missing_ok)


def dead_letter_now(
    using: str,
    ref: GroupRef,
    offsets: Collection[int],
    *,
    kind: str | None = None,
    missing_ok: bool = False,
    **by: Unpack[By],
) -> int:
    """Dead-letter messages that a group is retrying: all of them or none, unless ``missing_ok``; return how many.

    A message that a live subscriber holds is refused, since its handler may succeed at any moment.

    ``kind``: the kind of error by which they were found, for the audit log.
    """

    def reject(session: Session) -> int:
        groups.refuse_unfinished(ref, groups.lock(session, ref).after_seek)
        found = _find(session, ref, offsets, missing_ok=missing_ok)
        rejects = [Settlement(_claimed(ref, one, by["actor"]), Action.REJECT, 0, _error(one, **by)) for one in found]
        # Skip locked rows: the transaction that holds a partition's offsets row moves its watermark.
        locked = watermarks.lock(session, ref, {one.key for one in found}, skip_locked=True)
        flushed = settling.settle(session, ref, rejects, locked, max_attempts=None)
        changed = sorted(outcome.delivery.offset for outcome in (*flushed.locked, *flushed.stale))
        done = sorted({one.offset for one in found}.difference(changed))
        if changed and not (missing_ok and done):
            raise OperationRefused(f"Nothing was changed. Being settled right now: {_listed(changed)}. Try again.")
        watermarks.store(session, ref, locked, flushed.watermarks, {})
        groups.change(session, ref, revise=True)
        detail = _listed(done) if kind is None else audit.kind_text(kind)
        audit.once(session, DEAD_LETTER, len(done), ref, detail=detail, **by)
        return len(done)

    with apart(using):
        return run(using, reject)


def _claimed(ref: GroupRef, one: RetriedMessage, actor: str) -> Claimed:
    # ``delivered_at`` stays 0, since no attempt was started: that marks it in the recorded deliveries.
    return Claimed(ref, one.key, one.offset, one.token, one.failed, suspect=False, size=0, by=actor)


def _error(one: RetriedMessage, *, actor: str, reason: str = "") -> str:
    """Return the error of the dead letter. Lists show its last line, which is that of the last attempt's error."""
    text = f"{BY_OPERATOR}{actor}" + (f": {reason}" if reason else ".")
    room = max(0, ERROR_LENGTH - len(text) - 2)
    rest = one.last_error if len(one.last_error) <= room else one.last_error[len(one.last_error) - room :]
    return f"{text}\n\n{rest}" if rest else text


def _find(session: Session, ref: GroupRef, offsets: Collection[int], *, missing_ok: bool) -> list[RetriedMessage]:
    if is_dlq(ref.topic):
        raise OperationRefused(
            f"{ref.topic!r} is a DLQ topic and has no DLQ of its own: discard the message (queuediscard), or skip it "
            "(queueseek)."
        )
    wanted = sorted(set(offsets))
    if not wanted:
        raise OperationRefused("Pass at least one offset.")
    if len(wanted) > MOST:
        raise OperationRefused(f"{len(wanted):,} offsets were passed, but the maximum is {MOST}.")
    rows = {row[0]: row[1:] for row in _rows(session, ref, wanted)}
    live = heartbeats.live(session, [ref], int(get_settings().lease_duration * 1000))[ref]
    found: list[RetriedMessage] = []
    refused: dict[int, str] = {}
    for offset in wanted:
        key, target, watermark, acked, failed, held_by, token, last_error = rows.get(offset, (None,) * 8)
        if key is None:
            refused[offset] = f"is not in the log of {ref.topic!r}"
        elif target not in ("", ref.group):
            refused[offset] = f"is only for the group {target!r}"
        elif acked is None and (watermark is None or offset > watermark):
            refused[offset] = "has not been claimed yet (use queueseek to skip it)"
        elif acked is None or acked:
            refused[offset] = "is already settled"
        elif held_by in live:
            refused[offset] = (
                f"is in flight at the live subscriber {held_by!r} (wait until its attempt ends, or stop the subscriber)"
            )
        else:
            found.append(RetriedMessage(key, offset, failed, token, held_by, last_error))
    if refused and not (missing_ok and found):
        raise OperationRefused(_refusal(ref, refused))
    return found


def _rows(session: Session, ref: GroupRef, offsets: Sequence[int]) -> list[tuple[Any, ...]]:
    return session.joined(
        "SELECT m.`offset`, m.partition_key, m.target_group, o.offset_acked, s.acked, s.retry_count, "
        f"{HELD_BY}, s.delivery_token, s.last_error",
        "o",
        offsets,
        f"{session.dialect.join_to(LOG, 'm')} ON m.`offset` = v.o AND m.topic = %s "
        f"{session.dialect.join_to(OFFSETS, 'o', left=True)} ON o.consumer_group = %s AND o.topic = %s "
        "AND o.partition_key = m.partition_key "
        f"{session.dialect.join_to(STATE, 's', left=True)} ON s.consumer_group = %s AND s.topic = %s "
        "AND s.partition_key = m.partition_key AND s.message_offset = m.`offset`",
        after=(ref.topic, *ref, *ref),
    )


def _refusal(ref: GroupRef, refused: Mapping[int, str]) -> str:
    texts = [f"message {offset} {why}" for offset, why in list(refused.items())[:REASONS]]
    more = f"; and {len(refused) - REASONS} more" if len(refused) > REASONS else ""
    return f"Nothing was dead-lettered for {ref}: {'; '.join(texts)}{more}."


def _listed(offsets: Sequence[int]) -> str:
    return ("message " if len(offsets) == 1 else "messages ") + ", ".join(map(str, offsets))

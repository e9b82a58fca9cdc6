"""Operations on a consumer group: pause, resume, seek, drop, mode."""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Callable
from typing import Literal

from django.utils.translation import gettext as _

from django_mysqlqueue import naming
from django_mysqlqueue.arguments import checked
from django_mysqlqueue.conf import get_settings
from django_mysqlqueue.exceptions import OperationRefused
from django_mysqlqueue.humanize import up_to
from django_mysqlqueue.models import ConsumerGroup
from django_mysqlqueue.operations import dropping, group_mode, pausing, redriving, seeking
from django_mysqlqueue.operations.arguments import alias_for, milliseconds
from django_mysqlqueue.operations.limits import COUNTED, LIMITS
from django_mysqlqueue.operations.lookups import group_of
from django_mysqlqueue.operations.results import DropResult, Result, SeekResult, ends_keys, result_of, sentence
from django_mysqlqueue.service import heartbeats, job_results, retention
from django_mysqlqueue.service.dead_letters import DeadLetterFilter
from django_mysqlqueue.service.refs import GroupRef
from django_mysqlqueue.sql.session import Session
from django_mysqlqueue.subscriptions.effective import known_handlers


def pause(
    group: str, topic: str, *, actor: str, reason: str = "", using: str | None = None, dry_run: bool = False
) -> Result:
    """Pause a consumer group: its subscribers finish the messages that they have claimed and claim no more.

    They keep their leases. Until you resume the group, messages stay in the log, and GC keeps them for it.

    Args:
        group: the consumer group.
        topic: the topic that it reads.
        actor: who runs the operation, for the audit log.
        reason: why, for the audit log.
        using: alias of the queue's database (default: ``MYSQLQUEUE["DATABASE"]``, else the router's choice).
        dry_run: change nothing; return what would be changed.

    Raises:
        OperationRefused: there is no such group, or a seek or drop of it has not finished.
    """
    with alias_for(using, actor, reason, group=group, topic=topic) as alias:
        found = group_of(alias, group, topic)
        number = int(not found.paused)
        if not dry_run:
            number = int(pausing.pause(alias, found.ref, actor=actor, reason=reason))
        text = sentence(
            number,
            dry_run=dry_run,
            planned=_(
                "The group %(ref)s will be paused: its subscribers finish the messages that they have claimed and "
                "claim no more. Messages stay in the log, and GC keeps them for the group."
            ),
            done=_("The group %(ref)s is paused."),
            nothing=_("The group %(ref)s is already paused."),
        )
        return result_of(Result, "pause", number, text % {"ref": found.ref}, dry_run=dry_run)


def resume(
    group: str, topic: str, *, actor: str, reason: str = "", using: str | None = None, dry_run: bool = False
) -> Result:
    """Resume a paused consumer group. Its subscribers notice within ``LEASE_RENEWAL_INTERVAL``.

    Args:
        group: the consumer group.
        topic: the topic that it reads.
        actor: who runs the operation, for the audit log.
        reason: why, for the audit log.
        using: alias of the queue's database (default: ``MYSQLQUEUE["DATABASE"]``, else the router's choice).
        dry_run: change nothing; return what would be changed.

    Raises:
        OperationRefused: there is no such group, or a seek or drop of it has not finished.
    """
    with alias_for(using, actor, reason, group=group, topic=topic) as alias:
        found = group_of(alias, group, topic)
        number = int(found.paused)
        if not dry_run:
            number = int(pausing.resume(alias, found.ref, actor=actor, reason=reason))
        text = sentence(
            number,
            dry_run=dry_run,
            planned=_("The group %(ref)s will be resumed. Its subscribers notice within %(seconds)s seconds."),
            done=_("The group %(ref)s is resumed."),
            nothing=_("The group %(ref)s is not paused."),
        )
        values = {"ref": found.ref, "seconds": f"{get_settings().lease_renewal_interval:g}"}
        return result_of(Result, "resume", number, text % values, dry_run=dry_run)


@checked(OperationRefused, only=("progress",))
def seek(
    group: str,
    topic: str,
    position: Literal["earliest", "latest"] | int | None = None,
    *,
    time: datetime.datetime | None = None,
    actor: str,
    reason: str = "",
    using: str | None = None,
    dry_run: bool = False,
    progress: Callable[[int], object] = lambda rows: None,
) -> SeekResult:
    """Move a consumer group's position: back to replay messages, forward to skip them.

    Its subscribers can keep running. Deliveries in flight are revoked: an ack that commits later changes nothing, and
    atomic handlers roll back. If the seek is interrupted, the group stays paused: run it again.

    Args:
        group: the consumer group.
        topic: the topic that it reads.
        position: ``"earliest"``, ``"latest"`` (after the newest message), or the offset to continue from.
        time: instead of a position: continue from the first message that entered the log at or after this time; a
            naive datetime is in the project's time zone.
        actor: who runs the operation, for the audit log.
        reason: why, for the audit log.
        using: alias of the queue's database (default: ``MYSQLQUEUE["DATABASE"]``, else the router's choice).
        dry_run: change nothing; count the messages that would be replayed and skipped.
        progress: called after each transaction with the number of partitions and deliveries that it reset.

    Raises:
        OperationRefused: there is no such group; the position is neither in the log nor just after it; another seek or
            drop of the group has started in the meantime; or other transactions keep its deliveries locked.
    """
    with alias_for(using, actor, reason, group=group, topic=topic) as alias:
        found = group_of(alias, group, topic, unfinished=["seek"])
        ref = found.ref
        stays = found.paused and found.after_seek in ("", ConsumerGroup.AfterSeek.STAY)
        if (position is None) == (time is None):
            raise OperationRefused("position or time: pass exactly one of them")
        if time is not None:
            target = seeking.position_of(alias, time_ms=milliseconds("time", time))
            named = f"time {time.isoformat()}"
        else:
            assert position is not None  # noqa: S101  # see above
            target, named = seeking.position_of(alias, position), str(position)
        if not dry_run:
            seeking.seek(alias, ref, target, actor=actor, reason=reason, detail=named, progress=progress)
            values = {"ref": ref, "offset": target.offset + 1}
            text = _("The group %(ref)s continues with the first message at or after offset %(offset)s.")
            warnings = (_stays_paused(),) if stays else ()
            offset = target.offset + 1
            return result_of(SeekResult, "seek", 1, text % values, dry_run=False, warnings=warnings, offset=offset)
        return previewed_seek(ref, named, seeking.preview(alias, ref, target), stays=stays)


def previewed_seek(ref: GroupRef, position: str, found: seeking.Preview, *, stays: bool = False) -> SeekResult:
    """Return the result of a previewed seek.

    ``stays``: True if the group is paused and stays paused.
    """
    values = {"ref": ref, "offset": found.position.offset + 1, "position": position}
    return result_of(
        SeekResult,
        "seek",
        1,
        _("The group %(ref)s will continue from offset %(offset)s (%(position)s).") % values,
        _("Settled messages that will be replayed: %(number)s.") % {"number": up_to(COUNTED, found.replayed)},
        _("Unsettled messages that will be skipped: %(number)s.") % {"number": up_to(COUNTED, found.skipped)},
        _(
            "Deliveries in flight are revoked. A message that is dead-lettered before its delivery is revoked stays in "
            "the DLQ."
        ),
        dry_run=True,
        warnings=_warnings(ref, found, stays=stays),
        offset=found.position.offset + 1,
        replayed=found.replayed,
        skipped=found.skipped,
        exact=found.exact,
    )


def _stays_paused() -> str:
    return _("The group is paused and stays paused until you resume it.")


def _ended_jobs() -> str:
    return _(
        "The jobs of these messages will be FAILED with JobSkipped, and the later jobs of their chains with "
        "EarlierJobFailed. They run only if the messages are delivered again."
    )


def _warnings(ref: GroupRef, found: seeking.Preview, *, stays: bool) -> tuple[str, ...]:
    warnings = [_stays_paused()] if stays else []
    if found.skipped:
        warnings.append(_("The group will never handle the messages that it skips."))
        if job_results.is_of_jobs(ref):
            warnings.append(_ended_jobs())
        if found.coalesces:
            warnings.append(ends_keys())
    if not found.exact:
        warnings.append(_stopped())
    return tuple(warnings)


def _stopped() -> str:
    return _("Counting stopped at its limit of messages or time: the numbers may be higher.")


@checked(OperationRefused, only=("progress",))
def drop_group(
    group: str,
    topic: str,
    *,
    actor: str,
    reason: str = "",
    using: str | None = None,
    dry_run: bool = False,
    progress: Callable[[int], object] = lambda rows: None,
) -> DropResult:
    """Delete a consumer group with all its state. GC no longer keeps messages for it.

    A subscriber of the group that starts later registers it again. If the drop is interrupted, the group stays paused:
    run it again.

    Args:
        group: the consumer group.
        topic: the topic that it reads.
        actor: who runs the operation, for the audit log.
        reason: why, for the audit log.
        using: alias of the queue's database (default: ``MYSQLQUEUE["DATABASE"]``, else the router's choice).
        dry_run: change nothing; return what would be changed.
        progress: called after each transaction with the number of partitions and deliveries that it deleted.

    Raises:
        OperationRefused: there is no such group; another drop of it has started in the meantime; or other transactions
            keep its deliveries locked.
    """
    with alias_for(using, actor, reason, group=group, topic=topic) as alias:
        ref = group_of(alias, group, topic, unfinished=["seek", "drop"]).ref
        if not dry_run:
            changed = int(dropping.drop(alias, ref, actor=actor, reason=reason, progress=progress))
            text = _("The group %(ref)s is dropped.") if changed else _("The group %(ref)s no longer exists.")
            return result_of(DropResult, "drop", changed, text % {"ref": ref}, dry_run=False, group=group, topic=topic)
        session = Session(alias)
        found = seeking.preview(alias, ref, seeking.position_of(alias, "latest"))
        kept, in_time = retention.held_back_by(session, ref, most=COUNTED, seconds=LIMITS.seconds)
        found = dataclasses.replace(found, exact=found.exact and in_time)
        live = heartbeats.live(session, [ref], int(get_settings().lease_duration * 1000))[ref]
        failed = DeadLetterFilter(naming.dlq_topic(ref.topic), group=ref.group)
        dead = redriving.count(alias, failed, most=COUNTED)
        return previewed_drop(ref, found, kept, tuple(live), dead)


def previewed_drop(ref: GroupRef, found: seeking.Preview, kept: int, live: tuple[str, ...], dead: int) -> DropResult:
    """Return the result of a previewed drop.

    ``kept``: number of messages that GC keeps only for the group.
    """
    warnings = [] if found.exact else [_stopped()]
    if found.skipped and job_results.is_of_jobs(ref):
        warnings.append(_ended_jobs())
    if dead:
        text = _(
            "Dead letters of the group: %(number)s. They stay in %(topic)s, but cannot be redriven unless the group is "
            "registered again."
        )
        warnings.append(text % {"number": up_to(COUNTED, dead), "topic": naming.dlq_topic(ref.topic)})
    if live:
        text = _("Live subscribers: %(names)s. They stop claiming: stop them before you drop the group.")
        warnings.append(text % {"names": ", ".join(live)})
    handler = known_handlers().get(ref)
    if handler is not None and handler.start == "earliest":
        text = _(
            "This project has a handler for the group. A subscriber that starts, or migrate, registers it again: "
            'the group then receives all messages that are still in the log (start="earliest").'
        )
        warnings.append(text)
    elif handler is not None:
        text = _(
            "This project has a handler for the group. A subscriber that starts, or migrate, registers it again: "
            'the group then starts after the newest message (start="latest").'
        )
        warnings.append(text)
    return result_of(
        DropResult,
        "drop",
        1,
        _("The group %(ref)s and its position in every partition will be deleted.") % {"ref": ref},
        _("Messages that the group has not settled: %(number)s.") % {"number": up_to(COUNTED, found.skipped)},
        _("Messages that GC keeps only for this group, and may delete afterwards: %(number)s.")
        % {"number": up_to(COUNTED, kept)},
        dry_run=True,
        warnings=tuple(warnings),
        group=ref.group,
        topic=ref.topic,
        unsettled=found.skipped,
        kept_for_it_alone=kept,
        live_subscribers=live,
    )


def set_group_mode(
    group: str,
    topic: str,
    mode: Literal["ordered", "shared"],
    *,
    actor: str,
    reason: str = "",
    using: str | None = None,
    dry_run: bool = False,
) -> Result:
    """Change the delivery mode of a consumer group. Its subscribers must be stopped.

    Args:
        group: the consumer group.
        topic: the topic that it reads.
        mode: the mode that the group's handler will declare.
        actor: who runs the operation, for the audit log.
        reason: why, for the audit log.
        using: alias of the queue's database (default: ``MYSQLQUEUE["DATABASE"]``, else the router's choice).
        dry_run: change nothing; return what would be changed.

    Raises:
        OperationRefused: there is no such group or mode; the group has live subscribers; or a seek or drop of it has
            not finished.
    """
    with alias_for(using, actor, reason, group=group, topic=topic) as alias:
        if mode not in ConsumerGroup.Mode.values:
            raise OperationRefused(f"mode {mode!r}: must be one of {', '.join(map(repr, ConsumerGroup.Mode.values))}")
        found = group_of(alias, group, topic)
        number = int(found.mode != mode)
        lease_ms = int(get_settings().lease_duration * 1000)
        if number and dry_run:
            group_mode.refuse_live(Session(alias), found.ref, lease_ms)
        elif number:
            number = int(group_mode.set_mode(alias, found.ref, mode, actor=actor, reason=reason, lease_ms=lease_ms))
        text = sentence(
            number,
            dry_run=dry_run,
            planned=_("The mode of the group %(ref)s will change to %(mode)s."),
            done=_("The mode of the group %(ref)s is now %(mode)s."),
            nothing=_("The mode of the group %(ref)s is already %(mode)s."),
        )
        return result_of(Result, "mode", number, text % {"ref": found.ref, "mode": mode}, dry_run=dry_run)

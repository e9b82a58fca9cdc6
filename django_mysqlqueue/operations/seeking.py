"""Seek: move a group's position in the log, forward or back, while its subscribers run.

The group is paused and gets its new start under its row's exclusive lock, so no claim is under way and none begins.
Then, partition by partition, both offsets are stored before the state rows are deleted: deliveries in flight have no
row with their token any more, so their outcomes change nothing. Finally the group resumes with a new revision, which
makes its subscribers discard their state in memory. An interrupted seek leaves the group paused until it is run again.
"""

from __future__ import annotations

import datetime
import time as clock
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Unpack

from django.db.models.expressions import RawSQL
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from django_mysqlqueue.arguments import checked, spelled_out
from django_mysqlqueue.db.tables import LOG, OFFSETS, STATE
from django_mysqlqueue.exceptions import OperationRefused
from django_mysqlqueue.models import ConsumerGroup, ConsumerOffset, DeliveryState
from django_mysqlqueue.operations import steps
from django_mysqlqueue.operations.arguments import milliseconds
from django_mysqlqueue.operations.declaring import How, operating
from django_mysqlqueue.operations.limits import COUNTED, LIMITS, OperationLimits
from django_mysqlqueue.operations.lookups import group_of
from django_mysqlqueue.operations.results import SeekResult, ends_keys, result_of
from django_mysqlqueue.service import (
    audit,
    coalescing,
    groups,
    job_messages,
    job_results,
    log,
    partitions,
    unclaimed,
    watermarks,
)
from django_mysqlqueue.service.audit import By
from django_mysqlqueue.service.refs import GroupRef
from django_mysqlqueue.sql.connection import apart
from django_mysqlqueue.sql.session import UNION_TERMS, Session, pieces, run
from django_mysqlqueue.text.humanize import up_to

AfterSeek = ConsumerGroup.AfterSeek
SEEK = audit.Action("seek", gettext_lazy("Seek"), audit.DELIVERIES)


@dataclass(frozen=True, slots=True)
class Position:
    """A group's new position: everything at or below ``offset`` counts as settled."""

    offset: int


@dataclass(frozen=True, slots=True)
class Preview:
    """The preview of a seek: counts of the group's messages, up to ``OperationLimits.counted``."""

    position: Position
    replayed: int
    """Settled messages that would be replayed."""
    skipped: int
    """Unsettled messages that would never be delivered."""
    exact: bool = True
    """False if counting stopped after ``OperationLimits.read`` messages, or ``.seconds``: both may be more."""
    coalesces: bool = False
    """Whether messages of the topic have coalesce keys."""


@spelled_out
@checked(OperationRefused, only=("progress",))
def seek(
    group: str,
    topic: str,
    position: Literal["earliest", "latest"] | int | None = None,
    *,
    time: datetime.datetime | None = None,
    progress: Callable[[int], object] = lambda rows: None,
    **how: Unpack[How],
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
        dry_run: change nothing; count the messages that would be replayed and skipped.
        progress: called after each transaction with the number of partitions and deliveries that it reset.

    Raises:
        OperationRefused: there is no such group; the position is neither in the log nor just after it; another seek or
            drop of the group has started in the meantime; or other transactions keep its deliveries locked.
    """
    with operating(how, group=group, topic=topic) as (alias, by, dry_run):
        found = group_of(alias, group, topic, unfinished=["seek"])
        ref = found.ref
        stays = found.paused and found.after_seek in ("", ConsumerGroup.AfterSeek.STAY)
        if (position is None) == (time is None):
            raise OperationRefused("position or time: pass exactly one of them")
        if time is not None:
            target = position_of(alias, time_ms=milliseconds("time", time))
            named = f"time {time.isoformat()}"
        else:
            assert position is not None  # noqa: S101  # see above
            target, named = position_of(alias, position), str(position)
        if not dry_run:
            move(alias, ref, target, **by, detail=named, progress=progress)
            values = {"ref": ref, "offset": target.offset + 1}
            text = _("The group %(ref)s continues with the first message at or after offset %(offset)s.")
            warnings = (_stays_paused(),) if stays else ()
            offset = target.offset + 1
            return result_of(SeekResult, SEEK, 1, text % values, dry_run=False, warnings=warnings, offset=offset)
        return previewed_seek(ref, named, preview(alias, ref, target), stays=stays)


def previewed_seek(ref: GroupRef, position: str, found: Preview, *, stays: bool = False) -> SeekResult:
    """Return the result of a preview. ``stays``: True if the group is paused and stays paused."""
    values = {"ref": ref, "offset": found.position.offset + 1, "position": position}
    return result_of(
        SeekResult,
        SEEK,
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


def ended_jobs() -> str:
    """Return what happens to the jobs of messages that a group skips."""
    return _(
        "The jobs of these messages will be FAILED with JobSkipped, and the later jobs of their chains with "
        "EarlierJobFailed. They run only if the messages are delivered again."
    )


def _warnings(ref: GroupRef, found: Preview, *, stays: bool) -> tuple[str, ...]:
    warnings = [_stays_paused()] if stays else []
    if found.skipped:
        warnings.append(_("The group will never handle the messages that it skips."))
        if job_results.is_of_jobs(ref):
            warnings.append(ended_jobs())
        if found.coalesces:
            warnings.append(ends_keys())
    if not found.exact:
        warnings.append(counting_stopped())
    return tuple(warnings)


def counting_stopped() -> str:
    """Return the warning of a preview that has not counted all."""
    return _("Counting stopped at its limit of messages or time: the numbers may be higher.")


def position_of(
    using: str, target: Literal["earliest", "latest"] | int = "latest", *, time_ms: int | None = None
) -> Position:
    """Return the position of a target in the log as it is now.

    ``time_ms``: instead of a target: the next message is the first that entered the log at or after this time.
    """
    session = Session(using)
    if time_ms is not None:
        return Position(log.first_since(session, time_ms) - 1)
    if target == "earliest":
        return Position(0)
    if target == "latest":
        return Position(log.end_of_log(session))
    if isinstance(target, bool) or not isinstance(target, int) or target < 1:
        raise OperationRefused(f"offset {target!r}: must be 'earliest', 'latest' or an integer of at least 1")
    position = Position(target - 1)
    _refuse_future(session, position)
    return position


def _refuse_future(session: Session, position: Position) -> None:
    last, first = log.end_of_log(session), position.offset + 1
    if position.offset > last:
        raise OperationRefused(
            f"offset {first}: the log ends at {last}; the group would skip future messages before {first}"
        )


# -- preview ------------------------------------------------------------------


def preview(using: str, ref: GroupRef, position: Position, limits: OperationLimits = LIMITS) -> Preview:
    """Count the messages that a seek would replay and skip."""
    session = Session(using)
    registered = groups.find(using, ref)
    if registered is None:
        raise OperationRefused(groups.no_group_text(ref))
    settled_behind = _settled(session, ref, position.offset, above=True, most=limits.counted)
    settled_before = _settled(session, ref, position.offset, above=False, most=limits.counted)
    replayed = _Counter(session, ref, limits, limits.counted - settled_behind)
    # Messages settled above the watermark are subtracted afterwards.
    skipped = _Counter(session, ref, limits, limits.counted + settled_before)
    after, whole = None, False
    began = clock.monotonic()
    while not whole and not (replayed.ended and skipped.ended):
        if after is not None and clock.monotonic() - began > limits.seconds:
            replayed.stopped = skipped.stopped = True
            break
        ends, whole = partitions.last_offsets(session, ref.topic, limit=limits.rows, after=after)
        after = max(ends, default=None)
        acked = unclaimed.watermarks(session, ref, ends, registered.start_offset)
        replayed.count({key: (position.offset, min(acked[key], end)) for key, end in ends.items()})
        skipped.count({key: (acked[key], min(position.offset, end)) for key, end in ends.items()})
    again = min(replayed.found + settled_behind, limits.counted)
    never = min(max(0, skipped.found - settled_before), limits.counted)
    exact = not (replayed.stopped and again < limits.counted) and not (skipped.stopped and never < limits.counted)
    return Preview(position, again, never, exact, coalescing.has_keys(session, ref.topic))


class _Counter:
    """Counts a group's messages in ranges of partitions; no read begins after ``OperationLimits.read`` rows."""

    def __init__(self, session: Session, ref: GroupRef, limits: OperationLimits, most: int) -> None:
        self._session = session
        self._ref = ref
        self._limits = limits
        self._most = most
        self._read = 0
        self.found = 0
        self.stopped = False
        """True if there may be more messages than it has read."""

    @property
    def ended(self) -> bool:
        """True if it counts no further."""
        return self.stopped or self.found >= self._most

    def count(self, ranges: Mapping[str, tuple[int, int]]) -> None:
        """Count the messages in some ranges."""
        items = [(key, above, upto) for key, (above, upto) in sorted(ranges.items()) if above < upto]
        for piece in pieces(items, UNION_TERMS):
            # Count long ones one by one, so that together they cost no more than what is left.
            for one in self._look(piece, self._limits.read_first):
                rest = [one]
                while rest:
                    rest = self._look(rest, max(self._limits.read_first, self._most - self.found))

    def _look(self, items: Sequence[tuple[str, int, int]], limit: int) -> list[tuple[str, int, int]]:
        """Read up to ``limit`` messages of each range; return the rest of the ranges that have more."""
        if not items or self.ended:
            return []
        if self._read >= self._limits.read:
            self.stopped = True
            return []
        one = (
            "SELECT %s AS k, COUNT(*) AS n, COUNT(CASE WHEN w.target_group IN ('', %s) THEN 1 END) AS own, "
            f"MAX(w.place) AS top FROM (SELECT m.`offset` AS place, m.target_group FROM {LOG} m"
            f"{self._session.dialect.force_index('queue_messages_partition')} "
            "WHERE m.topic = %s AND m.partition_key = %s AND m.`offset` > %s AND m.`offset` <= %s "
            "ORDER BY m.`offset` LIMIT %s) w"
        )
        group, topic = self._ref
        rows = self._session.each(one, [(key, group, topic, key, above, upto, limit) for key, above, upto in items])
        ends = {key: upto for key, _above, upto in items}
        for _key, read, own, _last in rows:
            self._read += int(read)
            self.found += int(own)
        return [(key, int(last), ends[key]) for key, read, _own, last in rows if read == limit and last < ends[key]]


def _settled(session: Session, ref: GroupRef, offset: int, *, above: bool, most: int) -> int:
    """Count settled rows above the watermark, on one side of an offset, up to ``most``."""
    (number,) = session.one(
        f"SELECT COUNT(*) FROM (SELECT 1 FROM {STATE}{session.dialect.force_index('queue_delivery_state_due')} "
        f"WHERE consumer_group = %s AND topic = %s AND acked = %s AND message_offset {'>' if above else '<='} %s "
        "LIMIT %s) n",
        (*ref, True, offset, most),
    )
    return int(number)


# -- the operation ------------------------------------------------------------


def move(
    using: str,
    ref: GroupRef,
    position: Position,
    *,
    detail: str = "",
    progress: Callable[[int], object] = lambda rows: None,
    limits: OperationLimits = LIMITS,
    **by: Unpack[By],
) -> int:
    """Move a group's position; the group resumes from there unless it was paused before.

    Deliveries in flight are revoked: an ack, nack or reject that commits after the seek has deleted the delivery
    changes nothing. One that commits before that is kept: the writes of an atomic handler stay, and the
    dead letter stays, even if the seek replays its message.

    ``detail``: the position as the caller named it, for the audit log.

    Returns:
        The number of deleted deliveries: in flight, waiting, or settled above the watermark.
    """
    with apart(using):
        operation = run(using, lambda session: _begin(session, ref, position, detail, **by))
        beat = audit.beats(using, operation)
        with audit.stopping(using, operation, steps.Stopped):
            after: str | None = ""
            while after is not None:
                last: str = after
                reset, after = run(
                    using,
                    lambda session, last=last: _reset_offsets(session, ref, position, operation, last, limits.rows),  # type: ignore[misc]
                )
                beat()
                progress(reset)
            forgotten = steps.delete_all(
                using, ref, lambda session: _delete_states(session, ref, operation, limits), progress, limits, beat=beat
            )
            run(using, lambda session: _end(session, ref, operation))
        job_messages.end_all(using, ref, seconds=limits.jobs_seconds)
    return forgotten


def _begin(session: Session, ref: GroupRef, position: Position, detail: str, **by: Unpack[By]) -> int:
    found = groups.lock(session, ref)
    if found.after_seek in (AfterSeek.DROPPED, AfterSeek.MOVES):
        groups.refuse_unfinished(ref, found.after_seek)
    _refuse_future(session, position)  # The position may come from a log that has lost its end since.
    after = found.after_seek or (AfterSeek.STAY if found.paused else AfterSeek.RESUME)
    offset = str(position.offset + 1)
    text = f"to offset {offset}" + (f" ({detail})" if detail not in ("", offset) else "")
    operation = steps.begin(
        session,
        ref,
        found,
        SEEK,
        deletes=(DeliveryState,),
        updates=(ConsumerOffset, *job_messages.changed(ref)),
        detail=text,
        **by,
    )
    groups.change(
        session,
        ref,
        paused=True,
        after_seek=after,
        operation=operation,
        start_offset=position.offset,
        sought_at=_now(session),
    )
    return operation


def _check(session: Session, ref: GroupRef, operation: int) -> None:
    steps.refuse_stopped(ref, operation, groups.fence(session, ref))


def _reset_offsets(
    session: Session, ref: GroupRef, position: Position, operation: int, above: str, most: int = LIMITS.rows
) -> tuple[int, str | None]:
    """Store both offsets of the next partitions; return how many, and the key after which to continue."""
    _check(session, ref, operation)
    comparison = ">" if above else ">="
    keys = [
        key
        for (key,) in session.rows(
            f"SELECT partition_key FROM {OFFSETS}{session.dialect.force_index('PRIMARY')} "
            f"WHERE consumer_group = %s AND topic = %s AND partition_key {comparison} %s "
            "ORDER BY partition_key LIMIT %s",
            (*ref, above, most),
        )
    ]
    locked = watermarks.lock(session, ref, keys)
    watermarks.reset_offsets(session, ref, sorted(locked), position.offset)
    return len(keys), keys[-1] if len(keys) == most else None


def _delete_states(session: Session, ref: GroupRef, operation: int, limits: OperationLimits = LIMITS) -> int | None:
    _check(session, ref, operation)
    return steps.delete_states(session, ref, operation, limits)


def _end(session: Session, ref: GroupRef, operation: int) -> None:
    found = groups.lock(session, ref)
    steps.refuse_stopped(ref, operation, found)
    groups.change(
        session,
        ref,
        revise=True,
        paused=found.after_seek == AfterSeek.STAY,
        after_seek=AfterSeek.NOTHING,
        operation=0,
        sought_at=_now(session),
    )
    audit.end(session, operation)


def _now(session: Session) -> RawSQL:
    """Return the current time as SQL: from now on, messages wait for the group."""
    return RawSQL(session.dialect.now_ms, ())  # noqa: S611  # a constant

"""Replay a range of the log into one group: publish copies of its messages for this group only.

A copy is a new message at the end of the log with ``target_group``, so the group's position does not move and other
groups get nothing. Its id is made from the name of the run and the offset of the original, so a copy that is published
twice is a duplicate.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Unpack

from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from django_mysqlqueue.arguments import checked, spelled_out
from django_mysqlqueue.db.tables import LOG, OFFSETS, OUTBOX, STATE
from django_mysqlqueue.exceptions import OperationRefused
from django_mysqlqueue.filter_policies import FilterPolicy
from django_mysqlqueue.names.ids import REPLAY_RUN, replay_id
from django_mysqlqueue.names.rules import KEY_LENGTH, REPLAYED_FROM
from django_mysqlqueue.operations.arguments import check_limit, offsets_of, text
from django_mysqlqueue.operations.declaring import How, operating
from django_mysqlqueue.operations.limits import COUNTED, LIMITS, OperationLimits
from django_mysqlqueue.operations.lookups import group_of
from django_mysqlqueue.operations.results import ReplayResult, result_of
from django_mysqlqueue.options.topics import is_dlq
from django_mysqlqueue.service import audit, groups, log, log_places, messages, partitions
from django_mysqlqueue.service.audit import By
from django_mysqlqueue.service.groups import OptionColumns
from django_mysqlqueue.service.job_results import is_of_jobs
from django_mysqlqueue.service.refs import GroupRef
from django_mysqlqueue.service.watermarks import BY_KEY, BY_ROW
from django_mysqlqueue.sql.connection import apart
from django_mysqlqueue.sql.session import Session, flat, run
from django_mysqlqueue.subscriptions.options import filter_of
from django_mysqlqueue.text.humanize import up_to

REPLAY = audit.Action("replay", gettext_lazy("Replay a range"), audit.MESSAGES)
MERGED = 50
"""Maximum number of partitions to read one by one. In topics with more, all messages of the range are read."""
NEWEST = 2000
"""Number of the newest rows of the outbox that are searched for copies: it has no index on ids."""


@dataclass(frozen=True, slots=True)
class Range:
    """The messages to replay, and the group that gets them."""

    ref: GroupRef
    first: int
    """The first offset."""
    last: int
    """The last offset, included; at most the end of the log, so that the range is final."""
    run: str
    """The name of the run."""
    key: str | None = None
    """Only messages of the partition with this key."""

    def __str__(self) -> str:
        partition = "" if self.key is None else f", partition {self.key!r}"
        return f"offsets {self.first} to {self.last}{partition}, run {self.run}"


@dataclass(slots=True)
class Counted:
    """How many messages a replay has published or, in a preview, would publish, and how many it leaves out."""

    replayed: int = 0
    published: int = 0
    """Messages whose copies this run has published before."""
    filtered: int = 0
    """Messages that the group's filter does not match."""
    others: int = 0
    """Messages for other groups, redriven messages, and copies of an earlier replay."""
    unsettled: int = 0
    """Replayed messages that the group has not settled; counted only in a preview."""
    upto: int = 0
    """The highest offset up to which the range was read; the end of the range if all of it was."""

    def add(self, other: Counted) -> None:
        """Add the counts of further messages."""
        for name in ("replayed", "published", "filtered", "others", "unsettled"):
            setattr(self, name, getattr(self, name) + getattr(other, name))


class _Original(NamedTuple):
    offset: int
    key: str
    message_id: str
    published_at: int
    target_group: str
    original_id: str
    failed_group: str
    metadata: str


@spelled_out
@checked(OperationRefused, only=("progress",))
def replay(
    group: str,
    topic: str,
    first: int,
    last: int,
    *,
    key: str | None = None,
    run: str = "",
    limit: int | None = None,
    progress: Callable[[int], object] = lambda rows: None,
    **how: Unpack[How],
) -> ReplayResult:
    """Publish the messages of a range of the log again, only for one consumer group.

    The group's position does not change, and other groups get nothing. The copies are new messages at the end of the
    log: with new ids, in the same partitions, and in the same order. They neither expire nor coalesce, and their
    metadata has ``replayed_from`` with the run and the original's topic, offset, id and ``published_at``.

    Left out are messages that the group's filter does not match now, messages for other groups, redriven messages, and
    copies of an earlier replay.

    The id of a copy is made from ``run`` and the offset of the original. If the replay is interrupted, run it again
    with the same arguments: it publishes only the missing copies, as long as the others are in the log or among the
    newest 2,000 messages of the outbox. If two calls run at the same time, the sequencer drops the second copies as
    duplicates.

    Args:
        group: the consumer group.
        topic: the topic that it reads.
        first: the first offset.
        last: the last offset, included; at most the end of the log.
        key: only messages of the partition with this key.
        run: the name of the run, 1 to 60 characters from A-Z, a-z, 0-9, ``.``, ``_`` and ``-`` (default: a digest of
            group, topic, range and key). To replay the same messages once more, pass another one.
        limit: maximum number of messages. Then at most about 100,000 messages of the log are read, and ``upto`` of the
            result says how far.
        progress: called after each transaction with the number of copies that it published.

    Raises:
        OperationRefused: there is no such group, or it handles jobs or dead letters; an argument is out of range; the
            group's filter cannot be parsed; or a seek or drop of the group has not finished. What was replayed before
            that stays.
    """
    with operating(how, group=group, topic=topic) as (alias, by, dry_run):
        ref = group_of(alias, group, topic).ref
        check_limit(limit)
        wanted = _range(alias, ref, first, last, key, run)
        if dry_run:
            return _previewed(wanted, preview(alias, wanted, most=limit or COUNTED), limit)
        # With a limit, the same part of the range as in a preview with this limit.
        upto = last if limit is None else preview(alias, wanted, most=limit).upto
        found = publish_copies(alias, wanted, upto=upto, **by, progress=progress)
        said = _("Messages published again for the group %(ref)s: %(number)s.")
        values = {"ref": ref, "number": f"{found.replayed:,}"}
        return _result(wanted, found, said % values, *_rest(wanted, found), dry_run=False)


def _range(alias: str, ref: GroupRef, first: int, last: int, key: str | None, run: str) -> Range:
    if is_dlq(ref.topic):
        raise OperationRefused(f"topic {ref.topic!r}: dead letters are redriven, not replayed")
    if is_of_jobs(ref):
        raise OperationRefused(f"group {str(ref)!r}: a job runs once; enqueue it again, or redrive its dead letter")
    offsets_of([first], "first")
    offsets_of([last], "last")
    if last < first:
        raise OperationRefused(f"last {last}: must be at least the first offset, {first}")
    if last > (end := log.end_of_log(Session(alias))):
        raise OperationRefused(f"last {last}: the log ends at {end}")
    if key is not None:
        text("key", key, most=KEY_LENGTH)
    if run and not REPLAY_RUN.fullmatch(text("run", run, most=1000)):
        raise OperationRefused(f"run {run!r}: must be 1 to 60 characters from A-Z, a-z, 0-9, '.', '_' and '-'")
    named = [*ref, first, last, key]
    return Range(ref, first, last, run or hashlib.sha256(json.dumps(named).encode()).hexdigest()[:16], key)


def _previewed(wanted: Range, found: Counted, limit: int | None) -> ReplayResult:
    number = up_to(COUNTED, found.replayed) if limit is None else f"{found.replayed:,}"
    values = {"number": number, "ref": wanted.ref, "first": wanted.first, "last": wanted.last}
    said = [_("No message at the offsets %(first)s to %(last)s is to be replayed into the group %(ref)s.") % values]
    if found.replayed:
        settled = f"{found.replayed - found.unsettled:,}"
        said = [
            _("Messages at the offsets %(first)s to %(last)s that only the group %(ref)s will get again: %(number)s.")
            % values,
            _("Of these, the group has settled or passed: %(number)s.") % {"number": settled},
            _("The copies enter the log at its end. The position of the group does not change."),
        ]
    warnings = []
    if found.unsettled:
        text = _("The group has not settled %(number)s of these messages and will get them twice.")
        warnings = [text % {"number": f"{found.unsettled:,}"}]
    details = {"warnings": tuple(warnings), "unsettled": found.unsettled}
    return _result(wanted, found, *said, *_rest(wanted, found), dry_run=True, **details)


def _rest(wanted: Range, found: Counted) -> list[str]:
    """Return sentences about what is left out, and about the end of the range if it was not reached."""
    left_out = (
        (found.filtered, _("Left out because the filter of the group does not match: %(number)s.")),
        (
            found.others,
            _("Left out because they are for other groups, or repeat other messages of the topic: %(number)s."),
        ),
        (found.published, _("Left out because this run has published them before: %(number)s.")),
    )
    said = [text % {"number": f"{number:,}"} for number, text in left_out if number]
    if found.upto < wanted.last:
        values = {"upto": found.upto, "next": found.upto + 1}
        said.append(_("This covers the offsets up to %(upto)s. To continue, replay from offset %(next)s.") % values)
    return said


def _result(wanted: Range, found: Counted, *summary: str, dry_run: bool, **details: Any) -> ReplayResult:
    return result_of(
        ReplayResult,
        REPLAY,
        found.replayed,
        *summary,
        dry_run=dry_run,
        run=wanted.run,
        upto=found.upto,
        filtered=found.filtered,
        left_out=found.others,
        already_published=found.published,
        **details,
    )


def preview(using: str, wanted: Range, *, most: int, limits: OperationLimits = LIMITS) -> Counted:
    """Count the messages that a replay of at most ``most`` messages would publish.

    About ``OperationLimits.read`` messages are read, whether or not they match.
    """
    session, ref = Session(using), wanted.ref
    registered, controls = groups.find(using, ref), groups.group_controls(session, [ref]).get(ref)
    if registered is None or controls is None:
        raise OperationRefused(groups.no_group_text(ref))
    policy, waiting = _policy(ref, controls.options), _in_outbox(session, wanted)
    counted = Counted()
    for page in _pages(session, wanted, limits.rows, counted, most=most, limits=limits):
        chosen, found = _choose(session, wanted, page, policy, waiting)
        found.replayed = len(chosen)
        found.unsettled = _count_unsettled(session, ref, chosen, registered.start_offset)
        counted.add(found)
    return counted


def publish_copies(
    using: str,
    wanted: Range,
    *,
    upto: int,
    progress: Callable[[int], object] = lambda rows: None,
    limits: OperationLimits = LIMITS,
    **by: Unpack[By],
) -> Counted:
    """Publish copies of the messages of a range for one group, in offset order.

    Each transaction decides, under the shared lock of the group row, that the group exists, that no seek or drop of it
    is in progress, and which filter applies. It locks nothing else: the range is final, and copies of the same run that
    two calls publish at the same time are duplicates, which the sequencer drops.
    """

    def write(session: Session, page: Sequence[int]) -> Counted:
        locked = groups.fence(session, ref)
        if locked is None:
            raise OperationRefused(groups.no_group_text(ref))
        groups.refuse_unfinished(ref, locked.after_seek)
        chosen, done = _choose(session, wanted, page, _policy(ref, locked.options), waiting)
        done.replayed = _insert(session, wanted, chosen)
        audit.add(session, operation, done.replayed)
        return done

    ref, counted = wanted.ref, Counted()
    with apart(using):
        operation = run(using, lambda session: audit.begin(session, REPLAY, ref, detail=str(wanted), **by))
        with audit.ending(using, operation):
            # Read before the log: a copy that is moved there in the meantime is found there.
            session = Session(using)
            waiting = _in_outbox(session, wanted)
            beat = audit.beats(using, operation)
            part = replace(wanted, last=upto)
            for page in _pages(session, part, limits.dead_letters, counted, limits=limits):
                done = run(using, lambda session, page=page: write(session, page))  # type: ignore[misc]
                counted.add(done)
                progress(done.replayed)
                beat()
    return counted


def _policy(ref: GroupRef, options: OptionColumns) -> FilterPolicy | None:
    try:
        return filter_of(options)
    except ValueError as error:
        raise OperationRefused(
            f"The filter of the group {ref.group!r} on topic {ref.topic!r} cannot be parsed by this release: {error}"
        ) from None


# -- which messages -----------------------------------------------------------


def _pages(
    session: Session, wanted: Range, size: int, counted: Counted, *, most: int | None = None, limits: OperationLimits
) -> Iterator[Sequence[int]]:
    """Yield the offsets of the topic's messages in the range, in order, and note how far it was read.

    ``counted``: what the caller counts: this sets ``upto``. ``most``: end when the caller has counted as many messages
    to replay, or ``OperationLimits.read`` messages were read.
    """
    topic = wanted.ref.topic
    keys = [wanted.key] if wanted.key is not None else partitions.all_in_log(session, topic, most=MERGED)
    place, read = wanted.first - 1, 0
    while place < wanted.last:
        left = size if most is None else min(size, most - counted.replayed)
        if left <= 0 or (most is not None and read >= limits.read):
            break
        if keys is not None:
            page = log_places.in_partitions(session, topic, keys, place, left, newer=True)
            read, is_last = read + len(page), len(page) < left
            end = page[-1] if page else place
        else:
            walked = log_places.walk(session, place, limits.rows, newer=True)
            page = [one.offset for one in walked if one.topic == topic]
            is_last = len(walked) < limits.rows and len(page) <= left
            end = page[left - 1] if len(page) > left else walked[-1].offset if walked else place
            read += sum(one.offset <= end for one in walked)
            page = page[:left]
        page = [offset for offset in page if offset <= wanted.last]
        place = wanted.last if is_last else min(end, wanted.last)
        if page:
            yield page
    counted.upto = place


def _choose(
    session: Session, wanted: Range, offsets: Sequence[int], policy: FilterPolicy | None, waiting: Collection[int]
) -> tuple[list[_Original], Counted]:
    """Return the messages at some offsets that are to be replayed, in order, and the numbers of the others."""
    chosen: list[_Original] = []
    counted = Counted()
    for one in _read(session, wanted.ref.topic, offsets):
        metadata = messages.decode_metadata(one.metadata)
        if not _is_for(one, wanted.ref.group, metadata):
            counted.others += 1
        elif policy is not None and not one.target_group and not policy.matches(metadata):
            counted.filtered += 1
        else:
            chosen.append(one._replace(metadata=_copied(wanted, one, metadata)))
    there = {*waiting, *_in_log(session, wanted, chosen)} & {one.offset for one in chosen}
    counted.published = len(there)
    return [one for one in chosen if one.offset not in there], counted


def _read(session: Session, topic: str, offsets: Sequence[int]) -> list[_Original]:
    rows = session.joined(
        "SELECT m.`offset`, m.partition_key, m.id, m.published_at, m.target_group, m.original_id, m.failed_group, "
        "m.metadata",
        "o",
        offsets,
        f"{session.dialect.join_to(LOG, 'm')} ON m.`offset` = v.o AND m.topic = %s",
        after=(topic,),
    )
    return sorted(map(_Original._make, rows))


def _is_for(one: _Original, group: str, metadata: Mapping[str, Any]) -> bool:
    """Return whether a message may be replayed to a group, by the rule of ``queuereplay``.

    Redriven messages and copies of an earlier replay are left out, because their originals are in the same topic.
    """
    if one.failed_group:
        return False
    if not one.target_group:
        return True
    origin = metadata.get(REPLAYED_FROM)
    is_copy = isinstance(origin, Mapping) and origin.get("offset") is not None
    return one.target_group == group and not one.original_id and not is_copy


def _copied(wanted: Range, one: _Original, metadata: Mapping[str, Any]) -> str:
    """Return the metadata of a copy."""
    origin = {
        "run": wanted.run,
        "topic": wanted.ref.topic,
        "offset": one.offset,
        "id": one.message_id,
        "published_at": one.published_at,
    }
    try:
        return json.dumps({**metadata, REPLAYED_FROM: origin}, allow_nan=False, separators=(",", ":"))
    except ValueError:  # Plain SQL has stored a number that is infinite to Python: the metadata counts as empty.
        return json.dumps({REPLAYED_FROM: origin}, separators=(",", ":"))


def _in_outbox(session: Session, wanted: Range) -> set[int]:
    """Return the offsets of those originals whose copies are in the newest rows of the outbox."""
    prefix = replay_id(wanted.run, "")
    rows = session.rows(
        "SELECT w.id, w.target_group FROM (SELECT id, topic, target_group "
        f"FROM {OUTBOX}{session.dialect.force_index('PRIMARY')} "
        "WHERE outbox_id > 0 ORDER BY outbox_id DESC LIMIT %s) w WHERE w.topic = %s AND w.id LIKE %s",
        (NEWEST, wanted.ref.topic, f"{prefix}%"),
    )
    ends = {message_id.removeprefix(prefix): target for message_id, target in rows}
    found = {int(end): target for end, target in ends.items() if end.isdecimal()}
    _refuse_others(wanted, found)
    return set(found)


def _in_log(session: Session, wanted: Range, chosen: Sequence[_Original]) -> set[int]:
    """Return the offsets of those originals whose copies are in the log."""
    rows = session.joined(
        "SELECT v.o, m.target_group",
        "kio",
        [(one.key, replay_id(wanted.run, one.offset), one.offset) for one in chosen],
        f"{session.dialect.join_to(LOG, 'm', 'queue_messages_id')} "
        "ON m.topic = %s AND m.partition_key = v.k AND m.id = v.i",
        after=(wanted.ref.topic,),
    )
    found = {int(offset): target for offset, target in rows}
    _refuse_others(wanted, found)
    return set(found)


def _refuse_others(wanted: Range, copies: Mapping[int, str]) -> None:
    """Refuse a run that has published copies for another group: their ids do not contain the group.

    ``copies``: by the offset of the original, the group that a copy is for; empty: all groups.
    """
    for offset, group in sorted(copies.items()):
        if group not in ("", wanted.ref.group):
            raise OperationRefused(
                f"The run {wanted.run!r} has replayed the message at offset {offset} to the group {group!r}: choose "
                "another name for this run."
            )


def _count_unsettled(session: Session, ref: GroupRef, chosen: Sequence[_Original], start: int) -> int:
    """Count those messages that the group has neither settled nor passed. ``start`` is its start offset."""
    places = session.joined(
        "SELECT s.partition_key, s.offset_acked, s.offset_claimed",
        "k",
        [one.key for one in chosen],
        f"{session.dialect.join_to(OFFSETS, 's')} ON {BY_KEY}",
        after=ref,
    )
    places_of = {key: (acked, claimed) for key, acked, claimed in places}
    rows = session.joined(
        "SELECT s.message_offset, s.acked",
        "ko",
        [(one.key, one.offset) for one in chosen],
        f"{session.dialect.join_to(STATE, 's')} ON {BY_ROW}",
        after=ref,
    )
    acked_of = dict(rows)
    number = 0
    for one in chosen:
        watermark, claimed = places_of.get(one.key, (start, start))
        passed = one.offset <= max(claimed, start)
        number += one.offset > max(watermark, start) and not acked_of.get(one.offset, passed)
    return number


# -- copies -------------------------------------------------------------------


def _insert(session: Session, wanted: Range, chosen: Sequence[_Original]) -> int:
    """Insert the copies into the outbox, in offset order, and return how many. Payloads do not leave the server.

    They have no expiry and no coalesce key: otherwise they would have expired, or would supersede later messages.
    """
    number = 0
    for chunk in session.chunks(chosen, weight=lambda one: len(one.metadata)):
        number += session.execute(
            f"INSERT INTO {OUTBOX} (topic, partition_key, publisher_key, id, payload, metadata, target_group) "
            "SELECT m.topic, m.partition_key, m.publisher_key, v.id, m.payload, v.metadata, %s "
            f"FROM {session.dialect.rows(('o', 'id', 'metadata'), len(chunk))} "
            f"{session.dialect.join_to(LOG, 'm')} ON m.`offset` = v.o ORDER BY v.o",
            (wanted.ref.group, *flat((one.offset, replay_id(wanted.run, one.offset), one.metadata) for one in chunk)),
        )
    # GC may have deleted messages since they were read.
    return number

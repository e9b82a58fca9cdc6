"""What holds of the tables: at any moment, between any two, and when everything has been handled.

Each function returns what is broken, one sentence each; an empty list means that all of it holds.
They know the tables alone. What follows from the history of a test is checked by that test.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from django_mysqlqueue.models import ConsumerGroup, DeliveryEvent
from django_mysqlqueue.names.rules import relayed_from
from django_mysqlqueue.options.topics import is_dlq
from tests.support.filtering import coalesced, is_for, unmatched
from tests.support.internals import JOB_PREFIX, GroupRef, tick_of
from tests.support.tables import Group, Logged, Offsets, SetAside, Tables, Waiting

Message = Logged | Waiting
Settled = frozenset[tuple[GroupRef, int]]
"""(group, offset) of what is acked or dead-lettered."""
DROPPED = ConsumerGroup.AfterSeek.DROPPED
Outcome = DeliveryEvent.Outcome
SETTLES = (Outcome.ACKED, Outcome.DEAD_LETTERED, Outcome.DELETED)
TAKES = (Outcome.REDRIVEN, Outcome.REPLACED, Outcome.DISCARDED)
"""What an operator does with a dead letter that is not in the DLQ afterwards."""
DELETES = "delete quarantined"
"""The operation in the audit log by which an operator deletes messages of the quarantine."""


# -- what the rows mean -------------------------------------------------------


def offsets_of(tables: Tables, ref: GroupRef, key: str) -> Offsets:
    """Watermark and cursor of a group in a partition; where it has no row both are its start offset."""
    start = tables.groups[ref].start_offset
    return tables.offsets.get((ref, key)) or Offsets(start, start)


def is_settled(tables: Tables, ref: GroupRef, message: Logged) -> bool:
    """Whether a group has acked or dead-lettered a message of the log: its state row decides, else the watermark."""
    row = tables.state.get((ref, message.key, message.offset))
    return row.acked if row is not None else message.offset <= offsets_of(tables, ref, message.key).acked


def settled(tables: Tables, remembered: Settled = frozenset()) -> Settled:
    """What the groups have settled.

    Args:
        tables: the queue as it stands.
        remembered: what they had settled earlier. Of that it keeps the messages that are not in the log any more.
    """
    there = {
        (ref, message.offset)
        for message in tables.log.values()
        for ref in _readers(tables, message.topic)
        if is_for(message, ref) and is_settled(tables, ref, message)
    }
    gone = {one for one in remembered if one[1] not in tables.log and one[0] in tables.groups}
    return frozenset(there | gone)


def _readers(tables: Tables, topic: str) -> list[GroupRef]:
    return [ref for ref in tables.groups if ref.topic == topic]


def messages(tables: Tables) -> Iterator[Message]:
    """All messages, in the log and on their way."""
    yield from tables.log.values()
    yield from tables.outbox


def _copies(tables: Tables) -> Counter[tuple[object, ...]]:
    """How often each message is in the outbox, the log and the quarantine. A duplicate is another message."""
    return Counter(_same(one) for one in (*messages(tables), *tables.quarantine))


def _same(one: Message | SetAside) -> tuple[object, ...]:
    return (*_on_any_route(one), one.created_at)


def dead_letters(tables: Tables) -> Iterator[Message]:
    """All dead letters, in the DLQ and on their way."""
    return (one for one in messages(tables) if one.failed_group)


def end_of_log(tables: Tables) -> int:
    """The highest offset that is, or is known to have been, in the log."""
    return max(max(tables.log, default=0), tables.sequencer or 0, *tables.collected.values(), 0)


def is_seeking(group: Group) -> bool:
    """A seek has begun and not ended. It stores the offsets of all partitions before it deletes state rows."""
    return group.after_seek not in ("", DROPPED)


def is_being_dropped(tables: Tables, ref: GroupRef) -> bool:
    """A drop has begun and not ended: it deletes the leases, then the state rows, then the offsets rows."""
    return tables.groups[ref].after_seek == DROPPED


# -- at any moment ------------------------------------------------------------


def at_any_moment(
    tables: Tables,
    *,
    began_at: Mapping[GroupRef, int] | None = None,
    passed: Collection[tuple[GroupRef, int]] | None = None,
) -> list[str]:
    """What holds at every moment, whatever is under way.

    Two rules do not hold during a seek: that state rows are between watermark
    and cursor, and that no watermark is below the group's start. One does not
    hold during a drop: that nothing between watermark and cursor lacks a row.

    Args:
        tables: the queue as it stands.
        began_at: when groups were registered, where the test's clock is not that of their rows (epoch
            milliseconds). Their dead letters of that time or before are from an earlier life.
        passed: (group, offset) of messages that a filter may have passed; None: those that do not match the filter
            that their group has now.
    """
    return [
        *_registered(tables),
        *_offsets(tables),
        *_state(tables),
        *_nothing_lost(tables, unmatched(tables) if passed is None else passed),
        *_leases(tables),
        *_log(tables),
        *_ticks(tables),
        *_set_aside(tables),
        *_in_one_place(tables, began_at or {}),
    ]


def _registered(tables: Tables) -> Iterator[str]:
    """A group that is not registered has no rows: they would meet the claims of one that is registered anew."""
    for table, refs in (
        ("offsets", {place[0] for place in tables.offsets}),
        ("state", {place[0] for place in tables.state}),
        ("leases", {place[0] for place in tables.leases}),
        ("coalesce key", {place[0] for place in tables.superseding}),
    ):
        for ref in refs - tables.groups.keys():
            yield f"there are {table} rows of {ref}, which is not registered"
    for ref, group in tables.groups.items():
        if group.after_seek and not group.paused:
            yield f"{ref} is not paused during a seek or drop"
        # A group that waits for the end of a move is not changed by an operation of its own.
        if bool(group.after_seek and group.after_seek != "moves") != bool(group.operation):
            yield f"{ref} has the operation {group.operation} under way, and after_seek is {group.after_seek!r}"
    ended = {one.id for one in tables.operations if one.ended_at}
    for ref, group in tables.groups.items():
        if group.operation in ended:
            yield f"{ref} says that the operation {group.operation} is under way, which has ended"


def _offsets(tables: Tables) -> Iterator[str]:
    """Start offset <= watermark <= cursor <= end of the log."""
    end = end_of_log(tables)
    for (ref, key), (acked, claimed) in tables.offsets.items():
        group = tables.groups.get(ref)
        if acked > claimed:
            yield f"the watermark {acked} of {ref} in {key!r} is above the cursor {claimed}"
        if group is not None and not group.after_seek and acked < group.start_offset:
            yield f"the watermark {acked} of {ref} in {key!r} is below its start offset {group.start_offset}"
        if tables.sequencer is not None and claimed > end:
            yield f"the cursor {claimed} of {ref} in {key!r} is above the end of the log, {end}"


def _state(tables: Tables) -> Iterator[str]:
    """Watermark < state row <= cursor, and the row is of a message of its partition that is for its group."""
    for (ref, key, offset), row in tables.state.items():
        group, message = tables.groups.get(ref), tables.log.get(offset)
        if message is not None and (message.key != key or not is_for(message, ref)):
            yield f"{_at(ref, offset)} has a state row in {key!r}, where it does not belong"
        if row.suspect and not row.delivery_token:
            yield f"{_at(ref, offset)} is suspect without a token"
        if group is None:
            continue
        if (ref, key) not in tables.offsets:
            yield f"{_at(ref, offset)} has a state row, and its partition {key!r} no offsets row"
        elif not group.after_seek:
            acked, claimed = tables.offsets[ref, key]
            if offset <= acked:
                what = "is settled and has a row still" if row.acked else "is not settled"
                yield f"the watermark {acked} of {ref} has passed {_at(ref, offset)}, which {what}"
            if offset > claimed:
                yield f"{_at(ref, offset)} has a state row above the cursor {claimed}"


def _nothing_lost(tables: Tables, passed: Collection[tuple[GroupRef, int]]) -> Iterator[str]:
    """Between watermark and cursor every message for the group has a state row, or nobody will deliver it.

    Those that a filter has passed have none.
    """
    behind = {place: one for place, one in tables.offsets.items() if one.acked < one.claimed}
    if not behind:
        return
    for message in tables.log.values():
        for ref in _readers(tables, message.topic):
            acked, claimed = behind.get((ref, message.key), (0, 0))
            if (
                acked < message.offset <= claimed
                and is_for(message, ref)
                and (ref, message.key, message.offset) not in tables.state
                and (ref, message.offset) not in passed
                and not is_being_dropped(tables, ref)
            ):
                where = f"between watermark {acked} and cursor {claimed}"
                yield f"LOST: {_at(ref, message.offset)} is {where} and has no state row"


def _leases(tables: Tables) -> Iterator[str]:
    """Nobody holds a lease in a shared group."""
    for (ref, key), owner in tables.leases.items():
        if owner and ref in tables.groups and tables.groups[ref].mode != "ordered":
            yield f"{owner} holds the lease of {key!r} in {ref}, which is shared"


def _ticks(tables: Tables) -> Iterator[str]:
    """A schedule has decided each tick that it has published, and its jobs have results from the beginning."""
    for one in messages(tables):
        if not tick_of(one.id) or one.failed_group:
            continue
        name, time = one.id.split(":")[1:]
        row = tables.schedules.get(name)
        if row is not None and time.isdigit() and int(time) > row.last_tick:
            yield f"{one.id} is published, and its schedule is at {row.last_tick}"
        if isinstance(one, Waiting) and one.topic.startswith(JOB_PREFIX) and one.id not in tables.results:
            yield f"{one.id} is a job without a result"


def _log(tables: Tables) -> Iterator[str]:
    """An id is in the log once for each topic and key, and the sequencer knows how far the log goes."""
    seen: dict[tuple[str, str, str], int] = {}
    for offset, message in tables.log.items():
        if seen.setdefault(message.identity, offset) != offset:
            yield f"{message.identity} is in the log at {seen[message.identity]} and at {offset}"
    last = max(tables.log, default=0)
    if tables.sequencer is not None and last > tables.sequencer:
        yield f"the log ends at {last} and the sequencer says {tables.sequencer}"


def _set_aside(tables: Tables) -> Iterator[str]:
    """What is in the quarantine is there once, and neither in the outbox nor in the log."""
    if not tables.quarantine:
        return
    copies = _copies(tables)
    for one in tables.quarantine:
        if copies[_same(one)] > 1:
            yield f"{one.identity} is in the quarantine and in {copies[_same(one)] - 1} other places"


def _in_one_place(tables: Tables, began_at: Mapping[GroupRef, int]) -> Iterator[str]:
    """A message of a group is live once or in the DLQ once.

    Live is what the group has not settled: the message itself and what an
    operator has sent back from the DLQ. Letters from before the last seek has
    ended, or from before the group was registered, do not count. A drop deletes
    the rows that tell what the group has settled.
    """

    def is_live(one: Message, ref: GroupRef) -> bool:
        return isinstance(one, Waiting) or not (is_being_dropped(tables, ref) or is_settled(tables, ref, one))

    letters: dict[tuple[GroupRef, int], int] = defaultdict(int)
    for one in dead_letters(tables):
        ref = GroupRef(one.failed_group, one.original_topic)
        group = tables.groups.get(ref)
        if group is None or is_seeking(group):
            continue
        if one.failed_at > max(group.sought_at, began_at.get(ref, group.registered_at)):
            letters[ref, one.original_offset] += 1
    if not letters:
        return
    redriven: dict[tuple[GroupRef, int], list[Message]] = defaultdict(list)
    for one in messages(tables):
        if one.original_offset and not one.failed_group:
            redriven[GroupRef(one.target_group, one.original_topic), one.original_offset].append(one)
    for (ref, offset), count in letters.items():
        copies = redriven[ref, offset]
        if copies and tables.groups[ref].sought_at:
            continue  # a seek has made each of them live again
        original = tables.log.get(offset)
        live = [one for one in (*copies, original) if one is not None and is_live(one, ref)]
        if live:
            yield f"{_at(ref, offset)} is in the DLQ and still live"
        if count > 1:
            yield f"{_at(ref, offset)} is in the DLQ {count} times"


# -- between two moments ------------------------------------------------------


def between(
    earlier: Tables,
    later: Tables,
    *,
    forgets: Collection[GroupRef] = (),
    deletes: Collection[str] = (),
    untouched: Collection[GroupRef] = (),
    recorded: bool = True,
    passed: Collection[tuple[GroupRef, int]] | None = None,
) -> list[str]:
    """What holds of any two moments, whatever has been done between them.

    Args:
        earlier: the queue as it was.
        later: the queue as it is.
        forgets: groups that may have been dropped or sought meanwhile.
        deletes: ids of messages that may have been cancelled, or deleted by hand.
        untouched: groups of which no row may have changed.
        recorded: whatever was settled, and forgotten by GC with its partition, is in the events or was settled earlier.
        passed: as for ``at_any_moment``. GC may forget them with their partition, too.
    """
    done = settled(earlier) | frozenset(unmatched(earlier) if passed is None else passed)
    kept = {
        ref: group
        for ref, group in earlier.groups.items()
        if ref not in forgets and ref in later.groups and later.groups[ref].id == group.id
    }
    return [
        *_groups_stay(earlier, later, kept, forgets),
        *_settled_stays(earlier, later, kept),
        *_never_back(earlier, later, kept),
        *log_grows(earlier.log, end_of_log(earlier), later),
        *_collected(earlier, later, kept, deletes, done if recorded else None),
        *_from_outbox_to_log(earlier, later, deletes),
        *_out_of_quarantine(earlier, later),
        *_records_stay(earlier, later),
        *_untouched(earlier, later, untouched),
    ]


def _groups_stay(
    earlier: Tables, later: Tables, kept: Mapping[GroupRef, Group], forgets: Collection[GroupRef]
) -> Iterator[str]:
    """A group stays registered, its start offset stays where it was, and its revision never falls."""
    for ref in earlier.groups.keys() - kept.keys() - set(forgets):
        yield f"{ref} was dropped"
    for ref, group in kept.items():
        now = later.groups[ref]
        if now.start_offset != group.start_offset:
            yield f"the start offset of {ref} was {group.start_offset} and is {now.start_offset}"
        if now.revision < group.revision:
            yield f"the revision of {ref} fell from {group.revision} to {now.revision}"


def _settled_stays(earlier: Tables, later: Tables, kept: Mapping[GroupRef, Group]) -> Iterator[str]:
    """What was settled is settled for ever."""
    for ref, offset in settled(earlier):
        message = later.log.get(offset)
        if ref in kept and message is not None and not is_settled(later, ref, message):
            yield f"{_at(ref, offset)} was settled and is not any more"


def _never_back(earlier: Tables, later: Tables, kept: Mapping[GroupRef, Group]) -> Iterator[str]:
    """Watermarks and cursors never go back, and their rows stay.

    GC forgets a row when the log holds nothing of its partition any more; a
    later message gets a new row, at the group's start. So if a row has gone or
    gone back, the log holds nothing at or below the old cursor.
    """
    lowest: dict[tuple[str, str], int] = {}
    for message in later.log.values():
        lowest.setdefault((message.topic, message.key), message.offset)
    for (ref, key), before in earlier.offsets.items():
        if ref not in kept or lowest.get((ref.topic, key), before.claimed + 1) > before.claimed:
            continue
        now = later.offsets.get((ref, key))
        if now is None:
            yield f"the offsets row of {ref} in {key!r} is gone, and the log holds messages that it had passed"
            continue
        if now.acked < before.acked:
            yield f"the watermark of {ref} in {key!r} went back from {before.acked} to {now.acked}"
        if now.claimed < before.claimed:
            yield f"the cursor of {ref} in {key!r} went back from {before.claimed} to {now.claimed}"


def log_grows(known: Mapping[int, Logged], end: int, later: Tables) -> Iterator[str]:
    """A message in the log never changes, and a new one takes its place behind all others.

    Args:
        known: what has been in the log so far.
        end: how far it went.
        later: the queue as it is.
    """
    for offset, message in later.log.items():
        if offset not in known:
            if offset <= end:
                yield f"{message.identity} appeared at {offset}, below the end of the log, {end}"
        elif known[offset] != message:
            yield f"the message at {offset} has changed: {known[offset]}, now {message}"


def _collected(
    earlier: Tables,
    later: Tables,
    kept: Mapping[GroupRef, Group],
    deletes: Collection[str],
    done: Settled | None,
) -> Iterator[str]:
    """A message leaves the log when every group's watermark has passed it, a dead letter when an operator takes it."""
    taken = {(one.ref.topic, one.offset) for one in later.events if one.outcome in TAKES}
    for offset in earlier.log.keys() - later.log.keys():
        message = earlier.log[offset]
        if message.id in deletes or (message.failed_group and (message.topic, offset) in taken):
            continue
        if later.collected.get(message.topic, 0) < offset:
            yield f"{message.identity} at {offset} is gone, and GC has not been so far"
        if message.failed_group and is_dlq(message.topic) and not _readers(earlier, message.topic):
            yield f"the dead letter {message.id} at {offset} is gone, and no operator has taken it"
        for ref in kept:
            if is_for(message, ref) and not _has_passed(earlier, later, ref, message, done):
                yield f"{_at(ref, offset)} was deleted from the log before the group had passed it"


def _has_passed(earlier: Tables, later: Tables, ref: GroupRef, message: Logged, done: Settled | None) -> bool:
    """Whether a group's watermark has passed a message that is in the log no more.

    Where GC may have forgotten the row of the partition as well, it is enough that the message was settled. A row at
    the group's start may be a new one, of a partition whose messages were all handled and deleted in between.
    """
    if message.offset <= offsets_of(later, ref, message.key).acked:
        return True
    before, now = earlier.offsets.get((ref, message.key)), later.offsets.get((ref, message.key))
    is_new = now is not None and now.claimed == later.groups[ref].start_offset
    if before is not None and now is not None and before <= now and not is_new:
        return False
    if done is None or (ref, message.offset) in done:
        return True
    return any((one.ref, one.offset) == (ref, message.offset) and one.outcome in SETTLES for one in later.events)


def _from_outbox_to_log(earlier: Tables, later: Tables, deletes: Collection[str]) -> Iterator[str]:
    """A message leaves the outbox for the log or the quarantine, or as a duplicate; it never changes in the outbox.

    Only its time does, and whoever retries a job that waits there may count its attempts from 1 again. A route may send
    it to another database, or keep it here.
    """
    end = end_of_log(earlier)
    waiting = {one.outbox_id: one for one in later.outbox}
    known = {_on_any_route(one) for one in (*messages(later), *later.quarantine, *earlier.log.values())}
    for message in earlier.outbox:
        now = waiting.get(message.outbox_id)
        if now is not None:
            attempts = now.failure_count or message.failure_count
            same = now._replace(
                deliver_at=message.deliver_at, is_debounced=message.is_debounced, failure_count=attempts
            )
            if same != message:
                yield f"the message {message.outbox_id} of the outbox has changed: {message}, now {now}"
        elif message.id not in deletes and _on_any_route(message) not in known:
            # What GC has deleted meanwhile may have been this one.
            was_in_log = later.collected.get(message.topic, 0) > end or _is_taken(message.topic, later, end)
            if not was_in_log and not _is_replaced(message, later, end):
                yield f"{message.identity} was lost between outbox and log"


def _is_taken(topic: str, later: Tables, end: int) -> bool:
    """Whether an operator has taken a dead letter of a DLQ that had entered the log after an offset."""
    return any(one.outcome in TAKES and one.ref.topic == topic and one.offset > end for one in later.events)


def _out_of_quarantine(earlier: Tables, later: Tables) -> Iterator[str]:
    """A message leaves the quarantine for the outbox, once, or because an operator deletes it; it never changes there.

    Who sequences it and handles it afterwards is not asked.
    """
    if not earlier.quarantine:
        return
    there = {one.quarantine_id: one for one in later.quarantine}
    known = {_on_any_route(one) for one in (*messages(later), *later.quarantine, *earlier.log.values())}
    copies, end, gone = _copies(later), end_of_log(earlier), 0
    for one in earlier.quarantine:
        now = there.get(one.quarantine_id)
        if now is not None:
            if now != one:
                yield f"the message {one.quarantine_id} of the quarantine has changed: {one}, now {now}"
        elif _on_any_route(one) in known:
            if copies[_same(one)] > 1:
                yield f"{one.identity} has left the quarantine for {copies[_same(one)]} places"
        elif later.collected.get(one.topic, 0) <= end:
            gone += 1
    before = {one.id for one in earlier.operations}
    deleted = sum(one.changed for one in later.operations if one.action == DELETES and one.id not in before)
    if gone > deleted:
        yield f"{gone} messages of the quarantine are gone, and operators have deleted {deleted}"


def _on_any_route(message: Message | SetAside) -> tuple[str, str, str]:
    return (relayed_from(message.topic), message.key, message.id)


def _is_replaced(message: Waiting, later: Tables, end: int) -> bool:
    """Whether a later message with its coalesce key waits in the outbox, or has entered the log after an offset."""
    if not message.is_debounced:
        return False
    key = coalesced(message)
    return any(
        one.is_debounced and one.outbox_id > message.outbox_id and coalesced(one) == key for one in later.outbox
    ) or any(offset > end and coalesced(one) == key for offset, one in later.log.items())


def _records_stay(earlier: Tables, later: Tables) -> Iterator[str]:
    """Events never change, operations count up and stay ended, and how far the log has come never falls."""
    events = {one.id: one for one in later.events}
    for event in earlier.events:
        if events.get(event.id, event) != event:
            yield f"the event {event} has changed: {events[event.id]}"
    operations = {one.id: one for one in later.operations}
    for one in earlier.operations:
        now = operations.get(one.id, one)
        if now.changed < one.changed or (one.ended_at and now.ended_at != one.ended_at):
            yield f"the record of the operation {one} went back: {now}"
    if (earlier.sequencer or 0) > (later.sequencer or earlier.sequencer or 0):
        yield f"the sequencer went back from {earlier.sequencer} to {later.sequencer}"
    for topic, offset in earlier.collected.items():
        if later.collected.get(topic, 0) < offset:
            yield f"the record of how far {topic!r} was collected went back from {offset}"


def _untouched(earlier: Tables, later: Tables, refs: Collection[GroupRef]) -> Iterator[str]:
    """What is done to one group changes nothing of another."""
    if not refs:
        return
    for name in ("groups", "offsets", "state", "leases", "heartbeats"):
        before, after = _rows_of(earlier, name, refs), _rows_of(later, name, refs)
        for place in sorted(before.keys() | after.keys(), key=str):
            was, now = before.get(place), after.get(place)
            if was != now:
                yield f"the row {place} of {name} was {was} and is {now}: somebody else's"


def _rows_of(tables: Tables, name: str, refs: Collection[GroupRef]) -> dict[Any, Any]:
    rows: dict[Any, Any] = getattr(tables, name)
    return {place: row for place, row in rows.items() if (place if name == "groups" else place[0]) in refs}


# -- when everything has been handled -----------------------------------------


def drained(tables: Tables, *, idle: Collection[GroupRef] = ()) -> list[str]:
    """What holds when healthy subscribers have handled everything that there was for groups that are not paused.

    Args:
        tables: the queue as it stands.
        idle: groups that have never had a subscriber. They have settled nothing, and begun nothing either.
    """
    return [*_nothing_due(tables), *_no_work(tables), *_all_settled(tables, idle)]


def _nothing_due(tables: Tables) -> Iterator[str]:
    """What is left in the outbox is not due."""
    for message in tables.outbox:
        if message.deliver_at <= tables.now:
            yield f"{message.identity} is due and still in the outbox"


def _no_work(tables: Tables) -> Iterator[str]:
    """No delivery is under way or waits, and nobody is responsible for a partition."""
    running = {ref for ref, group in tables.groups.items() if not group.paused}
    for ref, key, offset in tables.state:
        if ref in running or ref not in tables.groups:
            yield f"{_at(ref, offset)} in {key!r} has a state row"
    for ref, key in tables.leases:
        if ref in running or ref not in tables.groups:
            yield f"the lease of {key!r} in {ref} is still there"


def _all_settled(tables: Tables, idle: Collection[GroupRef]) -> Iterator[str]:
    """Every group has settled the whole log, and its watermark has come up to the cursor and to the log's end."""
    for (ref, key), (acked, claimed) in tables.offsets.items():
        if ref in tables.groups and not tables.groups[ref].paused and acked != claimed:
            yield f"the watermark of {ref} in {key!r} is {acked}, the cursor {claimed}"
    for message in tables.log.values():
        for ref in _readers(tables, message.topic):
            if tables.groups[ref].paused or ref in idle:
                continue
            if is_for(message, ref) and not is_settled(tables, ref, message):
                yield f"{_at(ref, message.offset)} in {message.key!r} is not settled"


def _at(ref: GroupRef, offset: int) -> str:
    return f"{ref}[{offset}]"

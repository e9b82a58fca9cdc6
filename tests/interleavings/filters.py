"""What must hold of a group while messages are passed: because of its filter, or of their coalesce keys."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from django_mysqlqueue.models import CoalesceKey
from tests.crash.worlds import G
from tests.interleavings import results
from tests.interleavings.engine import Run
from tests.interleavings.operations import Operation
from tests.interleavings.pictures import Names
from tests.interleavings.steps import WRITE
from tests.interleavings.worlds import Start
from tests.support import invariants
from tests.support.filtering import coalesced, filter_of, has_expired, is_got, is_superseded, is_superseding, matches
from tests.support.internals import GroupRef
from tests.support.invariants import Message
from tests.support.tables import Logged, Tables

GROUPS = "queue_consumer_groups"


def claimed_under_another(operations: Sequence[Operation], start: Start, run: Run) -> Iterator[str]:
    """Until a change of the filter commits, claims are made under the one before, and then under the new one only."""
    changes = [_changed_at(run, thread) for thread, one in _threads(operations) if one.changes is not None]
    changed = min((place for place in changes if place is not None), default=len(run.steps))
    for thread, one in _threads(operations):
        if one.filters is None or not results.has_looked(run.results.get(thread)):
            continue
        ended = max(place for place, step in enumerate(run.steps) if step.thread == thread and step.releases)
        if (ended > changed) != (one.filters != start.filters[0]):
            yield f"{thread} has claimed under a filter that was not the group's"


def _threads(operations: Sequence[Operation]) -> list[tuple[str, Operation]]:
    return list(zip("ABC", operations, strict=False))


def _changed_at(run: Run, thread: str) -> int | None:
    """The place of the COMMIT by which a thread has changed the group row; None: it has not."""
    writes = False
    for place, step in enumerate(run.steps):
        if step.thread == thread:
            writes = writes or (step.access.get(GROUPS) == WRITE and step.label.startswith("update"))
            if writes and step.releases:
                return place
    return None


def passed_by_mistake(
    operations: Sequence[Operation],
    start: Start,
    before: Tables,
    after: Tables,
    names: Names,
    handled: Collection[str],
) -> Iterator[str]:
    """A message is passed only under a filter that does not match it, and claimed only under one that does.

    Args:
        operations: what has run.
        start: where it began.
        before: the tables then.
        after: the tables now.
        names: the names of messages.
        handled: names of messages that handlers were called with.
    """
    if not start.filters or G not in after.groups:
        return
    new = [one.changes for one in operations if one.changes is not None]
    late = {name for one in operations for name in one.publishes}
    for message in after.log.values():
        was, now = (invariants.offsets_of(tables, G, message.key).claimed for tables in (before, after))
        if not (was < message.offset <= now) or not invariants.is_for(message, G):
            continue
        name = names.at(message.offset)
        policies = new if name in late else [start.filters[0], *new]
        is_taken = name in handled or (G, message.key, message.offset) in after.state
        found = [matches(message, policy) for policy in policies]
        if is_superseding(message, before, G) or is_superseding(message, after, G):
            continue  # It passes any filter, unless a later one supersedes it.
        if has_expired(message) or (not is_taken and _has_ended(message, after, names, handled)):
            continue
        if is_taken and not any(found):
            yield f"{name} was claimed, and the filter does not match it"
        if not is_taken and all(found):
            yield f"{name} was passed, and the filter matches it"


def given_up_for_nothing(
    start: Start, before: Tables, after: Tables, names: Names, handled: Collection[str]
) -> Iterator[str]:
    """A message that every filter matches is passed only if the group gets, or has got, a later one of its key.

    Args:
        start: where it began.
        before: the tables then.
        after: the tables now.
        names: the names of messages.
        handled: names of messages that handlers were called with.
    """
    if not start.filters or G not in after.groups:
        return
    for ref, offset in invariants.settled(after) - invariants.settled(before):
        message = after.log.get(offset)
        if ref != G or message is None or coalesced(message) is None or names.at(offset) in handled:
            continue
        if not all(matches(message, policy) for policy in start.filters):
            continue
        if not _has_ended(message, after, names, handled):
            yield f"{names.at(offset)} was given up, and the group gets no later message of its key"


def _has_ended(message: Logged, after: Tables, names: Names, handled: Collection[str]) -> bool:
    """Whether the group gets, or has got, a later message of a coalesce key, or such a one has expired."""
    key = coalesced(message)
    later = [one for one in after.log.values() if one.offset > message.offset and key and coalesced(one) == key]
    return any(has_expired(one) or is_got(one, after, G) or names.at(one.offset) in handled for one in later)


def debounced_by_mistake(operations: Sequence[Operation], start: Start, after: Tables) -> Iterator[str]:
    """A debounced message is gone only if a later one is there; once that is in the log, it is gone or before it.

    Not if an operation has withdrawn one of them.
    """
    names = start.debounced
    log = {message.id: message.offset for message in after.log.values()}
    outbox = {message.id for message in after.outbox}
    withdrawn = {one.withdraws for one in operations if one.withdraws}
    for place, name in enumerate(names[:-1]):
        later = names[place + 1 :]
        if name not in outbox | log.keys() | withdrawn and not (outbox | log.keys() | withdrawn).intersection(later):
            yield f"{name} is gone, and no later message has replaced it"
        for other in later:
            if name not in withdrawn and other in log and (name in outbox or log.get(name, 0) > log[other]):
                yield f"{other} has entered the log before {name}"


def two_at_a_time(start: Start, after: Tables, names: Names) -> Iterator[str]:
    """Of the messages with one coalesce key that are in flight in shared mode, only one has started or may start.

    And none of them is later than the one that is noted: claims look only at that to see whether one is in flight.
    """
    if start.mode != "shared" or not start.failed:
        return
    noted = {
        (row.consumer_group, row.topic, row.partition_key, row.coalesce_key): row.message_offset
        for row in CoalesceKey.objects.all()
    }
    started = {one.offset: one.token for one in start.held.values()}
    runs: dict[tuple[str, str, str], list[str]] = {}
    for (ref, _, offset), row in sorted(after.state.items()):
        key = coalesced(after.log[offset]) if offset in after.log else None
        if key is None or ref != G or row.acked or not row.delivery_token:
            continue
        if started.get(offset) == row.delivery_token or noted.get(("", *key), 0) <= offset:
            runs.setdefault(key, []).append(names.at(offset))
        if noted.get((G.group, *key), 0) < offset:
            yield f"{names.at(offset)} is in flight, and an earlier message is noted as claimed last for its key"
    for ones in runs.values():
        if len(ones) > 1:
            yield f"{' and '.join(ones)} have one coalesce key and are in flight at the same time"


def gets(tables: Tables, ref: GroupRef, message: Message) -> bool:
    """Whether handlers of a group will be called with a message that it has not settled."""
    if has_expired(message) or is_superseded(message, tables, ref):
        return False
    policy = filter_of(tables.groups[ref])
    if policy is None or not invariants.is_for(message, ref):
        return invariants.is_for(message, ref)
    if isinstance(message, Logged) and message.offset <= invariants.offsets_of(tables, ref, message.key).claimed:
        return (ref, message.key, message.offset) in tables.state
    return matches(message, policy) or is_superseding(message, tables, ref)

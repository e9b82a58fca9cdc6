"""Rules of the protocol, each broken by itself, to show that the explorer would find it.

A mutation replaces one function of the service layer, or the lock at the end of
its statements, and knows nothing else of the code. If the function or the lock is
no longer there, nothing is replaced (``used`` stays empty) and the test fails.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import ModuleType
from typing import Any
from unittest.mock import patch

from django.db.backends.utils import CursorWrapper

from django_mysqlqueue.models import ConsumerOffset
from django_mysqlqueue.operations import dropping, seeking
from tests.support import internals
from tests.support.internals import (
    ClaimRequest,
    Mutex,
    Session,
    claiming,
    groups,
    heartbeats,
    leasing,
    retention,
    schedules,
    settling,
    watermarks,
)

Breaking = Callable[[], AbstractContextManager[object]]
SKIP, LOCK, SHARE = " FOR UPDATE SKIP LOCKED", " FOR UPDATE", " LOCK IN SHARE MODE"

BROKEN, OUTCOME, WAIT, DEADLOCK = "broken", "outcome", "wait", "deadlock"
"""An invariant, a count, an error or what is left when all is handled; and what an exploration compares."""


@dataclass(frozen=True)
class Mutation:
    """A rule that is broken."""

    name: str
    rule: str
    """Which one, in a sentence."""
    pair: str
    """The pair that finds it."""
    breaking: Breaking
    """Returns a context in which the rule is broken."""
    by: str = OUTCOME
    """The kind of finding. ``BROKEN`` is wrong by itself; the others count only if the unmutated pair lacks them."""
    bound: int = 1
    """Maximum number of preemptions of its schedules."""


used: Counter[str] = Counter()
"""Function → how often a mutation of it took effect."""
_inside = threading.local()


# -- ways to break something -------------------------------------------------------


def _module(name: str) -> ModuleType:
    found: ModuleType = getattr(internals, name)
    return found


def around(function: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Breaking:
    """Replaces a function of the service layer (``module.name``) by what ``make`` makes of it."""
    module, _, name = function.rpartition(".")
    original = getattr(_module(module), name)
    other = make(original)

    def instead(*args: Any, **kwargs: Any) -> Any:
        used[function] += 1
        return other(*args, **kwargs)

    return lambda: patch.object(_module(module), name, instead)


def instead_of(function: str, other: Callable[..., Any]) -> Breaking:
    return around(function, lambda _: other)


def locking(function: str, old: str, new: str) -> Breaking:
    """Replaces the lock at the end of the statements that a function of the service layer, or what it calls, sends."""
    module, _, name = function.rpartition(".")
    original = getattr(_module(module), name)

    def inside(*args: Any, **kwargs: Any) -> Any:
        _inside.depth = getattr(_inside, "depth", 0) + 1
        try:
            return original(*args, **kwargs)
        finally:
            _inside.depth -= 1

    execute, ask = CursorWrapper.execute, Session.ask

    def changed(text: str) -> str:
        if not getattr(_inside, "depth", 0) or not text.endswith(old):
            return text
        used[function] += 1
        return text.removesuffix(old) + new

    def replaced(self: CursorWrapper, text: Any, params: Any = None) -> Any:
        return execute(self, changed(text), params)

    def asked(self: Session, text: str, parameters: Sequence[Any] = ()) -> Any:
        return ask(self, changed(text), parameters)  # It is sent later.

    @contextlib.contextmanager
    def breaking() -> Iterator[None]:
        with (
            patch.object(_module(module), name, inside),
            patch.object(CursorWrapper, "execute", replaced),
            patch.object(Session, "ask", asked),
        ):
            yield

    return breaking


def seen_from(module: ModuleType, other: str, **functions: Callable[..., Any]) -> Breaking:
    """Replaces functions of a module (``other``) where one module calls them, and nowhere else."""

    real = getattr(module, other)

    class Seen:
        def __getattr__(self, name: str) -> Any:
            if name in functions:
                used[f"{other}.{name}"] += 1
                return functions[name]
            return getattr(real, name)

    return lambda: patch.object(module, other, Seen())


def both(*several: Breaking) -> Breaking:
    @contextlib.contextmanager
    def breaking() -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for one in several:
                stack.enter_context(one())
            yield

    return breaking


class _Counts(Session):
    """A session that reports for every joined statement as many rows as it has keys."""

    def execute(self, text: str, parameters: Sequence[Any] = ()) -> int:
        super().execute(text, parameters)
        return text.count("UNION ALL SELECT") + 1


def uncounted(function: str) -> Breaking:
    return around(function, lambda real: lambda session, *a, **k: real(_Counts(session.using), *a, **k))


# -- those that take more than a line ------------------------------------------------


def _fence_without_pause(*args: Any, **kwargs: Any) -> Any:
    answer = groups.ask_fence(*args, **kwargs)

    def read() -> Any:
        found = answer()
        return found and found._replace(paused=False)

    return read


def _none_is_lost(*args: Any) -> Callable[[], set[str]]:
    answer = leasing.ask_lost(*args)
    return lambda: answer() & set()


def _acks_without_token() -> AbstractContextManager[object]:
    used["settling.ONE_ROW"] += "delivery_token = %s" in settling.ONE_ROW
    broken = {name: getattr(settling, name).replace("delivery_token = %s", "%s > 0") for name in ("ONE_ROW", "ACK_ONE")}
    return patch.multiple(settling, **broken)


def _apply_with_the_rows_tokens(real: Callable[..., Any]) -> Callable[..., Any]:
    def apply(session: Session, ref: Any, outcomes: Any, *args: Any, **kwargs: Any) -> Any:
        there = settling._read_rows(session, ref, [(one.delivery.key, one.delivery.offset) for one in outcomes])
        outcomes = [
            one._replace(delivery=one.delivery._replace(token=token))
            for one in outcomes
            for token, _ in [there.get((one.delivery.key, one.delivery.offset), (one.delivery.token, False))]
        ]
        return real(session, ref, outcomes, *args, **kwargs)

    return apply


def _apply_failures_first(real: Callable[..., Any]) -> Callable[..., Any]:
    def apply(session: Session, ref: Any, outcomes: Any, *args: Any, **kwargs: Any) -> Any:
        failures = sorted(
            (one.delivery.key, one.delivery.offset) for one in outcomes if one.action not in settling.ACKS
        )
        settling._lock_rows(session, ref, failures, session.dialect.skip_locked)
        return real(session, ref, outcomes, *args, **kwargs)

    return apply


def _states_before_offsets() -> AbstractContextManager[object]:
    reset, delete = seeking._reset_offsets, seeking._delete_states
    forgotten: dict[int, list[int]] = {}
    """Operation → what its ``_delete_states`` says afterwards, as it would have said it."""
    emptied: set[int] = set()

    def first(session: Session, ref: Any, position: Any, operation: int, above: str, most: int) -> Any:
        used["seeking._reset_offsets"] += 1
        if operation in emptied:
            return reset(session, ref, position, operation, above, most)
        deleted = delete(session, ref, operation)
        if deleted is None:
            emptied.add(operation)
        else:
            forgotten.setdefault(operation, []).append(deleted)
        return 0, above

    def afterwards(session: Session, ref: Any, operation: int, limits: Any) -> int | None:
        return forgotten[operation].pop() if forgotten.get(operation) else None

    return both(
        lambda: patch.object(seeking, "_reset_offsets", first),
        lambda: patch.object(seeking, "_delete_states", afterwards),
    )()


def _with_any_options(real: Callable[..., Any]) -> Callable[..., Any]:
    def claim(session: Session, request: ClaimRequest) -> Any:
        return real(session, request._replace(claimant=request.claimant._replace(options=None)))

    return claim


def _change_without_pause(session: Session, ref: Any, **columns: Any) -> None:
    columns.pop("paused", None)
    columns.pop("after_seek", None)
    groups.change(session, ref, **columns)


def _only_that_it_is_there(session: Session, ref: Any, registration: int) -> None:
    groups.refuse_unfinished(ref, groups.lock(session, ref).after_seek)


def _forget_what_was_idle(session: Session, ref: Any, keys: list[str]) -> int:
    locked = sorted(watermarks.lock(session, ref, keys, skip_locked=True))
    if locked:
        text = session.dialect.delete_joined(retention.OFFSETS, ("k",), len(locked), retention.BY_KEY)
        session.execute(text, (*locked, *ref))
    return len(locked)


def _floors_of_those_with_rows(real: Callable[..., Any]) -> Callable[..., Any]:
    def floors(session: Session, topic: str, keys: list[str], **options: Any) -> Any:
        found, read_offset = real(session, topic, keys, **options)
        if found is None:
            return None, read_offset
        marks: dict[str, list[int]] = {key: [] for key in keys}
        rows = ConsumerOffset.objects.using(session.using).filter(topic=topic, partition_key__in=keys)
        for key, acked in rows.values_list("partition_key", "offset_acked"):
            marks[key].append(acked)
        return {key: min(marks[key], default=floor) for key, floor in found.items()}, read_offset

    return floors


def _heartbeats_first() -> AbstractContextManager[object]:
    acquire, lock, live = leasing.acquire, leasing.lock, heartbeats.live

    def acquiring(using: str, ref: Any, subscriber: str, keys: Any, *, lease_ms: int, steal: bool = True) -> Any:
        _inside.lease_ms, _inside.alive = lease_ms, None
        try:
            return acquire(using, ref, subscriber, keys, lease_ms=lease_ms, steal=steal)
        finally:
            _inside.lease_ms = None

    def locking(session: Session, ref: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(_inside, "lease_ms", None) is not None:
            used["leasing.acquire"] += 1
            _inside.alive = live(session, [ref], _inside.lease_ms)
        return lock(session, ref, *args, **kwargs)

    def reading(session: Session, refs: Any, lease_ms: int, **options: Any) -> Any:
        if getattr(_inside, "lease_ms", None) is not None and _inside.alive is not None:
            return _inside.alive
        return live(session, refs, lease_ms, **options)

    return both(
        lambda: patch.object(leasing, "acquire", acquiring),
        lambda: patch.object(leasing, "lock", locking),
        lambda: patch.object(heartbeats, "live", reading),
    )()


def _drained_before_the_lock() -> AbstractContextManager[object]:
    drop, with_work = leasing.drop_drained, leasing.with_work

    def dropping(using: str, ref: Any, subscriber: str, keys: Any) -> set[str]:
        used["leasing.drop_drained"] += 1
        _inside.busy = with_work(Session(using), ref, keys)
        try:
            return drop(using, ref, subscriber, keys)
        finally:
            _inside.busy = None

    def remembered(session: Session, ref: Any, keys: Any) -> set[str]:
        busy = getattr(_inside, "busy", None)
        return with_work(session, ref, keys) if busy is None else set(busy)

    return both(
        lambda: patch.object(leasing, "drop_drained", dropping),
        lambda: patch.object(leasing, "with_work", remembered),
    )()


def _registered_blindly(session: Session, *, name: str, definition: Any) -> None:
    """Writes the row as it was when it was read before."""
    row = schedules.read(session, [name])[name]
    session.execute(
        f"UPDATE {schedules.SCHEDULES} SET definition = %s, last_tick = %s WHERE name = %s",
        (definition.as_json(), row.last_tick, name),
    )


def _mine_from_the_last(using: str, ref: Any, subscriber: str, keys: Any) -> set[str]:
    def check(session: Session) -> set[str]:
        owners = {key: leasing.lock(session, ref, [key]).get(key) for key in sorted(keys, reverse=True)}
        return {key for key, owner in owners.items() if owner == subscriber}

    return leasing.run(using, check)


# -- all of them ----------------------------------------------------------------------

_SEEK_TWICE = "busy: seek to the beginning x seek to the beginning, claim, pause"


def _together(*ways: Breaking) -> Breaking:
    """Breaks several things at once."""

    @contextlib.contextmanager
    def breaking() -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for way in ways:
                stack.enter_context(way())
            yield

    return breaking


MUTATIONS = (
    Mutation(
        "a claim under any options",
        "A claim takes and passes nothing if its process knows another filter than the group has.",
        "filtered: claim with a filter x register another filter",
        around("claiming._claim", _with_any_options),
        by=BROKEN,
    ),
    Mutation(
        "options that are compared without a lock",
        "A filter cannot be changed while a claim applies the one before.",
        "filtered_shared: claim with a filter x register another filter and publish",
        locking("groups.ask_fence", SHARE, ""),
        by=BROKEN,
    ),
    Mutation(
        "a fence without its lock",
        "Whoever works for a group holds its row shared, so that no seek or drop begins meanwhile.",
        "busy: seek to the beginning x claim",
        locking("groups.ask_fence", SHARE, ""),
        by=BROKEN,
        bound=2,
    ),
    Mutation(
        "a claim in a paused group",
        "Nothing is claimed while a group is paused: a seek or drop counts on it.",
        "busy: seek to the beginning x claim",
        seen_from(claiming, "groups", ask_fence=_fence_without_pause),
        by=BROKEN,
    ),
    Mutation(
        "a claim under another's lease",
        "In ordered mode a partition is claimed by the owner of its lease alone.",
        "forsaken: take over x claim again",
        seen_from(claiming, "leasing", ask_lost=_none_is_lost),
    ),
    Mutation(
        "a claim that does not lock the leases",
        "A lease is not given away while its owner claims under it.",
        "forsaken: take over x claim again",
        locking("leasing.ask_lost", LOCK, ""),
    ),
    Mutation(
        "an ack without its token",
        "A delivery that has been handed out again is not settled by its former holder.",
        "forsaken: take over x ack in a transaction",
        _acks_without_token,
    ),
    Mutation(
        "a flush that takes stale tokens",
        "A flush settles only what bears the token of its delivery.",
        "forsaken: take over x flush acks",
        around("settling.apply", _apply_with_the_rows_tokens),
    ),
    Mutation(
        "a claim that waits for deliveries",
        "A claim passes over deliveries that somebody has locked: a handler's transaction may last.",
        "busy: claim again x ack in a transaction",
        locking("redelivering._lock_due", SKIP, LOCK),
        by=WAIT,
    ),
    Mutation(
        "a claim that does not lock deliveries",
        "A delivery is handed out again by whoever has locked its row, and found it due then.",
        "shared: claim, shared x claim, shared",
        locking("redelivering._lock_due", SKIP, ""),
    ),
    Mutation(
        "a redelivery that does not lock the offsets row of a message with a coalesce key",
        "Which message of a coalesce key was claimed last is noted under the lock of the partition's offsets row.",
        "coalesced_later: redeliver, shared x sequence, claim, shared",
        locking("redelivering._read_coalesce_keys", SKIP, ""),
        by=BROKEN,
    ),
    Mutation(
        "a claim that gives up a message and does not note for which one",
        "A message for which others were given up passes every later filter.",
        "superseding: claim that supersedes, with a filter x register another filter",
        instead_of("superseding.note", lambda session, rows: None),
        by=BROKEN,
    ),
    Mutation(
        "a sequencer without its mutex",
        "One transaction at a time appends to the log.",
        "busy: sequence x sequence",
        instead_of("sequencing._taken", lambda session, answer: Mutex()),
    ),
    Mutation(
        "a requeue that does not lock the messages",
        "A message of the quarantine is requeued by whoever has locked it.",
        "refused: requeue x requeue",
        locking("quarantine.topics", LOCK, ""),
        by=BROKEN,
    ),
    Mutation(
        "a quarantine that counts what others have deleted",
        "An operation on the quarantine reports the messages that it has taken itself.",
        "refused: delete quarantined x delete quarantined",
        uncounted("quarantine.delete"),
        by=BROKEN,
    ),
    Mutation(
        "a sequencer that does not lock scheduled rows",
        "A scheduled row belongs to whoever has it locked, even when it comes due while it is being cancelled.",
        "busy: cancel scheduled x sequence, later",
        locking("sequencing._take_scheduled", SKIP, ""),
    ),
    Mutation(
        "a seek that does not compare its operation",
        "Each step of a seek is done only while its own operation is under way.",
        _SEEK_TWICE,
        seen_from(seeking, "steps", refuse_stopped=lambda *args: None),
        by=BROKEN,
    ),
    Mutation(
        "a seek that deletes deliveries before it stores offsets",
        "A seek puts watermark and cursor to their new place before it deletes deliveries.",
        "behind: seek to the beginning x sweep, collect",
        _states_before_offsets,
    ),
    Mutation(
        "a drop that does not compare its operation",
        "Each step of a drop is done only while its own operation is under way.",
        "fresh: drop x drop, join",
        seen_from(dropping, "steps", refuse_stopped=lambda *args: None),
        by=BROKEN,
    ),
    Mutation(
        "a drop that does not pause first",
        "A drop pauses its group before it deletes anything.",
        "fresh: join x drop",
        _together(
            seen_from(dropping, "groups", change=_change_without_pause),
            seen_from(dropping, "steps", refuse_stopped=lambda *args: None),  # which would stop it at once
        ),
        by=BROKEN,
    ),
    Mutation(
        "a retry in a later life of its group",
        "A retry leaves alone what waits in a group that was dropped and registered again.",
        "busy: retry x drop, join, fail everything",
        instead_of("retrying._check", _only_that_it_is_there),
    ),
    Mutation(
        "GC that reads the log before it locks",
        "An offsets row is forgotten when the log holds nothing of its partition, seen under the row's lock.",
        "emptied: collect x sequence, claim, ack everything",
        instead_of("retention.forget_positions", _forget_what_was_idle),
    ),
    Mutation(
        "GC that passes over groups without offsets rows",
        "A group that has not begun with a partition keeps all of it.",
        "buried: redrive x collect",
        around("retention.floors", _floors_of_those_with_rows),
        by=BROKEN,
    ),
    Mutation(
        "GC that counts what others have deleted",
        "What GC reports as deleted it has deleted itself.",
        "all_settled: collect x collect",
        uncounted("retention._collect_chunk"),
    ),
    Mutation(
        "a redrive that does not lock the dead letters",
        "A dead letter is taken by whoever has locked it.",
        "buried: redrive x redrive",
        locking("redriving._lock", SKIP, ""),
    ),
    Mutation(
        "an undo that does not wait for claims",
        "An undo begins when the transaction of the claim is over on the server.",
        "busy: claim x undo the claim",
        instead_of("groups.wait_for_claims", lambda session, ref: None),
        by=BROKEN,
    ),
    Mutation(
        "heartbeats read before the leases are locked",
        "Whether an owner lives is read when its lease is locked.",
        "forsaken: take over x beat, verify leases",
        _heartbeats_first,
    ),
    Mutation(
        "a lease that is dropped by an earlier look",
        "A lease is deleted only when its partition is seen drained under the lease's lock.",
        "emptied: drop drained leases x sequence, take over",
        _drained_before_the_lock,
    ),
    Mutation(
        "deletes that are not counted",
        "A watermark passes only what its transaction has deleted with its token, and counts that.",
        "forsaken_shared: claim, shared x flush acks",
        uncounted("watermarks._delete_passed"),
        by=BROKEN,
    ),
    Mutation(
        "offsets rows created outside the fence",
        "Offsets rows are created under the group's lock, at its start offset as it is then.",
        "busy: drop x create offsets rows",
        locking("watermarks.create_missing", SHARE, ""),
        by=BROKEN,
    ),
    Mutation(
        "offsets rows that are not locked",
        "Watermark and cursor are moved by whoever has locked their row.",
        "busy: claim x flush acks",
        locking("watermarks.lock", LOCK, ""),
        by=BROKEN,
    ),
    Mutation(
        "a flush that locks failures before it deletes acks",
        "Deliveries are locked in the order of their keys, and what waits comes before what passes over.",
        "busy: claim and flush x settle in a transaction",
        around("settling.apply", _apply_failures_first),
        by=BROKEN,
    ),
    Mutation(
        "dead-letter now without the group's lock",
        "An operator dead-letters while no claim, seek or drop of the group is under way.",
        "busy: seek to the beginning x dead-letter now",
        locking("dead_lettering.dead_letter_now", LOCK, ""),
        by=DEADLOCK,
    ),
    Mutation(
        "a heartbeat removed without its lock",
        "A heartbeat is removed by whoever has locked it and found it old.",
        "forsaken: remove the subscriber x beat",
        locking("heartbeats.remove", LOCK, ""),
    ),
    Mutation(
        "leases locked from the last to the first",
        "Rows of one table are locked in the order of their keys.",
        "busy: verify leases x release leases",
        instead_of("leasing.verify_owned", _mine_from_the_last),
        by=DEADLOCK,
    ),
    Mutation(
        "leases that are waited for",
        "Who takes leases passes over those that are locked: their owner is at work.",
        "busy: claim x take over",
        locking("leasing.acquire", SKIP, LOCK),
        by=WAIT,
    ),
    Mutation(
        "a seek that waits for handlers",
        "A seek passes over deliveries that an open transaction has locked.",
        "busy: seek to the beginning x ack in a transaction",
        locking("steps.delete_states", SKIP, LOCK),
        by=WAIT,
    ),
    Mutation(
        "a debounce that does not lock what it replaces",
        "A debounced message that another transaction reschedules is not replaced.",
        "debounced: sequence x reschedule a debounced message",
        locking("debouncing._read", SKIP, ""),
    ),
    Mutation(
        "a debounce that ignores what others have locked",
        "While a message of a key is being cancelled, no other one of it enters the log.",
        "debounced: sequence x cancel a debounced message, rolled back",
        instead_of("debouncing._busy", lambda session, ids: set()),
        by=BROKEN,
    ),
    Mutation(
        "a cancellation that does not look under its lock",
        "Whoever cancels or moves a scheduled message decides by the row as it is under its lock.",
        "busy: cancel scheduled x deliver scheduled now",
        locking("scheduling.remove", SKIP, ""),
    ),
    Mutation(
        "a tick without the lock of its schedule",
        "A tick is decided by whoever has locked the schedule's row.",
        "scheduled_free: tick x tick",
        locking("schedules._tick", SKIP, ""),
    ),
    Mutation(
        "a tick that is waited for",
        "A process leaves a tick to the one that has locked the schedule's row.",
        "scheduled_free: tick x tick",
        locking("schedules._tick", SKIP, LOCK),
        by=WAIT,
    ),
    Mutation(
        "a registration that does not look under its lock",
        "A schedule whose times have changed begins with its next tick, and never goes back.",
        "scheduled_free: tick x register the schedule with other arguments",
        instead_of("schedules._register", _registered_blindly),
    ),
    Mutation(
        "a schedule edited without its lock",
        "Of two edits of a schedule, the second one changes what the first one has written.",
        "scheduled_by_people: edit the arguments of the schedule x edit the times of the schedule",
        locking("recurring.run", LOCK, ""),
    ),
    Mutation(
        "a schedule deleted without its lock",
        "A schedule is deleted by whoever has locked it and found that no process declares it.",
        "scheduled: register the schedule with other times x delete the schedule",
        locking("recurring.run", LOCK, ""),
    ),
)

SURVIVORS = {
    "watermarks that are stored without max": (
        "Nothing changes: whoever stores has locked the offsets row, and what it computes from it lies above. "
        "Rows that are not locked are another matter, which is found."
    ),
}
"""Rules that can be broken without a trace, and why."""

"""Checks of times: late starts, unnecessary repetitions, concurrent handling in a partition, and long waits.

Times are from ``records.now``, one clock for the whole machine, and part of each record. A check excuses a violation
only if a disturbance of the process or the server at that time explains it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence

from soak import plan
from soak.facts import Evidence, Trouble, Verdict, verdict
from soak.plan import AWAY, FREEZES, LEASE, SHUTDOWNS, Group
from soak.records import COMMITTED, ENDS, FAILED, LEFT, STARTED, Step
from soak.shutdowns import cut_off

CLEARLY = 2.0
"""Seconds after which an event certainly happened later: a thread may be late to execute its first line."""
THREADS = 4
"""Calls that a process may have been about to make when it was frozen: one per handler thread."""
CALM = 2 * LEASE
"""Seconds after which a cut connection or an outage no longer affects leases and acks."""
LONGEST_WAIT = 60.0
"""Maximum seconds from the commit to the start of the first attempt, without outages and freezes."""


def starts_of(evidence: Evidence, group: Group) -> list[Step]:
    return [step for step in evidence.steps.get(group.name, ()) if step.verb == STARTED]


def check_settled(evidence: Evidence, group: Group) -> Verdict:
    """Check that no message starts after the watermark has passed it.

    Excused are the calls that a process was about to make when it was frozen, if they start right after it was resumed.
    """
    marks = _marks(evidence, group)
    excused: dict[Trouble, set[tuple[str, float]]] = defaultdict(set)
    starts = starts_of(evidence, group)

    def may_start(step: Step) -> bool:
        for trouble in evidence.troubles:
            thawed = trouble.kind in FREEZES and trouble.pid == step.pid
            if thawed and trouble.until - CLEARLY < step.at < trouble.until + CLEARLY:
                excused[trouble].add((step.process, step.at))
                return len(excused[trouble]) <= THREADS
        return False

    def violations() -> Iterator[str]:
        for step in starts:
            times, watermarks = marks[step.key]
            place = bisect_right(times, step.at - CLEARLY) - 1
            if place >= 0 and watermarks[place] >= step.offset and not may_start(step):
                late = step.at - times[bisect_right(watermarks, step.offset - 1)]
                yield f"{step.message_id} at {step.offset} of {step.key} started {late:.1f} s after it was settled"

    name = f"{group.name}: no message was handled after it was settled"
    return verdict(name, f"{len(starts)} starts, {len(evidence.progress)} samples", violations())


def _marks(evidence: Evidence, group: Group) -> dict[str, tuple[list[float], list[int]]]:
    """Return, by partition, the times at which the watermark was first seen to rise, and its values."""
    marks: dict[str, tuple[list[float], list[int]]] = defaultdict(lambda: ([], []))
    for sample in evidence.progress:
        for (name, key), (watermark, _) in sample.places.items():
            if name != group.name:
                continue
            times, watermarks = marks[key]
            if watermark > (watermarks[-1] if watermarks else 0):
                times.append(sample.at)
                watermarks.append(watermark)
    return marks


def check_repeats(evidence: Evidence, group: Group) -> Verdict:
    """Check that an attempt is repeated only if it may have been lost.

    After a failure, the next attempt has the next number. An attempt with the same number was cut off or lost: see
    ``_explains`` for the possible causes. (The check also fails on a machine that is so slow that a process makes no
    progress for the duration of a lease.)
    """
    unfinished = _cut_off(evidence, group)
    again: Counter[str] = Counter()
    # Sort by time, not by order of writing: a process may be frozen between reading the clock and writing.
    starts = sorted(starts_of(evidence, group), key=lambda step: step.at)

    def violations() -> Iterator[str]:
        last: dict[tuple[str, int], Step] = {}
        for step in starts:
            if step.attempt > plan.MAX_ATTEMPTS:
                yield f"{step.message_id} had attempt number {step.attempt}"
            before = last.get((step.message_id, step.attempt))
            last[step.message_id, step.attempt] = step
            if before is None:
                continue
            again[step.message_id] += 1
            if before not in unfinished and not _is_explained(_troubles(evidence, group), before, step):
                later = step.at - before.at
                yield f"{_shown(step)} repeated attempt {step.attempt} after {later:.1f} s without a reason"

    found = list(violations())
    compared = f"{again.total()} repeated attempts, at most {max(again.values(), default=0)} of one message"
    return verdict(f"{group.name}: attempts are repeated only after a loss", compared, found)


def check_cut_off(evidence: Evidence, group: Group) -> Verdict:
    """Check that no attempt is counted for a message whose handler a shutdown has cut off.

    One that has failed when the process stopped waiting for it may have failed in time.
    """
    unfinished = _cut_off(evidence, group)
    others = [one for one in _troubles(evidence, group) if one.kind not in SHUTDOWNS]
    repeated = 0

    def violations() -> Iterator[str]:
        nonlocal repeated
        last: dict[str, Step] = {}
        for step in sorted(starts_of(evidence, group), key=lambda step: step.at):
            before = last.get(step.message_id)
            last[step.message_id] = step
            if before is None or before not in unfinished:
                continue
            end = unfinished[before]
            if end is not None and end.verb in (FAILED, LEFT):
                continue
            repeated += 1
            if step.attempt != before.attempt and not _is_explained(others, before, step):
                yield f"{_shown(step)} was cut off in attempt {before.attempt}, and had attempt {step.attempt} next"

    found = list(violations())
    return verdict(f"{group.name}: a shutdown counts no attempt", f"{repeated} messages that were cut off", found)


def _cut_off(evidence: Evidence, group: Group) -> dict[Step, Step | None]:
    """Return the starts of a group that a shutdown has cut off, and their ends."""
    return cut_off(evidence.steps.get(group.name, ()), evidence.troubles)


def _troubles(evidence: Evidence, group: Group) -> list[Trouble]:
    """Return the disturbances that concern a group."""
    return [one for one in evidence.troubles if one.group in ("", group.name)]


def _is_explained(troubles: Iterable[Trouble], first: Step, again: Step) -> bool:
    return any(_explains(one, first, again) for one in troubles)


def _explains(trouble: Trouble, first: Step, again: Step) -> bool:
    """Return whether a disturbance may be the reason for repeating the attempt ``first`` as ``again``.

    A disturbance of a process explains what happens to its own deliveries. A disturbance of the server or of
    connections explains everything for a while.
    """
    if trouble.since > again.at:
        return False
    if trouble.pid:
        return trouble.pid in (first.pid, again.pid) and trouble.until >= first.at - CLEARLY
    return trouble.until >= first.at - CALM


def check_alone(evidence: Evidence, group: Group) -> Verdict:
    """Check that no message of a partition starts while another one is being handled.

    Within a process this has no exceptions. Between processes it is checked only if the first one lived to finish, and
    nothing explains the loss of its lease, because a takeover does not wait for handlers. Nor does a shutdown wait for
    those that it has cut off.
    """
    unfinished = _cut_off(evidence, group)
    steps = evidence.steps.get(group.name, ())
    taken_over = 0

    def violations() -> Iterator[str]:
        nonlocal taken_over
        opened: dict[str, dict[tuple[str, int], Step]] = defaultdict(dict)
        meanwhile: dict[tuple[str, str, int], list[Step]] = defaultdict(list)
        for step in steps:
            here = opened[step.key]
            if step.verb in ENDS and (first := here.pop((step.process, step.offset), None)) is not None:
                others = meanwhile.pop((step.key, step.process, step.offset), [])
                taken_over += len(others)
                for other in others:
                    if first not in unfinished and not _is_explained(_troubles(evidence, group), first, other):
                        yield f"{_shown(other)} started while another process handled {_shown(first)}"
            if step.verb != STARTED:
                continue
            for (process, offset), other in here.items():
                if process != step.process:
                    meanwhile[step.key, process, offset].append(step)
                elif not (group.batch and other.at == step.at):
                    yield f"{_shown(step)} started while the same process handled {_shown(other)}"
            here[step.process, step.offset] = step

    found = list(violations())
    compared = f"{len(steps)} steps, {taken_over} starts beside a process that had lost its lease"
    return verdict(f"{group.name}: one message of a partition at a time", compared, found)


def check_effects(evidence: Evidence, group: Group) -> Verdict:
    """Check that the effects of a partition's messages are in the order of their offsets.

    Only a failed attempt lets later messages overtake: one that raised an error or was nacked, or whose transaction may
    have failed because of a disturbance of the server or of connections. A lost process does not.
    """
    steps: dict[str, list[Step]] = defaultdict(list)
    for step in evidence.steps.get(group.name, ()):
        steps[step.message_id].append(step)
    effects = [one for one in evidence.effects.get(group.name, ()) if one in steps]

    def may_have_failed(mine: Sequence[Step]) -> bool:
        server = (one for one in evidence.troubles if not one.pid)
        return any(one.verb in (FAILED, LEFT) for one in mine) or _is_explained(server, mine[0], mine[-1])

    def violations() -> Iterator[str]:
        highest: dict[str, Step] = {}
        for message_id in effects:
            step = steps[message_id][0]
            last = highest.setdefault(step.key, step)
            if step.offset > last.offset:
                highest[step.key] = step
            elif step.offset < last.offset and not may_have_failed(steps[message_id]):
                yield f"{_shown(step)} took effect after {_shown(last)}"

    return verdict(f"{group.name}: effects of a partition in order", f"{len(effects)} effects", violations())


def _shown(step: Step) -> str:
    return f"{step.message_id} at {step.offset} of {step.key}"


def check_waiting(evidence: Evidence, groups: Sequence[Group]) -> list[Verdict]:
    """Check that no committed message waits for long, and that no partition with waiting messages is stalled.

    The first check also fails if a partition receives more messages than its handler can take. The second one counts
    from the start of the previous message of the partition, so it fails only if the partition is forgotten. Times
    during which the server was away, a subscriber was frozen or a move was interrupted do not count, nor does one lease
    duration after the server is back. Scheduled messages are not checked.
    """
    committed = _committed(evidence)
    excused = _merged(
        (one.since, one.until + (LEASE if one.kind in AWAY else 0.0))
        for one in evidence.troubles
        if one.kind in AWAY | {plan.KILL_MOVE} | FREEZES - {plan.FREEZE_PUBLISHER}
    )
    waits: list[tuple[float, float, str]] = []
    stops: list[tuple[float, float, str]] = []

    def net(since: float, to: float) -> float:
        return to - since - sum(max(0.0, min(to, end) - max(since, begin)) for begin, end in excused)

    for group in groups:
        seen: set[str] = set()
        before: dict[str, float] = {}
        for step in starts_of(evidence, group):
            if step.message_id in seen:
                continue
            seen.add(step.message_id)
            since = committed.get(step.message_id, step.at)
            stopped = max(since, before.get(step.key, since))
            before[step.key] = step.at
            what = f"{group.name}: {_shown(step)}"
            waits.append((net(since, step.at), step.at - since, what))
            stops.append((net(stopped, step.at), step.at - stopped, what))
    return [
        verdict(
            "no message waits for long",
            _longest(waits),
            (
                f"{what} started {seconds:.1f} s after its commit"
                for seconds, _, what in waits
                if seconds > LONGEST_WAIT
            ),
        ),
        verdict(
            "no partition is stalled",
            _longest(stops),
            (
                f"{what} started after a pause of {seconds:.1f} s"
                for seconds, _, what in stops
                if seconds > LONGEST_WAIT
            ),
        ),
    ]


def _longest(times: Sequence[tuple[float, float, str]]) -> str:
    seconds = max((one[0] for one in times), default=0.0)
    with_outages = max((one[1] for one in times), default=0.0)
    return f"{len(times)} first attempts, the longest wait {seconds:.1f} s, with outages {with_outages:.1f} s"


def _committed(evidence: Evidence) -> dict[str, float]:
    """Return, by message, when its publisher knew that it was committed. Scheduled messages are left out."""
    places = {(entry.publisher, entry.number): entry.message_id for entry in evidence.ledger if not entry.scheduled}
    return {
        places[one.publisher, number]: one.at
        for one in evidence.transactions
        if one.verb == COMMITTED and one.at
        for number in range(one.first, one.last)
        if (one.publisher, number) in places
    }


def _merged(spans: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    merged: list[tuple[float, float]] = []
    for since, to in sorted(spans):
        if merged and since <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(to, merged[-1][1]))
        else:
            merged.append((since, to))
    return merged

"""The proof: what was committed, beside what every group did with it. No database, no files."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import median

from soak import timeline
from soak.facts import Collected, DeadLetter, Entry, Evidence, Verdict, verdict
from soak.plan import MAX_ATTEMPTS, POISON, Group, fate, is_for_the_dlq
from soak.records import AGAIN, COMMITTED, DONE, FAILED, REJECTED, ROLLED_BACK, STARTED, WRONG, Step

__all__ = ["Collected", "DeadLetter", "Entry", "Evidence", "Verdict", "check", "verdict"]

GC_TIME = 10_000.0
"""Milliseconds that the last GC may take."""
MEMORY_FACTOR, MEMORY_SLACK = 1.15, 8.0
"""How much the last third of a process's memory may be above the first: a share, and megabytes."""


def check(evidence: Evidence, groups: Sequence[Group]) -> list[Verdict]:
    """Every promise of the queue that the evidence can break."""
    verdicts = [
        check_ledger(evidence),
        check_offsets(evidence),
        check_publishing_order(evidence),
        check_identity(evidence),
        *timeline.check_waiting(evidence, groups),
    ]
    for group in groups:
        verdicts += [check_handled(evidence, group), check_dead_letters(evidence, group)]
        verdicts += [timeline.check_settled(evidence, group), timeline.check_repeats(evidence, group)]
        if group.atomic:
            verdicts.append(check_exactly_once(evidence, group))
        if group.ordered:
            verdicts += [check_order(evidence, group), timeline.check_alone(evidence, group)]
        if group.strict:
            verdicts.append(check_strict_order(evidence, group))
    return verdicts


# -- publishing ---------------------------------------------------------------


def check_ledger(evidence: Evidence) -> Verdict:
    """The ledger agrees with what publishers know of their own transactions."""

    def violations() -> Iterator[str]:
        written = {(entry.publisher, entry.number) for entry in evidence.ledger}
        for one in evidence.transactions:
            numbers = {(one.publisher, number) for number in range(one.first, one.last)}
            if one.verb == COMMITTED and not numbers <= written:
                yield f"{one.publisher} committed {one.first} to {one.last - 1}, which the server has not"
            if one.verb == ROLLED_BACK and numbers & written:
                yield f"{one.publisher} rolled {one.first} to {one.last - 1} back, and the server has them"

    return verdict("the server kept what it had committed", f"{len(evidence.transactions)} transactions", violations())


def _offsets(evidence: Evidence) -> dict[str, set[int]]:
    offsets: dict[str, set[int]] = defaultdict(set)
    for steps in evidence.steps.values():
        for step in steps:
            offsets[step.message_id].add(step.offset)
    return offsets


def check_offsets(evidence: Evidence) -> Verdict:
    """A message has one place in the log, and a place one message: repeats were dropped."""

    def violations() -> Iterator[str]:
        owners: dict[int, str] = {}
        for message_id, offsets in _offsets(evidence).items():
            if len(offsets) > 1:
                yield f"{message_id} is at the offsets {sorted(offsets)}"
            for offset in offsets:
                if owners.setdefault(offset, message_id) != message_id:
                    yield f"offset {offset} is {owners[offset]} and {message_id}"

    return verdict("one place in the log for each message", f"{len(evidence.ledger)} messages", violations())


def check_publishing_order(evidence: Evidence) -> Verdict:
    """What a publisher published later has the higher offset (scheduled messages take theirs when they are due)."""

    def violations() -> Iterator[str]:
        offsets = {message_id: min(places) for message_id, places in _offsets(evidence).items()}
        last: dict[str, tuple[int, int]] = {}
        for entry in sorted(evidence.ledger, key=lambda entry: (entry.publisher, entry.number)):
            offset = offsets.get(entry.message_id)
            if entry.scheduled or offset is None:
                continue
            number, before = last.get(entry.publisher, (-1, 0))
            if offset < before:
                yield f"{entry.publisher}: {entry.number} is at {offset}, {number} before it at {before}"
            last[entry.publisher] = (entry.number, offset)

    return verdict("offsets in the order of publishing", f"{len(evidence.ledger)} messages", violations())


def check_identity(evidence: Evidence) -> Verdict:
    """Every message comes in the partition that it was published to, with its own payload.

    That of a repeat only where the first was scheduled: it had no place in the log yet.
    """
    keys = {entry.message_id: entry.key for entry in evidence.ledger}
    scheduled = {entry.message_id for entry in evidence.ledger if entry.scheduled}
    steps = [(group, step) for group, steps in evidence.steps.items() for step in steps]

    def violations() -> Iterator[str]:
        for group, step in steps:
            key = keys.get(step.message_id, step.key)
            if step.verb == WRONG:
                yield f"{group}: {step.message_id} came with the payload of another"
            elif step.verb == AGAIN and step.message_id not in scheduled:
                yield f"{group}: {step.message_id} came with the payload of its repeat"
            elif step.verb == STARTED and step.key != key:
                yield f"{group}: {step.message_id} came in partition {step.key}, not {key}"

    return verdict("each in its partition, with its payload", f"{len(steps)} steps", violations())


# -- handling -----------------------------------------------------------------


def handled(evidence: Evidence, group: Group) -> set[str]:
    """What the group's handlers have done: of atomic ones the committed effects count."""
    if group.atomic:
        return set(evidence.effects.get(group.name, ()))
    ended = {DONE, REJECTED}
    return {step.message_id for step in evidence.steps.get(group.name, ()) if step.verb in ended}


def check_handled(evidence: Evidence, group: Group) -> Verdict:
    """Committed set = handled set; a poisoned message is never handled."""

    def violations() -> Iterator[str]:
        committed = {entry.message_id: entry for entry in evidence.ledger}
        expected = {one for one in committed if fate(group.name, one) != POISON}
        done = handled(evidence, group)
        for message_id in sorted(expected - done):
            yield f"{message_id} (partition {committed[message_id].key}) was committed and never handled"
        for message_id in sorted(done - committed.keys()):
            yield f"{message_id} was handled and never committed"
        for message_id in sorted((done & committed.keys()) - expected):
            yield f"{message_id} was handled, which always fails"
        for message_id in sorted({step.message_id for step in evidence.steps.get(group.name, ())} - committed.keys()):
            yield f"{message_id} was started and never committed"

    return verdict(f"{group.name}: what was committed was handled", f"{len(evidence.ledger)} messages", violations())


def check_dead_letters(evidence: Evidence, group: Group) -> Verdict:
    """In the DLQ is what was to fail for good, once, after its attempts, and nothing else."""
    letters = [letter for letter in evidence.dead if letter.group == group.name]

    def violations() -> Iterator[str]:
        counts = Counter(letter.message_id for letter in letters)
        expected = {entry.message_id for entry in evidence.ledger if is_for_the_dlq(group.name, entry.message_id)}
        for message_id in sorted(expected - counts.keys()):
            yield f"{message_id} is not in the DLQ"
        for letter in letters:
            if letter.message_id not in expected:
                last = letter.error.strip().rsplit("\n", 1)[-1]
                yield f"{letter.message_id} is in the DLQ after {letter.attempts} attempts: {last}"
            elif fate(group.name, letter.message_id) == POISON and letter.attempts != MAX_ATTEMPTS:
                yield f"{letter.message_id} is in the DLQ after {letter.attempts} attempts, not {MAX_ATTEMPTS}"
        for message_id, count in counts.items():
            if count > 1:
                yield f"{message_id} is in the DLQ {count} times"

    return verdict(f"{group.name}: the DLQ holds what failed for good", f"{len(letters)} dead letters", violations())


def check_exactly_once(evidence: Evidence, group: Group) -> Verdict:
    effects = evidence.effects.get(group.name, Counter())
    doubled = (f"{message_id} took effect {count} times" for message_id, count in effects.items() if count > 1)
    return verdict(f"{group.name}: effects exactly once", f"{effects.total()} effects", doubled)


def _first_starts(steps: Iterable[Step]) -> dict[str, dict[int, Step]]:
    """By partition: the first start of each message, in the order in which they happened."""
    starts: dict[str, dict[int, Step]] = defaultdict(dict)
    for step in steps:
        if step.verb == STARTED:
            starts[step.key].setdefault(step.offset, step)
    return starts


def check_order(evidence: Evidence, group: Group) -> Verdict:
    """The first starts of a partition's messages are in the order of their offsets."""
    starts = _first_starts(evidence.steps.get(group.name, ()))

    def violations() -> Iterator[str]:
        for key, steps in starts.items():
            highest = 0
            for offset, step in steps.items():
                if offset < highest:
                    yield f"{step.message_id} at {offset} of {key} started after the one at {highest}"
                highest = max(highest, offset)

    return verdict(
        f"{group.name}: first starts in order",
        f"{sum(map(len, starts.values()))} first starts in {len(starts)} partitions",
        violations(),
    )


def check_strict_order(evidence: Evidence, group: Group) -> Verdict:
    """When a message starts, all before it have been done, rejected or have used up their attempts."""
    dead = {letter.message_id for letter in evidence.dead if letter.group == group.name}

    def violations() -> Iterator[str]:
        unsettled: dict[str, dict[int, str]] = defaultdict(dict)
        settled: set[str] = set()
        for step in evidence.steps.get(group.name, ()):
            waiting = unsettled[step.key]
            used_up = step.attempt >= MAX_ATTEMPTS and step.message_id in dead
            if step.verb in (DONE, REJECTED) or (used_up and step.verb in (STARTED, FAILED)):
                # Of a start that was lost there is no end on record: the attempts decide.
                settled.add(step.message_id)
                waiting.pop(step.offset, None)
            elif step.verb == STARTED and step.message_id not in settled:
                waiting.setdefault(step.offset, step.message_id)
            if step.verb == STARTED:
                for offset, message_id in waiting.items():
                    if offset < step.offset:
                        yield (
                            f"{step.message_id} at {step.offset} of {step.key} started while {message_id} "
                            f"at {offset} was not done"
                        )

    name = f"{group.name}: nothing starts before what is before it has ended"
    return verdict(name, f"{len(evidence.steps.get(group.name, ()))} steps", violations())


# -- what is left -------------------------------------------------------------


def check_retention(ledger: Iterable[Entry], collected: Collected, retention_ms: float) -> Verdict:
    """GC has left alone what is younger than the retention, and nothing else."""

    def violations() -> Iterator[str]:
        oldest = collected.now - retention_ms
        for entry in ledger:
            if entry.at > oldest and entry.message_id not in collected.before:
                yield f"{entry.message_id} is gone {(collected.now - entry.at) / 1000:.1f} s after it was published"
        for message_id, at in collected.before.items():
            # The last GC took its time, too.
            if at > oldest + GC_TIME and message_id not in collected.after:
                yield f"{message_id} was collected {(collected.now - at) / 1000:.1f} s after it was sequenced"
        for message_id, at in collected.after.items():
            if at <= oldest:
                yield f"{message_id} is in the log {(collected.now - at) / 1000:.1f} s after it was sequenced"

    return verdict("GC leaves what it should", f"{len(collected.before)} messages in the log", violations())


def check_memory(samples: Mapping[str, Sequence[float]]) -> Verdict:
    """The last third of each process's samples is no higher than the first (megabytes; the start does not count)."""

    def violations() -> Iterator[str]:
        for name, values in samples.items():
            warm = values[len(values) // 5 :]
            third = len(warm) // 3
            if not third:
                yield f"{name}: only {len(values)} samples"
                continue
            first, last = median(warm[:third]), median(warm[-third:])
            if last > first * MEMORY_FACTOR + MEMORY_SLACK:
                yield f"{name}: {first:.0f} MB in the first third, {last:.0f} MB in the last"

    return verdict("memory is flat", f"{', '.join(samples) or 'no process'}", violations())

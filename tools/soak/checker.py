"""The checks: compare the committed messages with what every group did with them. Uses no database and no files."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import median

from django_mysqlqueue.names.keys import priority_of
from soak import timeline
from soak.facts import Collected, DeadLetter, Entry, Evidence, Verdict, verdict
from soak.plan import HOME, MAX_ATTEMPTS, POISON, REFUSED, Group, coalescing, fate, is_for_the_dlq, topic_of
from soak.records import AGAIN, COMMITTED, DONE, FAILED, REJECTED, ROLLED_BACK, STARTED, WRONG, Step

__all__ = ["Collected", "DeadLetter", "Entry", "Evidence", "Verdict", "check", "verdict"]

GC_TIME = 10_000.0
"""Maximum duration of the last GC in milliseconds."""
MEMORY_FACTOR, MEMORY_SLACK = 1.15, 8.0
"""How much more memory a process may use in the last third of a run than in the first: a factor, plus megabytes."""


def check(evidence: Evidence, groups: Sequence[Group]) -> list[Verdict]:
    """Run all checks."""
    verdicts = [
        check_ledger(evidence),
        check_offsets(evidence),
        check_publishing_order(evidence),
        check_identity(evidence),
        check_set_aside(evidence),
        *timeline.check_waiting(evidence, groups),
    ]
    for group in groups:
        verdicts += [check_handled(evidence, group), check_dead_letters(evidence, group)]
        if group.sometimes:
            verdicts.append(check_latest(evidence, group))
        verdicts += [timeline.check_settled(evidence, group), timeline.check_repeats(evidence, group)]
        verdicts.append(timeline.check_cut_off(evidence, group))
        if group.atomic:
            verdicts.append(check_exactly_once(evidence, group))
        if group.ordered:
            verdicts += [check_order(evidence, group), timeline.check_alone(evidence, group)]
        if group.ordered and group.atomic:
            verdicts.append(timeline.check_effects(evidence, group))
        if group.strict:
            verdicts.append(check_strict_order(evidence, group))
    return verdicts


# -- publishing ---------------------------------------------------------------


def check_ledger(evidence: Evidence) -> Verdict:
    """Check that the ledger agrees with the publishers' records of their transactions."""

    def violations() -> Iterator[str]:
        written = {(entry.publisher, entry.number) for entry in evidence.ledger}
        for one in evidence.transactions:
            numbers = {(one.publisher, number) for number in range(one.first, one.last)}
            if one.verb == COMMITTED and not numbers <= written:
                yield f"{one.publisher} committed {one.first} to {one.last - 1}, but the server does not have them"
            if one.verb == ROLLED_BACK and numbers & written:
                yield f"{one.publisher} rolled back {one.first} to {one.last - 1}, but the server has them"

    return verdict(
        "the server kept every committed transaction", f"{len(evidence.transactions)} transactions", violations()
    )


def _offsets(evidence: Evidence) -> dict[str, set[int]]:
    offsets: dict[str, set[int]] = defaultdict(set)
    for steps in evidence.steps.values():
        for step in steps:
            offsets[step.message_id].add(step.offset)
    return offsets


def check_offsets(evidence: Evidence) -> Verdict:
    """Check that each message has one offset and each offset one message: duplicates were dropped."""

    def violations() -> Iterator[str]:
        owners: dict[int, str] = {}
        for message_id, offsets in _offsets(evidence).items():
            if len(offsets) > 1:
                yield f"{message_id} has the offsets {sorted(offsets)}"
            for offset in offsets:
                if owners.setdefault(offset, message_id) != message_id:
                    yield f"offset {offset} belongs to {owners[offset]} and {message_id}"

    return verdict("each message has one offset", f"{len(evidence.ledger)} messages", violations())


def check_publishing_order(evidence: Evidence) -> Verdict:
    """Check that the messages of a publisher with one topic and priority have rising offsets.

    Scheduled messages are left out.
    """

    def violations() -> Iterator[str]:
        offsets = {message_id: min(places) for message_id, places in _offsets(evidence).items()}
        last: dict[tuple[str, str, int], tuple[int, int]] = {}
        for entry in sorted(evidence.ledger, key=lambda entry: (entry.publisher, entry.number)):
            offset = offsets.get(entry.message_id)
            if entry.scheduled or offset is None:
                continue
            which = (entry.publisher, topic_of(entry.message_id), priority_of(entry.key))
            number, before = last.get(which, (-1, 0))
            if offset < before:
                yield (
                    f"{entry.publisher}: message {entry.number} has the offset {offset}, the earlier message {number} "
                    f"has {before}"
                )
            last[which] = (entry.number, offset)

    return verdict("offsets follow the order of publishing", f"{len(evidence.ledger)} messages", violations())


def check_identity(evidence: Evidence) -> Verdict:
    """Check that every message is delivered in the partition that it was published to, with its own payload.

    The payload of a duplicate is accepted only if the first message was scheduled, because that was not in the log yet.
    """
    keys = {entry.message_id: entry.key for entry in evidence.ledger}
    scheduled = {entry.message_id for entry in evidence.ledger if entry.scheduled}
    steps = [(group, step) for group, steps in evidence.steps.items() for step in steps]

    def violations() -> Iterator[str]:
        for group, step in steps:
            key = keys.get(step.message_id, step.key)
            if step.verb == WRONG:
                yield f"{group}: {step.message_id} had the payload of another message"
            elif step.verb == AGAIN and step.message_id not in scheduled:
                yield f"{group}: {step.message_id} had the payload of its duplicate"
            elif step.verb == STARTED and step.key != key:
                yield f"{group}: {step.message_id} was in partition {step.key}, not {key}"

    return verdict("each message has its partition and its payload", f"{len(steps)} steps", violations())


def check_set_aside(evidence: Evidence) -> Verdict:
    """Check that the quarantine has exactly the committed messages that the log refuses, once each."""

    def violations() -> Iterator[str]:
        planned = {(HOME, REFUSED, message_id) for message_id in evidence.refused}
        counts = Counter((one.alias, one.topic, one.message_id) for one in evidence.set_aside)
        for _, _, message_id in sorted(planned - counts.keys()):
            yield f"{message_id} was committed, but is not in the quarantine"
        for (_, _, message_id), count in counts.items():
            if count > 1:
                yield f"{message_id} is in the quarantine {count} times"
        for one in evidence.set_aside:
            if (one.alias, one.topic, one.message_id) not in planned:
                yield f"{one.message_id} of {one.topic} is in the quarantine of {one.alias}: {one.reason}"

    name = "the quarantine contains exactly the messages that the log refuses"
    return verdict(name, f"{len(evidence.refused)} messages", violations())


# -- handling -----------------------------------------------------------------


def handled(evidence: Evidence, group: Group) -> set[str]:
    """Return the messages that the group has handled. For atomic handlers, committed effects count."""
    if group.atomic:
        return set(evidence.effects.get(group.name, ()))
    ended = {DONE, REJECTED}
    return {step.message_id for step in evidence.steps.get(group.name, ()) if step.verb in ended}


def replaced(ledger: Iterable[Entry], group: Group) -> set[str]:
    """Return the messages that the group need not handle, because a later one of their publisher has the coalesce key.

    The last one that the group's filter matches must be handled, unless a later one replaces it before the log.
    """
    by_key: dict[str, list[Entry]] = defaultdict(list)
    for entry in ledger:
        found = coalescing(entry.message_id)
        if topic_of(entry.message_id) != group.topic or found is None:
            continue
        if found.debounces or group.may_get(entry.message_id):
            by_key[f"{found.partition} {found.key}"].append(entry)
    return {
        entry.message_id
        for entries in by_key.values()
        for entry in sorted(entries, key=lambda entry: entry.number)[:-1]
    }


def check_handled(evidence: Evidence, group: Group) -> Verdict:
    """Check that the committed messages that match the filter are the handled ones, except those that always fail.

    A message that a later one has replaced may be handled or not.
    """
    optional = replaced(evidence.ledger, group)

    def violations() -> Iterator[str]:
        committed = {entry.message_id: entry for entry in evidence.ledger}
        expected = {one for one in committed if group.gets(one) and fate(group.name, one) != POISON}
        done = handled(evidence, group)
        for message_id in sorted(expected - done - optional):
            yield f"{message_id} (partition {committed[message_id].key}) was committed but never handled"
        for message_id in sorted(done - committed.keys()):
            yield f"{message_id} was handled but never committed"
        for message_id in sorted((done & committed.keys()) - expected):
            if fate(group.name, message_id) == POISON:
                yield f"{message_id} was handled, although its handler always fails"
        started = {step.message_id for step in evidence.steps.get(group.name, ())}
        for message_id in sorted(started - committed.keys()):
            yield f"{message_id} was started but never committed"
        for message_id in sorted(one for one in (started | done) & committed.keys() if not group.may_get(one)):
            yield f"{message_id} has expired, or is not on the topic or in the filter, but was started"

    mine = sum(group.gets(entry.message_id) for entry in evidence.ledger)
    saved = len(optional - {step.message_id for step in evidence.steps.get(group.name, ()) if step.verb == STARTED})
    what = (
        "every committed message that matches the filter, and no other," if group.regions else "every committed message"
    )
    return verdict(f"{group.name}: {what} was handled", f"{mine} messages, {saved} of them replaced", violations())


def check_latest(evidence: Evidence, group: Group) -> Verdict:
    """Check that the group has got, of each coalesce key, the last message that it gets at any time, or a later one.

    A message is superseded only because the group gets a later one: no change of the filter takes that away.
    """
    got = handled(evidence, group) | {one.message_id for one in evidence.dead if one.group == group.name}
    by_key: dict[str, list[Entry]] = defaultdict(list)
    for entry in sorted(evidence.ledger, key=lambda entry: entry.number):
        found = coalescing(entry.message_id)
        if found is not None and not found.debounces and group.may_get(entry.message_id):
            by_key[f"{found.partition} {found.key}"].append(entry)

    def violations() -> Iterator[str]:
        for key, entries in by_key.items():
            always = [number for number, entry in enumerate(entries) if group.gets(entry.message_id)]
            if always and got.isdisjoint(entry.message_id for entry in entries[always[-1] :]):
                yield f"{key}: neither {entries[always[-1]].message_id} nor a later one was handled"

    name = f"{group.name}: the latest message of each coalesce key was handled"
    return verdict(name, f"{len(by_key)} keys", violations())


def check_dead_letters(evidence: Evidence, group: Group) -> Verdict:
    """Check that the DLQ contains exactly the messages that must fail, once each, after all of their attempts."""
    dead_letters = [one for one in evidence.dead if one.group == group.name]

    def violations() -> Iterator[str]:
        counts = Counter(one.message_id for one in dead_letters)
        mine = [entry.message_id for entry in evidence.ledger if group.gets(entry.message_id)]
        expected = {one for one in mine if is_for_the_dlq(group.name, one)}
        possible = (entry.message_id for entry in evidence.ledger if group.may_get(entry.message_id))
        allowed = {one for one in possible if is_for_the_dlq(group.name, one)}
        for message_id in sorted(expected - counts.keys() - replaced(evidence.ledger, group)):
            yield f"{message_id} is not in the DLQ"
        for one in dead_letters:
            if one.message_id not in allowed:
                last = one.error.strip().rsplit("\n", 1)[-1]
                yield f"{one.message_id} is in the DLQ after {one.attempts} attempts: {last}"
            elif fate(group.name, one.message_id) == POISON and one.attempts != MAX_ATTEMPTS:
                yield f"{one.message_id} is in the DLQ after {one.attempts} attempts, not {MAX_ATTEMPTS}"
        for message_id, count in counts.items():
            if count > 1:
                yield f"{message_id} is in the DLQ {count} times"

    return verdict(
        f"{group.name}: the DLQ contains exactly the messages that must fail",
        f"{len(dead_letters)} dead letters",
        violations(),
    )


def check_exactly_once(evidence: Evidence, group: Group) -> Verdict:
    """Check that no effect of an atomic handler was committed twice."""
    effects = evidence.effects.get(group.name, Counter())
    doubled = (f"{message_id} took effect {count} times" for message_id, count in effects.items() if count > 1)
    return verdict(f"{group.name}: effects exactly once", f"{effects.total()} effects", doubled)


def _first_starts(steps: Iterable[Step]) -> dict[str, dict[int, Step]]:
    """Return, by partition, the start of each message's first attempt, in the order in which they happened."""
    starts: dict[str, dict[int, Step]] = defaultdict(dict)
    for step in steps:
        if step.verb == STARTED:
            starts[step.key].setdefault(step.offset, step)
    return starts


def check_order(evidence: Evidence, group: Group) -> Verdict:
    """Check that the first attempts at a partition's messages start in the order of their offsets."""
    starts = _first_starts(evidence.steps.get(group.name, ()))

    def violations() -> Iterator[str]:
        for key, steps in starts.items():
            highest = 0
            for offset, step in steps.items():
                if offset < highest:
                    yield f"{step.message_id} at {offset} of {key} started after the one at {highest}"
                highest = max(highest, offset)

    return verdict(
        f"{group.name}: first attempts in order",
        f"{sum(map(len, starts.values()))} first attempts in {len(starts)} partitions",
        violations(),
    )


def check_strict_order(evidence: Evidence, group: Group) -> Verdict:
    """Check that all earlier messages are done, rejected or have used up their attempts when a message starts.

    Messages that may have been superseded while they waited for another attempt are left out.
    """
    optional = replaced(evidence.ledger, group)
    dead = {letter.message_id for letter in evidence.dead if letter.group == group.name}

    def violations() -> Iterator[str]:
        unsettled: dict[str, dict[int, str]] = defaultdict(dict)
        settled: set[str] = set()
        for step in evidence.steps.get(group.name, ()):
            waiting = unsettled[step.key]
            used_up = step.attempt >= MAX_ATTEMPTS and step.message_id in dead
            if step.verb in (DONE, REJECTED) or (used_up and step.verb in (STARTED, FAILED)):
                # A lost attempt has no recorded end, so the number of attempts decides.
                settled.add(step.message_id)
                waiting.pop(step.offset, None)
            elif step.verb == STARTED and step.message_id not in settled and step.message_id not in optional:
                waiting.setdefault(step.offset, step.message_id)
            if step.verb == STARTED:
                for offset, message_id in waiting.items():
                    if offset < step.offset:
                        yield (
                            f"{step.message_id} at {step.offset} of {step.key} started while {message_id} "
                            f"at {offset} was not done"
                        )

    name = f"{group.name}: no message starts before earlier ones have ended"
    return verdict(name, f"{len(evidence.steps.get(group.name, ()))} steps", violations())


# -- what is left -------------------------------------------------------------


def check_retention(ledger: Iterable[Entry], collected: Collected, retention_ms: float) -> Verdict:
    """Check that GC has deleted all messages of some topics that are older than the retention, and no others."""

    def violations() -> Iterator[str]:
        oldest = collected.now - retention_ms
        for entry in ledger:
            if topic_of(entry.message_id) not in collected.topics or _is_debounced(entry):
                continue
            if entry.at > oldest and entry.message_id not in collected.before:
                yield f"{entry.message_id} is missing {(collected.now - entry.at) / 1000:.1f} s after it was published"
        for message_id, at in collected.before.items():
            # Allow for the duration of the last GC.
            if at > oldest + GC_TIME and message_id not in collected.after:
                yield f"{message_id} was deleted {(collected.now - at) / 1000:.1f} s after it was sequenced"
        for message_id, at in collected.after.items():
            if at <= oldest:
                yield f"{message_id} is still in the log {(collected.now - at) / 1000:.1f} s after it was sequenced"

    return verdict(
        f"{collected.alias}: GC deletes exactly the expired messages",
        f"{len(collected.before)} messages in the log",
        violations(),
    )


def _is_debounced(entry: Entry) -> bool:
    """Whether a message may have been replaced before it entered the log."""
    found = coalescing(entry.message_id)
    return found is not None and found.debounces


def check_memory(samples: Mapping[str, Sequence[float]]) -> Verdict:
    """Check that no process uses more memory in the last third of its samples than in the first (in megabytes).

    The first fifth of the samples is left out.
    """

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

    return verdict("memory does not grow", f"{', '.join(samples) or 'no process'}", violations())

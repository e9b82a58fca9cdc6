"""Runs of the soak as it would record them, sound and broken."""

from __future__ import annotations

import dataclasses
from collections import Counter

from soak import checker, plan, records
from soak.facts import DeadLetter, Trouble
from soak.records import Step

GROUPS = {group.name: group for group in plan.GROUPS}
KEYS = ("a", "b", "c")
TOTAL = 2000
"""Enough that every group on the first topic has messages of every fate."""
ONE, OTHER = "1-a", "2-b"
"""Processes."""
BEGAN = 1000.0
"""When the first message was committed; one is handled every tenth of a second."""


def name(number):
    return f"p:{number}"


def run_of(group):
    """The steps of a run without trouble, the effects and the dead letters."""
    steps, effects, dead = [], Counter(), []
    for number in range(TOTAL):
        message_id, key, offset = name(number), KEYS[number % 3], number + 1
        if not group.gets(message_id):
            continue
        what = plan.fate(group.name, message_id)
        attempts = {plan.POISON: plan.MAX_ATTEMPTS, plan.FLAKY: 2, plan.PUT_OFF: 2}.get(what, 1)
        for attempt in range(1, attempts + 1):
            failed = what == plan.POISON or attempt < attempts
            end = records.FAILED if failed else records.REJECTED if what == plan.REJECT else records.DONE
            at = BEGAN + number / 10 + attempt / 1000
            steps += [Step(verb, message_id, key, offset, attempt, at, ONE) for verb in (records.STARTED, end)]
        if plan.is_for_the_dlq(group.name, message_id):
            dead.append(DeadLetter(message_id, group.name, attempts, "Planned: no"))
        if what != plan.POISON and group.atomic:
            effects[message_id] = 1
    return steps, effects, dead


def violations(evidence):
    return {one.name: one.violations for one in checker.check(evidence, plan.GROUPS) if not one.ok}


def with_steps(evidence, group, change):
    steps = list(evidence.steps[group])
    return dataclasses.replace(evidence, steps={**evidence.steps, group: change(steps)})


def with_trouble(evidence, kind=plan.KILL_SUBSCRIBER, since=BEGAN, until=BEGAN + TOTAL, pid=1):
    return dataclasses.replace(evidence, troubles=[*evidence.troubles, Trouble(kind, since, until, pid)])


def a_message(group, fate=plan.FINE, after=0):
    """A message with a fate, and without a coalesce key."""
    return next(
        n
        for n in range(after, TOTAL)
        if plan.fate(group, name(n)) == fate and GROUPS[group].gets(name(n)) and plan.coalescing(name(n)) is None
    )


def behind(group, number):
    """The next message of its partition that the group gets."""
    return next(n for n in range(number + 3, TOTAL, 3) if GROUPS[group].gets(name(n)))


def of_a_key(debounces):
    """The messages with one coalesce key and the first topic, in the order in which they were published."""
    keys = {}
    for number in range(TOTAL):
        found = plan.coalescing(name(number))
        if found is not None and found.debounces == debounces and plan.topic_of(name(number)) == plan.TOPIC:
            keys.setdefault((found.key, found.partition), []).append(number)
    return max(keys.values(), key=len)


def place(steps, number, verb=records.STARTED):
    return next(n for n, step in enumerate(steps) if step.message_id == name(number) and step.verb == verb)


def again(number, at, process=ONE, verbs=(records.STARTED, records.DONE)):
    """A message of the partition ``a`` is handled once more."""
    assert KEYS[number % 3] == "a"
    return [Step(verb, name(number), "a", number + 1, 1, at, process) for verb in verbs]

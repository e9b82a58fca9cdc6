"""The soak's checks find lost, repeated and misplaced messages."""

from __future__ import annotations

import dataclasses
from collections import Counter

import pytest
from soak import plan, records
from soak.facts import SetAside
from soak.records import Step, Transaction

from tests.support.internals import lane
from tests.support.soak_runs import (
    BEGAN,
    GROUPS,
    KEYS,
    OTHER,
    TOTAL,
    a_message,
    again,
    behind,
    name,
    of_a_key,
    place,
    violations,
    with_steps,
    with_trouble,
)

pytestmark = pytest.mark.any_engine


def test_a_sound_run_passes(evidence):
    assert violations(evidence) == {}
    for group in plan.GROUPS:
        fates = (plan.FINE, plan.POISON, plan.REJECT, plan.FLAKY, plan.PUT_OFF)
        for fate in fates if group.topic == plan.TOPIC and not group.sometimes else fates[:1]:
            a_message(group.name, fate)


@pytest.mark.parametrize("group", ["skip", "strict", "shared", "relayed"])
def test_a_lost_message(evidence, group):
    lost = name(a_message(group))
    broken = with_steps(evidence, group, lambda steps: [step for step in steps if step.message_id != lost])
    assert violations(broken) == {
        f"{group}: every committed message was handled": (
            f"{lost} (partition {KEYS[int(lost[2:]) % 3]}) was committed but never handled",
        )
    }


def test_a_message_that_was_relayed_twice(evidence):
    twice = a_message("relayed")

    def handle_again(steps):
        return steps + [
            dataclasses.replace(step, offset=plan.place(plan.OTHER, twice), at=BEGAN + TOTAL)
            for step in steps
            if step.message_id == name(twice)
        ]

    found = violations(with_steps(evidence, "relayed", handle_again))
    assert found["each message has one offset"] == (
        f"{name(twice)} has the offsets {[twice + 1, plan.place(plan.OTHER, twice)]}",
    )


@pytest.mark.parametrize("debounces", [True, False])
@pytest.mark.parametrize("group", ["skip", "strict", "shared", "filtered"])
def test_a_message_that_a_later_one_replaces(evidence, group, debounces):
    """It may be missing, unless it is the last one, or the last one that the filter matches."""
    numbers = of_a_key(debounces)
    mine = [n for n in numbers if debounces or GROUPS[group].gets(name(n))]
    assert len(mine) > 5
    *others, last = map(name, mine)
    broken = with_steps(evidence, group, lambda steps: [step for step in steps if step.message_id not in others])
    assert violations(broken) == {}
    if not GROUPS[group].gets(last) or plan.fate(group, last) == plan.POISON:
        return
    broken = with_steps(broken, group, lambda steps: [step for step in steps if step.message_id != last])
    found = violations(broken)
    assert len(found) == 1
    assert f"{last} (partition" in str(found)


ASIDE = SetAside(plan.HOME, plan.REFUSED, "p:1:refused", "as planned")


def test_messages_that_the_log_refuses(evidence):
    aside = dataclasses.replace(evidence, refused=[ASIDE.message_id], set_aside=[ASIDE])
    assert violations(aside) == {}
    elsewhere = dataclasses.replace(ASIDE, alias=plan.OTHER)
    other = dataclasses.replace(ASIDE, topic=plan.TOPIC, message_id="p:2", reason="by mistake")
    for found, line in (
        ([], "p:1:refused was committed, but is not in the quarantine"),
        ([ASIDE, ASIDE], "p:1:refused is in the quarantine 2 times"),
        ([ASIDE, elsewhere], "p:1:refused of soak.refused is in the quarantine of other: as planned"),
        ([ASIDE, other], "p:2 of soak.events is in the quarantine of default: by mistake"),
    ):
        (told,) = violations(dataclasses.replace(aside, set_aside=found)).values()
        assert told == (line,)


FILTERED = pytest.mark.parametrize("group", [group.name for group in plan.GROUPS if group.regions])
FILTER_CHECK = "every committed message that matches the filter, and no other, was handled"


@FILTERED
def test_a_message_that_the_filter_passed_by_mistake(evidence, group):
    lost = name(a_message(group))
    broken = with_steps(evidence, group, lambda steps: [step for step in steps if step.message_id != lost])
    assert violations(broken) == {
        f"{group}: {FILTER_CHECK}": (f"{lost} (partition {KEYS[int(lost[2:]) % 3]}) was committed but never handled",)
    }


@FILTERED
@pytest.mark.parametrize("verbs", [(records.STARTED,), (records.STARTED, records.DONE)])
def test_a_message_that_does_not_match_the_filter(evidence, group, verbs):
    number = next(n for n in range(0, TOTAL, 3) if not GROUPS[group].may_get(name(n)))
    late = BEGAN + TOTAL
    broken = with_steps(evidence, group, lambda steps: steps + again(number, late, verbs=verbs))
    found = violations(broken)
    assert found[f"{group}: {FILTER_CHECK}"] == (
        f"{name(number)} has expired, or is not on the topic or in the filter, but was started",
    )


def test_a_message_that_the_filter_matches_sometimes(evidence):
    """It may be handled, or not."""
    group = GROUPS["narrowed"]
    number = next(n for n in range(0, TOTAL, 3) if group.may_get(name(n)) and not group.gets(name(n)))
    at = BEGAN + number / 10
    both = again(number, at)

    def insert(steps):
        return sorted(steps + both, key=lambda step: step.at)

    assert violations(with_steps(evidence, "narrowed", insert)) == {}


def test_a_coalesce_key_whose_latest_message_is_not_handled(evidence):
    """A message is superseded by one that the group gets sometimes. A change of the filter must not take that away."""
    group = GROUPS["narrowed"]
    numbers = [n for n in of_a_key(debounces=False) if group.may_get(name(n))]
    at = max(place for place, n in enumerate(numbers) if group.gets(name(n)) and numbers[place + 1 :])
    mine = {name(n) for n in numbers}
    last, later = name(numbers[at]), numbers[-1]
    lost = with_steps(evidence, "narrowed", lambda steps: [step for step in steps if step.message_id not in mine])
    found = violations(lost)
    assert list(found) == ["narrowed: the latest message of each coalesce key was handled"]
    (line,) = found[next(iter(found))]
    assert line.endswith(f"neither {last} nor a later one was handled")
    if plan.fate("narrowed", name(later)) == plan.FINE:
        step = Step(records.DONE, name(later), KEYS[later % 3], later + 1, 1, BEGAN + TOTAL, OTHER)
        assert violations(with_steps(lost, "narrowed", lambda steps: [*steps, step])) == {}


@pytest.mark.parametrize("group", ["atomic", "batch"])
@pytest.mark.parametrize(("count", "check"), [(0, "every committed message was handled"), (2, "effects exactly once")])
def test_an_effect_that_is_missing_or_there_twice(evidence, group, count, check):
    effects = evidence.effects[group].copy()
    effects[name(a_message(group))] = count
    if not count:
        effects = +effects
    broken = dataclasses.replace(evidence, effects={**evidence.effects, group: effects})
    assert list(violations(broken)) == [f"{group}: {check}"]


def test_an_effect_of_a_poisoned_message(evidence):
    """Its attempts were all rolled back, or they were not atomic."""
    effects = evidence.effects["atomic"] + Counter([name(a_message("atomic", plan.POISON))])
    broken = dataclasses.replace(evidence, effects={**evidence.effects, "atomic": effects})
    assert list(violations(broken)) == ["atomic: every committed message was handled"]


def test_a_rolled_back_message_that_is_handled(evidence):
    number = TOTAL + 1
    more = [Step(verb, name(number), "a", 9999, 1) for verb in (records.STARTED, records.DONE)]
    broken = with_steps(evidence, "shared", lambda steps: steps + more)
    assert violations(broken) == {
        "shared: every committed message was handled": (
            f"{name(number)} was handled but never committed",
            f"{name(number)} was started but never committed",
        )
    }


@pytest.mark.parametrize("group", ["skip", "strict", "atomic", "batch"])
def test_a_message_that_starts_before_the_one_before_it(evidence, group):
    first = a_message(group)
    following = name(next(number for number in range(first + 3, TOTAL, 3) if GROUPS[group].gets(name(number))))

    def swap(steps):
        # The next of its partition starts, and ends, before it.
        here = place(steps, first)
        later = [step for step in steps if step.message_id == following]
        return steps[:here] + later + [step for step in steps[here:] if step.message_id != following]

    found = violations(with_steps(evidence, group, swap))
    assert f"{group}: first attempts in order" in found


def test_shared_groups_have_no_order(evidence):
    assert violations(with_steps(evidence, "shared", lambda steps: steps[::-1])) == {}


def test_a_repeated_start_after_a_take_over_is_no_violation(evidence):
    """A take-over goes back to the first unsettled message, and starts it and those behind it once more."""

    def again(steps):
        here = place(steps, a_message("skip", after=30), records.DONE) + 1
        return steps[:here] + steps[here - 8 : here] + steps[here:]

    assert violations(with_trouble(with_steps(evidence, "skip", again))) == {}


def test_strict_order_waits_for_the_end_of_what_failed(evidence):
    flaky = a_message("strict", plan.FLAKY)

    def pass_it(steps):
        # The next message of the partition is handled between its two attempts.
        other = name(behind("strict", flaky))
        rest = [step for step in steps if step.message_id != other]
        here = place(rest, flaky, records.FAILED) + 1
        return rest[:here] + [step for step in steps if step.message_id == other] + rest[here:]

    broken = with_steps(evidence, "strict", pass_it)
    assert list(violations(broken)) == ["strict: no message starts before earlier ones have ended"]
    assert violations(with_steps(evidence, "skip", lambda steps: steps)) == {}


def test_strict_order_lets_what_used_up_its_attempts_go(evidence):
    """Also where the last attempt was lost with its process and no end is on record."""
    number = a_message("strict", plan.POISON)
    poison = name(number)

    def lose_the_end(steps):
        return [
            dataclasses.replace(step, process=OTHER) if step.offset > number + 1 else step
            for step in steps
            if not (step.message_id == poison and step.verb == records.FAILED and step.attempt == plan.MAX_ATTEMPTS)
        ]

    assert violations(with_steps(evidence, "strict", lose_the_end)) == {}


def _without(letter):
    return []


def _twice(letter):
    return [letter, letter]


def _too_early(letter):
    return [dataclasses.replace(letter, attempts=2)]


def _another(letter):
    return [letter, dataclasses.replace(letter, message_id=name(a_message(letter.group)))]


@pytest.mark.parametrize("change", [_without, _twice, _too_early, _another])
def test_dead_letters_that_are_wrong(evidence, change):
    letter = next(letter for letter in evidence.dead if letter.group == "skip" and letter.attempts == plan.MAX_ATTEMPTS)
    dead = [one for one in evidence.dead if one is not letter] + change(letter)
    found = violations(dataclasses.replace(evidence, dead=dead))
    assert list(found) == ["skip: the DLQ contains exactly the messages that must fail"]
    assert len(found["skip: the DLQ contains exactly the messages that must fail"]) == 1


def test_a_commit_that_the_server_lost(evidence):
    more = [*evidence.transactions, Transaction(records.COMMITTED, "p", TOTAL + 3, TOTAL + 4)]
    found = violations(dataclasses.replace(evidence, transactions=more))
    assert list(found) == ["the server kept every committed transaction"]


def test_a_rollback_that_was_none(evidence):
    more = [*evidence.transactions, Transaction(records.ROLLED_BACK, "p", TOTAL - 1, TOTAL)]
    found = violations(dataclasses.replace(evidence, transactions=more))
    assert list(found) == ["the server kept every committed transaction"]


def test_a_repeat_that_was_not_dropped(evidence):
    again = [Step(verb, name(5), KEYS[5 % 3], 9999, 1) for verb in (records.STARTED, records.DONE)]
    found = violations(with_steps(evidence, "skip", lambda steps: steps + again))
    assert found["each message has one offset"] == (f"{name(5)} has the offsets [6, 9999]",)


FIRST = next(n for n in range(10, TOTAL) if all(GROUPS["skip"].gets(name(m)) for m in (n, n + 1)))


def test_offsets_out_of_publishing_order(evidence):
    """Two messages of one publisher in different partitions, where no group's order shows it."""
    swapped = {name(FIRST): FIRST + 2, name(FIRST + 1): FIRST + 1}

    def swap(steps):
        return [
            dataclasses.replace(step, offset=swapped[step.message_id]) if step.message_id in swapped else step
            for step in steps
        ]

    broken = dataclasses.replace(evidence, steps={group: swap(steps) for group, steps in evidence.steps.items()})
    assert list(violations(broken)) == ["offsets follow the order of publishing"]
    scheduled = [dataclasses.replace(entry, scheduled=entry.message_id in swapped) for entry in evidence.ledger]
    assert violations(dataclasses.replace(broken, ledger=scheduled)) == {}


def test_messages_of_other_priorities_may_overtake(evidence):
    swapped = {name(FIRST): FIRST + 2, name(FIRST + 1): FIRST + 1}
    steps = {
        group: [dataclasses.replace(one, offset=swapped.get(one.message_id, one.offset)) for one in mine]
        for group, mine in evidence.steps.items()
    }
    ledger = [
        dataclasses.replace(entry, key=lane(entry.key, 1)) if entry.message_id == name(FIRST + 1) else entry
        for entry in evidence.ledger
    ]
    assert "offsets follow the order of publishing" not in violations(
        dataclasses.replace(evidence, steps=steps, ledger=ledger)
    )

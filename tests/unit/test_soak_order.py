"""The soak's checks find what happens too early, too often, too late or in the wrong place."""

from __future__ import annotations

import dataclasses
from collections import Counter

import pytest
from soak import plan, records, timeline
from soak.facts import Progress, Trouble

from tests.support.soak_runs import (
    BEGAN,
    GROUPS,
    KEYS,
    ONE,
    OTHER,
    TOTAL,
    a_message,
    again,
    behind,
    name,
    place,
    violations,
    with_steps,
    with_trouble,
)

pytestmark = pytest.mark.any_engine


def samples(group, *seen):
    """Of one partition, ``a``: (time, watermark) each."""
    return [Progress(at, {(group, "a"): (watermark, watermark)}) for at, watermark in seen]


def is_on_topic(group, number):
    return plan.topic_of(name(number)) == GROUPS[group].topic


def fine_messages(group, count, fates=(plan.FINE,)):
    found = [n for n in range(0, TOTAL, 3) if plan.fate(group, name(n)) in fates and is_on_topic(group, n)]
    return found[:count]


@pytest.mark.parametrize("group", ["skip", "shared", "atomic"])
def test_what_was_settled_starts_again(evidence, group):
    """However much went on meanwhile: the watermark had passed it."""
    (number,) = fine_messages(group, 1)
    seen = samples(group, (BEGAN + 100, 0), (BEGAN + 200, 300), (BEGAN + 205, 0), (BEGAN + 210, 0))
    broken = with_trouble(
        with_steps(evidence, group, lambda steps: steps + again(number, BEGAN + 215)),
        kind=plan.CUT,
        until=BEGAN + 1000,
        pid=0,
    )
    check = f"{group}: no message was handled after it was settled"
    assert violations(dataclasses.replace(broken, progress=seen)) == {
        check: (f"{name(number)} at {number + 1} of a started 15.0 s after it was settled",)
    }
    # Not clearly later; another group's watermark; another partition's.
    assert violations(dataclasses.replace(broken, progress=samples(group, (BEGAN + 213.5, 300)))) == {}
    assert violations(dataclasses.replace(broken, progress=samples("strict", (BEGAN + 200, 300)))) == {}
    elsewhere = [Progress(BEGAN + 200, {(group, "b"): (300, 300)})]
    assert violations(dataclasses.replace(broken, progress=elsewhere)) == {}


def test_a_thawed_process_makes_the_calls_that_it_was_about_to_make(evidence):
    numbers = fine_messages("shared", timeline.THREADS + 1)
    frozen = Trouble(plan.FREEZE_SUBSCRIBER, BEGAN + 192, BEGAN + 200, 2)

    def found(count, at, process=OTHER):
        late = [step for n, number in enumerate(numbers[:count]) for step in again(number, at + n / 100, process)]
        more = with_trouble(with_steps(evidence, "shared", lambda steps: steps + late), kind=plan.CUT, pid=0)
        seen = samples("shared", (BEGAN + 195, 300))
        return list(violations(dataclasses.replace(more, progress=seen, troubles=[*more.troubles, frozen])))

    check = ["shared: no message was handled after it was settled"]
    assert found(timeline.THREADS, BEGAN + 200.1) == []
    assert found(timeline.THREADS + 1, BEGAN + 200.1) == check
    assert found(1, BEGAN + 203) == check
    assert found(1, BEGAN + 200.1, ONE) == check


@pytest.mark.parametrize("group", ["skip", "strict", "shared", "atomic", "batch"])
def test_all_is_handled_again_and_again(evidence, group):
    broken = with_steps(evidence, group, lambda steps: steps * 50)
    assert f"{group}: attempts are repeated only after a loss" in violations(broken)


def test_what_explains_that_a_message_is_handled_again(evidence):
    (number,) = fine_messages("shared", 1, fates=(plan.FINE,))
    at = BEGAN + number / 10
    once_more = with_steps(evidence, "shared", lambda steps: steps + again(number, at + 20, OTHER))
    check = ["shared: attempts are repeated only after a loss"]

    def found(*trouble):
        return list(violations(with_trouble(once_more, *trouble)))

    assert found(plan.KILL_SUBSCRIBER, at + 5, at + 5, 1) == []
    assert found(plan.KILL_SUBSCRIBER, at + 5, at + 5, 3) == check
    assert found(plan.KILL_SUBSCRIBER, at - 5, at - 5, 1) == check
    assert found(plan.KILL_SUBSCRIBER, at + 21, at + 21, 1) == check
    assert found(plan.FREEZE_SUBSCRIBER, at + 5, at + 15, 2) == []
    assert found(plan.CRASH, at - 5, at - 4, 0) == []
    assert found(plan.CRASH, at - 60, at - 50, 0) == check


def test_a_start_that_was_written_when_its_process_was_thawed(evidence):
    """It had read the clock, and was frozen before it wrote: meanwhile another process took over."""
    (number,) = fine_messages("shared", 1)
    at = BEGAN + number / 10
    late = with_steps(evidence, "shared", lambda steps: steps + again(number, at - 6, OTHER))
    assert violations(with_trouble(late, plan.FREEZE_SUBSCRIBER, at - 5.9, at + 3, 2)) == {}
    assert list(violations(late)) == ["shared: attempts are repeated only after a loss"]


def test_more_attempts_than_there_are(evidence):
    (number,) = fine_messages("skip", 1, fates=(plan.POISON,))
    more = [dataclasses.replace(step, attempt=plan.MAX_ATTEMPTS + 1) for step in again(number, BEGAN + 500)]
    found = violations(with_steps(evidence, "skip", lambda steps: steps + more[:1]))
    assert list(found) == ["skip: attempts are repeated only after a loss"]


def test_a_wrong_partition(evidence):
    ids = {name(number) for number in fine_messages("skip", 2)}

    def elsewhere(steps):
        return [dataclasses.replace(step, key="other") if step.message_id in ids else step for step in steps]

    found = violations(with_steps(evidence, "skip", elsewhere))
    assert list(found) == ["each message has its partition and its payload"]
    assert len(found["each message has its partition and its payload"]) == 2


@pytest.mark.parametrize("verb", [records.WRONG, records.AGAIN])
def test_a_wrong_payload(evidence, verb):
    (number,) = fine_messages("skip", 1)
    said = again(number, BEGAN + 500, verbs=[verb])
    broken = with_steps(evidence, "skip", lambda steps: steps + said)
    assert list(violations(broken)) == ["each message has its partition and its payload"]
    # A repeat comes before what was scheduled; never another's payload.
    entries = [dataclasses.replace(entry, scheduled=entry.number == number) for entry in evidence.ledger]
    assert bool(violations(dataclasses.replace(broken, ledger=entries))) == (verb == records.WRONG)


def interleaved(steps, first, second, process):
    """``second`` starts, in that process, while ``first`` is being worked on."""
    mine = [dataclasses.replace(step, process=process) for step in steps if step.message_id == name(second)]
    rest = [step for step in steps if step.message_id != name(second)]
    here = place(rest, first) + 1
    return [*rest[:here], mine[0], rest[here], *mine[1:], *rest[here + 1 :]]


@pytest.mark.parametrize("group", ["skip", "strict", "atomic", "batch"])
def test_a_partition_is_worked_on_side_by_side(evidence, group):
    fine = fine_messages(group, TOTAL)
    first = next(n for n in fine if n + 3 in fine)
    check = f"{group}: one message of a partition at a time"
    same = with_steps(evidence, group, lambda steps: interleaved(steps, first, first + 3, ONE))
    # Whatever is done: a process knows what it works on.
    (found,) = violations(with_trouble(same, plan.CUT, pid=0))[check]
    assert found.startswith(
        f"{name(first + 3)} at {first + 4} of a started while the same process handled {name(first)}"
    )
    other = with_steps(evidence, group, lambda steps: interleaved(steps, first, first + 3, OTHER))
    assert check in violations(other)
    assert check not in violations(with_trouble(other, plan.FREEZE_SUBSCRIBER, BEGAN - 9, BEGAN + 500, 1))
    assert check in violations(with_trouble(other, plan.FREEZE_SUBSCRIBER, BEGAN - 9, BEGAN + 500, 3))
    assert check not in violations(with_trouble(other, plan.CUT, BEGAN - 9, BEGAN + 500, 0))


def test_all_of_a_partition_side_by_side(evidence):
    def spread(steps):
        return [step for verb in (records.STARTED, records.DONE) for step in steps if step.verb == verb]

    assert "skip: one message of a partition at a time" in violations(with_steps(evidence, "skip", spread))


def test_a_batch_is_one_place_and_what_raised_is_over(evidence):
    """Its messages start with one write; what is raised out of the handler ends them all."""
    one = again(0, BEGAN, verbs=[records.STARTED]) + again(3, BEGAN, verbs=[records.STARTED])
    more = again(6, BEGAN + 1)
    check = "batch: one message of a partition at a time"

    def found(steps):
        verdict = timeline.check_alone(dataclasses.replace(evidence, steps={"batch": steps}), GROUPS["batch"])
        assert verdict.name == check
        return verdict.count

    ended = again(0, BEGAN, verbs=[records.DONE]) + again(3, BEGAN, verbs=[records.DONE])
    raised = again(0, BEGAN, verbs=[records.FAILED, records.LEFT]) + again(3, BEGAN, verbs=[records.LEFT])
    assert found([*one, *ended, *more]) == 0
    assert found([*one, *raised, *more]) == 0
    assert found([*one, *raised[:1], *more]) == 1
    assert found([*one, *more]) == 2


def test_something_waits_for_long(evidence):
    (number,) = fine_messages("skip", 1)

    def late(steps, seconds):
        return [
            dataclasses.replace(step, at=step.at + seconds) if step.message_id == name(number) else step
            for step in steps
        ]

    def found(seconds, changed=evidence, *trouble):
        changed = with_steps(changed, "skip", lambda steps: late(steps, seconds))
        changed = with_trouble(changed, *trouble) if trouble else changed
        return list(violations(changed))

    assert found(timeline.LONGEST_WAIT - 1) == []
    assert found(timeline.LONGEST_WAIT + 1) == ["no message waits for long", "no partition is stalled"]
    away = BEGAN + number / 10 + 10
    assert found(timeline.LONGEST_WAIT + 1, evidence, plan.CRASH, away, away, 0) == []  # a lease, once it is back
    assert found(timeline.LONGEST_WAIT + 8, evidence, plan.FREEZE_ATOMIC, away, away + 9, 9) == []
    assert found(timeline.LONGEST_WAIT + 8, evidence, plan.FREEZE_PUBLISHER, away, away + 9, 9) != []
    twice = with_trouble(evidence, plan.RESTART, away, away + 4, 0)
    assert (
        found(timeline.LONGEST_WAIT + 15, twice, plan.FREEZE_CLAIM, away, away + 9, 9)[0] == "no message waits for long"
    )
    scheduled = [dataclasses.replace(entry, scheduled=entry.number == number) for entry in evidence.ledger]
    assert found(timeline.LONGEST_WAIT + 1, dataclasses.replace(evidence, ledger=scheduled)) == []


def test_a_partition_that_is_slow_and_one_that_stands_still(evidence):
    """A second for each message that comes every tenth of one: they wait for long, but somebody is at it."""

    def slowly(steps):
        return [dataclasses.replace(step, at=BEGAN + step.offset) for step in steps]

    found = violations(with_steps(evidence, "shared", slowly))
    assert list(found) == ["no message waits for long"]

    def stopped(steps):
        late = BEGAN + TOTAL / 10 + timeline.LONGEST_WAIT
        return [dataclasses.replace(step, at=max(step.at, late)) if step.offset > TOTAL - 9 else step for step in steps]

    found = violations(with_steps(evidence, "shared", stopped))
    assert len(found["no partition is stalled"]) == 3 < len(found["no message waits for long"])


def overtaken(evidence, group, number, by):
    """The effect of a message comes after that of a later one of its partition."""
    order = [one for one in evidence.effects[group] if one != name(number)]
    order.insert(order.index(name(by)) + 1, name(number))
    return dataclasses.replace(evidence, effects={**evidence.effects, group: Counter(order)})


@pytest.mark.parametrize("group", ["atomic", "batch"])
def test_effects_of_a_partition_in_another_order(evidence, group):
    number = a_message(group)
    later = behind(group, number)
    while plan.fate(group, name(later)) == plan.POISON:
        later = behind(group, later)
    key, check = KEYS[number % 3], f"{group}: effects of a partition in order"
    late = f"{name(number)} at {number + 1} of {key} took effect after {name(later)} at {later + 1} of {key}"
    broken = overtaken(evidence, group, number, later)
    assert violations(broken) == {check: (late,)}
    # Whichever processes were killed; not if the attempt may have failed.
    at = BEGAN + number / 10
    assert violations(with_trouble(broken, plan.KILL_SUBSCRIBER, at, at, 1)) == {check: (late,)}
    assert violations(with_trouble(broken, plan.CRASH, at, at + 1, 0)) == {}
    assert violations(with_trouble(broken, plan.CRASH, at + 60, at + 61, 0)) == {check: (late,)}


def test_a_message_that_fails_may_take_effect_later(evidence):
    number = a_message("atomic", plan.FLAKY)
    assert violations(overtaken(evidence, "atomic", number, behind("atomic", number))) == {}


def test_effects_of_several_partitions_have_no_order(evidence):
    number = a_message("atomic")
    other = next(n for n in range(number + 1, TOTAL) if n % 3 != number % 3 and name(n) in evidence.effects["atomic"])
    order = list(evidence.effects["atomic"])
    assert order.index(name(other)) > order.index(name(number))
    between = [one for one in order if int(one[2:]) % 3 == number % 3 and number < int(one[2:]) < other]
    assert not between
    assert violations(overtaken(evidence, "atomic", number, other)) == {}

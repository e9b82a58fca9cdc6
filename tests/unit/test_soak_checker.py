"""The soak's checks find what they are there for: a sound run passes, and each way of breaking a promise is named."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest

TOOLS = Path(__file__).parents[2] / "tools"
sys.path.append(str(TOOLS))
from soak import checker, logs, moments, plan, records, timeline  # noqa: E402
from soak.facts import Collected, DeadLetter, Entry, Evidence, Progress, Trouble  # noqa: E402
from soak.records import Step, Transaction  # noqa: E402

from django_mysqlqueue.service.refs import GroupRef  # noqa: E402
from tests.support.tables import Group, Logged, Offsets, State, Tables, Waiting  # noqa: E402

pytestmark = pytest.mark.any_engine

GROUPS = {group.name: group for group in plan.GROUPS}
KEYS = ("a", "b", "c")
TOTAL = 1500
"""Enough that every group has messages of every fate."""
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


@pytest.fixture(scope="module")
def evidence():
    runs = {group.name: run_of(group) for group in plan.GROUPS}
    return Evidence(
        ledger=[Entry(name(n), "p", n, KEYS[n % 3], scheduled=False, at=1000.0 + n) for n in range(TOTAL)],
        transactions=[
            *(Transaction(records.COMMITTED, "p", n, n + 1, at=BEGAN + n / 10) for n in range(TOTAL)),
            Transaction(records.ROLLED_BACK, "p", TOTAL, TOTAL + 3),
            Transaction(records.UNKNOWN, "p", TOTAL + 3, TOTAL + 4, "OperationalError: (2006, '')"),
        ],
        steps={group: steps for group, (steps, _, _) in runs.items()},
        effects={group: effects for group, (_, effects, _) in runs.items() if GROUPS[group].atomic},
        dead=[letter for _, _, dead in runs.values() for letter in dead],
    )


def violations(evidence):
    return {one.name: one.violations for one in checker.check(evidence, plan.GROUPS) if not one.ok}


def with_steps(evidence, group, change):
    steps = list(evidence.steps[group])
    return dataclasses.replace(evidence, steps={**evidence.steps, group: change(steps)})


def with_trouble(evidence, kind=plan.KILL_SUBSCRIBER, since=BEGAN, until=BEGAN + TOTAL, pid=1):
    return dataclasses.replace(evidence, troubles=[*evidence.troubles, Trouble(kind, since, until, pid)])


def a_message(group, fate=plan.FINE, after=0):
    return next(n for n in range(after, TOTAL) if plan.fate(group, name(n)) == fate)


def place(steps, number, verb=records.STARTED):
    return next(n for n, step in enumerate(steps) if step.message_id == name(number) and step.verb == verb)


def test_a_sound_run_passes(evidence):
    assert violations(evidence) == {}
    for group in plan.GROUPS:
        for fate in (plan.POISON, plan.REJECT, plan.FLAKY, plan.PUT_OFF, plan.FINE):
            a_message(group.name, fate)


@pytest.mark.parametrize("group", ["skip", "strict", "shared"])
def test_a_lost_message(evidence, group):
    lost = name(a_message(group))
    broken = with_steps(evidence, group, lambda steps: [step for step in steps if step.message_id != lost])
    assert violations(broken) == {
        f"{group}: what was committed was handled": (
            f"{lost} (partition {KEYS[int(lost[2:]) % 3]}) was committed and never handled",
        )
    }


@pytest.mark.parametrize("group", ["atomic", "batch"])
@pytest.mark.parametrize(("count", "check"), [(0, "what was committed was handled"), (2, "effects exactly once")])
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
    assert list(violations(broken)) == ["atomic: what was committed was handled"]


def test_a_rolled_back_message_that_is_handled(evidence):
    number = TOTAL + 1
    more = [Step(verb, name(number), "a", 9999, 1) for verb in (records.STARTED, records.DONE)]
    broken = with_steps(evidence, "shared", lambda steps: steps + more)
    assert violations(broken) == {
        "shared: what was committed was handled": (
            f"{name(number)} was handled and never committed",
            f"{name(number)} was started and never committed",
        )
    }


@pytest.mark.parametrize("group", ["skip", "strict", "atomic", "batch"])
def test_a_message_that_starts_before_the_one_before_it(evidence, group):
    first = a_message(group)

    def swap(steps):
        # The next of its partition starts, and ends, before it.
        here = place(steps, first)
        later = [step for step in steps if step.message_id == name(first + 3)]
        return steps[:here] + later + [step for step in steps[here:] if step.message_id != name(first + 3)]

    found = violations(with_steps(evidence, group, swap))
    assert f"{group}: first starts in order" in found


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
        behind = [step for step in steps if step.message_id == name(flaky + 3)]
        rest = [step for step in steps if step.message_id != name(flaky + 3)]
        here = place(rest, flaky, records.FAILED) + 1
        return rest[:here] + behind + rest[here:]

    broken = with_steps(evidence, "strict", pass_it)
    assert list(violations(broken)) == ["strict: nothing starts before what is before it has ended"]
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
    assert list(found) == ["skip: the DLQ holds what failed for good"]
    assert len(found["skip: the DLQ holds what failed for good"]) == 1


def test_a_commit_that_the_server_lost(evidence):
    more = [*evidence.transactions, Transaction(records.COMMITTED, "p", TOTAL + 3, TOTAL + 4)]
    found = violations(dataclasses.replace(evidence, transactions=more))
    assert list(found) == ["the server kept what it had committed"]


def test_a_rollback_that_was_none(evidence):
    more = [*evidence.transactions, Transaction(records.ROLLED_BACK, "p", TOTAL - 1, TOTAL)]
    found = violations(dataclasses.replace(evidence, transactions=more))
    assert list(found) == ["the server kept what it had committed"]


def test_a_repeat_that_was_not_dropped(evidence):
    again = [Step(verb, name(5), KEYS[5 % 3], 9999, 1) for verb in (records.STARTED, records.DONE)]
    found = violations(with_steps(evidence, "skip", lambda steps: steps + again))
    assert found["one place in the log for each message"] == (f"{name(5)} is at the offsets [6, 9999]",)


def test_offsets_out_of_publishing_order(evidence):
    """Two messages of one publisher in different partitions, where no group's order shows it."""
    swapped = {name(10): 12, name(11): 11}

    def swap(steps):
        return [
            dataclasses.replace(step, offset=swapped[step.message_id]) if step.message_id in swapped else step
            for step in steps
        ]

    broken = dataclasses.replace(evidence, steps={group: swap(steps) for group, steps in evidence.steps.items()})
    assert list(violations(broken)) == ["offsets in the order of publishing"]
    scheduled = [dataclasses.replace(entry, scheduled=entry.message_id in swapped) for entry in evidence.ledger]
    assert violations(dataclasses.replace(broken, ledger=scheduled)) == {}


# -- when, where, what --------------------------------------------------------


def samples(group, *seen):
    """Of one partition, ``a``: (time, watermark) each."""
    return [Progress(at, {(group, "a"): (watermark, watermark)}) for at, watermark in seen]


def again(number, at, process=ONE, verbs=(records.STARTED, records.DONE)):
    """A message of the partition ``a`` is handled once more."""
    assert KEYS[number % 3] == "a"
    return [Step(verb, name(number), "a", number + 1, 1, at, process) for verb in verbs]


def fine_messages(group, count, fates=(plan.FINE,)):
    found = [n for n in range(0, TOTAL, 3) if plan.fate(group, name(n)) in fates]
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
    check = f"{group}: nothing was handled after it was settled"
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

    check = ["shared: nothing was handled after it was settled"]
    assert found(timeline.THREADS, BEGAN + 200.1) == []
    assert found(timeline.THREADS + 1, BEGAN + 200.1) == check
    assert found(1, BEGAN + 203) == check
    assert found(1, BEGAN + 200.1, ONE) == check


@pytest.mark.parametrize("group", ["skip", "strict", "shared", "atomic", "batch"])
def test_all_is_handled_again_and_again(evidence, group):
    broken = with_steps(evidence, group, lambda steps: steps * 50)
    assert f"{group}: handled again only after a loss" in violations(broken)


def test_what_explains_that_a_message_is_handled_again(evidence):
    (number,) = fine_messages("shared", 1, fates=(plan.FINE,))
    at = BEGAN + number / 10
    once_more = with_steps(evidence, "shared", lambda steps: steps + again(number, at + 20, OTHER))
    check = ["shared: handled again only after a loss"]

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
    assert list(violations(late)) == ["shared: handled again only after a loss"]


def test_more_attempts_than_there_are(evidence):
    (number,) = fine_messages("skip", 1, fates=(plan.POISON,))
    more = [dataclasses.replace(step, attempt=plan.MAX_ATTEMPTS + 1) for step in again(number, BEGAN + 500)]
    found = violations(with_steps(evidence, "skip", lambda steps: steps + more[:1]))
    assert list(found) == ["skip: handled again only after a loss"]


def test_a_wrong_partition(evidence):
    ids = {name(number) for number in fine_messages("skip", 2)}

    def elsewhere(steps):
        return [dataclasses.replace(step, key="other") if step.message_id in ids else step for step in steps]

    found = violations(with_steps(evidence, "skip", elsewhere))
    assert list(found) == ["each in its partition, with its payload"]
    assert len(found["each in its partition, with its payload"]) == 2


@pytest.mark.parametrize("verb", [records.WRONG, records.AGAIN])
def test_a_wrong_payload(evidence, verb):
    (number,) = fine_messages("skip", 1)
    said = again(number, BEGAN + 500, verbs=[verb])
    broken = with_steps(evidence, "skip", lambda steps: steps + said)
    assert list(violations(broken)) == ["each in its partition, with its payload"]
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
    first = next(n for n in range(0, TOTAL, 3) if {plan.fate(group, name(m)) for m in (n, n + 3)} == {plan.FINE})
    check = f"{group}: a partition is worked on in one place"
    same = with_steps(evidence, group, lambda steps: interleaved(steps, first, first + 3, ONE))
    # Whatever is done: a process knows what it works on.
    (found,) = violations(with_trouble(same, plan.CUT, pid=0))[check]
    assert found.startswith(
        f"{name(first + 3)} at {first + 4} of a started while the same process was at {name(first)}"
    )
    other = with_steps(evidence, group, lambda steps: interleaved(steps, first, first + 3, OTHER))
    assert check in violations(other)
    assert check not in violations(with_trouble(other, plan.FREEZE_SUBSCRIBER, BEGAN - 9, BEGAN + 500, 1))
    assert check in violations(with_trouble(other, plan.FREEZE_SUBSCRIBER, BEGAN - 9, BEGAN + 500, 3))
    assert check not in violations(with_trouble(other, plan.CUT, BEGAN - 9, BEGAN + 500, 0))


def test_all_of_a_partition_side_by_side(evidence):
    def spread(steps):
        return [step for verb in (records.STARTED, records.DONE) for step in steps if step.verb == verb]

    assert "skip: a partition is worked on in one place" in violations(with_steps(evidence, "skip", spread))


def test_a_batch_is_one_place_and_what_raised_is_over(evidence):
    """Its messages start with one write; what is raised out of the handler ends them all."""
    one = again(0, BEGAN, verbs=[records.STARTED]) + again(3, BEGAN, verbs=[records.STARTED])
    more = again(6, BEGAN + 1)
    check = "batch: a partition is worked on in one place"

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
    assert found(timeline.LONGEST_WAIT + 1) == ["nothing waits for long", "no partition stands still"]
    away = BEGAN + number / 10 + 10
    assert found(timeline.LONGEST_WAIT + 1, evidence, plan.CRASH, away, away, 0) == []  # a lease, once it is back
    assert found(timeline.LONGEST_WAIT + 8, evidence, plan.FREEZE_ATOMIC, away, away + 9, 9) == []
    assert found(timeline.LONGEST_WAIT + 8, evidence, plan.FREEZE_PUBLISHER, away, away + 9, 9) != []
    twice = with_trouble(evidence, plan.RESTART, away, away + 4, 0)
    assert found(timeline.LONGEST_WAIT + 15, twice, plan.FREEZE_CLAIM, away, away + 9, 9)[0] == "nothing waits for long"
    scheduled = [dataclasses.replace(entry, scheduled=entry.number == number) for entry in evidence.ledger]
    assert found(timeline.LONGEST_WAIT + 1, dataclasses.replace(evidence, ledger=scheduled)) == []


def test_a_partition_that_is_slow_and_one_that_stands_still(evidence):
    """A second for each message that comes every tenth of one: they wait for long, but somebody is at it."""

    def slowly(steps):
        return [dataclasses.replace(step, at=BEGAN + step.offset) for step in steps]

    found = violations(with_steps(evidence, "shared", slowly))
    assert list(found) == ["nothing waits for long"]

    def stopped(steps):
        late = BEGAN + TOTAL / 10 + timeline.LONGEST_WAIT
        return [dataclasses.replace(step, at=max(step.at, late)) if step.offset > TOTAL - 9 else step for step in steps]

    found = violations(with_steps(evidence, "shared", stopped))
    assert len(found["no partition stands still"]) == 3 < len(found["nothing waits for long"])


# -- what is left -------------------------------------------------------------

REFS = [GroupRef(group, plan.TOPIC) for group in GROUPS]
DRAINED = Tables(
    log={offset: Logged(offset, plan.TOPIC, key, name(offset), b"") for offset, key in ((7, "b"), (10, "a"))},
    groups={ref: Group() for ref in REFS},
    offsets={(ref, key): Offsets(end, end) for ref in REFS for key, end in (("a", 10), ("b", 7))},
    sequencer=10,
)
SKIP, BATCH_GROUP = GroupRef("skip", plan.TOPIC), GroupRef("batch", plan.TOPIC)


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"state": {(SKIP, "a", 10): State()}},
        {"leases": {(SKIP, "a"): ""}},
        {"outbox": [Waiting(1, plan.TOPIC, "a", "1", b"", deliver_at=9)]},
        {"groups": {ref: Group() for ref in REFS if ref != SKIP}},
        {"offsets": {**DRAINED.offsets, (SKIP, "a"): Offsets(9, 10)}},
        {"offsets": {place: at for place, at in DRAINED.offsets.items() if place != (BATCH_GROUP, "b")}},
        {"offsets": {**DRAINED.offsets, (SKIP, "a"): Offsets(11, 10)}},
    ],
)
def test_what_is_left_behind(change):
    found = moments.check_leftovers(dataclasses.replace(DRAINED, **change), dict.fromkeys(GROUPS, 0), plan.GROUPS)
    assert found.ok == (not change), found.violations


def test_a_lag_that_is_left():
    found = moments.check_leftovers(DRAINED, dict.fromkeys(GROUPS, 0) | {"skip": 1}, plan.GROUPS)
    assert found.violations == ("skip lags by 1",)


def verdict_of(*places):
    """Of moments at which the group ``skip`` was there in the partition ``a``, whose log begins at the last number."""
    seen = moments.Moments()
    for acked, claimed, lowest in places:
        log = {n: Logged(n, plan.TOPIC, "a", name(n), b"") for n in range(lowest, 31)} if lowest else {}
        rows = {(SKIP, "a", n): State() for n in log if acked < n <= claimed}
        offsets = {(SKIP, "a"): Offsets(acked, claimed)} if claimed else {}
        collected = {plan.TOPIC: lowest - 1 if lowest else 30}
        seen.add(Tables(log, [], {SKIP: Group()}, offsets, rows, sequencer=30, collected=collected))
    return seen.verdict()


def test_watermarks_that_go_back():
    assert verdict_of((5, 6, 1), (5, 9, 1), (9, 9, 1)).ok
    assert verdict_of((5, 6, 1), (4, 6, 1)).count == 2, "and a message is live again"
    assert not verdict_of((5, 6, 1), (0, 0, 0), (5, 5, 1)).ok
    # All of it was collected, the row as well: the next message begins anew.
    assert verdict_of((5, 6, 1), (0, 0, 8)).ok
    assert verdict_of((5, 6, 1), (0, 0, 0)).ok


def test_a_row_that_goes_before_its_partition_is_drained():
    """The cursor says up to where the log must hold nothing; what is not settled is above the watermark."""
    assert not verdict_of((10, 20, 11), (0, 0, 15)).ok
    assert not verdict_of((10, 20, 11), (0, 0, 20)).ok
    assert not verdict_of((10, 20, 11), (10, 19, 11)).ok
    assert verdict_of((10, 20, 11), (0, 0, 21)).ok


def test_retention():
    entries = [Entry(name(n), "p", n, "a", scheduled=False, at=1000.0 * n) for n in range(100)]
    times = {entry.message_id: entry.at for entry in entries}
    kept = {message_id: at for message_id, at in times.items() if at > 40_000}
    sound = Collected(now=100_000.0, before=times, after=kept)
    assert checker.check_retention(entries, sound, 60_000).ok
    gone = {message_id: at for message_id, at in times.items() if message_id != name(50)}
    too_early = dataclasses.replace(sound, before=gone, after={key: at for key, at in kept.items() if key in gone})
    assert checker.check_retention(entries, too_early, 60_000).count == 1
    too_much = dataclasses.replace(sound, after={key: at for key, at in kept.items() if key != name(99)})
    assert checker.check_retention(entries, too_much, 60_000).count == 1
    too_little = dataclasses.replace(sound, after=times)
    assert checker.check_retention(entries, too_little, 60_000).count == 41


def test_memory():
    flat = [20.0, 40.0, *[50.0, 52.0, 49.0] * 10]
    assert checker.check_memory({"steady": flat}).ok
    assert not checker.check_memory({"steady": [*flat, *(52.0 + 2 * n for n in range(20))]}).ok
    assert not checker.check_memory({"steady": []}).ok


# -- logs ---------------------------------------------------------------------

EXPECTED = """\
2026-01-01 10:00:00,000 WARNING poller.failed error="OperationalError: (2006, 'Server has gone away')" failures=1
2026-01-01 10:00:00,000 ERROR [1] group.failed group=g error="OperationalError: (1205, 'Lock wait timeout')" failures=1
2026-01-01 10:00:00,000 ERROR [2] delivery.dead_lettered group=g error='soak.app.subscribers.Planned: poison'
Traceback (most recent call last):
  File "handling.py", line 1, in handle
soak.app.subscribers.Planned: poison
MySQLdb.OperationalError: (2013, 'Lost connection to server during query')
django.db.utils.OperationalError: (1927, 'Connection was killed')
CommandError: The database 'default' does not answer: (2002, "Can't connect to local server")
django_mysqlqueue.exceptions.CommitOutcomeUnknown: COMMIT on 'default' failed: (2006, '')
"""
STRANGE = [
    "2026-01-01 10:00:00,000 ERROR handler.thread_failed group=g topic=t",
    "2026-01-01 10:00:00,000 CRITICAL [1] poller.died",
    "2026-01-01 10:00:00,000 WARNING poller.failed error=\"OperationalError: (1146, 'no such table')\" failures=1",
    "2026-01-01 10:00:00,000 ERROR group.failed group=g error=\"OperationalError: (2006, 'gone')\"",
    "CommandError: There are no tables",
    "ValueError: too many values to unpack",
    "KeyError: 5",
    "django.db.transaction.TransactionManagementError: An error occurred in the current transaction.",
    'django.db.utils.IntegrityError: (1062, "Duplicate entry")',
    "AssertionError",
]
DEADLOCKED = [
    "2026-01-01 10:00:00,000 ERROR group.failed group=g error=\"OperationalError: (1213, 'in another language')\"",
    "django.db.utils.OperationalError: (1213, 'Deadlock found when trying to get lock; try restarting transaction')",
]


def test_logs_with_nothing_unexpected():
    assert [one.violations for one in logs.read_all({"a.log": EXPECTED.splitlines()}).verdicts()] == [(), ()]


@pytest.mark.parametrize("line", STRANGE)
def test_logs_with_something_unexpected(line):
    findings = logs.read_all({"a.log": [*EXPECTED.splitlines(), line]})
    assert findings.unexpected == [f"a.log:11: {line}"]
    assert not findings.deadlocks


@pytest.mark.parametrize("line", DEADLOCKED)
def test_logs_with_a_deadlock(line):
    findings = logs.read_all({"a.log": [*EXPECTED.splitlines(), line]})
    assert findings.deadlocks == [f"a.log:11: {line}"]


FAILING = [
    "2026-01-01 10:00:00,000 WARNING poller.failed error=Retry: failures=9",
    "2026-01-01 10:00:00,000 WARNING poller.failed error=\"OperationalError: (1205, 'Lock wait timeout')\" failures=1",
    "2026-01-01 10:00:00,000 WARNING [1] heart.failed error=\"(2006, '')\" failures=1",
    "2026-01-01 10:00:00,000 ERROR heart.withheld reason='the poller makes no progress' seconds=7.0",
    "django.db.utils.OperationalError: (1205, 'Lock wait timeout')",
]


@pytest.mark.parametrize("line", FAILING)
def test_logs_of_what_fails_all_the_time(line):
    findings = logs.read_all({"a.log": [line] * 300})
    assert not findings.unexpected
    few = [
        *(Trouble(plan.CUT, n, n, 0) for n in range(4)),
        *(Trouble(plan.FREEZE_CLAIM, n, n + 8, 5) for n in range(5)),
        *(Trouble(plan.KILL_SUBSCRIBER, n, n, 5) for n in range(8)),
        Trouble(plan.CRASH, 20, 21),
        Trouble(plan.IMPATIENT, 30, 42),
    ]
    for explained in (logs.Bounds(), logs.bounds(few, processes=6)):
        (broken,) = [one for one in findings.verdicts(explained) if not one.ok]
        assert broken.name == "nothing unexpected in the logs"
    many = logs.bounds(few * 4, processes=6)
    assert all(one.ok for one in findings.verdicts(many))


def test_logs_of_one_that_never_recovers():
    """Of failures in a row every second power of two has a line: few lines are many failures."""
    lines = [f"2026-01-01 10:00:00,000 WARNING poller.failed error=Retry: failures={2**n}" for n in range(6)]
    findings = logs.read_all({"a.log": lines})
    crash = logs.bounds([Trouble(plan.CRASH, 0, 1, 0)], processes=6)
    (broken,) = [one for one in findings.verdicts(crash) if not one.ok]
    assert broken.violations == ("poller.failed: 32 failures in a row: 20 are explained",)
    assert all(one.ok for one in findings.verdicts(logs.bounds([Trouble(plan.CRASH, 0, 9, 0)], processes=6)))


# -- the plan and the records -------------------------------------------------


def test_a_seed_gives_the_same_plan_and_a_short_run_has_everything():
    first, again, other = plan.actions(5, 180), plan.actions(5, 180), plan.actions(6, 180)
    assert first == again != other
    assert {action.kind for action in first} == set(plan.ACTIONS)
    assert all(0 < later.at - action.at <= plan.LONGEST + 0.02 for action, later in pairwise(first))


def test_steps_of_many_processes_stand_whole_in_one_file(tmp_path):
    path = records.group_file(tmp_path, "skip")
    code = (
        "import sys; from pathlib import Path; from soak import records\n"
        "for n in range(300): records.write(Path(sys.argv[1]), "
        "[records.Step('S', f'{sys.argv[2]}:{n}', 'a key/with#signs', n, 1, records.now(), records.me())] * 3)"
    )
    env = {**os.environ, "PYTHONPATH": str(TOOLS)}
    before = records.now() - 0.001
    processes = [subprocess.Popen([sys.executable, "-c", code, str(path), str(n)], env=env) for n in range(4)]
    assert [process.wait(60) for process in processes] == [0] * 4
    steps = records.steps(path)
    assert Counter(step.message_id for step in steps) == {f"{p}:{n}": 3 for p in range(4) for n in range(300)}
    assert {step.key for step in steps} == {"a key/with#signs"}
    assert {step.pid for step in steps} == {process.pid for process in processes}
    assert len({step.process for step in steps}) == 4
    assert before <= min(step.at for step in steps) <= max(step.at for step in steps) <= records.now()


def test_transactions_with_a_note_of_several_lines(tmp_path):
    one = Transaction(records.UNKNOWN, "p", 3, 4, "an error\nof | two lines", 5.5)
    records.write(records.publishers_file(tmp_path), [one])
    (read,) = records.transactions(records.publishers_file(tmp_path))
    assert read == dataclasses.replace(one, note="an error of | two lines")


# -- the report ---------------------------------------------------------------


def test_the_report_names_what_was_broken(evidence, tmp_path):
    from soak import report
    from soak.monitor import Sample

    broken = checker.verdict("skip: first starts in order", "10 first starts", ["p:7 started too early"])
    lags = {"outbox": 1, **dict.fromkeys(GROUPS, 5)}
    sound = report.Report(
        command="make soak",
        engine="mariadb",
        version="10.11",
        machine="2 cores",
        seed=1,
        seconds=60.0,
        drained_after=3.0,
        done_to_it=dict.fromkeys(plan.ACTIONS, 1),
        downtimes=[(1.0, 3.0)],
        restarts={"steady": 0},
        traffic=report.traffic(evidence),
        groups=report.groups(evidence),
        samples=[Sample(5.0, 10, lags, held_back=True)],
        memory={"steady": [40.0, 50.0], "none": []},
        log_events={"poller.failed": 2},
        database_errors={2006: 2},
        verdicts=[checker.verdict("one", "two", [])],
    )
    assert sound.ok
    failed = dataclasses.replace(sound, verdicts=[*sound.verdicts, broken])
    text, data = (path.read_text() for path in reversed(failed.write(tmp_path)))
    assert text.startswith("# Soak: mariadb 10.11, 1.0 minutes: FAILED\n")
    assert "- p:7 started too early\n" in text
    assert json.loads(data)["ok"] is False
    assert json.loads(data)["traffic"]["messages committed"] == TOTAL

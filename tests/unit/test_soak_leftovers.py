"""The soak's checks find what is left behind."""

from __future__ import annotations

import dataclasses
import json

import pytest
from soak import checker, moments, plan
from soak.facts import Collected, Entry

from tests.support.internals import GroupRef
from tests.support.soak_runs import GROUPS, name
from tests.support.tables import Group, Logged, Offsets, State, Tables, Waiting

pytestmark = pytest.mark.any_engine

ON_TOPIC = [group for group in plan.GROUPS if group.topic == plan.TOPIC]
REFS = [GroupRef(group.name, plan.TOPIC) for group in ON_TOPIC]
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
    found = moments.check_leftovers(dataclasses.replace(DRAINED, **change), dict.fromkeys(GROUPS, 0), ON_TOPIC)
    assert found.ok == (not change), found.violations


def test_a_lag_that_is_left():
    found = moments.check_leftovers(DRAINED, dict.fromkeys(GROUPS, 0) | {"skip": 1}, ON_TOPIC)
    assert found.violations == ("skip has a lag of 1",)


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


def test_a_scheduled_message_that_was_cancelled():
    for deletes, count in (("1",), 0), ((), 1):
        seen = moments.Moments()
        seen.add(dataclasses.replace(DRAINED, outbox=[Waiting(1, plan.TOPIC, "a", "1", b"", deliver_at=9)]))
        seen.add(DRAINED, deletes)
        assert seen.verdict().count == count


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
    lost = next(n for n in range(50, 99) if GROUPS["skip"].gets(name(n)) and plan.coalescing(name(n)) is None)
    gone = {message_id: at for message_id, at in times.items() if message_id != name(lost)}
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


def test_a_moment_at_which_an_overridden_filter_has_passed_a_message():
    narrowed = GroupRef("narrowed", plan.TOPIC)
    registered = json.dumps({"region": ["eu", "us"]})

    def found(region):
        message = Logged(10, plan.TOPIC, "a", name(10), b"", metadata=json.dumps({"region": region}))
        tables = dataclasses.replace(
            DRAINED,
            log={10: message},
            groups={narrowed: Group(filter=registered)},
            offsets={(narrowed, "a"): Offsets(9, 10)},
        )
        moment = moments.Moments()
        moment.add(tables)
        return moment.verdict().violations

    assert not found("us")
    (lost,) = found("eu")
    assert lost.startswith("LOST: ")

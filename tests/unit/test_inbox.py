"""The inbox by itself: whose turn it is, leases, suspects. No database, no sleeping."""

from __future__ import annotations

import pytest

from tests.support.inbox import ORDERED, SHARED
from tests.support.internals import SLICE

pytestmark = pytest.mark.any_engine


# -- order and lanes ----------------------------------------------------------


def test_one_thread_per_partition(queue):
    one = queue(g=ORDERED)
    first, second, other = one.put("g", "a", "a", "b")
    assert [held for _, held in one.take_all()] == [first, other]
    one.finish(first)
    assert one.take() is None, "the thread is still at the lane: it takes the next itself"
    assert one.waiting("g") == (1, 1)
    del second


def test_the_thread_at_a_partition_goes_on_with_it_in_order(queue):
    one = queue(g=ORDERED)
    items = one.put("g", "a", "b", "a", "a")
    lane, held = one.take()
    assert held is items[0]
    for expected in (items[2], items[3]):
        one.finish(held)
        lane, held = one.take(lane)
        assert held is expected


def test_a_partition_that_fills_again_after_it_was_empty_is_found(queue):
    one = queue(g=ORDERED)
    one.put("g", "a")
    lane, held = one.take()
    one.finish(held)
    assert one.take(lane) is None
    (again,) = one.put("g", "a")
    assert one.take()[1] is again


def test_what_comes_while_a_partition_runs_waits_for_its_thread(queue):
    one = queue(g=ORDERED)
    one.put("g", "a")
    lane, held = one.take()
    (second,) = one.put("g", "a")
    assert one.take() is None
    one.finish(held)
    assert one.take(lane)[1] is second


def test_shared_deliveries_go_to_any_thread_at_once(queue):
    one = queue(g=SHARED)
    items = one.put("g", "a", "a", "a")
    assert [held for _, held in one.take_all()] == items


def test_after_its_slice_a_thread_lets_other_partitions_have_their_turn(queue):
    one = queue(g=ORDERED)
    hot = one.put("g", "hot", "hot", "hot", "hot")
    (calm,) = one.put("g", "calm")
    lane, held = one.take()
    one.now += SLICE / 2
    one.finish(held)
    lane, held = one.take(lane)
    assert held is hot[1]
    one.now += SLICE / 2
    one.finish(held)
    lane, held = one.take(lane)
    assert held is calm
    one.now += SLICE
    one.finish(held)
    assert one.take(lane)[1] is hot[2]


@pytest.mark.parametrize("mode", [ORDERED, SHARED])
def test_groups_have_their_turn_round_robin(queue, mode):
    """A group with a long line does not starve the others."""
    one = queue(a=mode, b=mode, c=mode)
    one.put("a", *(f"k{number}" for number in range(50)))
    one.put("b", "x", "y")
    one.put("c", "z")
    groups = [held.handler.ref.group for _, held in one.take_all()]
    assert groups[:5] == ["a", "b", "c", "a", "b"]
    assert groups[5:] == ["a"] * 48


def test_partitions_of_a_group_have_their_turn_round_robin(queue):
    one = queue(g=ORDERED)
    one.put("g", "a", "a", "a", "b", "b", "c")
    order = []
    lane = None
    while (found := one.take(lane)) is not None:
        lane, held = found
        order.append(held.claimed.key)
        one.now += SLICE
        one.finish(held)
    assert order == ["a", "b", "c", "a", "b", "a"]


# -- leases -------------------------------------------------------------------


def test_doubt_about_leases_holds_ordered_deliveries_but_not_shared_ones(queue):
    one = queue(o=ORDERED, s=SHARED)
    (ordered,) = one.put("o", "a")
    (shared,) = one.put("s", "a")
    one.leases_good = False
    assert [held for _, held in one.take_all()] == [shared]
    one.leases_good = True
    assert one.take()[1] is ordered


def test_doubt_also_stops_the_thread_that_is_at_a_partition(queue):
    one = queue(g=ORDERED)
    _, second = one.put("g", "a", "a")
    lane, held = one.take()
    one.leases_good = False
    one.finish(held)
    assert one.take(lane) is None
    one.leases_good = True
    assert one.take()[1] is second


# -- suspects -----------------------------------------------------------------


def test_one_suspect_at_a_time_beside_normal_ones(queue):
    one = queue(g=ORDERED)
    (first,) = one.put("g", "a", suspect=True)
    (second,) = one.put("g", "b", suspect=True)
    (normal,) = one.put("g", "c")
    assert [held for _, held in one.take_all()] == [first, normal]
    one.finish(first)
    assert one.take() is None, "the first one's outcome is not written yet"
    one.inbox.written(one.inbox.take_settlements(one.ref("g")))
    assert one.take()[1] is second


def test_suspects_count_over_all_groups(queue):
    one = queue(a=ORDERED, b=SHARED)
    (first,) = one.put("a", "x", suspect=True)
    (second,) = one.put("b", "x", suspect=True)
    assert [held for _, held in one.take_all()] == [first]
    one.finish(first)
    one.inbox.written(one.inbox.take_settlements(one.ref("a")))
    assert [held for _, held in one.take_all()] == [second]


def test_other_outcomes_do_not_release_the_suspect(queue):
    one = queue(g=ORDERED)
    normal = one.put("g", "c")[0]
    one.take()
    first = one.put("g", "a", suspect=True)[0]
    one.put("g", "b", suspect=True)
    assert one.take()[1] is first
    one.finish(normal)
    one.inbox.written(one.inbox.take_settlements(one.ref("g")))
    assert one.take() is None


def test_a_waiting_suspect_does_not_hold_up_shared_deliveries_behind_it(queue):
    one = queue(g=SHARED)
    (first,) = one.put("g", "a", suspect=True)
    one.put("g", "b", suspect=True)
    (normal,) = one.put("g", "c")
    assert [held for _, held in one.take_all()] == [first, normal]


def test_a_suspects_outcome_is_to_be_written_at_once(queue):
    one = queue(g=ORDERED)
    (suspect,) = one.put("g", "a", suspect=True)
    one.put("g", "b")
    one.take()
    one.take()
    assert not one.flush_due("g", enough=100)
    one.finish(suspect)
    assert one.flush_due("g", enough=100)

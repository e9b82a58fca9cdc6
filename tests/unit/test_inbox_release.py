"""What the inbox releases, holds back and forgets."""

from __future__ import annotations

import pytest

from tests.support.inbox import BLOCK, ORDERED, SHARED
from tests.support.internals import Action, Batch, Settlement

pytestmark = pytest.mark.any_engine


# -- block and give back ------------------------------------------------------


@pytest.mark.parametrize("kind", [Action.NACK, Action.SNOOZE])
def test_block_gives_back_what_is_behind(queue, kind):
    one = queue(g=BLOCK)
    head, *behind = one.put("g", "a", "a", "a")
    (other,) = one.put("g", "b")
    lane, held = one.take()
    one.finish(held, kind)
    assert one.outcomes("g") == [(head.claimed.offset, kind), *((b.claimed.offset, Action.RELEASE) for b in behind)]
    assert one.inbox.is_blocked(one.ref("g"), "a")
    assert not one.inbox.is_blocked(one.ref("g"), "b")
    assert one.take(lane)[1] is other
    (later,) = one.put("g", "a")
    assert one.outcomes("g") == [(later.claimed.offset, Action.RELEASE)]
    assert one.waiting("g") == (0, 0)
    one.inbox.unblock(one.ref("g"), "a")
    (again,) = one.put("g", "a")
    assert one.take()[1] is again


@pytest.mark.parametrize("kind", [Action.ACK, Action.REJECT])
def test_block_goes_on_after_the_head_is_settled(queue, kind):
    one = queue(g=BLOCK)
    _, second = one.put("g", "a", "a")
    lane, held = one.take()
    one.finish(held, kind)
    assert one.take(lane)[1] is second


@pytest.mark.parametrize("kind", [Action.ACK, Action.NACK, Action.SNOOZE, Action.REJECT])
def test_skip_goes_on_after_anything(queue, kind):
    one = queue(g=ORDERED)
    _, second = one.put("g", "a", "a")
    lane, held = one.take()
    one.finish(held, kind)
    assert one.take(lane)[1] is second


@pytest.mark.parametrize("group", [ORDERED, BLOCK])
def test_a_head_that_never_started_holds_back_what_is_behind(queue, group):
    """Its first start must come before theirs, whatever on_failure says."""
    one = queue(g=group)
    head, behind = one.put("g", "a", "a")
    lane, held = one.take()
    one.finish(held, Action.RELEASE)
    assert one.outcomes("g") == [(head.claimed.offset, Action.RELEASE), (behind.claimed.offset, Action.RELEASE)]
    assert one.take(lane) is None
    assert one.inbox.is_blocked(one.ref("g"), "a")


@pytest.mark.parametrize("kind", [Action.NACK, Action.RELEASE])
def test_shared_deliveries_are_never_held_back(queue, kind):
    one = queue(g={"mode": "shared", "on_failure": "block"})
    _, second = one.put("g", "a", "a")
    lane, held = one.take()
    one.finish(held, kind)
    assert one.take(lane)[1] is second


@pytest.mark.parametrize(("kind", "blocked"), [(Action.RELEASE, True), (Action.ACK, False)])
def test_a_delivery_that_never_came_in(queue, kind, blocked):
    """Its body could not be read (given back) or is gone (acked)."""
    one = queue(g=ORDERED)
    missing = one.held("g", "a")
    one.inbox.settle(Settlement(missing.claimed, kind), ordered=not missing.handler.shared)
    (behind,) = one.put("g", "a")
    assert one.inbox.is_blocked(one.ref("g"), "a") is blocked
    expected = [(missing.claimed.offset, kind)]
    assert one.outcomes("g") == ([*expected, (behind.claimed.offset, Action.RELEASE)] if blocked else expected)
    assert (one.take() is None) is blocked


def test_release_takes_what_waits_and_leaves_what_runs(queue):
    one = queue(g=ORDERED)
    first, second = one.put("g", "a", "a")
    (other,) = one.put("g", "b")
    lane, _ = one.take()
    one.inbox.release(one.ref("g"), "a")
    assert one.outcomes("g") == [(second.claimed.offset, Action.RELEASE)]
    assert one.inbox.held(one.ref("g")) == [other.claimed, first.claimed]
    one.finish(first)
    assert one.take(lane)[1] is other


# -- drop ---------------------------------------------------------------------


def test_drop_forgets_what_waits_without_an_outcome(queue):
    """The lease is lost: whatever were written would be another's."""
    one = queue(g=ORDERED)
    first, second, third = one.put("g", "a", "a", "a", size=10)
    (other,) = one.put("g", "b")
    one.take()
    assert one.inbox.drop(one.ref("g"), "a") == [second.claimed, third.claimed]
    assert one.outcomes("g") == []
    assert one.waiting("g") == (1, 1)
    assert one.inbox.running() == 1
    one.finish(first)
    assert one.outcomes("g") == [(first.claimed.offset, Action.ACK)]
    assert one.inbox.drop(one.ref("g"), "a") == []
    assert one.inbox.drop(one.ref("g"), "never seen") == []
    assert [held for _, held in one.take_all()] == [other]


def test_forgotten_lanes_leave_nothing_behind(queue):
    one = queue(g=ORDERED)
    for number in range(100):
        (held,) = one.put("g", f"k{number}")
        lane, _ = one.take()
        one.finish(held)
        assert one.take(lane) is None
        one.inbox.forget_lane(one.ref("g"), f"k{number}")
    assert not one.inbox._groups[one.ref("g")].lanes
    assert not list(one.inbox._groups[one.ref("g")].ready(on_loop=False))


@pytest.mark.parametrize("state", ["waiting", "running"])
def test_a_lane_in_use_is_not_forgotten(queue, state):
    one = queue(g=BLOCK)
    (held,) = one.put("g", "a")
    if state == "running":
        one.take()
    one.inbox.forget_lane(one.ref("g"), "a")
    if state == "waiting":
        assert one.take()[1] is held
    one.finish(held, Action.NACK)
    assert one.inbox.is_blocked(one.ref("g"), "a")


# -- closing ------------------------------------------------------------------


def test_close_gives_back_what_waits_and_lets_what_runs_end(queue):
    one = queue(o=ORDERED, s=SHARED)
    running, waiting = one.put("o", "a", "a")
    (shared,) = one.put("s", "a")
    lane, _ = one.take()
    one.inbox.close()
    assert one.outcomes("o") == [(waiting.claimed.offset, Action.RELEASE)]
    assert one.outcomes("s") == [(shared.claimed.offset, Action.RELEASE)]
    assert one.inbox.take(None) is None
    one.finish(running)
    assert one.inbox.take(Batch([lane], [])) is None
    assert one.outcomes("o") == [(running.claimed.offset, Action.ACK)]
    (late,) = one.put("o", "b")
    assert one.outcomes("o") == [(late.claimed.offset, Action.RELEASE)]
    assert one.inbox.is_idle(one.ref("o"))


# -- the exit -----------------------------------------------------------------


def test_an_exit_takes_the_outcomes_and_releases_what_runs(queue):
    one = queue(o={**ORDERED, "max_processing_time": 10.0}, s=SHARED)
    ended, hung = one.put("o", "a", "b")
    _, running = one.put("s", "a", "b")
    taken = {held.claimed.offset: held for _, held in one.take_all()}
    one.now += 11
    one.finish(taken.pop(ended.claimed.offset))
    running.started_at += 11  # It has only begun.
    one.inbox.close()
    ends, exceeded = one.inbox.cut_off(one.ref("o"))
    assert [(end.delivery.offset, end.action) for end in ends] == [(ended.claimed.offset, Action.ACK)]
    assert exceeded == [[hung]]
    assert one.inbox.overrun() is hung
    ends, exceeded = one.inbox.cut_off(one.ref("s"))
    assert [end.action for end in ends] == [Action.RELEASE] * 2
    assert exceeded == []
    assert one.outcomes("o") == one.outcomes("s") == []
    one.finish(hung)  # It may end before the process has exited.
    assert one.outcomes("o") == [(hung.claimed.offset, Action.ACK)]

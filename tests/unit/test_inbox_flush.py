"""What the inbox counts, and when outcomes are to be written."""

from __future__ import annotations

import pytest

from tests.support.inbox import ORDERED, SHARED
from tests.support.internals import FLUSH_DELAY, WRITTEN_DELAY, Action, Slot

pytestmark = pytest.mark.any_engine


# -- counters -----------------------------------------------------------------


def test_waiting_counts_messages_and_bytes(queue):
    one = queue(a=ORDERED, b=SHARED)
    one.put("a", "x", "y", size=10)
    one.put("b", "x", size=5)
    assert (one.waiting("a"), one.waiting("b")) == ((2, 20), (1, 5))
    one.take()
    one.take()
    assert (one.waiting("a"), one.waiting("b")) == ((1, 10), (0, 0))
    assert one.inbox.running() == 2


def test_is_idle(queue):
    one = queue(g=ORDERED)
    ref = one.ref("g")
    assert one.inbox.is_idle(ref)
    (held,) = one.put("g", "a")
    assert not one.inbox.is_idle(ref)
    one.take()
    assert not one.inbox.is_idle(ref)
    one.finish(held)
    assert not one.inbox.is_idle(ref)
    one.inbox.take_settlements(ref)
    assert one.inbox.is_idle(ref)


def test_overrun_names_the_delivery_that_runs_too_long(queue):
    one = queue(g={"max_processing_time": 5.0}, h={"max_processing_time": 50.0})
    (short,) = one.put("g", "a")
    one.put("h", "a")
    one.now += 1000
    assert one.inbox.overrun() is None, "what waits does not run"
    one.take_all()
    one.now += 5
    assert one.inbox.overrun() is None
    one.now += 1
    assert one.inbox.overrun() is short
    one.finish(short)
    assert one.inbox.overrun() is None


def test_of_several_that_run_too_long_the_first_that_started_is_named(queue):
    """And an exit takes them in the order in which they started, as the messages of a batch are in that of the log."""
    one = queue(g={**SHARED, "max_processing_time": 5.0})
    items = one.put("g", *"abcdefghijklmnopqrst")
    one.take_all()
    one.now += 6
    assert one.inbox.overrun() is items[0]
    one.inbox.close()
    _, exceeded = one.inbox.cut_off(one.ref("g"))
    assert [held for (held,) in exceeded] == items


# -- flushing -----------------------------------------------------------------


def test_outcomes_wait_for_others_but_not_long(queue):
    one = queue(g=ORDERED)
    one.put("g", *"abcd")
    held = [item for _, item in one.take_all()]
    assert not one.flush_due("g", enough=1)
    one.finish(held[0])
    assert not one.flush_due("g", enough=2)
    one.finish(held[1])
    assert one.flush_due("g", enough=2)
    assert not one.flush_due("g", enough=3)
    one.now += FLUSH_DELAY
    assert one.flush_due("g", enough=3)


def test_acks_that_are_written_wait_longer(queue):
    """Only the watermark waits for them."""
    one = queue(g=ORDERED)
    one.put("g", *"abc")
    held = [item for _, item in one.take_all()]
    one.finish(held[0], is_written=True)
    one.now += FLUSH_DELAY
    assert not one.flush_due("g", enough=100)
    one.now += WRITTEN_DELAY - FLUSH_DELAY
    assert one.flush_due("g", enough=100)
    one.inbox.take_settlements(one.ref("g"))
    one.finish(held[1], is_written=True)
    assert not one.flush_due("g", enough=100)


@pytest.mark.parametrize(
    ("kind", "is_written", "has_slot"),
    [(Action.ACK, False, False), (Action.REJECT, True, False), (Action.ACK, True, True)],
)
def test_other_outcomes_do_not_wait_with_acks_that_are_written(queue, kind, is_written, has_slot):
    """A dead letter is logged by the flush, and it frees a slot."""
    one = queue(g=ORDERED)
    slot = Slot("", one.now, one.now + 60) if has_slot else None
    one.put("g", *"abc")
    one.inbox.put([one.held("g", "d", slot=slot)])
    *others, last = [item for _, item in one.take_all()]
    one.finish(others[0], is_written=True)
    one.now += FLUSH_DELAY
    one.finish(last, kind, is_written=is_written)
    assert not one.flush_due("g", enough=100)
    one.now += FLUSH_DELAY
    assert one.flush_due("g", enough=100)


def test_a_failed_flush_does_not_put_off_what_waits(queue):
    one = queue(g=ORDERED)
    one.put("g", *"abc")
    first, second, _ = (item for _, item in one.take_all())
    one.finish(first)
    lost = one.inbox.take_settlements(one.ref("g"))
    one.finish(second)
    one.now += FLUSH_DELAY / 2
    one.inbox.put_back_settlements(one.ref("g"), lost)
    one.now += FLUSH_DELAY / 2
    assert one.flush_due("g", enough=100)


def test_the_last_outcome_does_not_wait(queue):
    one = queue(g=ORDERED)
    (held,) = one.put("g", "a")
    one.take()
    one.finish(held)
    assert one.flush_due("g", enough=100)


def test_outcomes_of_a_failed_flush_come_first_again(queue):
    one = queue(g=ORDERED)
    first, second = (one.put("g", key)[0] for key in "ab")
    one.take_all()
    one.finish(first)
    lost = one.inbox.take_settlements(one.ref("g"))
    one.finish(second)
    one.inbox.put_back_settlements(one.ref("g"), lost)
    assert one.outcomes("g") == [(first.claimed.offset, Action.ACK), (second.claimed.offset, Action.ACK)]
    one.inbox.put_back_settlements(one.ref("g"), lost)
    one.now += FLUSH_DELAY
    assert one.flush_due("g", enough=100)

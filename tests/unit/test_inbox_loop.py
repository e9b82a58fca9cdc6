"""The inbox and the event loop: what starts there, and when the loop is woken."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest

from tests.support.inbox import BLOCK, ORDERED, SHARED
from tests.support.internals import Action, Settlement, Slot, starts

pytestmark = pytest.mark.any_engine

ASYNC = {"is_async": True}
AO, AS, AB = ({**mode, **ASYNC} for mode in (ORDERED, SHARED, BLOCK))


def keys(batches):
    return [held.claimed.key for batch in batches for held in batch.items]


# -- what starts --------------------------------------------------------------


def test_the_loop_takes_what_there_is_room_for(queue):
    one = queue(concurrency=3, g=AO)
    one.put("g", *"abcde")
    taken = one.take_for_loop()
    assert keys(taken) == ["a", "b", "c"]
    assert one.take_for_loop() == []
    one.end(taken[1])
    assert keys(one.take_for_loop()) == ["d"]
    assert one.take() is None, "a thread has taken a coroutine"


def test_threads_and_the_loop_have_their_own(queue):
    one = queue(concurrency=1, g=AO, h=ORDERED)
    (coroutine, _), (call, _) = one.put("g", *"ab"), one.put("h", *"ab")
    assert one.take_for_loop()[0].items == [coroutine]
    assert one.take()[1] is call
    assert one.take_for_loop() == []
    assert one.take() is not None


def test_groups_take_turns_and_one_with_its_own_concurrency_is_apart(queue):
    one = queue(concurrency=4, g=AS, h=AS, own={**AS, "concurrency": 2})
    for group in ("g", "h", "own"):
        one.put(group, *(f"{group}{n}" for n in range(9)))
    taken = one.take_for_loop()
    assert sorted(keys(taken)) == ["g0", "g1", "h0", "h1", "own0", "own1"]
    for group, free in (("g", 0), ("h", 0), ("own", 0)):
        assert one.inbox.free_calls(one.ref(group)) == [free]
    for batch in taken:
        if batch.items[0].claimed.key in ("own0", "h0", "h1"):
            one.end(batch)
    # The shared ones go to both groups in turn, whichever group has had them.
    assert sorted(keys(one.take_for_loop())) == ["g2", "h2", "own2"]


@pytest.mark.parametrize(("before", "after", "shared", "own"), [(None, 2, 4, 0), (5, None, 1, 1), (5, 3, 4, 0)])
def test_what_runs_counts_for_the_concurrency_of_today(queue, before, after, shared, own):
    one = queue(concurrency=4, g={**AS, "concurrency": before}, h=AS)
    one.put("g", *"abc")
    taken = one.take_for_loop()
    assert len(taken) == 3
    one.handlers["g"] = dataclasses.replace(one.handlers["g"], concurrency=after)
    one.inbox.configure(one.handlers["g"], enough=1, priority_share=0)
    assert (one.inbox.free_calls(one.ref("h")), one.inbox.free_calls(one.ref("g"))) == ([shared], [own])
    for batch in taken:
        one.end(batch)
    assert one.inbox.free_calls(one.ref("h")) == [4]
    assert one.inbox.free_calls(one.ref("g")) == [after or 4]


def test_a_batch_is_one_call(queue):
    one = queue(concurrency=2, g={**AS, "batch": True, "batch_size": 3})
    one.put("g", *"abcdefgh")
    taken = one.take_for_loop()
    assert [len(batch.items) for batch in taken] == [3, 3]
    one.end(taken[0])
    assert [len(batch.items) for batch in one.take_for_loop()] == [2]


def test_an_ordered_partition_has_one_call(queue):
    one = queue(concurrency=9, g=AO)
    one.put("g", "a", "a", "b", "a")
    first, other = one.take_for_loop()
    assert keys([first, other]) == ["a", "b"]
    assert one.take_for_loop() == []
    one.end(first)
    (second,) = one.take_for_loop()
    assert second.items[0].claimed.offset > first.items[0].claimed.offset
    assert keys([second]) == ["a"]


@pytest.mark.parametrize(("group", "kind"), [(AB, Action.NACK), (AB, Action.SNOOZE), (AO, Action.RELEASE)])
def test_what_is_behind_a_message_that_must_come_first_is_given_back(queue, group, kind):
    one = queue(concurrency=9, g=group)
    head, *behind = one.put("g", "a", "a", "a")
    (batch,) = one.take_for_loop()
    one.end(batch, kind)
    assert one.take_for_loop() == []
    assert one.outcomes("g") == [(head.claimed.offset, kind), *((b.claimed.offset, Action.RELEASE) for b in behind)]
    assert one.inbox.is_blocked(one.ref("g"), "a")
    one.inbox.unblock(one.ref("g"), "a")
    one.put("g", "a")
    assert len(one.take_for_loop()) == 1


def test_nothing_starts_after_the_end(queue):
    one = queue(concurrency=1, g=AO)
    one.put("g", "a", "b")
    (batch,) = one.take_for_loop()
    one.inbox.close()
    one.put("g", "c")
    one.end(batch)
    assert one.inbox.take_for_loop() == ([], None)
    assert [action for _, action in one.outcomes("g")] == [Action.RELEASE, Action.RELEASE, Action.ACK]


def test_messages_with_a_higher_priority_start_first(queue):
    one = queue(concurrency=1, g=AS)
    one.put("g", "low", "__p:+005:high", "low")
    started = []
    while taken := one.take_for_loop():
        started += keys(taken)
        one.end(taken[0])
    assert started == ["__p:+005:high", "low", "low"]


def test_without_a_loop_threads_call_coroutines(queue):
    """As ``deliver_all`` does."""
    one = queue(g=AO)
    (held,) = one.put("g", "a")
    assert not one.wakes
    assert one.take_for_loop() == []
    assert one.take()[1] is held


# -- when the loop is woken ---------------------------------------------------


def sleeping(one):
    """The loop has looked for something, and sleeps since."""
    taken = one.take_for_loop()
    one.wakes = 0
    return taken


def test_it_is_woken_once_for_all_that_comes(queue):
    one = queue(concurrency=1, g=AS, h=SHARED)
    sleeping(one)
    one.put("h", "a")
    assert not one.wakes, "woken for what is for a thread"
    one.put("g", "a", "b", "c")
    one.put("g", "d")
    assert one.wakes == 1


def test_it_is_woken_when_a_call_ends(queue):
    one = queue(concurrency=1, g=AS)
    one.put("g", "a", "b")
    (batch,) = sleeping(one)
    one.end(batch)
    assert one.wakes == 1


def test_it_is_woken_when_the_outcome_of_a_suspect_is_written(queue):
    """Of one that a thread has called, too: a process has one at a time."""
    one = queue(concurrency=5, g=AS, h=SHARED)
    one.put("h", "a", suspect=True)
    one.put("g", "a", "b", suspect=True)
    _, suspect = one.take()
    assert sleeping(one) == []
    one.finish(suspect)
    assert one.take_for_loop() == []
    one.wakes = 0
    one.inbox.written(one.inbox.take_settlements(one.ref("h")))
    assert one.wakes == 1
    (batch,) = sleeping(one)
    one.inbox.written([Settlement(batch.items[0].claimed, Action.ACK)])
    assert one.wakes == 1
    assert len(one.take_for_loop()) == 1


def test_it_is_woken_when_deliveries_are_held_for_longer(queue):
    one = queue(concurrency=5, g=AS)
    one.inbox.keep(one.ref("g"), one.now)
    one.put("g", "a")
    assert sleeping(one) == []
    one.inbox.keep(one.ref("g"), one.now + 10)
    assert one.wakes == 1
    assert len(one.take_for_loop()) == 1


def test_it_looks_again_by_itself_at_what_nothing_tells_it_of(queue):
    one = queue(concurrency=5, g=AO)
    one.leases_good = False
    one.put("g", "a")
    assert one.inbox.take_for_loop() == ([], 0.5)
    one.leases_good = True
    assert len(one.take_for_loop()) == 1
    assert one.inbox.take_for_loop() == ([], None), "it looks although nothing waits"


def test_it_looks_again_when_a_slot_begins(queue):
    one = queue(concurrency=5, g=AS)
    one.inbox.put([one.held("g", slot=Slot("", one.now + 0.125, one.now + 0.25))])
    assert one.inbox.take_for_loop() == ([], 0.125)
    one.now += 0.125
    assert len(one.take_for_loop()) == 1


def test_the_last_place_is_kept_for_a_delivery_with_a_slot(queue, monkeypatch):
    """For a short time, in which the poller claims; other places are not."""
    one = queue(concurrency=3, g=AS, h=AS)
    monkeypatch.setattr(starts, "time", SimpleNamespace(monotonic=lambda: one.now))
    assert one.inbox.keep_thread(one.ref("h"))
    one.put("g", *"abcde")
    batches, again = one.inbox.take_for_loop()
    assert len(batches) == 2
    assert again == pytest.approx(starts.KEPT)
    one.wakes = 0
    one.inbox.put([one.held("h", slot=Slot("", one.now, one.now + 1))])
    assert one.wakes == 1
    assert [batch.items[0].claimed.ref.group for batch in one.take_for_loop()] == ["h"]
    assert one.inbox.keep_thread(one.ref("h"))
    one.end(batches[0])
    assert one.take_for_loop() == []
    one.now += starts.KEPT
    assert len(one.take_for_loop()) == 1, "it was kept for too long"


def test_a_place_that_is_no_longer_kept_is_free_at_once(queue):
    one = queue(concurrency=1, g=AS, h=AS)
    assert one.inbox.keep_thread(one.ref("h"))
    one.put("g", "a")
    assert sleeping(one) == []
    one.inbox.free_thread(one.ref("h"))
    assert one.wakes == 1
    assert len(one.take_for_loop()) == 1

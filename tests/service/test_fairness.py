"""Partitions with few messages do not wait for one with many."""

from __future__ import annotations

import pytest

from django_mysqlqueue import Message, publish, publish_many
from tests.support.harness import Sub, handler

pytestmark = pytest.mark.promise("Fairness")

MODES = pytest.mark.parametrize("mode", ["ordered", "shared"])


@MODES
def test_a_partition_with_many_messages_does_not_hold_up_others(db, mode):
    """Though its messages fill the inbox, and their handlers end one by one."""
    got = []
    one = handler(mode=mode, function=lambda delivery: got.append(delivery.key))
    sub = Sub(one, claim_size=10, prefetch=20)
    publish_many("t", [Message(n, key="noise") for n in range(100)])
    sub.step(times=3)
    assert sub.inbox.waiting(one.ref)[0] == 20
    publish_many("t", [Message(n, key=f"k{n}") for n in range(3)])
    running = sub.take()
    sub.step(times=3)
    assert sub.inbox.waiting(one.ref)[0] == 22, "19, and one of each of the others"
    sub.work(limit=4)
    assert {"k0", "k1", "k2"} <= set(got)
    sub.run(running)
    sub.settle(rounds=200)
    assert len(got) == 103


@MODES
def test_no_more_partitions_than_half_a_claim_are_claimed_without_room(db, mode):
    one = handler(mode=mode)
    sub = Sub(one, claim_size=10, prefetch=20)
    publish_many("t", [Message(n, key="noise") for n in range(100)])
    sub.step(times=3)
    publish_many("t", [Message(n, key=f"k{n % 20}") for n in range(100)])
    sub.step(times=10)
    assert sub.inbox.waiting(one.ref)[0] == 24
    publish("t", "high", key="k0", priority=1)
    sub.step(times=3)
    assert sub.take().claimed.key == "__p:+001:k0"

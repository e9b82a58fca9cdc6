"""Busy partitions and groups beside others."""

from __future__ import annotations

import pytest

from django_mysqlqueue import Message, publish_many
from tests.support.handlers import Recorder
from tests.support.harness import Sub, handler


@pytest.mark.parametrize("mode", ["ordered", "shared"])
def test_no_partition_is_starved_at_batch_size_one(db, mode):
    got = Recorder()
    sub = Sub(handler(mode=mode, function=got), claim_size=1)
    publish_many("t", [Message("hot", key="a") for _ in range(30)] + [Message("cold", key=f"b{n}") for n in range(3)])
    for _ in range(12):
        sub.step(tick=False)
        sub.work()
        sub.flush()
    assert got.payloads.count("cold") == 3


@pytest.mark.parametrize("mode", ["ordered", "shared"])
@pytest.mark.parametrize("hot", [1, 5])
def test_busy_partitions_get_what_trickling_ones_leave(db, mode, hot):
    """One message in each of some partitions made claims shallow: a backlog beside them stayed, with idle handlers."""
    done = []
    sub = Sub(handler(function=lambda delivery: done.append(delivery.key), mode=mode), claim_size=50, threads=3)
    publish_many("t", [Message(n, key=f"hot{n % hot}") for n in range(1000)])
    for turn in range(30):
        publish_many("t", [Message(n, key=f"cold{turn % 2}.{n}") for n in range(15)])
        sub.poller.poll_soon()
        sub.poller.step()
        sub.work()
        sub.flush()
    assert sum(key.startswith("hot") for key in done) > 250

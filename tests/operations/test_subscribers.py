"""Releasing leases, removing lost subscribers."""

from __future__ import annotations

import pytest

from django_mysqlqueue.exceptions import OperationRefused
from tests.support.handlers import Recorder
from tests.support.harness import USING, Sub, handler
from tests.support.internals import heartbeats, leasing
from tests.support.scenarios import G, log

ME = "ada"


def test_a_lease_that_is_released_goes_to_another(db):
    log(2, "a")
    sub = Sub(handler(), claim_size=1, prefetch=1)
    sub.step()
    assert leasing.revoke(USING, G, ["a", "nothing"], actor=ME) == 1
    got = Recorder()
    second = Sub(handler(function=got))
    second.step()
    assert second.owned() == {"a"}
    sub.step()
    assert sub.owned() == set()
    second.settle()
    assert got.payloads == [0, 1]


def test_a_dead_subscriber_is_forgotten_and_a_live_one_is_not(db, clock):
    log(1)
    dead = Sub(handler())
    dead.step()
    lease_ms = 30_000
    with pytest.raises(OperationRefused, match="is alive"):
        heartbeats.remove(USING, dead.name, actor=ME, lease_ms=lease_ms)
    clock.advance(31)
    assert heartbeats.remove(USING, dead.name, actor=ME, lease_ms=lease_ms) == 1
    assert heartbeats.remove(USING, dead.name, actor=ME, lease_ms=lease_ms) == 0
    got = Recorder()
    Sub(handler(function=got)).settle()
    assert got.payloads == [0]

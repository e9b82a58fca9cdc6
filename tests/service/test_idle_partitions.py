"""A partition without messages leaves no rows behind."""

from __future__ import annotations

import pytest

from django_mysqlqueue import publish
from django_mysqlqueue.models import ConsumerOffset, DeliveryState, PartitionLease
from tests.support import garbage
from tests.support.handlers import Recorder
from tests.support.harness import USING, Sub, handler


@pytest.mark.promise("Retention")
def test_drained_partition_leaves_nothing_behind_and_comes_back(db, settings):
    """Lease and offsets rows go with the last message, also under a subscriber that still holds it."""
    settings.MYSQLQUEUE = {"RETENTION": 0}
    got = Recorder()
    sub = Sub(handler(function=got), lease_renewal_interval=0.0)
    for number in range(3):
        publish("t", number, key="k")
        sub.settle()
        assert got.payloads == list(range(number + 1))
        assert not DeliveryState.objects.exists()
        collected = garbage.collect(USING)
        assert collected.messages == 1
        assert not ConsumerOffset.objects.exists()
    sub.step(times=2)
    assert not PartitionLease.objects.exists()


def test_offsets_row_removed_under_a_lease_is_made_again(db, settings):
    settings.MYSQLQUEUE = {"RETENTION": 0}
    got = Recorder()
    sub = Sub(handler(function=got))
    publish("t", 1, key="k")
    sub.settle()
    garbage.collect(USING)
    assert sub.owned() == {"k"}
    publish("t", 2, key="k")
    sub.settle()
    assert got.payloads == [1, 2]

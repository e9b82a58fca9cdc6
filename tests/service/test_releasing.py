"""Everything that a subscriber holds is released at once, and nothing of anybody else."""

from __future__ import annotations

import re

import pytest
from django.db import connection, transaction
from django.test.utils import CaptureQueriesContext

from django_mysqlqueue import Message, publish_many
from django_mysqlqueue.models import DeliveryState, PartitionLease, QueueMessage, SubscriberHeartbeat
from tests.support.harness import USING, Sub, handler, in_thread, lag, payloads, sequence
from tests.support.internals import (
    Action,
    GroupRef,
    Released,
    Settlement,
    groups,
    heartbeats,
    leasing,
    releasing,
    settling,
)

REF = GroupRef("g", "t")
LEASE_MS = 30_000


def release(sub, **options):
    shared = [ref for ref, one in sub.handlers.items() if one.shared]
    return releasing.release_all(USING, sub.name, sub.handlers, shared=shared, **options)


def lost_with(count, *, mode, keys=2, **options):
    """A subscriber that is gone with messages of which it had started some: each partition's, or all."""
    publish_many("t", (Message(n, key=f"k{n % keys}") for n in range(count)))
    sub = Sub(handler(mode=mode, **options), name="lost").step()
    while sub.take() is not None:
        pass
    return sub


@pytest.mark.promise("Killed processes")
@pytest.mark.parametrize("mode", ["ordered", "shared"])
def test_another_subscriber_gets_everything_at_once_and_uncounted(db, mode):
    """No clock moves: neither the lease nor the visibility timeout of the lost one is over."""
    lost = lost_with(6, mode=mode)
    seen = []
    heir = Sub(handler(mode=mode, function=seen.append), name="heir")
    assert heir.step().work() == 0
    assert release(lost) == (Released(2, 0) if mode == "ordered" else Released(0, 6))
    assert set(DeliveryState.objects.values_list("delivered_by", "retry_count")) == {(lost.name, 0)}
    heir.settle()
    assert sorted(payloads(seen)) == list(range(6))
    assert {delivery.attempt for delivery in seen} == {1}
    assert lag() == 0


@pytest.mark.promise("Poison messages")
@pytest.mark.parametrize("mode", ["ordered", "shared"])
def test_the_first_loss_is_free_and_the_next_ones_are_counted(db, mode):
    publish_many("t", [Message(0, key="k")])
    starts = 0
    for number in range(10):
        sub = Sub(handler(mode=mode, max_attempts=3), name=f"lost{number}").step()
        held = sub.take()
        if held is None:
            break
        if held.claimed.suspect:
            assert settling.record_start(USING, held.claimed)
        starts += 1
        release(sub)
    assert starts == 4
    assert lag() == 0
    sequence()
    assert QueueMessage.objects.get(topic="t_dlq").failure_count == 3


def test_what_others_hold_and_what_waits_stays(db):
    one = handler(mode="shared")
    publish_many("t", (Message(n, key="k") for n in range(6)))
    lost, other = Sub(one, name="lost", claim_size=2), Sub(one, name="other", claim_size=2)
    for sub in (lost, other):
        sub.step()
        while sub.take() is not None:
            pass
    failed = other.inbox.held(REF)[0]
    settling.flush(USING, REF, [Settlement(failed, Action.NACK, 600_000, "no")], max_attempts=5, shared=True)
    before = set(DeliveryState.objects.exclude(delivered_by=lost.name).values_list())
    held = len(lost.inbox.held(REF))
    assert held < 6
    assert before
    assert release(lost) == Released(0, held)
    assert set(DeliveryState.objects.exclude(delivered_by=lost.name).values_list()) == before
    assert set(DeliveryState.objects.filter(delivered_by=lost.name).values_list("invisible_until")) == {(0,)}
    assert heartbeats.live(heartbeats.Session(USING), [REF], LEASE_MS)[REF].keys() == {other.name}


def test_leases_of_others_stay(db):
    groups.register(USING, REF, mode="ordered", start="earliest")
    for who, keys in (("lost", "ab"), ("other", "cd")):
        heartbeats.beat(USING, who, [REF], {})
        assert leasing.acquire(USING, REF, who, keys, lease_ms=LEASE_MS).held == set(keys)
    assert releasing.release_all(USING, "lost", [REF], shared=[]) == Released(2, 0)
    assert dict(PartitionLease.objects.values_list("partition_key", "leased_by")) == {
        "a": "",
        "b": "",
        "c": "other",
        "d": "other",
    }
    # It may be said twice: by the process itself, and by the one that replaces it.
    assert releasing.release_all(USING, "lost", [REF], shared=[]) == Released(0, 0)


def test_a_late_ack_counts_until_another_has_claimed(db):
    """The handler may still run for the moment until its process is gone."""
    lost = lost_with(2, mode="shared")
    first, second = sorted(lost.inbox.held(REF), key=lambda claimed: claimed.offset)
    release(lost)
    assert not settling.settle_here(USING, [first], [])
    heir = Sub(handler(mode="shared"), name="heir").step()
    with pytest.raises(settling.NotAcked):
        settling.settle_here(USING, [second], [])
    assert heir.settle() == 1
    assert lag() == 0


@pytest.mark.promise("Killed processes")
def test_a_bounded_number_of_rows_is_searched(db):
    lost = lost_with(3, mode="shared")
    assert release(lost, searched=2) == Released(0, 2)
    assert DeliveryState.objects.filter(invisible_until=0).count() == 2


@pytest.mark.servers_only
@pytest.mark.parametrize("mode", ["ordered", "shared"])
def test_rows_that_are_locked_are_not_waited_for(db, mode):
    """A session of the lost process may live on for a moment. Its leases are stale all the same."""
    lost = lost_with(4, mode=mode)

    def impatiently():
        with connection.cursor() as cursor:
            cursor.execute("SET SESSION innodb_lock_wait_timeout = 1")
        return release(lost)

    model, where = (PartitionLease, {"partition_key": "k0"}) if mode == "ordered" else (DeliveryState, {})
    with transaction.atomic():
        locked = list(model.objects.select_for_update().filter(**where).order_by("pk")[:1])
        assert len(locked) == 1
        assert in_thread(impatiently) == (Released(1, 0) if mode == "ordered" else Released(0, 3))
    heir = Sub(handler(mode=mode), name="heir")
    heir.settle()
    if mode == "ordered":
        assert lag() == 0
    else:
        # Until its visibility timeout is over.
        assert DeliveryState.objects.get(acked=False).delivered_by == lost.name


@pytest.mark.servers_only
@pytest.mark.parametrize("mode", ["ordered", "shared"])
def test_it_locks_in_the_one_order(db, mode):
    lost = lost_with(4, mode=mode)
    with CaptureQueriesContext(connection) as captured:
        release(lost)
    waits = [q["sql"] for q in captured if re.search("FOR UPDATE(?! SKIP)|SHARE MODE", q["sql"])]
    assert not waits
    changed = [re.search(r"JOIN (queue_\w+) s", q["sql"])[1] for q in captured if q["sql"].startswith("UPDATE")]
    assert changed == [
        "queue_subscriber_heartbeats",
        "queue_partition_leases" if mode == "ordered" else "queue_delivery_state",
    ]


def test_a_subscriber_that_never_worked_holds_nothing(db):
    groups.register(USING, REF, mode="ordered", start="earliest")
    assert releasing.release_all(USING, "nobody", [REF], shared=[REF]) == Released(0, 0)
    assert not SubscriberHeartbeat.objects.exists()

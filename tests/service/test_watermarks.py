"""Watermarks pass what is settled, in bounded steps."""

from __future__ import annotations

import pytest
from django.db import connection

from django_mysqlqueue import Message, publish, publish_many
from django_mysqlqueue.models import ConsumerOffset, DeliveryState, OutboxMessage, QueueMessage
from tests.support.claims import claimant_of
from tests.support.handlers import Recorder
from tests.support.harness import USING, Sub, handler, lag, sequence
from tests.support.internals import (
    Action,
    GroupRef,
    PollingLimits,
    Settlement,
    Want,
    claiming,
    groups,
    settling,
    watermarks,
)

REF = GroupRef("g", "t")


@pytest.mark.promise("Retention")
@pytest.mark.parametrize("mode", ["ordered", "shared"])
def test_settled_rows_of_a_vanished_subscriber_do_not_leak(db, clock, mode):
    """An atomic handler's ack committed and the process died before the watermark moved."""
    publish_many("t", (Message(number, key=f"k{number}") for number in range(3)))
    sub = Sub(handler(mode=mode, atomic=True))
    sub.step()
    sub.work()  # committed by the handlers' own transactions; never flushed
    assert DeliveryState.objects.filter(acked=True).count() == 3
    clock.advance(61)
    got = Recorder()
    other = Sub(handler(mode=mode, function=got))
    other.settle()
    keeping = other.poller.maintenance
    for _ in range(50):
        keeping.next_at = 0.0
        keeping.turn()
    other.settle()
    assert got.payloads == []
    assert not DeliveryState.objects.exists()
    assert lag() == 0


def test_watermark_passes_a_long_run_of_settled_rows_in_bounded_steps(db):
    """A stuck head is acked at last with 1,000 settled rows behind it."""
    publish_many("t", (Message(number, key="k") for number in range(1001)))
    sub = Sub(handler(mode="shared"), claim_size=500, prefetch=1500)
    sub.step(times=4)
    head = sub.take()
    sub.settle(rounds=20)
    assert DeliveryState.objects.filter(acked=True).count() == 1000
    sub.run(head)
    sub.poller.shared[0].turn()
    assert 0 < DeliveryState.objects.count() < 1000
    sub.settle(rounds=20)
    assert not DeliveryState.objects.exists()


@pytest.mark.promise("Health")
def test_lag_is_a_count_of_messages(db):
    publish_many("other", range(50))
    publish_many("t", (Message(number, key="k") for number in range(5)))
    publish_many("other", range(50))
    sub = Sub(handler(), claim_size=2, prefetch=2)
    sub.step()
    sub.work(2)
    sub.flush()
    assert lag() == 3


def test_watermarks_of_many_partitions_with_more_rows_than_one_join_reads(db):
    """A partition whose rows a LIMIT has cut off must not look settled."""
    keys = [f"k{number:02}" for number in range(watermarks.FEW_PARTITIONS + 1)]
    each = 1000 // len(keys) + 60
    groups.register(USING, REF, mode="shared", start="earliest")
    publish_many("t", [Message(number, key=key) for number in range(each) for key in keys])
    sequence()
    watermarks.create_missing(USING, REF, keys)
    claimant = claimant_of(REF, "s", 5, 60_000)
    wants = [Want(key, look_at=each) for key in keys]
    claim = claiming.claim(USING, claiming.ClaimRequest(claimant, wants, token=claiming.new_token()))
    assert len(claim.deliveries) == len(keys) * each
    firsts = {one.key: one for one in reversed(claim.deliveries)}
    settling.flush(USING, REF, [Settlement(one, Action.ACK) for one in firsts.values()], max_attempts=5, shared=True)
    for key, first in firsts.items():
        assert ConsumerOffset.objects.get(partition_key=key).offset_acked < first.offset + len(keys), key
    assert DeliveryState.objects.filter(acked=False).count() == len(keys) * (each - 1)


@pytest.mark.parametrize("mode", ["ordered", "shared"])
def test_a_last_message_for_another_group_does_not_hold_the_watermark(db, settings, mode):
    """The cursor passed it, the watermark never did (no state row, no lease, nobody flushes): GC kept it for ever."""
    settings.MYSQLQUEUE = {"RETENTION": 0}
    sub = Sub(handler(mode=mode), lease_renewal_interval=0.0)
    publish("t", "mine", key="k")
    sub.settle()
    with connection.cursor() as cursor:
        cursor.execute(
            "INSERT INTO queue_outbox (topic, partition_key, id, payload, target_group) "
            "VALUES ('t', 'k', 'x', '1', 'another')"
        )
    sub.settle()
    for _ in range(300):  # whole rounds of the housekeeping, with GC
        sub.poller.maintenance.next_at = 0.0
        sub.poller.step()
    assert not OutboxMessage.objects.exists()
    assert not [row for row in ConsumerOffset.objects.all() if row.offset_acked != row.offset_claimed]
    assert not QueueMessage.objects.exists()


@pytest.mark.parametrize("mode", ["ordered", "shared"])
def test_a_watermark_left_behind_the_cursor_is_found(db, mode):
    """A process that ended between the claim that passed another group's message and the flush behind it."""
    sub = Sub(handler(mode=mode))
    publish("t", "mine", key="k")
    sub.settle()
    sub.leave()
    ConsumerOffset.objects.update(offset_claimed=ConsumerOffset.objects.get().offset_claimed + 5)
    other = Sub(handler(mode=mode))
    for _ in range(50):
        other.poller.maintenance.next_at = 0.0
        other.poller.step()
    row = ConsumerOffset.objects.get()
    assert row.offset_acked == row.offset_claimed


def test_a_flush_moves_a_bounded_number_of_watermarks(db, monkeypatch):
    """After doubt about its leases a process had all its partitions to flush, in one transaction."""
    flushed = []
    real = settling.flush

    def flush(*args, **options):
        flushed.append(len(options["also"]))
        return real(*args, **options)

    monkeypatch.setattr(settling, "flush", flush)
    publish_many("t", (Message(n, key=f"k{n}") for n in range(30)))
    sub = Sub(handler(), limits=PollingLimits(flushed=7))
    sub.settle()
    flushed.clear()
    sub.poller.reset()
    sub.settle()
    assert max(flushed) == 7


@pytest.mark.promise("Consumers in plain SQL")
def test_a_group_continues_behind_rows_above_its_position(db):
    """A call of a procedure was killed, and its client has committed half of it."""
    got = Recorder()
    sub = Sub(handler(mode="shared", function=got))
    publish_many("t", [Message(n, key="k") for n in range(5)])
    sequence()
    first, second, *_ = QueueMessage.objects.order_by("offset")
    watermarks.create_missing(USING, REF, {"k"})
    for one in (first, second):
        DeliveryState.objects.create(
            consumer_group="g",
            topic="t",
            partition_key="k",
            message_offset=one.offset,
            delivery_token=7,
            delivered_by="sql:1",
            invisible_until=2**62,
        )
    for _ in range(3):
        sub.poller.groups[0].health.rests_until = 0.0
        sub.settle()
    assert got.payloads == [2, 3, 4]
    assert ConsumerOffset.objects.get().offset_claimed == QueueMessage.objects.latest("offset").offset
    assert DeliveryState.objects.filter(delivery_token=7).count() == 2

"""Bounds: what must not grow, hide or hold something up for ever, each as it was once seen to."""

from __future__ import annotations

import pytest
from django.db import connection, transaction

from django_mysqlqueue import Message, publish, publish_many
from django_mysqlqueue.conf import Backoff
from django_mysqlqueue.exceptions import StaleDelivery
from django_mysqlqueue.models import ConsumerOffset, DeliveryState, OutboxMessage, PartitionLease, QueueMessage
from django_mysqlqueue.runtime.polling.context import Limits
from django_mysqlqueue.runtime.polling.ordered import MAX_PENDING, TAKE_OVER, OrderedGroup
from django_mysqlqueue.service import leasing, retention, settling, watermarks
from django_mysqlqueue.service.deliveries import Action, Settlement
from django_mysqlqueue.service.refs import GroupRef
from tests.support.harness import USING, Sub, handler, in_thread, lag


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


@pytest.mark.servers_only
def test_a_locked_row_that_is_due_does_not_hide_the_others(db):
    """Shared: the look for what is due reads without SKIP LOCKED; rows that are locked used up its LIMIT."""
    sub = Sub(handler(mode="shared"), batch_size=1, prefetch=1, name="b")
    publish_many("t", [Message(n, key="k") for n in range(3)])
    Sub(handler(mode="shared"), name="a").step()  # takes all, and vanishes
    DeliveryState.objects.update(invisible_until=1)
    first = DeliveryState.objects.order_by("message_offset").values_list("pk", flat=True)[0]
    DeliveryState.objects.filter(pk=first).update(invisible_until=0)

    def others() -> int:
        done = 0
        for _ in range(10):
            sub.step()
            done += sub.work()
        return done

    with transaction.atomic():  # an atomic handler that has acked early and goes on for long
        DeliveryState.objects.select_for_update().get(pk=first)
        assert in_thread(others) == 2


@pytest.mark.servers_only
def test_extend_sees_through_an_old_snapshot(db):
    """In a handler's own REPEATABLE READ transaction it said "still yours" of what had been handed out again."""
    said = []

    def act(delivery):
        with connection.cursor() as cursor:
            cursor.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        with transaction.atomic():
            DeliveryState.objects.count()  # the snapshot
            in_thread(lambda: DeliveryState.objects.update(delivery_token=777))  # handed out again
            try:
                delivery.extend(60)
            except StaleDelivery:
                said.append("stale")

    sub = Sub(handler(function=act))
    publish("t", 1, key="k")
    sub.step().work()
    assert said == ["stale"]


def test_a_step_of_gc_forgets_a_bounded_number_of_offsets_rows(db, settings):
    """All rows of all groups went in one step, that is in one turn of the poller: 2.1 s for 100,000."""
    settings.MYSQLQUEUE = {"RETENTION": 0}
    publish_many("t", (Message(n, key=f"k{n}") for n in range(100)))
    Sub(handler(), lease_renewal_interval=0.0).settle()
    place = retention.Checkpoint()
    while place is not None:
        done = retention.collect_step(USING, place, limits=retention.Limits(rows=10))
        assert done.offsets_rows <= 10
        place = done.place


def test_a_take_over_of_many_partitions_is_bounded(db, monkeypatch, clock):
    """One transaction took every partition that waited: 50,000 in 5 s, with no sign of progress to the heart."""
    taken = []
    acquire = leasing.acquire
    monkeypatch.setattr(leasing, "acquire", lambda *args, **kw: (taken.append(len(args[3])), acquire(*args, **kw))[1])
    publish_many("t", (Message(n, key=f"k{n}") for n in range(3000)))
    Sub(handler(), name="a", prefetch=1, batch_size=1).step(times=12)
    clock.advance(60)  # a has vanished
    taken.clear()
    second = Sub(handler(), name="b")
    second.step(times=4)
    assert max(taken) == TAKE_OVER
    assert len(second.owned()) == 3000


def test_what_waits_out_a_backoff_takes_no_memory_without_bound(db):
    """An outage of what handlers need brought the whole backlog of a partition into memory."""

    def fail(delivery):
        raise ValueError("what it needs is away")

    sub = Sub(handler(function=fail, backoff=Backoff(initial=600, jitter=0)), batch_size=100)
    publish_many("t", [Message(n, key="k") for n in range(3000)])
    for _ in range(20):
        sub.settle(rounds=5)
    work = sub.poller.groups[0]
    assert isinstance(work, OrderedGroup)
    assert MAX_PENDING <= len(work.partitions["k"].pending) < MAX_PENDING + 100


@pytest.mark.servers_only
def test_small_messages_fit_into_the_smallest_packet(db, monkeypatch):
    """At max_allowed_packet=1M a chunk of 500 tiny rows was refused: each counted 2,000 bytes, twice."""
    from django_mysqlqueue.sql.mysql import MySQL

    monkeypatch.setattr(MySQL, "max_statement_bytes", lambda self, connection: 1_048_576)
    assert publish_many("t", [Message(n, key="k") for n in range(500)]) == 500


@pytest.mark.servers_only
def test_metadata_of_many_bytes_to_a_character_fit_too(db, monkeypatch):
    from django_mysqlqueue.sql.mysql import MySQL

    monkeypatch.setattr(MySQL, "max_statement_bytes", lambda self, connection: 4 * 1_048_576)
    messages = [Message(n, key="k", metadata={"mood": "😀" * 10_000}) for n in range(100)]
    assert publish_many("t", messages) == 100


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
    sub = Sub(handler(), limits=Limits(flushed=7))
    sub.settle()
    flushed.clear()
    sub.poller.reset()
    sub.settle()
    assert max(flushed) == 7


@pytest.mark.servers_only
def test_a_row_that_changes_hands_under_a_flush_is_not_deleted(db, monkeypatch):
    """Between the look at a partition's head and the delete another process took the delivery again."""
    publish("t", 1, key="k")
    sub = Sub(handler(mode="shared"))
    sub.step()
    held = sub.take()
    real, done = watermarks._heads, []

    def look(*args):
        found = real(*args)
        if not done:
            done.append(in_thread(lambda: DeliveryState.objects.update(delivery_token=5)))
        return found

    monkeypatch.setattr(watermarks, "_heads", look)
    flushed = settling.flush(
        USING, GroupRef("g", "t"), [Settlement(held.claimed, Action.ACK)], max_attempts=5, shared=True
    )
    assert done == [1]
    assert [outcome.delivery for outcome in flushed.stale] == [held.claimed]
    assert DeliveryState.objects.get().acked is False
    assert lag() == 1


@pytest.mark.parametrize("mode", ["ordered", "shared"])
def test_outcomes_written_twice_are_not_called_stale(db, mode):
    """The answer to a COMMIT was lost: the same outcomes come again with the next flush."""
    publish_many("t", (Message(n, key="k") for n in range(3)))
    sub = Sub(handler(mode=mode))
    sub.step()
    claimed = [sub.take().claimed for _ in range(3)] if mode == "shared" else sub.inbox.held(GroupRef("g", "t"))
    first, second, third = sorted(claimed, key=lambda one: one.offset)
    outcomes = [
        Settlement(first, Action.ACK),
        Settlement(third, Action.ACK),
    ]  # one that the watermark passes, one ahead of it
    for _ in range(2):
        flushed = settling.flush(USING, first.ref, outcomes, max_attempts=5, shared=mode == "shared")
        assert flushed.stale == []
    assert lag() == 1
    assert DeliveryState.objects.filter(acked=False).get().message_offset == second.offset


@pytest.mark.parametrize("mode", ["ordered", "shared"])
@pytest.mark.parametrize("hot", [1, 5])
def test_busy_partitions_get_what_trickling_ones_leave(db, mode, hot):
    """One message in each of some partitions made claims shallow: a backlog beside them stayed, with idle handlers."""
    done = []
    sub = Sub(handler(function=lambda delivery: done.append(delivery.key), mode=mode), batch_size=50, threads=3)
    publish_many("t", [Message(n, key=f"hot{n % hot}") for n in range(1000)])
    for turn in range(30):
        publish_many("t", [Message(n, key=f"cold{turn % 2}.{n}") for n in range(15)])
        sub.poller.poll_soon()
        sub.poller.step()
        sub.work()
        sub.flush()
    assert sum(key.startswith("hot") for key in done) > 250


def test_leases_do_not_grow_with_the_keys_that_wait(db, monkeypatch):
    """A million keys became as many lease rows, which each tick read, and were sorted for each thousand taken."""
    monkeypatch.setattr("django_mysqlqueue.runtime.polling.ordered.AHEAD", 30)
    monkeypatch.setattr("django_mysqlqueue.runtime.polling.ordered.CHOICE", 20)
    monkeypatch.setattr("django_mysqlqueue.runtime.polling.ordered.TAKE_OVER", 10)
    publish_many("t", [Message(n, key=f"k{n}") for n in range(200)])
    sub = Sub(handler(), batch_size=10, prefetch=10, lease_renewal_interval=0.0)
    most = done = 0
    for _ in range(400):
        sub.step()
        most = max(most, PartitionLease.objects.count())
        assert len(sub.poller.ordered[0].todo) < 30 + 10
        done += sub.work()
        sub.flush()
    assert done == 200
    assert 10 <= most < 100
    assert not PartitionLease.objects.exists()
    assert lag() == 0


def test_what_nobody_takes_is_taken_by_who_has_its_hands_full(db, monkeypatch):
    """Else a partition starved whose subscriber had died, beside others that never came to an end."""
    monkeypatch.setattr("django_mysqlqueue.runtime.polling.ordered.AHEAD", 2)
    sub = Sub(handler(), batch_size=1, prefetch=1)
    publish_many("t", [Message(n, key="ab"[n % 2]) for n in range(40)])
    sub.step()
    publish("t", 1, key="c")
    sub.step(times=3)
    assert sub.owned() == {"a", "b"}
    (work,) = sub.poller.ordered
    work.waiting["c"] -= sub.settings.lease_duration + 1
    sub.step()
    assert sub.owned() == {"a", "b", "c"}
    assert lag() > 35

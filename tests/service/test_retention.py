"""GC: what it keeps, what it deletes, in bounded steps."""

from __future__ import annotations

import pytest
from django.db import connection, transaction

from django_mysqlqueue import Message, publish, publish_many
from django_mysqlqueue.models import ConsumerOffset, QueueMessage
from django_mysqlqueue.operations import dropping
from tests.support import garbage
from tests.support.handlers import Recorder
from tests.support.harness import USING, Sub, handler, in_thread, lag, problems_found, sequence
from tests.support.internals import Checkpoint, GroupRef, Session, groups, retention, watermarks

pytestmark = pytest.mark.promise("Retention")

REF = GroupRef("g", "t")


def test_younger_than_the_retention_is_kept(db, clock, settings):
    settings.MYSQLQUEUE = {"RETENTION": 60, "TOPICS": {"kept": {"RETENTION": None}, "short": {"RETENTION": 10}}}
    for topic in ("t", "kept", "short"):
        publish(topic, 1)
        Sub(handler(topic=topic)).settle()
    clock.advance(11)
    assert garbage.collect(USING).messages == 1
    clock.advance(50)
    assert garbage.collect(USING).messages == 1
    clock.advance(10**8)
    assert garbage.collect(USING).messages == 0
    assert QueueMessage.objects.get().topic == "kept"


@pytest.mark.promise("Retention")
def test_a_group_that_never_touched_a_partition_keeps_it(db, no_retention):
    """A group being deployed has no offsets row anywhere yet."""
    publish_many("t", (Message(number, key=f"k{number}") for number in range(3)))
    Sub(handler()).settle()
    groups.register(USING, GroupRef("new", "t"), mode="ordered", start="earliest")
    assert garbage.collect(USING).messages == 0
    got = Recorder()
    Sub(handler(group="new", function=got)).settle()
    assert sorted(got.payloads) == [0, 1, 2]
    assert garbage.collect(USING).messages == 3


def test_a_latest_group_does_not_hold_back_what_was_before_it(db, no_retention):
    publish("t", 1)
    Sub(handler()).settle()
    groups.register(USING, GroupRef("new", "t"), mode="ordered", start="latest")
    assert garbage.collect(USING).messages == 1


def test_unsettled_messages_are_kept_whatever_their_age(db, clock, no_retention):
    publish_many("t", (Message(number, key="k") for number in range(5)))
    sub = Sub(handler(function=lambda d: d.nack(delay=9e5) if d.payload == 2 else None))
    sub.settle()
    clock.advance(800_000)
    assert garbage.collect(USING).messages == 2
    assert lag() == 1


@pytest.mark.promise("Retention")
def test_a_busy_partition_is_collected_too(db, no_retention):
    """There is always something above the watermark."""
    sub = Sub(handler(function=lambda d: d.nack(delay=3600) if d.payload % 5 == 4 else None))
    kept = []
    for start in range(0, 50, 5):
        publish_many("t", (Message(number, key="k") for number in range(start, start + 5)))
        sub.settle()
        garbage.collect(USING)
        kept.append(QueueMessage.objects.count())
    assert kept[0] == 1
    # Behind the first stuck message nothing may go; what was before it went.
    assert QueueMessage.objects.order_by("offset").first().payload == b"4"


@pytest.mark.parametrize(
    "limits", [retention.StepLimits(1, 1), retention.StepLimits(7, 3), retention.StepLimits(500, 1)], ids=str
)
def test_gc_by_chunks_takes_everything_in_the_end(db, no_retention, limits):
    publish_many("t", (Message(number, key=f"k{number % 10}") for number in range(200)))
    publish_many("u", (Message(number, key=f"k{number % 10}") for number in range(50)))
    sub = Sub(handler(), handler(topic="u"))
    sub.settle()
    assert garbage.collect(USING, dry_run=True, limits=limits).messages == 250
    assert QueueMessage.objects.count() == 250
    collected = garbage.collect(USING, limits=limits)
    assert (collected.messages, collected.offsets_rows) == (250, 20)
    assert not QueueMessage.objects.exists()
    assert not ConsumerOffset.objects.exists()


def test_dead_letters_without_a_handler_are_kept(db, clock, settings):
    settings.MYSQLQUEUE = {"RETENTION": 0}
    publish("t", 1)
    Sub(handler(function=lambda d: d.reject("no"))).settle()
    sequence()
    clock.advance(10**8)
    garbage.collect(USING)
    assert QueueMessage.objects.get().topic == "t_dlq"
    settings.MYSQLQUEUE = {"RETENTION": 0, "DLQ_RETENTION": 3600}
    garbage.collect(USING)
    assert not QueueMessage.objects.exists()


@pytest.mark.promise("Health")
def test_an_abandoned_group_is_shown_and_can_be_dropped(db, no_retention):
    publish("t", 1)
    groups.register(USING, GroupRef("gone", "t"), mode="ordered", start="earliest")
    Sub(handler()).settle()
    assert garbage.collect(USING).messages == 0
    assert [(one.kind, one.ref) for one in problems_found()] == [("no_subscriber", ("gone", "t"))]
    dropping.drop(USING, GroupRef("gone", "t"), actor="test")
    assert garbage.collect(USING).messages == 1


@pytest.mark.promise("Retention")
@pytest.mark.servers_only
def test_an_offsets_row_that_is_in_use_is_not_removed(db, no_retention):
    publish("t", 1, key="k")
    Sub(handler()).settle()
    QueueMessage.objects.all().delete()
    with transaction.atomic():
        watermarks.lock(Session(USING), REF, ["k"])
        assert in_thread(lambda: garbage.collect(USING)).offsets_rows == 0
    assert garbage.collect(USING).offsets_rows == 1


@pytest.mark.promise("Interrupted operations")
@pytest.mark.servers_only
def test_two_at_a_time_count_each_message_once(db, settings):
    """Both had read them before either deleted them, and both reported them."""
    settings.MYSQLQUEUE = {"RETENTION": 0, "ORPHAN_RETENTION": 0}
    publish_many("t", (Message(number, key=f"k{number % 2}") for number in range(4)))
    sequence()  # nobody reads the topic: they are orphans
    others = []

    def meanwhile(execute, sql, params, many, context):
        if sql.startswith("DELETE") and not others:
            others.append(None)
            others.append(in_thread(lambda: garbage.collect(USING)))
        return execute(sql, params, many, context)

    with connection.execute_wrapper(meanwhile):
        mine = garbage.collect(USING)
    theirs = others[1]
    assert not QueueMessage.objects.exists()
    assert (theirs.messages, mine.messages) == (4, 0)
    assert ([one.messages for one in theirs.orphans], mine.orphans) == ([4], ())


def test_subscribers_collect_by_themselves(db, no_retention):
    publish("t", 1, key="k")
    sub = Sub(handler())
    sub.settle()
    keeping = sub.poller.maintenance
    for _ in range(50):
        keeping.next_at = 0.0
        keeping.turn()
    assert not QueueMessage.objects.exists()
    assert not ConsumerOffset.objects.exists()


def test_a_step_of_gc_is_bounded(db, settings):
    settings.MYSQLQUEUE = {"RETENTION": 0}
    publish_many("t", (Message(number, key=f"k{number % 3}") for number in range(1000)))
    Sub(handler(), claim_size=500, prefetch=1000).settle()
    place, steps = Checkpoint(), 0
    while place is not None:
        done = retention.collect_step(USING, place, limits=retention.StepLimits(rows=100))
        assert done.messages <= 100
        place, steps = done.place, steps + 1
    assert steps >= 10
    assert not QueueMessage.objects.exists()


def test_a_step_of_gc_forgets_a_bounded_number_of_offsets_rows(db, settings):
    """All rows of all groups went in one step, that is in one turn of the poller: 2.1 s for 100,000."""
    settings.MYSQLQUEUE = {"RETENTION": 0}
    publish_many("t", (Message(n, key=f"k{n}") for n in range(100)))
    Sub(handler(), lease_renewal_interval=0.0).settle()
    place = retention.Checkpoint()
    while place is not None:
        done = retention.collect_step(USING, place, limits=retention.StepLimits(rows=10))
        assert done.offsets_rows <= 10
        place = done.place

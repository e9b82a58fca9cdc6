"""Messages with a higher priority are handled first, and lower ones keep a share."""

from __future__ import annotations

import datetime
import json

import pytest

from django_mysqlqueue import InvalidMessage, Message, publish, publish_many, testing
from django_mysqlqueue.inspection import scheduled
from django_mysqlqueue.inspection.outbox import read_topics
from django_mysqlqueue.models import ConsumerOffset, DeliveryState, OutboxMessage, QueueMessage
from django_mysqlqueue.options.backoff import Backoff
from tests.support import garbage
from tests.support.harness import USING, Sub, handler, sequence
from tests.support.internals import KEY_LENGTH, Count, Session, Subset, lane, sequencing

pytestmark = pytest.mark.promise("Priority")

LONG_AGO = datetime.datetime(2001, 1, 1, tzinfo=datetime.UTC)
MODES = pytest.mark.parametrize("mode", ["ordered", "shared"])


def payload_of(row):
    return json.loads(bytes(row.payload))


def listener(got, **options):
    return handler(function=lambda delivery: got.append(delivery.payload), **options)


# -- publishing ---------------------------------------------------------------


def test_a_message_is_in_the_lane_of_its_key_and_priority(db):
    got = []
    publish("t", 1, key="a", priority=10, metadata={"m": 1})
    publish("t", 2, key="a")
    content = {"content_type": "application/json"}
    rows = OutboxMessage.objects.order_by("pk").values_list("partition_key", "priority", "deliver_at", "metadata")
    assert list(rows) == [("__p:+010:a", 10, 0, {"m": 1, **content}), ("a", 0, 0, content)]
    sub = Sub(handler(function=lambda one: got.append((one.payload, one.key, one.priority, dict(one.metadata)))))
    sub.settle()
    assert got == [(1, "a", 10, {"m": 1, **content}), (2, "a", 0, content)]


def test_keys_are_hashed_as_without_a_priority(db, settings):
    settings.MYSQLQUEUE = {"TOPICS": {"t": {"PARTITIONS": 4}}}
    got = []
    for priority in (0, 7):
        publish("t", priority, key="a", priority=priority)
        publish("t", priority, id="x", priority=priority)
    low, high = (
        list(OutboxMessage.objects.filter(priority=priority).order_by("pk").values_list("partition_key", flat=True))
        for priority in (0, 7)
    )
    assert high == [f"__p:+007:{one}" for one in low]
    assert all(one.startswith("__p:") for one in low)
    Sub(handler(function=lambda one: got.append((one.priority, one.key)))).settle()
    assert sorted(got, key=str) == [(0, "a"), (0, None), (7, "a"), (7, None)]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"priority": 101}, "priority 101: must be an integer from -100 to 100, higher first"),
        ({"priority": True}, "priority True: must be an integer"),
        ({"priority": 1, "key": "k" * KEY_LENGTH}, "190 characters, but with a priority at most 181 are allowed"),
    ],
)
def test_what_is_refused(db, arguments, text):
    with pytest.raises(InvalidMessage, match=text):
        publish("t", 1, **arguments)
    with pytest.raises(InvalidMessage, match=text):
        publish_many("t", [Message(0), Message(1, **arguments)])
    assert not OutboxMessage.objects.exists()


def test_a_priority_may_be_combined_with_a_delay(db):
    got = []
    publish("t", "later", key="a", priority=10, delay=1000)
    publish("t", "now", key="a")
    sub = Sub(listener(got))
    sub.settle()
    assert got == ["now"]
    assert OutboxMessage.objects.get().deliver_at > 0


def test_a_message_with_a_priority_is_not_scheduled(db):
    publish("t", "now", priority=100)
    publish("t", "now", priority=1)
    publish("t", "later", key="a", priority=10, delay=1000)
    assert [(one.priority, one.deliver_at is None) for one in testing.published()] == [
        (100, True),
        (1, True),
        (10, False),
    ]
    session = Session(USING)
    (row,) = scheduled.list_scheduled(using=USING).rows
    assert row.key == lane("a", 10)
    assert scheduled.list_scheduled().rows == (row,)
    assert scheduled.topics(session) == [("t", Count(1, True))]
    (topic,) = read_topics(session, session.now())
    assert (topic.waiting, topic.scheduled) == (2, 1)
    assert topic.waiting_since == OutboxMessage.objects.filter(deliver_at=0).earliest("created_at").created_at


def test_duplicates_are_those_of_a_key_and_priority(db):
    got = []
    for priority in (0, 0, 5, 5):
        publish("t", priority, key="a", id="same", priority=priority)
    Sub(listener(got)).settle()
    assert sorted(got) == [0, 5]


def test_the_sequencer_takes_high_priorities_first(db):
    publish_many("t", [Message(n, key="a") for n in range(20)])
    publish("t", "high", key="a", priority=1)
    publish("t", "highest", key="b", priority=100)
    assert sequencing.sequence(USING, max_rows=2).moved == 2
    assert set(QueueMessage.objects.values_list("partition_key", flat=True)) == {"a", "__p:+100:b"}, "half of a pass"
    assert sequencing.sequence(USING, max_rows=2).moved == 2
    assert set(QueueMessage.objects.values_list("partition_key", flat=True)) == {"a", "__p:+001:a", "__p:+100:b"}


def test_the_sequencer_starves_no_priority(db):
    """Each kind has a share of a pass while publishers are faster than the sequencer."""
    for priority in (0, 1, 100, -1, -100):
        publish_many("t", [Message([priority, n], key="a", priority=priority) for n in range(9)])
    publish_many("t", [Message(["later", n], key="later", deliver_at=LONG_AGO) for n in range(9)])
    passes = []
    while sequencing.sequence(USING, max_rows=8).moved:
        rows = QueueMessage.objects.order_by("offset")[sum(map(len, passes)) :]
        passes.append([json.loads(row.payload) for row in rows])
    assert passes[0] == [[0, 0], [0, 1], [100, 0], [100, 1], [-1, 0], [-1, 1], ["later", 0], ["later", 1]]
    for priority in (0, 1, 100, -1, -100, "later"):
        assert [n for found in passes for of, n in found if of == priority] == list(range(9))


def test_scheduled_messages_of_one_time_are_in_order_of_their_priority(db):
    for priority in (0, 100, -100, 5):
        publish("t", priority, priority=priority, deliver_at=LONG_AGO)
    publish("t", "first", priority=-100, deliver_at=LONG_AGO - datetime.timedelta(seconds=1))
    listed = [payload_of(one) for one in OutboxMessage.objects.order_by("deliver_at", "-priority")]
    sequence()
    assert [payload_of(one) for one in QueueMessage.objects.order_by("offset")] == listed
    assert listed == ["first", 100, 5, 0, -100]


@pytest.mark.parametrize("limit", [1, 2, 5])
def test_lists_of_scheduled_messages_are_in_that_order(db, limit):
    at = datetime.datetime(2100, 1, 1, tzinfo=datetime.UTC)
    for number, priority in enumerate((0, 100, -100, 0, 100)):
        publish("t", number, id=str(number), priority=priority, deliver_at=at)
    for topic in (None, "t"):
        found, after = [], None
        while True:
            page = scheduled.list_scheduled(topic=topic, after=after, limit=limit)
            found += [one.message_id for one in page.rows]
            if page.after is None:
                break
            after = page.after
        assert found == ["1", "4", "0", "3", "2"]


def test_the_column_is_the_priority_of_the_lane(db):
    names = ["a", "__p:3", "__p:+010:a", "__p:-100:"]
    OutboxMessage.objects.bulk_create(OutboxMessage(topic="t", partition_key=one, payload=b"1") for one in names)
    sequence()
    found = dict(QueueMessage.objects.values_list("partition_key", "priority"))
    assert [found[one] for one in names] == [0, 0, 10, -100]


# -- order --------------------------------------------------------------------


@MODES
def test_what_waits_in_the_log_is_taken_by_priority(db, mode):
    got = []
    for priority in (0, -5, 10, 100, -100):
        publish_many("t", [Message([priority, n], key="a", priority=priority) for n in range(3)])
    sequence()
    Sub(listener(got, mode=mode), claim_size=2, prefetch=2, priority_share=0).settle()
    assert got == [[priority, n] for priority in (100, 10, 0, -5, -100) for n in range(3)]


@MODES
def test_prefetched_messages_are_overtaken(db, mode):
    got = []
    sub = Sub(listener(got, mode=mode), claim_size=10, prefetch=10)
    publish_many("t", [Message(n, key=f"k{n}") for n in range(50)])
    sub.step(times=3)
    assert sub.inbox.waiting(sub.poller.groups[0].ref)[0] == 10, "there is no room for more of that priority"
    publish("t", "high", key="k0", priority=1)
    publish("t", "low", key="k0", priority=-1)
    sub.step(times=3)
    assert sub.inbox.waiting(sub.poller.groups[0].ref)[0] == 11
    assert sub.work(limit=1) == 1
    assert got == ["high"]
    sub.settle()
    assert sorted(got[1:51], key=str) == sorted(range(50), key=str)
    assert got[51] == "low"


@MODES
@pytest.mark.parametrize("share", [0, 2, 16])
def test_lower_priorities_keep_a_share(db, mode, share):
    got = []
    number = 150 + 50 * share
    for priority in (0, 10):
        publish_many("t", [Message(priority, key=f"k{n % 10}", priority=priority) for n in range(number)])
    sub = Sub(listener(got, mode=mode, priority_share=share or None), prefetch=20, priority_share=0)
    sub.settle(rounds=1000)
    assert (got.count(0), got.count(10)) == (number, number)
    last = len(got) - got[::-1].index(10)
    share_of_lower = got[:last].count(0) / last
    assert share_of_lower == 0 if not share else 0.5 / share <= share_of_lower <= 1.5 / share


@MODES
def test_a_thread_leaves_its_partition_for_a_higher_priority(db, mode):
    """Even within the time for which it stays with one."""
    got = []
    sub = Sub(listener(got, mode=mode), claim_size=50)
    publish_many("t", [Message(n, key="a") for n in range(50)])
    sub.step(times=3)
    batch = sub.inbox.take(None, wait=False)
    publish("t", "high", key="a", priority=1)
    sub.step(times=3)
    after = sub.inbox.take(batch, wait=False)
    assert after.items[0].claimed.key == "__p:+001:a"
    sub.inbox.leave(after)


@MODES
def test_a_batch_has_messages_of_one_priority(db, mode):
    got = []
    one = handler(
        mode=mode, batch=True, batch_size=10, function=lambda batch: got.append([each.payload for each in batch])
    )
    for priority in (0, 10):
        publish_many("t", [Message(priority, key=f"k{n}", priority=priority) for n in range(15)])
    Sub(one).settle()
    assert [(len(batch), set(batch)) for batch in got] == [(10, {10}), (5, {10}), (10, {0}), (5, {0})]


def test_redeliveries_of_a_shared_group_do_not_hold_up_higher_priorities(db):
    got = []

    def work(delivery):
        got.append(delivery.payload)
        if delivery.attempt < 3:
            raise ValueError

    one = handler(mode="shared", function=work, backoff=Backoff(0, 1, 0))
    sub = Sub(one, claim_size=10, prefetch=10)
    publish_many("t", [Message(n, key=f"k{n}") for n in range(30)])
    sub.step(times=3)
    sub.work(limit=10)
    publish("t", "high", key="a", priority=1)
    del got[:]
    sub.step(times=3)
    sub.work(limit=1)
    assert got == ["high"]
    sub.settle(rounds=200)
    assert got.count("high") == 3


def failing_once(got, **options):
    def work(delivery):
        got.append((delivery.priority, delivery.attempt))
        if delivery.attempt == 1 and delivery.payload == "fails":
            raise ValueError

    return handler(mode="shared", function=work, backoff=Backoff(1, 1, 1, 0), **options)


def fail_all(sub, clock, number, priority=0):
    clock.stop()  # So that none is due again before all have failed.
    publish_many("t", [Message("fails", key=f"k{n}", priority=priority) for n in range(number)])
    sub.settle(rounds=200)
    clock.advance(2)


def test_redeliveries_of_a_shared_group_keep_a_share(db, clock):
    """Claims for another priority forgot that they were due."""
    got = []
    sub = Sub(failing_once(got), claim_size=2, prefetch=2)
    fail_all(sub, clock, 100)
    publish_many("t", [Message("works", key=f"k{n % 10}", priority=10) for n in range(800)])
    sequence()
    del got[:]
    for number in range(2000):
        if number % 20 == 0:
            sub.poller.poll_soon()
        sub.poller.step()
        sub.work()
        if got.count((10, 1)) >= 700:
            break
    assert 20 <= got.count((0, 2)) <= 80


def test_redeliveries_of_a_low_priority_do_not_fill_the_memory(db, clock):
    got = []
    sub = Sub(failing_once(got), claim_size=10, prefetch=10)
    fail_all(sub, clock, 60, priority=-10)
    for _ in range(30):
        sub.step()
    (group,) = sub.poller.groups
    assert sub.inbox.waiting(group.ref)[0] == 10
    assert not group.wants_turn()
    assert not group.planner.has_room_for_due()
    sub.settle(rounds=100)
    assert got.count((-10, 2)) == 60


def test_rows_left_in_the_future_are_looked_for_behind_higher_priorities(db):
    got = []
    other = Sub(listener(got, mode="shared"), name="other", claim_size=1, prefetch=1)
    other.settle()
    sub = Sub(listener(got, mode="shared"))
    publish("t", "lost", key="a")
    sub.step(times=3)
    sub.leave()
    assert DeliveryState.objects.update(invisible_until=4 * 10**12, delivered_at=4 * 10**12) == 1
    publish_many("t", [Message("new", key="a", priority=10) for _ in range(4)])
    other.step()
    other.poller.shared[0].mode.expect_clock_step()
    for _ in range(10):  # Without maintenance, which would ask for it again.
        other.poller.poll_soon()
        other.poller.step()
        other.work()
    assert got == ["new", "new", "new", "new", "lost"], "the next claim was one for the higher priority"


@MODES
@pytest.mark.parametrize("high", [10, 100])
def test_lower_priorities_keep_a_share_of_what_waits_in_the_process(db, mode, high):
    got = []
    for priority in (0, high):
        publish_many("t", [Message(priority, key=f"k{n}", priority=priority) for n in range(20)])
    sub = Sub(listener(got, mode=mode, priority_share=4), claim_size=40, prefetch=40, priority_share=0)
    sub.step(times=6)
    assert sub.inbox.waiting(sub.poller.groups[0].ref)[0] == 40
    sub.work(limit=16)
    assert got.count(0) == 4


def test_partitions_that_were_left_out_are_acquired_when_those_of_their_priority_are_done(db, monkeypatch):
    """However many of a lower priority have work."""
    monkeypatch.setattr("tests.support.internals.ordered.AHEAD", 5)
    monkeypatch.setattr("tests.support.internals.ordered.TAKE_OVER", 5)
    got = []
    for priority in (0, 10):
        publish_many("t", [Message(priority, key=f"k{n}", priority=priority) for n in range(40)])
    sub = Sub(listener(got, priority_share=None), claim_size=1, prefetch=1, priority_share=0)
    sub.step(times=3)
    while len(got) < 80:
        sub.poller.step()
        sub.work()
    assert got == [10] * 40 + [0] * 40


def test_partitions_of_a_higher_priority_are_acquired_however_many_have_work(db, monkeypatch):
    monkeypatch.setattr("tests.support.internals.ordered.AHEAD", 5)
    monkeypatch.setattr("tests.support.internals.ordered.TAKE_OVER", 10)
    got = []
    sub = Sub(listener(got), claim_size=2, prefetch=2)
    publish_many("t", [Message(n, key=f"k{n:02}") for n in range(40)])
    sub.step(times=3)
    (group,) = sub.poller.ordered
    assert group.mode.waiting
    held = len(group.mode.owned())
    publish("t", "high", key="k00", priority=1)
    sub.step(times=2)
    assert lane("k00", 1) in group.mode.owned()
    assert len(group.mode.owned()) == held + 1, "no more of the others"
    sub.work(limit=1)
    assert got == ["high"]
    sub.settle(rounds=500)
    assert len(got) == 41


# -- what treats a lane as a partition ----------------------------------------


@MODES
def test_subsets_are_those_of_keys(db, mode):
    keys = [f"k{n}" for n in range(20)]
    publish_many("t", [Message((key, priority), key=key, priority=priority) for key in keys for priority in (0, 7)])
    found = []
    for part in (1, 2):
        got = []

        def work(delivery, got=got):
            is_first = tuple(delivery.payload) not in got
            got.append(tuple(delivery.payload))
            if is_first:
                delivery.snooze(0)

        Sub(handler(mode=mode, function=work), subset=Subset.parse([], f"{part}/2"), name=f"s{part}").settle(rounds=200)
        assert {(key, 7) for key, priority in got if priority == 0} == {one for one in got if one[1] == 7}
        found.append(set(got))
    assert not found[0] & found[1]
    assert found[0] | found[1] == {(key, priority) for key in keys for priority in (0, 7)}


@pytest.mark.parametrize("name", ["a", "__p:+010:a", "__p:-100:a", "__p:3", "__p:+010:__p:3"])
@pytest.mark.parametrize("pattern", ["a", "__p:3", "__p:*", "?"])
def test_subsets_in_sql_are_those_in_python(db, name, pattern):
    OutboxMessage.objects.bulk_create([OutboxMessage(topic="t", partition_key=name, message_id="1", payload=b"1")])
    sequence()
    session = Session(USING)
    for subset in (Subset.parse([pattern], None), Subset.parse([], "1/2"), Subset.parse([pattern], "2/3")):
        inside, parameters = subset.condition(session.dialect, "partition_key")
        rows = session.rows(f"SELECT 1 FROM queue_messages WHERE topic = %s{inside}", ("t", *parameters))
        assert bool(rows) == (name in subset)


@MODES
def test_everything_is_settled_and_collected(db, settings, mode):
    settings.MYSQLQUEUE = {"RETENTION": 0}
    for priority in (-3, 0, 3):
        publish_many("t", [Message(n, key=f"k{n}", priority=priority) for n in range(10)])
    sub = Sub(handler(mode=mode), lease_renewal_interval=0.0)
    sub.settle(rounds=100)
    sub.step(times=2)
    garbage.collect(USING)
    garbage.collect(USING)
    for model in (QueueMessage, DeliveryState, ConsumerOffset):
        assert not model.objects.exists()

"""GC, watermarks and what a crash between two statements leaves behind."""

from __future__ import annotations

import pytest
from django.db import connection, transaction

from django_mysqlqueue import Message, publish, publish_many
from django_mysqlqueue.models import ConsumerGroup, ConsumerOffset, DeliveryState, QueueMessage
from django_mysqlqueue.operations import dropping
from django_mysqlqueue.service import claiming, groups, retention, settling, watermarks
from django_mysqlqueue.service.deliveries import Action, Settlement
from django_mysqlqueue.service.refs import GroupRef
from django_mysqlqueue.sql.session import Session
from tests.support.harness import USING, Sub, handler, in_thread, lag, problems_found, sequence
from tests.test_conformance import Recorder

REF = GroupRef("g", "t")


@pytest.fixture
def no_retention(settings):
    settings.MYSQLQUEUE = {"RETENTION": 0}


# -- what GC keeps ------------------------------------------------------------


def test_younger_than_the_retention_is_kept(db, clock, settings):
    settings.MYSQLQUEUE = {"RETENTION": 60, "TOPICS": {"kept": {"RETENTION": None}, "short": {"RETENTION": 10}}}
    for topic in ("t", "kept", "short"):
        publish(topic, 1)
        Sub(handler(topic=topic)).settle()
    clock.advance(11)
    assert retention.collect(USING).messages == 1
    clock.advance(50)
    assert retention.collect(USING).messages == 1
    clock.advance(10**8)
    assert retention.collect(USING).messages == 0
    assert QueueMessage.objects.get().topic == "kept"


@pytest.mark.defect(3)
def test_a_group_that_never_touched_a_partition_keeps_it(db, no_retention):
    """A group being deployed has no offsets row anywhere yet."""
    publish_many("t", (Message(number, key=f"k{number}") for number in range(3)))
    Sub(handler()).settle()
    groups.register(USING, GroupRef("new", "t"), mode="ordered", start="earliest")
    assert retention.collect(USING).messages == 0
    got = Recorder()
    Sub(handler(group="new", function=got)).settle()
    assert sorted(got.payloads) == [0, 1, 2]
    assert retention.collect(USING).messages == 3


def test_a_latest_group_does_not_hold_back_what_was_before_it(db, no_retention):
    publish("t", 1)
    Sub(handler()).settle()
    groups.register(USING, GroupRef("new", "t"), mode="ordered", start="latest")
    assert retention.collect(USING).messages == 1


def test_unsettled_messages_are_kept_whatever_their_age(db, clock, no_retention):
    publish_many("t", (Message(number, key="k") for number in range(5)))
    sub = Sub(handler(function=lambda d: d.nack(delay=9e5) if d.payload == 2 else None))
    sub.settle()
    clock.advance(800_000)
    assert retention.collect(USING).messages == 2
    assert lag() == 1


@pytest.mark.defect(8)
def test_a_busy_partition_is_collected_too(db, no_retention):
    """There is always something above the watermark."""
    sub = Sub(handler(function=lambda d: d.nack(delay=3600) if d.payload % 5 == 4 else None))
    kept = []
    for start in range(0, 50, 5):
        publish_many("t", (Message(number, key="k") for number in range(start, start + 5)))
        sub.settle()
        retention.collect(USING)
        kept.append(QueueMessage.objects.count())
    assert kept[0] == 1
    # Behind the first stuck message nothing may go; what was before it went.
    assert QueueMessage.objects.order_by("offset").first().payload == b"4"


@pytest.mark.parametrize("limits", [retention.Limits(1, 1), retention.Limits(7, 3), retention.Limits(500, 1)], ids=str)
def test_gc_by_chunks_takes_everything_in_the_end(db, no_retention, limits):
    publish_many("t", (Message(number, key=f"k{number % 10}") for number in range(200)))
    publish_many("u", (Message(number, key=f"k{number % 10}") for number in range(50)))
    sub = Sub(handler(), handler(topic="u"))
    sub.settle()
    assert retention.collect(USING, dry_run=True, limits=limits).messages == 250
    assert QueueMessage.objects.count() == 250
    collected = retention.collect(USING, limits=limits)
    assert (collected.messages, collected.offsets_rows) == (250, 20)
    assert not QueueMessage.objects.exists()
    assert not ConsumerOffset.objects.exists()


def test_dead_letters_without_a_handler_are_kept(db, clock, settings):
    settings.MYSQLQUEUE = {"RETENTION": 0}
    publish("t", 1)
    Sub(handler(function=lambda d: d.reject("no"))).settle()
    sequence()
    clock.advance(10**8)
    retention.collect(USING)
    assert QueueMessage.objects.get().topic == "t_dlq"
    settings.MYSQLQUEUE = {"RETENTION": 0, "DLQ_RETENTION": 3600}
    retention.collect(USING)
    assert not QueueMessage.objects.exists()


@pytest.mark.defect(15)
def test_an_abandoned_group_is_shown_and_can_be_dropped(db, no_retention):
    publish("t", 1)
    groups.register(USING, GroupRef("gone", "t"), mode="ordered", start="earliest")
    Sub(handler()).settle()
    assert retention.collect(USING).messages == 0
    assert [(one.kind, one.ref) for one in problems_found()] == [("no_subscriber", ("gone", "t"))]
    dropping.drop(USING, GroupRef("gone", "t"))
    assert retention.collect(USING).messages == 1


@pytest.mark.defect(5)
@pytest.mark.servers_only
def test_an_offsets_row_that_is_in_use_is_not_removed(db, no_retention):
    publish("t", 1, key="k")
    Sub(handler()).settle()
    QueueMessage.objects.all().delete()
    with transaction.atomic():
        watermarks.lock(Session(USING), REF, ["k"])
        assert in_thread(lambda: retention.collect(USING)).offsets_rows == 0
    assert retention.collect(USING).offsets_rows == 1


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
            others.append(in_thread(lambda: retention.collect(USING)))
        return execute(sql, params, many, context)

    with connection.execute_wrapper(meanwhile):
        mine = retention.collect(USING)
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


# -- crashes between statements -----------------------------------------------


class Crash(BaseException):
    """Ends an operation between two of its statements, as a SIGKILL would."""


def crash_points(operation, limit=60):
    """Runs ``operation`` so that it dies right after statement 1, 2, 3, …, until it gets through."""
    for survives in range(limit):
        count = 0

        def wrapper(execute, sql, params, many, context, survives=survives):
            nonlocal count
            result = execute(sql, params, many, context)
            count += not sql.startswith("BEGIN")  # SQLite's, which atomic() cannot undo from within
            if count > survives:
                raise Crash
            return result

        try:
            with connection.execute_wrapper(wrapper):
                operation()
        except Crash:
            yield survives
        else:
            return
    raise AssertionError("it never got through")


@pytest.mark.defect(4)
def test_a_crash_in_a_flush_redelivers_nothing_that_was_acked(db, clock):
    """The watermark is stored before the state rows go, and both or neither."""
    publish_many("t", (Message(number, key="k") for number in range(20)))
    sub = Sub(handler())
    sub.step()
    acks = [Settlement(held.claimed, Action.ACK) for held in iter(lambda: started(sub), None)]
    points = list(crash_points(lambda: settling.flush(USING, REF, acks, max_attempts=5, shared=False)))
    assert len(points) >= 3
    assert not DeliveryState.objects.exists()
    clock.advance(31)
    got = Recorder()
    Sub(handler(function=got)).settle()
    assert got.payloads == []


def started(sub):
    held = sub.take()
    if held is not None:
        sub.inbox.leave(sub._batches[id(held)])
    return held


@pytest.mark.defect(2)
@pytest.mark.parametrize("mode", ["ordered", "shared"])
def test_a_crash_while_dead_lettering_leaves_it_live_or_dead(db, clock, mode):
    publish("t", 1, key="k")
    sub = Sub(handler(mode=mode))
    sub.step()
    held = sub.take()
    outcome = [Settlement(held.claimed, Action.REJECT, 0, "no")]

    def live_and_dead():
        sequence()
        return lag(), QueueMessage.objects.filter(topic="t_dlq").count()

    for _ in crash_points(lambda: settling.flush(USING, REF, outcome, max_attempts=5, shared=mode == "shared")):
        assert live_and_dead() == (1, 0)
    assert live_and_dead() == (0, 1)


def test_a_crash_while_sequencing_moves_all_or_nothing(db):
    from django_mysqlqueue.models import OutboxMessage
    from django_mysqlqueue.service import sequencing

    publish_many("t", range(5))
    for _ in crash_points(lambda: sequencing.sequence(USING)):
        assert (OutboxMessage.objects.count(), QueueMessage.objects.count()) == (5, 0)
    assert (OutboxMessage.objects.count(), QueueMessage.objects.count()) == (0, 5)


def test_a_flushed_database_gets_its_mutex_back(db):
    from django_mysqlqueue.models import Sequencer

    publish("t", 1)
    sequence()
    Sequencer.objects.all().delete()
    publish("t", 2)
    sequence()
    assert QueueMessage.objects.count() == 2


@pytest.mark.defect(13)
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
    sub = Sub(handler(mode="shared"), batch_size=500, prefetch=1500)
    sub.step(times=4)
    head = sub.take()
    sub.settle(rounds=20)
    assert DeliveryState.objects.filter(acked=True).count() == 1000
    sub.run(head)
    sub.poller.shared[0].turn()
    assert 0 < DeliveryState.objects.count() < 1000
    sub.settle(rounds=20)
    assert not DeliveryState.objects.exists()


def test_a_claim_with_an_unknown_outcome_is_undone(db, monkeypatch):
    """The connection broke during COMMIT: what it may have taken comes again at once, uncounted."""
    from django.db import OperationalError

    from django_mysqlqueue.exceptions import CommitOutcomeUnknown

    publish_many("t", (Message(number, key="k") for number in range(3)))
    got = Recorder()
    sub = Sub(handler(function=got))
    sub.step(tick=True)
    sub.settle()
    got.deliveries.clear()
    publish_many("t", (Message(number, key="k") for number in range(3, 6)))
    real = connection._commit
    armed = []

    def commit():
        real()
        if armed and DeliveryState.objects.exists():
            armed.clear()
            raise OperationalError(2013, "Lost connection to server during query")

    monkeypatch.setattr(connection, "_commit", commit)
    armed.append(True)
    with pytest.raises(CommitOutcomeUnknown):
        sub.step()
    assert DeliveryState.objects.filter(delivered_by=sub.name).count() == 3
    assert not armed
    sub.poller.reset()
    sub.settle()
    assert got.attempts == [(3, 1), (4, 1), (5, 1)]
    assert lag() == 0


@pytest.mark.defect(19)
def test_lag_is_a_count_of_messages(db):
    publish_many("other", range(50))
    publish_many("t", (Message(number, key="k") for number in range(5)))
    publish_many("other", range(50))
    sub = Sub(handler(), batch_size=2, prefetch=2)
    sub.step()
    sub.work(2)
    sub.flush()
    assert lag() == 3


def test_registering_twice_keeps_the_first_start(db):
    publish("t", 1)
    sequence()
    first = groups.register(USING, REF, mode="ordered", start="latest")
    again = groups.register(USING, REF, mode="shared", start="earliest")
    assert first == again
    assert ConsumerGroup.objects.count() == 1


def test_watermarks_of_many_partitions_with_more_rows_than_one_join_reads(db):
    """A partition whose rows a LIMIT has cut off must not look settled."""
    keys = [f"k{number:02}" for number in range(watermarks.FEW_PARTITIONS + 1)]
    each = 1000 // len(keys) + 60
    groups.register(USING, REF, mode="shared", start="earliest")
    publish_many("t", [Message(number, key=key) for number in range(each) for key in keys])
    sequence()
    watermarks.create_missing(USING, REF, keys)
    claimant = claiming.Claimant(REF, "s", 5, 60_000)
    wants = [claiming.Want(key, look_at=each) for key in keys]
    claim = claiming.claim(USING, claiming.ClaimRequest(claimant, wants, token=claiming.new_token()))
    assert len(claim.deliveries) == len(keys) * each
    firsts = {one.key: one for one in reversed(claim.deliveries)}
    settling.flush(USING, REF, [Settlement(one, Action.ACK) for one in firsts.values()], max_attempts=5, shared=True)
    for key, first in firsts.items():
        assert ConsumerOffset.objects.get(partition_key=key).offset_acked < first.offset + len(keys), key
    assert DeliveryState.objects.filter(acked=False).count() == len(keys) * (each - 1)

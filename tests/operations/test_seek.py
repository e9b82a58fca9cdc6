"""Seek: replaying and skipping beside subscribers at work."""

from __future__ import annotations

import pytest

from django_mysqlqueue import Message, publish, publish_many
from django_mysqlqueue.exceptions import OperationRefused
from django_mysqlqueue.models import ConsumerGroup, ConsumerOffset, DeliveryState, Operation, QueueMessage, Sequencer
from django_mysqlqueue.operations import pausing, seeking
from django_mysqlqueue.operations.seeking import Position
from tests.app.models import Effect
from tests.support import garbage
from tests.support.handlers import Recorder, both_modes
from tests.support.harness import USING, Sub, handler, lag, sequence
from tests.support.internals import GroupRef, Session, groups
from tests.support.internals import log as service_log
from tests.support.scenarios import G, frozen_before, log, offsets_of, resumed

ME = "ada"


@both_modes
def test_seek_to_the_beginning_replays_everything(db, mode):
    offsets = log(6)
    got = Recorder()
    sub = Sub(handler(function=got, mode=mode))
    sub.settle()
    place = seeking.position_of(USING, "earliest")
    assert seeking.preview(USING, G, place) == seeking.Preview(place, replayed=6, skipped=0)
    seeking.move(USING, G, place, actor=ME)
    resumed(sub).settle()
    assert sorted(got.payloads) == sorted([*range(6), *range(6)])
    assert lag() == 0
    assert {row.offset_acked for row in ConsumerOffset.objects.all()} == set(offsets[-2:])


@both_modes
def test_seek_to_the_end_skips_what_is_unsettled(db, mode):
    log(6)
    got = Recorder()
    sub = Sub(handler(function=got, mode=mode), claim_size=2, prefetch=2)
    sub.step()  # some are in flight
    place = seeking.position_of(USING, "latest")
    assert seeking.preview(USING, G, place) == seeking.Preview(place, replayed=0, skipped=6)
    assert seeking.move(USING, G, place, actor=ME) == 2
    assert lag() == 0
    publish("t", "new", key="a")
    resumed(sub).settle()
    assert "new" in got.payloads
    assert len(got.payloads) <= 3  # no more than what was running
    assert not DeliveryState.objects.exists()


def test_seek_to_an_offset_and_to_a_time(db, clock):
    offsets = log(3, "a")
    clock.advance(100)
    moment = Session(USING).now()
    publish_many("t", (Message(number, key="a") for number in range(3, 6)))
    sequence()
    later = offsets_of()[3]
    got = Recorder()
    sub = Sub(handler(function=got))
    sub.settle()
    del got.deliveries[:]
    assert seeking.position_of(USING, time_ms=moment).offset == later - 1
    assert seeking.position_of(USING, time_ms=0).offset < offsets[0]
    assert seeking.position_of(USING, time_ms=moment + 10**9) == seeking.position_of(USING, "latest")
    seeking.move(USING, G, seeking.position_of(USING, offsets[1]), actor=ME, detail="once more")
    resumed(sub).settle()
    assert got.payloads == [1, 2, 3, 4, 5]
    operation = Operation.objects.get()
    assert (operation.action, operation.detail) == ("seek", f"to offset {offsets[1]} (once more)")
    assert operation.ended_at >= operation.started_at > 0


@pytest.mark.parametrize("target", [0, -1, True, "first", 1.5])
def test_a_seek_to_nowhere_is_refused(db, target):
    log(1)
    with pytest.raises(OperationRefused, match="must be 'earliest', 'latest' or an integer of at least 1"):
        seeking.position_of(USING, target)


def test_a_position_from_a_log_that_has_lost_its_end_since_is_refused(db):
    """As after a failover between the preview and the operation: other messages get these offsets."""
    offsets = log(6)
    Sub(handler()).settle()
    place = seeking.position_of(USING, "latest")
    QueueMessage.objects.filter(offset__gt=offsets[3]).delete()
    Sequencer.objects.update(last_offset=offsets[3])
    with pytest.raises(OperationRefused, match=f"offset {offsets[5] + 1}: the log ends at {offsets[3]};"):
        seeking.move(USING, G, place, actor=ME)
    assert not groups.find(USING, G).paused


def test_a_seek_beyond_the_end_of_the_log_is_refused(db):
    (last,) = log(1)
    with pytest.raises(OperationRefused, match=f"the log ends at {last}"):
        seeking.position_of(USING, last + 2)
    assert seeking.position_of(USING, last + 1) == Position(last)


@pytest.fixture
def emptied(db, settings):
    """A log of which GC has taken everything; the offset that it ended at."""
    settings.MYSQLQUEUE = {"RETENTION": 0}
    offsets = log(3, "a")
    sub = Sub(handler())
    sub.settle()
    sub.leave()
    garbage.collect(USING)
    assert not QueueMessage.objects.exists()
    return offsets[-1]


def test_an_emptied_log_ends_where_it_ended(emptied):
    session = Session(USING)
    assert service_log.end_of_log(session) == emptied
    for place in (
        seeking.position_of(USING, "latest"),
        seeking.position_of(USING, emptied + 1),
        seeking.position_of(USING, time_ms=0),
        seeking.position_of(USING, time_ms=session.now() + 10**6),
    ):
        assert place == Position(emptied)
    assert seeking.position_of(USING, emptied) == Position(emptied - 1)
    with pytest.raises(OperationRefused, match=f"the log ends at {emptied}"):
        seeking.position_of(USING, emptied + 2)
    assert groups.register(USING, GroupRef("late", "t"), mode="ordered", start="latest").start_offset == emptied


def test_a_seek_in_an_emptied_log_loses_nothing(emptied):
    seeking.move(USING, G, seeking.position_of(USING, "latest"), actor=ME)
    publish("t", "new", key="a")
    got = Recorder()
    Sub(handler(function=got)).settle()
    assert got.payloads == ["new"]


def test_the_log_ends_at_its_last_message_where_the_sequencer_has_forgotten(db):
    (last,) = log(1)
    Sequencer.objects.all().delete()
    assert service_log.end_of_log(Session(USING)) == last
    Sequencer.objects.create(id=1, last_offset=last + 5)
    assert service_log.end_of_log(Session(USING)) == last + 5


def test_a_time_behind_the_last_message_that_is_left_is_the_end_of_the_log(db):
    log(3, "a")
    end = offsets_of()[-1]
    QueueMessage.objects.filter(offset=end).delete()
    assert seeking.position_of(USING, time_ms=Session(USING).now() + 10**6) == Position(end)


@pytest.mark.promise("Interrupted operations")
@both_modes
def test_what_was_in_flight_is_stale_after_a_seek(db, mode):
    """Its end changes nothing, whichever comes: an ack would hide the replay, a nack would doom it."""
    log(3, "a")
    sub = Sub(handler(mode=mode))
    sub.step()
    held = sub.take()
    seeking.move(USING, G, Position(0), actor=ME)
    sub.run(held)
    sub.flush()
    assert set(ConsumerOffset.objects.values_list("offset_acked", "offset_claimed")) == {(0, 0)}
    assert lag() == 3
    got = Recorder()
    sub.leave()
    Sub(handler(function=got, mode=mode)).settle()
    assert got.payloads == [0, 1, 2]


def test_an_atomic_handler_that_runs_through_a_seek_leaves_nothing(db):
    log(1, "a")
    sub = Sub(handler(function=lambda delivery: Effect.objects.create(name="half"), atomic=True))
    sub.step()
    held = sub.take()
    seeking.move(USING, G, Position(0), actor=ME)
    sub.run(held)
    assert not Effect.objects.exists()
    resumed(sub).settle()
    assert Effect.objects.count() == 1


def test_what_waits_in_a_subscriber_does_not_start_after_a_seek(db):
    """Claimed and not started: it would run beside its replay, out of order."""
    log(4, "a")
    got = Recorder()
    sub = Sub(handler(function=got))
    sub.step()
    seeking.move(USING, G, Position(0), actor=ME)
    resumed(sub).settle()
    assert got.payloads == [0, 1, 2, 3]
    assert got.attempts == [(number, 1) for number in range(4)]


@pytest.mark.promise("Interrupted operations")
@both_modes
def test_flushes_during_a_seek_move_nothing(db, mode):
    """The state rows that a seek has not deleted yet must not lift the watermark that it has put back."""
    log(250, "a")
    sub = Sub(handler(mode=mode), claim_size=250, prefetch=250)
    sub.step()
    head = sub.take()
    sub.work()
    sub.flush()  # 249 are marked behind the head
    sub.run(head)

    def half_way(session):
        groups.lock(session, G)
        operation = seeking._begin(session, G, Position(0), "", actor=ME)
        seeking._reset_offsets(session, G, Position(0), operation, "")

    seeking.run(USING, half_way)
    sub.flush()
    assert set(ConsumerOffset.objects.values_list("offset_acked", "offset_claimed")) == {(0, 0)}
    seeking.move(USING, G, Position(0), actor=ME)
    assert lag() == 250


def test_a_group_that_was_paused_stays_so_after_a_seek(db):
    log(2)
    Sub(handler()).settle()
    pausing.set_paused(USING, G, actor=ME, paused=True)
    seeking.move(USING, G, Position(0), actor=ME)
    group = ConsumerGroup.objects.get()
    assert (group.paused, group.after_seek) == (True, "")


def rejected(sub):
    sub.work()
    sub.flush()


@pytest.mark.promise("Interrupted operations")
@both_modes
def test_what_is_settled_during_a_seek_and_before_it_deletes_the_row_has_happened_before_it(db, monkeypatch, mode):
    """The dead letter stays and the message is live again; an ack's effect stays and the message comes again."""
    log(2, "a")

    def end(delivery):
        if delivery.payload == 0:
            delivery.reject("no")
        else:
            Effect.objects.create(name="done")

    sub = Sub(handler(function=end, mode=mode))
    sub.step()
    frozen_before(monkeypatch, 3, lambda: rejected(sub))
    seeking.move(USING, G, Position(0), actor=ME)
    sub.leave()
    sequence()
    assert [bytes(one.payload) for one in QueueMessage.objects.filter(topic="t_dlq")] == [b"0"]
    assert Effect.objects.count() == 1
    got = Recorder()
    Sub(handler(function=got, mode=mode)).settle()
    assert got.payloads == [0, 1]

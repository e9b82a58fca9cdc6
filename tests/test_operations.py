"""What operators do: seek, pause, redrive, discard, retry, reschedule; beside subscribers that work."""

from __future__ import annotations

import itertools
import json
import threading
import time

import pytest
from django.db import connection, transaction

from django_mysqlqueue import Message, operations, publish, publish_many
from django_mysqlqueue.exceptions import InvalidMessage, OperationRefused
from django_mysqlqueue.inspection import scheduled
from django_mysqlqueue.models import (
    ConsumerGroup,
    ConsumerOffset,
    DeliveryEvent,
    DeliveryState,
    Operation,
    OutboxMessage,
    PartitionLease,
    QueueMessage,
    Rollup,
    Sequencer,
    SubscriberHeartbeat,
)
from django_mysqlqueue.operations import (
    dead_lettering,
    dropping,
    group_mode,
    pausing,
    redriving,
    rescheduling,
    retrying,
    seeking,
    steps,
)
from django_mysqlqueue.operations.limits import LIMITS, Limits
from django_mysqlqueue.operations.seeking import Position
from django_mysqlqueue.service import groups, heartbeats, leasing, retention, rollups
from django_mysqlqueue.service import log as service_log
from django_mysqlqueue.service.dead_letters import DeadLetterFilter, matching_offsets
from django_mysqlqueue.service.refs import GroupRef
from django_mysqlqueue.sql.session import Session
from tests.app.models import Effect
from tests.support.harness import USING, Sub, handler, in_thread, lag, sequence
from tests.test_conformance import Recorder, both_modes, fail

G = GroupRef("g", "t")
ME = "ada"


def offsets_of(topic="t"):
    return list(QueueMessage.objects.filter(topic=topic).order_by("offset").values_list("offset", flat=True))


def log(count, keys="ab", topic="t"):
    """Puts messages 0, 1, … into the log, over some partitions by turns; returns their offsets."""
    publish_many(topic, (Message(number, key=keys[number % len(keys)]) for number in range(count)))
    sequence()
    return offsets_of(topic)


def dead_letters(count, group="g", topic="t", keys="ab"):
    """Lets a group fail messages for good; returns the offsets of the dead letters."""
    log(count, keys, topic)
    sub = Sub(handler(topic, group, fail, max_attempts=1))
    sub.settle()
    sub.leave()
    sequence()
    return offsets_of(f"{topic}_dlq")


def resumed(sub):
    """The next tick, at which a subscriber reads what operators have said."""
    sub.step(times=2)
    return sub


# -- pause and resume ---------------------------------------------------------


@both_modes
def test_a_paused_group_finishes_what_it_holds_and_takes_no_more(db, mode):
    log(4, "a")
    got = Recorder()
    sub = Sub(handler(function=got, mode=mode), batch_size=2, prefetch=2)
    sub.step()
    assert pausing.pause(USING, G, actor=ME, reason="a bad deploy")
    assert not pausing.pause(USING, G, actor=ME)  # it is
    sub.settle()
    assert got.payloads == [0, 1]
    if mode == "ordered":
        assert PartitionLease.objects.get().leased_by == sub.name
    assert pausing.resume(USING, G, actor=ME)
    assert not pausing.resume(USING, G, actor=ME)
    sub.settle()
    assert got.payloads == [0, 1, 2, 3]
    assert list(Operation.objects.values_list("action", "actor", "reason", "consumer_group", "topic")) == [
        ("pause", ME, "a bad deploy", "g", "t"),
        ("resume", ME, "", "g", "t"),
    ]


def test_an_unknown_group_is_refused_and_nothing_recorded(db):
    ref = GroupRef("nobody", "t")
    for operation in (
        lambda: pausing.pause(USING, ref, actor=ME),
        lambda: pausing.resume(USING, ref, actor=ME),
        lambda: seeking.seek(USING, ref, Position(0), actor=ME),
        lambda: seeking.preview(USING, ref, Position(0)),
        lambda: retrying.retry_now(USING, ref, actor=ME),
    ):
        with pytest.raises(OperationRefused, match="no group 'nobody' of 't'"):
            operation()
    assert not Operation.objects.exists()


@pytest.mark.servers_only
@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_an_operation_in_a_request_commits_by_itself_and_holds_no_lock(db, end):
    """``ATOMIC_REQUESTS``: until the response is sent every claim of the group would wait."""
    log(2, "a")
    got = Recorder()
    sub = Sub(handler(function=got))
    outer = connection.connection
    with transaction.atomic():
        Effect.objects.create(name="request")
        pausing.pause(USING, G, actor=ME)
        pausing.resume(USING, G, actor=ME)
        in_thread(sub.settle)
        assert got.payloads == [0, 1]
        if end == "rollback":
            transaction.set_rollback(True)
    assert connection.connection is outer
    assert Effect.objects.count() == (end == "commit")
    assert Operation.objects.count() == 2


# -- seek ---------------------------------------------------------------------


@both_modes
def test_seek_to_the_beginning_replays_everything(db, mode):
    offsets = log(6)
    got = Recorder()
    sub = Sub(handler(function=got, mode=mode))
    sub.settle()
    place = seeking.position_of(USING, "earliest")
    assert seeking.preview(USING, G, place) == seeking.Preview(place, replayed=6, skipped=0)
    seeking.seek(USING, G, place, actor=ME)
    resumed(sub).settle()
    assert sorted(got.payloads) == sorted([*range(6), *range(6)])
    assert lag() == 0
    assert {row.offset_acked for row in ConsumerOffset.objects.all()} == set(offsets[-2:])


@both_modes
def test_seek_to_the_end_skips_what_is_unsettled(db, mode):
    log(6)
    got = Recorder()
    sub = Sub(handler(function=got, mode=mode), batch_size=2, prefetch=2)
    sub.step()  # some are in flight
    place = seeking.position_of(USING, "latest")
    assert seeking.preview(USING, G, place) == seeking.Preview(place, replayed=0, skipped=6)
    assert seeking.seek(USING, G, place, actor=ME) == 2
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
    seeking.seek(USING, G, seeking.position_of(USING, offsets[1]), actor=ME, detail="once more")
    resumed(sub).settle()
    assert got.payloads == [1, 2, 3, 4, 5]
    operation = Operation.objects.get()
    assert (operation.action, operation.detail) == ("seek", f"to offset {offsets[1]} (once more)")
    assert operation.ended_at >= operation.started_at > 0


@pytest.mark.parametrize("target", [0, -1, True, "first", 1.5])
def test_a_seek_to_nowhere_is_refused(db, target):
    log(1)
    with pytest.raises(OperationRefused, match="must be 'earliest', 'latest' or a number from 1"):
        seeking.position_of(USING, target)


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
    retention.collect(USING)
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
    seeking.seek(USING, G, seeking.position_of(USING, "latest"), actor=ME)
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


@both_modes
def test_what_was_in_flight_is_stale_after_a_seek(db, mode):
    """Its end changes nothing, whichever comes: an ack would hide the replay, a nack would doom it."""
    log(3, "a")
    sub = Sub(handler(mode=mode))
    sub.step()
    held = sub.take()
    seeking.seek(USING, G, Position(0), actor=ME)
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
    seeking.seek(USING, G, Position(0), actor=ME)
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
    seeking.seek(USING, G, Position(0), actor=ME)
    resumed(sub).settle()
    assert got.payloads == [0, 1, 2, 3]
    assert got.attempts == [(number, 1) for number in range(4)]


@pytest.mark.defect(20)
@both_modes
def test_flushes_during_a_seek_move_nothing(db, mode):
    """The state rows that a seek has not deleted yet must not lift the watermark that it has put back."""
    log(250, "a")
    sub = Sub(handler(mode=mode), batch_size=250, prefetch=250)
    sub.step()
    head = sub.take()
    sub.work()
    sub.flush()  # 249 are marked behind the head
    sub.run(head)

    def half_way(session):
        groups.lock(session, G)
        operation = seeking._begin(session, G, Position(0), ME, "")
        seeking._reset_offsets(session, G, Position(0), operation, "")

    seeking.run(USING, half_way)
    sub.flush()
    assert set(ConsumerOffset.objects.values_list("offset_acked", "offset_claimed")) == {(0, 0)}
    seeking.seek(USING, G, Position(0), actor=ME)
    assert lag() == 250


def test_a_seek_that_died_stays_paused_and_is_run_again(db, monkeypatch):
    log(4)
    got = Recorder()
    sub = Sub(handler(function=got))
    sub.settle()

    def die(*args):
        raise RuntimeError("killed")

    with monkeypatch.context() as patch:
        patch.setattr(seeking, "_delete_states", die)
        with pytest.raises(RuntimeError):
            seeking.seek(USING, G, Position(0), actor=ME)
    resumed(sub).settle()
    assert len(got.payloads) == 4
    group = ConsumerGroup.objects.get()
    assert (group.paused, group.after_seek) == (True, "resume")
    for refused in (
        lambda: pausing.resume(USING, G, actor=ME),
        lambda: pausing.pause(USING, G, actor=ME),
        lambda: group_mode.set_mode(USING, G, "shared", lease_ms=30_000),
        lambda: retrying.retry_now(USING, G, actor=ME),
        lambda: dead_lettering.dead_letter_now(USING, G, [1], actor=ME),
    ):
        with pytest.raises(OperationRefused, match="A seek of the group 'g' of 't' has not finished"):
            refused()
    seeking.seek(USING, G, Position(0), actor=ME)
    resumed(sub).settle()
    assert len(got.payloads) == 8


def test_a_group_that_was_paused_stays_so_after_a_seek(db):
    log(2)
    Sub(handler()).settle()
    pausing.pause(USING, G, actor=ME)
    seeking.seek(USING, G, Position(0), actor=ME)
    group = ConsumerGroup.objects.get()
    assert (group.paused, group.after_seek) == (True, "")


def test_of_two_seeks_at_a_time_the_later_one_holds(db):
    offsets = log(4, "a")
    sub = Sub(handler())
    sub.settle()
    begun = seeking.run(USING, lambda session: seeking._begin(session, G, Position(0), ME, ""))
    seeking.seek(USING, G, Position(offsets[1]), actor="bob")
    for step in (
        lambda session: seeking._reset_offsets(session, G, Position(0), begun, ""),
        lambda session: seeking._delete_states(session, G, begun),
        lambda session: seeking._end(session, G, begun),
    ):
        with pytest.raises(OperationRefused, match="was stopped: another one has started"):
            seeking.run(USING, step)
    assert set(ConsumerOffset.objects.values_list("offset_acked", "offset_claimed")) == {(offsets[1], offsets[1])}
    assert not ConsumerGroup.objects.get().paused


def settled_and_left(count):
    """A subscriber has settled so many messages and left."""
    log(count)
    sub = Sub(handler())
    sub.settle()
    sub.leave()


def frozen_before(monkeypatch, transaction, meanwhile):
    """A process that is frozen before one of its operation's transactions; ``meanwhile`` happens before it wakes."""
    real, numbers, modules = seeking.run, itertools.count(1), (seeking, dropping, steps, retrying)

    def run(using, operation):
        if next(numbers) == transaction:
            for module in modules:
                monkeypatch.setattr(module, "run", real)
            in_thread(meanwhile)
        return real(using, operation)

    for module in modules:
        monkeypatch.setattr(module, "run", run)


@pytest.mark.parametrize("before", [2, 3, 4])  # behind the first: offsets, state rows, the end
def test_a_frozen_seek_that_wakes_after_the_same_seek_takes_nothing_away(db, monkeypatch, before):
    """The group looked as the seek had left it: paused, at the same start. What had been claimed since was lost."""
    settled_and_left(6)
    later = Sub(handler())

    def the_same_again():
        seeking.seek(USING, G, Position(0), actor="bob")
        resumed(later)  # it claims, and holds what it has claimed
        pausing.pause(USING, G, actor="bob")

    frozen_before(monkeypatch, before, the_same_again)
    with pytest.raises(OperationRefused, match="was stopped: another one has started"):
        seeking.seek(USING, G, Position(0), actor=ME)
    assert DeliveryState.objects.filter(consumer_group="g").count() == 6
    pausing.resume(USING, G, actor=ME)
    later.leave()
    got = Recorder()
    Sub(handler(function=got)).settle()
    assert sorted(got.payloads) == list(range(6))
    assert lag() == 0


def test_the_record_of_a_seek_says_that_another_stopped_it(db):
    log(2)
    Sub(handler()).settle()
    seeking.run(USING, lambda session: seeking._begin(session, G, Position(0), ME, "once"))
    seeking.seek(USING, G, Position(0), actor="bob")
    first, second = Operation.objects.order_by("id")
    assert (first.actor, first.detail) == (ME, "to offset 1 (once); stopped: a seek by bob took over")
    assert second.detail == "to offset 1"
    assert 0 < first.ended_at <= second.ended_at
    assert ConsumerGroup.objects.get().operation == 0


def test_a_seek_that_older_code_has_begun_is_run_again(db):
    """It has no operation in the group row."""
    log(2)
    Sub(handler()).settle()
    ConsumerGroup.objects.update(paused=True, after_seek="resume", start_offset=0)
    with pytest.raises(OperationRefused, match=r"A seek .* has not finished"):
        pausing.resume(USING, G, actor=ME)
    seeking.seek(USING, G, Position(0), actor=ME)
    group = ConsumerGroup.objects.get()
    assert (group.paused, group.after_seek, group.operation) == (False, "", 0)


def seek_or_drop(operation, limits=LIMITS):
    if operation == "drop":
        return dropping.drop(USING, G, actor=ME, limits=limits)
    return seeking.seek(USING, G, Position(0), actor=ME, limits=limits)


def ended_by_older_code(*, paused):
    """A seek to the beginning by code that does not know the column ``operation``, and leaves it as it is."""
    ConsumerOffset.objects.update(offset_acked=0, offset_claimed=0)
    DeliveryState.objects.all().delete()
    ConsumerGroup.objects.update(paused=paused, after_seek="")


@pytest.mark.parametrize("paused_since", [False, True])
@pytest.mark.parametrize("operation", ["seek", "drop"])
@pytest.mark.parametrize("before", [2, 3, 4])
def test_a_frozen_operation_stops_if_older_code_has_ended_it(db, monkeypatch, before, operation, paused_since):
    settled_and_left(6)
    later = Sub(handler())

    def meanwhile():
        ended_by_older_code(paused=False)
        resumed(later)  # it claims, and holds what it has claimed
        if paused_since:
            pausing.pause(USING, G, actor="bob")

    frozen_before(monkeypatch, before, meanwhile)
    with pytest.raises(OperationRefused, match="was stopped: another one has started"):
        seek_or_drop(operation)
    assert DeliveryState.objects.filter(consumer_group="g").count() == 6
    assert ConsumerGroup.objects.get().paused == paused_since
    record = Operation.objects.get(actor=ME)
    assert record.ended_at
    assert "stopped: This seek or drop" in record.detail


def test_a_seek_of_a_paused_group_that_older_code_has_ended_does_not_resume_it(db, monkeypatch):
    log(6)
    Sub(handler()).settle()
    pausing.pause(USING, G, actor="bob")
    frozen_before(monkeypatch, 3, lambda: ended_by_older_code(paused=True))
    with pytest.raises(OperationRefused, match="was stopped: another one has started"):
        seeking.seek(USING, G, Position(0), actor=ME)
    assert ConsumerGroup.objects.get().paused


def rejected(sub):
    sub.work()
    sub.flush()


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
    seeking.seek(USING, G, Position(0), actor=ME)
    sub.leave()
    sequence()
    assert [bytes(one.payload) for one in QueueMessage.objects.filter(topic="t_dlq")] == [b"0"]
    assert Effect.objects.count() == 1
    got = Recorder()
    Sub(handler(function=got, mode=mode)).settle()
    assert got.payloads == [0, 1]


# -- drop ---------------------------------------------------------------------


def half_dropped(monkeypatch):
    """A group whose drop died behind its first step."""
    log(4)
    Sub(handler()).step()

    def die(*args):
        raise RuntimeError("killed")

    with monkeypatch.context() as patch:
        patch.setattr(dropping, "_delete_some", die)
        with pytest.raises(RuntimeError):
            dropping.drop(USING, G, actor=ME)


def test_a_drop_that_died_is_run_again_and_nothing_else_is_done_until_then(db, monkeypatch):
    half_dropped(monkeypatch)
    group = ConsumerGroup.objects.get()
    assert (group.paused, group.after_seek, group.operation) == (True, "dropped", Operation.objects.get().pk)
    for refused in (
        lambda: pausing.resume(USING, G, actor=ME),
        lambda: pausing.pause(USING, G, actor=ME),
        lambda: group_mode.set_mode(USING, G, "shared", lease_ms=30_000),
        lambda: seeking.seek(USING, G, Position(0), actor=ME),
        lambda: retrying.retry_now(USING, G, actor=ME),
        lambda: dead_lettering.dead_letter_now(USING, G, [1], actor=ME),
    ):
        with pytest.raises(OperationRefused, match="A drop of the group 'g' of 't' has not finished"):
            refused()
    assert dropping.drop(USING, G, actor="bob")
    first, second = Operation.objects.order_by("id")
    assert first.detail == "stopped: a drop by bob took over"
    assert first.ended_at
    assert (second.changed, second.ended_at > 0) == (4, True)
    for model in (ConsumerGroup, DeliveryState, PartitionLease, ConsumerOffset):
        assert not model.objects.exists(), model


def test_a_subscriber_that_starts_during_a_drop_takes_nothing(db, monkeypatch):
    half_dropped(monkeypatch)
    got = Recorder()
    sub = Sub(handler(function=got))
    sub.settle()
    assert got.payloads == []
    dropping.drop(USING, G, actor=ME)
    sub.settle()
    assert got.payloads == []
    assert not ConsumerGroup.objects.exists()


@pytest.mark.parametrize("before", range(2, 7))  # behind the first: leases, state rows, …, the group
def test_a_frozen_drop_that_wakes_after_another_leaves_the_new_group_alone(db, monkeypatch, before):
    log(6)
    Sub(handler()).step()
    later = []

    def drop_register_claim():
        dropping.drop(USING, G, actor="bob")
        later.append(Sub(handler()))
        resumed(later[0])
        pausing.pause(USING, G, actor="bob")

    frozen_before(monkeypatch, before, drop_register_claim)
    with pytest.raises(OperationRefused, match="was stopped: another one has started"):
        dropping.drop(USING, G, actor=ME)
    assert DeliveryState.objects.count() == 6
    assert ConsumerOffset.objects.count() == 2
    assert not Operation.objects.filter(ended_at=0).exists()


@pytest.mark.parametrize("before", range(2, 7))  # behind the first: leases, state rows, …, the group
def test_a_frozen_drop_that_wakes_when_the_group_is_gone_ends(db, monkeypatch, before):
    log(2)
    Sub(handler()).step()
    frozen_before(monkeypatch, before, lambda: dropping.drop(USING, G, actor="bob"))
    assert dropping.drop(USING, G, actor=ME)
    assert not dropping.drop(USING, G, actor=ME)
    assert not Operation.objects.filter(ended_at=0).exists()


@pytest.mark.parametrize("before", [2, 3, 4])  # behind the first: offsets, state rows, the end
def test_a_drop_stops_a_seek(db, monkeypatch, before):
    log(2)
    Sub(handler()).settle()

    def drop_and_register():
        dropping.drop(USING, G, actor="bob")
        Sub(handler()).settle()

    frozen_before(monkeypatch, before, drop_and_register)
    with pytest.raises(OperationRefused, match="was stopped: another one has started"):
        seeking.seek(USING, G, Position(0), actor=ME)
    assert Operation.objects.get(action="seek").detail == "to offset 1; stopped: a drop by bob took over"
    group = ConsumerGroup.objects.get()
    assert (group.paused, group.after_seek, group.operation) == (False, "", 0)
    assert lag() == 0


@pytest.mark.servers_only
@pytest.mark.parametrize("operation", ["drop", "seek"])
def test_a_locked_delivery_is_passed_over_and_holds_nobody_up(db, monkeypatch, operation):
    """An atomic handler's transaction may last: nobody is to wait for it behind the group row."""
    offsets = log(3, "a")
    Sub(handler()).step()
    waited = []

    def sleep(seconds):
        waited.append(DeliveryState.objects.count())
        # Behind the step: the group row is free, and what was not locked is gone.
        in_thread(lambda: groups.run(USING, lambda session: groups.wait_for_claims(session, G)))
        held.set()

    held, locked = threading.Event(), threading.Event()

    def handle():
        with transaction.atomic():
            list(DeliveryState.objects.select_for_update().filter(pk=("g", "t", "a", offsets[1])))
            locked.set()
            assert held.wait(30)

    thread = threading.Thread(target=in_thread, args=(handle,))
    thread.start()
    assert locked.wait(30)
    monkeypatch.setattr(time, "sleep", sleep)
    seek_or_drop(operation)
    thread.join(30)
    assert waited
    assert set(waited) == {1}
    assert Operation.objects.get().changed == 3


@pytest.mark.servers_only
@pytest.mark.parametrize("operation", ["drop", "seek"])
def test_deliveries_that_stay_locked_are_not_waited_for_without_end(db, operation):
    offsets = log(3, "a")
    Sub(handler(), name="hung").step()

    with transaction.atomic():
        list(DeliveryState.objects.select_for_update().filter(pk=("g", "t", "a", offsets[1])))
        with pytest.raises(
            OperationRefused, match=rf"for 0.1 s \(offset {offsets[1]} in partition 'a', claimed by hung:"
        ):
            in_thread(lambda: seek_or_drop(operation, Limits(locked_wait=0.1)))
    group = ConsumerGroup.objects.get()
    assert (group.paused, bool(group.after_seek)) == (True, True)
    assert not Operation.objects.get().ended_at  # it is unfinished, and run again
    seek_or_drop(operation)
    assert Operation.objects.filter(ended_at=0).count() == 0
    assert DeliveryState.objects.count() == 0


def test_heartbeats_do_not_keep_a_drop_from_its_end(db, monkeypatch):
    """Subscribers beat without the group's lock: with very many there was always another row to delete."""
    log(2)
    Sub(handler()).step()
    real = steps.delete_all

    def beating(using, ref, delete, progress, limits):
        def one(session):
            heartbeats.beat(USING, f"another-{next(numbers)}", [G], {})
            return delete(session)

        return real(using, ref, one, progress, limits)

    numbers = itertools.count()
    monkeypatch.setattr(steps, "delete_all", beating)
    assert dropping.drop(USING, G, actor=ME)
    assert not ConsumerGroup.objects.exists()
    assert not SubscriberHeartbeat.objects.exists()


def test_the_preview_knows_what_is_settled_ahead_of_the_watermark(db):
    offsets = log(5, "a")
    sub = Sub(handler(function=lambda delivery: fail(delivery) if delivery.payload == 0 else None, max_attempts=None))
    sub.step()
    sub.work()
    sub.flush()
    assert seeking.preview(USING, G, Position(offsets[2])) == seeking.Preview(
        Position(offsets[2]), replayed=2, skipped=1
    )
    assert seeking.preview(USING, G, Position(0)).replayed == 4


def test_the_preview_counts_one_side_to_the_end_when_the_other_is_full(db):
    offsets = log(20, "ab")
    Sub(handler())
    for key, acked in (("a", 0), ("b", offsets[-1])):
        ConsumerOffset.objects.create(
            consumer_group="g", topic="t", partition_key=key, offset_acked=acked, offset_claimed=acked
        )
    found = seeking.preview(USING, G, Position(offsets[-3]), Limits(counted=3, rows=1))
    assert (found.skipped, found.replayed) == (3, 1)


def for_another_group(every):
    """Addresses messages of the log to a group that is not g, as a redrive does; returns how many are left."""
    theirs = [offset for number, offset in enumerate(offsets_of()) if number % every]
    QueueMessage.objects.filter(offset__in=theirs).update(target_group="h")
    return QueueMessage.objects.filter(topic="t", target_group="").count()


@pytest.mark.parametrize("first", [2, 100])
def test_the_preview_leaves_out_messages_for_other_groups(db, first):
    limits = Limits(read_first=first)
    log(40, "ab")
    mine = for_another_group(every=4)
    assert mine == 10
    end = seeking.position_of(USING, "latest")
    sub = Sub(handler())
    assert seeking.preview(USING, G, end, limits) == seeking.Preview(end, replayed=0, skipped=mine)
    sub.settle(rounds=100)
    assert seeking.preview(USING, G, Position(0), limits) == seeking.Preview(Position(0), replayed=mine, skipped=0)
    place = Position(offsets_of()[19])
    assert seeking.preview(USING, G, place, limits).replayed == mine - 5


@pytest.mark.parametrize("first", [2, 100])
def test_the_preview_reads_a_bounded_part_of_the_log_and_says_so(db, first):
    limits = Limits(read_first=first, read=10)
    log(400, "ab")
    for_another_group(every=1000)
    Sub(handler())
    found = seeking.preview(USING, G, seeking.position_of(USING, "latest"), limits)
    assert (found.replayed, found.skipped, found.exact) == (0, 1, False)
    limits = Limits(read_first=first, read=10, counted=1)
    assert seeking.preview(USING, G, found.position, limits).exact, "one or more is true"


# -- redrive, discard, edit ---------------------------------------------------


def test_redrive_reaches_the_group_that_failed_and_no_other(db):
    got, other = Recorder(), Recorder()
    of_other = Sub(handler(group="h", function=other))
    of_other.settle()
    letters = dead_letters(3)
    of_other.settle()
    ids = set(QueueMessage.objects.filter(topic="t").values_list("message_id", flat=True))
    assert redriving.count(USING, DeadLetterFilter("t_dlq"), most=10) == 3
    assert redriving.redrive(USING, DeadLetterFilter("t_dlq"), actor=ME) == 3
    Sub(handler(function=got)).settle()
    of_other.settle()
    assert sorted(got.payloads) == [0, 1, 2]
    assert sorted(other.payloads) == [0, 1, 2]
    assert {delivery.id for delivery in got.deliveries} == ids
    assert all(delivery.attempt == 1 for delivery in got.deliveries)
    assert offsets_of("t_dlq") == []
    assert lag("g") == lag("h") == 0
    events = DeliveryEvent.objects.filter(outcome="redriven").order_by("message_offset")
    assert [event.message_offset for event in events] == letters
    assert {event.settled_by for event in events} == {ME}
    # Each says where its letter went.
    sent = set(QueueMessage.objects.exclude(target_group="").values_list("message_id", flat=True))
    assert {event.related_id for event in events} == sent
    assert Operation.objects.get(action="redrive").changed == 3


def test_a_redriven_message_may_fail_again(db):
    dead_letters(1)
    first = QueueMessage.objects.get(topic="t")
    for _ in range(2):
        redriving.redrive(USING, DeadLetterFilter("t_dlq"), actor=ME)
        sub = Sub(handler(function=fail, max_attempts=1))
        sub.settle()
        sub.leave()
        sequence()
    letter = QueueMessage.objects.get(topic="t_dlq")
    assert (letter.original_id, letter.original_offset, letter.original_topic) == (first.message_id, first.offset, "t")


@pytest.mark.parametrize(
    ("conditions", "expected"),
    [
        ({"group": "g"}, {("g", 0), ("g", 1)}),
        ({"group": "nobody"}, set()),
        ({"error": "no 1"}, {("g", 1), ("h", 1)}),
        ({"error": "NO 1"}, set()),
        ({"group": "h", "error": "no 0"}, {("h", 0)}),
        ({"since": 0, "until": 1}, set()),
        ({"since": 1}, {("g", 0), ("g", 1), ("h", 0), ("h", 1)}),
    ],
)
def test_a_selection_of_dead_letters(db, conditions, expected):
    log(2)
    for group in "gh":
        Sub(handler("t", group, fail, max_attempts=1)).settle()
    sequence()
    chosen = [
        offset
        for page in matching_offsets(Session(USING), DeadLetterFilter("t_dlq", **conditions), size=1)
        for offset in page
    ]
    found = QueueMessage.objects.filter(offset__in=chosen)
    assert {(row.failed_group, json.loads(bytes(row.payload))) for row in found} == expected
    assert redriving.discard(USING, DeadLetterFilter("t_dlq", **conditions), actor=ME, reason="test") == len(expected)
    assert len(offsets_of("t_dlq")) == 4 - len(expected)


def test_chosen_ones_and_a_limit(db):
    letters = dead_letters(4, keys="a")
    assert redriving.redrive(USING, DeadLetterFilter("t_dlq", offsets=(letters[2], letters[0], 10**9)), actor=ME) == 2
    assert offsets_of("t_dlq") == [letters[1], letters[3]]
    assert redriving.redrive(USING, DeadLetterFilter("t_dlq"), actor=ME, limit=1) == 1
    assert offsets_of("t_dlq") == [letters[3]]
    for limit in (0, -1):
        with pytest.raises(OperationRefused, match=f"limit {limit}: must be at least 1"):
            operations.redrive("t", actor=ME, limit=limit)
    assert offsets_of("t_dlq") == [letters[3]]


def test_redrive_keeps_the_order_of_a_partition_and_its_rate(db):
    dead_letters(6, keys="a")
    steps = []
    assert redriving.redrive(USING, DeadLetterFilter("t_dlq"), actor=ME, rate=40, progress=steps.append) == 6
    got = Recorder()
    Sub(handler(function=got)).settle()
    assert got.payloads == list(range(6))
    with pytest.raises(OperationRefused, match="rate 0"):
        operations.redrive("t", actor=ME, rate=0)


def test_an_ordinary_message_is_never_taken_for_a_dead_letter(db):
    (offset,) = log(1)
    assert redriving.redrive(USING, DeadLetterFilter("t", offsets=(offset,)), actor=ME) == 0
    assert redriving.discard(USING, DeadLetterFilter("t"), actor=ME, reason="no") == 0
    with pytest.raises(OperationRefused, match="no dead letter at offset"):
        redriving.replace(USING, "t", offset, 1, actor=ME)
    assert offsets_of() == [offset]


def test_redrive_to_a_group_that_is_gone_is_refused(db):
    """Nobody would get it, and GC would take it: a silent loss."""
    dead_letters(2)
    dropping.drop(USING, G, actor=ME)
    with pytest.raises(OperationRefused, match="group 'g' of 't', which failed the message, is not registered"):
        redriving.redrive(USING, DeadLetterFilter("t_dlq"), actor=ME)
    assert len(offsets_of("t_dlq")) == 2
    assert not OutboxMessage.objects.exists()


def test_discard_wants_a_reason_and_keeps_it(db):
    letters = dead_letters(2)
    with pytest.raises(OperationRefused, match="reason"):
        redriving.discard(USING, DeadLetterFilter("t_dlq"), actor=ME, reason=" ")
    assert redriving.discard(USING, DeadLetterFilter("t_dlq"), actor=ME, reason="a test account") == 2
    assert offsets_of("t_dlq") == []
    events = DeliveryEvent.objects.filter(outcome="discarded")
    assert {(event.message_offset, event.error, event.settled_by) for event in events} == {
        (offset, "a test account", ME) for offset in letters
    }


def test_edit_and_redrive(db):
    (letter,) = dead_letters(1)
    old = QueueMessage.objects.get(topic="t")
    new_id = redriving.replace(USING, "t_dlq", letter, {"amount": 7}, actor=ME)
    got = Recorder()
    Sub(handler(function=got)).settle()
    (delivery,) = got.deliveries
    assert (delivery.payload, delivery.id, delivery.key) == ({"amount": 7}, new_id, "a")
    stored = QueueMessage.objects.get(message_id=new_id)
    assert stored.metadata["mysqlqueue.replaces"] == old.message_id
    event = DeliveryEvent.objects.get(outcome="replaced")
    assert (event.message_offset, event.related_id) == (letter, new_id)
    with pytest.raises(OperationRefused, match="no dead letter"):
        redriving.replace(USING, "t_dlq", letter, 1, actor=ME)


def test_a_corrected_payload_obeys_the_rules_of_publish(db, settings):
    (letter,) = dead_letters(1)
    settings.MYSQLQUEUE = {"MAX_PAYLOAD_BYTES": 10}
    for payload in (float("nan"), "x" * 20):
        with pytest.raises(InvalidMessage):
            redriving.replace(USING, "t_dlq", letter, payload, actor=ME)
    assert offsets_of("t_dlq") == [letter]
    redriving.replace(USING, "t_dlq", letter, b"raw", actor=ME)
    assert OutboxMessage.objects.get().metadata["content_type"] == "application/octet-stream"


@pytest.mark.servers_only
def test_two_operators_do_not_send_a_letter_twice(db):
    (letter,) = dead_letters(1)
    with transaction.atomic():
        list(QueueMessage.objects.filter(offset=letter).select_for_update())
        assert in_thread(lambda: redriving.redrive(USING, DeadLetterFilter("t_dlq"), actor="bob")) == 0
    assert redriving.redrive(USING, DeadLetterFilter("t_dlq"), actor=ME) == 1
    assert redriving.redrive(USING, DeadLetterFilter("t_dlq"), actor=ME) == 0
    assert OutboxMessage.objects.count() == 1


# -- retry now ----------------------------------------------------------------


@both_modes
@pytest.mark.parametrize("reset", [False, True])
def test_backoffs_end_at_once(db, mode, reset):
    log(3, "abc")
    got = Recorder(lambda delivery: delivery.nack(delay=3600) if delivery.attempt == 1 and not reset else None)
    if reset:
        got.action = lambda delivery: delivery.nack(delay=3600) if len(got.deliveries) <= 3 else None
    sub = Sub(handler(function=got, mode=mode))
    sub.settle()
    assert retrying.waiting(USING, G, most=2) == 2
    assert retrying.retry_now(USING, G, actor=ME, reset_attempts=reset) == 3
    resumed(sub).settle()
    assert sorted(got.attempts) == sorted(
        (number, attempt) for number in range(3) for attempt in (1, 1 if reset else 2)
    )
    assert lag() == 0
    assert Operation.objects.get().changed == 3


def test_retry_of_chosen_ones_leaves_the_others(db):
    offsets = log(3, "abc")
    got = Recorder(lambda delivery: delivery.nack(delay=3600) if delivery.attempt == 1 else None)
    sub = Sub(handler(function=got))
    sub.settle()
    assert retrying.retry_now(USING, G, actor=ME, rows=[("b", offsets[1]), ("b", 10**9)]) == 1
    resumed(sub).settle()
    assert got.attempts[3:] == [(1, 2)]


@both_modes
def test_retry_leaves_alone_what_is_being_handled(db, mode):
    log(1)
    sub = Sub(handler(mode=mode))
    sub.step()
    before = DeliveryState.objects.values().get()
    assert retrying.retry_now(USING, G, actor=ME) == 0
    assert DeliveryState.objects.values().get() == before


def test_retry_goes_through_many_with_one_due_time(db):
    log(50, "abc")
    sub = Sub(handler(function=lambda delivery: delivery.nack(delay=3600)))
    sub.settle()
    DeliveryState.objects.update(invisible_until=Session(USING).now() + 10**6)
    assert retrying.retry_now(USING, G, actor=ME, limits=Limits(rows=7)) == 50
    assert set(DeliveryState.objects.values_list("invisible_until", flat=True)) == {0}


def test_a_retry_does_not_touch_a_later_life_of_its_group(db, monkeypatch):
    log(4, "a")
    put_off = handler(function=lambda delivery: delivery.nack(delay=3600))
    Sub(put_off).settle()

    def drop_and_register():
        dropping.drop(USING, G, actor="bob")
        Sub(put_off).settle()

    frozen_before(monkeypatch, 3, drop_and_register)  # behind its first page
    with pytest.raises(OperationRefused, match="was dropped and registered again"):
        retrying.retry_now(USING, G, actor=ME, rows=[("a", offset) for offset in offsets_of()], limits=Limits(rows=2))
    assert DeliveryState.objects.filter(invisible_until__gt=0).count() == 4
    record = Operation.objects.get(action="retry")
    assert record.changed == 2
    assert record.ended_at
    assert record.detail.startswith("stopped: The group 'g' of 't' was dropped and registered again")


# -- scheduled messages -------------------------------------------------------


def test_scheduled_messages_are_listed_moved_delivered_and_cancelled(db):
    now = Session(USING).now()
    for number in range(5):
        publish("t", number, delay=1000 * (number + 1))
    publish("u", "other", delay=50)
    publish("t", "at once")
    listed = scheduled.next_scheduled(USING, limit=4)
    assert [one.topic for one in listed] == ["u", "t", "t", "t"]
    rest = scheduled.next_scheduled(USING, after=(listed[-1].deliver_at, listed[-1].outbox_id))
    assert len(rest) == 2
    of_t = scheduled.next_scheduled(USING, topic="t")
    assert len(of_t) == 5
    ids = [one.outbox_id for one in of_t]
    assert rescheduling.cancel(USING, [ids[0], ids[0], 10**9], actor=ME, reason="no") == 1
    assert rescheduling.move(USING, [ids[1]], now + 9_000_000, actor=ME) == 1
    assert rescheduling.deliver_now(USING, [ids[2], ids[3]], actor=ME) == 2
    assert rescheduling.cancel(USING, [ids[2]], actor=ME) == 0  # it has come due
    sequence()
    assert {json.loads(bytes(row.payload)) for row in QueueMessage.objects.all()} == {2, 3, "at once"}
    assert [one.outbox_id for one in scheduled.next_scheduled(USING, topic="t")] == [ids[4], ids[1]]
    assert list(Operation.objects.order_by("id").values_list("action", "changed")) == [
        ("cancel", 1),
        ("reschedule", 1),
        ("deliver now", 2),
    ]


# -- leases, subscribers ------------------------------------------------------


def test_a_lease_that_is_released_goes_to_another(db):
    log(2, "a")
    sub = Sub(handler(), batch_size=1, prefetch=1)
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


# -- recorded deliveries and rollups ------------------------------------------


def outcomes():
    return list(DeliveryEvent.objects.order_by("id").values_list("outcome", "attempt", "message_offset"))


SNOOZED = set()


def flaky(delivery):
    if delivery.payload == 0 and delivery.attempt == 1:
        raise ValueError("the first attempt")
    if delivery.payload == 1:
        delivery.reject("never")
    if delivery.payload == 2 and delivery.offset not in SNOOZED:
        SNOOZED.add(delivery.offset)
        delivery.snooze(0)


@pytest.mark.parametrize("level", ["all", "failures", "none"])
@pytest.mark.parametrize("atomic", [False, True])
@both_modes
def test_what_is_recorded(db, settings, level, atomic, mode):
    settings.MYSQLQUEUE = {"RECORD_DELIVERIES": "none", "GROUPS": {"g": {"RECORD_DELIVERIES": level}}}
    a, b, c = log(3, "abc")
    sub = Sub(handler(function=flaky, atomic=atomic, mode=mode))
    sub.settle()
    failures = {("failed", 1, a), ("dead_lettered", 1, b)}
    rest = {("acked", 2, a), ("acked", 1, c), ("snoozed", 1, c)}
    expected = {"all": failures | rest, "failures": failures, "none": set()}[level]
    found = outcomes()
    assert set(found) == expected
    assert len(found) == len(expected)
    for event in DeliveryEvent.objects.all():
        assert event.settled_by == sub.name
        assert event.settled_at >= event.delivered_at > 0
    for event in DeliveryEvent.objects.filter(outcome="failed"):
        assert "the first attempt" in event.error
    for event in DeliveryEvent.objects.filter(outcome="dead_lettered"):
        assert QueueMessage.objects.get(topic="t_dlq").message_id == event.related_id


def test_a_lost_delivery_is_recorded_with_who_had_it(db, clock):
    (offset,) = log(1)
    first = Sub(handler())
    first.step()
    clock.advance(31)
    Sub(handler()).settle()
    event = DeliveryEvent.objects.get()
    assert (event.outcome, event.message_offset, event.settled_by) == ("lost", offset, first.name)


def test_a_flush_that_is_written_twice_records_once(db, settings):
    """Of two deliveries of one message the stale one's end is nobody's."""
    settings.MYSQLQUEUE = {"RECORD_DELIVERIES": "all"}
    log(1)
    first = Sub(handler(mode="shared"))
    first.step()
    held = first.take()
    DeliveryState.objects.update(delivery_token=5)
    first.run(held)
    first.flush()
    assert outcomes() == []


def test_old_events_are_collected(db, settings, clock):
    from django_mysqlqueue.service import audit, delivery_events

    settings.MYSQLQUEUE = {"HISTORY_RETENTION": 60.0}
    dead_letters(2)
    pausing.pause(USING, G, actor=ME)
    assert delivery_events.collect(USING) == 0
    clock.advance(61)
    assert delivery_events.collect(USING) == 2
    assert audit.collect(USING) == 0
    clock.advance(audit.KEEP_SECONDS)
    assert audit.collect(USING) == 1
    assert not Operation.objects.exists()


def test_rollups_count_what_happened(db, clock):
    log(5, "abc")
    sub = Sub(handler(function=lambda delivery: fail(delivery) if delivery.payload == 2 else None, max_attempts=2))
    clock.advance(2)
    sub.settle()
    sub.poller.write_rollups()
    sub.poller.write_rollups()  # nothing is counted twice
    for grain in (rollups.MINUTE, rollups.HOUR):
        (bucket,) = rollups.since(Session(USING), grain, 0)
        assert (bucket.ref, bucket.acked, bucket.failed, bucket.dead_lettered) == (G, 4, 2, 1)
        assert sum(bucket.latency) == 4
        assert 1000 <= rollups.percentile(bucket.latency, 0.5) <= 5000
    log(1)
    sub.settle()
    sub.poller.write_rollups()
    assert sum(bucket.acked for bucket in rollups.since(Session(USING), rollups.HOUR, 0, G)) == 5
    assert rollups.since(Session(USING), rollups.HOUR, 0, GroupRef("h", "t")) == []


def test_old_rollups_are_collected(db, clock):
    log(1)
    sub = Sub(handler())
    sub.settle()
    sub.poller.write_rollups()
    clock.advance(rollups.MINUTES_KEPT + 61)
    assert rollups.collect(USING) == 1
    assert Rollup.objects.get().grain == rollups.HOUR
    clock.advance(8 * 86400)
    assert rollups.collect(USING) == 1


@pytest.mark.parametrize(
    ("latency", "share", "expected"),
    [
        ([0] * 16, 0.5, None),
        ([4] + [0] * 15, 0.5, 2.5),
        ([0, 4] + [0] * 14, 1.0, 10),
        ([1, 0, 1] + [0] * 13, 0.75, 17.5),
        ([0] * 15 + [3], 0.5, 3_600_000),
    ],
)
def test_percentiles_of_buckets(latency, share, expected):
    assert rollups.percentile(latency, share) == expected

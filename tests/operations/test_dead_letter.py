"""Dead-letter now: an operator gives up on messages that a group is retrying."""

from __future__ import annotations

import dataclasses

import pytest
from django.db import connection, transaction

from django_mysqlqueue import publish
from django_mysqlqueue.exceptions import OperationRefused
from django_mysqlqueue.models import (
    ConsumerGroup,
    ConsumerOffset,
    DeliveryEvent,
    DeliveryState,
    Operation,
    OutboxMessage,
    QueueMessage,
    SubscriberHeartbeat,
)
from django_mysqlqueue.operations import dead_lettering, pausing, redriving, seeking
from django_mysqlqueue.operations.dead_lettering import dead_letter_now
from django_mysqlqueue.operations.seeking import Position
from django_mysqlqueue.options.backoff import Backoff
from tests.app.models import Effect
from tests.support.handlers import Recorder, both_modes
from tests.support.harness import USING, Sub, handler, in_thread, lag, sequence
from tests.support.internals import ERROR_LENGTH, DeadLetterFilter, GroupRef, settling
from tests.support.scenarios import G, log, offsets_of, resumed

ME = "ada"
WAITS = Backoff(initial=3600, jitter=0)


def fail_on(*numbers):
    def act(delivery):
        if delivery.payload in numbers:
            raise ValueError(f"no {delivery.payload}")

    return act


def letters():
    """Of each dead letter: the original's offset, the group, the attempts, the error."""
    sequence()
    rows = QueueMessage.objects.filter(topic="t_dlq").order_by("original_offset")
    return list(rows.values_list("original_offset", "failed_group", "failure_count", "last_error"))


def everything():
    return [
        list(model.objects.order_by("pk").values())
        for model in (ConsumerGroup, ConsumerOffset, DeliveryState, OutboxMessage, DeliveryEvent, Operation)
    ]


def retrying_sub(mode="ordered", count=3, **options):
    """A subscriber whose first message waits out an hour of backoff; the offsets."""
    offsets = log(count, "a")
    got = Recorder(fail_on(0))
    sub = Sub(handler(function=got, mode=mode, **{"backoff": WAITS, **options}))
    sub.settle()
    return sub, got, offsets


# -- what it does -------------------------------------------------------------


@both_modes
def test_a_retrying_message_is_dead_lettered_for_its_group_alone(db, mode):
    other = Sub(handler(group="h", function=fail_on(0), backoff=WAITS))
    sub, got, offsets = retrying_sub(mode)
    other.settle()
    assert lag("g") == lag("h") == 1
    (found,) = dead_lettering.find(USING, G, offsets[:1])
    assert (found.offset, found.failed, found.held_by) == (offsets[0], 1, "")
    assert dead_letter_now(USING, G, offsets[:1], actor=ME, reason="a test order") == 1
    assert lag("g") == 0
    assert lag("h") == 1
    assert not DeliveryState.objects.filter(consumer_group="g").exists()
    assert ConsumerOffset.objects.get(consumer_group="g").offset_acked == offsets[-1]  # nobody has to move it
    ((offset, group, attempts, error),) = letters()
    assert (offset, group, attempts) == (offsets[0], "g", 1)
    assert error.startswith("Dead-lettered by ada: a test order\n\nTraceback")
    assert error.endswith("ValueError: no 0\n")
    resumed(sub).settle()
    assert got.payloads == [0, 1, 2]
    operation = Operation.objects.get()
    assert (operation.action, operation.actor, operation.changed) == ("dead_letter", ME, 1)
    assert (operation.consumer_group, operation.topic) == ("g", "t")
    assert (operation.detail, operation.reason) == (f"message {offsets[0]}", "a test order")
    assert operation.ended_at
    event = DeliveryEvent.objects.get(outcome="dead_lettered")
    assert (event.message_offset, event.attempt, event.settled_by, event.delivered_at) == (offsets[0], 1, ME, 0)
    assert event.related_id == QueueMessage.objects.get(topic="t_dlq").message_id


def test_what_is_behind_it_under_strict_order_goes_on(db):
    sub, got, offsets = retrying_sub(on_failure="block", max_attempts=None)
    assert got.payloads == [0]
    dead_letter_now(USING, G, offsets[:1], actor=ME)
    resumed(sub).settle()
    assert got.payloads == [0, 1, 2]
    assert lag() == 0


@both_modes
def test_several_at_a_time_and_what_is_due_or_was_never_tried(db, mode):
    """A snooze and a message that was given back count no attempt; one waits, one is due."""
    offsets = log(4, "a")
    words = {0: lambda d: d.nack(3600, "later"), 1: lambda d: d.nack(0, "now"), 2: lambda d: d.snooze(3600)}
    sub = Sub(handler(mode=mode, function=lambda delivery: words[delivery.payload](delivery)))
    sub.step()
    sub.work(3)
    sub.leave()  # and gives the last one back
    assert dead_letter_now(USING, G, [*offsets, offsets[0]], actor=ME) == 4
    assert [attempts for _, _, attempts, _ in letters()] == [1, 1, 0, 0]
    by_ada = "Dead-lettered by ada."
    assert [error for *_, error in letters()] == [f"{by_ada}\n\nlater", f"{by_ada}\n\nnow", by_ada, by_ada]
    assert lag() == 0
    assert not DeliveryState.objects.exists()
    assert Operation.objects.get().changed == 4


def test_in_a_paused_group_and_where_nobody_works(db):
    sub, _, offsets = retrying_sub()
    sub.leave()
    SubscriberHeartbeat.objects.all().delete()
    pausing.set_paused(USING, G, actor=ME, paused=True)
    assert dead_letter_now(USING, G, offsets[:1], actor=ME) == 1
    assert lag() == 0
    assert ConsumerGroup.objects.get().paused


def test_its_dead_letter_can_be_redriven(db):
    sub, got, offsets = retrying_sub()
    dead_letter_now(USING, G, offsets[:1], actor=ME)
    sequence()
    got.action = None
    assert redriving.redrive_all(USING, DeadLetterFilter("t_dlq"), actor=ME) == 1
    resumed(sub).settle()
    assert got.attempts[-1] == (0, 1)
    assert lag() == 0


# -- who holds it -------------------------------------------------------------


@both_modes
@pytest.mark.parametrize("where", ["in its handler", "waiting for a thread"])
def test_what_a_live_subscriber_holds_is_refused(db, mode, where):
    (offset,) = log(1, "a")
    sub = Sub(handler(mode=mode))
    sub.step()
    held = sub.take() if where == "in its handler" else None
    before = everything()
    with pytest.raises(OperationRefused, match=f"message {offset} is in flight at the live subscriber '{sub.name}'"):
        dead_letter_now(USING, G, [offset], actor=ME)
    assert everything() == before
    sub.run(held) if held else sub.work()
    sub.flush()
    assert lag() == 0
    assert letters() == []


@pytest.mark.promise("Interrupted operations")
@both_modes
@pytest.mark.parametrize("atomic", [False, True])
@pytest.mark.parametrize("word", ["ack", "nack", "reject"])
def test_what_a_lost_subscriber_held_and_says_later(db, mode, atomic, word):
    """Its heartbeat is over; it was only frozen, and its handler ends after all."""

    def end(delivery):
        Effect.objects.create(name="late")
        getattr(delivery, word)(*(["late"] if word == "reject" else []))

    (offset,) = log(1, "a")
    frozen = Sub(handler(mode=mode, atomic=atomic, function=end))
    frozen.step()
    held = frozen.take()
    SubscriberHeartbeat.objects.update(heartbeat_at=1)
    (found,) = dead_lettering.find(USING, G, [offset])
    assert found.held_by == frozen.name
    dead_letter_now(USING, G, [offset], actor=ME)
    frozen.run(held)
    frozen.flush()
    assert Effect.objects.count() == (0 if atomic else 1)
    assert [error for *_, error in letters()] == ["Dead-lettered by ada."]
    assert lag() == 0
    assert not DeliveryState.objects.exists()


@both_modes
def test_a_suspect_is_never_started_again(db, mode, clock):
    got = Recorder()
    (offset,) = log(1, "a")
    lost = Sub(handler(mode=mode))
    lost.step()
    assert lost.take() is not None
    clock.advance(3600)
    dead_letter_now(USING, G, [offset], actor=ME)
    Sub(handler(mode=mode, function=got)).settle()
    assert got.payloads == []
    assert len(letters()) == 1


def refusal(offsets, ref=G):
    before = everything()
    with pytest.raises(OperationRefused) as refused:
        dead_letter_now(USING, ref, offsets, actor=ME)
    if ref.topic == "t":
        with pytest.raises(OperationRefused) as previewed:
            dead_lettering.find(USING, ref, offsets)
        assert str(previewed.value) == str(refused.value)
    assert everything() == before
    return str(refused.value)


# -- refusals -----------------------------------------------------------------


def test_each_refusal_says_which_message_and_why(db):
    _, _, offsets = retrying_sub(max_attempts=None)
    publish("u", 1, key="a")
    sequence()
    (elsewhere,) = offsets_of("u")
    prefix = "Nothing was dead-lettered for g/t: message "
    assert refusal([10**12]) == f"{prefix}{10**12} is not in the log of 't'."
    assert refusal([elsewhere]) == f"{prefix}{elsewhere} is not in the log of 't'."
    assert refusal([offsets[1]]) == f"{prefix}{offsets[1]} is already settled."  # acked ahead of the watermark
    pausing.set_paused(USING, G, actor=ME, paused=True)
    publish("t", 7, key="a")
    publish("t", 7, key="new")
    sequence()
    for offset in offsets_of()[-2:]:
        assert refusal([offset]) == f"{prefix}{offset} has not been claimed yet (use queueseek to skip it)."
    QueueMessage.objects.filter(offset=offsets[2]).update(target_group="h")
    assert refusal([offsets[2]]) == f"{prefix}{offsets[2]} is only for the group 'h'."
    # One that qualifies does not go without the others.
    text = refusal([offsets[0], offsets[1], 10**12])
    assert text == f"{prefix}{offsets[1]} is already settled; message {10**12} is not in the log of 't'."
    assert refusal(range(10**12, 10**12 + 8)).endswith("; and 3 more.")
    assert refusal([]) == "Pass at least one offset."
    assert refusal(range(1, 502)) == "501 offsets were passed, but the maximum is 500."
    assert refusal(offsets[:1], GroupRef("x", "t")) == "There is no group 'x' on topic 't'."


def test_a_second_time_it_is_settled_already(db):
    _, _, offsets = retrying_sub()
    dead_letter_now(USING, G, offsets[:1], actor=ME)
    assert refusal(offsets[:1]).endswith(f"message {offsets[0]} is already settled.")
    assert len(letters()) == 1


def test_there_is_no_dlq_of_a_dlq(db):
    _, _, offsets = retrying_sub()
    dead_letter_now(USING, G, offsets[:1], actor=ME)
    alarm = Sub(handler("t_dlq", "alarm", fail_on(0), backoff=WAITS))
    alarm.settle()
    (letter,) = offsets_of("t_dlq")
    assert refusal([letter], GroupRef("alarm", "t_dlq")).startswith("'t_dlq' is a DLQ topic and has no DLQ of its own")
    assert lag("alarm", "t_dlq") == 1


def test_a_seek_that_did_not_finish_comes_first(db):
    _, _, offsets = retrying_sub()
    seeking.run(USING, lambda session: seeking._begin(session, G, Position(0), "", actor=ME))
    before = everything()
    with pytest.raises(OperationRefused, match=r"A seek .* has not finished"):
        dead_letter_now(USING, G, offsets[:1], actor=ME)
    assert everything() == before


# -- beside others ------------------------------------------------------------


@pytest.mark.servers_only
def test_a_row_that_is_being_settled_is_refused_and_not_waited_for(db):
    """A lost subscriber's handler has acked in its transaction, which may still commit."""
    (offset,) = log(1, "a")
    frozen = Sub(handler())
    frozen.step()
    held = frozen.take()
    SubscriberHeartbeat.objects.update(heartbeat_at=1)
    with transaction.atomic():
        settling.ack_here(USING, held.claimed)
        with pytest.raises(OperationRefused, match=f"Being settled right now: message {offset}"):
            in_thread(lambda: dead_letter_now(USING, G, [offset], actor=ME))
    assert letters() == []
    assert not Operation.objects.exists()
    with pytest.raises(OperationRefused, match="is already settled"):
        dead_letter_now(USING, G, [offset], actor=ME)


@pytest.mark.servers_only
def test_an_offsets_row_that_a_flush_holds_is_not_waited_for(db):
    """The message is settled; whoever holds the row, or comes next, moves the watermark."""
    sub, _, offsets = retrying_sub()
    with transaction.atomic():
        list(ConsumerOffset.objects.select_for_update())
        assert in_thread(lambda: dead_letter_now(USING, G, offsets[:1], actor=ME)) == 1
    assert ConsumerOffset.objects.get().offset_acked < offsets[0]
    assert lag() == 0
    resumed(sub).settle()
    assert ConsumerOffset.objects.get().offset_acked == offsets[-1]
    assert not DeliveryState.objects.exists()


@pytest.mark.servers_only
@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_in_a_request_it_commits_by_itself_and_holds_no_lock(db, end):
    sub, _, offsets = retrying_sub()
    outer = connection.connection
    with transaction.atomic():
        Effect.objects.create(name="request")
        dead_letter_now(USING, G, offsets[:1], actor=ME)
        in_thread(lambda: resumed(sub).settle())
        if end == "rollback":
            transaction.set_rollback(True)
    assert connection.connection is outer
    assert Operation.objects.count() == 1
    assert len(letters()) == 1


def test_who_and_why_remain_of_an_error_that_is_too_long_with_them(db):
    offsets = log(1, "a")
    Sub(handler(function=lambda delivery: delivery.nack(3600, "x" * 99_999 + "end"))).settle()
    dead_letter_now(USING, G, offsets, actor=ME, reason="a test order")
    ((_offset, _group, _attempts, error),) = letters()
    assert len(error) == ERROR_LENGTH
    assert error.startswith("Dead-lettered by ada: a test order\n\nx")
    assert error.endswith("xend")


@both_modes
def test_those_that_no_longer_qualify_can_be_ignored(db, mode):
    """One is settled, one is claimed at that moment; if none is left, the operation is refused."""
    _sub, _, offsets = retrying_sub(mode)
    with pytest.raises(OperationRefused, match="is already settled"):
        dead_letter_now(USING, G, offsets, actor=ME)
    assert [one.offset for one in dead_lettering.find(USING, G, offsets, missing_ok=True)] == offsets[:1]
    assert dead_letter_now(USING, G, offsets, actor=ME, missing_ok=True) == 1
    assert [offset for offset, *_ in letters()] == offsets[:1]
    assert (Operation.objects.get().detail, Operation.objects.get().changed) == (f"message {offsets[0]}", 1)
    with pytest.raises(OperationRefused, match="Nothing was dead-lettered"):
        dead_letter_now(USING, G, offsets, actor=ME, missing_ok=True)


def test_what_is_claimed_between_the_read_and_the_write_can_be_ignored(db, monkeypatch):
    offsets = log(2, "a")
    Sub(handler(function=lambda delivery: delivery.nack(3600, "later"))).settle()
    find = dead_lettering._find

    def outdated(*given, **how):
        found = find(*given, **how)
        return [dataclasses.replace(found[0], token=4711), *found[1:]]

    monkeypatch.setattr(dead_lettering, "_find", outdated)
    with pytest.raises(OperationRefused, match="Being settled right now"):
        dead_letter_now(USING, G, offsets, actor=ME)
    with pytest.raises(OperationRefused, match="Being settled right now"):
        dead_letter_now(USING, G, offsets[:1], actor=ME, missing_ok=True)
    assert dead_letter_now(USING, G, offsets, actor=ME, missing_ok=True) == 1
    assert [offset for offset, *_ in letters()] == offsets[1:]
    assert Operation.objects.get().changed == 1

"""Fencing: a subscriber that has lost a lease changes nothing."""

from __future__ import annotations

import pytest
from django.db import transaction

from django_mysqlqueue import Message, StaleDelivery, publish, publish_many
from django_mysqlqueue.models import DeliveryState
from tests.support.handlers import Recorder
from tests.support.harness import USING, Sub, handler, in_thread, lag, sequence
from tests.support.internals import Action, GroupRef, Settlement, settling, watermarks

REF = GroupRef("g", "t")


def steal(clock):
    """Publishes one message, lets a first subscriber start it and a second one take it over."""
    publish("t", 1, key="k")
    first = Sub(handler())
    first.step()
    held = first.take()
    clock.advance(31)
    second = Sub(handler())
    second.step()
    return first, held, second


@pytest.mark.promise("One owner")
@pytest.mark.parametrize("kind", [Action.ACK, Action.NACK, Action.SNOOZE, Action.REJECT, Action.RELEASE])
def test_a_stale_subscriber_changes_nothing(db, clock, kind):
    _, held, second = steal(clock)
    before = DeliveryState.objects.values().get()
    flushed = settling.flush(USING, REF, [Settlement(held.claimed, kind, 1000, "late")], max_attempts=1, shared=False)
    assert [outcome.action for outcome in flushed.stale] == [kind]
    assert flushed.dead == []
    assert DeliveryState.objects.values().get() == before
    with pytest.raises(StaleDelivery):
        settling.extend(USING, held.claimed, milliseconds=1000, shared=True)
    with pytest.raises(StaleDelivery):
        settling.extend(USING, held.claimed, milliseconds=1000, shared=False)
    assert settling.record_start(USING, held.claimed) is False
    assert lag() == 1
    second.settle()
    assert lag() == 0


@pytest.mark.promise("One owner")
def test_a_late_nack_does_not_bring_a_settled_message_back(db, clock):
    _, held, second = steal(clock)
    second.settle()
    flushed = settling.flush(
        USING, REF, [Settlement(held.claimed, Action.NACK, 0, "late")], max_attempts=5, shared=False
    )
    assert len(flushed.stale) == 1
    assert not DeliveryState.objects.exists()


@pytest.mark.promise("One owner")
def test_a_stale_subscriber_cannot_claim(db, clock):
    publish_many("t", (Message(number, key="k") for number in range(10)))
    first = Sub(handler(), claim_size=2, prefetch=2)
    first.step()
    clock.advance(31)
    second = Sub(handler(), claim_size=2, prefetch=2)
    second.step()
    assert second.owned() == {"k"}
    tokens = set(DeliveryState.objects.values_list("delivery_token", flat=True))
    first.inbox.drop(REF, "k")
    first.step(tick=False)  # it believes that it owns the partition
    assert first.owned() == set()
    assert set(DeliveryState.objects.values_list("delivery_token", flat=True)) == tokens


@pytest.mark.promise("One owner")
def test_two_processes_with_one_name_are_two(db):
    from django_mysqlqueue.runtime.process.subscriber import incarnation

    assert incarnation("same") != incarnation("same")
    assert len(incarnation("x" * 500)) <= 190


@pytest.mark.promise("Exactly-once effects", "One owner")
def test_atomic_writes_of_a_stale_delivery_roll_back(db, clock):
    from tests.app.models import Effect

    first_ran = Recorder(lambda delivery: Effect.objects.create(name="first"))
    publish("t", 1, key="k")
    first = Sub(handler(function=first_ran, atomic=True))
    first.step()
    held = first.take()
    clock.advance(31)
    second = Sub(handler(function=lambda delivery: Effect.objects.create(name="second"), atomic=True))
    second.settle()
    first.run(held)
    assert len(first_ran.deliveries) == 1
    assert list(Effect.objects.values_list("name", flat=True)) == ["second"]


def test_ack_inside_the_handlers_own_transaction_is_part_of_it(db):
    from tests.app.models import Effect

    def work(delivery):
        try:
            with transaction.atomic():
                Effect.objects.create(name="rolled back")
                delivery.ack()
                raise ZeroDivisionError
        except ZeroDivisionError:
            pass
        assert DeliveryState.objects.get().acked is False
        with transaction.atomic():
            Effect.objects.create(name="kept")
            delivery.ack()
        assert DeliveryState.objects.get().acked is True

    publish("t", 1, key="k")
    Sub(handler(function=work)).settle()
    assert list(Effect.objects.values_list("name", flat=True)) == ["kept"]
    assert lag() == 0


@pytest.mark.promise("Exactly-once effects")
@pytest.mark.parametrize("verdict", ["nack", "snooze", "raise", "reject", "ack", "return"])
def test_atomic_handler_commits_exactly_when_it_settles(db, verdict):
    from tests.app.models import Effect

    def work(delivery):
        Effect.objects.create(name=verdict)
        if verdict == "raise":
            raise ValueError
        if verdict != "return":
            getattr(delivery, verdict)(
                **{"nack": {"delay": 99}, "snooze": {"delay": 99}, "reject": {"reason": "r"}}.get(verdict, {})
            )

    publish("t", 1, key="k")
    sub = Sub(handler(function=work, atomic=True, max_attempts=1))
    sub.step()
    sub.work()
    sub.flush()
    settles = verdict in ("reject", "ack", "return")
    assert Effect.objects.exists() is settles
    sequence()
    dead = verdict in ("reject", "raise")  # max_attempts is 1
    from django_mysqlqueue.models import QueueMessage

    assert QueueMessage.objects.filter(topic="t_dlq").exists() is (dead or verdict == "nack")


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

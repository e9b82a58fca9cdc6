"""A crash between two statements of a transaction, or between two transactions."""

from __future__ import annotations

import pytest
from django.db import connection

from django_mysqlqueue import Message, publish, publish_many
from django_mysqlqueue.models import DeliveryState, QueueMessage
from tests.support.crash_points import crash_points
from tests.support.handlers import Recorder
from tests.support.harness import USING, Sub, handler, lag, sequence
from tests.support.internals import Action, GroupRef, Settlement, settling

REF = GroupRef("g", "t")


@pytest.mark.promise("Crashes")
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


@pytest.mark.promise("Dead letters")
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

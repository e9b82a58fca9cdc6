"""Redrive, discard and edit."""

from __future__ import annotations

import dataclasses
import json

import pytest
from django.db import transaction

from django_mysqlqueue import operations
from django_mysqlqueue.exceptions import InvalidMessage, OperationRefused
from django_mysqlqueue.models import DeliveryEvent, Operation, OutboxMessage, QueueMessage
from django_mysqlqueue.operations import dropping, redriving
from tests.support.handlers import Recorder, fail
from tests.support.harness import USING, Sub, handler, in_thread, lag, sequence
from tests.support.internals import DeadLetterFilter, Session, matching_offsets
from tests.support.scenarios import G, dead_letters, log, offsets_of

ME = "ada"


def test_redrive_reaches_the_group_that_failed_and_no_other(db):
    got, other = Recorder(), Recorder()
    of_other = Sub(handler(group="h", function=other))
    of_other.settle()
    letters = dead_letters(3)
    of_other.settle()
    ids = set(QueueMessage.objects.filter(topic="t").values_list("message_id", flat=True))
    assert redriving.count(USING, DeadLetterFilter("t_dlq"), most=10) == 3
    assert redriving.redrive_all(USING, DeadLetterFilter("t_dlq"), actor=ME) == 3
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
        redriving.redrive_all(USING, DeadLetterFilter("t_dlq"), actor=ME)
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
    assert redriving.discard_all(USING, DeadLetterFilter("t_dlq", **conditions), actor=ME, reason="test") == len(
        expected
    )
    assert len(offsets_of("t_dlq")) == 4 - len(expected)


def test_chosen_ones_and_a_limit(db):
    letters = dead_letters(4, keys="a")
    assert (
        redriving.redrive_all(USING, DeadLetterFilter("t_dlq", offsets=(letters[2], letters[0], 10**9)), actor=ME) == 2
    )
    assert offsets_of("t_dlq") == [letters[1], letters[3]]
    assert redriving.redrive_all(USING, DeadLetterFilter("t_dlq"), actor=ME, limit=1) == 1
    assert offsets_of("t_dlq") == [letters[3]]
    for limit in (0, -1):
        with pytest.raises(OperationRefused, match=f"limit {limit}: must be an integer of at least 1"):
            operations.redrive("t", actor=ME, limit=limit)
    assert offsets_of("t_dlq") == [letters[3]]


def test_redrive_keeps_the_order_of_a_partition_and_its_rate(db):
    dead_letters(6, keys="a")
    steps = []
    assert redriving.redrive_all(USING, DeadLetterFilter("t_dlq"), actor=ME, rate=40, progress=steps.append) == 6
    got = Recorder()
    Sub(handler(function=got)).settle()
    assert got.payloads == list(range(6))
    with pytest.raises(OperationRefused, match="rate 0"):
        operations.redrive("t", actor=ME, rate=0)


@pytest.mark.parametrize("how", [{}, {"rate": 100}])
def test_a_transaction_redrives_a_limited_number(db, monkeypatch, how):
    dead_letters(5, keys="a")
    monkeypatch.setattr(redriving, "LIMITS", dataclasses.replace(redriving.LIMITS, dead_letters=2))
    steps = []
    assert redriving.redrive_all(USING, DeadLetterFilter("t_dlq"), actor=ME, progress=steps.append, **how) == 5
    assert steps == [2, 2, 1]


def test_an_ordinary_message_is_never_taken_for_a_dead_letter(db):
    (offset,) = log(1)
    assert redriving.redrive_all(USING, DeadLetterFilter("t", offsets=(offset,)), actor=ME) == 0
    assert redriving.discard_all(USING, DeadLetterFilter("t"), actor=ME, reason="no") == 0
    with pytest.raises(OperationRefused, match="no dead letter at offset"):
        redriving.replace(USING, "t", offset, 1, actor=ME)
    assert offsets_of() == [offset]


def test_redrive_to_a_group_that_is_gone_is_refused(db):
    """Nobody would get it, and GC would take it: a silent loss."""
    dead_letters(2)
    dropping.drop(USING, G, actor=ME)
    with pytest.raises(
        OperationRefused, match="group 'g' on topic 't', which failed the message, is no longer registered"
    ):
        redriving.redrive_all(USING, DeadLetterFilter("t_dlq"), actor=ME)
    assert len(offsets_of("t_dlq")) == 2
    assert not OutboxMessage.objects.exists()


def test_discard_wants_a_reason_and_keeps_it(db):
    letters = dead_letters(2)
    with pytest.raises(OperationRefused, match="reason"):
        redriving.discard_all(USING, DeadLetterFilter("t_dlq"), actor=ME, reason=" ")
    assert redriving.discard_all(USING, DeadLetterFilter("t_dlq"), actor=ME, reason="a test account") == 2
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
        assert in_thread(lambda: redriving.redrive_all(USING, DeadLetterFilter("t_dlq"), actor="bob")) == 0
    assert redriving.redrive_all(USING, DeadLetterFilter("t_dlq"), actor=ME) == 1
    assert redriving.redrive_all(USING, DeadLetterFilter("t_dlq"), actor=ME) == 0
    assert OutboxMessage.objects.count() == 1

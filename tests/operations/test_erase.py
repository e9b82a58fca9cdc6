"""``erase``: afterwards no row has the key or its payloads, except for those that the summary names."""

from __future__ import annotations

import json

import pytest
from django.db import connection

from django_mysqlqueue import Message, operations, publish, publish_many
from django_mysqlqueue.exceptions import OperationRefused
from django_mysqlqueue.models import ConsumerOffset, DeliveryEvent, DeliveryState, Operation, QueueMessage, Schedule
from django_mysqlqueue.operations.limits import LIMITS
from tests.support import job_worlds
from tests.support.erased import KEY, OTHER, SECRET, everywhere, fail, others, tables_with
from tests.support.harness import Sub, handler, lag, sequence

pytestmark = pytest.mark.promise("Erasure")


class Killed(BaseException):
    """The process ends here."""


def erase(topic: str = "t", **options):
    return operations.erase(topic, KEY, actor="ada", **options)


@pytest.fixture(params=["keys", "hashed"])
def partitions(request, settings, db):
    settings.MYSQLQUEUE = {"RECORD_DELIVERIES": "all"}
    if request.param == "hashed":
        settings.MYSQLQUEUE |= {"TOPICS": {"t": {"PARTITIONS": 2}}}
    return request.param


def test_nothing_of_a_key_is_left_and_everything_of_others(partitions):
    everywhere()
    found = tables_with(KEY, SECRET)
    assert {"QueueMessage", "OutboxMessage", "QuarantinedMessage", "DeliveryEvent", "DeliveryState", "Slots"} <= found
    before = others()
    preview = erase(dry_run=True)
    assert others() == before
    result = erase()
    assert preview.planned == result.changed > 10
    assert tables_with(KEY, SECRET) == set(), result.summary
    assert len(result.summary) == 1, result.summary
    assert others() == before
    assert erase().changed == 0
    assert Operation.objects.filter(action="erase").values_list("topic", "changed")[0] == ("t", result.changed)


def test_partitions_of_another_number_are_searched(db, settings):
    for number in (7, 3, None):
        settings.MYSQLQUEUE = {} if number is None else {"TOPICS": {"t": {"PARTITIONS": number}}}
        publish("t", SECRET, key=KEY)
        publish("t", "harmless", key=OTHER)
        sequence()
    assert erase().changed == 3
    assert tables_with(KEY, SECRET) == set()
    assert QueueMessage.objects.count() == 3


def test_groups_go_on(partitions):
    everywhere()
    erase()
    publish("t", "new", key=KEY)
    sub = Sub(
        handler(group="reads"),
        handler(group="fails", max_attempts=1),
        handler(group="waits", mode="shared"),
    )
    sub.settle()
    assert lag("reads") == lag("fails") == 0
    assert not DeliveryState.objects.filter(consumer_group__in=("reads", "fails")).exists()
    for offsets in ConsumerOffset.objects.filter(consumer_group__in=("reads", "fails")):
        assert offsets.offset_acked == offsets.offset_claimed


@pytest.mark.parametrize("mode", ["ordered", "shared"])
def test_what_is_in_flight_ends_and_is_named(db, mode):
    publish_many("t", (Message(SECRET, key=KEY) for _ in range(2)))
    sub = Sub(handler(function=fail, mode=mode, max_attempts=1))
    held = sub.step().take()
    result = erase()
    assert not QueueMessage.objects.exists()
    assert "which subscribers hold" in result.summary[1]
    sub.run(held)
    sub.settle()
    sequence()
    assert not QueueMessage.objects.exists(), "it is dead-lettered without a copy"
    assert lag() == 0
    sub.leave()
    again = erase()
    assert tables_with(KEY, SECRET) == set(), again.summary
    assert len(again.summary) == 1


def test_what_is_left_is_named(db):
    publish("t", SECRET, key=KEY)
    publish("t", SECRET, key=KEY)
    sequence()
    sub = Sub(handler(function=fail, max_attempts=1))
    sub.settle()
    sub.leave()
    sequence()
    operations.redrive("t", key=KEY, limit=1, actor="ada")
    Schedule.objects.create(name="hers", definition=json.dumps({"topic": "t", "key": KEY}))
    operations.settings("g", "t", {"rate_per_key": {KEY: "5/s"}}, actor="ada")
    preview, result = erase(dry_run=True), erase()
    assert tables_with(KEY) == {"Operation", "Schedule", "ConsumerGroup"}
    for text in ("audit log", "Recurring schedules that contain the key: hers", "options contain the key: g on t"):
        assert any(text in line for line in result.summary), result.summary
        assert any(text in line for line in preview.summary)
    assert tables_with(SECRET) == set()


def test_what_gc_has_deleted_from_hashed_partitions_is_named(db, settings):
    settings.MYSQLQUEUE = {"RECORD_DELIVERIES": "all", "TOPICS": {"t": {"PARTITIONS": 2}}}
    publish("t", SECRET, key=KEY)
    Sub(handler()).settle()
    QueueMessage.objects.all().delete()
    result = erase()
    assert DeliveryEvent.objects.count() == 1
    assert "in partitions to which keys are hashed: 1" in result.summary[1]


def test_it_can_be_interrupted_at_every_statement(partitions):
    everywhere()
    before, statement = others(), 0
    while True:
        left = statement

        def kill(execute, sql, params, many, context):
            nonlocal left
            if sql.startswith(("INSERT", "UPDATE", "DELETE")):
                left -= 1
                if left < 0:
                    raise Killed
            return execute(sql, params, many, context)

        try:
            with connection.execute_wrapper(kill):
                erase()
            break
        except Killed:
            statement += 1
        assert others() == before
    assert statement > 7
    assert tables_with(KEY, SECRET) == set()
    assert others() == before


def test_in_small_steps(partitions, monkeypatch):
    monkeypatch.setattr("django_mysqlqueue.operations.erasing.LIMITS", type(LIMITS)(rows=2))
    monkeypatch.setattr("django_mysqlqueue.operations.erasing.READ", 3)
    everywhere()
    before, steps = others(), []
    result = erase(progress=steps.append)
    assert sum(steps) == result.changed
    assert max(steps) == 2
    assert tables_with(KEY, SECRET) == set()
    assert others() == before


@pytest.mark.any_engine
@pytest.mark.parametrize(
    ("topic", "key", "text"),
    [("t", "", "must not be empty"), ("t", "__p:1", "reserved"), ("jobs.default", "x", "queue of jobs")],
)
def test_refusals(db, settings, topic, key, text):
    settings.TASKS = job_worlds.TASKS
    with pytest.raises(OperationRefused, match=text):
        operations.erase(topic, key, actor="ada")

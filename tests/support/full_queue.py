"""A queue with rows in every table, and in every table of a group for each of its groups."""

from __future__ import annotations

import dataclasses
from datetime import timedelta

from django.db.models import Model

from django_mysqlqueue import Message, operations, publish, publish_many
from django_mysqlqueue.models import (
    CoalesceKey,
    CollectedTopic,
    LogMark,
    PartitionLease,
    Reader,
    RelayPosition,
    RelayWatermark,
    Schedule,
    SubscriberHeartbeat,
)
from django_mysqlqueue.options.backoff import Backoff
from django_mysqlqueue.options.delivery_limits import Rate
from django_mysqlqueue.tasks import call, enqueue_chain
from tests.app import jobs
from tests.conftest import QUEUE_MODELS
from tests.support import job_worlds, schedule_worlds
from tests.support.factories import QuarantinedMessageFactory
from tests.support.harness import USING, Sub, handler, sequence
from tests.support.internals import Delivery, GroupRef, Handler, groups, registry, schedules

ORDERED, SHARED, JOBS = GroupRef("g", "t"), GroupRef("s", "t"), job_worlds.JOBS
REFS = (ORDERED, SHARED, JOBS)
HOUR = Backoff(initial=3600, jitter=0)
BUSY = {"rate": Rate(5000, "s"), "rate_per_key": Rate(500, "s"), "max_in_flight": 90, "backoff": HOUR}
"""Limits that leave slots, and failures that wait."""


def handlers() -> list[Handler]:
    """One of each group. A message of the topic is handled as its payload says."""
    return [
        handler(ORDERED.topic, ORDERED.group, _handle, **BUSY),
        handler(SHARED.topic, SHARED.group, _handle, mode="shared", **BUSY),
        dataclasses.replace(registry.handlers()[JOBS], rate=BUSY["rate"]),
    ]


def _handle(delivery: Delivery) -> None:
    if delivery.payload == "dead":
        delivery.reject("no")
    elif delivery.payload == "fail":
        raise ValueError("boom")


@job_worlds.configured()
def fill() -> None:
    """Fills the tables. Each group has messages in every state; its subscriber was lost with some in flight."""
    # The groups begin with the log.
    sub = Sub(*handlers(), name="lost", threads=50)
    for number, payload in enumerate(("dead", "dead", "fail", "fail", "fine", "held", "held")):
        key = f"k{number}"
        publish("t", payload, key=key, id=f"{payload} {number}", coalesce="c", metadata={"n": number})
        publish("t", "later", key=key, id=f"later {number}", coalesce="d", delay=timedelta(hours=1), max_delay=7200)
    publish_many("t", [Message("fine", key="k4") for _ in range(3)])
    enqueue_chain(call(jobs.fail), call(jobs.add, 1))
    jobs.alone.using(run_after=timedelta(hours=1)).enqueue(1)
    jobs.alone.enqueue(2)
    for _ in range(2):
        jobs.fail_slowly.enqueue()
    job_worlds.scheduled("scheduled job")
    sequence()
    sub.settle()
    sequence()
    publish_many("t", [Message("held", key=f"k{number}", coalesce="c") for number in range(20)])
    jobs.add.enqueue(1)
    sub.step()
    sub.poller.write_rollups()
    publish("t", "new", key="k1")
    jobs.alone.enqueue(3)
    publish("old", 1)
    sequence()
    SubscriberHeartbeat.objects.update(heartbeat_at=1)
    for ref in REFS:
        operations.pause(*ref, actor="test")
        operations.resume(*ref, actor="test")
        groups.register_options(USING, ref, "limits", {"rate": "5000/s"}, actor="test")
    for name, definition in (
        ("task", schedule_worlds.of_task(overlap="skip")),
        ("topic", schedule_worlds.of_topic()),
        ("paused", schedule_worlds.of_topic()),
        ("gone", schedule_worlds.of_topic()),
    ):
        schedule_worlds.registered(definition, age=70, name=name)
        schedules.tick(USING, name)
    operations.pause_recurring("paused", actor="test")
    Schedule.objects.filter(name="gone").update(seen_at=0)
    CollectedTopic.objects.create(topic="old", collected_offset=1, published_at=1)
    LogMark.objects.create(marked_offset=1, mark=1)
    RelayPosition.objects.create(source_log="0" * 32, target="queue", source=USING, relayed_offset=1)
    RelayWatermark.objects.create(target="elsewhere", relayed_offset=10**9, read_offset=10**9)
    for number in (1, 2, 3):
        QuarantinedMessageFactory(pk=number)
    for name in ("archive", "lake"):
        Reader.objects.create(name=name, read_offset=2)
    _complete()


def _complete() -> None:
    """Adds what only an earlier life of a group leaves, and requires that nothing is missing."""
    for ref in REFS:
        of_group = {"consumer_group": ref.group, "topic": ref.topic, "partition_key": "gone"}
        # From when it had the other mode, or, of jobs, from plain SQL.
        CoalesceKey.objects.create(**of_group, coalesce_key="gone", message_offset=1)
        PartitionLease.objects.create(**of_group, leased_by="gone")
    missing = [model.__name__ for model in QUEUE_MODELS if not model._default_manager.exists()]
    for model in QUEUE_MODELS:
        if {"consumer_group", "topic"} <= {field.name for field in model._meta.fields}:
            missing += [f"{model.__name__} of {ref}" for ref in REFS if not _has_rows(model, ref)]
    assert not missing, f"a queue with rows in every table has none of {', '.join(missing)}"


def _has_rows(model: type[Model], ref: GroupRef) -> bool:
    return model._default_manager.filter(consumer_group=ref.group, topic=ref.topic).exists()

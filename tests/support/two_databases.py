"""A queue in two databases: the same topics, groups and offsets in both, with other keys, ids and subscribers."""

from __future__ import annotations

from django_mysqlqueue import Message, publish, publish_many
from django_mysqlqueue.models import (
    ConsumerGroup,
    DeliveryState,
    OutboxMessage,
    QuarantinedMessage,
    QueueMessage,
    Reader,
    Schedule,
    SubscriberHeartbeat,
)
from django_mysqlqueue.options.backoff import Backoff
from tests.conftest import QUEUE_MODELS
from tests.support import schedule_worlds
from tests.support.harness import Sub, handler
from tests.support.internals import NewResult, Session, job_rows, schedules, sequencing

DEFAULT, QUEUE = "default", "queue"
ALIASES = (DEFAULT, QUEUE)
SETTINGS = {"TOPICS": {"orders": {"DATABASE": QUEUE}}}
LATER = "2100-01-01T00:00:00"


def sequence(alias):
    while (found := sequencing.sequence(alias)).moved or found.more or found.busy:
        pass


def _handle(delivery):
    if delivery.payload.endswith(" 0"):
        delivery.reject("broken")
    else:
        delivery.nack(600, delivery.payload)


def fill(alias, *, topic="orders", group="g"):
    """A dead letter, a failed, an in-flight and a scheduled message, a subscriber that was lost, and a schedule.

    Whatever a page shows of it contains the alias and a dot: keys, ids and the subscriber's name.
    """
    keys = (f"{alias}.{key}" for key in ("a", "b", "c", "c"))
    publish_many(topic, [Message(f"{alias}. {n}", key=key) for n, key in enumerate(keys)], using=alias)
    publish(topic, f"{alias}. later", id=f"{alias}.later", key=f"{alias}.k", delay=600, using=alias)
    sequence(alias)
    job_rows.insert(
        Session(alias), [NewResult(f"{alias}.job", "default", topic, f"{alias}.task", "{}", 0, 0, 1)], keep="id"
    )
    sub = Sub(
        handler(topic, group, _handle, backoff=Backoff(initial=3600, jitter=0)), name=f"{alias}.{topic}", using=alias
    ).step()
    sub.work(2)
    sub.flush()
    sub.poller.write_rollups()
    sequence(alias)
    SubscriberHeartbeat.objects.using(alias).filter(consumer_group=group, topic=topic).update(heartbeat_at=1)
    schedules.register(alias, {f"{alias}.{topic}.s": schedule_worlds.of_topic(topic)})
    return sub


def offset(alias, topic="orders"):
    """The offset of a message: of the dead letter if the topic is a DLQ, else of one that has failed."""
    if topic.endswith("_dlq"):
        return QueueMessage.objects.using(alias).get(topic=topic).offset
    states = DeliveryState.objects.using(alias).filter(topic=topic, delivered_by="", acked=False)
    return states.order_by("message_offset")[0].message_offset


def prepare(alias, name):
    """Makes an operation possible, and returns the values of its form."""
    groups = ConsumerGroup.objects.using(alias).filter(topic="orders")
    if name == "resume":
        groups.update(paused=True)
    if name == "restore":
        groups.update(overrides={"prefetch": {"value": 7, "at": 1000, "by": "bob"}})
    if name in ("pause-task", "resume-task"):
        task = f"{alias}.task"
        paused = {"paused_tasks": {"value": [task], "at": 1000, "by": "bob"}} if name == "resume-task" else {}
        queue = {"consumer_group": "jobs", "topic": "jobs.orders"}
        ConsumerGroup.objects.using(alias).create(**queue, mode="shared", overrides=paused)
        return {"group": "jobs", "topic": "jobs.orders", "task": task}
    if name.endswith("-recurring"):
        one = Schedule.objects.using(alias).filter(name=f"{alias}.orders.s")
        one.update(paused_at=int(name.startswith("resume")), seen_at=0)
        return {"schedule": f"{alias}.orders.s"}
    if name == "drop-reader":
        Reader.objects.using(alias).create(name="lake", read_offset=0)
        return {"reader": "lake"}
    refused = {"topic": "orders", "payload": b"1", "deliver_at": 0, "created_at": 1, "reason": "an error"}
    quarantined = str(QuarantinedMessage.objects.using(alias).get_or_create(**refused)[0].pk)
    scheduled = OutboxMessage.objects.using(alias).get(topic="orders", message_id=f"{alias}.later")
    dead = str(offset(alias, "orders_dlq"))
    failed = str(offset(alias))
    dlq = {"topic": "orders_dlq", "reason": "test"}
    given = {
        "seek": {"target": "earliest"},
        "replay": {"first": failed, "last": failed},
        "retry-selected": {"row": failed},
        "dead-letter": {"row": failed},
        "retry-error": {"kind": f"{alias}. <number>", "upto": 10**9},
        "dead-letter-error": {"kind": f"{alias}. <number>", "upto": 10**9},
        "override": {"option": "prefetch", "value": "5"},
        "restore": {"option": "prefetch"},
        "release": {"row": f'"{alias}.b"'},
        "forget": {"subscriber": SubscriberHeartbeat.objects.using(alias).get(topic="orders").subscriber_name},
        "redrive": {**dlq, "upto": dead},
        "redrive-selected": {**dlq, "row": dead},
        "discard": {**dlq, "upto": dead},
        "discard-selected": {**dlq, "row": dead},
        "edit": {"offset": dead, "payload": '"another"'},
        "cancel-jobs": {"row": f'"{alias}.job"'},
        "cancel-task": {"topic": "jobs.orders", "task": f"{alias}.task"},
        "cancel": {"row": str(scheduled.outbox_id)},
        "deliver-now": {"row": str(scheduled.outbox_id)},
        "move": {"row": str(scheduled.outbox_id), "time": LATER},
        "requeue": {"row": quarantined},
        "delete-quarantined": {"row": quarantined},
        "requeue-topic": {"topic": "orders", "upto": quarantined},
        "delete-quarantined-topic": {"topic": "orders", "upto": quarantined},
    }.get(name, {})
    of_no_group = ("forget", "edit", "cancel", "cancel-jobs", "deliver-now", "move", "requeue", "delete-quarantined")
    needs_group = name not in of_no_group and "topic" not in given
    return {"group": "g", "topic": "orders", **given} if needs_group else given


def rows(alias):
    """All rows of the queue in a database."""
    return {model.__name__: sorted(map(str, model.objects.using(alias).values_list())) for model in QUEUE_MODELS}

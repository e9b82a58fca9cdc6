"""GC alone keeps every table of the queue from growing for ever: one function for ``queuegc`` and the maintenance."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from django.db import connections, models

from django_mysqlqueue import Message, publish_many
from django_mysqlqueue.models import (
    MODELS,
    CoalesceKey,
    CollectedTopic,
    ConsumerGroup,
    ConsumerOffset,
    DebouncedMessage,
    DeliveryEvent,
    DeliveryState,
    JobResult,
    JobStage,
    LogMark,
    Operation,
    OutboxMessage,
    PartitionLease,
    QuarantinedMessage,
    QueueMessage,
    Reader,
    RelayPosition,
    RelayWatermark,
    Rollup,
    Schedule,
    Sequencer,
    Slots,
    SubscriberHeartbeat,
)
from tests.support.commands import run
from tests.support.harness import USING, Sub, handler, sequence
from tests.support.internals import GroupRef, Session, groups, installing, leasing, pruning
from tests.support.sql_clients import Client

pytestmark = pytest.mark.promise("Retention")

REF = GroupRef("g", "t")
PRUNED = {
    "messages": (QueueMessage,),
    "partition_positions": (ConsumerOffset,),
    "heartbeats": (SubscriberHeartbeat,),
    "leases": (PartitionLease,),
    "coalesce_keys": (CoalesceKey,),
    "debounced": (DebouncedMessage,),
    "slots": (Slots,),
    "delivery_events": (DeliveryEvent,),
    "rollups": (Rollup,),
    "operations": (Operation,),
    "job_results": (JobResult, JobStage),
    "log_marks": (LogMark,),
}
DO_NOT_GROW = {
    OutboxMessage: "the sequencer empties it; scheduled messages are in it until they are due",
    DeliveryState: "claims and flushes delete rows as the watermark passes them: no more than the group has claimed",
    QuarantinedMessage: "a row for each message that the log has refused, until an operator requeues or deletes it",
    Sequencer: "a single row",
    ConsumerGroup: "a row for each registered group, until it is dropped",
    CollectedTopic: "a row for each topic",
    RelayPosition: "a row for each database",
    RelayWatermark: "a row for each database",
    Schedule: "a row for each schedule, until it is deleted",
    Reader: "one for each reader",
}
OLD = 1000
MANY = 1100
"""More than one step deletes."""


def test_every_table_is_pruned_or_does_not_grow():
    assert PRUNED.keys() == pruning.KINDS.keys()
    known = Counter([*(model for tables in PRUNED.values() for model in tables), *DO_NOT_GROW])
    assert known == Counter(MODELS)


def result(name, finished_at, **more):
    fields = {"backend": "default", "queue_name": "default", "task_path": "a.b", "arguments": "{}", **more}
    JobResult.objects.create(id=name, finished_at=finished_at, **fields)


@pytest.fixture
def outdated(db, settings):
    """Rows of each kind that nobody needs any more (returned by kind), and some that are needed."""
    settings.MYSQLQUEUE = {"RETENTION": 0}
    publish_many("t", [Message(number, key=f"k{number % 2}") for number in range(7)])
    Sub(handler()).settle()
    publish_many("t", [Message(number, key="k0") for number in range(2)])
    sequence()
    kept = QueueMessage.objects.order_by("offset").last()
    now = Session(USING).now()
    ref = {"consumer_group": "g", "topic": "t"}
    SubscriberHeartbeat.objects.update(heartbeat_at=OLD)
    SubscriberHeartbeat.objects.bulk_create(
        SubscriberHeartbeat(**ref, subscriber_name=f"sql:{number}", heartbeat_at=OLD) for number in range(MANY)
    )
    SubscriberHeartbeat.objects.create(**ref, subscriber_name="live", heartbeat_at=now)
    PartitionLease.objects.all().delete()
    for key, owner in (("a", ""), ("b", "gone"), ("c", "sql:1"), ("d", "live"), ("k0", ""), ("k2", "live")):
        PartitionLease.objects.create(**ref, partition_key=key, leased_by=owner)
    PartitionLease.objects.create(**ref, partition_key="e", leased_by="", leased_at=now)
    for name, offset in (("gone", 1), ("kept", kept.offset)):
        CoalesceKey.objects.create(**ref, partition_key="k0", coalesce_key=name, message_offset=offset)
    later = {"topic": "t", "partition_key": "k0", "message_id": "later"}
    waiting = OutboxMessage.objects.create(**later, payload=b"1", deliver_at=now + 3_600_000)
    debounced = {"topic": "t", "partition_key": "k0", "message_id": "later", "coalesce_key": "c"}
    for outbox_id in (waiting.outbox_id, waiting.outbox_id + 1):
        DebouncedMessage.objects.create(outbox_id=outbox_id, **debounced)
    for key, who, at in (
        (":a", "", OLD),
        (":b", "", now * 2000),
        ("", "", OLD),
        ("", "gone", OLD),
        ("", "sql:1", OLD),
        ("", "live", OLD),
    ):
        Slots.objects.create(**ref, limit_key=key, subscriber_name=who, full_at=at)
    event = {**ref, "partition_key": "k0", "message_offset": 1, "outcome": "acked"}
    DeliveryEvent.objects.bulk_create(DeliveryEvent(**event, settled_at=OLD) for _ in range(MANY))
    DeliveryEvent.objects.create(**event)
    Rollup.objects.all().delete()
    for grain in (60, 3600):
        for at in (0, grain * 1000, now // (grain * 1000) * grain * 1000):
            Rollup.objects.create(**ref, grain=grain, bucket_at=at)
    Operation.objects.bulk_create(Operation(action="pause", started_at=OLD) for _ in range(MANY))
    Operation.objects.create(action="pause")
    LogMark.objects.bulk_create(LogMark(marked_offset=number + 1, mark=1, marked_at=OLD) for number in range(MANY))
    LogMark.objects.create(marked_offset=MANY + 1, mark=1)
    for stage in ("old", "new"):
        JobStage.objects.create(id=stage, remaining=0, kept=2, size=2)
    for name, status, stage in (("a", "SUCCESSFUL", "old"), ("b", "FAILED", "old"), ("c", "SUCCESSFUL", "new")):
        result(name, OLD, status=status, stage=stage)
    result("d", now, status="SUCCESSFUL", stage="new")
    result("e", 0, status="READY")
    return {
        "messages": 7,
        "partition_positions": 1,
        "heartbeats": MANY + 1,
        "leases": 3,
        "coalesce_keys": 1,
        "debounced": 1,
        "slots": 3,
        "delivery_events": MANY,
        "rollups": 4,
        "operations": MANY,
        "job_results": 3,
        "log_marks": MANY,
    }


def counts():
    return {model: model.objects.count() for model in MODELS}


def left():
    """What is there of each kind after a round."""
    assert QueueMessage.objects.count() == 2
    assert set(ConsumerOffset.objects.values_list("partition_key", flat=True)) == {"k0"}
    assert SubscriberHeartbeat.objects.get(consumer_group="g").subscriber_name == "live"
    assert set(PartitionLease.objects.values_list("partition_key", flat=True)) == {"d", "e", "k0", "k2"}
    assert set(CoalesceKey.objects.values_list("coalesce_key", flat=True)) == {"kept"}
    assert DebouncedMessage.objects.get().outbox_id == OutboxMessage.objects.get().outbox_id
    assert set(Slots.objects.values_list("limit_key", "subscriber_name")) == {(":b", ""), ("", ""), ("", "live")}
    assert DeliveryEvent.objects.filter(settled_at__gt=OLD).count() == DeliveryEvent.objects.count() == 1
    assert Rollup.objects.filter(consumer_group="g", bucket_at__gt=3_600_000).count() == 2
    assert Rollup.objects.filter(consumer_group="g").count() == 2
    assert Operation.objects.filter(started_at__gt=OLD).count() == Operation.objects.count() == 1
    assert LogMark.objects.get().marked_offset == MANY + 1
    assert set(JobResult.objects.values_list("id", flat=True)) == {"d", "e"}
    assert set(JobStage.objects.values_list("id", "kept")) == {("new", 1)}


def test_queuegc_alone_deletes_everything_outdated(outdated):
    before = counts()
    found = json.loads(run("queuegc", "--format", "json"))
    assert {kind: found[kind] for kind in pruning.KINDS} == outdated
    left()
    after = counts()
    gone = {kind: sum(before[model] - after[model] for model in tables) for kind, tables in PRUNED.items()}
    assert gone == {**outdated, "job_results": 4}  # with the stage
    again = json.loads(run("queuegc", "--format", "json"))
    assert not any(again[kind] for kind in pruning.KINDS)
    assert counts() == after


def test_a_dry_run_counts_what_the_run_deletes(outdated):
    before = [list(model.objects.order_by("pk").values()) for model in MODELS]
    planned = json.loads(run("queuegc", "--dry-run", "--format", "json"))
    assert [list(model.objects.order_by("pk").values()) for model in MODELS] == before
    # The heartbeats still protect the lease and the slot of the one, and the position is that of its messages.
    expected = {**outdated, "partition_positions": 0, "leases": 2, "slots": 2}
    assert {kind: planned[kind] for kind in pruning.KINDS} == expected
    assert run("queuegc", "--dry-run") == (
        "Would delete 7 messages, 1,101 old heartbeats, 2 leases, 1 coalesce key, 1 debounced message row, "
        "2 slots, 1,100 delivery events, 4 rollups, 1,100 audit log rows, 1,100 log marks and 3 job results.\n"
    )


def test_the_maintenance_deletes_the_same_in_bounded_steps(outdated, monkeypatch):
    steps = []
    prune = pruning.prune
    monkeypatch.setattr(
        pruning, "prune", lambda using, **options: (steps.append(step) or step for step in prune(using, **options))
    )
    taken = 0
    for _ in Sub(handler(topic="u", group="other")).poller.maintenance.round():
        assert len(steps) - taken <= 1  # per turn of the poller
        taken = len(steps)
    left()
    deleted = Counter()
    for step in steps:
        deleted[step.kind] += step.rows
    assert deleted == outdated
    assert max(step.rows for step in steps) <= 2000


def test_a_lease_is_kept_while_its_partition_has_work_or_its_owner_may_come_back(outdated):
    assert leasing.collect(USING, dry_run=True) == (2, None)
    assert leasing.collect(USING) == (2, None)
    assert {*PartitionLease.objects.values_list("partition_key", flat=True)} == {"c", "d", "e", "k0", "k2"}


@pytest.mark.parametrize("limit", [1, 2, 5])
def test_leases_are_looked_at_page_by_page(outdated, limit):
    SubscriberHeartbeat.objects.filter(heartbeat_at=OLD).delete()
    after, deleted, pages = None, 0, 0
    while True:
        number, after = leasing.collect(USING, after=after, limit=limit)
        deleted, pages = deleted + number, pages + 1
        if after is None:
            break
    assert (deleted, pages) == (3, 7 // limit + 1)


@pytest.fixture
def procedures_of_own_settings(db):
    """Other tests expect those for their settings, or none."""
    yield
    installing.remove(USING)


@pytest.mark.promise("Consumers in plain SQL")
@pytest.mark.servers_only
@pytest.mark.parametrize("mode", ["ordered", "shared"])
def test_with_clients_in_plain_sql_alone_nothing_grows(procedures_of_own_settings, settings, mode):
    """They publish and consume with a key for each message, and crash; there is no process in Python but commands."""
    settings.MYSQLQUEUE = {
        "RETENTION": 0,
        "DLQ_RETENTION": 0,
        "RECORD_DELIVERIES": "all",
        "GROUPS": {"g": {"SQL_TOPICS": ["t"], "MODE": mode, "MAX_ATTEMPTS": 1}},
    }
    installing.install(USING)
    groups.register(USING, REF, mode=mode, start="earliest")
    for lap in range(3):
        client, lost = Client(), Client()
        for number in range(12):
            client.run(
                "INSERT INTO queue_outbox (topic, partition_key, payload) VALUES ('t', %s, '1')", f"{lap}:{number}"
            )
        run("queuesequence")
        lost.claim(2)
        lost.close()
        rows = client.claim(8)
        assert len(rows) == 8
        for place, row in enumerate(rows):
            if place % 4 == 0:
                with client.transaction():
                    client.ack(row["handle"])
            else:
                (client.ack, client.nack, client.reject)[place % 3](row["handle"])
        client.close()
        pass_years(2)
        last = Client()
        while rows := last.claim():  # What is left, and what the lost one had.
            for row in rows:
                assert last.ack(row["handle"]) == "acked"
        assert last.claim() == []
        last.close()
        run("queuesequence")
        pass_years(2)
        run("queuegc")
        assert {model: number for model, number in counts().items() if number} == {
            ConsumerGroup: 1,
            CollectedTopic: 2,
            Sequencer: 1,
        }


def pass_years(years):
    """As if they had passed: all times are as much earlier."""
    for model in MODELS:
        for field in model._meta.get_fields():
            name = field.attname
            if isinstance(field, models.BigIntegerField) and (name.endswith("_at") or name == "invisible_until"):
                table, column = model._meta.db_table, field.column
                with connections[USING].cursor() as cursor:
                    cursor.execute(
                        f"UPDATE {table} SET {column} = {column} - %s WHERE {column} > %s",
                        (years * 365 * 86_400_000, years * 365 * 86_400_000),
                    )

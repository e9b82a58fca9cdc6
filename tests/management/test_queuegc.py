"""queuegc."""

from __future__ import annotations

import pytest

from django_mysqlqueue import Message, publish_many
from django_mysqlqueue.models import ConsumerOffset, DeliveryState, PartitionLease, QueueMessage, SubscriberHeartbeat
from tests.support.commands import run
from tests.support.harness import USING, Sub, handler, lag, sequence
from tests.support.internals import GroupRef, groups

GROUP_STATE = (PartitionLease, ConsumerOffset, DeliveryState, SubscriberHeartbeat)


@pytest.fixture
def collectable(db, settings):
    """Seven messages that group g has passed, two that it has not, in several partitions."""
    settings.MYSQLQUEUE = {"RETENTION": 0}
    publish_many("t", [Message(number, key=f"k{number % 2}") for number in range(7)])
    Sub(handler()).settle()
    publish_many("t", [Message(number, key="k0") for number in range(2)])
    sequence()


def test_dry_run_counts_and_deletes_nothing(collectable):
    SubscriberHeartbeat.objects.update(heartbeat_at=1)
    models = (*GROUP_STATE, QueueMessage)
    before = [list(model.objects.order_by("pk").values()) for model in models]
    assert run("queuegc", "--dry-run") == "Would delete 7 messages and 1 old heartbeat.\n"
    assert [list(model.objects.order_by("pk").values()) for model in models] == before
    assert run("queuegc").startswith("Deleted 7 messages")
    assert run("queuegc", "--dry-run") == "Would delete 0 messages.\n"


def test_gc_deletes_what_is_passed(collectable):
    SubscriberHeartbeat.objects.update(heartbeat_at=1)
    assert run("queuegc") == "Deleted 7 messages, 1 partition position and 1 old heartbeat.\n"
    assert QueueMessage.objects.count() == 2
    assert list(ConsumerOffset.objects.values_list("partition_key", flat=True)) == ["k0"]
    assert not SubscriberHeartbeat.objects.exists()
    assert lag() == 2


@pytest.mark.parametrize(
    ("value", "deleted"), [({"RETENTION": 3600}, 0), ({"RETENTION": None}, 0), ({"RETENTION": 0}, 7)]
)
def test_gc_keeps_the_retention(collectable, settings, value, deleted):
    settings.MYSQLQUEUE = value
    assert run("queuegc", "--dry-run") == f"Would delete {deleted} messages.\n"
    assert run("queuegc").startswith(f"Deleted {deleted} messages")


@pytest.mark.promise("Retention")
def test_gc_waits_for_a_group_that_has_never_run(collectable):
    groups.register(USING, GroupRef("new", "t"), mode="ordered", start="earliest")
    assert run("queuegc", "--dry-run") == "Would delete 0 messages.\n"
    assert run("queuegc").startswith("Deleted 0 messages")
    run("queuedropgroup", "new", "t", "--noinput")
    assert run("queuegc").startswith("Deleted 7 messages")

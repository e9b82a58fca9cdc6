"""Publishing where the queue has an alias of its own."""

from __future__ import annotations

import pytest
from django.db import transaction

from django_mysqlqueue import TransactionMismatch, publish, publish_many
from django_mysqlqueue.models import OutboxMessage
from tests.app.models import Effect
from tests.support.harness import in_thread
from tests.support.queue_alias import on_queue
from tests.support.routers import ReadsFromReplica

QUEUE = "queue"


def test_publishing_goes_where_the_queue_is(where):
    publish("t", 1, **where)
    assert publish_many("t", [2, 3], **where) == 2
    assert on_queue() == 3


def test_using_wins_over_the_setting(queue, settings):
    settings.MYSQLQUEUE = {"DATABASE": "default"}
    settings.DATABASE_ROUTERS = [ReadsFromReplica()]
    publish("t", 1, using=QUEUE)
    assert on_queue() == 1


def test_a_message_commits_with_the_queues_transaction_only(where):
    with transaction.atomic(using=QUEUE):
        publish("t", 1, **where)
        transaction.set_rollback(True, using=QUEUE)
    assert on_queue() == 0
    with transaction.atomic(using="default"):
        Effect.objects.create(name="mine")
        with pytest.raises(TransactionMismatch, match="'queue', which has no open transaction, but 'default' has one"):
            publish("t", 2, **where)
        publish("t", 3, on_mismatch="on_commit", **where)
        assert on_queue() == 0
        publish("t", 4, on_mismatch="commit_now", **where)
        assert in_thread(on_queue) == 1
        with transaction.atomic(using=QUEUE):
            publish("t", 5, **where)
    assert {bytes(row.payload) for row in OutboxMessage.objects.using(QUEUE)} == {b"3", b"4", b"5"}

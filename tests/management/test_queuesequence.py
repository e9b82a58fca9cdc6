"""queuesequence."""

from __future__ import annotations

import threading

import pytest
from django.db import connection, transaction

from django_mysqlqueue import publish, publish_many
from django_mysqlqueue.models import OutboxMessage, QueueMessage, Sequencer
from tests.support.commands import run
from tests.support.harness import sequence
from tests.support.internals import sequencing


def test_sequence_moves_all_that_is_due(db, monkeypatch):
    monkeypatch.setattr(sequencing.sequence, "__kwdefaults__", {"max_rows": 4, "max_bytes": 1_000_000})
    publish_many("t", range(10))
    publish("t", "later", delay=60)
    assert run("queuesequence") == "Moved 10 messages.\n"
    assert QueueMessage.objects.count() == 10
    assert OutboxMessage.objects.count() == 1
    assert run("queuesequence") == "Moved 0 messages.\n"


@pytest.mark.servers_only
def test_sequence_does_not_wait_for_another_sequencer(db):
    sequence()
    publish("t", 1)
    locked, done = threading.Event(), threading.Event()

    def hold():
        try:
            with transaction.atomic():
                list(Sequencer.objects.select_for_update())
                locked.set()
                assert done.wait(30)
        finally:
            connection.close()

    holder = threading.Thread(target=hold)
    holder.start()
    assert locked.wait(30)
    try:
        said = run("queuesequence")
    finally:
        done.set()
        holder.join()
    assert said == "Another process is moving messages.\nMoved 0 messages.\n"
    assert run("queuesequence") == "Moved 1 message.\n"

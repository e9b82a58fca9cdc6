"""A message is published once per id while the first one is kept."""

from __future__ import annotations

import pytest
from django.db import transaction

from django_mysqlqueue import publish
from django_mysqlqueue.models import OutboxMessage
from tests.support import garbage
from tests.support.handlers import Recorder
from tests.support.harness import USING, Sub, handler, in_thread


def test_same_id_twice_is_delivered_once(db):
    got = Recorder()
    publish("t", 1, key="k", id="x")
    publish("t", 2, key="k", id="x")
    with transaction.atomic():
        publish("t", 3, key="k", id="y")
        publish("t", 4, key="k", id="y")
    sub = Sub(handler(function=got))
    sub.settle()
    assert got.payloads == [1, 3]
    # It outlives consumption: the first is in the log until the retention is over.
    publish("t", 5, key="k", id="x")
    sub.settle()
    assert got.payloads == [1, 3]
    # The same id under another key or topic is another message.
    publish("t", 6, key="other", id="x")
    sub.settle()
    assert got.payloads == [1, 3, 6]


@pytest.mark.promise("Deduplication")
def test_an_id_is_dropped_while_the_first_is_in_the_log_handled_or_not(db, settings):
    """``publish`` cannot know: it returns the id all the same."""
    settings.MYSQLQUEUE = {"RETENTION": 0}
    got = Recorder()
    sub = Sub(handler(function=got))
    for payload in ("first", "dropped"):
        assert publish("t", payload, key="a", id="refresh") == "refresh"
        sub.settle()
    assert got.payloads == ["first"]
    assert not OutboxMessage.objects.exists()
    garbage.collect(USING)
    assert publish("t", "after GC", key="a", id="refresh") == "refresh"
    sub.settle()
    assert got.payloads == ["first", "after GC"]


@pytest.mark.servers_only
def test_same_id_in_two_concurrent_transactions(db):
    with transaction.atomic():
        publish("t", 1, key="k", id="x")
        in_thread(lambda: publish("t", 2, key="k", id="x"))
    got = Recorder()
    Sub(handler(function=got)).settle()
    assert len(got.payloads) == 1

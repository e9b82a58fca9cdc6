"""Tails where topics are in several databases."""

from __future__ import annotations

import json

import pytest
from django.contrib.auth.models import User
from django.http import StreamingHttpResponse
from django.test import RequestFactory

from django_mysqlqueue import publish
from django_mysqlqueue.tails import following, tail
from django_mysqlqueue.tails.views import TailView
from tests.support.queue_alias import command

QUEUE = "queue"


@pytest.fixture
def topics(queue_db, settings, monkeypatch):
    settings.MYSQLQUEUE = {
        "TOPICS": {"orders": {"DATABASE": QUEUE}},
        "POLL_INTERVAL": 0.02,
        "MAX_POLL_INTERVAL": 0.02,
    }
    monkeypatch.setattr(following, "_hubs", {})
    monkeypatch.setattr(following.HubLimits.__init__, "__defaults__", (following.LIMITS, 1000, 8_388_608, 0.05))
    yield
    for hub in following._hubs.values():
        if hub._thread is not None:
            hub._thread.join(10)


def fill():
    publish("mails", "a mail")
    publish("orders", "an order")
    command("queuesequence")


def test_a_tail_reads_where_its_topic_is(topics):
    fill()
    assert [one.payload for one in tail("orders")] == ["an order"]
    assert [one.payload for one in tail("mails")] == ["a mail"]
    assert list(tail("orders", using="default")) == []
    (line,) = command("queuetail", "orders").splitlines()
    assert json.loads(line)["payload"] == "an order"


def test_each_database_is_followed_by_a_hub_of_its_own(topics):
    """The offsets of two logs say nothing about each other."""
    for _ in range(3):
        fill()
    with tail("orders", follow=True) as orders, tail("mails", follow=True) as mails:
        publish("orders", "new order")
        command("queuesequence")
        assert next(orders).payload == "new order"
        publish("mails", "new mail")
        command("queuesequence")
        assert next(mails).payload == "new mail"
        assert set(following._hubs) == {"default", QUEUE}
        assert not orders.wait(0.1)


def test_a_stream_follows_the_database_of_its_topic(topics):
    fill()
    User.objects.all().delete()
    request = RequestFactory().get("/", {"offset": "0"})
    request.user = User.objects.create_superuser("ada")
    response = TailView.as_view(heartbeat=0.05)(request, topic="orders")
    assert isinstance(response, StreamingHttpResponse)
    text = b""
    for chunk in response:
        text += chunk
        if b"an order" in text:
            break
    response.close()
    assert b"an order" in text
    User.objects.all().delete()

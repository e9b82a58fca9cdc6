"""Test helpers where topics are in several databases. tests/user_project has tests inside a ``TestCase``."""

from __future__ import annotations

from functools import partial

import pytest
from django.db import connections

from django_mysqlqueue import publish, subscriber
from django_mysqlqueue import testing as helpers
from django_mysqlqueue.exceptions import QueueError
from django_mysqlqueue.models import ConsumerGroup, OutboxMessage, QueueMessage
from django_mysqlqueue.testing import deliver_all, published
from tests.support.internals import deliver_eagerly, inline, wakeups
from tests.support.queue_alias import command

QUEUE = "queue"
TOPICS = {"orders": {"DATABASE": QUEUE}}


@pytest.fixture
def topics(queue_db, settings, no_handlers):
    settings.MYSQLQUEUE = {"TOPICS": TOPICS}


def handle(*topics, group="g"):
    """Declares a handler for each topic, and returns what they get: (topic, payload)."""
    found = []

    def note(delivery):
        found.append((delivery.topic, delivery.payload))
        if delivery.payload > 1:
            publish("mails" if delivery.topic == "orders" else "orders", delivery.payload - 1)

    for topic in topics:
        subscriber(topic, group=group)(note)
    return found


@pytest.mark.parametrize("first", ["orders", "mails"])
def test_rounds_until_nothing_is_left(topics, first):
    found = handle("orders", "mails")
    publish(first, 6)
    assert [one.payload for one in deliver_all()] == [6, 5, 4, 3, 2, 1]
    assert {topic for topic, payload in found if payload % 2 == 0} == {first}
    assert deliver_all() == []


def test_messages_that_wait_in_each_database(topics):
    found = handle("orders", "mails")
    for topic in ("orders", "mails", "orders"):
        publish(topic, 1)
    deliver_all()
    assert sorted(found) == [("mails", 1), ("orders", 1), ("orders", 1)]


def test_a_database_without_handlers(topics):
    found = handle("mails")
    publish("orders", 2)
    publish("mails", 1)
    assert len(deliver_all(groups=["g"])) == 1
    assert found == [("mails", 1)]
    assert [one.payload for one in published("orders")] == [2]


@pytest.mark.parametrize("most", [1, 2, 6, 7])
def test_handlers_that_keep_publishing_to_each_other(topics, monkeypatch, most):
    """The limit counts the deliveries in all databases together, after those that were due at the start."""
    found = handle("orders", "mails")
    monkeypatch.setattr(helpers, "MOST", most)
    publish("orders", 100)
    text = f"Stopped after {most + 2} deliveries in 2 databases: the last was to the group 'g' on "
    with pytest.raises(QueueError, match=text):
        deliver_all()
    assert len(found) == most + 2, "one message was due, and there are two handlers"


def test_an_exception_ends_all_rounds(topics):
    @subscriber("mails", group="g")
    def fail(delivery):
        raise ValueError("on purpose")

    found = handle("orders")
    publish("mails", 1)
    publish("orders", 1)
    with pytest.raises(ValueError, match="on purpose"):
        deliver_all()
    assert found == []
    assert [one.outcome for one in deliver_all(raise_exceptions=False) if one.topic == "orders"] == ["acked"]


def test_a_message_in_another_database_than_its_topics(topics, settings):
    """Its handler does not run there, as that of a subscriber does not."""
    found = handle("orders", "mails")
    publish("orders", 1, using="default")
    assert deliver_all() == deliver_all(using="default") == []
    settings.MYSQLQUEUE = {}
    assert len(deliver_all()) == 1
    assert found == [("orders", 1)]


# -- messages to be relayed -------------------------------------------------------


def test_messages_to_be_relayed(topics, settings):
    publish("orders", 1, via="default", id="one")
    publish("mails", 1, via=QUEUE, id="two")
    assert [(one.topic, one.id) for one in published()] == [("orders", "one"), ("mails", "two")]
    assert published("orders") == []
    assert [one.id for one in published("orders", using="default")] == ["one"]
    settings.MYSQLQUEUE = {"TOPICS": {"orders": {"DATABASE": QUEUE, "VIA": "default"}}}
    assert [one.topic for one in published("orders")] == ["orders"]


def test_messages_are_relayed_and_delivered(topics):
    found = handle("orders")
    publish("orders", 1, via="default")
    publish("mails", 1, via=QUEUE)
    assert [one.topic for one in deliver_all()] == ["orders"]
    assert found == [("orders", 1)]
    assert sorted((one.topic, one.payload) for one in published()) == [("mails", 1), ("orders", 1)]
    assert deliver_all() == []
    publish("orders", 1, via="default")
    assert deliver_all(using=QUEUE) == [], "its outbox is in another database"
    assert len(deliver_all()) == 1


def test_a_handler_publishes_via_its_own_database(topics):
    @subscriber("mails", group="g", atomic=True)
    def answer(delivery):
        publish("orders", delivery.payload, via="default")

    found = handle("orders")
    publish("mails", 1)
    assert [one.topic for one in deliver_all()] == ["mails", "orders"]
    assert found == [("orders", 1)]


def test_a_relayed_message_is_not_listed_twice(topics, settings):
    settings.MYSQLQUEUE = {"TOPICS": {"orders": {"DATABASE": QUEUE, "VIA": "default"}}}
    for number in range(2):
        publish("orders", number, id=f"m{number}")
    command("queuesequence")
    assert [one.topic for one in QueueMessage.objects.using("default")] == ["orders@queue"] * 2
    publish("orders", 0, id="m0", using=QUEUE)  # as the relay does
    assert OutboxMessage.objects.using(QUEUE).count() == 1
    for found in (published(), published("orders")):
        assert sorted(one.id for one in found) == ["m0", "m1"]


# -- EAGER --------------------------------------------------------------------


@pytest.fixture
def eager(topics, settings):
    settings.MYSQLQUEUE = {"EAGER": True, "TOPICS": {"orders": {"DATABASE": QUEUE, "VIA": "default"}}}


def test_eager_delivers_what_is_relayed(eager):
    found = handle("orders", "mails")
    publish("orders", 4)
    assert found == [("orders", 4), ("mails", 3), ("orders", 2), ("mails", 1)]
    refs = [(row.topic, row.consumer_group) for row in ConsumerGroup.objects.using("default")]
    assert refs == [("mails", "g")]  # Each group is registered in the database of its topic.
    assert ConsumerGroup.objects.using(QUEUE).get().topic == "orders"


def test_eager_stops_handlers_that_keep_publishing(eager, monkeypatch):
    @subscriber("orders", group="g")
    def orders(delivery):
        publish("mails", 1)

    @subscriber("mails", group="g")
    def mails(delivery):
        publish("orders", 1)

    monkeypatch.setattr(wakeups, "eager", partial(deliver_eagerly, most=20))
    with pytest.raises(QueueError, match="Stopped after"):
        publish("orders", 1)


def test_eager_leaves_a_database_alone_that_gets_nothing(eager, monkeypatch):
    found = handle("mails")
    seen = []
    relay = inline.relaying.relay
    monkeypatch.setattr(inline.relaying, "relay", lambda source, target: seen.append(target) or relay(source, target))
    with connections[QUEUE].execute_wrapper(lambda *args: pytest.fail("a statement on the other database")):
        publish("mails", 1)
    assert found == [("mails", 1)]
    assert seen == []

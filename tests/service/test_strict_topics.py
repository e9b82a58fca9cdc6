"""``STRICT_TOPICS``: publishing refuses topics that this project does not name."""

from __future__ import annotations

import pytest
from asgiref.sync import async_to_sync
from django.db import connection, transaction
from django.test import override_settings
from django.test.utils import CaptureQueriesContext

from django_mysqlqueue import (
    InvalidMessage,
    Message,
    UnknownTopic,
    apublish,
    apublish_many,
    publish,
    publish_many,
    subscriber,
)
from django_mysqlqueue.models import OutboxMessage, QueueMessage
from django_mysqlqueue.operations import redriving
from tests.support.handlers import Recorder
from tests.support.harness import USING, Sub, handler, sequence
from tests.support.internals import DeadLetterFilter, known_topics, registry


@pytest.fixture
def strict(db, settings, no_handlers):
    """A project that names orders.placed by a handler and audit by a setting."""
    settings.MYSQLQUEUE = {"STRICT_TOPICS": True, "TOPICS": {"audit": {"GROUPLESS": True}, "old_dlq": {}}}
    subscriber("orders.placed", group="mail")(lambda delivery: None)
    subscriber("other_dlq", group="alarm")(lambda delivery: None)


WAYS = {
    "publish": lambda topic: publish(topic, 1),
    "publish_many": lambda topic: publish_many(topic, range(3)),
    "apublish": lambda topic: async_to_sync(apublish)(topic, 1),
    "apublish_many": lambda topic: async_to_sync(apublish_many)(topic, range(3)),
    "commit_now": lambda topic: publish(topic, 1, on_mismatch="commit_now"),
}


@pytest.mark.promise("Topics without a consumer group")
@pytest.mark.parametrize("way", WAYS)
def test_a_topic_that_nobody_names_is_refused(strict, way):
    with pytest.raises(UnknownTopic) as caught:
        WAYS[way]("orders.plced")
    assert str(caught.value) == (
        "topic 'orders.plced': STRICT_TOPICS is on, and neither MYSQLQUEUE['TOPICS'] nor a handler of this project "
        "names it. Did you mean 'orders.placed'?"
    )
    assert isinstance(caught.value, InvalidMessage)
    assert not OutboxMessage.objects.exists()


@pytest.mark.parametrize("way", WAYS)
def test_a_topic_that_is_named_is_accepted(strict, way):
    for topic in ("orders.placed", "audit"):
        WAYS[way](topic)
    assert set(OutboxMessage.objects.values_list("topic", flat=True)) == {"orders.placed", "audit"}


@pytest.mark.parametrize("value", [{}, {"STRICT_TOPICS": False}, {"STRICT_TOPICS": False, "TOPICS": {"audit": {}}}])
def test_without_the_setting_every_topic_is_accepted(strict, settings, value):
    settings.MYSQLQUEUE = value
    assert publish("orders.plced", 1)


def test_override_settings_is_followed(strict):
    with override_settings(MYSQLQUEUE={"STRICT_TOPICS": True, "TOPICS": {"orders.plced": {}}}):
        publish("orders.plced", 1)
        with pytest.raises(UnknownTopic):
            publish("audit", 1)
    with pytest.raises(UnknownTopic):
        publish("orders.plced", 1)


@pytest.mark.parametrize(
    ("topic", "hint"),
    [
        ("Orders.Placed", "Did you mean 'orders.placed'?"),
        ("AUDIT", "Did you mean 'audit'?"),
        ("xyz", "Known: audit, orders.placed."),
    ],
)
def test_the_error_names_the_nearest_topic(strict, topic, hint):
    with pytest.raises(UnknownTopic) as caught:
        publish(topic, 1)
    assert str(caught.value).endswith(f" names it. {hint}")


def test_the_error_names_no_more_topics_than_can_be_read(strict, settings):
    settings.MYSQLQUEUE = {"STRICT_TOPICS": True, "TOPICS": {f"t{number:02}": {} for number in range(50)}}
    with pytest.raises(UnknownTopic, match=r"Known: orders\.placed, t00, .*, t08 and 41 more\.$"):
        publish("xyzxyz", 1)


def test_dlq_topics_stay_refused_as_such(strict):
    for topic in ("old_dlq", "other_dlq"):
        with pytest.raises(InvalidMessage, match="reserved for dead letters") as caught:
            publish(topic, 1)
        assert not isinstance(caught.value, UnknownTopic)


def test_it_is_refused_before_a_message_is_read(strict):
    def messages():
        raise AssertionError("read")
        yield

    with pytest.raises(UnknownTopic):
        publish_many("orders.plced", messages())


def test_the_callers_transaction_stays_usable(strict):
    with transaction.atomic():
        publish("audit", 1)
        with pytest.raises(UnknownTopic):
            publish("orders.plced", 2)
        publish("audit", 3)
    assert [bytes(one) for one in OutboxMessage.objects.order_by("outbox_id").values_list("payload", flat=True)] == [
        b"1",
        b"3",
    ]


def test_it_costs_no_statement_and_no_discovery_for_what_is_known(strict, monkeypatch):
    monkeypatch.setattr(known_topics, "discover", None)
    with CaptureQueriesContext(connection) as captured:
        publish("orders.placed", 1)
        publish("audit", 1)
    assert [query["sql"].split()[0] for query in captured] == ["INSERT", "INSERT"]


def test_what_comes_otherwise_is_not_asked(strict, settings):
    """Plain SQL and dead letters that go back to their group."""
    settings.MYSQLQUEUE = {}
    publish("orders.plced", 1)
    sub = Sub(handler("orders.plced", function=lambda delivery: delivery.reject("no")))
    sub.settle()
    sub.leave()
    sequence()
    settings.MYSQLQUEUE = {"STRICT_TOPICS": True}
    assert redriving.redrive_all(USING, DeadLetterFilter("orders.plced_dlq"), actor="test") == 1
    with connection.cursor() as cursor:
        cursor.execute("INSERT INTO queue_outbox (topic, payload) VALUES ('orders.plced', '2')")
    got = Recorder()
    Sub(handler("orders.plced", function=got)).settle()
    assert sorted(got.payloads) == [1, 2]
    assert not QueueMessage.objects.filter(topic="orders.plced_dlq").exists()


def test_a_dead_letter_is_filed_under_a_topic_that_nobody_names(strict):
    publish_many("orders.placed", [Message(1, key="k")])
    Sub(handler("orders.placed", "mail", lambda delivery: delivery.reject("no"))).settle()
    sequence()
    assert QueueMessage.objects.filter(topic="orders.placed_dlq").count() == 1


def test_a_nested_discovery_imports_nothing(monkeypatch):
    found = []

    def autodiscover(name):
        found.append(name)
        registry.discover()

    monkeypatch.setattr(registry, "autodiscover_modules", autodiscover)
    registry.discover()
    registry.discover()
    assert found == ["subscribers", "subscribers"]

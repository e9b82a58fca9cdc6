"""Topics in databases of their own: ``DATABASE`` in ``TOPICS``."""

from __future__ import annotations

import pytest
from django.db import transaction

from django_mysqlqueue import TransactionMismatch, cancel, publish, publish_many, reschedule
from django_mysqlqueue.exceptions import InvalidMessage
from django_mysqlqueue.models import OutboxMessage

QUEUE = "queue"
TOPICS = {"orders": {"DATABASE": QUEUE}, "events.*": {"DATABASE": QUEUE}}


@pytest.fixture
def topics(queue_db, settings):
    settings.MYSQLQUEUE = {"TOPICS": TOPICS}


def outbox(alias):
    return list(OutboxMessage.objects.using(alias).order_by("outbox_id").values_list("topic", flat=True))


def test_a_pattern_declares_topics(topics, settings):
    settings.MYSQLQUEUE = {"TOPICS": TOPICS, "STRICT_TOPICS": True}
    publish("events.a", 1)
    with pytest.raises(InvalidMessage, match="names it"):
        publish("event.a", 1)


# -- publishing ---------------------------------------------------------------


def test_a_message_is_stored_in_the_database_of_its_topic(topics):
    publish("orders", 1)
    publish_many("events.a", [1, 2])
    publish("other", 1)
    publish("orders", 1, using="default")
    assert outbox(QUEUE) == ["orders", "events.a", "events.a"]
    assert outbox("default") == ["other", "orders"]


def test_a_message_commits_with_a_transaction_on_the_database_of_its_topic(topics):
    with transaction.atomic(using=QUEUE):
        publish("orders", 1)
        transaction.set_rollback(True, using=QUEUE)
    assert outbox(QUEUE) == []


def test_a_transaction_elsewhere_is_an_error_that_says_what_to_do(topics):
    with transaction.atomic(), pytest.raises(TransactionMismatch) as caught:
        publish("orders", 1)
    assert "Write your rows to 'queue' in the same transaction, publish via='default', or accept" in str(caught.value)
    with transaction.atomic(using=QUEUE), pytest.raises(TransactionMismatch, match="publish via='queue'"):
        publish("other", 1)
    assert (outbox(QUEUE), outbox("default")) == ([], [])


# -- via ----------------------------------------------------------------------


def test_a_message_to_be_relayed_commits_with_the_callers_transaction(topics):
    with transaction.atomic():
        publish("orders", 1, via="default")
        publish_many("events.a", [1, 2], via="default")
        publish("other", 1, via="default")  # It is there: nothing to relay.
    with transaction.atomic():
        publish("orders", 2, via="default")
        transaction.set_rollback(True)
    assert outbox("default") == ["orders@queue", "events.a@queue", "events.a@queue", "other"]
    assert outbox(QUEUE) == []


def test_the_setting_names_the_database_of_the_publishers(topics, settings):
    settings.MYSQLQUEUE = {"TOPICS": {"orders": {"DATABASE": QUEUE, "VIA": "default"}}}
    publish("orders", 1)
    publish("orders", 1, via=QUEUE)
    publish("orders", 1, using=QUEUE)
    assert outbox("default") == ["orders@queue"]
    assert outbox(QUEUE) == ["orders", "orders"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"via": "other"}, r"via='other': must be a database of the queue \('default', 'queue'\)"),
        ({"via": "nowhere"}, "via='nowhere': must be a database of the queue"),
        ({"via": "default", "using": QUEUE}, "using='queue', via='default': pass one of them"),
        ({"using": "nowhere"}, "using 'nowhere': there is no such database in DATABASES"),
    ],
)
def test_invalid_databases(topics, arguments, said):
    with pytest.raises(InvalidMessage, match=said):
        publish("orders", 1, **arguments)
    assert (outbox(QUEUE), outbox("default")) == ([], [])


def test_scheduled_messages_to_be_relayed_can_be_changed(topics):
    message_id = publish("orders", 1, delay=60, via="default")
    assert cancel(message_id, topic="orders") == 0
    assert reschedule(message_id, topic="orders", delay=120, via="default") == 1
    assert cancel(message_id, topic="orders", via="default") == 1
    assert outbox("default") == []

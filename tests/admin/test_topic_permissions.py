"""Payloads and operations by topic: two users, two topics, every operation."""

from __future__ import annotations

import pytest
from django.contrib.auth.models import User

from django_mysqlqueue import Message, publish, publish_many
from django_mysqlqueue.admin.operations import OPERATIONS
from django_mysqlqueue.models import ConsumerGroup, DeliveryState, OutboxMessage, QueueMessage
from tests.support.dashboard import ROOT, hidden
from tests.support.harness import Sub, handler, sequence
from tests.support.topic_permissions import OnTopics

TOPICS = ("t", "u")


@pytest.fixture
def make(make_client, settings):
    """Makes the client of a user who may view the dashboard, with further permissions on topics."""
    settings.AUTHENTICATION_BACKENDS = ["tests.support.topic_permissions.OnTopics"]
    OnTopics.granted.clear()

    def one(*permissions, on=()):
        client = make_client("view_dashboard", *permissions)
        name = User.objects.latest("pk").username
        OnTopics.granted.update((name, f"django_mysqlqueue.{permission}", topic) for permission, topic in on)
        return client

    return one


@pytest.fixture
def queue(db):
    """In both topics: a group with a lease, a dead letter, a failed, an unclaimed and a scheduled message."""
    for topic in TOPICS:
        publish_many(topic, (Message(f"secret {topic} {n}", key="k") for n in range(3)))
        publish(topic, f"secret {topic} later", id=f"later {topic}", delay=600)
    sequence()
    sub = Sub(*(handler(topic, function=_handle) for topic in TOPICS)).step()
    sub.work(4)
    sub.flush()
    sequence()
    return sub


def _handle(delivery):
    if delivery.payload.endswith("0"):
        delivery.reject("secret reason")
    else:
        delivery.nack(delay=600)


def parameters(name, topic):
    """The query string of an operation on a topic."""
    given = {"group": "g", "topic": topic}
    if name in ("cancel", "deliver-now", "move"):
        return {"row": str(OutboxMessage.objects.get(topic=topic).outbox_id), "time": "2100-01-01T00:00:00"}
    if name == "edit":
        return {"offset": str(QueueMessage.objects.get(topic=f"{topic}_dlq").offset)}
    if name in ("redrive", "redrive-selected", "discard", "discard-selected"):
        offset = QueueMessage.objects.get(topic=f"{topic}_dlq").offset
        return {"topic": f"{topic}_dlq", "row": str(offset), "reason": "test"}
    if name in ("retry-selected", "move-selected", "dead-letter"):
        given["row"] = str(DeliveryState.objects.filter(topic=topic).latest("message_offset").message_offset)
    given.setdefault("row", '"k"')
    return given | {"time": "2100-01-01T00:00:00", "option": "prefetch", "value": "5"}


NAMES = [name for name in OPERATIONS if name != "forget"]


@pytest.mark.promise("Permissions by topic")
@pytest.mark.parametrize("name", NAMES)
def test_an_operation_needs_the_permission_on_its_topic(make, queue, name):
    both = [(permission, "t") for permission in ("operate_dashboard", "see_payloads")]
    mine, nobody, everything = make(on=both), make(), make("operate_dashboard", "see_payloads")
    for topic in TOPICS:
        given = parameters(name, topic)
        for send in ("get", "post"):
            answers = [getattr(client, send)(f"{ROOT}do/{name}/", given) for client in (mine, nobody, everything)]
            assert [answer.status_code for answer in answers] == [200 if topic == "t" else 403, 403, 200], (send, topic)


@pytest.mark.promise("Permissions by topic")
def test_operating_with_the_permission_on_a_topic(make, queue):
    client = make(on=[("operate_dashboard", "t")])
    asked = client.get(f"{ROOT}do/pause/", {"group": "g", "topic": "t"})
    values = {**hidden(asked.content.decode()), "confirmed": "yes"}
    assert client.post(f"{ROOT}do/pause/", values).status_code == 302
    assert client.post(f"{ROOT}do/pause/", {**values, "topic": "u"}).status_code == 403
    assert dict(ConsumerGroup.objects.values_list("topic", "paused")) == {"t": True, "u": False}


def test_a_selection_over_topics_needs_the_permission_on_all(make, queue):
    rows = [str(one) for one in OutboxMessage.objects.values_list("outbox_id", flat=True)]
    client = make(on=[("operate_dashboard", "t")])
    assert client.get(f"{ROOT}do/cancel/", {"row": rows}).status_code == 403
    client = make(on=[("operate_dashboard", "t"), ("operate_dashboard", "u")])
    assert client.get(f"{ROOT}do/cancel/", {"row": rows}).status_code == 200


def test_what_is_of_no_topic_needs_the_permission_on_all(make, queue):
    client = make(on=[("operate_dashboard", "t"), ("operate_dashboard", "u")])
    assert client.get(f"{ROOT}do/forget/", {"subscriber": queue.name}).status_code == 403
    assert client.get(f"{ROOT}do/cancel/", {"row": "999999"}).status_code == 403
    assert client.get(f"{ROOT}do/edit/", {"offset": "999999"}).status_code == 403
    assert client.get(f"{ROOT}do/pause/").status_code == 403


@pytest.mark.promise("Permissions by topic")
def test_payloads_are_shown_with_the_permission_on_their_topic(make, queue):
    client = make(on=[("see_payloads", "t")])

    def text(name, **query):
        return client.get(f"{ROOT}{name}/", query).content.decode()

    for topic in TOPICS:
        offset = QueueMessage.objects.filter(topic=topic).latest("offset").offset
        dead = QueueMessage.objects.get(topic=f"{topic}_dlq").offset
        shown = topic == "t"
        assert (f"secret {topic} 2" in text("message", offset=offset)) is shown
        assert (f"secret {topic} 0" in text("message", offset=dead)) is shown
        assert (f"secret {topic} 0" in text("deadletter", offset=dead)) is shown
        assert (f"secret {topic} later" in text("scheduled")) is shown
        assert (f"secret {topic} later" in text("scheduled", topic=topic)) is shown


def test_buttons_are_shown_with_the_permission_on_the_topic(make, queue):
    client = make(on=[("operate_dashboard", "t"), ("see_payloads", "t")])
    for topic in TOPICS:
        dead = QueueMessage.objects.get(topic=f"{topic}_dlq").offset
        for name, query in (
            ("group", {"group": "g", "topic": topic}),
            ("deadletter", {"offset": dead}),
            ("deadletters", {"topic": topic}),
            ("scheduled", {"topic": topic}),
            ("leases", {"group": "g", "topic": topic}),
        ):
            page = client.get(f"{ROOT}{name}/", query).content.decode()

            assert ("mq-actions" in page) is (topic == "t"), (name, topic)


def test_the_search_of_errors_needs_payloads_of_the_topic_with_redact(make, queue, settings):
    settings.MYSQLQUEUE = {"REDACT": "tests.admin.test_topic_permissions.hide"}
    client = make(on=[("see_payloads", "t")])
    assert client.get(f"{ROOT}deadletters/", {"topic": "t", "error": "x"}).status_code == 200
    assert client.get(f"{ROOT}deadletters/", {"topic": "u", "error": "x"}).status_code == 403


def hide(text, *, topic, kind):
    return text

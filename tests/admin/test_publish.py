"""The form that publishes a test message: preview, message, permissions, databases."""

from __future__ import annotations

import datetime
import json
import re
from html import unescape

import pytest
from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import User

from django_mysqlqueue import operations, publish
from django_mysqlqueue.exceptions import OperationRefused
from django_mysqlqueue.models import ConsumerGroup, Operation, OutboxMessage, QueueMessage
from django_mysqlqueue.operations import publishing
from tests.support import job_worlds
from tests.support.dashboard import ROOT, page
from tests.support.handlers import Recorder
from tests.support.harness import Sub, handler, sequence
from tests.support.topic_permissions import OnTopics

ADDRESS = f"{ROOT}do/publish/"


def fields(answer):
    """What a browser would send back of the page's form, with the buttons left out."""
    text = answer.content.decode()
    found = {}
    for tag in re.findall(r"<input[^>]*>", text):
        attributes = dict(re.findall(r'([\w-]+)="([^"]*)"', tag))
        if attributes.get("type") != "submit" and "name" in attributes:
            found[attributes["name"]] = unescape(attributes.get("value", ""))
    for name, value in re.findall(r'<textarea name="(\w+)"[^>]*>\n?(.*?)</textarea>', text, re.DOTALL):
        found[name] = unescape(value)
    found["kind"] = re.findall(r'<option value="(\w+)" selected', text)[0]
    return found


def sentences(answer):
    text = answer.content.decode()
    preview = re.findall(r'<section class="module mq-preview">.*?</section>', text, re.DOTALL)
    return [unescape(one) for one in re.findall(r"<li>(.*?)</li>", "".join(preview), re.DOTALL)]


def previewed(client, **values):
    """Opens the form, fills it in, and returns the answer with its preview."""
    opened = client.get(ADDRESS, {"topic": values.get("topic", "")})
    assert opened.status_code == 200
    return client.post(ADDRESS, {**fields(opened), **values})


def publish_it(client, **values):
    asked = previewed(client, **values)
    assert sentences(asked), asked.content.decode()
    done = client.post(ADDRESS, {**fields(asked), "confirmed": "yes"}, follow=True)
    return [str(message) for message in done.context["messages"]]


def test_a_message_is_published_as_it_was_shown(client):
    got, other = Recorder(), Recorder()
    sub = Sub(handler("t", "g", got), handler("u", "g", other))
    asked = previewed(
        client,
        topic="t",
        payload='{"n": [1, "é"]}',
        key="k",
        metadata='{"region": "eu"}',
        priority="5",
        reason="try it",
    )
    told = sentences(asked)
    assert told[0].startswith("A message of 14 bytes with the id ")
    assert told[0].endswith(" will be published to the topic t, partition __p:+005:k.")
    assert told[1:] == ["g/t will receive it."]
    assert not OutboxMessage.objects.exists()
    done = client.post(ADDRESS, {**fields(asked), "confirmed": "yes"}, follow=True)
    sub.settle()
    (delivery,) = got.deliveries
    assert (delivery.payload, delivery.key, delivery.metadata["region"]) == ({"n": [1, "é"]}, "k", "eu")
    assert other.deliveries == []
    assert [str(one) for one in done.context["messages"]] == [f"The message {delivery.id} is published to the topic t."]
    row = Operation.objects.get()
    assert (row.action, row.topic, row.actor, row.reason, row.changed) == ("publish", "t", "ada0", "try it", 1)
    assert row.detail == f"id {delivery.id}"
    assert row.ended_at
    assert LogEntry.objects.get().object_repr == "t"


@pytest.mark.parametrize("sequenced", [False, True])
def test_a_double_click_publishes_once(client, sequenced):
    got = Recorder()
    sub = Sub(handler("t", "g", got))
    asked = previewed(client, topic="t", payload="1")
    for _ in range(2):
        done = client.post(ADDRESS, {**fields(asked), "confirmed": "yes"}, follow=True)
        if sequenced:
            sequence()
    (told,) = [str(one) for one in done.context["messages"]]
    assert re.fullmatch(r"The message \S+ is already published to the topic t. It was not published again.", told)
    sub.settle()
    assert got.payloads == [1]
    assert Operation.objects.get().changed == 1


def test_two_requests_at_the_same_time_publish_once(client, monkeypatch):
    """Neither sees the message of the other one: the sequencer drops the second."""
    monkeypatch.setattr("django_mysqlqueue.operations.publishing._find", lambda *arguments: None)
    got = Recorder()
    sub = Sub(handler("t", "g", got))
    asked = previewed(client, topic="t", payload="1")
    for _ in range(2):
        client.post(ADDRESS, {**fields(asked), "confirmed": "yes"})
    assert OutboxMessage.objects.count() == 2
    sub.settle()
    assert got.payloads == [1]


def test_an_id_that_the_partition_has_is_refused_in_the_preview(client):
    publish("t", 1, id="x", key="k")
    for place in ("the outbox", r"offset \d+"):
        asked = previewed(client, topic="t", payload="1", id="x", key="k")
        assert re.search(rf"the id x is in the partition k already \({place}\)", unescape(asked.content.decode()))
        assert 'name="confirmed"' not in asked.content.decode()
        sequence()
    assert sentences(previewed(client, topic="t", payload="1", id="x", key="other"))
    assert not Operation.objects.exists()


def test_what_was_changed_after_the_preview_is_shown_again(client):
    asked = previewed(client, topic="t", payload="1")
    again = client.post(ADDRESS, {**fields(asked), "payload": "2", "confirmed": "yes"})
    assert again.status_code == 200
    assert "the form differs" in again.content.decode()
    assert not OutboxMessage.objects.exists()


def test_the_preview_says_who_receives_it_and_when(client):
    us = {"region": ["us"]}
    for name, values in (
        ("a", {}),
        ("b", {"paused": True}),
        ("c", {"filter": us}),
        ("d", {"filter": {"a": [{"unknown-operator": 1}]}}),
        ("e", {"after_seek": "dropped", "operation": 1, "paused": True}),
        ("f", {"after_seek": "resume", "operation": 1, "paused": True}),
    ):
        ConsumerGroup.objects.create(consumer_group=name, topic="t", mode="ordered", **values)
    told = sentences(
        previewed(client, topic="t", payload="1", metadata='{"region": "eu"}', delay="90", expires_in="100")
    )
    assert told[1:4] == [
        "It is scheduled: it comes due 1 min 30 s after it is published.",
        "It expires: a group that has not started it within 1 min 40 s does not handle it.",
        "a/t will receive it when a subscriber is running. It has no live subscriber.",
    ]
    paused, filtered, unparsed, dropped, sought = told[4:]
    assert paused == "b/t will receive it after the group is resumed. It is paused."
    assert filtered.startswith("c/t will not receive it: its filter does not match. Does not match: region")
    assert unparsed.startswith("d/t waits: this release cannot parse its filter (")
    assert dropped == "e/t will not receive it: the group is being dropped."
    assert sought == "f/t will receive it after an unfinished operation on the group (seek) has ended."


def test_the_preview_says_when_it_comes_due_and_expires(client):
    told = " ".join(sentences(previewed(client, topic="t", payload="1", deliver_at="2100-01-01T00:00:00")))
    assert re.search(r"It is scheduled: it comes due at [^.;]*2100[^;]*; at once if this time has passed\.", told), told
    at = datetime.datetime(2100, 6, 1, tzinfo=datetime.UTC)
    told = " ".join(operations.publish("t", 1, expires_at=at, actor="ada", dry_run=True).summary)
    assert re.search(r"It expires: a group that has not started it by .*2100.* does not handle it\.", told), told


@pytest.mark.parametrize("most", [1, 2, 3])
def test_a_preview_names_a_bounded_number_of_groups(db, monkeypatch, most):
    monkeypatch.setattr(publishing, "MOST_GROUPS", most)
    for name in "ab":
        ConsumerGroup.objects.create(consumer_group=name, topic="t", mode="ordered")
    said = operations.publish("t", 1, actor="ada", dry_run=True).summary
    assert sum("will receive it when a subscriber is running" in one for one in said) == min(most, 2)
    more = "The topic has more consumer groups. Only the first 1 are shown."
    assert (said[-1] == more) == (most == 1)


def test_a_new_topic_is_not_taken_for_a_dlq(db, monkeypatch):
    monkeypatch.setattr("tests.support.internals.log.known", lambda session: ["orders_dlq"])
    new, _no_group = operations.publish("orders_dl", 1, actor="ada", dry_run=True).warnings
    assert new == "The topic orders_dl is new: no message, consumer group or setting names it."


def test_the_id_is_searched_among_the_newest_messages_of_the_outbox(db, monkeypatch):
    monkeypatch.setattr(publishing, "NEWEST", 2)
    for name in ("old", "new", "newer"):
        assert operations.publish("t", 1, id=name, key="k", actor="ada").changed == 1
    assert operations.publish("t", 1, id="new", key="k", actor="ada").changed == 0
    assert operations.publish("t", 1, id="old", key="k", actor="ada").changed == 1, "the sequencer drops it"
    assert operations.publish("u", 1, id="newer", key="k", actor="ada").changed == 1, "it is in another topic"


def test_a_topic_without_groups_and_a_new_one(client):
    publish("orders", 1)
    assert "No consumer group reads the topic" in sentences(previewed(client, topic="orders", payload="1"))[-1]
    told = sentences(previewed(client, topic="order", payload="1"))
    assert told[-3] == "The topic order is new: no message, consumer group or setting names it."
    assert told[-1] == "Did you mean orders?"
    ConsumerGroup.objects.create(consumer_group="g", topic="orders", mode="ordered", filter={"a": ["b"]})
    assert (
        sentences(previewed(client, topic="orders", payload="1"))[-1] == "No consumer group will receive the message."
    )


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"payload": '{"a": 1,\n "b"}'}, "Invalid JSON: Expecting ':' delimiter (line 2, column 5)."),
        ({"payload": ""}, "Invalid JSON: Expecting value (line 1, column 1)."),
        ({"payload": '{"a": 1, "a": 2}'}, "Invalid JSON: the name 'a' occurs twice in an object."),
        ({"payload": "NaN"}, "Invalid JSON: NaN."),
        ({"payload": "[" * 200_000}, "Invalid JSON"),
        ({"payload": "é", "kind": "base64"}, "Invalid Base64"),
        ({"topic": "a b"}, "topic 'a b'"),
        ({"topic": "t_dlq"}, "topic 't_dlq': names that end in '_dlq' are reserved for dead letters"),
        ({"key": "__p:1"}, "key '__p:1'"),
        ({"metadata": "[1]"}, "This must be a JSON object."),
        ({"metadata": '{"mysqlqueue.key": "a"}'}, "names that start with 'mysqlqueue.' are reserved"),
        ({"metadata": '{"content_type": "text/plain"}'}, "a payload that is not bytes is stored as application/json"),
        ({"delay": "5", "deliver_at": "2100-01-01T00:00:00"}, "delay and deliver_at were both given: pass one of them"),
        ({"delay": "-1"}, "Ensure this value is greater than or equal to 0."),
        ({"delay": "1e300"}, "delay 1e+300: must be a timedelta or seconds"),
        ({"expires_in": "0"}, "expires_in 0.0: must be at least a millisecond"),
        ({"deliver_at": "tomorrow"}, "Enter a valid date/time."),
        ({"priority": "101"}, "Ensure this value is less than or equal to 100."),
        ({"id": ""}, "This field is required."),
        ({"topic": ""}, "This field is required."),
    ],
)
def test_an_invalid_value_is_named_and_nothing_of_the_form_is_lost(client, values, says):
    given = {"topic": "t", "payload": '{\n  "n": 1\n}', "key": "k", "metadata": '{"a": "b"}', "reason": "why not"}
    given |= values
    asked = previewed(client, **given)
    assert asked.status_code == 200
    assert says in unescape(asked.content.decode())
    assert 'name="confirmed"' not in asked.content.decode()
    kept = fields(asked)
    assert {name: kept[name] for name in given} == given
    assert not OutboxMessage.objects.exists()


def test_the_other_formats_of_a_payload(client):
    got = Recorder()
    sub = Sub(handler("t", "g", got))
    for kind, payload in (("text", "a\r\nb"), ("base64", "AP8=\r\n"), ("json", '"a"')):
        publish_it(client, topic="t", payload=payload, kind=kind, key="k")
    sub.settle()
    assert got.payloads == [b"a\nb", b"\x00\xff", "a"]


def test_strict_topics_allow_only_those_of_the_project(client, settings):
    settings.MYSQLQUEUE = {"STRICT_TOPICS": True, "TOPICS": {"orders": {}}}
    asked = previewed(client, topic="order", payload="1")
    assert "Did you mean 'orders'?" in unescape(asked.content.decode())
    assert '<option value="orders"></option>' in asked.content.decode()
    publish_it(client, topic="orders", payload="1")
    assert OutboxMessage.objects.get().topic == "orders"


def test_the_form_waits_for_its_values(client):
    text = client.get(ADDRESS, {"topic": "t"}).content.decode()
    assert "errornote" not in text
    assert "errorlist" not in text
    assert 'name="confirmed"' not in text
    ids = {fields(client.get(ADDRESS))["id"] for _ in range(2)}
    assert len(ids) == 2


# -- permissions ----------------------------------------------------------------


@pytest.fixture
def make(make_client, settings):
    """Makes the client of a user with permissions in general, and on topics."""
    settings.AUTHENTICATION_BACKENDS = ["tests.support.topic_permissions.OnTopics"]
    OnTopics.granted.clear()
    publish("t", 1)
    publish("hidden.topic", 1)
    sequence()

    def one(*permissions, on=()):
        client = make_client(*permissions)
        name = User.objects.latest("pk").username
        OnTopics.granted.update((name, f"django_mysqlqueue.{permission}", topic) for permission, topic in on)
        return client

    return one


@pytest.mark.promise("Permissions by topic")
@pytest.mark.parametrize(
    ("permissions", "status"),
    [
        ([], 403),
        (["view_dashboard"], 403),
        (["view_dashboard", "operate_dashboard", "see_payloads"], 403),
        (["publish_messages"], 403),
        (["view_dashboard", "publish_messages"], 200),
    ],
)
def test_publishing_has_a_permission_of_its_own(make, permissions, status):
    client = make(*permissions)
    ConsumerGroup.objects.create(consumer_group="g", topic="t", mode="ordered")
    values = {"topic": "t", "payload": "1", "kind": "json", "priority": "0", "id": "x", "confirmed": "yes"}
    assert client.get(ADDRESS, {"topic": "t"}).status_code == status
    assert client.post(ADDRESS, values).status_code == status
    if "view_dashboard" in permissions:
        for name, query in (("messages", {}), ("messages", {"topic": "t"}), ("group", {"group": "g", "topic": "t"})):
            assert ("do/publish/" in page(client, name, **query)) is (status == 200), name
        assert "do/publish/" not in page(client, "messages", topic="t_dlq")
    if status == 200:
        assert client.get(f"{ROOT}do/pause/", {"group": "g", "topic": "t"}).status_code == 403
        assert "do/pause/" not in page(client, "group", group="g", topic="t")
        publish_it(client, topic="t", payload="1")
    assert OutboxMessage.objects.count() == (status == 200)


@pytest.mark.promise("Permissions by topic")
def test_publishing_with_the_permission_on_a_topic(make):
    client = make(on=[("view_dashboard", "t"), ("publish_messages", "t"), ("view_dashboard", "seen.only")])
    publish_it(client, topic="t", payload="1")
    assert OutboxMessage.objects.get().topic == "t"
    assert "do/publish/" in page(client, "messages", topic="t")
    opened = client.get(ADDRESS)
    assert opened.status_code == 200
    assert "hidden." not in opened.content.decode()
    asked = previewed(client, topic="t", payload='{"typed": 1}')
    for topic in ("hidden.topic", "seen.only", "nothing"):
        for more in ({}, {"confirmed": "yes"}):
            answer = client.post(ADDRESS, {**fields(asked), "topic": topic, **more})
            text = unescape(answer.content.decode())
            assert answer.status_code == 403
            assert "You may publish to these topics: t. Choose one of them." in text
            assert text.replace(topic, "…") == text.replace(topic, "…").replace("hidden.", "")
            assert fields(answer)["payload"] == '{"typed": 1}', "what was typed is lost"
            assert not sentences(answer)
    assert OutboxMessage.objects.count() == 1
    assert make(on=[("view_dashboard", "t")]).get(ADDRESS, {"topic": "t"}).status_code == 403
    general = make("view_dashboard", on=[("publish_messages", "t")])
    assert general.get(ADDRESS, {"topic": "t"}).status_code == 200
    assert general.post(ADDRESS, {**fields(asked), "topic": "hidden.topic"}).status_code == 403


def test_a_message_is_published_with_its_bytes(client):
    publish_it(client, topic="t", payload='{"a":1.50, "b": "\\u00e9"}')
    sequence()
    assert json.loads(bytes(QueueMessage.objects.get().payload)) == {"a": 1.5, "b": "é"}


def test_a_queue_of_jobs_is_refused(client, settings):
    """Its messages run any task: the permission to publish a test message is not that one."""
    settings.TASKS = job_worlds.TASKS
    job = json.dumps({"task": "tests.app.jobs.add", "args": [1, 2], "kwargs": {}})
    asked = previewed(client, topic="jobs.default", payload=job)
    assert "The topic 'jobs.default' is a queue of jobs." in unescape(asked.content.decode())
    assert not sentences(asked)
    with pytest.raises(OperationRefused, match="could run any task with any arguments"):
        operations.publish("jobs.default", {"task": "tests.app.jobs.add"}, actor="ada")
    assert not OutboxMessage.objects.exists()


def test_publishing_needs_the_permission_to_view_the_topic(make):
    client = make(on=[("view_dashboard", "t"), ("publish_messages", "t"), ("publish_messages", "hidden.topic")])
    asked = previewed(client, topic="t", payload="1")
    answer = client.post(ADDRESS, {**fields(asked), "topic": "hidden.topic"})
    assert answer.status_code == 403
    assert "You may publish to these topics: t. Choose one of them." in unescape(answer.content.decode())


@pytest.mark.parametrize("sequenced", [False, True])
def test_the_same_id_in_another_topic_is_another_message(client, sequenced):
    publish("u", 1, id="x", key="k")
    if sequenced:
        sequence()
    found = operations.publish("t", 2, id="x", key="k", actor="ada")
    assert found.changed == 1
    assert OutboxMessage.objects.filter(topic="t").count() == 1

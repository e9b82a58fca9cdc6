"""queuedropgroup."""

from __future__ import annotations

import builtins

import pytest
from django.core.management import CommandError

from django_mysqlqueue import Message, publish, publish_many
from django_mysqlqueue.models import (
    ConsumerGroup,
    ConsumerOffset,
    DeliveryState,
    PartitionLease,
    QueueMessage,
    SubscriberHeartbeat,
)
from django_mysqlqueue.operations import dropping
from django_mysqlqueue.operations.limits import OperationLimits
from tests.support.commands import run
from tests.support.harness import USING, Sub, handler
from tests.support.internals import GroupRef, heartbeats

GROUP_STATE = (PartitionLease, ConsumerOffset, DeliveryState, SubscriberHeartbeat)


@pytest.fixture
def answer(monkeypatch):
    """Answers the command's question; gives the questions asked."""
    asked = []

    def give(text):
        monkeypatch.setattr(builtins, "input", lambda prompt="": (asked.append(prompt), text)[1])
        return asked

    return give


@pytest.fixture
def no_question(monkeypatch):
    def refuse(prompt=""):
        raise AssertionError(f"asked: {prompt}")

    monkeypatch.setattr(builtins, "input", refuse)


@pytest.fixture
def two_groups(db):
    """Groups ``gone`` and ``stays`` of one topic, both with every kind of state; their subscribers have left."""
    publish_many("t", [Message(number, key=f"k{number}") for number in range(6)])
    failing = [handler(group=name, function=lambda delivery: delivery.nack(delay=60)) for name in ("gone", "stays")]
    sub = Sub(*failing, handler(group="gone", topic="u"))
    publish("u", 1)
    sub.settle()
    sub.heart.beat()
    heartbeats.deregister(USING, sub.name, list(sub.handlers))
    for model in GROUP_STATE:
        for name in ("gone", "stays"):
            assert model.objects.filter(consumer_group=name, topic="t").exists(), (model, name)
    return sub


def state_of(group, topic):
    return [model.objects.filter(consumer_group=group, topic=topic).count() for model in (ConsumerGroup, *GROUP_STATE)]


def test_drop_leaves_no_state(two_groups, no_question):
    stays, other_topic = state_of("stays", "t"), state_of("gone", "u")
    said = run("queuedropgroup", "gone", "t", "--noinput")
    assert said.splitlines() == [
        "The group gone/t and its position in every partition will be deleted.",
        "Messages that the group has not settled: 6.",
        "Messages that GC keeps only for this group, and may delete afterwards: 0.",
        "The group gone/t is dropped.",
    ]
    assert state_of("gone", "t") == [0, 0, 0, 0, 0]
    assert state_of("stays", "t") == stays
    assert state_of("gone", "u") == other_topic
    assert QueueMessage.objects.filter(topic="t").count() == 6


def test_drop_deletes_in_chunks(two_groups):
    dropping.drop(USING, GroupRef("gone", "t"), limits=OperationLimits(rows=2), actor="test")
    assert state_of("gone", "t") == [0, 0, 0, 0, 0]


def test_a_dropped_group_starts_anew(two_groups):
    run("queuedropgroup", "gone", "t", "--noinput")
    got = []
    Sub(handler(group="gone", function=lambda delivery: got.append(delivery.attempt))).settle()
    assert got == [1] * 6


def test_drop_asks(two_groups, answer):
    asked = answer("gone")
    said = run("queuedropgroup", "gone", "t")
    assert len(asked) == 1
    assert "Type the group's name" in asked[0]
    assert said.endswith("The group gone/t is dropped.\n")
    assert state_of("gone", "t") == [0, 0, 0, 0, 0]


@pytest.mark.parametrize("text", ["", "yes", "y", "Gone", "gone ", "stays", "t"])
def test_drop_takes_only_the_name_for_an_answer(two_groups, answer, text):
    before = state_of("gone", "t")
    answer(text)
    with pytest.raises(CommandError, match=r"Nothing was changed\."):
        run("queuedropgroup", "gone", "t")
    assert state_of("gone", "t") == before


@pytest.mark.parametrize(("group", "topic"), [("gon", "t"), ("gone", "v"), ("GONE", "t"), ("gone ", "t")])
def test_drop_of_an_unknown_group_names_the_known_ones(two_groups, no_question, group, topic):
    with pytest.raises(CommandError) as raised:
        run("queuedropgroup", group, topic, "--noinput")
    text = str(raised.value)
    assert f"There is no group {group!r} on topic {topic!r}." in text
    for known in ("gone on t", "stays on t", "gone on u"):
        assert known in text


def test_drop_without_any_group(db):
    with pytest.raises(CommandError, match="Registered: none"):
        run("queuedropgroup", "g", "t", "--noinput")


def test_drop_warns_of_live_subscribers_and_stops_them(db):
    publish_many("t", [Message(number, key="k") for number in range(3)])
    sub = Sub(handler(), name="busy")
    sub.step()
    said = run("queuedropgroup", "g", "t", "--noinput")
    assert f"Live subscribers: {sub.name}." in said
    assert "Messages that GC keeps only for this group, and may delete afterwards: 3." in said
    assert said.endswith("The group g/t is dropped.\n")
    assert state_of("g", "t") == [0, 0, 0, 0, 0]
    sub.settle()
    publish_many("t", [Message(number, key="k") for number in range(3)])
    sub.settle()
    assert state_of("g", "t")[0] == 0, "a claim must not bring it back"
    assert not DeliveryState.objects.exists()
    assert not ConsumerOffset.objects.exists()


def test_drop_does_not_warn_without_live_subscribers(two_groups):
    assert "Live subscribers" not in run("queuedropgroup", "gone", "t", "--noinput")

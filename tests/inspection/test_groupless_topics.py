"""Topics without a consumer group are reported."""

from __future__ import annotations

import io
import json
import re
from unittest.mock import ANY

import pytest
from django.core.management import call_command

from django_mysqlqueue import publish, publish_many
from django_mysqlqueue.inspection import Bounds, check_health, queue_problems, scheduled
from django_mysqlqueue.models import OutboxMessage
from tests.support.groupless import TYPO, command, found, in_log, register, send, texts
from tests.support.harness import USING, Sub, handler, sequence
from tests.support.internals import Session

pytestmark = pytest.mark.usefixtures("db")

DAY = 86_400


def test_a_topic_that_nobody_reads_is_a_problem(clock):
    assert texts() == []
    send()
    alone = (
        "Topic 'orders.plced' has 1 message but no consumer group. "
        "GC deletes each message 7 d after it entered the log, "
    )
    assert texts() == [alone + "the first in 7 d."]
    clock.advance(2 * DAY)
    send(2)
    (problem,) = found()
    assert problem.text.endswith(
        " has 3 messages but no consumer group. GC deletes each message 7 d after it entered the log, the first in 5 d."
    )
    assert (problem.severity, problem.topic, problem.ref) == (1, TYPO, None)
    clock.advance(9 * DAY)
    assert texts()[0].endswith("the first in 0 s.")
    register()
    assert texts() == []


def test_the_oldest_is_found_in_whatever_partition_it_is(clock):
    publish(TYPO, 1, key="z")
    sequence()
    clock.advance(3 * DAY)
    publish(TYPO, 1, key="a")
    sequence()
    assert texts()[0].endswith("the first in 4 d.")


@pytest.mark.promise("Topics without a consumer group")
def test_what_waits_in_the_outbox_counts():
    """Where no subscriber runs nothing comes into the log, and what is scheduled may be called off in time."""
    publish(TYPO, 1)
    publish(TYPO, 2, delay=3600)
    expected = (
        "Topic 'orders.plced' has 2 messages but no consumer group. "
        "GC deletes each message 7 d after it entered the log."
    )
    assert texts() == [expected]
    sequence()
    assert texts() == [expected[:-1] + ", the first in 7 d."]


def test_it_counts_no_further_than_a_bound():
    publish_many("a", range(2))
    publish_many(TYPO, range(5))
    assert [text.partition(" but")[0] for text in texts(Bounds(scheduled=3))] == [
        "Topic 'a' has 2+ messages",
        "Topic 'orders.plced' has 2+ messages",
    ]
    sequence()
    assert [text.partition(" but")[0] for text in texts(Bounds(count=3))] == [
        "Topic 'orders.plced' has 3+ messages",
        "Topic 'a' has 2 messages",
    ]


def test_of_very_many_partitions_the_oldest_is_not_looked_for():
    send(4)
    assert texts(Bounds(groupless_partitions=4))[0].endswith(" 7 d after it entered the log, the first in 7 d.")
    assert texts(Bounds(groupless_partitions=3))[0].endswith(" 7 d after it entered the log.")


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ({"ORPHAN_RETENTION": None}, "GC never deletes them."),
        ({"RETENTION": 30 * DAY}, "GC deletes each message 30 d after it entered the log, the first in 30 d."),
        (
            {"TOPICS": {TYPO: {"RETENTION": 7200}}},
            "GC deletes each message 2 h after it entered the log, the first in 2 h.",
        ),
    ],
)
def test_it_says_what_becomes_of_them(settings, value, says):
    settings.MYSQLQUEUE = value
    send()
    assert [text.partition("group. ")[2] for text in texts()] == [says]


def test_topics_that_are_meant_to_have_no_group_are_no_problem(settings):
    publish("t", 1)
    Sub(handler(function=lambda delivery: delivery.reject("no"))).settle()
    sequence()
    assert in_log("t_dlq") == 1
    send()
    publish(TYPO, 1, delay=3600)
    settings.MYSQLQUEUE = {"TOPICS": {TYPO: {"GROUPLESS": True}}}
    assert texts() == []
    settings.MYSQLQUEUE = {"TOPICS": {TYPO: {"GROUPLESS": False}}}
    assert len(texts()) == 1


@pytest.mark.parametrize(("topic", "shown"), [("a b", "'a b'"), ("t\n", "'t\\n'")])
def test_topics_of_plain_sql_are_named_too(topic, shown):
    OutboxMessage.objects.create(topic=topic, payload=b"1")
    sequence()
    assert [text.partition(" has")[0] for text in texts()] == [f"Topic {shown}"]


def test_a_group_that_is_registered_meanwhile_is_seen(monkeypatch):
    """Its topic's first message may come right after that: groups are read last."""
    send()
    real = scheduled.topics

    def topics(*arguments, **options):
        register()
        return real(*arguments, **options)

    monkeypatch.setattr(scheduled, "topics", topics)
    assert queue_problems.find_groupless(Session(USING), [TYPO]) == {}


def health_of(*arguments: str) -> tuple[int, str]:
    output = io.StringIO()
    try:
        call_command("queuehealth", *arguments, stdout=output, no_color=True)
    except SystemExit as end:
        return int(str(end.code)), output.getvalue()
    return 0, output.getvalue()


def test_queuehealth_fails(settings):
    send(2)
    text = (
        "Topic 'orders.plced' has 2 messages but no consumer group. "
        "GC deletes each message 7 d after it entered the log, the first in 7 d."
    )
    advice = "Correct the topic where it is published, or deploy the handler."
    code, output = health_of()
    assert (code, output.splitlines()[0]) == (1, f"PROBLEM  {text} {advice}")
    assert re.fullmatch(r"         since \S+ \S+ \(.*\)", output.splitlines()[1])
    code, output = health_of("--format", "json")
    assert code == 1
    assert json.loads(output)["problems"] == [
        {
            "kind": "groupless",
            "text": text,
            "group": None,
            "topic": TYPO,
            "partition": None,
            "since": ANY,
            "error": None,
        }
    ]
    settings.MYSQLQUEUE = {"TOPICS": {TYPO: {"GROUPLESS": True}}}
    assert health_of()[0] == 0


def test_queuehealth_of_one_group_is_not_about_other_topics():
    register("t")
    send()
    for arguments in (("--group", "g"), ("--topic", "t")):
        assert health_of(*arguments)[0] == 0
    assert health_of()[0] == 1
    assert [one.kind for one in check_health(using=USING).findings] == ["groupless"]


def test_queuestatus_says_the_same():
    publish(TYPO, 1, delay=3600)
    output = command("queuestatus", "--all")
    assert f"Degraded: {texts()[0]}\n" in output
    send(2)
    output = command("queuestatus", "--all")
    assert texts()[0] in output
    assert " has 3 messages but no consumer group." in output
    register()
    assert "no consumer group" not in command("queuestatus")

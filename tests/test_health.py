"""``queuehealth`` and the check for django-health-check: what counts as unwell, and who is told what."""

from __future__ import annotations

import asyncio
import io
import json

import pytest
from django.core.management import CommandError, call_command
from django.db import OperationalError, connection, connections
from django.db.models import F
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.urls import path
from health_check.exceptions import ServiceUnavailable
from health_check.views import HealthCheckView

from django_mysqlqueue import Message, publish, publish_many
from django_mysqlqueue.exceptions import OperationRefused
from django_mysqlqueue.health import QueueHealth
from django_mysqlqueue.models import DeliveryState, OutboxMessage, SubscriberHeartbeat
from django_mysqlqueue.service import groups, health, overview, sequencing, topics
from django_mysqlqueue.service.groups import GroupRef
from django_mysqlqueue.service.health import Limits
from django_mysqlqueue.service.subsets import Subset
from tests.harness import USING, Sub, handler, in_thread, sequence

urlpatterns = [
    path(
        "health/",
        HealthCheckView.as_view(
            checks=[("django_mysqlqueue.health.QueueHealth", {"max_lag": 2}), "health_check.checks.Database"]
        ),
    )
]


def run(*arguments):
    """(exit code, output)"""
    output = io.StringIO()
    try:
        call_command("queuehealth", *arguments, stdout=output, no_color=True)
    except SystemExit as end:
        return end.code, output.getvalue()
    return 0, output.getvalue()


def register(*refs):
    for group, topic in refs or (("g", "t"),):
        groups.register(USING, GroupRef(group, topic), mode="ordered", start="earliest")


def backlog(count=3, topic="t"):
    publish_many(topic, [Message(n, key="secret-key") for n in range(count)])
    sequence()


def kinds(*arguments):
    code, output = run("--format", "json", *arguments)
    found = json.loads(output)
    assert found["healthy"] == (not found["problems"])
    assert code == (0 if found["healthy"] else 1)
    return {(one["kind"], one["group"]) for one in found["problems"]}


# -- the command ----------------------------------------------------------------


def test_an_empty_queue_is_well(db):
    assert run() == (0, "Healthy: 0 groups, lag 0, 0 in the outbox.\n")
    assert run("--max-lag", "0", "--max-age", "0", "--min-subscribers", "1")[0] == 0


def test_a_working_queue_is_well(db, clock):
    backlog()
    sub = Sub(handler())
    sub.step()
    code, output = run("--max-lag", "3", "--max-age", "60", "--max-dead-letters", "0", "--min-subscribers", "1")
    assert (code, output) == (0, "Healthy: 1 group, lag 3, 0 in the outbox.\n")


@pytest.mark.parametrize(("limit", "code"), [("2", 1), ("3", 0)])
def test_max_lag(db, limit, code):
    backlog()
    Sub(handler())
    found, output = run("--max-lag", limit)
    assert found == code
    assert ("PROBLEM  g/t has a lag of 3; the limit is 2.\n" in output) == (code == 1)
    assert ("Healthy" in output) == (code == 0)


@pytest.mark.parametrize(("limit", "code"), [("19", 1), ("100", 0)])
def test_max_age(db, clock, limit, code):
    backlog()
    register()
    sub = Sub(handler())
    clock.advance(20)
    sub.heart.beat()
    assert run("--max-age", limit)[0] == code
    assert kinds("--max-age", limit) == ({("age", "g")} if code else set())


def test_max_age_holds_for_the_outbox_too(db, clock):
    register()
    publish("t", 1)
    clock.advance(12)
    assert kinds("--max-age", "11") == {("age", None)}
    _, output = run("--max-age", "11")
    assert "PROBLEM  The oldest message in the outbox waits for 12 s; the limit is 11 s.\n" in output
    assert kinds("--max-age", "60") == set()


def test_max_dead_letters(db):
    publish_many("t", range(2))
    sub = Sub(handler(function=lambda delivery: delivery.reject("never")), handler(group="other"))
    sub.settle()
    sequence()
    assert run()[0] == 0, "they are there until somebody sees to them: no alarm unasked"
    assert "note     g/t has given up on messages: 2 in t_dlq." in run()[1]
    assert kinds("--max-dead-letters", "2") == set()
    assert kinds("--max-dead-letters", "1") == {("dead_letters", "g")}


def test_min_subscribers(db, clock):
    Sub(handler(), handler(group="other"))
    Sub(handler())
    assert kinds("--min-subscribers", "1") == set()
    assert kinds("--min-subscribers", "2") == {("subscribers", "other")}
    assert "PROBLEM  other/t has 1 live subscriber; there should be 2.\n" in run("--min-subscribers", "2")[1]
    clock.advance(100)
    assert kinds("--min-subscribers", "1") == {("subscribers", "g"), ("subscribers", "other")}


def test_what_stands_still_needs_no_limit(db, clock):
    backlog()
    register()
    assert run()[0] == 0, "it has just come"
    clock.advance(100)
    assert kinds() == {("no_subscriber", "g")}
    publish("t", 1)
    clock.advance(100)
    assert kinds() == {("no_subscriber", "g"), ("outbox", None)}


def test_an_outbox_that_is_being_moved_is_no_alarm(db, clock, settings):
    """Ten thousand messages of a transaction that had lasted, and the sequencer is at them."""
    settings.MYSQLQUEUE = {"TOPICS": {"t": {"GROUPLESS": True}}}
    publish("t", 1)
    clock.advance(100)
    assert kinds() == {("outbox", None)}
    publish("t", 2)
    assert sequencing.sequence(USING, max_rows=1).moved == 1
    OutboxMessage.objects.update(created_at=F("created_at") - 100_000)
    code, output = run()
    assert code == 0
    assert "note     The outbox is behind: 1 message waits to be moved into the log" in output
    clock.advance(100)
    assert kinds() == {("outbox", None)}


def test_a_group_that_stands_still_with_a_living_subscriber(db, clock):
    backlog(2)
    sub = Sub(handler(function=lambda delivery: delivery.snooze(3600)))
    sub.step()
    clock.advance(500)
    sub.heart.beat()
    assert run()[0] == 0
    assert "Nothing of" not in run()[1], "it may take its time"
    clock.advance(200)
    sub.heart.beat()
    code, output = run()
    assert code == 0, "a long handler is no alarm"
    assert "note     Nothing of g/t has ended in ten minutes, with subscribers alive; 2 messages wait" in output
    sub.work()
    sub.flush()
    assert "Nothing of" not in run()[1], "it waits as its handler wants"


def test_filters(db, clock):
    backlog()
    backlog(topic="u")
    register(("g", "t"), ("h", "t"), ("g", "u"))
    Sub(handler())
    clock.advance(100)
    assert kinds() == {("no_subscriber", "g"), ("no_subscriber", "h")}
    found = json.loads(run("--format", "json", "--group", "h")[1])
    assert [(one["group"], one["topic"]) for one in found["groups"]] == [("h", "t")]
    assert kinds("--group", "h") == {("no_subscriber", "h")}
    assert kinds("--topic", "u", "--max-lag", "0") == {("lag", "g"), ("no_subscriber", "g")}
    assert kinds("--group", "g", "--group", "h", "--topic", "t", "--max-lag", "0") == {
        ("lag", "g"),
        ("lag", "h"),
        ("no_subscriber", "g"),
        ("no_subscriber", "h"),
    }
    publish("t", 1)
    clock.advance(100)
    assert ("outbox", None) in kinds("--group", "h"), "it concerns every group"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--group", "bling"), r"group 'bling': none is registered; there are: g, h"),
        (("--topic", "x"), r"topic 'x': none is registered; there are: t, u"),
        (("--group", "h", "--topic", "u"), r"group h: none of them is registered for the topic u"),
        (("--max-lag", "10000"), r"lag 10000: counts stop at 10,000, so it must be below that"),
        (("--max-dead-letters", "20000"), r"dead_letters 20000: counts stop"),
        (("--max-lag", "-1"), r"lag -1: must be at least 0"),
        (("--max-age", "nan"), r"age nan: must be at least 0"),
        (("--max-lag", "x"), r"--max-lag"),
    ],
)
def test_a_mistake_is_no_health(db, arguments, text):
    register(("g", "t"), ("h", "t"), ("g", "u"))
    with pytest.raises(CommandError, match=text):
        run(*arguments)


def test_a_count_that_stopped_is_not_taken_for_a_small_number(db, clock, monkeypatch):
    """Of very many partitions only so many are looked at."""
    monkeypatch.setattr(health, "MOST_PARTITIONS", 4)
    monkeypatch.setattr(topics, "NEWEST", 1)
    publish_many("t", [Message(n, key=f"k{n}") for n in range(10)])
    sequence()
    Sub(handler())
    found = json.loads(run("--format", "json", "--max-lag", "50")[1])
    assert found["groups"][0]["lag"] == {"value": 6, "exact": False}
    assert [one["kind"] for one in found["problems"]] == ["lag"]
    assert found["problems"][0]["text"] == "g/t has a lag of 6+; the limit is 50."
    clock.advance(40)
    monkeypatch.setattr(health, "MOST_PARTITIONS", 1000)
    assert kinds("--max-lag", "50") == set(), "all subscribers are being restarted: that alone is no alarm"
    assert kinds("--max-lag", "3") == {("lag", "g")}
    clock.advance(40)
    assert kinds("--max-lag", "50") == {("no_subscriber", "g")}, "but this is"
    Sub(handler())
    assert kinds("--max-lag", "50") == set()


def test_a_partition_that_nobody_takes(db, clock):
    backlog()
    sub = Sub(handler(), subset=Subset.parse(["other-*"], None))
    clock.advance(100)
    sub.heart.beat()
    found = json.loads(run("--format", "json")[1])
    (problem,) = found["problems"]
    assert (problem["kind"], problem["partition"]) == ("unserved", "secret-key")


def test_the_whole_of_the_json(db):
    backlog()
    Sub(handler())
    assert json.loads(run("--format", "json")[1]) == {
        "database": "default",
        "healthy": True,
        "problems": [],
        "notes": [],
        "groups": [
            {
                "group": "g",
                "topic": "t",
                "lag": {"value": 3, "exact": True},
                "oldest_unacked_age": pytest.approx(0, abs=60),
                "in_flight": {"value": 0, "exact": True},
                "retrying": {"value": 0, "exact": True},
                "dead_letters": {"value": 0, "exact": True},
                "subscribers": 1,
                "paused": False,
            }
        ],
        "outbox": {"value": 0, "exact": True},
    }


def test_another_database(db, queue_db):
    OutboxMessage.objects.using("queue").create(topic="t", payload=b"1", created_at=1)
    assert run()[0] == 0
    code, output = run("--database", "queue")
    assert code == 1
    assert "PROBLEM  The outbox grows" in output


def test_a_database_that_fails_is_no_health(db, monkeypatch):
    def fail(*_, **__):
        raise OperationalError("gone away")

    monkeypatch.setattr(overview, "read", fail)
    with pytest.raises(CommandError, match="The database 'default' does not answer: gone away"):
        run()


def test_looking_changes_nothing(db, clock):
    backlog()
    Sub(handler()).step()
    clock.advance(100)
    with CaptureQueriesContext(connection) as captured:
        health.check(USING, Limits(lag=1, age=1, dead_letters=1, subscribers=1))
    assert captured.captured_queries
    assert all(query["sql"].startswith("SELECT") for query in captured), captured.captured_queries


# -- django-health-check ----------------------------------------------------------


def result(**options):
    return asyncio.run(QueueHealth(**options).get_result())


def test_the_check(db):
    backlog()
    Sub(handler())
    assert QueueHealth(max_lag=3).run() is None
    with pytest.raises(ServiceUnavailable, match="g/t has a lag of 3; the limit is 2"):
        QueueHealth(max_lag=2).run()
    with pytest.raises(ServiceUnavailable, match="g/t has 1 live subscriber; there should be 2"):
        QueueHealth(min_subscribers=2).run()
    with pytest.raises(ServiceUnavailable, match="group 'x': none is registered"):
        QueueHealth(groups=["x"]).run()
    everything = QueueHealth(max_lag=3, topics=["t"], groups=["g"], max_age=60, max_dead_letters=0)
    assert everything.run() is None
    assert "max_lag=3" in repr(everything), "reports tell checks apart by it"


@pytest.mark.parametrize("options", [{"max_lag": -1}, {"max_age": "5"}, {"max_lag": 1.5}, {"min_subscribers": True}])
def test_bad_limits_are_refused_at_once(options):
    with pytest.raises(OperationRefused, match="must be"):
        QueueHealth(**options)


def test_its_words_name_no_key(db, clock):
    """Pages of health checks are often public, and keys are often people."""
    backlog()
    sub = Sub(handler(), subset=Subset.parse(["other-*"], None))
    clock.advance(100)
    sub.heart.beat()
    with pytest.raises(ServiceUnavailable) as caught:
        QueueHealth().run()
    assert str(caught.value) == "Unavailable: g/t: unserved."
    assert SubscriberHeartbeat.objects.exists()
    assert DeliveryState.objects.count() == 0


def test_a_database_that_does_not_answer(db, monkeypatch):
    def fail(*_, **__):
        raise OperationalError("user root, password secret")

    monkeypatch.setattr(overview, "read", fail)
    with pytest.raises(ServiceUnavailable) as caught:
        QueueHealth().run()
    assert str(caught.value) == "Unavailable: The queue's database 'default' does not answer."


def test_its_thread_keeps_no_connection(db):
    register()

    def check():
        QueueHealth().run()
        return connections[USING].connection

    assert in_thread(check) is None


def test_in_the_view(db, settings):
    settings.ROOT_URLCONF = __name__
    Sub(handler())
    client = Client()

    def get():
        response = client.get("/health/?format=json")
        return response.status_code, [text for check, text in response.json().items() if "QueueHealth" in check]

    assert get() == (200, ["OK"])
    backlog()
    assert get() == (500, ["Unavailable: g/t has a lag of 3; the limit is 2."])
    assert result(max_lag=2).error is not None
    assert result(max_lag=3).error is None

"""queuehealth: its limits, filters and formats."""

from __future__ import annotations

import json

import pytest
from django.core.management import CommandError
from django.db import OperationalError, connection
from django.db.models import F
from django.test.utils import CaptureQueriesContext

from django_mysqlqueue import Message, publish, publish_many
from django_mysqlqueue.inspection import Bounds, HealthLimits, check_health
from django_mysqlqueue.management.commands import queuehealth
from django_mysqlqueue.models import ConsumerGroup, OutboxMessage
from tests.support.harness import USING, Sub, handler, sequence
from tests.support.health import backlog, kinds, register, run
from tests.support.internals import Subset, log, sequencing

pytestmark = pytest.mark.still_clock


def test_an_empty_queue_is_well(db):
    assert run() == (0, "Healthy: 0 groups, backlog 0, outbox 0.\n")
    assert run("--max-lag", "0", "--max-age", "0", "--min-subscribers", "1")[0] == 0


def test_a_working_queue_is_well(db, clock):
    backlog()
    sub = Sub(handler())
    sub.step()
    code, output = run("--max-lag", "3", "--max-age", "60", "--max-dead-letters", "0", "--min-subscribers", "1")
    assert (code, output) == (0, "Healthy: 1 group, backlog 3, outbox 0.\n")


@pytest.mark.parametrize(("limit", "code"), [("2", 1), ("3", 0)])
def test_max_lag(db, limit, code):
    backlog()
    Sub(handler())
    found, output = run("--max-lag", limit)
    assert found == code
    assert ("PROBLEM  The backlog of g/t is 3; the limit is 2.\n" in output) == (code == 1)
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
    assert kinds("--max-age", "11") == {("age", None), ("age", "g")}, "the group's oldest message is there"
    _, output = run("--max-age", "11")
    assert "PROBLEM  The oldest message in the outbox has waited for 12 s; the limit is 11 s.\n" in output
    assert kinds("--max-age", "60") == set()


def test_max_dead_letters(db):
    publish_many("t", range(2))
    sub = Sub(handler(function=lambda delivery: delivery.reject("never")), handler(group="other"))
    sub.settle()
    sequence()
    assert run()[0] == 0, "they are there until somebody sees to them: no alarm unasked"
    assert "note     g/t has dead-lettered messages: 2 in t_dlq." in run()[1]
    assert kinds("--max-dead-letters", "2") == set()
    assert kinds("--max-dead-letters", "1") == {("dead_letters", "g")}


def test_min_subscribers(db, clock):
    Sub(handler(), handler(group="other"))
    Sub(handler())
    assert kinds("--min-subscribers", "1") == set()
    assert kinds("--min-subscribers", "2") == {("subscribers", "other")}
    assert "PROBLEM  other/t has 1 live subscriber; the minimum is 2.\n" in run("--min-subscribers", "2")[1]
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
    assert "note     The outbox is behind: 1 message is waiting to be moved into the log" in output
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
    assert "note     g/t is stalled: it has live subscribers, but no delivery has ended in the last 10 min; " in output
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
        (("--group", "bling"), r"No group 'bling' is registered. Registered: g, h"),
        (("--topic", "x"), r"No topic 'x' is registered. Registered: t, u"),
        (("--group", "h", "--topic", "u"), r"No group h is registered on topic u"),
        (("--max-lag", "10000"), r"lag 10000: must be below 10,000: counting stops there"),
        (("--max-dead-letters", "20000"), r"dead_letters 20000: must be below"),
        (("--max-lag", "-1"), r"lag -1: must be at least 0"),
        (("--max-age", "nan"), r"age nan: must be at least 0"),
        (("--max-lag", "x"), r"--max-lag"),
        (("--max-failure-ratio", "50"), r"max_failure_ratio 50.0: must be a number from 0 to 1"),
        (("--max-recent-dead-letters", "10000"), r"max_recent_dead_letters 10000: must be from 0 to 9999"),
        (("--min-attempts", "0"), r"min_attempts 0: must be from 1"),
        (("--window", "5"), r"window 5.0: must be at least 60 and at most 21,600"),
    ],
)
def test_a_mistake_is_no_health(db, arguments, text):
    register(("g", "t"), ("h", "t"), ("g", "u"))
    with pytest.raises(CommandError, match=text):
        run(*arguments)


def test_a_count_that_stopped_is_not_taken_for_a_small_number(db, clock, settings, monkeypatch):
    """Of very many partitions only so many are looked at."""
    settings.MYSQLQUEUE = {"TOPICS": {"other": {"GROUPLESS": True}}}
    monkeypatch.setattr(queuehealth.Command, "bounds", Bounds(partitions=4))
    publish_many("t", [Message(n, key=f"k{n}") for n in range(10)])
    publish_many("other", range(log.NEWEST - 1))  # so the last one of t is the only one among the newest
    sequence()
    Sub(handler())
    found = json.loads(run("--format", "json", "--max-lag", "50")[1])
    assert found["groups"][0]["lag"] == {"value": 5, "exact": False}
    assert [one["kind"] for one in found["problems"]] == ["lag"]
    assert found["problems"][0]["text"] == "The backlog of g/t is 5+; the limit is 50."
    clock.advance(40)
    monkeypatch.setattr(queuehealth.Command, "bounds", Bounds(partitions=1000))
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
                "recent_dead_letters": {"value": 0, "exact": True},
                "subscribers": 1,
                "paused": False,
            }
        ],
        "outbox": {"value": 0, "exact": True},
        "outbox_oldest_age": None,
    }


def test_another_database(db, queue_db):
    OutboxMessage.objects.using("queue").create(topic="t", payload=b"1", created_at=1)
    assert run()[0] == 0
    code, output = run("--database", "queue")
    assert code == 1
    assert "PROBLEM  No subscriber is running; 1 message is waiting" in output


def test_a_database_that_fails_is_no_health(db, monkeypatch):
    def fail(*_, **__):
        raise OperationalError("database is locked")

    monkeypatch.setattr("django_mysqlqueue.inspection.health.get_overview", fail)
    with pytest.raises(CommandError, match=r"The database 'default' (is busy|reports an error).*: database is locked"):
        run()


def test_looking_changes_nothing(db, clock):
    backlog()
    Sub(handler()).step()
    clock.advance(100)
    with CaptureQueriesContext(connection) as captured:
        check_health(HealthLimits(lag=1, age=1, dead_letters=1, subscribers=1), using=USING)
    assert captured.captured_queries
    reads = ("SELECT", "(SELECT", "EXPLAIN SELECT", "SET SESSION information_schema_stats_expiry")
    assert [query["sql"] for query in captured if not query["sql"].startswith(reads)] == []


def test_a_filter_that_cannot_be_parsed(db, clock):
    """The group claims nothing, so this is as urgent as a group without subscribers."""
    backlog()
    sub = Sub(handler())
    ConsumerGroup.objects.update(filter={"region": [{"sounds-like": "eu"}]})
    sub.settle()
    code, output = run()
    assert code == 0
    assert (
        "note     Subscribers of this release claim nothing for g/t, because they cannot parse its filter: " in output
    )
    assert "there is no operator 'sounds-like'" in output
    assert output.splitlines()[0].endswith(
        "3 messages are waiting. Upgrade the subscribers, or set another filter with queueset."
    )
    clock.advance(100)
    sub.heart.beat()
    assert kinds() == {("filter", "g")}
    clock.advance(1000)
    sub.heart.beat()
    assert kinds() == {("filter", "g")}
    assert "is stalled" not in run()[1], "the reason is known"
    ConsumerGroup.objects.update(paused=True)
    assert kinds() == set()
    ConsumerGroup.objects.update(paused=False, filter={"region": ["eu"]})
    assert ("filter", "g") not in kinds()
    sub.settle()
    assert run()[0] == 0


def test_an_idle_group_with_a_filter_that_cannot_be_parsed(db, clock):
    sub = Sub(handler())
    ConsumerGroup.objects.update(filter={"region": [{"sounds-like": "eu"}]})
    clock.advance(1000)
    sub.heart.beat()
    code, output = run()
    assert code == 0
    assert "0 messages are waiting." in output

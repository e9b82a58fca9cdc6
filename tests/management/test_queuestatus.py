"""queuestatus."""

from __future__ import annotations

import datetime
import io
import json
import re

import pytest
from django.core.management import CommandError, call_command
from django.core.management.base import OutputWrapper
from django.core.management.color import no_style
from django.db import connection
from django.test.utils import CaptureQueriesContext

from django_mysqlqueue import Message, operations, publish, publish_many
from django_mysqlqueue.filter_policies import parse
from django_mysqlqueue.management.banner import show_banner
from django_mysqlqueue.models import (
    ConsumerGroup,
    ConsumerOffset,
    DeliveryState,
    OutboxMessage,
    PartitionLease,
    QueueMessage,
    Sequencer,
    SubscriberHeartbeat,
)
from django_mysqlqueue.options.backoff import Backoff
from django_mysqlqueue.options.delivery_limits import parse_rate
from django_mysqlqueue.text.humanize import moment
from tests.support.commands import run, table
from tests.support.harness import USING, Sub, handler, lag, sequence
from tests.support.internals import EVERYTHING, GroupRef, Session, get_settings, groups
from tests.support.job_pages import job

GROUP_STATE = (PartitionLease, ConsumerOffset, DeliveryState, SubscriberHeartbeat)


def status():
    return json.loads(run("queuestatus", "--format", "json"))


def group_status(group="g", topic="t"):
    (found,) = (one for one in status()["groups"] if (one["group"], one["topic"]) == (group, topic))
    return found


def fail(delivery):
    raise ValueError("no")


# -- queuestatus --------------------------------------------------------------


def test_errors_are_listed_by_kind(db):
    assert "Errors" not in run("queuestatus", "--all")

    def function(delivery):
        raise KeyError(f"order-{delivery.payload}")

    publish_many("t", (Message(number, key="k") for number in range(3)))
    Sub(handler(function=function, max_attempts=1)).settle()
    publish("t", 9)
    sequence()
    Sub(handler("t", "h", function, max_attempts=9, backoff=Backoff(initial=3600, jitter=0))).settle()
    sequence()
    shown = [
        [row[name] for name in ("group", "error", "retrying", "dead letters", "in 24 h")]
        for row in table(run("queuestatus", "--all"), "Errors")
    ]
    assert shown == [
        ["h", "KeyError: 'order-<number>'", "4", "0", "4"],
        ["g", "KeyError: 'order-<number>'", "0", "3", "3"],
    ]
    first, second = status()["errors"]
    assert (first["group"], first["retrying"], first["dead_letters"], first["failed_attempts"]) == ("h", 4, 0, 4)
    assert (second["group"], second["retrying"], second["dead_letters"], second["failed_attempts"]) == ("g", 0, 3, 3)
    assert {one["error"] for one in (first, second)} == {"KeyError: 'order-<number>'"}
    assert (first["class"], first["states"], second["states"]) == ("KeyError", ["retrying"], ["dead_letters"])
    assert first["exact"]
    assert first["dead_letter"] is None
    assert second["dead_letter"] == QueueMessage.objects.filter(topic="t_dlq").latest("offset").offset


def test_errors_of_a_key(db):
    publish_many("t", (Message(number, key="ab"[number % 2]) for number in range(3)))
    Sub(handler(function=fail, max_attempts=1)).settle()
    sequence()
    assert [row["dead letters"] for row in table(run("queuestatus"), "Errors")] == ["3"]
    assert [row["dead letters"] for row in table(run("queuestatus", "--key", "b"), "Errors")] == ["1"]
    assert json.loads(run("queuestatus", "--key", "c", "--format", "json"))["errors"] == []


def test_all_errors_are_shown(db):
    def function(delivery):
        raise ValueError("x" * (delivery.payload + 1))

    publish_many("t", range(21))
    Sub(handler(function=function, max_attempts=9, backoff=Backoff(initial=3600, jitter=0))).settle()
    text = run("queuestatus", "--all")
    assert len(table(text, "Errors")) == 21
    assert len(status()["errors"]) == 21


def test_status_of_an_empty_queue(db):
    assert "The queue has no messages and no consumer groups." in run("queuestatus", "--all")
    found = status()
    assert (found["database"], found["last_offset"], found["topics"], found["groups"]) == (USING, 0, [], [])


@pytest.mark.promise("Health")
def test_lag_is_a_count_of_messages(db):
    """Other topics' messages between them raise the offsets, not the lag."""
    for number in range(20):
        publish("t", number, key=f"k{number % 3}")
        publish_many("noise", range(10))
    sequence()
    sub = Sub(handler(), handler(topic="noise", group="n"), claim_size=5, prefetch=5)
    assert group_status()["lag"] == 20
    sub.step()
    sub.work(2)
    sub.flush()
    of_t = QueueMessage.objects.filter(topic="t")
    settled = DeliveryState.objects.filter(consumer_group="g", acked=True).count()
    below = sum(
        of_t.filter(partition_key=key, offset__lte=offset).count()
        for key, offset in ConsumerOffset.objects.filter(consumer_group="g").values_list(
            "partition_key", "offset_acked"
        )
    )
    assert settled + below > 0
    assert group_status()["lag"] == 20 - settled - below
    assert {row["group/topic"]: row["backlog"] for row in table(run("queuestatus", "--all"), "Groups")}["g/t"] == str(
        20 - settled - below
    )
    sub.settle(rounds=500)
    assert group_status()["lag"] == 0
    assert group_status("n", "noise")["lag"] == 0
    assert group_status()["oldest_unacked_age"] is None


def test_lag_of_out_of_order_acks(db):
    """Acked above a hole counts as done although the watermark stands."""
    publish_many("t", [Message(number, key="k") for number in range(1, 6)])
    sub = Sub(handler(function=lambda delivery: delivery.nack(delay=60) if delivery.payload == 1 else None))
    sub.step()
    lags = []
    for _ in range(5):
        sub.work(1)
        sub.flush()
        lags.append(lag())
    assert lags == [5, 4, 3, 2, 1]
    found = group_status()
    assert (found["lag"], found["retrying"], found["in_flight"]) == (1, 1, 0)


def test_lag_of_a_group_that_starts_late_or_is_addressed(db):
    publish_many("t", range(4))
    sequence()
    groups.register(USING, GroupRef("late", "t"), mode="ordered", start="latest")
    groups.register(USING, GroupRef("early", "t"), mode="ordered", start="earliest")
    publish_many("t", range(3))
    OutboxMessage.objects.filter(payload=b"2").update(target_group="late")
    sequence()
    assert {one["group"]: one["lag"] for one in status()["groups"]} == {"late": 3, "early": 6}


def test_status_counts_by_topic(db, clock):
    publish_many("a", [Message(1, key="x"), Message(2, key="x"), Message(3, key="y")])
    sequence()
    publish("a", 4)
    publish_many("a", [Message(5, delay=60), Message(6, delay=7200)])
    publish("b", 1, delay=60)
    expected = [
        {"topic": "a", "in_log": 3, "partitions": 2, "waiting": 1, "scheduled": 2, "is_dlq": False},
        {"topic": "b", "in_log": 0, "partitions": 0, "waiting": 0, "scheduled": 1, "is_dlq": False},
    ]
    found = status()
    since = [one.pop("waiting_since") for one in found["topics"]]
    assert found["topics"] == expected
    assert since[0] <= found["now"]
    assert since[1] is None
    assert table(run("queuestatus", "--all"), "Topics") == [
        {"topic": "a", "in log": "3", "partitions": "2", "outbox": "1", "scheduled": "2"},
        {"topic": "b", "in log": "0", "partitions": "0", "outbox": "0", "scheduled": "1"},
    ]
    clock.advance(61)
    assert [(one["waiting"], one["scheduled"]) for one in status()["topics"]] == [(2, 1), (1, 0)]


def test_status_of_work_in_flight_and_its_owner(db):
    publish_many("t", [Message(number, key=f"k{number}") for number in range(4)])
    sub = Sub(handler(), handler(group="s", mode="shared"), name="me")
    sub.step()
    found = group_status()
    assert (found["lag"], found["in_flight"], found["retrying"]) == (4, 4, 0)
    assert found["subscribers"] == [sub.name]
    assert found["partitions_owned"] == {sub.name: 4}
    assert found["mode"] == "ordered"
    assert not status()["problems"]
    assert group_status("s")["in_flight"] == 4
    assert group_status("s")["mode"] == "shared"
    text = run("queuestatus", "--all")
    assert table(text, "Leases") == [{"group": "g", "topic": "t", "owner": sub.name, "partitions": "4"}]
    assert "Problems" not in text
    sub.settle()
    assert group_status()["in_flight"] == 0
    assert group_status("s")["in_flight"] == 0


def abandoned():
    """The groups with work and no live subscribers, and how bad that is."""
    return {one["group"]: one["severity"] for one in status()["problems"] if one["kind"] == "no_subscriber"}


@pytest.mark.promise("Health")
def test_status_names_what_is_abandoned(db, clock):
    publish_many("t", range(3))
    sequence()
    groups.register(USING, GroupRef("forgotten", "t"), mode="ordered", start="earliest")
    groups.register(USING, GroupRef("idle", "empty"), mode="ordered", start="earliest")
    sub = Sub(handler(group="alive"))
    assert abandoned() == {"forgotten": 2}, "its subscribers may be being restarted"
    problems = run("queuestatus", "--all").split("For information\n")[1].split("\n\n")[0]
    assert "No live subscribers for forgotten/t; 3 messages are waiting" in problems
    assert "alive" not in problems
    assert "idle" not in problems
    clock.advance(31)
    assert abandoned() == {"alive": 2, "forgotten": 2}, "its heartbeat is older than the lease"
    assert group_status("alive")["subscribers"] == []
    clock.advance(31)
    sub.heart.beat()
    assert abandoned() == {"forgotten": 0}


def test_status_of_dead_letters(db):
    """They are counted for the group that failed them, of its own topic."""
    publish_many("t", range(3))
    publish_many("u", range(2))
    Sub(
        handler(function=fail, max_attempts=1),
        handler(group="fine"),
        handler(topic="u", function=fail, max_attempts=1),
    ).settle()
    sequence()
    assert group_status()["dead_letters"] == 3
    assert group_status("fine")["dead_letters"] == 0
    assert group_status(topic="u")["dead_letters"] == 2
    assert {one["topic"]: (one["in_log"], one["is_dlq"]) for one in status()["topics"]} == {
        "t": (3, False),
        "t_dlq": (3, True),
        "u": (2, False),
        "u_dlq": (2, True),
    }


def test_status_names_a_paused_group(db):
    publish("t", 1)
    Sub(handler(function=fail, max_attempts=1), handler(topic="t_dlq", group="d", function=fail)).settle(rounds=4)
    ConsumerGroup.objects.filter(consumer_group="g").update(paused=True)
    assert group_status()["paused"]
    text = run("queuestatus", "--all")
    assert "g/t is paused" in text
    assert {row["group/topic"]: row["state"] for row in table(text, "Groups")}["g/t"] == "paused"


def test_status_says_how_old_the_oldest_is(db, clock):
    publish("t", 1, key="a")
    sequence()
    groups.register(USING, GroupRef("g", "t"), mode="ordered", start="earliest")
    clock.advance(100)
    publish("t", 2, key="b")
    sequence()
    assert 100 <= group_status()["oldest_unacked_age"] < 160
    for seconds, shown in ((0, "1 min 4"), (7 * 60, "8 min 4"), (3 * 3600, "3 h 9 min"), (3 * 86400, "3 d 3 h")):
        clock.advance(seconds)
        assert table(run("queuestatus", "--all"), "Groups")[0]["oldest"].startswith(shown)


@pytest.mark.still_clock
def test_status_says_when_it_was_sequenced(db, clock):
    assert "last offset 0, sequencer never active." in run("queuestatus", "--all")
    publish("t", 1)
    sequence()
    clock.advance(50)
    offset = QueueMessage.objects.get().offset
    assert f"Queue in database 'default': last offset {offset}, sequencer last active 50 s ago." in run(
        "queuestatus", "--all"
    )
    assert status()["last_offset"] == offset


def test_status_changes_nothing(db):
    publish_many("t", range(3))
    Sub(handler()).step()
    models = (*GROUP_STATE, OutboxMessage, QueueMessage, Sequencer, ConsumerGroup)
    before = [list(model.objects.order_by("pk").values()) for model in models]
    run("queuestatus", "--all")
    status()
    assert [list(model.objects.order_by("pk").values()) for model in models] == before


def test_unknown_format(db):
    with pytest.raises(CommandError, match="xml"):
        run("queuestatus", "--format", "xml")


# -- at three in the morning --------------------------------------------------


def test_status_with_every_subscriber_down(db, clock):
    """Nobody moves the outbox: the plainest outage must not look like a quiet night."""
    sub = Sub(handler())
    sub.settle()
    sub.leave()
    publish_many("t", range(3))
    publish("t", 4, delay=60)
    clock.advance(20)
    group = group_status()
    assert (group["lag"], abandoned()) == (0, {"g": 2})
    assert 19 < group["oldest_unacked_age"] < 25
    text = r"No subscriber is running; 3 messages are waiting, the oldest for 2\d s\."
    first, facts, next_step, symptoms = run("queuestatus").splitlines()[2:6]
    assert re.fullmatch(f"Stopped: {text}", first)
    assert re.fullmatch(r"    3 waiting messages · since \d{4}-\d\d-\d\d \d\d:\d\d:\d\d \(2\d s\)", facts)
    assert symptoms == "    2 symptoms: --all"
    assert next_step == "Next step: Start “manage.py runsubscriber”."
    verbose = run("queuestatus", "--all")
    assert "    - No live subscribers for g/t; 3 messages are waiting, the oldest for 2" in verbose
    found = json.loads(run("queuestatus", "--format", "json"))
    assert (found["status"]["state"], found["status"]["next_step"]) == (
        "stopped",
        next_step.removeprefix("Next step: "),
    )
    assert re.fullmatch(text, found["status"]["text"])
    assert [(one["kind"], one["messages"], one["problems"]) for one in found["causes"]] == [("no_subscriber", 3, 2)]
    health = io.StringIO()
    with pytest.raises(SystemExit):
        call_command("queuehealth", format="json", stdout=health)
    told = json.loads(health.getvalue())
    facts = [
        {one["text"]: (one["since"], one["error"]) for one in those}
        for those in (found["problems"], [*told["problems"], *told["notes"]])
    ]
    assert facts[0] == facts[1]
    Sub(handler())
    assert not abandoned()


def test_retrying_counts_failures_and_not_what_was_given_back(db):
    publish_many("t", [Message(n, key="k") for n in range(4)])
    sub = Sub(handler(function=lambda delivery: delivery.nack(60)))
    sub.step()
    sub.work(1)
    sub.leave()
    group = group_status()
    assert (group["lag"], group["retrying"], group["in_flight"]) == (4, 1, 0)


def test_a_mistyped_topic_is_named_at_the_start(db, capsys):
    publish("orders", 1)
    sequence()
    out = OutputWrapper(io.StringIO())
    one = handler(topic="order")
    show_banner(
        out,
        no_style(),
        title="x",
        databases={"default": {one.ref: one}},
        settings=get_settings(),
        threads={"default": 1},
        claim_size=1,
        subset=EVERYTHING,
    )
    assert "topic 'order' has no messages; topics with messages but no handler here: orders." in out._out.getvalue()


def test_the_backlog_by_priority(db):
    publish_many("t", [Message(n, key="a", priority=10) for n in range(3)])
    publish_many("t", [Message(n, key="a") for n in range(2)])
    sub = Sub(handler(), handler(group="other", topic="u"))
    assert "Backlog by priority" not in run("queuestatus", "--all")
    sequence()
    sub.step(times=3)
    sub.work(limit=1)
    sub.flush()
    assert table(run("queuestatus", "--all"), "Backlog by priority") == [
        {"group": "g", "topic": "t", "priority": "10", "backlog": "2"},
        {"group": "g", "topic": "t", "priority": "0", "backlog": "2"},
    ]
    assert group_status()["lag_by_priority"] == {"10": 2, "0": 2}
    assert group_status("other", "u")["lag_by_priority"] == {}


def limits(text):
    return {row["group/topic"]: row["limits"] for row in table(text, "Groups")}


def test_limits_and_filters(db):
    policy = parse({"region": ["eu"], "total": [{"numeric": [">=", 100]}]})
    Sub(handler(filter=policy, rate=parse_rate("100/s"), max_in_flight=20), handler(group="other", topic="u"))
    text = run("queuestatus", "--all")
    assert table(text, "Filters") == [{"group": "g", "topic": "t", "filter": 'region is "eu" and total >= 100'}]
    assert limits(text) == {"g/t": "100/s, 20 in flight", "other/u": "-"}
    assert group_status()["filter"] == policy.as_json()
    assert group_status()["limits"] == {"rate": "100/s", "max_in_flight": 20}
    assert (group_status("other", "u")["filter"], group_status("other", "u")["limits"]) == (None, {})
    operations.settings("g", "t", {"filter": {"region": [f"{n}" * 9 for n in range(9)]}, "rate": "9/m"}, actor="ops")
    operations.settings("g", "t", {"max_in_flight": None}, actor="ops")
    text = run("queuestatus", "--all")
    assert limits(text) == {"g/t": "9/m", "other/u": "-"}
    shown = {one["option"]: one["value"] for one in table(text, "Overridden options")}
    assert shown["filter"].startswith('{"region": ["000000000", ')
    assert shown["filter"].endswith(', "888888888"]}')


def test_no_filters(db):
    Sub(handler())
    assert "Filters" not in run("queuestatus", "--all")


def test_a_filter_that_cannot_be_parsed(db):
    Sub(handler())
    ConsumerGroup.objects.update(filter={"region": [{"sounds-like": "eu"}]})
    (one,) = table(run("queuestatus", "--all"), "Filters")
    assert one["filter"].startswith("(cannot be parsed) filter={'region': ")
    assert "there is no operator 'sounds-like'" in group_status()["filter"]
    assert [one["kind"] for one in status()["problems"]] == ["filter"]


@pytest.mark.promise("Filters", "Expiry", "Coalescing")
def test_what_was_settled_without_a_call(db):
    sub = Sub(handler(filter=parse({"region": ["eu"]})), handler(group="all"))
    publish("t", 1, metadata={"region": "us"})
    publish("t", 2, metadata={"region": "eu"}, expires_at=datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC))
    publish_many("t", [Message(n, metadata={"region": "eu"}, coalesce="c") for n in range(4)])
    sub.settle()
    sub.poller.write_rollups()
    assert table(run("queuestatus", "--all"), "Settled without a call in the last hour") == [
        {"group": "all", "topic": "t", "filtered": "0", "expired": "1", "superseded": "3"},
        {"group": "g", "topic": "t", "filtered": "1", "expired": "1", "superseded": "3"},
    ]
    assert group_status()["passed"] == {"filtered": 1, "expired": 1, "superseded": 3}


def test_nothing_was_settled_without_a_call(db):
    sub = Sub(handler())
    publish("t", 1)
    sub.settle()
    sub.poller.write_rollups()
    assert "without a call" not in run("queuestatus", "--all")


def test_jobs_that_wait_say_until_when_and_why(db, settings):
    """Queues without such jobs have no table, and other groups no statement for it."""
    settings.TASKS = {"default": {"BACKEND": "django_mysqlqueue.tasks.MySQLQueueBackend"}}
    groups.register(USING, GroupRef("g", "t"), mode="ordered", start="earliest")
    with CaptureQueriesContext(connection) as captured:
        assert "wait for their next attempt" not in run("queuestatus", "--all")
    assert not [query for query in captured if "retry_at" in query["sql"]]
    groups.register(USING, GroupRef("jobs", "jobs.default"), mode="shared", start="earliest")
    at = Session(USING).now() + 3_600_000
    job("j1", retry_at=at, retry_reason="429 from the API")
    job("j2", retry_at=at + 1000)
    first, second = table(run("queuestatus", "--all"), "Jobs that wait for their next attempt")
    assert first == {
        "topic": "jobs.default",
        "task": "shop.tasks.mail",
        "id": "j1",
        "waits until": moment(at),
        "reason": "429 from the API",
    }
    assert (second["id"], second["reason"]) == ("j2", "-")
    assert status()["waiting_jobs"] == [
        {"id": "j1", "task": "shop.tasks.mail", "topic": "jobs.default", "until": at, "reason": "429 from the API"},
        {"id": "j2", "task": "shop.tasks.mail", "topic": "jobs.default", "until": at + 1000, "reason": ""},
    ]

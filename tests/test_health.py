"""``queuehealth`` and the check for django-health-check: what counts as unwell, and who is told what."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import threading
import time

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
from django_mysqlqueue.inspection import Bounds, HealthLimits, StallTimes, check_health, find_problems, list_groups
from django_mysqlqueue.management.commands import queuehealth
from django_mysqlqueue.models import DeliveryState, OutboxMessage, PartitionLease, QueueMessage, SubscriberHeartbeat
from django_mysqlqueue.operations import dropping, redriving, seeking
from django_mysqlqueue.service import dead_letters, groups, log, sequencing
from django_mysqlqueue.service.refs import GroupRef
from django_mysqlqueue.service.subsets import Subset
from django_mysqlqueue.sql.mysql import INNODB_TRANSACTIONS
from django_mysqlqueue.sql.session import Session
from tests.support.harness import USING, Sub, handler, in_thread, problems_found, sequence

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


def queuestatus():
    output = io.StringIO()
    call_command("queuestatus", "--format", "json", stdout=output)
    return json.loads(output.getvalue())


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
    assert kinds("--max-age", "11") == {("age", None), ("age", "g")}, "the group's oldest message is there"
    _, output = run("--max-age", "11")
    assert "PROBLEM  The oldest message in the outbox waits for 12 s; the limit is 11 s.\n" in output
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
        (("--max-failure-ratio", "50"), r"max_failure_ratio 50.0: must be a number from 0 to 1"),
        (("--max-recent-dead-letters", "10000"), r"max_recent_dead_letters 10000: must be from 0 to 9999"),
        (("--min-attempts", "0"), r"min_attempts 0: must be from 1"),
        (("--window", "5"), r"window 5.0: must be at least 60 and at most 21600"),
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
    assert found["groups"][0]["lag"] == {"value": 6, "exact": False}
    assert [one["kind"] for one in found["problems"]] == ["lag"]
    assert found["problems"][0]["text"] == "g/t has a lag of 6+; the limit is 50."
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
    assert "PROBLEM  The outbox grows" in output


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
    assert all(query["sql"].startswith("SELECT") for query in captured), captured.captured_queries


# -- handlers that fail ------------------------------------------------------------


def deploy(count, *, bad, **options):
    """A handler that dead-letters ``bad`` of ``count`` messages at their first attempt and acks the others."""
    sub = Sub(handler(function=lambda delivery: delivery.payload >= bad or delivery.reject("bad deploy"), **options))
    publish_many("t", range(count))
    sub.settle()
    sequence()
    return sub


def test_a_bad_deploy_is_unhealthy_at_once(db):
    """Before any subscriber has written its counts: the log has the dead letters."""
    deploy(200, bad=200)
    code, output = run()
    assert code == 1
    assert "PROBLEM  g/t dead-lettered 200 messages in the last 10 min; the limit is 10.\n" in output
    assert kinds() == {("recent_dead_letters", "g")}


@pytest.mark.parametrize(("number", "code"), [(1, 0), (10, 0), (11, 1)])
def test_a_few_dead_letters_are_a_note(db, number, code):
    deploy(number + 100, bad=number).poller.write_rollups()
    found, output = run()
    assert found == code
    assert f"note     g/t has dead-lettered messages: {number} in t_dlq." in output


def test_dead_letters_that_were_dealt_with_or_are_old_are_no_alarm(db, clock):
    sub = deploy(20, bad=20)
    assert kinds() == {("recent_dead_letters", "g")}
    redriving.redrive(USING, dead_letters.DeadLetterFilter("t_dlq"), actor="ada")
    assert kinds() == set(), "they are on their way again"
    sub.settle()
    sequence()
    assert kinds("--window", "60") == {("recent_dead_letters", "g")}
    clock.advance(61)
    assert kinds("--window", "60") == set()
    assert kinds() == {("recent_dead_letters", "g")}
    clock.advance(600)
    assert kinds() == set()


def test_in_a_dlq_that_is_too_long_to_count_the_rollups_tell(db, monkeypatch):
    monkeypatch.setattr(queuehealth.Command, "bounds", Bounds(count=5))
    sub = deploy(12, bad=12)
    assert kinds("--max-failure-ratio", "1") == set(), "up to ten seconds late"
    sub.poller.write_rollups()
    assert kinds("--max-failure-ratio", "1") == {("recent_dead_letters", "g")}
    assert "g/t dead-lettered 12+ messages" in run()[1]


def test_the_share_of_failures(db, clock):
    sub = deploy(40, bad=10, group="g")
    sub.poller.write_rollups()
    assert kinds() == set(), "a quarter"
    assert kinds("--max-failure-ratio", "0.2") == {("failing", "g")}
    text = "PROBLEM  Of 40 attempts of g/t in the last 10 min 10 failed; the limit is 20%.\n"
    assert text in run("--max-failure-ratio", "0.2")[1]
    assert kinds("--max-failure-ratio", "0.25") == set()
    assert kinds("--max-failure-ratio", "0.2", "--min-attempts", "41") == set()
    clock.advance(660)
    sub.heart.beat()
    assert kinds("--max-failure-ratio", "0.2") == set()


@pytest.mark.parametrize(("number", "code"), [(1, 0), (9, 0), (10, 1)])
def test_one_of_one_is_no_alarm(db, number, code):
    """A single poisoned message of a quiet queue fails every attempt there is."""
    sub = Sub(handler(function=lambda delivery: delivery.nack(delay=60)))
    publish_many("t", [Message(n, key=f"k{n}") for n in range(number)])
    sub.settle()
    sub.poller.write_rollups()
    found, output = run()
    assert found == code
    kind = "PROBLEM" if code else "note"
    word = "failure" if number == 1 else "failures"
    assert f"Every attempt of g/t fails: {number} {word} and no success in the last 10 min." in output
    assert any(line.startswith(kind) and "Every attempt" in line for line in output.splitlines())
    assert run("--max-failure-ratio", "1")[0] == 0


def test_thresholds_of_the_settings(db, settings):
    settings.MYSQLQUEUE = {"HEALTH": {"MAX_RECENT_DEAD_LETTERS": 2}}
    deploy(103, bad=3).poller.write_rollups()
    assert kinds() == {("recent_dead_letters", "g")}
    assert kinds("--max-recent-dead-letters", "3") == set()
    assert "recent_dead_letters" in {one.kind for one in find_problems(using=USING)}
    with pytest.raises(ServiceUnavailable, match="g/t dead-lettered 3 messages in the last 10 min; the limit is 2"):
        QueueHealth().run()
    assert QueueHealth(max_recent_dead_letters=3).run() is None
    settings.MYSQLQUEUE = {"HEALTH": {"MAX_RECENT_DEAD_LETTERS": None, "MAX_FAILURE_RATIO": 0.01}}
    assert kinds() == {("failing", "g")}
    settings.MYSQLQUEUE = {"HEALTH": {"MAX_RECENT_DEAD_LETTERS": None, "MAX_FAILURE_RATIO": None}}
    assert kinds() == set()
    settings.MYSQLQUEUE = {"HEALTH": {"MAX_FAILURE_RATIO": 50}}
    with pytest.raises(CommandError, match="MAX_FAILURE_RATIO = 50"):
        run()
    with pytest.raises(ServiceUnavailable, match="MAX_FAILURE_RATIO = 50"):
        QueueHealth().run()


# -- what waits, and for how long ---------------------------------------------------


def test_after_a_seek_messages_are_as_old_as_the_seek(db, clock):
    backlog()
    sub = Sub(handler())
    sub.settle()
    clock.advance(1200)
    sub.heart.beat()
    seeking.seek(USING, GroupRef("g", "t"), seeking.position_of(USING, "earliest"), actor="ada")
    clock.advance(5)
    sub.heart.beat()
    assert kinds("--max-age", "60") == set()
    found = json.loads(run("--format", "json")[1])["groups"][0]
    assert (found["lag"]["value"], found["oldest_unacked_age"]) == (3, pytest.approx(5, abs=2))
    found = queuestatus()["groups"][0]
    assert (found["lag"], found["oldest_unacked_age"]) == (3, pytest.approx(5, abs=2))
    clock.advance(60)
    sub.heart.beat()
    assert kinds("--max-age", "60") == {("age", "g")}


def test_a_drop_that_did_not_finish_is_told(db, monkeypatch):
    backlog()
    Sub(handler())
    monkeypatch.setattr(dropping, "_delete_some", None)
    with pytest.raises(TypeError):
        dropping.drop(USING, GroupRef("g", "t"), actor="ada")
    assert kinds() == {("drop_ended_early", "g")}
    assert "A drop of g/t has not finished. If it was interrupted, run it again." in run()[1]


def test_while_a_seek_is_under_way_messages_are_as_old_as_its_begin(db, clock, monkeypatch):
    backlog()
    groups.register(USING, GroupRef("g", "t"), mode="ordered", start="latest")
    clock.advance(1200)
    Sub(handler())
    monkeypatch.setattr(seeking, "_reset_offsets", None)
    with pytest.raises(TypeError):
        seeking.seek(USING, GroupRef("g", "t"), seeking.position_of(USING, "earliest"), actor="ada")
    assert "has a lag of 3" in run("--max-lag", "0")[1]
    assert kinds("--max-age", "60") == {("seek_ended_early", "g")}


def test_a_new_group_is_not_late_with_old_messages(db, clock):
    backlog()
    QueueMessage.objects.update(published_at=F("published_at") - 1_200_000)
    sub = Sub(handler())
    assert kinds("--max-age", "60") == set()
    clock.advance(100)
    sub.heart.beat()
    assert kinds("--max-age", "60") == {("age", "g")}


@pytest.mark.parametrize("deliver_at", [0, -1])
def test_an_outbox_that_nobody_sequences_is_told(db, clock, deliver_at):
    """No group's lag counts it."""
    register()
    publish_many("t", range(3))
    OutboxMessage.objects.update(deliver_at=deliver_at)
    clock.advance(5)
    code, output = run()
    assert code == 0
    assert "note     No live subscribers for g/t; 3 messages wait, the oldest for " in output
    assert "\nHealthy: 1 group, lag 0, 3 in the outbox (the oldest for " in output
    clock.advance(15)
    assert kinds() == {("outbox", None)}
    found = json.loads(run("--format", "json")[1])
    assert (found["outbox"]["value"], found["outbox_oldest_age"]) == (3, pytest.approx(20, abs=3))


def test_an_outbox_without_any_subscriber_is_told_at_once(db, clock):
    """As a note until it has waited."""
    publish_many("t", range(3))
    said = "3 messages wait to be moved into the log, and no subscriber is running."
    assert f"note     {said}\n" in run()[1]
    assert said in [one.text for one in problems_found()]
    clock.advance(20)
    assert ("outbox", None) in kinds()
    assert said not in [one.text for one in problems_found()]


def test_a_group_that_waits_for_the_outbox_says_so_itself(db):
    register()
    publish_many("t", range(3))
    assert {one.kind for one in problems_found()} == {"no_subscriber"}


def test_the_status_tells_of_an_outbox_that_live_subscribers_do_not_move(db, clock):
    """Another process is frozen with the sequencer's mutex: nobody's lag grows."""
    sub = Sub(handler())
    publish_many("t", range(3))
    clock.advance(20)
    sub.heart.beat()
    output = io.StringIO()
    call_command("queuestatus", stdout=output, no_color=True)
    assert "3 messages in the outbox (the oldest for 20" in output.getvalue().splitlines()[0]
    assert "The outbox grows: 3 messages wait to be moved into the log" in output.getvalue().split("Problems\n")[1]


def test_a_lost_subscriber_is_told_only_while_that_matters(db, clock):
    backlog(1)
    lost, alive = Sub(handler(), name="lost"), Sub(handler(), name="alive")
    lost.step()
    clock.advance(100)
    alive.heart.beat()
    assert f"The subscriber {lost.name} vanished" in run()[1], "it holds what nobody has taken over yet"
    alive.settle()
    assert "vanished" not in run()[1]
    PartitionLease.objects.create(consumer_group="g", topic="t", partition_key="x", leased_by=lost.name)
    assert f"The subscriber {lost.name} vanished" in run()[1], "a partition without work has its name yet"
    PartitionLease.objects.all().delete()
    assert "vanished" not in run()[1]
    assert any(not row.live for row in list_groups(using=USING)[0].subscribers), "still on its page"
    backlog(1)
    assert f"The subscriber {lost.name} vanished" in run()[1]


# -- transactions that nobody can look at --------------------------------------------


@contextlib.contextmanager
def running(sql):
    """A statement that another connection is at."""
    other = connections[USING].copy("other")
    with other.cursor() as cursor:
        cursor.execute("SELECT CONNECTION_ID()")
        (number,) = cursor.fetchone()
    other.inc_thread_sharing()
    done = []

    def work():
        with contextlib.suppress(OperationalError), other.cursor() as cursor:
            cursor.execute("START TRANSACTION")
            cursor.execute("SELECT COUNT(*) FROM queue_consumer_groups")
            cursor.execute(sql)
            done.append(cursor.fetchall())

    thread = threading.Thread(target=work)
    thread.start()
    with connection.cursor() as cursor:
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            cursor.execute("SHOW FULL PROCESSLIST")
            if any(row[0] == number and sql == row[7] for row in cursor.fetchall()):
                break
            time.sleep(0.05)
        else:
            raise AssertionError(f"{sql} does not run")
        try:
            yield
        finally:
            assert not done, "it was over too soon for the test to mean anything"
            cursor.execute(f"KILL {number}")
            thread.join(20)
            other.close()


@pytest.fixture
def transactions_are_timed(engine):
    """MySQL's performance schema tells transactions, whatever instruments the server was started with."""
    which = (
        "UPDATE performance_schema.setup_instruments SET enabled = %s, timed = IF(name = 'transaction', %s, timed) "
        "WHERE name = 'transaction' OR name LIKE 'thread/%%'"
    )
    with connections[USING].cursor() as cursor:
        if engine == "mysql":
            cursor.execute(which, ("YES", "YES"))
        yield
        if engine == "mysql":
            cursor.execute(which, ("NO", "NO"))


@pytest.mark.servers_only
@pytest.mark.usefixtures("transactions_are_timed")
def test_an_emoji_in_a_running_statement_fails_no_look(db, engine, monkeypatch):
    """MySQL cannot show its transactions while anybody's statement holds a character beyond the BMP (error 3854)."""
    monkeypatch.setattr(queuehealth.Command, "stall_times", StallTimes(transaction=1.0))
    with running("SELECT SLEEP(30), '\U0001f600'"):
        time.sleep(2.1)
        if engine == "mysql":
            with pytest.raises(OperationalError, match="3854"):
                Session(USING).rows(INNODB_TRANSACTIONS)
        assert "note     A transaction has been open for" in run()[1]
    deadline = time.monotonic() + 20
    while "A transaction has been open" in run()[1]:  # the server takes a moment to end it
        assert time.monotonic() < deadline
        time.sleep(0.2)  # it shows the same list to whoever asks again within 0.1 s


@pytest.mark.servers_only
def test_a_user_who_may_not_look_at_transactions_is_told_nothing_of_them(db, monkeypatch):
    monkeypatch.setattr(queuehealth.Command, "stall_times", StallTimes(transaction=0.0))
    project = connections[USING]
    with project.cursor() as cursor:
        cursor.execute("CREATE USER looks@localhost")
        cursor.execute(f"GRANT ALL ON `{project.settings_dict['NAME']}`.* TO looks@localhost")
    own = project.copy(USING)
    own.settings_dict.update(USER="looks", PASSWORD="")
    try:
        with running("SELECT SLEEP(30)"):
            deadline = time.monotonic() + 20
            while "A transaction has been open" not in run()[1]:  # as above
                assert time.monotonic() < deadline
                time.sleep(0.2)
            connections[USING] = own
            assert run() == (0, "Healthy: 0 groups, lag 0, 0 in the outbox.\n")
            connections[USING] = project
    finally:
        connections[USING] = project
        own.close()
        with project.cursor() as cursor:
            cursor.execute("DROP USER looks@localhost")


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


@pytest.mark.parametrize(
    "options",
    [
        {"max_lag": -1},
        {"max_age": "5"},
        {"max_lag": 1.5},
        {"min_subscribers": True},
        {"max_recent_dead_letters": -1},
        {"max_failure_ratio": 1.5},
        {"min_attempts": 0},
        {"window": 59},
    ],
)
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


def test_an_error_of_the_database_is_told_without_its_text(db, monkeypatch):
    def fail(*_, **__):
        raise OperationalError("user root, password secret")

    monkeypatch.setattr("django_mysqlqueue.inspection.health.get_overview", fail)
    with pytest.raises(ServiceUnavailable) as caught:
        QueueHealth().run()
    assert str(caught.value) == "Unavailable: The database 'default' reports an error."


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

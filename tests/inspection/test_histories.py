"""What is said of a queue minute by minute, while things happen to it."""

from __future__ import annotations

import random

import pytest

from django_mysqlqueue import publish_many
from django_mysqlqueue.inspection import beginnings, find_problems, problems
from django_mysqlqueue.inspection.beginnings import Rule, continuing
from django_mysqlqueue.inspection.causes import NAMES
from django_mysqlqueue.models import DeliveryState, SubscriberHeartbeat
from tests.support.commands import run as run_command
from tests.support.harness import USING
from tests.support.histories import DEGRADED, OK, STOPPED, History, Said
from tests.support.internals import Bucket, GroupRef, Session, groups

# What is said of rows does not depend on the engine. The other tests of inspection send the same statements, on each.
pytestmark = [pytest.mark.any_engine, pytest.mark.any_version, pytest.mark.usefixtures("db")]

FINE = Said(OK)


def degraded(headline, *causes, healthy=False):
    return Said(DEGRADED, headline, causes, healthy)


def stopped(headline, *causes):
    return Said(STOPPED, headline, causes, healthy=False)


def noted(*causes):
    return Said(OK, causes[0].split()[1], causes)


@pytest.fixture
def history(clock):
    """It begins with an hour: failures of the hour before the first one that fails would belong to the beginning."""
    clock.advance(3600 - Session(USING).now() // 1000 % 3600)
    return History(clock)


# -- failures that are over ---------------------------------------------------------


@pytest.mark.promise("Health")
def test_a_redrive_that_succeeds_is_not_an_alert_later(history):
    """All fail, are redriven and succeed. Nothing happens any more while the successes of before leave the window."""
    history.start(max_attempts=2, wait=0)

    def outage():
        history.fails = lambda delivery: True
        history.publish(120)

    def recovery():
        history.fails = lambda delivery: False
        history.redrive()

    script = dict.fromkeys(range(5), lambda: history.publish(60)) | {5: outage, 6: recovery}
    assert history.play(25, script, always=history.work) == {
        0: FINE,
        5: degraded("failing", "0 failing g 5"),
        6: FINE,
    }


def test_a_redrive_within_the_minute_of_the_failures(history):
    """Minutes do not tell which came first. But nothing is left that fails."""
    history.start(max_attempts=2, wait=0)

    def outage_and_recovery():
        history.fails = lambda delivery: True
        history.publish(120)
        history.work()
        history.fails = lambda delivery: False
        history.redrive()

    script = {1: lambda: history.publish(60), 2: outage_and_recovery}
    assert history.play(15, script, always=history.work) == {0: FINE}


def test_a_few_failures_are_not_an_alert_later_without_new_ones(history):
    """The share of failures must not rise because successes leave the window."""
    history.start(wait=36_000)

    def few():
        history.fails = lambda delivery: True
        history.publish(4)
        history.work()
        history.count(acked=100)

    found = history.play(20, {1: lambda: history.count(acked=100), 2: few})
    assert {said.state for said in found.values()} == {OK}, found


def test_no_alert_begins_because_successes_get_older(history):
    """Messages that fail are few, and nothing happens any more."""
    history.start(wait=36_000)

    def few():
        history.fails = lambda delivery: True
        history.publish(4)
        history.work()
        history.count(failed=8)

    found = history.play(25, {1: lambda: history.count(acked=100), 5: few})
    assert {said.state for said in found.values()} == {OK}, found


def test_an_outage_of_all_that_a_group_calls(history):
    """Messages are retried until it ends. The beginning stays the same, however long it takes."""
    history.start(wait=50)

    def outage():
        history.fails = lambda delivery: True

    def end():
        history.fails = lambda delivery: False

    def always():
        history.publish(5)
        history.work()

    found = history.play(45, {5: outage, 40: end}, always=always)
    assert {minute: (said.state, said.causes[:1], said.healthy) for minute, said in found.items()} == {
        0: (OK, (), True),
        # Ten attempts are enough.
        6: (DEGRADED, ("0 failing g 5",), False),
        40: (OK, (), True),
    }


def test_the_beginning_is_kept_for_days(history):
    """First to the minute, then to the hour. It never moves on."""
    history.start(wait=36_000)
    history.fails = lambda delivery: True
    history.publish(20)
    history.work()
    history.count(acked=100)
    minutes = {}
    for _ in range(3):
        history.play(1, {})
    begin = history.minute
    for passed in range(50):
        history.count(failed=20)
        history.pass_seconds(6)
        (problem,) = (one for one in find_problems(using=USING) if one.kind == "failing")
        minutes[passed] = (problem.since - history.began) // 60_000
        history.pass_seconds(19 * 60 if passed < 30 else 3600)
    early = [minutes[passed] for passed in range(15)]
    assert early == [begin] * 15
    late = {minutes[passed] for passed in range(20, 50)}
    assert len(late) == 1
    assert begin - 60 <= late.pop() <= begin


def test_of_many_failing_groups_none_has_a_beginning_that_moves_on(history, monkeypatch):
    monkeypatch.setattr(beginnings, "FAILING", 2)
    names = ("a", "b", "c", "d")
    history.start(*names, wait=36_000)
    history.fails = lambda delivery: True
    for name in names:
        history.publish(5, name)
    history.work()
    begin = {}

    def always():
        for number, name in enumerate(names):
            history.count(name, failed=20 + number)
        for one in find_problems(using=USING):
            if one.kind == "failing":
                begin.setdefault(one.ref.group, set()).add(one.since)

    history.play(20, {}, always=always)
    known = {name: {at and (at - history.began) // 60_000 for at in found} for name, found in begin.items()}
    assert known == {"a": {None}, "b": {None}, "c": {0}, "d": {0}}


def test_a_poison_message_of_a_quiet_group_is_no_outage(history):
    """Every twenty minutes another message succeeds. In between, all attempts are those at one message."""
    history.start(wait=40)
    poison = []
    history.fails = lambda delivery: not poison or delivery.offset in poison

    def first():
        history.publish(1)
        history.work()
        poison.extend(DeliveryState.objects.values_list("message_offset", flat=True))

    script = {0: first} | dict.fromkeys((20, 40, 60), lambda: history.publish(1))
    found = history.play(75, script, always=history.work)
    assert all(said.healthy for said in found.values()), found


@pytest.mark.parametrize("keys", [5, 12])
def test_an_outage_of_an_ordered_group_with_few_keys(history, monkeypatch, keys):
    """Each key has one message that fails, and others that wait for it."""
    sub = history.start(wait=20, mode="ordered", on_failure="block")
    monkeypatch.setattr(problems, "known_handlers", lambda: sub.handlers)

    def outage():
        history.fails = lambda delivery: True

    def always():
        for number in range(keys):
            history.publish(10, key=f"k{number}")
        for _ in range(3):
            history.work()
            history.pass_seconds(10)

    found = history.play(9, {5: outage}, always=always)
    assert next(minute for minute, said in found.items() if not said.healthy) in (5, 6)
    assert found[max(found)].causes[0] == "0 failing g 5"


# -- a rollout ----------------------------------------------------------------------


def test_a_rollout_of_a_handler_that_fails_and_its_rollback(history):
    history.start(wait=30)
    history.play(3, {})

    def always():
        history.publish(20)
        history.work()

    def rollout():
        history.stop(history.subs[0])
        history.fails = lambda delivery: True
        history.start(wait=30)

    def rollback():
        history.stop(history.subs[0])
        history.fails = lambda delivery: False
        history.start(wait=30)

    found = history.play(30, {5: rollout, 12: rollback}, always=always)
    assert {minute: (said.state, said.headline, said.healthy) for minute, said in found.items()} == {
        3: (OK, "", True),
        # Subscribers that have just started are given a minute.
        6: (DEGRADED, "failing", False),
        12: (OK, "", True),
    }
    assert found[6].causes == ("0 failing g 5",)


def test_failures_of_processes_that_have_ended_are_not_those_of_their_successors(history):
    """What they left waits for its next attempt. Nobody knows how it ends, so nothing is said of it after a minute."""
    history.start(wait=36_000)
    history.fails = lambda delivery: True
    history.play(3, {}, always=lambda: history.publish(20) or history.work())

    def rollout():
        history.stop(history.subs[0])
        history.start(wait=36_000)

    found = history.play(20, {4: rollout})
    assert {minute: said.headline for minute, said in found.items() if said.state != OK} == {3: "failing"}


# -- a pause ------------------------------------------------------------------------


@pytest.mark.promise("Health")
def test_a_deliberate_pause_stops_nothing(history):
    """All else is quiet, and there are a few dead letters."""
    history.start("a", "g", max_attempts=1, wait=0)

    def bad():
        history.fails = lambda delivery: True
        history.publish(3, "a")

    def pause():
        history.fails = lambda delivery: False
        history.pause()

    paused = degraded("paused", "1 paused g 15", "2 dead_letters a -", healthy=True)
    found = history.play(
        30,
        {1: bad, 15: pause, 17: lambda: history.publish(4), 25: history.resume},
        always=history.work,
    )
    assert {minute: said for minute, said in found.items() if minute >= 15} == {
        15: noted("2 dead_letters a -", "2 paused g 15"),
        17: paused,
        25: noted("2 dead_letters a -"),
    }


def test_a_pause_beside_a_group_that_has_no_subscriber(history):
    """The headline is the cause of the state."""
    history.start("g")
    history.register("other")
    script = {
        1: lambda: history.pause() or history.publish(500),
        2: lambda: history.publish(3, "other"),
    }
    assert history.play(8, script, always=history.work) == {
        0: FINE,
        1: degraded("paused", "1 paused g 1", healthy=True),
        2: degraded("paused", "1 paused g 1", "2 no_subscriber other -", healthy=True),
        3: stopped("no_subscriber", "0 no_subscriber other -", "1 paused g 1"),
    }


def test_a_group_that_fails_is_paused_as_advised(history):
    history.start(wait=30)
    history.fails = lambda delivery: True

    def always():
        history.publish(20)
        history.work()

    found = history.play(20, {5: history.pause}, always=always)
    assert {minute: (said.state, said.headline) for minute, said in found.items()} == {
        0: (OK, ""),
        1: (DEGRADED, "failing"),
        5: (DEGRADED, "failing"),
        # The last attempts are ten minutes old.
        14: (DEGRADED, "paused"),
    }


# -- no subscriber ------------------------------------------------------------------


def test_no_subscriber_is_never_denied(history):
    """In the first minute it is for information, because they may be restarting."""
    sub = history.start("g")
    script = {
        1: lambda: history.stop(sub),
        2: lambda: history.publish(120),
        5: lambda: history.start("g"),
    }
    assert history.play(8, script, always=history.work) == {
        0: FINE,
        2: noted("2 no_subscriber g 1"),
        3: stopped("no_subscriber", "0 no_subscriber g 1"),
        5: FINE,
    }


def test_messages_in_the_outbox_without_a_subscriber_are_never_denied():
    """For 15 seconds they are for information."""
    groups.register(USING, GroupRef("g", "g"), mode="shared", start="earliest")
    publish_many("g", range(120))
    output = run_command("queuestatus")
    assert "No problems found" not in output
    first = next(line for line in output.splitlines() if line.startswith(str(NAMES["ok"])))
    assert first.startswith("OK: 1 consumer group, backlog 0. For information: No subscriber is running; 120 messages")
    assert "\nProblems" not in output
    assert "\nFor information" in output


def test_a_crash_loop(history):
    """Each process is killed within a minute. Its lease has expired when the next one has started."""

    def crash():
        if history.subs:
            history.stop(history.subs[0], killed=True)
        sub = history.start("g", mode="ordered")
        sub.step()  # claims, and is killed

    history.publish(10)
    history.stop(history.start("g", mode="ordered"))
    found = history.play(12, dict.fromkeys(range(1, 8), crash) | {8: lambda: history.work()})
    assert {minute: (said.state, said.causes, said.healthy) for minute, said in found.items() if minute >= 3} == {
        3: ("ok", ("2 silent g 2",), True),
        # From the second death on; the first is of minute 2. It ends two minutes after the last one.
        4: ("degraded", ("0 deaths - 2",), False),
        9: ("ok", ("2 deaths - 2",), True),
    }


@pytest.mark.promise("Health")
def test_a_crash_loop_keeps_its_beginning(history):
    """The first deaths leave the window. The last heartbeat of the first process was in minute 1."""

    def crash():
        if history.subs:
            history.stop(history.subs[0], killed=True)
        history.start("g", mode="ordered").step()

    history.publish(10)
    found = history.play(30, {}, always=crash)
    began = {one.split()[-1] for said in found.values() for one in said.causes if "deaths" in one}
    assert began == {"1"}


def test_the_end_of_a_host_is_no_crash_loop(history):
    """Its processes are lost at the same time, and replaced by others."""

    def start():
        for _ in range(4):
            history.start("g", mode="ordered").step()

    def reboot():
        for sub in list(history.subs):
            history.stop(sub, killed=True)

    found = history.play(8, {0: start, 2: reboot, 3: start})
    assert not [said for said in found.values() if "deaths" in " ".join(said.causes) or not said.healthy], found
    found = history.play(4, {8: reboot, 9: start})
    assert any("0 deaths - 2" in said.causes for said in found.values()), "those that had been started in their places"


def test_consumers_in_plain_sql_end_without_a_word(history):
    """Each connection is a name of its own, as in a cron job."""
    history.register("g")

    def connect():
        now = Session(USING).now()
        info = {"client": "sql", "host": "10.0.0.9", "version": "0.2.0", "started_at": now}
        SubscriberHeartbeat.objects.create(
            consumer_group="g", topic="g", subscriber_name=f"sql:{history.minute}", heartbeat_at=now, info=info
        )

    assert history.play(20, {}, always=connect) == {0: FINE}


# -- a service that fails -----------------------------------------------------------


@pytest.mark.promise("Health")
@pytest.mark.parametrize("partitions", [None, 8])
def test_a_service_that_fails_for_90_seconds_is_a_problem_though_others_succeed(history, settings, partitions):
    """The service is a key. Attempts at its messages are repeated."""
    if partitions:
        settings.MYSQLQUEUE = {**settings.MYSQLQUEUE, "TOPICS": {"g": {"PARTITIONS": partitions}}}
    history.start(wait=10)

    def always():
        for _ in range(4):
            history.publish(5, key="geocoder")
            history.publish(40)
            history.publish(40, key="mail")
            history.work()
            history.pass_seconds(10)

    def outage():
        history.fails = lambda delivery: delivery.key == "geocoder"

    def end():
        history.fails = lambda delivery: False

    found = history.play(14, {3: outage, 7: end}, always=always)
    problem = "0 retrying g 3"
    assert {minute: (said.state, said.causes[:1], said.healthy) for minute, said in found.items()} == {
        0: (OK, (), True),
        3: (DEGRADED, (problem,), False),
        7: (OK, (), True),
    }


def test_a_key_of_which_some_attempts_succeed_is_no_problem(history):
    history.start(wait=10)
    history.fails = lambda delivery: delivery.key == "geocoder" and delivery.payload < 3

    def always():
        history.publish(8, key="geocoder")
        history.publish(40)
        for _ in range(3):
            history.work()
            history.pass_seconds(10)

    found = history.play(8, {}, always=always)
    assert not [said for said in found.values() if any("retrying" in one for one in said.causes)]


def test_a_key_of_which_a_message_succeeds_at_last_is_no_problem_while_others_wait(history):
    """Nothing of the key is settled above the others. But the first one is gone."""
    history.start(wait=20, mode="ordered")
    history.fails = lambda delivery: delivery.key == "geocoder"
    history.publish(6, key="geocoder")

    def always():
        history.publish(40)
        for _ in range(2):
            history.work()
            history.pass_seconds(20)

    found = history.play(4, {}, always=always)
    assert found[max(found)].headline == "retrying"
    history.fails = lambda delivery: False
    waiting = DeliveryState.objects.filter(acked=False).order_by("message_offset")
    first = waiting.first()
    waiting.exclude(message_offset=first.message_offset).update(invisible_until=Session(USING).now() + 10**6)
    history.subs[0].poller.reset()
    history.work()
    assert not DeliveryState.objects.filter(message_offset=first.message_offset).exists()
    assert waiting.count() == 5
    assert "retrying" not in " ".join(history.ask().causes)


def test_a_slow_service_is_no_failure_until_no_delivery_ends(history):
    """Each minute one of many messages is handled. Then none is, for twelve minutes."""
    sub = history.start("g", mode="shared")
    history.publish(200)

    def always():
        sub.step()
        if not 12 <= history.minute < 24:
            sub.work(1)
        if history.minute >= 24:
            sub.work()
        sub.flush()
        sub.poller.write_rollups()

    found = history.play(27, {}, always=always)
    assert {minute: (said.state, said.headline) for minute, said in found.items()} == {
        0: (OK, ""),
        # The last delivery has ended ten minutes before.
        21: (STOPPED, "still"),
        24: (OK, ""),
    }


# -- order --------------------------------------------------------------------------


def test_the_problems_with_most_harm_come_first(history):
    history.start("a", "b", "c", max_attempts=1, wait=0)
    history.fails = lambda delivery: True

    def bad():
        history.publish(12, "a")
        history.publish(40, "b")
        history.publish(25, "c")

    found = history.play(2, {0: bad}, always=history.work)
    assert [cause.split()[2] for cause in found[0].causes] == ["b", "c", "a"]
    history.fails = lambda delivery: False
    history.pause("a")
    history.publish(900, "a")
    found = history.play(20, {})
    last = found[max(found)]
    assert last.causes[0].startswith("1 paused a")
    assert [cause.split()[1:3] for cause in last.causes[1:]] == [["dead_letters", "a,b,c"]]


# -- any history ----------------------------------------------------------------------


def random_minutes(chance):
    """Minutes of a group: quiet ones, good ones, bad ones, mixed ones."""
    ref, minutes = GroupRef("g", "t"), []
    for number in range(60):
        acked = failures = 0
        if chance.random() < 0.6:
            acked = chance.choice([0, 0, 1, 3, 50])
            failures = chance.choice([0, 0, 1, 3, 50])
        dead = chance.randint(0, failures)
        minutes.append(Bucket(ref, number * 60_000, acked, failures, dead, 0, 0, 0, (), None, 0, 0, 0))
    return minutes


@pytest.mark.parametrize("share", [0.5, 0.1, 1])
def test_no_alert_begins_without_a_failure_or_moves_its_beginning(share):
    """As minutes pass: a minute without a failure begins no alert, and an alert keeps its beginning until it ends."""
    for seed in range(300):
        chance = random.Random(seed)
        minutes, rule = random_minutes(chance), Rule(share, chance.choice([1, 4, 10, 100]))
        before = None
        for number, bucket in enumerate(minutes, 1):
            now = continuing(minutes[:number], rule)
            if before is None and now is not None:
                assert bucket.failures, (seed, number)
            if before is not None and now is not None:
                assert now.since == before.since, (seed, number)
            before = now

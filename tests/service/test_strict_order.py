"""on_failure="block": nothing of a partition starts before what is before it has ended, whatever happens."""

from __future__ import annotations

import json
import random
from collections import Counter

import pytest

from django_mysqlqueue import Message, publish, publish_many
from django_mysqlqueue.models import DeliveryState, PartitionLease, QueueMessage
from tests.support.handlers import Recorder
from tests.support.harness import Sub, handler, lag, problems_found


class Scenario:
    """Subscribers that come, fail, freeze and vanish in a random order; every start is checked."""

    KEYS = "abc"
    EACH = 8
    MAX_ATTEMPTS = 3

    def __init__(self, seed, clock):
        self.rng = random.Random(seed)
        self.clock = clock
        self.ended: set[tuple[str, int]] = set()
        """Messages that were acked, rejected, or have used up their attempts."""
        self.starts: list[tuple[str, int]] = []
        self.calm = False
        self.subs: list[Sub] = []
        self.published = 0
        self.publish()

    def handle(self, delivery):
        key, number = delivery.payload
        self.starts.append((key, number))
        missing = [(key, lower) for lower in range(number) if (key, lower) not in self.ended]
        assert not missing, f"{key}{number} started before {missing} had ended: {self.starts}"
        action = "ack" if self.calm else self.rng.choice(["ack", "ack", "ack", "nack", "snooze", "raise", "reject"])
        if action in ("nack", "raise") and delivery.attempt < self.MAX_ATTEMPTS:
            if action == "raise":
                raise ValueError(action)
            delivery.nack(self.rng.choice([0, 1]))
        elif action == "snooze":
            delivery.snooze(self.rng.choice([0, 1]))
        else:
            self.ended.add((key, number))
            if action == "reject":
                delivery.reject("no")
            elif action != "ack":
                raise ValueError("for the last time")

    def publish(self):
        if self.published < self.EACH:
            publish_many("t", (Message([key, self.published], key=key) for key in self.KEYS))
            self.published += 1

    def new(self):
        self.subs.append(
            Sub(
                handler(function=self.handle, on_failure="block", max_attempts=self.MAX_ATTEMPTS),
                claim_size=self.rng.choice([1, 3, 10]),
            )
        )

    def play(self, turns):
        self.new()
        for _ in range(turns):
            sub = self.rng.choice(self.subs)
            match self.rng.choice(
                ["step", "step", "work", "work", "one", "flush", "pass", "leave", "crash", "new", "publish"]
            ):
                case "step":
                    sub.step()
                case "work":
                    sub.work()
                case "one":
                    sub.work(1)
                case "flush":
                    sub.flush()
                case "pass":
                    self.pass_time(1.1)
                case "leave":
                    sub.leave()
                    self.replace(sub)
                case "crash":
                    # With all that it holds, and with acks that it has not written.
                    self.replace(sub)
                    self.pass_time(31)
                case "publish":
                    self.publish()
                case "new" if len(self.subs) < 3:
                    self.new()

    def pass_time(self, seconds):
        self.clock.advance(seconds)
        for sub in self.subs:
            sub.heart.beat()

    def replace(self, sub):
        self.subs.remove(sub)
        if not self.subs:
            self.new()

    def finish(self):
        self.calm = True
        while self.published < self.EACH:
            self.publish()
        for _ in range(10):
            self.pass_time(31)
            for sub in self.subs:
                sub.settle()
            if not lag():
                break


@pytest.mark.promise("Strict order")
@pytest.mark.parametrize("seed", range(25))
def test_nothing_starts_before_what_is_before_it_has_ended(db, clock, seed):
    scenario = Scenario(seed, clock)
    scenario.play(80)
    scenario.finish()
    everything = {(key, n) for key in scenario.KEYS for n in range(scenario.EACH)}
    assert lag() == 0
    assert not DeliveryState.objects.exists()
    assert {tuple(started) for started in scenario.starts} >= everything - dead_letters()
    assert scenario.ended == everything


def dead_letters():
    return {tuple(json.loads(bytes(row.payload))) for row in QueueMessage.objects.filter(topic="t_dlq")}


# -- a DLQ consumed by an ordinary handler ------------------------------------


@pytest.mark.parametrize("mode", ["ordered", "shared"])
def test_a_dlq_handler_that_fails_for_ever_loses_nothing_and_stops_nobody(db, clock, mode):
    """Its messages back off up to the maximum, never dead-letter again, and a problem says so."""

    def hopeless(delivery):
        raise ValueError("the handler of dead letters fails, too")

    def picky(delivery):
        if delivery.payload == "bad":
            raise ValueError("bad")

    mender = Recorder(hopeless)
    sub = Sub(
        handler(function=picky, max_attempts=1),
        handler(topic="t_dlq", group="mender", function=mender, mode=mode, max_attempts=2),
    )
    publish("t", "bad", key="k", id="the-bad-one")
    for round_number in range(12):
        clock.advance(3600)
        sub.heart.beat()
        publish("t", round_number, key="k")
        sub.settle(rounds=4)
    assert [delivery.attempt for delivery in mender.deliveries] == list(range(1, len(mender.deliveries) + 1))
    assert len(mender.deliveries) > 12, "far beyond max_attempts"
    assert {delivery.id for delivery in mender.deliveries} == {"the-bad-one"}
    assert lag() == 0, "the group that failed the message goes on"
    assert lag("mender", "t_dlq") == 1
    assert not QueueMessage.objects.filter(topic__contains="_dlq_dlq").exists()
    assert {one.ref for one in problems_found() if "a DLQ topic has no DLQ" in one.advice} == {("mender", "t_dlq")}
    mender.action = None
    clock.advance(3600)
    sub.heart.beat()
    sub.settle()
    assert lag("mender", "t_dlq") == 0


def test_a_reject_in_a_dlq_holds_back_what_is_behind(db):
    """There it is a nack, so with on_failure="block" the next waits."""
    publish_many("t", [Message(n, key="k") for n in range(3)])
    Sub(handler(function=lambda delivery: delivery.reject("no"))).settle()
    seen = []

    def handle(delivery):
        seen.append((delivery.payload, delivery.attempt))
        if delivery.payload == 0 and delivery.attempt == 1:
            delivery.reject("not yet")
            assert delivery.outcome == "failed"

    Sub(handler("t_dlq", "mender", handle, on_failure="block")).settle()
    assert seen == [(0, 1), (0, 2), (1, 1), (2, 1)]


# -- many subscribers ---------------------------------------------------------


@pytest.mark.promise("Many subscribers")
def test_hundreds_of_subscribers_share_and_take_over(db, clock):
    """200 join one after another, 60 vanish, 30 leave: always within one of each other, nothing twice, nobody idle."""
    partitions = 400
    publish_many("t", (Message(n, key=f"k{n}") for n in range(partitions)))
    stuck = handler(function=lambda delivery: delivery.nack(delay=7200))
    subs = [Sub(stuck) for _ in range(200)]

    def balance(rounds):
        for _ in range(rounds):
            for sub in subs:
                sub.poller.look_now()
                sub.poller.step()
                sub.work()
                sub.flush()
            if is_fair():
                break

    def shares():
        counts = Counter(PartitionLease.objects.values_list("leased_by", flat=True))
        return [counts[sub.name] for sub in subs]

    def is_fair():
        held = shares()
        return sum(held) == partitions and max(held) - min(held) <= 1

    balance(6)
    assert is_fair(), shares()
    del subs[:60]
    clock.advance(31)
    for sub in subs:
        sub.heart.beat()
    balance(6)
    assert is_fair(), shares()
    for sub in subs[:30]:
        sub.leave()
    del subs[:30]
    balance(6)
    assert is_fair(), shares()
    owned = [key for sub in subs for key in sub.owned()]
    assert len(owned) == len(set(owned)) == partitions


def test_a_dlq_handler_sees_who_gave_up_and_why(db):
    letters = Recorder()
    sub = Sub(
        handler(function=lambda delivery: 1 / 0, max_attempts=2),
        handler(topic="t_dlq", group="mender", function=letters),
    )
    publish("t", {"n": 1}, key="k", id="one")
    sub.settle()
    (letter,) = letters.deliveries
    assert (letter.id, letter.key, letter.payload) == ("one", "k", {"n": 1})
    assert (letter.original_topic, letter.failed_group, letter.failure_count) == ("t", "g", 2)
    assert letter.last_error.rstrip().endswith("ZeroDivisionError: division by zero")


def test_an_ordinary_delivery_has_nothing_of_a_dead_letter(db):
    got = Recorder()
    publish("t", 1)
    Sub(handler(function=got)).settle()
    (delivery,) = got.deliveries
    assert (delivery.original_topic, delivery.failed_group, delivery.failure_count, delivery.last_error) == (
        "",
        "",
        0,
        "",
    )


def test_the_log_says_why_a_message_was_given_up(db, caplog):
    publish("t", 1, key="k")
    sub = Sub(handler(function=lambda delivery: delivery.reject("not for us\nsecond line")))
    sub.settle()
    (record,) = [one for one in caplog.records if "dead_lettered" in one.getMessage()]
    assert record.msg == "delivery.dead_lettered %s", "so that log collectors group by the verb"
    assert record.mysqlqueue["event"] == "delivery.dead_lettered"
    assert record.mysqlqueue["error"] == "second line"
    assert record.mysqlqueue["partition"] == "k"

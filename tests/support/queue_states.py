"""States of a queue, and what there is to say of each."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from django.core.management import call_command

from django_mysqlqueue import Message, publish, publish_many
from django_mysqlqueue.models import ConsumerGroup, QueueMessage, Sequencer
from django_mysqlqueue.operations import pausing, redriving, seeking
from django_mysqlqueue.options.backoff import Backoff
from tests.conftest import Clock
from tests.support import garbage
from tests.support.harness import USING, Sub, handler, sequence
from tests.support.internals import DeadLetterFilter, GroupRef, Session, Subset, groups

SLACK = 20.0
"""Seconds that a test may take; the states are further apart than that."""
WAITS = Backoff(initial=36_000, jitter=0)


@dataclass(frozen=True)
class Group:
    """What is said of one group."""

    lag: int = 0
    age: float | None = None
    """Seconds; None: nothing waits."""
    in_flight: int = 0
    retrying: int = 0
    dead_letters: int = 0
    paused: bool = False
    subscribers: int = 0


@dataclass(frozen=True, order=True)
class Problem:
    severity: int
    kind: str
    group: str = ""
    """``group/topic``; '': it is about the whole queue or a topic."""


class Headline(NamedTuple):
    text: str
    """A part of it."""
    since: int | None = None
    """Epoch milliseconds."""
    error: str = ""
    """The last line of the most frequent one."""
    messages: int = 0
    """How many wait because of it."""
    costs: str = ""
    """What the pages add."""


@dataclass(frozen=True)
class State:
    """What is true."""

    groups: Mapping[str, Group] = field(default_factory=dict)
    """By ``group/topic``."""
    problems: frozenset[Problem] = frozenset()
    outbox: int = 0
    headlines: tuple[Headline, ...] = ()
    """Some of what is said of the causes."""


def problems(*found: tuple[int, str] | tuple[int, str, str]) -> frozenset[Problem]:
    return frozenset(Problem(*one) for one in found)


def command(name: str, *arguments: str) -> Any:
    output = io.StringIO()
    with contextlib.suppress(SystemExit):
        call_command(name, *arguments, "--format", "json", stdout=output)
    return json.loads(output.getvalue())


class Stage:
    """What a state is made with."""

    def __init__(self, clock: Clock, settings: Any) -> None:
        self.clock = clock
        self.settings = settings
        self.subs: list[Sub] = []
        self.ends = contextlib.ExitStack()
        """What has to be ended after the state was read."""

    def register(self, group: str = "g", topic: str = "t", *, mode: str = "ordered", start: str = "earliest") -> None:
        groups.register(USING, GroupRef(group, topic), mode=mode, start=start)

    def log(self, count: int, *, key: str = "a", topic: str = "t") -> None:
        publish_many(topic, [Message(n, key=key) for n in range(count)])
        sequence()

    def live(self, *handlers: Any, **options: Any) -> Sub:
        """A subscriber that stays alive while the time passes."""
        sub = Sub(*handlers or (handler(),), **options)
        self.subs.append(sub)
        return sub

    @property
    def now(self) -> int:
        return Session(USING).now()

    def wait(self, passed: float) -> None:
        self.clock.advance(passed)
        for sub in self.subs:
            sub.heart.beat()


def fail(delivery: Any) -> None:
    raise ValueError("no")


def nothing_yet(stage: Stage) -> State:
    return State()


def a_group_that_has_never_run(stage: Stage) -> State:
    stage.register()
    return State({"g/t": Group()})


def an_idle_subscriber(stage: Stage) -> State:
    stage.live().settle()
    stage.wait(1000)
    return State({"g/t": Group(subscribers=1)})


def two_subscribers_of_two_groups(stage: Stage) -> State:
    stage.live(handler(), handler(group="h"))
    stage.live(handler())
    return State({"g/t": Group(subscribers=2), "h/t": Group(subscribers=1)})


def a_backlog_that_has_just_come(stage: Stage) -> State:
    stage.live()
    stage.log(3)
    return State({"g/t": Group(lag=3, age=0, subscribers=1)})


def a_group_that_is_one_message_behind(stage: Stage) -> State:
    stage.live(handler(), handler(group="h")).settle()
    stage.log(5)
    done = stage.live(handler(group="h"))
    stage.subs[0].leave()
    stage.subs[:1] = []
    done.settle()
    other = stage.live(handler())
    other.step()
    other.work(4)
    other.flush()
    other.inbox.close()
    stage.wait(40)
    return State(
        {"g/t": Group(lag=1, age=40, in_flight=1, subscribers=1), "h/t": Group(subscribers=1)},
    )


def garbage_collection_has_emptied_the_log(stage: Stage) -> State:
    stage.settings.MYSQLQUEUE = {"RETENTION": 0}
    sub = stage.live()
    stage.log(5)
    sub.settle()
    stage.wait(1)
    assert garbage.collect(USING).messages == 5
    assert not QueueMessage.objects.exists()
    stage.register("late", start="latest")
    stage.register("early", start="earliest")
    return State({"g/t": Group(subscribers=1), "late/t": Group(), "early/t": Group()})


def the_next_message_after_garbage_collection(stage: Stage) -> State:
    garbage_collection_has_emptied_the_log(stage)
    stage.log(1)
    stage.wait(40)
    waits = Group(lag=1, age=40)
    return State(
        {"g/t": dataclasses.replace(waits, subscribers=1), "late/t": waits, "early/t": waits},
        problems((2, "no_subscriber", "late/t"), (2, "no_subscriber", "early/t")),
    )


def messages_in_flight(stage: Stage) -> State:
    sub = stage.live()
    stage.log(2)
    stage.log(1, key="b")
    sub.step()
    stage.wait(100)
    return State({"g/t": Group(lag=3, age=100, in_flight=3, subscribers=1)})


def a_paused_group_with_a_backlog(stage: Stage) -> State:
    stage.live()
    stage.log(2)
    pausing.set_paused(USING, GroupRef("g", "t"), actor="ada", paused=True)
    stage.wait(100)
    return State({"g/t": Group(lag=2, age=100, paused=True, subscribers=1)}, problems((1, "paused", "g/t")))


def a_paused_group_without_a_backlog(stage: Stage) -> State:
    stage.live()
    pausing.set_paused(USING, GroupRef("g", "t"), actor="ada", paused=True)
    return State({"g/t": Group(paused=True, subscribers=1)}, problems((2, "paused", "g/t")))


def a_paused_group_with_messages_in_the_outbox(stage: Stage) -> State:
    stage.live()
    pausing.set_paused(USING, GroupRef("g", "t"), actor="ada", paused=True)
    publish("t", 1)
    return State({"g/t": Group(age=0, paused=True, subscribers=1)}, problems((1, "paused", "g/t")), outbox=1)


def subscribers_that_are_being_restarted(stage: Stage) -> State:
    stage.register()
    stage.log(2)
    stage.wait(35)
    return State({"g/t": Group(lag=2, age=35)}, problems((2, "no_subscriber", "g/t")))


def no_live_subscriber(stage: Stage) -> State:
    stage.register()
    stage.log(2)
    stage.wait(100)
    return State({"g/t": Group(lag=2, age=100)}, problems((0, "no_subscriber", "g/t")))


def a_subscriber_that_was_killed(stage: Stage) -> State:
    sub = Sub(handler())
    stage.log(2)
    sub.step()
    stage.wait(100)
    return State(
        {"g/t": Group(lag=2, age=100, in_flight=2)}, problems((0, "no_subscriber", "g/t"), (2, "silent", "g/t"))
    )


def one_of_two_subscribers_was_killed(stage: Stage) -> State:
    stage.live(handler(mode="shared"))
    killed = Sub(handler(mode="shared"))
    stage.log(2)
    killed.step()
    stage.wait(100)
    return State({"g/t": Group(lag=2, age=100, in_flight=2, subscribers=1)}, problems((2, "silent", "g/t")))


def a_killed_subscriber_of_two_groups(stage: Stage) -> State:
    stage.live(handler(mode="shared"), handler(group="h", mode="shared"))
    killed = Sub(handler(mode="shared"), handler(group="h", mode="shared"))
    stage.log(2)
    killed.step()
    stage.wait(100)
    waits = Group(lag=2, age=100, in_flight=2, subscribers=1)
    return State({"g/t": waits, "h/t": waits}, problems((2, "silent", "g/t"), (2, "silent", "h/t")))


def an_outage_that_is_just_over(stage: Stage) -> State:
    stage.register()
    stage.log(3)
    stage.wait(1000)
    stage.live()
    stage.wait(25)
    return State({"g/t": Group(lag=3, age=1025, subscribers=1)})


def an_outage_after_which_nothing_happens(stage: Stage) -> State:
    an_outage_that_is_just_over(stage)
    stage.wait(600)
    return State({"g/t": Group(lag=3, age=1625, subscribers=1)}, problems((1, "still", "g/t")))


def an_outage_that_is_being_caught_up_with(stage: Stage) -> State:
    stage.register()
    stage.log(3)
    stage.log(1, key="b")
    stage.wait(1000)
    sub = stage.live()
    sub.step()
    sub.work(1)
    sub.flush()
    sub.poller.write_rollups()
    return State({"g/t": Group(lag=3, age=1000, in_flight=3, subscribers=1)})


def handlers_that_hang(stage: Stage) -> State:
    sub = stage.live()
    stage.log(1)
    sub.step()
    stage.wait(700)
    return State({"g/t": Group(lag=1, age=700, in_flight=1, subscribers=1)}, problems((1, "still", "g/t")))


def _stuck(stage: Stage, mode: str) -> Group:
    sub = stage.live(
        handler(mode=mode, function=fail, backoff=WAITS, on_failure="block" if mode == "ordered" else "skip")
    )
    stage.log(1)
    sub.settle()
    stage.log(2)
    stage.wait(100)
    return Group(lag=3, age=100, retrying=1, subscribers=1)


def a_stuck_head_of_an_ordered_group(stage: Stage) -> State:
    return State({"g/t": _stuck(stage, "ordered")}, problems((1, "stuck", "g/t")))


def a_stuck_message_of_a_shared_group(stage: Stage) -> State:
    return State({"g/t": _stuck(stage, "shared")}, problems((2, "stuck", "g/t")))


def a_handler_that_fails_every_time(stage: Stage) -> State:
    sub = stage.live(handler(function=fail, backoff=WAITS))
    publish_many("t", [Message(n, key=f"k{n}") for n in range(12)])
    sub.settle()
    sub.poller.write_rollups()
    stage.wait(90)
    messages = [(1, "stuck", "g/t")] * 12
    return State({"g/t": Group(lag=12, age=90, retrying=12, subscribers=1)}, problems((0, "failing", "g/t"), *messages))


def a_handler_that_has_failed_since_it_was_started(stage: Stage) -> State:
    sub = stage.live(handler(function=fail, backoff=WAITS))
    publish_many("t", [Message(n, key=f"k{n}") for n in range(12)])
    sub.settle()
    sub.poller.write_rollups()
    stage.wait(25)
    return State({"g/t": Group(lag=12, age=25, retrying=12, subscribers=1)})


def a_few_dead_letters(stage: Stage) -> State:
    sub = stage.live(handler(function=lambda delivery: delivery.payload < 3 and delivery.reject("no")))
    publish_many("t", range(20))
    sub.settle()
    sequence()
    return State({"g/t": Group(dead_letters=3, subscribers=1)}, problems((1, "dead_letters", "g/t")))


def dead_letters_on_their_way(stage: Stage) -> State:
    """They are in the outbox: no DLQ topic has them yet."""
    sub = stage.live(handler(function=lambda delivery: delivery.reject("no")))
    stage.log(2)
    sub.step()
    sub.work()
    sub.flush()
    return State({"g/t": Group(subscribers=1)}, outbox=2)


def many_dead_letters(stage: Stage) -> State:
    sub = stage.live(handler(function=lambda delivery: delivery.reject("no")))
    publish_many("t", range(20))
    sub.settle()
    sequence()
    return State(
        {"g/t": Group(dead_letters=20, subscribers=1)},
        problems((0, "recent_dead_letters", "g/t"), (1, "dead_letters", "g/t")),
    )


def many_dead_letters_of_long_ago(stage: Stage) -> State:
    many_dead_letters(stage)
    stage.wait(1000)
    return State({"g/t": Group(dead_letters=20, subscribers=1)}, problems((2, "dead_letters", "g/t")))


def a_dead_letter_that_was_redriven(stage: Stage) -> State:
    """It is for its group alone."""
    sub = stage.live(handler(function=lambda delivery: delivery.reject("no")), handler(group="h"))
    stage.log(1)
    sub.settle()
    sequence()
    assert redriving.redrive_all(USING, DeadLetterFilter("t_dlq"), actor="ada") == 1
    sequence()
    stage.wait(40)
    return State({"g/t": Group(lag=1, age=40, subscribers=1), "h/t": Group(subscribers=1)})


def a_group_of_a_dlq_topic(stage: Stage) -> State:
    sub = stage.live(handler(function=lambda delivery: delivery.reject("no")))
    stage.log(2)
    sub.settle()
    sequence()
    stage.live(handler(topic="t_dlq", group="d"))
    stage.wait(40)
    return State(
        {"g/t": Group(dead_letters=2, subscribers=1), "d/t_dlq": Group(lag=2, age=40, subscribers=1)},
        problems((1, "dead_letters", "g/t")),
    )


def a_message_that_was_just_published(stage: Stage) -> State:
    stage.live()
    publish("t", 1)
    publish("t", 2, delay=3600)
    return State({"g/t": Group(age=0, subscribers=1)}, outbox=1)


def an_outbox_that_nobody_moves(stage: Stage) -> State:
    stage.live()
    publish_many("t", range(3))
    stage.wait(40)
    return State({"g/t": Group(age=40, subscribers=1)}, problems((0, "outbox")), outbox=3)


def an_outbox_that_is_behind(stage: Stage) -> State:
    sub = stage.live()
    stage.log(1)
    sub.settle()
    publish_many("t", range(3))
    stage.wait(40)
    Sequencer.objects.update(sequenced_at=command("queuestatus")["now"])
    return State({"g/t": Group(age=40, subscribers=1)}, problems((2, "outbox_behind")), outbox=3)


def an_outbox_without_subscribers(stage: Stage) -> State:
    stage.register()
    stage.log(1)
    publish_many("t", range(3))
    stage.wait(100)
    return State({"g/t": Group(lag=1, age=100)}, problems((0, "outbox"), (0, "no_subscriber", "g/t")), outbox=3)


def a_group_that_is_younger_than_its_messages(stage: Stage) -> State:
    stage.register("old")
    stage.log(2)
    QueueMessage.objects.update(published_at=command("queuestatus")["now"] - 1_000_000)
    ConsumerGroup.objects.update(registered_at=1)
    stage.live()
    stage.live(handler(group="old"))
    stage.wait(599)
    QueueMessage.objects.update(published_at=command("queuestatus")["now"] - 1_000_000)
    stage.wait(2)
    return State(
        {"g/t": Group(lag=2, age=601, subscribers=1), "old/t": Group(lag=2, age=1002, subscribers=1)},
        problems((1, "still", "g/t"), (1, "still", "old/t")),
    )


def a_group_after_a_seek(stage: Stage) -> State:
    sub = stage.live()
    stage.log(4)
    sub.settle()
    stage.wait(1000)
    seeking.move(USING, GroupRef("g", "t"), seeking.position_of(USING, "earliest"), actor="ada")
    stage.wait(40)
    return State({"g/t": Group(lag=4, age=40, subscribers=1)})


def a_seek_that_did_not_finish(stage: Stage) -> State:
    stage.live()
    stage.log(1)
    ConsumerGroup.objects.update(paused=True, after_seek=ConsumerGroup.AfterSeek.RESUME)
    return State({"g/t": Group(lag=1, age=0, paused=True, subscribers=1)}, problems((0, "seek_ended_early", "g/t")))


def a_drop_that_did_not_finish(stage: Stage) -> State:
    stage.live()
    ConsumerGroup.objects.update(paused=True, after_seek=ConsumerGroup.AfterSeek.DROPPED)
    return State({"g/t": Group(paused=True, subscribers=1)}, problems((0, "drop_ended_early", "g/t")))


def a_partition_that_no_subset_covers(stage: Stage) -> State:
    stage.live(subset=Subset.parse(["other-*"], None))
    stage.log(1)
    stage.wait(100)
    return State({"g/t": Group(lag=1, age=100, subscribers=1)}, problems((0, "unserved", "g/t")))


def a_topic_without_a_group(stage: Stage) -> State:
    stage.live()
    stage.log(1, topic="orders.plced")
    return State({"g/t": Group(subscribers=1)}, problems((1, "groupless")))


STATES = [
    nothing_yet,
    a_group_that_has_never_run,
    an_idle_subscriber,
    two_subscribers_of_two_groups,
    a_backlog_that_has_just_come,
    a_group_that_is_one_message_behind,
    garbage_collection_has_emptied_the_log,
    the_next_message_after_garbage_collection,
    messages_in_flight,
    a_paused_group_with_a_backlog,
    a_paused_group_without_a_backlog,
    a_paused_group_with_messages_in_the_outbox,
    subscribers_that_are_being_restarted,
    no_live_subscriber,
    a_subscriber_that_was_killed,
    one_of_two_subscribers_was_killed,
    a_killed_subscriber_of_two_groups,
    an_outage_that_is_just_over,
    an_outage_after_which_nothing_happens,
    an_outage_that_is_being_caught_up_with,
    handlers_that_hang,
    a_stuck_head_of_an_ordered_group,
    a_stuck_message_of_a_shared_group,
    a_handler_that_fails_every_time,
    a_handler_that_has_failed_since_it_was_started,
    a_few_dead_letters,
    dead_letters_on_their_way,
    many_dead_letters,
    many_dead_letters_of_long_ago,
    a_dead_letter_that_was_redriven,
    a_group_of_a_dlq_topic,
    a_message_that_was_just_published,
    an_outbox_that_nobody_moves,
    an_outbox_that_is_behind,
    an_outbox_without_subscribers,
    a_group_that_is_younger_than_its_messages,
    a_group_after_a_seek,
    a_seek_that_did_not_finish,
    a_drop_that_did_not_finish,
    a_partition_that_no_subset_covers,
    a_topic_without_a_group,
]

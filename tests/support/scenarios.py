"""What tests start from: a log, dead letters, partitions with work, an operation that is frozen."""

from __future__ import annotations

import itertools

from django_mysqlqueue import Message, publish_many
from django_mysqlqueue.models import QueueMessage
from django_mysqlqueue.operations import dropping, retrying, seeking, steps
from tests.support.handlers import fail
from tests.support.harness import Sub, handler, in_thread, sequence
from tests.support.internals import GroupRef


def busy_partitions(count):
    publish_many("t", (Message(number, key=f"k{number:03}") for number in range(count)))
    sequence()


def rebalance(subs, rounds=4):
    for _ in range(rounds):
        for sub in subs:
            sub.step()
            sub.work()
            sub.flush()
            sub.step()


G = GroupRef("g", "t")


def offsets_of(topic="t"):
    return list(QueueMessage.objects.filter(topic=topic).order_by("offset").values_list("offset", flat=True))


def log(count, keys="ab", topic="t"):
    """Puts messages 0, 1, … into the log, over some partitions by turns; returns their offsets."""
    publish_many(topic, (Message(number, key=keys[number % len(keys)]) for number in range(count)))
    sequence()
    return offsets_of(topic)


def dead_letters(count, group="g", topic="t", keys="ab"):
    """Lets a group fail messages for good; returns the offsets of the dead letters."""
    log(count, keys, topic)
    sub = Sub(handler(topic, group, fail, max_attempts=1))
    sub.settle()
    sub.leave()
    sequence()
    return offsets_of(f"{topic}_dlq")


def resumed(sub):
    """The next tick, at which a subscriber reads what operators have said."""
    sub.step(times=2)
    return sub


def frozen_before(monkeypatch, transaction, meanwhile):
    """A process that is frozen before one of its operation's transactions; ``meanwhile`` happens before it wakes."""
    real, numbers, modules = seeking.run, itertools.count(1), (seeking, dropping, steps, retrying)

    def run(using, operation):
        if next(numbers) == transaction:
            for module in modules:
                monkeypatch.setattr(module, "run", real)
            in_thread(meanwhile)
        return real(using, operation)

    for module in modules:
        monkeypatch.setattr(module, "run", run)

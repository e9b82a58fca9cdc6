"""queuegroupmode."""

from __future__ import annotations

import pytest
from django.core.management import CommandError

from django_mysqlqueue import Message, publish_many
from django_mysqlqueue.models import ConsumerGroup
from tests.support.commands import run
from tests.support.harness import USING, Sub, handler, lag
from tests.support.internals import GroupRef, groups


def test_mode_is_refused_while_somebody_works_for_the_group(db, clock):
    sub = Sub(handler(), name="busy")
    with pytest.raises(CommandError, match=f"has live subscribers: {sub.name}. Stop them before"):
        run("queuegroupmode", "g", "t", "shared", "--noinput")
    assert ConsumerGroup.objects.get().mode == "ordered"
    clock.advance(31)
    assert run("queuegroupmode", "g", "t", "shared", "--noinput") == (
        "The mode of the group g/t will change to shared.\nThe mode of the group g/t is now shared.\n"
    )
    assert ConsumerGroup.objects.get().mode == "shared"


def test_a_subscriber_that_left_does_not_hold_the_mode(db):
    sub = Sub(handler())
    sub.leave()
    run("queuegroupmode", "g", "t", "shared", "--noinput")
    assert ConsumerGroup.objects.get().mode == "shared"


def test_a_live_subscriber_of_another_group_does_not_matter(db):
    Sub(handler(group="other"), handler(topic="u"))
    groups.register(USING, GroupRef("g", "t"), mode="ordered", start="earliest")
    run("queuegroupmode", "g", "t", "shared", "--noinput")
    assert set(ConsumerGroup.objects.filter(mode="shared").values_list("consumer_group", "topic")) == {("g", "t")}


@pytest.mark.parametrize(("before", "after"), [("ordered", "shared"), ("shared", "ordered")])
def test_nothing_is_lost_or_doubled_over_a_change_of_mode(db, before, after):
    """Some are settled, some wait out a backoff, some were never claimed; the mode changes between."""
    got = []

    def first(delivery):
        if delivery.payload in (1, 4):
            delivery.nack(delay=0)
        else:
            got.append(delivery.payload)

    publish_many("t", [Message(number, key=f"k{number % 2}") for number in range(10)])
    sub = Sub(handler(function=first, mode=before), claim_size=3, prefetch=3)
    sub.step()
    sub.work(4)
    sub.leave()
    assert 0 < len(got) < 8
    run("queuegroupmode", "g", "t", after, "--noinput")
    Sub(handler(function=lambda delivery: got.append(delivery.payload), mode=after)).settle()
    assert sorted(got) == list(range(10))
    assert lag() == 0


def test_mode_of_an_unknown_group(db):
    with pytest.raises(CommandError, match=r"There is no group 'g' on topic 't'\. Registered: none\."):
        run("queuegroupmode", "g", "t", "shared", "--noinput")


def test_unknown_mode(db):
    with pytest.raises(CommandError, match="parallel"):
        run("queuegroupmode", "g", "t", "parallel")

"""What problems cost: messages that wait, dead letters to come, and the disk that a forgotten group holds."""

from __future__ import annotations

import dataclasses

import pytest

from django_mysqlqueue import Message, publish_many, subscriber
from django_mysqlqueue.inspection import costs, find_causes, find_problems, get_overview
from django_mysqlqueue.models import DeliveryEvent, Rollup
from django_mysqlqueue.operations import pausing
from django_mysqlqueue.options.backoff import Backoff
from tests.inspection.test_group_problems import NOW, group, head
from tests.support.harness import USING, Sub, handler, sequence
from tests.support.internals import Count, GroupRef, HealthSettings, groups

pytestmark = [pytest.mark.usefixtures("db"), pytest.mark.still_clock]

MINUTELY = Backoff(initial=600, factor=1, jitter=0)
G = GroupRef("g", "t")


class PartnerTimeout(Exception):
    pass


def outage(clock, *, passed=120, **options):
    """A group of which every attempt has failed for two minutes, with messages behind those that fail."""

    def fails(delivery):
        raise PartnerTimeout("no answer")

    options = {"mode": "ordered", "backoff": MINUTELY, "max_attempts": 3, "on_failure": "block", **options}
    subscriber("t", group="g", **options)(fails)
    sub = Sub(handler("t", "g", fails, **options))
    clock.advance(25)
    sub.heart.beat()
    publish_many("t", [Message(n, key=f"k{n % 12}") for n in range(36)])
    sub.settle()
    sub.poller.write_rollups()
    clock.advance(passed)
    sub.heart.beat()


def cause(kind):
    (found,) = (one for one in find_causes(using=USING) if one.kind == kind)
    return found


def facts(kind):
    return cause(kind).facts(get_overview(using=USING).now).split(" · ")


def test_an_outage_costs_what_waits_and_what_will_be_dead_lettered(clock, no_handlers):
    outage(clock)
    assert cause("failing").headline().endswith(" (12 of 12): PartnerTimeout.")
    assert cause("failing").operation == "pause"
    assert facts("failing")[:3] == [
        "12 partitions", "36 waiting messages", "up to 12 messages will be dead-lettered within an hour"
    ]  # fmt: skip


def test_the_cost_of_the_first_minute_is_known(clock, no_handlers):
    """No message is stuck yet, so there is one problem. It has the error of the messages."""
    outage(clock, on_failure="skip", mode="shared", passed=45)
    assert [one.kind for one in cause("failing").problems] == ["failing"]
    assert cause("failing").headline().endswith("(36 of 36): PartnerTimeout.")
    assert facts("failing")[:2] == ["36 waiting messages", "up to 36 messages will be dead-lettered within an hour"]


@pytest.mark.parametrize(
    ("options", "is_paused"),
    [({"max_attempts": None}, False), ({"backoff": Backoff(initial=3000, factor=1, jitter=0)}, False), ({}, True)],
)
def test_no_dead_letters_are_predicted_that_will_not_come(clock, no_handlers, options, is_paused):
    outage(clock, **options)
    if is_paused:
        pausing.set_paused(USING, G, actor="ada", paused=True)
    assert not any("dead-lettered" in one for one in facts("failing"))


@pytest.mark.parametrize(
    ("attempts", "most", "wait", "soon"),
    [
        (1, 3, 0, True),
        (1, 3, 3000, True),
        (1, 3, 3001, False),
        (2, 3, 3600, True),
        (2, 3, 3601, False),
        (9, 3, 0, True),
        (1, None, 0, False),
        (1, 8, 0, True),
        (1, 9, 0, False),
    ],
)
def test_when_a_message_will_be_dead_lettered(attempts, most, wait, soon):
    """Each further attempt but the last is followed by a delay of ten minutes."""
    declared = handler("t", "g", max_attempts=most, backoff=MINUTELY)
    found = group(head(60, attempts=attempts, until=NOW + wait * 1000), retrying=Count(7))
    assert costs._soon(found, declared, NOW, only=None) == (7 if soon else 0)
    assert costs._soon(found, None, NOW, only=None) == 0, "its options are not known"


def test_the_share_of_the_known_messages_stands_for_all():
    declared = handler("t", "g", max_attempts=3, backoff=MINUTELY)
    heads = [head(60, key=f"k{n}", attempts=1, until=NOW + n * 2_000_000) for n in range(4)]
    assert costs._soon(group(*heads, retrying=Count(100)), declared, NOW, only=None) == 50
    assert costs._soon(group(*heads, retrying=Count(100)), declared, NOW, only=[7, 8]) == 1, "two, of which half"
    assert costs._soon(group(retrying=Count(100)), declared, NOW, only=None) == 0


def test_a_forgotten_group_costs_disk(clock):
    groups.register(USING, G, mode="ordered", start="earliest")
    Sub(handler("u", "other"))
    publish_many("t", [Message("x" * 998, key=f"k{n}") for n in range(30)])
    sequence()
    clock.advance(3500)
    assert not any("disk" in one for one in facts("no_subscriber")), "it may be back soon"
    clock.advance(101)
    assert "≈ 51.4 KB of disk" in [one.replace("\xa0", " ") for one in facts("no_subscriber")]
    (problem,) = (one for one in find_problems(using=USING) if one.kind == "no_subscriber")
    assert problem.disk == Count(30 * 1755), "as measured"
    assert problem.operation == "drop"
    more = dataclasses.replace(problem, disk=Count(1, exact=False))
    assert "of disk or more" in dataclasses.replace(cause("no_subscriber"), problems=(more,)).facts(NOW)


def test_two_forgotten_groups_of_a_topic_hold_the_same_messages(clock):
    for name in "gh":
        groups.register(USING, GroupRef(name, "t"), mode="ordered", start="earliest")
    publish_many("t", [Message("x" * 998) for _ in range(30)])
    sequence()
    clock.advance(3601)
    assert "≈ 51.4 KB of disk" in [one.replace("\xa0", " ") for one in facts("no_subscriber")]


def test_dead_letters_have_the_error_that_was_recorded(clock, no_handlers):
    outage(clock, max_attempts=1)
    found = cause("failing")
    assert found.headline().endswith(" (36 of 36): PartnerTimeout.")
    assert found.operation == "", "redriven messages would fail again"
    DeliveryEvent.objects.all().delete()
    assert cause("failing").headline().endswith(" (36 of 36).")


def test_dead_letters_of_the_window_have_their_error_before_there_are_too_many(clock, no_handlers):
    outage(clock, max_attempts=1)
    Rollup.objects.all().delete()

    def headline():
        overview = get_overview(using=USING)
        found = find_problems(overview, thresholds=HealthSettings(max_recent_dead_letters=None))
        one = next(one for one in find_causes(overview, found) if one.kind == "dead_letters")
        return one.headline()

    assert headline() == "g/t has dead-lettered messages: 36 in t_dlq: PartnerTimeout."
    clock.advance(601)
    assert headline() == "g/t has dead-lettered messages: 36 in t_dlq."


def test_a_failure_of_every_attempt_is_told_since_its_minute(clock, no_handlers):
    """Successes of the same minute came before: they are not told, and do not make it a share."""
    outage(clock)
    bucket = Rollup.objects.get(grain=60, failed__gt=0)
    Rollup.objects.filter(pk=bucket.pk).update(acked=5)
    Rollup.objects.create(consumer_group="g", topic="t", grain=60, bucket_at=bucket.bucket_at + 60_000, failed=9)
    (problem,) = (one for one in find_problems(using=USING) if one.kind == "failing")
    assert (problem.since, "every attempt has failed since" in problem.text) == (bucket.bucket_at, True)
    assert problem.text.endswith(" (21 of 21).")
    Rollup.objects.filter(bucket_at=bucket.bucket_at + 60_000).update(acked=1)
    (problem,) = (one for one in find_problems(using=USING) if one.kind == "failing")
    assert "21 of 27 attempts have failed since" in problem.text


def test_a_queue_without_problems_needs_no_further_statement(clock, monkeypatch):
    def refuse(*given, **options):
        raise AssertionError(given)

    sub = Sub(handler("t", "g"))
    publish_many("t", range(3))
    sub.settle()
    publish_many("t", range(3))
    sequence()
    for place, name in ((costs.error_kinds, "recorded_deliveries"), (costs, "_disk"), (costs, "_soon")):
        monkeypatch.setattr(place, name, refuse)
    assert find_problems(using=USING) == []

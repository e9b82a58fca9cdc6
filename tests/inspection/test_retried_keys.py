"""Messages of few keys that fail again and again, while those of other keys succeed."""

from __future__ import annotations

import re

import pytest
from health_check.exceptions import ServiceUnavailable

from django_mysqlqueue import Message, publish_many
from django_mysqlqueue.health import QueueHealth
from django_mysqlqueue.inspection import always_failing, find_causes, find_problems, get_overview
from django_mysqlqueue.inspection.causes import status_of
from django_mysqlqueue.models import DeliveryEvent, DeliveryState
from django_mysqlqueue.options.backoff import Backoff
from tests.support.harness import USING, Sub, handler, sequence
from tests.support.internals import Count, GroupRef, Session

pytestmark = pytest.mark.usefixtures("db")

AGAIN = Backoff(initial=10, factor=1, jitter=0)
TENANTS = ("acme", "globex", "initech", "umbrella", "hooli")


@pytest.fixture
def fails(clock):
    """Runs a group of which the attempts for some tenants fail."""

    def run(*tenants, number=100, rounds=2):
        def handle(delivery):
            if delivery.payload in tenants:
                raise PermissionError(delivery.payload)

        sub = Sub(handler("t", "g", handle, mode="shared", backoff=AGAIN, max_attempts=None))
        publish_many("t", [Message(TENANTS[n % 5], key=TENANTS[n % 5]) for n in range(number)])
        for _ in range(rounds):
            sub.settle()
            sub.poller.write_rollups()
            clock.advance(65)
            sub.heart.beat()
        if first := min(DeliveryEvent.objects.filter(outcome="failed").values_list("settled_at", flat=True), default=0):
            clock.stand_still(first + rounds * 65_000)  # However slow the machine is.
        return sub

    return run


def found():
    return [one for one in find_problems(using=USING) if one.kind == "retrying"]


@pytest.mark.parametrize("partitions", [None, 8])
def test_a_key_of_which_every_message_fails(fails, settings, partitions):
    if partitions:
        settings.MYSQLQUEUE = {**settings.MYSQLQUEUE, "TOPICS": {"t": {"PARTITIONS": partitions}}}
    fails("globex")
    (problem,) = found()
    text = r"40 of 40 failures of g/t since [^']+ have the key 'globex', of which all attempts fail\."
    assert re.fullmatch(text, problem.text)
    assert (problem.severity, problem.messages.value, problem.error) == (0, 20, "PermissionError: globex")
    assert problem.since == min(DeliveryEvent.objects.filter(outcome="failed").values_list("settled_at", flat=True))
    overview = get_overview(using=USING)
    causes = find_causes(overview)
    assert [cause.kind for cause in causes if any(one.kind == "retrying" for one in cause.problems)] == ["retrying"]
    status = status_of(overview, causes)
    assert (status.state, status.text.startswith(problem.text)) == ("degraded", True)


@pytest.fixture
def poisoned(clock):
    """Runs a group of which the messages of one tenant are dead-lettered, and in an outage those of others, too."""

    def handle(delivery):
        if delivery.key == "globex" or delivery.payload == "outage":
            raise PermissionError(delivery.key)

    sub = Sub(handler("t", "g", handle, mode="shared", backoff=AGAIN, max_attempts=3))

    def run(rounds, *, outage=0):
        for number in range(rounds):
            publish_many("t", [Message(n, key=TENANTS[n % 5]) for n in range(100)])
            publish_many("t", [Message("outage", key=f"order-{number}-{n}") for n in range(outage)])
            sub.settle()
            sub.poller.write_rollups()
            clock.advance(65)
            sub.heart.beat()
        sequence()

    return run


def test_a_key_of_which_the_first_messages_are_dead_letters(poisoned, clock):
    """The group must not be paused for it, and the fault is as old as the first of them, which are no success."""
    poisoned(6)
    failures = DeliveryEvent.objects.filter(outcome__in=["failed", "dead_lettered"])
    clock.stand_still(failures.order_by("settled_at")[0].settled_at + 6 * 65_000)
    assert failures.filter(outcome="dead_lettered").count() > 50
    problems = find_problems(using=USING)
    assert [one.kind for one in problems if one.ref and one.kind in ("failing", "retrying")] == ["retrying"]
    (problem,) = found()
    number = failures.count()
    assert problem.text.startswith(f"{number} of {number} failures of g/t since")
    assert problem.text.endswith(" have the key 'globex', of which all attempts fail.")
    assert problem.since == min(failures.values_list("settled_at", flat=True))
    assert problem.messages.value == DeliveryState.objects.filter(acked=False).count()
    assert problem.failed.value == 120
    cause = find_causes(problems=problems)[0]
    assert cause.text.startswith(problem.text), "not how many were dead-lettered"


def test_an_outage_is_not_explained_by_dead_letters_of_long_ago(poisoned, clock):
    """Messages of other keys fail now, each of its own."""
    poisoned(14)
    clock.advance(700)
    poisoned(1)
    assert "failing" not in {one.kind for one in find_problems(using=USING)}
    poisoned(2, outage=60)
    assert "failing" in {one.kind for one in find_problems(using=USING)}


def test_a_health_page_does_not_show_the_key(fails):
    fails("globex")
    with pytest.raises(ServiceUnavailable, match=r"^Unavailable: g/t: retrying\.$"):
        QueueHealth().run()


@pytest.mark.parametrize("share", [None, 1])
def test_the_switch_of_the_ratio_makes_it_a_note(fails, settings, share):
    settings.MYSQLQUEUE = {"HEALTH": {"MAX_FAILURE_RATIO": share}}
    fails("globex")
    assert [one.severity for one in found()] == [1]


def test_a_few_keys_are_named_but_not_many(fails):
    fails("globex", "acme")
    (problem,) = found()
    assert problem.text.startswith("80 of 80 failures of g/t since ")
    assert problem.text.endswith(" have the keys 'acme', 'globex', of which all attempts fail.")


def test_three_of_many_keys_are_named(fails):
    fails(*TENANTS[1:])
    (problem,) = found()
    assert problem.text.endswith(" have the keys 'globex', 'hooli', 'initech' and 1 more, of which all attempts fail.")


@pytest.mark.parametrize(("number", "rounds"), [(100, 1), (20, 2), (5, 12)])
def test_a_passing_fault_or_a_few_messages_are_no_such_problem(fails, number, rounds):
    """All at one time, fewer than ten attempts, or one message, which may be a poison message."""
    fails("globex", number=number, rounds=rounds)
    assert get_overview(using=USING).retrying.value == number // 5
    assert not found()


@pytest.mark.still_clock
@pytest.mark.parametrize("partitions", [None, 8])
@pytest.mark.parametrize(
    ("seconds", "more", "another", "fine", "is_known"),
    [
        (19, 1, "", "lately", False),
        (20, 1, "", "lately", True),
        (59, 0, "", "lately", False),
        (60, 0, "", "lately", True),
        (59, 1, "fails once", "lately", False),
        (60, 1, "fails once", "lately", True),
        (59, 1, "fails", "lately", False),
        (60, 1, "fails", "lately", True),
        (59, 1, "", "before", False),
        (60, 1, "", "before", True),
    ],
)
def test_a_key_is_known_sooner_if_only_its_attempts_fail(
    clock, settings, partitions, seconds, more, another, fine, is_known
):
    """It is no fault of one time, or of all keys: more of its messages fail, no others do, and others succeed."""
    if partitions:
        settings.MYSQLQUEUE = {**settings.MYSQLQUEUE, "TOPICS": {"t": {"PARTITIONS": partitions}}}

    def handle(delivery):
        if delivery.payload == "fails" or (delivery.payload == "fails once" and delivery.attempt == 1):
            raise PermissionError(delivery.key)

    def publish(*payloads, key):
        publish_many("t", [Message(payload, key=key) for payload in payloads])
        sub.settle()
        sub.poller.write_rollups()

    sub = Sub(handler("t", "g", handle, mode="shared", backoff=AGAIN, max_attempts=None))
    if fine == "before":
        publish("fine", key="acme")
    clock.advance(125)
    sub.heart.beat()
    publish(*["fails"] * 10, key="globex")
    if another:
        publish(another, key="acme")
    if fine == "lately":
        publish("fine", key="initech")
    clock.advance(seconds)
    sub.heart.beat()
    publish(*["fails"] * more, key="globex")
    assert bool(found()) == is_known
    assert not is_known or "have the key 'globex'," in found()[0].text


@pytest.mark.still_clock
def test_messages_that_have_failed_before_a_success_are_not_new(clock):
    """They are few of those of their key, and are tried again and again."""

    def handle(delivery):
        if delivery.payload == "fails":
            raise PermissionError(delivery.key)

    sub = Sub(handler("t", "g", handle, mode="shared", backoff=AGAIN, max_attempts=None))
    clock.advance(125)
    publish_many("t", [Message("fails", key="globex") for _ in range(10)])
    steps = [("fails", "globex", 30), ("fine", "globex", 11), ("fine", "initech", 25), ("fails", "globex", 0)]
    for payload, key, seconds in steps:
        publish_many("t", [Message(payload, key=key)])
        sub.settle()
        sub.poller.write_rollups()
        clock.advance(seconds)
        sub.heart.beat()
    assert not found()


@pytest.mark.parametrize("partitions", [None, 8])
def test_a_success_ends_it_and_earlier_failures_count_no_more(fails, clock, settings, partitions):
    if partitions:
        settings.MYSQLQUEUE = {**settings.MYSQLQUEUE, "TOPICS": {"t": {"PARTITIONS": partitions}}}
    sub = fails("globex")
    assert found()
    publish_many("t", [Message("fine", key="globex")])
    clock.advance(1)
    sub.step()
    sub.work()
    sub.flush()
    assert not found(), "one message succeeds, while the others fail again"
    for _ in range(2):
        clock.advance(65)
        sub.heart.beat()
        sub.settle()
    (problem,) = found()
    assert problem.text.startswith("60 of 60 failures of g/t since ")


def test_attempts_of_processes_that_have_ended_do_not_count(fails, clock):
    fails("globex").leave()
    Sub(handler("t", "g", mode="shared", backoff=AGAIN, max_attempts=None))
    clock.advance(65)
    assert not found()


def test_if_every_attempt_fails_that_is_the_problem(fails, clock):
    fails("globex", "acme")
    clock.advance(700)
    sub = Sub(handler("t", "g", lambda delivery: 1 / 0, mode="shared", backoff=AGAIN, max_attempts=None))
    clock.advance(65)
    sub.settle()
    sub.poller.write_rollups()
    clock.advance(65)
    sub.heart.beat()
    assert "failing" in {one.kind for one in find_problems(using=USING)}
    assert not found()


def test_of_many_messages_the_latest_due_ones_are_read(fails, monkeypatch):
    monkeypatch.setattr(always_failing, "MESSAGES", 12)
    fails("globex")
    (problem,) = found()
    assert problem.text.startswith("24+ of 24+ failures of g/t since ")
    assert problem.messages == Count(12, exact=False)


@pytest.mark.parametrize("mode", ["ordered", "shared"])
@pytest.mark.parametrize("claimed", [0, 60])
def test_messages_that_were_claimed_since_do_not_hide_a_success(clock, mode, claimed):
    """Two of many messages fail. The others have succeeded, and more were claimed since."""
    sub = Sub(handler("t", "g", handle_two, mode=mode, backoff=AGAIN, max_attempts=None, on_failure="skip"))
    publish_many("t", [Message(n, key="globex") for n in range(40)])
    for _ in range(6):
        sub.settle()
        sub.poller.write_rollups()
        publish_many("t", [Message(9, key="globex") for _ in range(10)])
        clock.advance(65)
        sub.heart.beat()
    sub.settle()
    publish_many("t", [Message(9, key="globex") for _ in range(claimed)])
    sub.step()
    assert DeliveryState.objects.filter(acked=False).count() >= 2
    assert not found()


def handle_two(delivery):
    if delivery.payload < 2:
        raise PermissionError(delivery.payload)


@pytest.mark.parametrize("partitions", [None, 8])
@pytest.mark.parametrize("failing", ["all", "few"])
def test_of_a_key_whose_rows_are_not_read_down_to_a_failing_one_nothing_is_known(
    clock, settings, monkeypatch, partitions, failing
):
    """If many messages of the key fail, some of them are read."""
    if partitions:
        settings.MYSQLQUEUE = {**settings.MYSQLQUEUE, "TOPICS": {"t": {"PARTITIONS": partitions}}}
    sub = Sub(handler("t", "g", lambda delivery: 1 / 0, mode="shared", backoff=AGAIN, max_attempts=None))
    publish_many("t", [Message(n, key="globex") for n in range(40 if failing == "all" else 4)])
    publish_many("t", [Message(n, key="acme") for n in range(40)])
    for _ in range(4):
        sub.settle()
        clock.advance(65)
        sub.heart.beat()
    publish_many("t", [Message(n, key="globex") for n in range(15)])
    sequence()
    sub.step()
    started = {GroupRef("g", "t"): 0}
    known = always_failing.find_keys(Session(USING), started, least=10, recent=0, acked={})[GroupRef("g", "t")]
    assert "globex" in known.names
    monkeypatch.setattr(always_failing, "ROWS", 20 if failing == "all" else 12)
    known = always_failing.find_keys(Session(USING), started, least=10, recent=0, acked={}).get(GroupRef("g", "t"))
    assert ("globex" in getattr(known, "names", ())) == (failing == "all")

"""The page of a group: one figure for one fact, and no sentence twice."""

from __future__ import annotations

import dataclasses

import pytest

from django_mysqlqueue.admin.pages import base
from django_mysqlqueue.inspection import subscribers
from django_mysqlqueue.models import DeliveryEvent, QueueMessage, SubscriberHeartbeat
from django_mysqlqueue.operations import pausing
from tests.support.dashboard import ROOT, page
from tests.support.handlers import both_modes, fail
from tests.support.harness import USING, Sub, handler
from tests.support.internals import Count, GroupRef, Session, Subscriber, get_settings
from tests.support.scenarios import G, log, offsets_of

pytestmark = pytest.mark.still_clock

GROUP = {"group": "g", "topic": "t"}


def context(client):
    return client.get(f"{ROOT}group/", GROUP).context


def test_a_partition_behind_messages_for_other_groups_has_the_backlog_of_the_group(db, client, monkeypatch):
    """Copies for another group once used up the count of the partition."""
    monkeypatch.setattr(base.Page, "bounds", dataclasses.replace(base.Page.bounds, partition_count=5))
    Sub(handler())
    offsets = log(9, "a")
    QueueMessage.objects.filter(offset__in=offsets[:6]).update(target_group="h")
    found = context(client)
    (row,) = found["rows"]
    assert found["group"].lag == row.lag == Count(3)


def test_a_partition_whose_group_is_not_counted_to_its_end_has_a_bound(db, client, monkeypatch):
    monkeypatch.setattr(base.Page, "bounds", dataclasses.replace(base.Page.bounds, partition_count=5, count=7))
    Sub(handler())
    log(9, "a")
    (row,) = context(client)["rows"]
    assert (row.lag.value, row.lag.exact) >= (7, False)
    assert str(row.lag).endswith("+")


def test_of_two_bounds_of_a_partition_the_higher_one_is_shown(db, client, monkeypatch):
    """The group's count may have stopped at the beginning of the partition."""
    few = dataclasses.replace(base.Page.bounds, partition_count=5, count=10, depth=3)
    monkeypatch.setattr(base.Page, "bounds", few)
    Sub(handler())
    log(18, "ab")
    assert {row.key: str(row.lag) for row in context(client)["rows"]} == {"a": "9+", "b": "5+"}


def test_the_only_cause_is_named_once_and_does_not_lead_to_the_page_itself(db, client):
    Sub(handler()).leave()
    log(3)
    pausing.set_paused(USING, G, actor="ada", paused=True)
    text = page(client, "group", **GROUP)
    found = context(client)
    (cause,) = found["causes"]
    assert cause.cause.kind == "paused"
    assert text.count(cause.cause.text) == 1
    assert text.count(str(cause.cause.advice)) == 1
    assert "Open group" not in text
    assert found["banner"].status.name in text
    assert text.index(cause.cause.text) < text.index("mq-cards")
    overview = client.get(ROOT).context["banner"]
    assert overview.status.text
    assert overview.action == "Open group"


def test_with_several_causes_each_is_named_once(db, client, clock):
    sub = Sub(handler(function=fail, max_attempts=1))
    log(3)
    sub.settle()
    log(1)
    pausing.set_paused(USING, GroupRef("g", "t"), actor="ada", paused=True)
    clock.advance(1)
    found = context(client)
    assert len(found["causes"]) > 1
    text = page(client, "group", **GROUP)
    assert [text.count(f"<bdi>{one.cause.text}</bdi>") for one in found["causes"]] == [1] * len(found["causes"])
    assert found["banner"].status.state != "ok"
    assert "Open group" not in text


@pytest.mark.parametrize("number", [0, 3])
def test_without_a_problem_the_banner_says_so(db, client, number):
    Sub(handler())
    log(number)
    found = context(client)
    assert not found["causes"]
    assert "No problems found." in found["banner"].status.text


# -- how busy the handlers are ----------------------------------------------------


def has_threads(sub, number):
    """The heartbeats of a subscriber say how many handler threads it has."""
    assert SubscriberHeartbeat.objects.filter(subscriber_name=sub.name).update(info={"threads": number})


@pytest.mark.any_engine
@both_modes
def test_threads_that_are_busy(client, mode):
    one = Sub(handler(mode=mode), handler("t", "h"), name="one", claim_size=1)
    two = Sub(handler(mode=mode), name="two", claim_size=1)
    SubscriberHeartbeat.objects.update(info={"client": "sql"})
    assert context(client)["handlers"] == "", "their threads are not known"
    has_threads(one, 2)
    assert context(client)["handlers"] == "", "those of one are not known"
    has_threads(two, 3)
    assert context(client)["handlers"] == "0 of 5 threads busy in 2 processes"
    log(12, "abcdefgh")
    two.beat()
    for _ in range(9):
        one.step()
    has_threads(one, 2)
    has_threads(two, 3)
    assert context(client)["group"].in_flight.value > 2
    assert context(client)["handlers"] == "2 of 5 threads busy in 2 processes", "not more than the process has"
    assert "handlers: 2 of 5 threads busy" in page(client, "group", **GROUP)
    two.leave()
    assert context(client)["handlers"] == "2 of 2 threads busy in 1 process"
    one.leave()
    assert context(client)["handlers"] == ""


@pytest.mark.any_engine
def test_the_mean_time_of_the_last_calls(client, clock, settings, monkeypatch):
    monkeypatch.setattr(subscribers, "CALLS", 3)
    has_threads(Sub(handler()), 1)
    now = Session(USING).now()

    def event(ms, topic="t", settled_at=now):
        DeliveryEvent.objects.create(
            consumer_group="g", topic=topic, partition_key="a", message_offset=1, handled_ms=ms, settled_at=settled_at
        )

    settings.MYSQLQUEUE = {**settings.MYSQLQUEUE, "RECORD_DELIVERIES": "all"}
    assert "mean" not in context(client)["handlers"]
    event(9000, settled_at=now - 301_000)
    event(5000)
    event(3000)
    event(1000)
    event(0)  # A message that was passed without a call.
    event(60_000, "u")
    assert context(client)["handlers"] == "0 of 1 threads busy in 1 process, mean time per call 2 s"
    settings.MYSQLQUEUE = {**settings.MYSQLQUEUE, "RECORD_DELIVERIES": "failures"}
    assert "mean" not in context(client)["handlers"], "failures are not typical"


@pytest.mark.any_engine
def test_a_message_waits_for_busy_subscribers(client):
    sub = Sub(handler(), claim_size=1)
    log(1, "a")
    sub.step()
    log(1, "b")
    first, second = offsets_of()
    has_threads(sub, 2)

    def said():
        answer = client.get(f"{ROOT}message/", {"offset": second})
        (one,) = [one for one in answer.context["lives"] if one.ref == G]
        return one.steps[-1].text, one.steps[-1].link

    assert {one.offset for one in sub.inbox.held(G)} == {first}
    assert said()[0] == "Nothing holds it up: a subscriber claims it when it has room."
    has_threads(sub, 1)
    text, link = said()
    assert text == "The subscribers are busy: messages of this group occupy the only handler thread."
    assert client.get(link).context["rows"]


def test_heartbeats_have_the_number_of_threads(db):
    found = Subscriber({USING: {G: handler()}}, get_settings(), threads={USING: 3})
    (worker,) = found.workers
    assert worker.heart.info["threads"] == 3

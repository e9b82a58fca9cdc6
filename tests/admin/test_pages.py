"""Every page of the dashboard shows what is there, as text."""

from __future__ import annotations

import re
from html import unescape
from pathlib import Path

import pytest
from django.apps import apps
from django.contrib.auth.models import User
from django.urls import resolve

from django_mysqlqueue import publish, publish_many
from django_mysqlqueue.admin.operations import OPERATIONS
from django_mysqlqueue.admin.pages import PAGES
from django_mysqlqueue.models import (
    ConsumerGroup,
    DeliveryState,
    PartitionLease,
    QueueMessage,
    Reader,
    SubscriberHeartbeat,
)
from tests.support.dashboard import HOSTILE, ROOT, WAITS, confirm, page, query_of
from tests.support.handlers import fail
from tests.support.harness import USING, Sub, handler, sequence
from tests.support.internals import GroupRef, heartbeats
from tests.support.scenarios import dead_letters, log

PLACES = [one.name for one in PAGES]
TEMPLATES = Path(apps.get_app_config("django_mysqlqueue").path, "templates")


@pytest.mark.parametrize("name", PLACES)
def test_every_page_opens_on_an_empty_queue(client, name):
    if name == "group":
        ConsumerGroup.objects.create(consumer_group="g", topic="t", mode="ordered")
    page(client, "" if name == "changelist" else name, **query_of(name))


def test_there_are_no_other_pages(client):
    assert client.get(f"{ROOT}nosuch/").status_code == 404
    assert client.get(f"{ROOT}changelist/").status_code == 404, "the overview has one address"


@pytest.mark.parametrize(("tag", "names"), [("url", PLACES), ("do", OPERATIONS), ("action", OPERATIONS)])
def test_links_of_templates_lead_to_pages_and_operations(tag, names):
    text = "".join(one.read_text() for one in TEMPLATES.rglob("*.html"))
    found = set(re.findall(rf'{{% queue_{tag} "([\w-]+)"', text))
    assert found
    assert found <= set(names)


def test_the_admin_index_leads_there(client):
    text = client.get("/admin/").content.decode()
    assert f'href="{ROOT}"' in text


def test_a_topic_without_a_group_leads_to_its_messages(client):
    publish("orders.plced", {"order": 7})
    sequence()
    text = page(client)
    assert "Topic 'orders.plced' has 1 message but no consumer group." in text
    (link,) = set(re.findall(r'href="([^"]*topic=orders\.plced[^"]*)"', text))
    assert client.get(link).context["rows"]


@pytest.mark.parametrize("name", PLACES)
def test_on_an_admin_site_of_another_name_and_place(client, name):
    if name == "group":
        ConsumerGroup.objects.create(consumer_group="g", topic="t", mode="ordered")
    root = "/deep/er/ops/django_mysqlqueue/dashboard/"
    answer = client.get(root + ("" if name == "changelist" else f"{name}/"), query_of(name))
    assert answer.status_code == 200
    links = re.findall(r'href="(/[^"]*)"', answer.content.decode())
    assert not [link for link in links if link.startswith("/admin/")]


@pytest.mark.parametrize("name", PLACES)
def test_pages_hold_no_script_and_no_style_of_their_own(client, name):
    dead_letters(2)
    Sub(handler("t", "g")).step()
    text = client.get(ROOT + ("" if name == "changelist" else f"{name}/"), query_of(name)).content.decode()
    own = text[text.index('<div class="mq-page') :]
    assert not re.findall(r"<script(?![^>]*\bsrc=)[^>]*>|<style|\sstyle=|\son\w+=|javascript:", own)


def breadcrumbs(text: str) -> list[str]:
    """Return the markup of a page's breadcrumbs without texts, addresses and the isolation of their directions."""
    (own,) = re.findall(r'<nav aria-label="Breadcrumbs">(.*?)</nav>', text, re.DOTALL)
    return [re.sub(r' href="[^"]*"', "", one) for one in re.findall(r"<(?!/?bdi>)[^>]*>|&rsaquo;", own)]


@pytest.mark.parametrize(("name", "of_admin"), [("", ""), ("messages/", "{user}/change/"), ("do/publish/", "add/")])
def test_breadcrumbs_are_those_of_the_admins_own_pages(client, name, of_admin):
    own = client.get(f"/admin/auth/user/{of_admin.format(user=User.objects.get().pk)}").content.decode()
    text = client.get(f"{ROOT}{name}").content.decode()
    assert breadcrumbs(text) == breadcrumbs(own)
    assert "<a>" in breadcrumbs(text)
    index = re.findall(r'class="breadcrumbs">.*?href="(/admin/django_mysqlqueue/)"', text, re.DOTALL)
    assert client.get(index[0]).status_code == 200


def test_the_overview_tells_what_is_there(client):
    sub = Sub(handler("t", "g", fail, max_attempts=3, backoff=WAITS), handler("t", "h"))
    log(3)
    publish("t", 1, delay=60)
    sub.step()
    sub.work(2)
    sub.flush()
    sub.poller.write_rollups()
    answer = client.get(ROOT)
    cards = {card.name: card.value for card in answer.context["cards"]}
    assert (cards["scheduled"], cards["live subscribers"]) == ("1", "1")
    assert int(cards["backlog"]) == sum(row.group.lag.value for row in answer.context["rows"]) > 0
    assert [row.group.ref.group for row in answer.context["rows"]] == ["g", "h"]
    assert "<svg" in answer.content.decode()


def test_the_overview_and_the_subscribers_tell_how_fast_the_database_answers(client):
    sub = Sub(handler())
    name = "slowest round trip (p50, p95)"

    def card():
        return next(one for one in client.get(ROOT).context["cards"] if one.name == name)

    assert (card().value, card().alarming) == ("-", False)
    heartbeats.beat(USING, sub.name, [GroupRef("g", "t")], {}, {"p50_us": 2000, "p95_us": 40_000})
    assert (card().value, card().alarming) == ("2 ms, 40 ms", False)
    assert "2 ms, 40 ms" in page(client, "inflight")
    heartbeats.beat(USING, sub.name, [GroupRef("g", "t")], {}, {"p50_us": 300_000, "p95_us": 1_200_000})
    assert (card().value, card().alarming) == ("300 ms, 1.2 s", True)
    answer = client.get(ROOT)
    assert answer.context["banner"].link == f"{ROOT}inflight/"
    text = unescape(answer.content.decode())
    assert "The database is slow: half of the polls of 1 of 1 live subscriber take longer than 250 ms" in text


@pytest.mark.parametrize("span", ["hour", "day", "nonsense"])
def test_charts_of_an_hour_and_of_a_day(client, span):
    sub = Sub(handler())
    log(7)
    sub.settle()
    sub.poller.write_rollups()
    answer = client.get(ROOT, {"span": span})
    assert answer.context["totals"] == ["7", "0", "0"]
    assert ": 7</title>" in answer.content.decode()
    assert answer.context["p50"] != "-"


def test_a_group_shows_its_partitions(client):
    sub = Sub(handler("t", "g", fail, max_attempts=3, backoff=WAITS))
    log(6, keys="abc")
    sub.step()
    sub.work(1)
    sub.flush()
    answer = client.get(ROOT + "group/", {"group": "g", "topic": "t"})
    rows = {row.key: row for row in answer.context["rows"]}
    assert set(rows) == set("abc")
    assert rows["a"].owner == sub.name
    assert sub.name in answer.context["live"]
    assert (rows["a"].lag.value, rows["a"].head.attempts) == (2, 1)
    assert "ValueError" in rows["a"].head.last_line
    assert rows["a"].head.next_at > answer.context["page"].now
    cell = r"1 <small><bdi>next in [^<]+ (min|h)</bdi></small> <bdi [^>]*>ValueError"
    assert re.search(cell, answer.content.decode())
    (link,) = re.findall(r'href="([^"]*/offsets/[^"]*)">Offsets in all partitions', answer.content.decode())
    assert [row.key for row in client.get(unescape(link)).context["rows"]] == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("name", "query", "status", "says"),
    [
        ("group", {}, 400, "group and topic are required"),
        ("group", {"group": "x", "topic": "y"}, 404, "There is no group x/y."),
        ("message", {"offset": 7}, 404, "There is no message at offset 7"),
    ],
)
def test_a_query_that_names_nothing_is_told_so(client, name, query, status, says):
    assert says in page(client, name, status, **query)


def test_a_bad_setting_is_named_and_nothing_is_shown_that_it_was_to_hide(client, settings):
    publish("t", "a secret")
    sequence()
    offset = QueueMessage.objects.values_list("offset", flat=True).last()
    assert "a secret" in page(client, "message", offset=offset)
    settings.MYSQLQUEUE = {"REDACT": 5}
    text = page(client, "message", 500, offset=offset)
    assert "MYSQLQUEUE['REDACT'] = 5 must be a function" in text
    assert "a secret" not in text
    assert page(client)
    settings.MYSQLQUEUE = {"HEALTH": {"WINDOW": 1}}
    assert "has WINDOW = 1, which must be at least 60" in page(client, "", 500)


def test_in_flight_and_who_holds_it(client):
    sub = Sub(handler("t", "g"), handler("t", "s", mode="shared"))
    log(2)
    sub.step()
    found = client.get(ROOT + "inflight/").context
    assert {(row.ref.group, row.subscriber) for row in found["rows"]} == {("g", sub.name), ("s", sub.name)}
    assert found["live"] == {sub.name}
    only = client.get(ROOT + "inflight/", {"group": "s", "topic": "t"}).context["rows"]
    assert {row.ref.group for row in only} == {"s"}
    assert all(row.visible_until for row in only)
    assert not client.get(ROOT + "inflight/", {"subscriber": "nobody"}).context["rows"]


def test_subscribers_and_their_shares(client):
    one = Sub(handler("t", "g"))
    log(4, keys="abcd")
    one.step()
    dead = Sub(handler("t", "g"), name="dead")
    SubscriberHeartbeat.objects.filter(subscriber_name=dead.name).update(heartbeat_at=1)
    PartitionLease.objects.filter(partition_key="d").update(leased_by="left")
    answer = client.get(ROOT + "inflight/")
    workers = {worker.status.name: worker for worker in answer.context["workers"]}
    assert (workers[one.name].status.live, workers[dead.name].status.live) == (True, False)
    assert [(number, share) for _, number, share, _ in workers[one.name].groups] == [(3, "75%")]
    assert [(owner, number) for owner, _, number in answer.context["orphans"]] == [("left", 1)]
    held = DeliveryState.objects.filter(delivered_by=one.name, delivery_token__gt=0).count()
    assert (workers[one.name].held, workers[dead.name].held) == (held, 0)
    assert held > 0
    only = client.get(ROOT + "inflight/", {"subscriber": dead.name}).context
    assert [worker.status.name for worker in only["workers"]] == [dead.name]


def test_a_subscriber_that_cannot_work_for_a_group(client):
    one = Sub(handler("t", "g"))
    heartbeats.report(USING, one.name, GroupRef("g", "t"), "KeyError: 'k'")
    text = unescape(client.get(ROOT + "inflight/").content.decode())
    assert re.search(r"cannot work</span> <code><bdi>KeyError: 'k'", text)
    SubscriberHeartbeat.objects.update(info={**SubscriberHeartbeat.objects.get().info, "error_at": 1234})
    heartbeats.report(USING, one.name, GroupRef("g", "t"), "ValueError: 'v'")
    (problem,) = [one for one in client.get(ROOT).context["causes"] if one.cause.kind == "broken"]
    assert problem.cause.since == 1234, "since the first error"
    heartbeats.report(USING, one.name, GroupRef("g", "t"), "")
    assert "cannot work" not in client.get(ROOT + "inflight/").content.decode()


def test_a_subscriber_that_has_refused_to_start(client):
    info = {
        "host": "web-1",
        "version": "0.9",
        "refused": "The <group> 'g' on 't' has another mode",
        "groups": [["g", "t"]],
    }
    heartbeats.refuse(USING, "web-1:0:1", info)
    assert "A subscriber of release 0.9 refused to start, on host web-1 " in page(client)
    assert "The <group> 'g' on 't' has another mode" in page(client, "inflight")
    assert "<group>" not in client.get(ROOT + "inflight/").content.decode()
    (told,) = confirm(client, "forget", subscriber="web-1:0:1")
    assert told.startswith("The subscriber web-1:0:1 is forgotten")
    assert "refused to start" not in page(client, "inflight")


@pytest.mark.parametrize("name", PLACES)
def test_what_is_stored_is_shown_as_text(client, name):
    sub = Sub(
        handler("t", "g", lambda delivery: (_ for _ in ()).throw(ValueError(HOSTILE)), backoff=WAITS), name=HOSTILE
    )
    publish("t", {"x": HOSTILE}, key=HOSTILE, id=HOSTILE, metadata={"m": HOSTILE})
    sequence()
    sub.step()
    sub.work()
    sub.flush()
    sub.step()
    text = client.get(ROOT + ("" if name == "changelist" else f"{name}/"), query_of(name)).content.decode()
    assert "<script>alert" not in text
    assert "\"'&" not in text
    if name in ("group", "inflight", "offsets"):
        assert "&lt;script&gt;" in text


@pytest.mark.parametrize("address", ["", "jobs/", "do/pause/"])
def test_no_page_is_in_the_transaction_of_atomic_requests(client, address):
    """It would begin before the time limits, and keep locks until the response is sent."""
    assert {"default", "other"} <= resolve(f"{ROOT}{address}").func._non_atomic_requests


def test_registered_readers_are_listed_and_dropped(client):
    publish_many("t", range(3))
    sequence()
    read = QueueMessage.objects.latest("offset").offset - 2
    assert "Registered readers" not in page(client, "offsets")
    Reader.objects.create(name="lake", read_offset=read)
    shown = page(client, "offsets")
    assert f'<td data-label="read offset" class="mq-n">{read}</td>' in shown
    assert '<td data-label="unread offsets" class="mq-n">2</td>' in shown
    assert confirm(client, "drop-reader", reader="lake") == ["The reader lake is dropped."]
    assert not Reader.objects.exists()

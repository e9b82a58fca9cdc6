"""Features are visible where an operator looks for them: in a row, on the page of a group, a message or a job."""

from __future__ import annotations

import datetime
import re

import pytest

from django_mysqlqueue import Message, operations, publish, publish_many
from django_mysqlqueue.admin.formatting import moment
from tests.support.dashboard import ROOT, page
from tests.support.harness import USING, Sub, handler, sequence
from tests.support.internals import rollups, run_id, schedule_of
from tests.support.job_pages import ended
from tests.support.scenarios import log, offsets_of

PAST = datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)
GROUP = {"group": "g", "topic": "t"}


def test_the_row_of_a_group_counts_its_overrides(client):
    Sub(handler(), handler("t", "h"))
    assert "override" not in page(client)
    operations.settings("g", "t", {"prefetch": 5}, actor="ada")
    assert len(re.findall(r'href="[^"]*group=g&topic=t#mq-options">1 override</a>', page(client))) == 1
    operations.settings("g", "t", {"claim_size": 7}, actor="ada")
    assert len(re.findall("2 overrides</a>", page(client))) == 1


def test_the_options_of_a_group_lead_to_who_has_changed_them_and_why(client, make_client):
    Sub(handler())
    operations.settings("g", "t", {"prefetch": 5}, actor="ada", reason="black friday")
    text = page(client, "group", **GROUP)
    assert re.search(
        r"overridden</span> <bdi class=\"mq-time\" tabindex=\"0\">[^<]* ago<span[^>]*>[^<]*</span></bdi> by ada", text
    )
    assert "an override applies until it is removed" in text
    (link,) = set(re.findall(r'href="([^"]*operations/[^"]*)">Operations on this group', text))
    assert "black friday" in client.get(link).content.decode()
    seen = page(make_client("view_dashboard"), "group", **GROUP)
    assert "an override applies" in seen
    assert "Operations on this group" not in seen


def test_the_page_of_a_group_counts_what_is_settled_without_a_call(client):
    sub = Sub(handler())
    publish_many("t", [Message(n, key="k", expires_at=PAST) for n in range(3)])
    publish_many("t", [Message(n, key="k", coalesce="c") for n in range(3)])
    sub.settle()
    assert "without a call" not in page(client, "group", **GROUP)
    (group,) = sub.poller.groups
    rollups.add(USING, {group.ref: group.counts.read()})
    text = page(client, "group", **GROUP)
    assert "settled without a call in the last 30 minutes: 3 expired, 2 superseded" in text


def test_the_page_of_a_group_says_whether_its_limits_are_reached(client):
    sub = Sub(handler(max_in_flight=1))
    log(2)
    reached = r"limits: 1 in flight <span class=\"mq-tag\">reached</span>"
    assert not re.search(reached, page(client, "group", **GROUP))
    sub.step()
    assert re.search(reached, page(client, "group", **GROUP))


@pytest.mark.parametrize("priority", [0, 10])
def test_the_page_of_a_message_has_its_priority(client, priority):
    publish("t", 1, key="k", priority=priority)
    sequence()
    (offset,) = offsets_of()
    assert f"<dt>priority</dt><dd>{priority}</dd>" in page(client, "message", offset=offset)


def test_a_scheduled_message_says_when_it_expires(client, make_client):
    later = datetime.datetime(2096, 1, 1, tzinfo=datetime.UTC)
    publish("t", 1, delay=60, expires_at=later)
    publish("t", 2, delay=90)
    (shown,) = re.findall(r"expires</span> <bdi[^>]*>in [^<]*<span[^>]*> ([^<]*)<", page(client, "scheduled"))
    assert shown == moment(int(later.timestamp() * 1000))
    assert "expires</span>" not in page(make_client("view_dashboard"), "scheduled")


def test_messages_with_a_coalesce_key_lead_to_each_other(client, make_client):
    publish_many("t", [Message(n, key="k", coalesce="price-1") for n in range(2)])
    publish("t", "price-2", key="k")
    sequence()
    old, new, _ = offsets_of()
    text = page(client, "message", offset=old)
    assert re.search(rf'supersedes it [^<]*</bdi> <a href="[^"]*message/\?offset={new}">Open message', text)
    (link,) = re.findall(r'href="([^"]*)">Search messages with it', page(client, "message", offset=new))
    rows = client.get(link).context["rows"]
    assert [row.entry.offset for row in rows] == [new, old]
    assert "Search messages with it" not in page(make_client("view_dashboard"), "message", offset=new)


def test_runs_of_schedules_lead_to_them(client):
    name = run_id("nightly.report-1", 5)
    assert schedule_of(name) == "nightly.report-1"
    assert schedule_of(run_id("a", 5, "-0f")) == "a"
    assert [schedule_of(one) for one in ("recurring:", "recurring:a:x", "order-7", "")] == [""] * 4
    publish("t", 1, id=name)
    publish("t", 1, id="order-7")
    sequence()
    run, other = offsets_of()
    ended(name)
    ended("order-7")
    said = "This is a run of the recurring schedule nightly.report-1."
    for text in (page(client, "message", offset=run), page(client, "job", id=name)):
        assert said in text
        assert f'href="{ROOT}recurring/">Open recurring schedules' in text
    for text in (page(client, "message", offset=other), page(client, "job", id="order-7")):
        assert "recurring schedule" not in text

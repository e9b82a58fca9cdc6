"""The page of a group: one figure for one fact, and no sentence twice."""

from __future__ import annotations

import dataclasses

import pytest

from django_mysqlqueue.admin.pages import base
from django_mysqlqueue.models import QueueMessage
from django_mysqlqueue.operations import pausing
from django_mysqlqueue.service.counts import Count
from django_mysqlqueue.service.refs import GroupRef
from tests.support.dashboard import ROOT, page
from tests.support.handlers import fail
from tests.support.harness import USING, Sub, handler
from tests.support.scenarios import G, log

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
    assert not row.partition.lag.exact


def test_a_partition_whose_group_is_not_counted_to_its_end_has_a_bound(db, client, monkeypatch):
    monkeypatch.setattr(base.Page, "bounds", dataclasses.replace(base.Page.bounds, partition_count=5, count=7))
    Sub(handler())
    log(9, "a")
    (row,) = context(client)["rows"]
    assert (row.lag.value, row.lag.exact) >= (7, False)
    assert str(row.lag).endswith("+")


def test_the_only_cause_is_named_once_and_does_not_lead_to_the_page_itself(db, client):
    Sub(handler()).leave()
    log(3)
    pausing.pause(USING, G, actor="ada")
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


def test_with_several_causes_the_banner_names_the_worst(db, client, clock):
    sub = Sub(handler(function=fail, max_attempts=1))
    log(3)
    sub.settle()
    log(1)
    pausing.pause(USING, GroupRef("g", "t"), actor="ada")
    clock.advance(1)
    found = context(client)
    assert len(found["causes"]) > 1
    assert found["banner"].status.text == found["causes"][0].cause.text
    assert "Open group" not in page(client, "group", **GROUP)


@pytest.mark.parametrize("number", [0, 3])
def test_without_a_problem_the_banner_says_so(db, client, number):
    Sub(handler())
    log(number)
    found = context(client)
    assert not found["causes"]
    assert "No problems found." in found["banner"].status.text

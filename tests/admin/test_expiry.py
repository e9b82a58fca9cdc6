"""What the dashboard says about messages that expire."""

from __future__ import annotations

import datetime

import pytest

from django_mysqlqueue import Message, publish, publish_many
from tests.support.dashboard import ROOT, page
from tests.support.harness import USING, Sub, handler, sequence
from tests.support.internals import rollups
from tests.support.scenarios import offsets_of

pytestmark = pytest.mark.any_engine

PAST = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)


def shown(client, offset):
    answer = client.get(f"{ROOT}message/", {"offset": offset})
    assert answer.status_code == 200, answer.content.decode()
    (one,) = answer.context["lives"]
    return [step.text for step in answer.context["first_steps"]], one.tag, [step.text for step in one.steps]


def test_a_message_that_will_expire(client):
    Sub(handler())
    publish("t", 1, key="k", expires_in=3600)
    sequence()
    first, tag, _ = shown(client, *offsets_of())
    assert first[-1] == "Will expire: its handling does not start after this time."
    assert tag == "not claimed yet"


def test_a_message_that_has_expired(client, settings):
    settings.MYSQLQUEUE = {"RECORD_DELIVERIES": "all"}
    sub = Sub(handler())
    sub.poller.groups[0].passes = False
    publish("t", 1, key="k", expires_at=PAST)
    sub.settle()
    first, tag, steps = shown(client, *offsets_of())
    assert first[-1] == "Expired: its handling does not start after this time."
    assert tag == "expired"
    assert steps[0].startswith("Claimed by s:")
    assert steps[1].startswith("It had expired: s:")
    assert steps[1].endswith(" settled it without calling the handler.")


def test_what_is_not_recorded_is_not_claimed_to_be_known(client, settings):
    settings.MYSQLQUEUE = {"RECORD_DELIVERIES": "failures"}
    sub = Sub(handler())
    publish("t", 1, key="k", expires_at=PAST)
    sub.settle()
    _, tag, steps = shown(client, *offsets_of())
    assert tag == "settled"
    assert steps == ["The message is settled: acked or dead-lettered, or it expired before it was handled."]


def test_a_message_that_was_passed_in_a_claim(client, settings):
    settings.MYSQLQUEUE = {"RECORD_DELIVERIES": "all"}
    sub = Sub(handler())
    publish("t", 1, key="k", expires_at=PAST)
    sub.settle()
    _, tag, steps = shown(client, *offsets_of())
    assert tag == "expired"
    assert len(steps) == 1
    assert steps[0].startswith("It had expired: s:")


def test_the_overview_counts_them(client):
    sub = Sub(handler())
    publish_many("t", [Message(n, key="k", expires_at=PAST) for n in range(1234)])
    sub.settle()
    text = page(client, "")
    assert "1,234 expired" not in text
    (group,) = sub.poller.groups
    rollups.add(USING, {group.ref: group.counts.read()})
    assert page(client, "").count("1,234 expired") == 2

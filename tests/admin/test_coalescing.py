"""What the dashboard says about messages with a coalesce key."""

from __future__ import annotations

import pytest

from django_mysqlqueue import Message, publish_many
from tests.admin.test_expiry import shown
from tests.support.dashboard import page
from tests.support.harness import USING, Sub, handler, sequence
from tests.support.internals import rollups
from tests.support.scenarios import offsets_of

pytestmark = pytest.mark.any_engine


def test_messages_that_have_not_been_claimed(client):
    Sub(handler())
    publish_many("t", [Message(n, key="k", coalesce="<c>") for n in range(2)])
    sequence()
    earlier, later = offsets_of()
    first, tag, _ = shown(client, earlier)
    assert first[-1] == (
        f"Coalesce key <c>: the message at offset {later} supersedes it for groups that have not started it."
    )
    assert tag == "not claimed yet"
    assert shown(client, later)[0][-1] == "Coalesce key <c>: it is the latest message with this key."


@pytest.mark.parametrize("passes", [True, False])
def test_a_message_that_was_superseded(client, settings, passes):
    settings.MYSQLQUEUE = {"RECORD_DELIVERIES": "all"}
    sub = Sub(handler())
    sub.poller.groups[0].passes = passes
    publish_many("t", [Message(n, key="k", coalesce="c") for n in range(2)])
    sub.settle()
    _, tag, steps = shown(client, offsets_of()[0])
    assert tag == "superseded"
    assert len(steps) == 2 - passes
    assert steps[-1].startswith("A later message with the same coalesce key superseded it; s:")


def test_what_is_not_recorded_is_not_claimed_to_be_known(client, settings):
    settings.MYSQLQUEUE = {"RECORD_DELIVERIES": "failures"}
    sub = Sub(handler())
    publish_many("t", [Message(n, key="k", coalesce="c") for n in range(2)])
    sub.settle()
    _, tag, steps = shown(client, offsets_of()[0])
    assert tag == "settled"
    assert steps == ["The message is settled: acked, dead-lettered, or superseded before it was handled."]


def test_the_overview_counts_them(client):
    sub = Sub(handler())
    publish_many("t", [Message(n, key="k", coalesce="c") for n in range(1235)])
    sub.settle()
    (group,) = sub.poller.groups
    rollups.add(USING, {group.ref: group.counts.read()})
    assert page(client, "").count("1,234 superseded") == 2


def test_scheduled_messages_that_are_debounced(client):
    publish_many("t", [Message(1, coalesce="<c>", delay=60), Message(2, delay=60)])
    assert page(client, "scheduled").count(">debounced</span> <code><bdi><c></bdi></code>") == 1

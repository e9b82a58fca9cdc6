"""The health of topics and groups whose messages pass another database on their way."""

from __future__ import annotations

import json

import pytest
from health_check.exceptions import ServiceUnavailable

from django_mysqlqueue import publish, subscriber
from django_mysqlqueue.health import QueueHealth
from django_mysqlqueue.models import OutboxMessage
from tests.databases.test_every_database import run, sections
from tests.support.internals import GroupRef, groups, relay, sequence

VIA, HOME = "default", "queue"


@pytest.fixture(autouse=True)
def _topics(queue_db, settings, no_handlers):
    settings.MYSQLQUEUE = {
        "TOPICS": {"orders": {"DATABASE": HOME, "VIA": VIA}, "mails": {}, "events": {"DATABASE": HOME}}
    }
    for alias, group, topic in ((HOME, "ships", "orders"), (VIA, "sends", "mails"), (HOME, "counts", "events")):
        groups.register(alias, GroupRef(group, topic), mode="ordered", start="earliest")
        subscriber(topic, group=group)(lambda delivery: None)


def problems(*arguments):
    """The problems that queuehealth prints, by database."""
    out, status = run("queuehealth", *arguments)
    shown = sections(out) if out.startswith("Database") else {"": out}
    found = {alias: [line for line in text.splitlines() if line.startswith("PROBLEM")] for alias, text in shown.items()}
    assert status == (1 if any(found.values()) else None)
    return {alias: " ".join(lines) for alias, lines in found.items()}


SELECTIONS = [("--topic", "orders"), ("--group", "ships"), ("--topic", "orders", "--group", "ships")]


@pytest.mark.parametrize("selection", SELECTIONS)
def test_a_sequencer_on_the_way_that_is_dead(db, clock, selection):
    publish("orders", 1)
    clock.advance(60)
    assert "The outbox is stalled: 1 message" in problems(*selection)[VIA]
    assert problems(*selection)[HOME] == ""
    assert problems("--group", "counts") == {VIA: "", HOME: ""}
    assert problems("--topic", "events") == {"": ""}


@pytest.mark.parametrize("selection", SELECTIONS)
def test_a_relay_that_is_stalled(db, clock, selection):
    publish("orders", 1)
    sequence(VIA)
    clock.advance(60)
    assert "1 message is waiting to be relayed to the database 'queue'" in problems(*selection)[VIA]
    assert problems("--topic", "mails") == {"": ""}
    assert problems("--group", "counts", "--group", "sends") == {VIA: "", HOME: ""}
    relay(VIA, HOME)
    assert problems(*selection)[VIA] == ""


def test_a_limit_of_age_counts_on_the_way(db, clock):
    publish("orders", 1)
    clock.advance(5)
    assert "The oldest message in the outbox has waited for" in problems("--topic", "orders", "--max-age", "4")[VIA]
    assert problems("--group", "counts", "--max-age", "4") == {VIA: "", HOME: ""}


@pytest.mark.parametrize("options", [{"topics": ["orders"]}, {"groups": ["ships"]}])
def test_the_check_of_a_health_page(db, clock, options):
    publish("orders", 1)
    sequence(VIA)
    QueueHealth(**options).run()
    clock.advance(60)
    with pytest.raises(ServiceUnavailable, match="Database 'default': 1 message is waiting to be relayed to the data"):
        QueueHealth(**options).run()
    QueueHealth(topics=["mails"]).run()
    QueueHealth(groups=["counts"]).run()


def test_groups_that_are_left_in_the_database_that_a_topic_leaves(db):
    groups.register(VIA, GroupRef("ships", "orders"), mode="ordered", start="earliest")
    publish("orders", 1)
    OutboxMessage.objects.update(topic="orders")
    sequence(VIA)
    assert "The backlog of ships/orders is 1" in problems("--topic", "orders", "--max-lag", "0")[VIA]


def test_both_databases_are_sections(db):
    found = json.loads(run("queuehealth", "--topic", "orders", "--format", "json")[0])
    assert [(one["database"], len(one["groups"])) for one in found["databases"]] == [(HOME, 1), (VIA, 0)]
    assert "None of the selected groups is registered here." in run("queuehealth", "--topic", "orders")[0]

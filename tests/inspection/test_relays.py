"""Messages that wait to be relayed: counts, and the problem that they are."""

from __future__ import annotations

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from django_mysqlqueue import publish, publish_many
from django_mysqlqueue.inspection import Bounds, StallTimes, find_problems, get_overview
from django_mysqlqueue.models import OutboxMessage
from tests.support.internals import relay, sequence

TOPICS = {"TOPICS": {"orders": {"DATABASE": "queue"}}}
AT_ONCE = StallTimes(outbox=0.0)


@pytest.fixture(autouse=True)
def _topics(queue_db, settings):
    settings.MYSQLQUEUE = TOPICS


def of_kind(kind="relay", **options):
    return [problem.text for problem in find_problems(stall_times=AT_ONCE, **options) if problem.kind == kind]


@pytest.mark.still_clock
def test_what_has_not_arrived_is_a_problem(db, clock):
    publish_many("orders", range(3), via="default")
    publish("other", 1)
    sequence("default")
    (found,) = get_overview().relays
    assert (found.target, found.messages.value, found.messages.exact) == ("queue", 3, True)
    assert not [one for one in find_problems(stall_times=StallTimes(outbox=3600.0)) if one.kind == "relay"]
    clock.advance(90)
    (text,) = of_kind()
    assert "3 messages are waiting to be relayed to the database 'queue', the oldest for 1 min 30 s. It does" in text
    assert len(of_kind("groupless")) == 1  # "other"
    relay("default", "queue")
    (found,) = get_overview().relays
    assert (found.messages.value, found.oldest_at) == (0, None)
    assert not of_kind()


def test_a_long_log_is_counted_up_to_a_limit(db):
    publish_many("orders", range(30), via="default")
    sequence("default")
    (found,) = get_overview(bounds=Bounds(walked=10)).relays
    assert (found.messages.value, found.messages.exact) == (10, False)


def test_a_database_that_the_settings_do_not_name(db, settings):
    publish("t", 1)
    OutboxMessage.objects.update(topic="t@shop")
    sequence("default")
    (text,) = of_kind()
    assert "relayed to the database 'shop'" in text
    assert text.endswith("MYSQLQUEUE names no such database here: subscribers with other settings must relay them.")


def test_it_costs_nothing_without_relays(db):
    publish("t", 1)
    sequence("default")
    with CaptureQueriesContext(connection) as sent:
        assert get_overview().relays == ()
    assert not [query for query in sent.captured_queries if "relay" in query["sql"]]

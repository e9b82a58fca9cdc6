"""The databases of topics in the setting ``TOPICS``, and its patterns."""

from __future__ import annotations

import pytest

from django_mysqlqueue.exceptions import InvalidMessage
from tests.support.internals import (
    get_settings,
    problems,
    queue_alias,
    queue_aliases,
    relay_target,
    relayed_from,
    relayed_topic,
)

pytestmark = pytest.mark.any_engine

QUEUE = "queue"
TOPICS = {"orders": {"DATABASE": QUEUE}, "events.*": {"DATABASE": QUEUE, "RETENTION": 5}, "events.late": {}}


@pytest.mark.parametrize(
    ("topic", "alias"),
    [
        ("orders", QUEUE),
        ("orders_dlq", QUEUE),
        ("events.a", QUEUE),
        ("events.a_dlq", QUEUE),
        ("events.late", QUEUE),  # an entry without DATABASE leaves that to the patterns
        ("events", "default"),
        ("other", "default"),
    ],
)
def test_the_database_of_a_topic(mysqlqueue, topic, alias):
    assert mysqlqueue({"TOPICS": TOPICS}) == []
    assert queue_alias(topic=topic) == alias


def test_the_first_pattern_counts(mysqlqueue):
    assert mysqlqueue({"TOPICS": {"a.*": {"RETENTION": 1}, "a.?": {"RETENTION": 2, "PARTITIONS": 3}}}) == []
    settings = get_settings()
    assert (settings.retention_of("a.b", has_groups=True), settings.partitions_of("a.b")) == (1, 3)
    assert (settings.retention_of("a.bc", has_groups=True), settings.partitions_of("a.bc")) == (1, None)


def test_an_entry_with_the_name_counts_before_patterns(mysqlqueue):
    assert mysqlqueue({"TOPICS": {"*": {"RETENTION": 1, "GROUPLESS": True}, "a": {"RETENTION": None}}}) == []
    settings = get_settings()
    assert settings.retention_of("a", has_groups=True) is None
    assert settings.may_lack_groups("a")
    assert settings.retention_of("b", has_groups=True) == 1


def test_patterns_do_not_shorten_the_retention_of_dead_letters(mysqlqueue):
    assert mysqlqueue({"TOPICS": {"events.*": {"RETENTION": 1}}}) == []
    assert get_settings().retention_of("events.a_dlq", has_groups=False) is None


def test_the_databases_of_the_queue(mysqlqueue):
    assert mysqlqueue({"TOPICS": {**TOPICS, "x": {"VIA": "other"}, "y": {"DATABASE": "default"}}}) == []
    assert queue_aliases() == ["default", QUEUE, "other"]
    assert mysqlqueue({"DATABASE": QUEUE}) == []
    assert queue_aliases() == [QUEUE]


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ({"a": {"DATABASE": "nowhere"}}, "['a']['DATABASE'] = 'nowhere' must be an alias of DATABASES"),
        ({"a": {"VIA": None}}, "['a']['VIA'] = None must be an alias of DATABASES"),
        ({"a_dlq": {"DATABASE": QUEUE}}, "['a_dlq']['DATABASE'] is set for a DLQ topic. Dead letters are in"),
        ({"a": {"MOVES_FROM": "nowhere"}}, "['a']['MOVES_FROM'] = 'nowhere' must be an alias of DATABASES"),
        ({"a_dlq": {"VIA": QUEUE}}, "['a_dlq']['VIA'] is set for a DLQ topic"),
        ({"a b*": {}}, "has 'a b*': a name must be"),
    ],
)
def test_invalid_entries(settings, entry, said):
    settings.MYSQLQUEUE = {"TOPICS": entry}
    assert said in str(problems()[0])


def test_the_topic_of_messages_to_be_relayed():
    name = relayed_topic("orders", "shop")
    assert (name, relay_target(name), relayed_from(name)) == ("orders@shop", "shop", "orders")
    assert (relay_target("orders"), relayed_from("orders")) == (None, "orders")
    assert len(relayed_topic("t" * 100, "x" * 19)) == 120
    with pytest.raises(InvalidMessage, match="to be relayed, both names may have at most 119 characters together"):
        relayed_topic("t" * 100, "x" * 20)

"""TOPICS and GROUPS of the MYSQLQUEUE setting."""

from __future__ import annotations

import pytest

from django_mysqlqueue.options.backoff import Backoff
from tests.support.internals import TopicSettings, get_settings

pytestmark = pytest.mark.any_engine


# -- TOPICS -------------------------------------------------------------------


def test_topics(mysqlqueue):
    assert mysqlqueue({"RETENTION": 10, "TOPICS": {"a": {"RETENTION": None}, "b": {"PARTITIONS": 3}, "c": {}}}) == []
    settings = get_settings()
    assert settings.topics.of("a") == TopicSettings(retention=None, has_retention=True)
    assert settings.retention_of("a", has_groups=True) is None
    assert settings.retention_of("b", has_groups=True) == 10
    assert settings.retention_of("unlisted", has_groups=True) == 10
    assert settings.partitions_of("b") == 3
    assert settings.partitions_of("a") is None
    assert settings.partitions_of("unlisted") is None


@pytest.mark.parametrize(
    ("topic", "has_groups", "retention"),
    [
        ("t_dlq", False, None),  # a dead letter that nobody reads stays
        ("t_dlq", True, 10.0),
        ("kept_dlq", False, 7.0),
        ("kept_dlq", True, 7.0),
        ("t", True, 10.0),
    ],
)
def test_retention_of_dead_letters(mysqlqueue, topic, has_groups, retention):
    assert mysqlqueue({"RETENTION": 10, "TOPICS": {"kept_dlq": {"RETENTION": 7}}}) == []
    assert get_settings().retention_of(topic, has_groups=has_groups) == retention


def test_dlq_retention_is_for_dead_letters_alone(mysqlqueue):
    assert mysqlqueue({"DLQ_RETENTION": 3, "DLQ_SUFFIX": ".dead"}) == []
    settings = get_settings()
    assert settings.retention_of("t.dead", has_groups=False) == 3
    assert settings.retention_of("t_dlq", has_groups=True) == 86400


@pytest.mark.parametrize(
    ("value", "retention"),
    [
        ({}, 604800),
        ({"RETENTION": 10}, 604800),
        ({"RETENTION": 10, "ORPHAN_RETENTION": 20}, 20),
        ({"RETENTION": 20, "ORPHAN_RETENTION": 10}, 20),
        ({"RETENTION": 20, "ORPHAN_RETENTION": 0}, 20),
        ({"RETENTION": None, "ORPHAN_RETENTION": 10}, None),
        ({"RETENTION": 10, "ORPHAN_RETENTION": None}, None),
        ({"TOPICS": {"t": {"RETENTION": 5}}}, 5),
        ({"TOPICS": {"t": {"RETENTION": None}}}, None),
        ({"TOPICS": {"t": {"GROUPLESS": True}}}, 86400),
        ({"TOPICS": {"t": {"GROUPLESS": False}}}, 604800),
        ({"TOPICS": {"t": {"GROUPLESS": True, "RETENTION": 5}}}, 5),
        ({"TOPICS": {"other": {"GROUPLESS": True}}}, 604800),
    ],
)
def test_retention_of_a_topic_without_groups(mysqlqueue, value, retention):
    assert mysqlqueue(value) == []
    assert get_settings().retention_of("t", has_groups=False) == retention


def test_what_may_lack_groups(mysqlqueue):
    assert mysqlqueue({"DLQ_SUFFIX": ".dead", "TOPICS": {"a": {"GROUPLESS": True}, "b": {}}}) == []
    settings = get_settings()
    assert [topic for topic in ("a", "b", "c", "c.dead", "c_dlq", "") if settings.may_lack_groups(topic)] == [
        "a",
        "c.dead",
    ]


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (None, "must be a dict, not NoneType"),
        (["a"], "must be a dict, not list"),
        ({"a": None}, "['a'] must be a dict"),
        ({"a": {"RETENTION": -1}}, "['a']['RETENTION'] = -1"),
        ({"a": {"RETENTION": "1"}}, "['a']['RETENTION'] = '1'"),
        ({"a": {"PARTITIONS": 0}}, "['a']['PARTITIONS'] = 0"),
        ({"a": {"PARTITIONS": None}}, "['a']['PARTITIONS'] = None"),
        ({"a": {"PARTITIONS": 100_001}}, "['a']['PARTITIONS']"),
        ({"a": {"GROUPLESS": None}}, "['a']['GROUPLESS'] = None must be True or False"),
        ({"a": {"GROUPLESS": 1}}, "['a']['GROUPLESS'] = 1 must be True or False"),
        ({"a": {"PARTITION": 2}}, "unknown key 'PARTITION'"),
    ],
)
def test_topics_refused(mysqlqueue, value, said):
    (problem,) = mysqlqueue({"TOPICS": value})
    assert problem.id == "E005"
    assert said in problem.message
    assert problem.hint == ("Did you mean PARTITIONS?" if "unknown" in said else "")


# -- GROUPS -------------------------------------------------------------------


def test_groups(mysqlqueue):
    everything = {
        "MODE": "shared",
        "ATOMIC": True,
        "START": "latest",
        "ON_FAILURE": "block",
        "MAX_ATTEMPTS": None,
        "VISIBILITY_TIMEOUT": 5,
        "MAX_PROCESSING_TIME": 6,
        "BACKOFF": {"initial": 0},
    }
    assert mysqlqueue({"GROUPS": {"g": everything}}) == []
    assert get_settings().groups["g"] == {
        **{name.lower(): value for name, value in everything.items()},
        "backoff": Backoff(initial=0),
    }


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("g", "must be a dict, not str"),
        ({"g": 1}, "['g'] must be a dict, not int"),
        ({"g": {"MODE": "parallel"}}, "must be one of 'ordered', 'shared'"),
        ({"g": {"ATOMIC": 1}}, "must be True or False"),
        ({"g": {"START": "now"}}, "must be one of 'earliest', 'latest'"),
        ({"g": {"ON_FAILURE": None}}, "must be one of 'skip', 'block'"),
        ({"g": {"MAX_ATTEMPTS": 0}}, "must be from 1 to"),
        ({"g": {"VISIBILITY_TIMEOUT": 0}}, "must be at least 0.1"),
        ({"g": {"MAX_PROCESSING_TIME": None}}, "must be a number"),
        ({"g": {"BACKOFF": {"jitter": 2}}}, "jitter 2 must be"),
        ({"g": {"TIMEOUT": 0}}, "must be above 0"),
        *(({"g": {"CONCURRENCY": value}}, "must be from 1 to 10000") for value in (0, -1, 10_001)),
        *(({"g": {"CONCURRENCY": value}}, "must be an integer") for value in ("5", 1.5, True)),
        ({"g": {"REJECT_ON": ValueError}}, "can only be given to @subscriber"),
        ({"g": {"RETRY_ON": ("ValueError",)}}, "can only be given to @subscriber"),
        ({"g": {"BATCH": True}}, "unknown key 'BATCH'"),
        ({"g": {"max_attempts": 3}}, "unknown key 'max_attempts'"),
    ],
)
def test_groups_refused(mysqlqueue, value, said):
    (problem,) = mysqlqueue({"GROUPS": value})
    assert problem.id == "E006"
    assert said in problem.message
    assert bool(problem.hint) == ("unknown" in said)

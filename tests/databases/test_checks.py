"""System checks where topics are in several databases."""

from __future__ import annotations

import pytest
from django.core import checks as django_checks
from django.db import connections

from django_mysqlqueue import subscriber
from django_mysqlqueue.checks import system as checks
from django_mysqlqueue.models import ConsumerGroup
from tests.support.internals import GroupRef, groups, installing
from tests.support.routers import QueueKeptOut

QUEUE = "queue"
BOTH = ["default", QUEUE]


@pytest.fixture
def topics(queue_db, settings):
    settings.MYSQLQUEUE = {"TOPICS": {"orders": {"DATABASE": QUEUE}}}


def of(alias, found):
    """Says whether a message names the alias, and no other."""
    return repr(alias) in found.msg and not any(repr(one) in found.msg for one in {*BOTH, "other"} - {alias})


def test_sound_databases_pass(topics, no_procedures):
    for options in ({"tags": ["django_mysqlqueue"]}, {"tags": [django_checks.Tags.database], "databases": BOTH}):
        found = django_checks.run_checks(**options)
        assert [one for one in found if one.id.startswith("django_mysqlqueue")] == []


def test_routers_that_keep_tables_out(topics, settings):
    settings.DATABASE_ROUTERS = [QueueKeptOut()]
    found = checks.check_migrating()
    assert [(one.id, of(alias, one)) for one, alias in zip(found, BOTH, strict=True)] == [
        ("django_mysqlqueue.W014", True)
    ] * 2


def test_atomic_handlers_by_the_database_of_their_topic(topics, no_handlers):
    """The tables of the other models are on ``default``."""
    subscriber("mails", group="a", atomic=True)(lambda delivery: None)
    subscriber("orders", group="b")(lambda delivery: None)
    assert checks.check_atomic_handlers() == []

    @subscriber("orders_dlq", group="c", atomic=True)
    def there(delivery): ...

    (found,) = checks.check_atomic_handlers()
    assert found.id == "django_mysqlqueue.W015"
    assert of(QUEUE, found)
    assert found.msg.count("test_checks") == 1
    assert "there" in found.msg


def test_sqlite_options_of_each(topics, settings, monkeypatch):
    settings.MYSQLQUEUE = {"TOPICS": {"a": {"DATABASE": QUEUE}, "b": {"DATABASE": "other"}}}
    monkeypatch.setitem(connections["other"].settings_dict, "OPTIONS", {})
    (found,) = checks.check_sqlite_options()
    assert found.id == "django_mysqlqueue.W010"
    assert of("other", found)


def test_servers_that_cannot_run_the_queue(topics, engine, monkeypatch):
    monkeypatch.setitem(checks.MINIMUM, engine, (99, 9))
    assert [of(*one) for one in zip(BOTH, checks.check_database(databases=BOTH), strict=True)] == [True, True]
    (found,) = checks.check_database(databases=[QUEUE, "other"])
    assert of(QUEUE, found)
    monkeypatch.setitem(checks.MINIMUM, engine, (1, 0))
    monkeypatch.setitem(checks.TESTED, engine, (99, 9))
    found = checks.check_tested_version(databases=BOTH)
    assert [(one.id, of(alias, one)) for one, alias in zip(found, BOTH, strict=True)] == [
        ("django_mysqlqueue.W018", True)
    ] * 2


@pytest.mark.servers_only
def test_sessions_of_each(topics, monkeypatch):
    own = connections[QUEUE].settings_dict
    options = {**own["OPTIONS"], "init_command": "SET sql_safe_updates = 1"}
    connections[QUEUE].close()
    monkeypatch.setattr(connections[QUEUE], "settings_dict", {**own, "OPTIONS": options})
    (found,) = checks.check_sessions(databases=BOTH)
    connections[QUEUE].close()
    assert (found.id, of(QUEUE, found)) == ("django_mysqlqueue.E017", True)


def test_options_of_the_groups_of_each(topics, no_handlers):
    for topic, alias in (("mails", "default"), ("orders", QUEUE)):
        subscriber(topic, group="g", filter={"region": ["eu"]})(lambda delivery: None)
        groups.register(alias, GroupRef("g", topic), mode="ordered", start="earliest")
        ConsumerGroup.objects.using(alias).update(overrides={"timeout": {"value": 5, "at": 1000, "by": "bob"}})
    for check, number in ((checks.check_overrides, "W019"), (checks.check_registered, "W020")):
        first, second = check(databases=BOTH)
        assert first.id == second.id == f"django_mysqlqueue.{number}"
        assert "on topic 'mails' in database 'default' is" in first.msg
        assert "on topic 'orders' in database 'queue' is" in second.msg
        (found,) = check(databases=[QUEUE])
        assert found.msg == second.msg


def test_one_database_is_not_named(queue_db, no_handlers):
    subscriber("t", group="g", filter={"region": ["eu"]})(lambda delivery: None)
    groups.register("default", GroupRef("g", "t"), mode="ordered", start="earliest")
    (found,) = checks.check_registered(databases=BOTH)
    assert "on topic 't' is " in found.msg


@pytest.mark.servers_only
def test_procedures_of_each(topics, no_procedures, settings):
    settings.MYSQLQUEUE = {**settings.MYSQLQUEUE, "GROUPS": {"g": {"SQL_TOPICS": ["orders"]}}}
    (found,) = checks.check_procedures(databases=BOTH)
    assert found.id == "django_mysqlqueue.W021"
    assert "the stored procedures for clients in plain SQL in database 'queue' are missing" in found.msg
    installing.install(QUEUE)
    assert checks.check_procedures(databases=BOTH) == []
    installing.remove(QUEUE)


def test_a_database_without_tables(topics, settings):
    settings.MYSQLQUEUE = {"TOPICS": {"a": {"DATABASE": QUEUE}, "b": {"DATABASE": "other"}}}
    (found,) = checks.check_tables(databases=[*BOTH, "other"])
    assert (found.id, found.level) == ("django_mysqlqueue.W022", django_checks.WARNING)
    assert found.msg == "The settings put topics into database 'other', which lacks the queue's tables."
    assert found.hint == "Run manage.py migrate --database other, unless this is that command."
    assert checks.check_tables(databases=BOTH) == checks.check_tables() == []
    settings.MYSQLQUEUE = {"DATABASE": "other"}
    assert checks.check_tables(databases=["other"]) == []


def test_two_aliases_of_one_database(topics, settings, monkeypatch):
    assert checks.check_databases() == []
    monkeypatch.setitem(connections.databases, "again", connections[QUEUE].settings_dict)
    settings.MYSQLQUEUE = {"TOPICS": {"a": {"DATABASE": QUEUE}, "b": {"DATABASE": "again"}}}
    try:
        (found,) = checks.check_databases()
    finally:
        del connections["again"]
    assert (found.id, found.level) == ("django_mysqlqueue.E024", django_checks.ERROR)
    assert found.msg == "The databases 'queue' and 'again' of the queue are the same one."
    settings.MYSQLQUEUE = {"TOPICS": 5}
    assert checks.check_databases() == []  # E001 reports it.

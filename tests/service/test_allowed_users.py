"""A group that is bound to database users: who registers it, who claims, and who changes it."""

from __future__ import annotations

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from django_mysqlqueue import SubscriberError, operations, publish, subscriber
from django_mysqlqueue.exceptions import OperationRefused
from django_mysqlqueue.models import ConsumerGroup, Operation
from django_mysqlqueue.testing import deliver_all
from tests.support.harness import USING, Sub, handler, lag, sequence
from tests.support.internals import installing, register_groups
from tests.support.sql_clients import Client

MINE = ("%@%",)
OTHERS = ("billing@%",)


def bound(users):
    """A subscriber of a group that is registered for users."""
    ConsumerGroup.objects.filter(consumer_group="g").update(allowed_users={"users": list(users)} if users else {})


@pytest.fixture
def sub(db):
    return Sub(handler())


@pytest.mark.promise("Allowed users")
@pytest.mark.servers_only
def test_a_subscriber_of_another_user_claims_nothing_until_an_operator_allows_it(sub, caplog):
    bound(OTHERS)
    publish("t", 1)
    sub.settle()
    assert lag() == 1
    (refusal,) = [record.mysqlqueue for record in caplog.records if record.mysqlqueue["event"] == "user.refused"]
    assert "'g' on 't' is for the database users billing@%, and this one is root@" in refusal["error"]
    operations.settings("g", "t", {"allowed_users": ["root@%", "billing@%"]}, actor="ada")
    assert sub.settle() == 1
    assert Operation.objects.get().actor == "ada"
    operations.settings("g", "t", {"allowed_users": ["billing@%"]}, actor="ada")
    publish("t", 2)
    sub.settle()
    assert lag() == 1
    operations.settings("g", "t", {}, unset=["allowed_users"], actor="ada")
    bound(None)
    assert sub.settle() == 1


@pytest.mark.promise("Allowed users")
@pytest.mark.servers_only
def test_no_claim_is_made_after_the_change_has_committed(sub):
    """Not even by a process that has applied the options before it."""
    sub.settle()
    publish("t", 1)
    sequence()
    operations.settings("g", "t", {"allowed_users": list(OTHERS)}, actor="ada")
    sub.step(tick=False)
    assert lag() == 1
    assert not sub.work()


@pytest.mark.servers_only
def test_an_allowed_user_claims(sub):
    bound(MINE)
    publish("t", 1)
    assert sub.settle() == 1


def test_sqlite_has_no_users(sub):
    if connection.vendor != "sqlite":
        pytest.skip("about SQLite")
    bound(OTHERS)
    publish("t", 1)
    assert sub.settle() == 1


@pytest.mark.servers_only
@pytest.mark.parametrize("stored", [{"users": "billing@%"}, {"users": []}, {"people": ["a@b"]}, ["a@b"]])
def test_what_cannot_be_parsed_allows_nobody(sub, stored):
    """It was meant to keep somebody out."""
    ConsumerGroup.objects.update(allowed_users=stored)
    publish("t", 1)
    sub.settle()
    assert lag() == 1
    installing.install(USING)
    client = Client()
    with pytest.raises(Exception, match="is for other database users"):
        client.claim()
    client.close()


@pytest.mark.promise("Allowed users")
@pytest.mark.servers_only
def test_migrate_as_another_user_changes_no_options_of_the_group(db, no_handlers, settings, caplog):
    subscriber("t", group="g", rate="5/s")(lambda delivery: None)
    settings.MYSQLQUEUE = {"GROUPS": {"g": {"ALLOWED_USERS": ["billing@%"]}}}
    register_groups(USING)  # a new group: its owner may be somebody else
    row = ConsumerGroup.objects.get()
    assert (row.allowed_users, row.limits) == ({"users": ["billing@%"]}, {"rate": "5/s"})
    settings.MYSQLQUEUE = {"GROUPS": {"g": {"RATE": "9/s"}}}
    register_groups(USING)
    row = ConsumerGroup.objects.get()
    assert (row.allowed_users, row.limits) == ({"users": ["billing@%"]}, {"rate": "5/s"})
    assert [record.mysqlqueue["event"] for record in caplog.records] == ["user.refused"]
    operations.settings("g", "t", {"allowed_users": ["root@%"]}, actor="ada")
    register_groups(USING)
    row = ConsumerGroup.objects.get()
    assert (row.allowed_users, row.limits) == ({}, {"rate": "9/s"})


@pytest.mark.servers_only
def test_deliver_all_says_why_nothing_is_delivered(db, no_handlers):
    subscriber("t", group="g")(lambda delivery: None)
    publish("t", 1)
    register_groups(USING)
    bound(OTHERS)
    with pytest.raises(SubscriberError, match=r"g/t: The group 'g' on 't' is for the database users billing@%"):
        deliver_all()


@pytest.mark.promise("Allowed users")
@pytest.mark.servers_only
def test_a_client_in_plain_sql_of_another_user_is_refused(sub):
    installing.install(USING)
    publish("t", 1)
    sequence()
    client = Client()
    try:
        bound(OTHERS)
        with pytest.raises(Exception, match="g on t is for other database users than root@"):
            client.claim()
        bound(("r_ot@%",))
        with pytest.raises(Exception, match="is for other database users"):
            client.claim()
        bound(("billing@%", "root@%"))
        assert len(client.claim()) == 1
    finally:
        client.close()


def test_a_bad_value_is_refused_and_nothing_is_stored(sub):
    with pytest.raises(OperationRefused, match=r"allowed_users=\['billing'\]: has 'billing', which must be USER@HOST"):
        operations.settings("g", "t", {"allowed_users": ["billing"]}, actor="ada")
    assert not Operation.objects.exists()


@pytest.mark.promise("Cost")
def test_a_group_without_allowed_users_pays_no_statement(sub):
    sub.settle()
    publish("t", 1)
    with CaptureQueriesContext(connection) as captured:
        sub.settle()
    assert not [query for query in captured if "USER()" in query["sql"]]

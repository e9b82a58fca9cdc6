"""publish() in the caller's transaction."""

from __future__ import annotations

import pytest
from django.db import OperationalError, connection, transaction

from django_mysqlqueue import InvalidMessage
from django_mysqlqueue.models import QueueMessage
from tests.app.models import Effect
from tests.support.harness import sequence
from tests.support.publishing import committed, one_or_many, rolled_back, stored

pytestmark = pytest.mark.promise("Delivery")


@one_or_many
def test_outside_a_transaction_it_commits_alone(db, send):
    send("t", 1)
    assert committed() == ["1"]
    assert not connection.in_atomic_block


@one_or_many
@pytest.mark.parametrize("durable", [False, True])
def test_it_joins_the_callers_transaction(db, send, durable):
    with transaction.atomic(durable=durable):
        Effect.objects.create(name="mine")
        send("t", 1)
        assert committed() == []
        assert stored() == ["1"]
    assert committed() == ["1"]
    assert Effect.objects.count() == 1


@one_or_many
@pytest.mark.parametrize("durable", [False, True])
def test_a_rollback_leaves_nothing(db, send, durable):
    with rolled_back(durable=durable):
        Effect.objects.create(name="mine")
        send("t", 1)
    assert committed() == []
    sequence()
    assert not QueueMessage.objects.exists()
    assert not Effect.objects.exists()


@one_or_many
def test_a_rolled_back_savepoint_takes_only_its_own(db, send):
    with transaction.atomic():
        send("t", 1)
        with rolled_back():
            send("t", 2)
            with transaction.atomic():
                send("t", 3)
        send("t", 4)
    assert committed() == ["1", "4"]


@one_or_many
def test_set_rollback(db, send):
    with transaction.atomic():
        send("t", 1)
        transaction.set_rollback(True)
    assert committed() == []


@one_or_many
def test_from_on_commit(db, send):
    """The hook runs after the commit, in autocommit mode: the message commits alone."""
    with transaction.atomic():
        send("t", "inside")
        transaction.on_commit(lambda: send("t", "hook"))
        assert stored() == ['"inside"']
    assert committed() == ['"inside"', '"hook"']


@one_or_many
def test_from_on_commit_of_a_transaction_that_rolls_back(db, send):
    with rolled_back():
        transaction.on_commit(lambda: send("t", "hook"))
    assert committed() == []


@one_or_many
@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_autocommit_off(autocommit_off, send, end):
    send("t", 1)
    send("t", 2)
    assert committed() == []
    getattr(connection, end)()
    assert committed() == (["1", "2"] if end == "commit" else [])


@one_or_many
def test_a_refused_message_leaves_the_callers_transaction_usable(db, send):
    with transaction.atomic():
        send("t", 1)
        with pytest.raises(InvalidMessage):
            send("t", float("nan"))
        with pytest.raises(InvalidMessage):
            send("no topic", 2)
        send("t", 3)
    assert committed() == ["1", "3"]


@one_or_many
def test_in_a_transaction_that_is_already_broken(db, send):
    """Django's own rule: it must end first. Nothing may slip through beside it."""
    with transaction.atomic():
        transaction.set_rollback(True)
        with pytest.raises(transaction.TransactionManagementError):
            send("t", 1)
    assert committed() == []


@one_or_many
def test_a_caller_who_catches_a_database_error_commits_nothing_of_the_transaction(db, send):
    """After a deadlock the server has rolled back what came before; the rest must not be committed alone."""

    def deadlock(execute, sql, params, many, context):
        if "INSERT INTO queue_outbox" in sql:
            raise OperationalError(1213, "Deadlock found when trying to get lock; try restarting transaction")
        return execute(sql, params, many, context)

    with transaction.atomic():
        Effect.objects.create(name="before")
        with connection.execute_wrapper(deadlock), pytest.raises(OperationalError):
            send("t", 1)
        with pytest.raises(transaction.TransactionManagementError):
            Effect.objects.create(name="after")
    assert committed() == []
    assert not Effect.objects.exists()

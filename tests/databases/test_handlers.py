"""Atomic handlers beside other databases."""

from __future__ import annotations

import pytest
from django.db import DatabaseError, connection, connections, transaction

from django_mysqlqueue import publish, subscriber
from django_mysqlqueue.checks import system as checks
from django_mysqlqueue.models import QueueMessage
from tests.app.models import Effect
from tests.support.harness import Sub, handler, in_thread, sequence
from tests.support.internals import sessions
from tests.support.routers import QueueElsewhere

QUEUE = "queue"


def test_atomic_handlers_beside_a_queue_of_its_own_are_warned_of(settings, no_handlers):
    subscriber("t", group="g")(lambda delivery: None)
    settings.MYSQLQUEUE = {"DATABASE": QUEUE}
    assert checks.check_atomic_handlers() == []
    subscriber("t", group="h", atomic=True)(lambda delivery: None)
    (warning,) = checks.check_atomic_handlers()
    assert warning.id == "django_mysqlqueue.W015"
    assert "'queue'" in warning.msg
    assert "more than once" in warning.hint


def test_atomic_handlers_beside_the_projects_tables_are_not(settings, no_handlers):
    subscriber("t", group="h", atomic=True)(lambda delivery: None)
    assert checks.check_atomic_handlers() == []
    settings.MYSQLQUEUE = {"DATABASE": QUEUE}
    settings.DATABASE_ROUTERS = [SomethingOnQueue()]
    assert checks.check_atomic_handlers() == []


def test_the_queues_own_models_are_not_the_projects(settings, no_handlers):
    """The dashboard's model has no table: with a router it is on the queue's alias too."""
    subscriber("t", group="h", atomic=True)(lambda delivery: None)
    settings.DATABASE_ROUTERS = [QueueElsewhere()]
    (warning,) = checks.check_atomic_handlers()
    assert warning.id == "django_mysqlqueue.W015"


class SomethingOnQueue:
    def db_for_write(self, model, **hints):
        return QUEUE if model is Effect else None


def test_publishing_inside_a_handler_with_a_transaction_elsewhere(queue_db):
    """A failed attempt; in an atomic handler the queue's transaction is open, and the message commits with it."""
    publish("t", 1)

    def elsewhere(delivery):
        with transaction.atomic(using=QUEUE):
            publish("u", 1)

    Sub(handler(function=elsewhere, group="plain", max_attempts=1)).settle()
    sequence()
    (dead,) = QueueMessage.objects.filter(topic="t_dlq")
    assert "TransactionMismatch" in dead.last_error
    assert not QueueMessage.objects.filter(topic="u").exists()
    Sub(handler(function=elsewhere, group="atomic", atomic=True)).settle()
    sequence()
    assert QueueMessage.objects.filter(topic="u").count() == 1


@pytest.mark.promise("Other databases in atomic handlers")
def test_what_an_atomic_handler_writes_elsewhere_stays(queue_db):
    """Exactly once ends at the queue's database: a rollback there does not reach the other."""
    publish("t", 1)

    def write(delivery):
        Effect.objects.create(name="beside the queue")
        Effect.objects.using(QUEUE).create(name="elsewhere")
        if delivery.attempt == 1:
            raise ValueError("no")

    Sub(handler(function=write, atomic=True)).settle()
    assert Effect.objects.filter(name="beside the queue").count() == 1
    assert Effect.objects.using(QUEUE).filter(name="elsewhere").count() == 2


def test_what_a_handler_leaves_open_on_another_alias_is_rolled_back(queue):
    def check():
        sessions.adopt(QUEUE, sessions.Timeouts(idle=60, lock_wait=5, network=5, read=60))
        for leave_open in (lambda: transaction.atomic().__enter__(), lambda: connection.set_autocommit(False)):
            connections[QUEUE].ensure_connection()
            sound = connections[QUEUE].connection
            leave_open()
            Effect.objects.create(name="left open")
            sessions.tidy()
            assert not connection.in_atomic_block
            assert connection.connection is None
            assert connections[QUEUE].connection is sound
            assert connection.get_autocommit()
            assert not Effect.objects.filter(name="left open").exists()

    in_thread(check)


def test_an_error_on_another_alias_renews_its_connection_alone(queue):
    def check():
        connections[QUEUE].ensure_connection()
        sound = connections[QUEUE].connection
        with pytest.raises(DatabaseError), connection.cursor() as cursor:
            cursor.execute("SELECT nothing FROM nowhere")
        sessions.tidy()
        assert connection.connection is None
        assert connections[QUEUE].connection is sound

    in_thread(check)

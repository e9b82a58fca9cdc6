"""What handlers do to their connection stays with their message."""

from __future__ import annotations

import threading

import pytest
from django.db import DatabaseError, OperationalError, connection, connections, transaction

from django_mysqlqueue import Message, publish_many
from django_mysqlqueue.models import DeliveryState
from tests.app.models import Effect
from tests.support.harness import USING, Sub, handler, in_thread
from tests.support.internals import sessions
from tests.support.survival import Survival


def sql(statement):
    with connection.cursor() as cursor:
        cursor.execute(statement)


def kill_itself():
    connection.ensure_connection()
    number = connection.connection.thread_id()
    with pytest.raises(DatabaseError):
        sql(f"KILL {number}")


def leave_atomic_open():
    transaction.atomic().__enter__()
    Effect.objects.create(name="left open")


def leave_autocommit_off():
    connection.set_autocommit(False)
    Effect.objects.create(name="left open")


def leave_raw_transaction_open():
    sql("BEGIN")
    Effect.objects.create(name="left open")


def break_the_transaction():
    with pytest.raises(DatabaseError), transaction.atomic():
        sql("SELECT nonsense FROM nowhere")
    connection.set_autocommit(False)
    connection.needs_rollback = True


def close_below_django():
    connection.ensure_connection()
    connection.connection.close()


def session():
    """What a session may have been changed to; a temporary table is found by making it."""
    with connection.cursor() as cursor:
        cursor.execute("CREATE TEMPORARY TABLE scratch (id INTEGER)")
        cursor.execute("DROP TEMPORARY TABLE scratch")
        prefix = "tx" if connection.mysql_is_mariadb else "transaction"
        cursor.execute(
            f"SELECT @@sql_mode, @@time_zone, @@{prefix}_isolation, @@{prefix}_read_only, @@autocommit, "
            "@@character_set_client, DATABASE()"
        )
        return cursor.fetchone()


TO_THE_CONNECTION = {
    "close": lambda: connection.close(),
    "close all": lambda: connections.close_all(),
    "close below Django": close_below_django,
    "broken": break_the_transaction,
    "temporary table": lambda: sql("CREATE TEMPORARY TABLE scratch (id INTEGER PRIMARY KEY)"),
}
LEFT_OPEN = {
    "atomic left open": leave_atomic_open,
    "autocommit left off": leave_autocommit_off,
    "raw transaction left open": leave_raw_transaction_open,
}
TO_THE_SESSION = {
    "sql_mode": lambda: sql("SET SESSION sql_mode = 'ANSI_QUOTES,NO_BACKSLASH_ESCAPES'"),
    "time_zone": lambda: sql("SET SESSION time_zone = '+11:00'"),
    "isolation": lambda: sql("SET SESSION TRANSACTION ISOLATION LEVEL SERIALIZABLE"),
    "read only": lambda: sql("SET SESSION TRANSACTION READ ONLY"),
    "autocommit": lambda: sql("SET autocommit = 0"),
    "character set": lambda: sql("SET NAMES latin1"),
    "database": lambda: sql("USE information_schema"),
    "lock tables": lambda: sql("LOCK TABLES queue_outbox READ, queue_messages READ"),
    "a temporary table": lambda: sql("CREATE TEMPORARY TABLE scratch (id INTEGER PRIMARY KEY)"),
}


@pytest.mark.parametrize("what", TO_THE_CONNECTION)
def test_what_a_handler_does_to_its_connection_stays_with_its_message(db, what):
    Survival(lambda delivery: TO_THE_CONNECTION[what]()).check(dead=False)
    assert not Effect.objects.filter(name="left open").exists()


@pytest.mark.parametrize("what", LEFT_OPEN)
def test_a_transaction_that_a_handler_leaves_open_fails_its_attempt(db, what):
    """What it wrote is rolled back: with an ack, it would be lost."""
    survival = Survival(lambda delivery: LEFT_OPEN[what]())
    survival.check(dead=True)
    error = survival.dead[0].last_error
    assert "left a transaction open" in error
    assert ("set_autocommit" in error) == (LEFT_OPEN[what] is leave_autocommit_off)
    assert not Effect.objects.filter(name="left open").exists()


@pytest.mark.servers_only
def test_a_session_that_is_gone_without_an_answer_fails_its_attempt(db):
    """Nobody knows any more whether it had a transaction."""
    Survival(lambda delivery: kill_itself()).check(dead=True)


@pytest.mark.servers_only
@pytest.mark.parametrize("what", TO_THE_SESSION)
def test_what_a_handler_does_to_its_session_stays_with_its_message(db, what):
    found = []
    Survival(lambda delivery: TO_THE_SESSION[what](), then=lambda: found.append(session())).check(dead=False)
    assert found == [session()]


def lock_for_update(pk):
    sql(f"SELECT id FROM {Effect._meta.db_table} WHERE id = {pk} FOR UPDATE")


def wait_in_a_circle(mine, theirs, both_hold):
    """A transaction that has written much, so that a deadlock is not its own to lose."""
    with transaction.atomic():
        Effect.objects.bulk_create(Effect(name="other") for _ in range(50))
        lock_for_update(mine)
        both_hold.wait(10)
        lock_for_update(theirs)
    connections.close_all()


@pytest.mark.servers_only
@pytest.mark.parametrize("end", ["raises", "returns"])
def test_a_deadlock_that_an_atomic_handler_catches_fails_its_attempt(db, end):
    """The server has rolled all back: what is written afterwards and the ack must not be committed without it."""
    first, second = (Effect.objects.create(name=name).pk for name in ("first", "second"))
    both_hold = threading.Barrier(2)
    other = threading.Thread(target=wait_in_a_circle, args=(second, first, both_hold))
    caught = []

    def function(delivery):
        if delivery.attempt > 1:
            return
        Effect.objects.create(name="before")
        lock_for_update(first)
        both_hold.wait(10)
        try:
            lock_for_update(second)
        except OperationalError as error:
            caught.append(error.args[0])
        Effect.objects.create(name="after")
        if end == "raises":
            raise ValueError("on purpose")

    def work():
        sessions.adopt(USING, sessions.Timeouts(idle=60, lock_wait=5, network=10, read=30), watch=True)
        sub = Sub(handler(function=function, atomic=True))
        sub.step()
        other.start()
        sub.work(1)
        sub.flush()
        state = DeliveryState.objects.get()
        sub.leave()
        return state.retry_count, state.acked

    publish_many("t", [Message(1, key="k")])
    assert in_thread(work) == (1, False)
    other.join(20)
    assert caught == [1213]
    assert not Effect.objects.filter(name__in=["before", "after"]).exists()

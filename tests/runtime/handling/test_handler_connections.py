"""Connections of handlers that end or cannot be opened: what fails before the handler is called costs no attempt."""

from __future__ import annotations

import contextlib
import logging
import threading
import time

import pytest
from django.db import OperationalError, connection, connections, transaction
from django.db.backends.signals import connection_created

from django_mysqlqueue import Message, publish_many
from django_mysqlqueue.models import DeliveryState, JobResult, QueueMessage
from django_mysqlqueue.options.backoff import Backoff
from tests.app import jobs
from tests.app.models import Effect
from tests.support import job_worlds
from tests.support.harness import USING, Sub, handler, in_thread, lag
from tests.support.internals import Executor, has_unread, registry, sessions
from tests.support.roles import own_user

TIMEOUTS = sessions.Timeouts(idle=60, lock_wait=5, network=10, read=60)
SCARCE = "scarce"
"""An alias of the database under test for a user that may have one connection."""


@contextlib.contextmanager
def working(*handlers, threads=1, **options):
    """A subscriber whose handler threads run; yields what lets its poller go on until something is true."""
    sub = Sub(*handlers)
    executor = Executor(sub.inbox, USING, threads=threads, timeouts=TIMEOUTS, **options)
    executor.start()

    def until(is_true, seconds=30.0):
        deadline = time.monotonic() + seconds
        while not is_true():
            assert time.monotonic() < deadline, "waited in vain"
            sub.step()
            sub.flush()
            time.sleep(0.002)

    try:
        yield until
    finally:
        sub.leave()
        executor.join(30)


def sql(statement, using=USING):
    with connections[using].cursor() as cursor:
        cursor.execute(statement)
        return cursor.fetchall()


def session_of(using):
    return sql("SELECT CONNECTION_ID()", using)[0][0]


@pytest.mark.promise("Server outages")
@pytest.mark.servers_only
@pytest.mark.parametrize("atomic", [False, True])
def test_a_connection_that_was_ended_a_moment_ago_costs_no_attempt(db, atomic):
    """It is not idle for long enough to be asked: that it has ended is seen by its socket."""
    attempts, seen = [], []

    def function(delivery):
        attempts.append((delivery.payload, delivery.attempt))
        Effect.objects.create(name=str(delivery.payload))
        seen.append(session_of(USING))

    with working(handler(function=function, atomic=atomic)) as until:
        for number in range(20):
            publish_many("t", [Message(number, key="k")])
            until(lambda count=number + 1: len(seen) == count and not DeliveryState.objects.filter(acked=False))
            sql(f"KILL {seen[-1]}")
    assert attempts == [(number, 1) for number in range(20)]
    assert len(set(seen)) == 20
    assert Effect.objects.count() == 20


def test_a_sound_connection_is_kept(db, settings, no_handlers):
    settings.TASKS = job_worlds.TASKS
    opened = []

    def write(delivery):
        Effect.objects.create(name="t", value=delivery.payload)

    def opens(connection, **kwargs):
        opened.append(threading.current_thread())

    handlers = [handler(group=f"g{atomic}", function=write, atomic=atomic) for atomic in (False, True)]
    connection_created.connect(opens)
    try:
        with working(*handlers, registry.handlers()[job_worlds.JOBS]) as until:
            for number in range(20):
                publish_many("t", [Message(number, key="k")])
                jobs.write.enqueue(number)
                jobs.plain.enqueue(number)
                until(lambda count=4 * (number + 1): Effect.objects.count() == count)
                if number == 0:
                    opened.clear()  # Before the first one, Django opens another one to ask for the server's version.
            until(lambda: not JobResult.objects.exclude(status="SUCCESSFUL"))
    finally:
        connection_created.disconnect(opens)
    assert not opened


@pytest.mark.servers_only
def test_a_sound_connection_has_nothing_to_read_and_an_ended_one_has(db):
    connections[USING].ensure_connection()
    other = connections.create_connection(USING)
    try:
        other.ensure_connection()
        assert not has_unread(other)
        with other.cursor() as cursor:
            cursor.execute("SELECT CONNECTION_ID()")
            (session,) = cursor.fetchone()
        assert not has_unread(other)
        sql(f"KILL {session}")
        deadline = time.monotonic() + 10
        while not has_unread(other):
            assert time.monotonic() < deadline
    finally:
        other.close()
    assert not has_unread(other)


@pytest.fixture
def scarce(db):
    user = own_user("scarce")
    sql(f"DROP USER IF EXISTS {user}@localhost")
    sql(f"CREATE USER {user}@localhost WITH MAX_USER_CONNECTIONS 1")
    sql(f"GRANT ALL ON `{connection.settings_dict['NAME']}`.* TO {user}@localhost")
    connections.settings[SCARCE] = {**connection.settings_dict, "USER": user, "PASSWORD": ""}
    yield SCARCE
    connections[SCARCE].close()
    del connections[SCARCE]
    del connections.settings[SCARCE]
    sql(f"DROP USER {user}@localhost")


@pytest.mark.promise("Server outages")
@pytest.mark.servers_only
@pytest.mark.parametrize("mode", ["ordered", "shared"])
def test_a_connection_that_cannot_be_had_costs_no_attempt_and_holds_up_nobody_else(db, scarce, caplog, mode):
    attempts, elsewhere, sessions_seen = [], [], []

    def function(delivery):
        attempts.append((delivery.payload, delivery.attempt))
        sessions_seen.append(session_of(SCARCE))

    handlers = (
        handler(group="uses", function=function, mode=mode, max_attempts=2),
        handler(group="uses not", function=lambda delivery: elsewhere.append(delivery.payload)),
    )
    taken = connections.create_connection(SCARCE)
    caplog.set_level(logging.WARNING)
    with working(*handlers, threads=1) as until:
        publish_many("t", [Message(0, key="k")])
        until(lambda: len(sessions_seen) == 1 and len(elsewhere) == 1)
        sql(f"KILL {sessions_seen[0]}")
        _take(taken)
        publish_many("t", (Message(number, key="k") for number in range(1, 11)))
        until(lambda: len(elsewhere) == 11)
        until(lambda: "delivery.not_started" in caplog.text)
        assert attempts == [(0, 1)]
        taken.close()
        until(lambda: len(attempts) == 11)
    assert sorted(attempts) == [(number, 1) for number in range(11)]
    if mode == "ordered":
        assert attempts == sorted(attempts)
    assert "delivery.failed" not in caplog.text


def _take(taken):
    """Opens the one connection, as soon as the server has let the killed one go."""
    deadline = time.monotonic() + 10
    while True:
        try:
            taken.ensure_connection()
        except OperationalError:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        else:
            return


@pytest.mark.promise("First connections")
@pytest.mark.servers_only
def test_a_handler_that_can_do_without_a_database_is_called_in_the_end(db, scarce):
    calls = []

    def function(delivery):
        try:
            calls.append(("primary", session_of(SCARCE)))
        except OperationalError:
            calls.append(("fallback", delivery.attempt))

    taken = connections.create_connection(SCARCE)
    with working(handler(group="optional", function=function), rest=Backoff(initial=0.05, maximum=0.05)) as until:
        publish_many("t", [Message(0, key="k")])
        until(lambda: len(calls) == 1)
        sql(f"KILL {calls[0][1]}")
        _take(taken)
        publish_many("t", [Message(1, key="k")])
        until(lambda: len(calls) == 2)
        taken.close()
    assert calls[1] == ("fallback", 1)


@pytest.mark.servers_only
def test_an_alias_that_is_not_used_any_more_is_forgotten(db):
    def call(*aliases):
        outer = sessions.begin_call()
        sessions._role.used.update(dict.fromkeys(aliases))
        sessions.end_call("forgets", outer)

    call(SCARCE)
    for _ in range(sessions.FORGOTTEN_AFTER):
        call(USING)
    assert sessions._uses["forgets"] == {SCARCE: sessions.FORGOTTEN_AFTER, USING: 0}
    call()
    assert sessions._uses.pop("forgets") == {USING: 1}


@pytest.mark.servers_only
def test_what_a_handler_uses_is_known_to_all_threads_of_the_process(db):
    used = threading.Event()

    def function(delivery):
        if delivery.payload == 0:
            Effect.objects.create(name="0")
            used.set()

    one = handler(group="known", function=function)
    with working(one, threads=2) as until:
        publish_many("t", [Message(0, key="k")])
        until(used.is_set)
    assert set(sessions._uses[one.ref]) == {USING}
    idle = handler(group="idle", function=lambda delivery: None)
    with working(idle) as until:
        until(lambda: not DeliveryState.objects.filter(consumer_group="idle", acked=False).exists())
    assert not sessions._uses.get(idle.ref)


@pytest.mark.servers_only
@pytest.mark.parametrize("mode", ["ordered", "shared"])
def test_a_connection_that_was_ended_costs_an_atomic_handler_no_attempt(db, mode):
    """It is noticed when the transaction begins, before the handler was called."""
    got = []
    publish_many("t", [Message(n, key="k") for n in range(3)])
    sub = Sub(
        handler(mode=mode, atomic=True, max_attempts=1, function=lambda one: got.append((one.payload, one.attempt)))
    )
    sub.step()

    def work():
        connection.ensure_connection()
        for held in iter(sub.take, None):
            kill(connection)
            sub.run(held)

    in_thread(work)
    sub.flush()
    assert got == [(0, 1), (1, 1), (2, 1)]
    assert lag() == 0
    assert not QueueMessage.objects.filter(topic="t_dlq").exists()


def kill(wrapper):
    """Ends a connection from outside, as an administrator does."""
    number = wrapper.connection.thread_id()

    def end():
        with connection.cursor() as cursor:
            cursor.execute(f"KILL {number}")

    in_thread(end)


def test_a_transaction_that_cannot_be_opened_gives_back_uncounted_and_in_order(db, monkeypatch, caplog):
    got = []
    publish_many("t", [Message(n, key="k") for n in range(3)])
    sub = Sub(handler(atomic=True, max_attempts=1, function=lambda delivery: got.append(delivery.payload)))
    sub.step()
    real = transaction.atomic
    refusals = iter([True, True])

    def atomic(using=None, *args, **kwargs):
        if next(refusals, False):
            raise OperationalError(2002, "Can't connect")
        return real(using, *args, **kwargs)

    held = sub.take()
    with monkeypatch.context() as patch:
        patch.setattr(transaction, "atomic", atomic)
        sub.run(held)
    assert "delivery.not_started" in caplog.text
    sub.settle()
    assert got == [0, 1, 2]
    assert lag() == 0

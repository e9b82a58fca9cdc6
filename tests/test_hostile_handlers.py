"""What handlers do to the process that runs them: each has a stated outcome, and the next message is handled.

``docs/explanation/hostile.md`` states them.
"""

from __future__ import annotations

import asyncio
import gc
import io
import os
import signal
import sys
import threading
import time

import pytest
from django.core.management import call_command
from django.db import DatabaseError, OperationalError, connection, connections, transaction

from django_mysqlqueue import Message, StaleDelivery, publish_many
from django_mysqlqueue.models import ConsumerGroup, DeliveryState, QueueMessage
from django_mysqlqueue.runtime import sessions
from django_mysqlqueue.runtime.handling.executor import Executor
from django_mysqlqueue.service.messages import ERROR_LENGTH
from tests.app.models import Effect
from tests.support.harness import USING, Sub, handler, in_thread, lag, sequence

TIMEOUTS = sessions.Timeouts(idle=60, lock_wait=5, network=10, read=60)


class Survival:
    """What was seen of an odd message and the one behind it, in one partition, on one thread."""

    def __init__(self, act, payloads=("odd", "next"), *, max_attempts=2, then=lambda: None, **options):
        self.starts = []
        self.then = then
        self.threads = set()
        self.act = act
        sub = Sub(handler(function=self, max_attempts=max_attempts, **options))
        publish_many("t", [Message(payload, key="k") for payload in payloads])
        executor = Executor(sub.inbox, USING, threads=1, timeouts=TIMEOUTS)
        executor.start()
        try:
            deadline = time.monotonic() + 60
            while True:
                sub.step()
                sub.flush()
                if all(sub.inbox.is_idle(ref) for ref in sub.handlers) and not lag() and len(self.starts) >= 2:
                    break
                assert time.monotonic() < deadline, ("waited in vain", self.starts)
                time.sleep(0.002)
        finally:
            sub.leave()
            executor.join(30)
        self.executor = executor
        sequence()

    def __call__(self, delivery):
        self.starts.append((delivery.payload, delivery.attempt))
        self.threads.add(threading.get_ident())
        if delivery.payload == "odd":
            return self.act(delivery)
        self.then()
        Effect.objects.create(name=str(delivery.payload))
        return None

    @property
    def dead(self):
        return list(QueueMessage.objects.filter(topic="t_dlq").order_by("offset"))

    def check(self, *, dead):
        """The odd one was acked at once, or failed twice and is a dead letter; the next one was handled."""
        assert self.starts.count(("next", 1)) == 1
        assert len(self.threads) == 1
        assert [one for one in self.starts if one[0] == "next"] == [("next", 1)]
        assert [attempt for payload, attempt in self.starts if payload == "odd"] == ([1, 2] if dead else [1])
        assert [bytes(one.payload) for one in self.dead] == ([b'"odd"'] if dead else [])
        # It is committed: seen from another connection.
        assert Effect.objects.filter(name="next").count() == 1
        assert not DeliveryState.objects.exists()


# -- what they raise ----------------------------------------------------------


class Unshowable(BaseException):
    def __str__(self):
        raise ValueError("not even that")

    __repr__ = __str__


def cyclic():
    one, two = ValueError("one"), ValueError("two")
    one.__cause__, two.__cause__ = two, one
    return one


def endless(depth=0):
    return endless(depth + 1) + 1


RAISED = {
    "KeyboardInterrupt": (KeyboardInterrupt, "KeyboardInterrupt"),
    "SystemExit": (SystemExit, "SystemExit"),
    "sys.exit text": (lambda: sys.exit("bye 😀"), "SystemExit: bye 😀"),
    "GeneratorExit": (GeneratorExit, "GeneratorExit"),
    "StopIteration": (StopIteration, "StopIteration"),
    "StopAsyncIteration": (StopAsyncIteration, "StopAsyncIteration"),
    "CancelledError": (asyncio.CancelledError, "CancelledError"),
    "MemoryError": (MemoryError, "MemoryError"),
    "stack": (endless, "RecursionError"),
    "ExceptionGroup": (lambda: ExceptionGroup("many", [ValueError("a"), OSError("b")]), "many (2 sub-exceptions)"),
    "BaseExceptionGroup": (lambda: BaseExceptionGroup("many", [SystemExit(3)]), "BaseExceptionGroup: many"),
    "unshowable": (Unshowable, "Unshowable"),
    "cycle": (cyclic, "ValueError: one"),
    "10 MB": (lambda: ValueError("x" * 10_000_000 + "the end"), "the end"),
    "surrogate": (lambda: ValueError("a\udc80b"), "a\\udc80b"),
    "NUL and 4 bytes": (lambda: ValueError("a\x00b 😀 '\"\\ %s {}"), "a\x00b 😀 '\"\\ %s {}"),
    "only NUL": (lambda: ValueError("\x00" * 100_000), "\x00" * 1000),
    "only 4 bytes": (lambda: ValueError("😀" * 100_000), "😀" * 1000),
}


@pytest.mark.parametrize("atomic", [False, True], ids=["plain", "atomic"])
@pytest.mark.parametrize("what", RAISED, ids=str)
def test_whatever_a_handler_raises_is_a_failed_attempt(db, what, atomic):
    make, text = RAISED[what]

    def act(delivery):
        Effect.objects.create(name="odd")
        delivery.ack()  # a raise wins
        error = make()
        raise error

    seen = Survival(act, atomic=atomic)
    seen.check(dead=True)
    (dead,) = seen.dead
    assert text in dead.last_error
    assert len(dead.last_error) <= ERROR_LENGTH
    assert dead.failure_count == 2
    assert Effect.objects.filter(name="odd").count() == (0 if atomic else 2)


# -- what they return ---------------------------------------------------------


async def coroutine():
    raise AssertionError("nobody awaits it")


def generator():
    yield 1


async def async_generator():
    yield 1


@pytest.mark.parametrize("value", [0, False, "nack", NotImplemented, ValueError("returned"), object(), [1], {"a": 1}])
def test_what_a_handler_returns_is_ignored(db, value):
    Survival(lambda delivery: value).check(dead=False)


@pytest.mark.parametrize("make", [coroutine, generator, async_generator])
def test_a_body_that_never_ran_is_a_failed_attempt(db, make):
    seen = Survival(lambda delivery: make())
    seen.check(dead=True)
    assert "TypeError" in seen.dead[0].last_error


# -- what they do to their connection -----------------------------------------


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
    "atomic left open": leave_atomic_open,
    "autocommit left off": leave_autocommit_off,
    "raw transaction left open": leave_raw_transaction_open,
    "broken": break_the_transaction,
    "temporary table": lambda: sql("CREATE TEMPORARY TABLE scratch (id INTEGER PRIMARY KEY)"),
}
TO_THE_SESSION = {
    "kill": kill_itself,
    "sql_mode": lambda: sql("SET SESSION sql_mode = 'ANSI_QUOTES,NO_BACKSLASH_ESCAPES'"),
    "time_zone": lambda: sql("SET SESSION time_zone = '+11:00'"),
    "isolation": lambda: sql("SET SESSION TRANSACTION ISOLATION LEVEL SERIALIZABLE"),
    "read only": lambda: sql("SET SESSION TRANSACTION READ ONLY"),
    "autocommit": lambda: sql("SET autocommit = 0"),
    "character set": lambda: sql("SET NAMES latin1"),
    "database": lambda: sql("USE information_schema"),
    "lock tables": lambda: sql("LOCK TABLES queue_outbox READ, queue_messages READ"),
    "start transaction": lambda: sql("/* a comment */ START TRANSACTION READ ONLY"),
    "a temporary table": lambda: sql("CREATE TEMPORARY TABLE scratch (id INTEGER PRIMARY KEY)"),
}


@pytest.mark.parametrize("what", TO_THE_CONNECTION)
def test_what_a_handler_does_to_its_connection_stays_with_its_message(db, what):
    Survival(lambda delivery: TO_THE_CONNECTION[what]()).check(dead=False)
    assert not Effect.objects.filter(name="left open").exists()


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


# -- forks --------------------------------------------------------------------


def child_returns():
    return None


def child_raises():
    raise ValueError("in the child")


def child_exits():
    sys.exit(7)


def child_publishes():
    Effect.objects.create(name="child")
    os._exit(5)


def child_unwinds():
    with transaction.atomic():
        Effect.objects.create(name="in the child")
        raise SystemExit("text")


def child_closes():
    connections.close_all()
    os._exit(6)


class Bystander:
    """Another thread, idle, with a connection of its own."""

    def __init__(self):
        self.ready, self.go, self.seen = threading.Event(), threading.Event(), []
        self.thread = threading.Thread(target=self.run)
        self.thread.start()
        assert self.ready.wait(30)

    def run(self):
        self.ask()
        self.ready.set()
        self.go.wait(100)
        self.ask()
        connections.close_all()

    def ask(self):
        try:
            with connection.cursor() as cursor:
                cursor.execute("SELECT CONNECTION_ID()")
                self.seen.append(cursor.fetchone())
        except DatabaseError as error:
            self.seen.append(error)

    def end(self):
        self.go.set()
        self.thread.join(30)
        return self.seen


CHILDREN = {child_returns: 0, child_raises: 1, child_exits: 7, child_publishes: 5, child_closes: 6, child_unwinds: 1}


@pytest.mark.servers_only
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("atomic", [False, True], ids=["plain", "atomic"])
@pytest.mark.parametrize("child", CHILDREN)
def test_a_child_that_a_handler_forks_leaves_its_parents_sessions_alone(db, child, atomic):
    """It ends when it comes back out of the handler; every thread of the parent keeps its connection."""
    mine = connection.connection.thread_id()
    status, sessions_of_the_thread = [], []
    bystander = Bystander()

    def act(delivery):
        Effect.objects.create(name="parent")
        sessions_of_the_thread.append(connection.connection.thread_id())
        pid = os.fork()
        if pid == 0:
            gc.collect()
            return child()
        status.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        Effect.objects.create(name="parent")
        sessions_of_the_thread.append(connection.connection.thread_id())
        return None

    Survival(act, atomic=atomic).check(dead=False)
    before, after = bystander.end()
    assert before == after
    assert status == [CHILDREN[child]]
    assert sessions_of_the_thread[0] == sessions_of_the_thread[1]
    assert connection.connection.thread_id() == mine
    with connection.cursor() as cursor:
        cursor.execute("SELECT CONNECTION_ID()")
        assert cursor.fetchone() == (mine,)
    assert Effect.objects.filter(name="parent").count() == 2
    assert Effect.objects.filter(name="child").exists() == (child is child_publishes)


# -- what they say of their delivery ------------------------------------------


def says(*methods):
    def act(delivery):
        for method, *arguments in methods:
            getattr(delivery, method)(*arguments)

    return act


@pytest.mark.parametrize("atomic", [False, True], ids=["plain", "atomic"])
@pytest.mark.parametrize(
    ("methods", "dead"),
    [
        ([("ack",), ("ack",)], False),
        ([("nack",), ("ack",)], False),
        ([("reject", "no"), ("ack",)], False),
        ([("snooze", 60), ("ack",)], False),
        ([("ack",), ("nack", 0)], True),
        ([("ack",), ("snooze", 60), ("nack", 0)], True),
        ([("extend", 1), ("ack",), ("extend", 1)], False),
    ],
    ids=lambda value: "-".join(one[0] for one in value) if isinstance(value, list) else "",
)
def test_the_last_word_counts(db, methods, dead, atomic):
    Survival(says(*methods), atomic=atomic).check(dead=dead)


@pytest.mark.parametrize("after", ["return", "raise"])
def test_an_ack_in_a_transaction_that_ended(db, after):
    """Acked with the handler's own transaction: it has been handled, and a raise afterwards cannot take it back."""

    def act(delivery):
        with transaction.atomic():
            Effect.objects.create(name="odd")
            delivery.ack()
        if after == "raise":
            raise ValueError("too late")

    Survival(act).check(dead=False)
    assert Effect.objects.filter(name="odd").count() == 1


@pytest.mark.parametrize("atomic", [False, True], ids=["plain", "atomic"])
def test_a_raise_inside_the_transaction_takes_the_ack_back(db, atomic):
    def act(delivery):
        with transaction.atomic():
            Effect.objects.create(name="odd")
            delivery.ack()
            raise ValueError("after the ack")

    Survival(act, atomic=atomic).check(dead=True)
    assert not Effect.objects.filter(name="odd").exists()


def test_an_ack_twice_in_transactions_is_stale(db):
    """The second finds it settled: its transaction rolls back, the first one stays."""

    def act(delivery):
        for name in ("first", "second"):
            with transaction.atomic():
                Effect.objects.create(name=name)
                delivery.ack()

    Survival(act).check(dead=False)
    assert Effect.objects.filter(name="first").count() == 1
    assert not Effect.objects.filter(name="second").exists()


@pytest.mark.parametrize("method", ["ack", "nack", "reject", "snooze"])
def test_a_word_after_the_handler_has_returned_changes_nothing(db, method):
    """A thread that outlives its handler."""
    go, threads = threading.Event(), []
    arguments = {"reject": ["late"], "snooze": [60]}.get(method, [])

    def act(delivery):
        def later():
            go.wait(30)
            getattr(delivery, method)(*arguments)
            if method == "ack":
                with transaction.atomic(), pytest.raises(StaleDelivery):
                    delivery.ack()
                with pytest.raises(StaleDelivery):
                    delivery.extend(10)
            connections.close_all()

        threads.append(threading.Thread(target=later))
        threads[-1].start()

    try:
        Survival(act).check(dead=False)
    finally:
        go.set()
        for thread in threads:
            thread.join(30)
    assert lag() == 0


# -- what they do to the queue's tables ---------------------------------------


def test_a_handler_that_deletes_its_message(db):
    """It was handled; the other groups never see it."""
    Survival(lambda delivery: QueueMessage.objects.filter(offset=delivery.offset).delete()).check(dead=False)


@pytest.mark.parametrize("atomic", [False, True], ids=["plain", "atomic"])
def test_a_handler_that_deletes_its_state(db, atomic):
    """An atomic handler's writes roll back, the deletion with them: a failed attempt. Another's message is settled."""

    def act(delivery):
        Effect.objects.create(name="odd")
        DeliveryState.objects.filter(message_offset=delivery.offset).delete()

    seen = Survival(act, atomic=atomic)
    assert seen.starts == [("odd", 1), ("next", 1), *([("odd", 2)] if atomic else [])]
    assert len(seen.dead) == (1 if atomic else 0)
    assert Effect.objects.filter(name="odd").count() == (0 if atomic else 1)
    assert lag() == 0
    assert not DeliveryState.objects.exists()


def test_a_handler_that_drops_its_group(db):
    """Its subscriber stops working for it; what is there waits for a group that is registered anew."""
    started = []

    def act(delivery):
        started.append(delivery.payload)
        call_command("queuedropgroup", "g", "t", "--noinput", stdout=io.StringIO())

    publish_many("t", [Message(n, key="k") for n in range(3)])
    sub = Sub(handler(function=act), batch_size=1, prefetch=1)
    sub.settle()
    assert started == [0]
    assert not ConsumerGroup.objects.exists()
    assert not DeliveryState.objects.exists()
    got = []
    Sub(handler(function=lambda delivery: got.append(delivery.payload))).settle()
    assert got == [0, 1, 2]


# -- what they do to the process ----------------------------------------------


def test_a_signal_handler_cannot_be_set_on_a_handlers_thread(db):
    """Python allows it in the main thread alone: a failed attempt."""
    seen = Survival(lambda delivery: signal.signal(signal.SIGTERM, signal.SIG_IGN))
    seen.check(dead=True)
    assert "only works in main thread" in seen.dead[0].last_error

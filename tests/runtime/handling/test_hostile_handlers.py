"""What handlers raise, return and say of their delivery: each has a stated outcome."""

from __future__ import annotations

import asyncio
import io
import signal
import sys
import threading

import pytest
from django.core.management import call_command
from django.db import connections, transaction

from django_mysqlqueue import Message, StaleDelivery, publish_many
from django_mysqlqueue.models import ConsumerGroup, DeliveryState, QueueMessage
from tests.app.models import Effect
from tests.support.harness import Sub, handler, lag
from tests.support.internals import ERROR_LENGTH
from tests.support.survival import Survival


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


# -- what they raise ----------------------------------------------------------


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


async def coroutine():
    raise AssertionError("nobody awaits it")


def generator():
    yield 1


async def async_generator():
    yield 1


# -- what they return ---------------------------------------------------------


@pytest.mark.parametrize("value", [0, False, "nack", NotImplemented, ValueError("returned"), object(), [1], {"a": 1}])
def test_what_a_handler_returns_is_ignored(db, value):
    Survival(lambda delivery: value).check(dead=False)


@pytest.mark.parametrize("make", [coroutine, generator, async_generator])
def test_a_body_that_never_ran_is_a_failed_attempt(db, make):
    seen = Survival(lambda delivery: make())
    seen.check(dead=True)
    assert "TypeError" in seen.dead[0].last_error


def says(*methods):
    def act(delivery):
        for method, *arguments in methods:
            getattr(delivery, method)(*arguments)

    return act


# -- what they say of their delivery ------------------------------------------


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
    sub = Sub(handler(function=act), claim_size=1, prefetch=1)
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

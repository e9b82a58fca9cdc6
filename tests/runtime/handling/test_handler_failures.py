"""What a raise means for its message: attempts and the last of them, reject_on, retry_on."""

from __future__ import annotations

import asyncio

import pytest
from django.db import DatabaseError, InterfaceError, OperationalError, connection, connections, transaction
from django.db.transaction import TransactionManagementError

from django_mysqlqueue import Message, StaleDelivery, publish, publish_many, subscriber
from django_mysqlqueue.exceptions import CommitOutcomeUnknown
from django_mysqlqueue.models import DeliveryEvent, DeliveryState, QueueMessage
from tests.app.models import Effect
from tests.support.handlers import both_modes
from tests.support.harness import USING, Sub, handler, in_thread, lag, sequence
from tests.support.internals import registry, settling


class Gone(Exception):
    """Trying again cannot help."""


class Forbidden(Gone):
    pass


class Busy(Exception):
    """Trying again can help."""


def letters(topic="t_dlq"):
    """Payload, attempts and error of each dead letter."""
    sequence()
    rows = QueueMessage.objects.filter(topic=topic).order_by("original_offset")
    return [(bytes(row.payload).decode(), row.failure_count, row.last_error) for row in rows]


def raising(error):
    calls = []

    def handle(delivery):
        calls.append((delivery.payload, delivery.attempt))
        raise error

    return handle, calls


def tried(error, **options):
    """How often the handler is called that raises this, of five times at most."""
    publish("t", 0, key="a")
    handle, calls = raising(error)
    sub = Sub(handler(function=handle, **options))
    sub.settle()
    sub.leave()
    assert lag() == 0
    assert len(letters()) == 1
    return len(calls)


@both_modes
@pytest.mark.parametrize("end", ["raise", "nack"])
def test_the_last_attempt_is_the_one_whose_failure_dead_letters(db, mode, end):
    seen = []

    def handle(delivery):
        seen.append((delivery.attempt, delivery.max_attempts, delivery.is_last_attempt, len(letters())))
        if end == "raise":
            raise ValueError
        delivery.nack()

    publish("t", 0)
    Sub(handler(function=handle, mode=mode, max_attempts=3)).settle()
    assert seen == [(1, 3, False, 0), (2, 3, False, 0), (3, 3, True, 0)]
    assert [attempts for _, attempts, _ in letters()] == [3]


@pytest.mark.usefixtures("no_handlers")
def test_the_setting_of_a_group_decides_which_attempt_is_the_last(db, settings):
    settings.MYSQLQUEUE = {"GROUPS": {"g": {"MAX_ATTEMPTS": 2, "BACKOFF": {"initial": 0}}}}
    seen = []

    @subscriber("t", group="g", max_attempts=9)
    def handle(delivery):
        seen.append((delivery.max_attempts, delivery.is_last_attempt))
        raise ValueError

    publish("t", 0)
    Sub(registry.handlers()[("g", "t")]).settle()
    assert seen == [(2, False), (2, True)]
    assert len(letters()) == 1


@pytest.mark.parametrize(("topic", "limit"), [("t", None), ("t_dlq", 1)])
def test_without_a_limit_and_in_a_dlq_no_attempt_is_the_last(db, topic, limit):
    seen = []

    def handle(delivery):
        seen.append((delivery.max_attempts, delivery.is_last_attempt))
        if delivery.attempt < 8:
            raise ValueError

    publish("t", 0) if topic == "t" else QueueMessage.objects.create(
        topic=topic, partition_key="", message_id="x", payload=b"0", metadata="{}", created_at=1, published_at=1
    )
    Sub(handler(topic, function=handle, max_attempts=limit)).settle()
    assert seen == [(None, False)] * 8
    assert lag(topic=topic) == 0


def test_a_snooze_does_not_bring_the_last_attempt_nearer(db):
    seen = []

    def handle(delivery):
        seen.append(delivery.is_last_attempt)
        if len(seen) < 4:
            delivery.snooze(0)

    publish("t", 0)
    Sub(handler(function=handle, max_attempts=2)).settle()
    assert seen == [False] * 4


def test_a_suspect_on_its_last_attempt_is_told_so(db, clock):
    """Its start is on record: lost once more, it is dead-lettered."""
    seen = []
    publish("t", 0)
    for _ in range(3):
        sub = Sub(handler(function=lambda delivery: None, max_attempts=2))
        sub.step()
        held = sub.take()
        if held is None:
            break
        if held.claimed.suspect:
            settling.record_start(USING, held.claimed)
        seen.append((held.claimed.attempt, _of(held).is_last_attempt))
        clock.advance(3600)
    assert seen == [(1, False), (1, False), (2, True)]
    sub = Sub(handler(max_attempts=2))
    sub.settle()
    assert [attempts for _, attempts, _ in letters()] == [2]


def _of(held):
    from django_mysqlqueue.subscriptions.delivery import Delivery

    return Delivery(held.handler, held.claimed, held.body, USING)


def test_each_delivery_of_a_batch_knows_its_own_attempts(db):
    seen = []

    def handle(deliveries):
        seen.append([(one.payload, one.attempt, one.max_attempts, one.is_last_attempt) for one in deliveries])
        raise ValueError

    publish_many("t", [Message(n, key="a") for n in range(2)])
    Sub(handler(function=handle, batch=True, batch_size=10, max_attempts=2)).settle()
    assert seen == [[(0, 1, 2, False), (1, 1, 2, False)], [(0, 2, 2, True)], [(1, 2, 2, True)]]


@both_modes
@pytest.mark.parametrize("atomic", [False, True])
@pytest.mark.parametrize("options", [{"reject_on": (Gone,)}, {"retry_on": (Busy,)}])
def test_what_is_not_retried_is_dead_lettered_at_once(db, mode, atomic, options):
    def handle(delivery):
        Effect.objects.create(name="half")
        raise Forbidden("no such order")

    publish("t", 0)
    sub = Sub(handler(function=handle, mode=mode, atomic=atomic, **options))
    assert sub.settle() == 1
    ((payload, attempts, error),) = letters()
    assert (payload, attempts) == ("0", 1)
    assert error.startswith("Traceback")
    assert error.rstrip().endswith("Forbidden: no such order")
    assert Effect.objects.count() == (0 if atomic else 1)
    assert not DeliveryState.objects.exists()
    assert [(one.outcome, one.attempt) for one in DeliveryEvent.objects.all()] == [("dead_lettered", 1)]


@pytest.mark.parametrize(
    ("options", "calls"),
    [
        ({}, 5),
        ({"reject_on": (KeyError,)}, 5),
        ({"reject_on": (Exception,)}, 1),
        ({"reject_on": (KeyError, Gone)}, 1),
        ({"retry_on": (Gone,)}, 5),
        ({"retry_on": (KeyError,)}, 1),
        ({"retry_on": (Gone,), "reject_on": (Forbidden,)}, 1),
        ({"retry_on": (Forbidden,), "reject_on": (Gone,)}, 1),  # reject_on is checked first
        ({"retry_on": (Forbidden,), "reject_on": (KeyError,)}, 5),
    ],
)
def test_which_exceptions_are_retried(db, options, calls):
    assert tried(Forbidden("no"), **options) == calls


def test_a_retried_exception_still_ends_after_its_attempts(db):
    assert tried(Busy(), retry_on=(Busy,), max_attempts=2) == 2


def from_(error, cause):
    error.__cause__ = cause
    return error


def own_cause():
    error = Gone()
    error.__cause__ = error
    return error


@pytest.mark.parametrize(
    ("error", "calls"),
    [
        (OperationalError(2013, "Lost connection"), 5),
        (InterfaceError(0, ""), 5),
        (CommitOutcomeUnknown("?"), 5),
        (StaleDelivery("?"), 5),
        (from_(Gone(), OperationalError(1205, "Lock wait timeout")), 5),
        (from_(TransactionManagementError(), OperationalError(1213, "Deadlock")), 5),
        (from_(Gone(), from_(KeyError(), InterfaceError())), 5),
        (from_(Gone(), ExceptionGroup("", [KeyError(), OperationalError()])), 5),
        (SystemExit(3), 5),
        (KeyboardInterrupt(), 5),
        (GeneratorExit(), 5),
        (asyncio.CancelledError(), 5),
        (DatabaseError("1062"), 1),
        (from_(Gone(), KeyError()), 1),
        (own_cause(), 1),
        (ExceptionGroup("all", [Gone(), ExceptionGroup("in it", [Forbidden()])]), 1),
        (ExceptionGroup("some", [Gone(), ExceptionGroup("in it", [Busy()])]), 5),
        (ExceptionGroup("database", [Gone(), OperationalError()]), 5),
        (BaseExceptionGroup("cancelled", [Gone(), asyncio.CancelledError()]), 5),
        (from_(ExceptionGroup("all", [Gone()]), OperationalError()), 5),
    ],
    ids=lambda value: repr(value)[:50],
)
@pytest.mark.parametrize("rule", ["reject_on", "retry_on"])
def test_what_says_nothing_about_the_message_is_retried(db, error, calls, rule):
    """A lost connection must not cost a message its attempts at once, however broad the rule is."""
    options = {"reject_on": (Gone, DatabaseError)} if rule == "reject_on" else {"retry_on": (Busy,)}
    assert tried(error, **options) == calls


@pytest.mark.servers_only
@pytest.mark.parametrize("atomic", [False, True])
def test_a_connection_that_is_lost_in_a_handler_is_retried(db, atomic):
    calls = []

    def handle(delivery):
        calls.append(delivery.attempt)
        if delivery.attempt == 1:
            with connection.cursor() as cursor:
                cursor.execute("SELECT CONNECTION_ID()")
                (number,) = cursor.fetchone()
                in_thread(lambda: kill(number))
                cursor.execute("SELECT 1")

    def kill(number):
        with connections[USING].cursor() as cursor:
            cursor.execute(f"KILL {number}")

    publish("t", 0)
    sub = Sub(handler(function=handle, atomic=atomic, retry_on=(Busy,)))
    sub.step()
    held = sub.take()
    in_thread(lambda: sub.run(held))
    sub.settle()
    assert calls == [1, 2]
    assert letters() == []


def test_in_a_dlq_a_rejecting_raise_is_a_nack(db):
    publish("t", 0)
    sub = Sub(handler(function=raising(Gone())[0], max_attempts=1))
    sub.settle()
    sub.leave()
    assert len(letters()) == 1
    seen = []

    def read(delivery):
        seen.append(delivery.attempt)
        if delivery.attempt < 8:
            raise Gone

    Sub(handler("t_dlq", "alarm", read, reject_on=(Gone,))).settle()
    assert seen == list(range(1, 9))
    assert len(letters()) == 1
    assert letters("t_dlq_dlq") == []


@pytest.mark.promise("Batches")
@both_modes
def test_a_raise_in_a_batch_rejects_nobody_until_each_is_alone(db, mode):
    """Its innocent neighbours would be dead letters with it."""
    got = []

    def handle(deliveries):
        got.append([delivery.payload for delivery in deliveries])
        if any(delivery.payload == 2 for delivery in deliveries):
            raise Gone("two")

    publish_many("t", [Message(n, key="a") for n in range(4)])
    Sub(handler(function=handle, mode=mode, batch=True, batch_size=10, reject_on=(Gone,))).settle()
    assert got[0] == [0, 1, 2, 3]
    assert sorted(got[1:]) == [[0], [1], [2], [3]]
    assert [(payload, attempts) for payload, attempts, _ in letters()] == [("2", 2)]
    assert lag() == 0


def test_a_batch_of_one_is_alone(db):
    def handle(deliveries):
        raise Gone

    publish("t", 0)
    assert Sub(handler(function=handle, batch=True, batch_size=10, reject_on=(Gone,))).settle() == 1
    assert [attempts for _, attempts, _ in letters()] == [1]


def test_under_strict_order_what_is_behind_goes_on_at_once(db):
    got = []

    def handle(delivery):
        got.append(delivery.payload)
        if delivery.payload == 0:
            raise Gone

    publish_many("t", [Message(n, key="a") for n in range(3)])
    Sub(handler(function=handle, on_failure="block", reject_on=(Gone,))).settle()
    assert got == [0, 1, 2]
    assert [payload for payload, _, _ in letters()] == ["0"]


def test_an_early_ack_stays_whatever_is_raised_later(db):
    def handle(delivery):
        with transaction.atomic():
            delivery.ack()
        raise Gone

    publish("t", 0)
    Sub(handler(function=handle, reject_on=(Gone,))).settle()
    assert letters() == []
    assert lag() == 0


@pytest.mark.usefixtures("no_handlers")
def test_the_decorators_classes_reach_the_handler():
    @subscriber("t", group="g", reject_on=Gone, retry_on=[Busy, OSError])
    def handle(delivery): ...

    found = registry.handlers()[("g", "t")]
    assert (found.reject_on, found.retry_on) == ((Gone,), (Busy, OSError))


def test_an_exception_that_cannot_be_shown_is_a_failed_attempt(db):
    class Unshowable(Exception):
        def __str__(self):
            return self.args[1]

    def fail(delivery):
        raise Unshowable("x")

    publish("t", 1)
    Sub(handler(function=fail, max_attempts=1)).settle()
    sequence()
    assert "Unshowable" in QueueMessage.objects.get(topic="t_dlq").last_error

"""Expiry: messages whose handling does not start after a time."""

from __future__ import annotations

import datetime
import json
import time
from types import SimpleNamespace

import pytest
from django.db import connections
from django.test import override_settings

from django_mysqlqueue import InvalidMessage, Message, operations, publish, publish_many, signals, subscriber
from django_mysqlqueue.db.sizes import LATEST_DELIVERY
from django_mysqlqueue.filter_policies import parse
from django_mysqlqueue.models import DeliveryEvent, DeliveryState, OutboxMessage, QueueMessage, Rollup
from django_mysqlqueue.options.delivery_limits import parse_rate
from django_mysqlqueue.testing import deliver_all, delivery, published
from tests.support.harness import USING, Sub, expire, handler, lag, sequence
from tests.support.internals import (
    GroupRef,
    Session,
    call,
    new_messages,
    rollups,
)
from tests.support.registered import handle

pytestmark = pytest.mark.promise("Expiry")

MODES = pytest.mark.parametrize("mode", ["ordered", "shared"])
NOW = datetime.datetime.now(datetime.UTC)
PAST, FUTURE = NOW - datetime.timedelta(hours=1), NOW + datetime.timedelta(days=1)


def getting(got, **options):
    return handler(function=lambda delivery: got.append(delivery.payload), **options)


# -- the start ----------------------------------------------------------------


@MODES
def test_expired_messages_are_not_handled(db, mode):
    got = []
    sub = Sub(getting(got, mode=mode))
    publish("t", "expired", key="k", expires_at=PAST)
    publish("t", "later", key="k", expires_at=FUTURE)
    publish("t", "soon", key="k", expires_in=3600)
    publish("t", "never", key="k")
    sub.settle()
    assert got == ["later", "soon", "never"]
    assert lag() == 0
    assert not DeliveryState.objects.exists()
    assert sub.inbox.passed_counts("expired") == {GroupRef("g", "t"): 1}
    assert not OutboxMessage.objects.exists()


@MODES
def test_expiry_is_judged_at_the_start(db, mode):
    """Not at the claim: a message may wait in the process for a while."""
    got = []
    sub = Sub(getting(got, mode=mode))
    publish_many("t", [Message(n, key="k", expires_in=3600) for n in range(3)])
    sub.step()
    assert sub.work(1) == 1
    expire(sub)
    sub.settle()
    assert got == [0]
    assert lag() == 0


@MODES
def test_the_time_is_that_of_the_database_and_the_monotonic_clock(db, mode, clock):
    got = []
    sub = Sub(getting(got, mode=mode))
    publish("t", 1, key="k", expires_in=0.3)
    sub.step()
    time.sleep(0.35)
    sub.settle()
    assert got == []
    publish("t", 2, key="k", expires_in=600)
    publish("t", 3, key="k", expires_in=500)
    sequence()
    clock.advance(550)
    sub.settle()
    assert got == [2]


def test_expires_in_counts_from_the_databases_time_of_the_publish(db):
    publish("t", 1, key="k", expires_in=datetime.timedelta(minutes=1))
    sequence()
    row = QueueMessage.objects.get()
    assert row.expires_at == row.created_at + 60_000


@MODES
def test_a_running_handler_is_not_interrupted(clock, mode):
    got = []

    def slow(delivery):
        clock.advance(2)
        expire_running(sub)
        got.append(delivery.payload)

    sub = Sub(handler(function=slow, mode=mode))
    publish("t", 1, key="k", expires_in=1)
    sub.settle()
    assert got == [1]


def test_a_handler_sees_when_its_message_expires(db):
    seen = []
    sub = Sub(handler(function=lambda delivery: seen.append((delivery.expires_at, delivery.metadata))))
    publish("t", 1, key="k", expires_at=FUTURE, metadata={"a": 1})
    publish("t", 1, key="k")
    sub.settle()
    at = FUTURE.replace(microsecond=FUTURE.microsecond // 1000 * 1000)
    assert seen == [
        (at, {"a": 1, "content_type": "application/json"}),
        (None, {"content_type": "application/json"}),
    ]


@MODES
@pytest.mark.parametrize("outcome", ["nack", "snooze"])
def test_a_retry_does_not_wait_for_longer_than_until_the_expiry(db, mode, outcome):
    sub = Sub(handler(function=lambda delivery: getattr(delivery, outcome)(3600), mode=mode))
    publish("t", 1, key="k", expires_in=600)
    sub.step()
    sub.work()
    sub.flush()
    row = DeliveryState.objects.get()
    expires = QueueMessage.objects.get().expires_at
    assert expires - 1000 < row.invisible_until <= expires + 1000


@MODES
def test_a_message_that_expires_while_it_waits_for_a_retry_is_settled(db, mode, clock):
    got = []

    def fail(delivery):
        got.append(delivery.attempt)
        raise ValueError

    sub = Sub(handler(function=fail, mode=mode, max_attempts=None))
    publish("t", 1, key="k", expires_in=60)
    sub.step()
    sub.work()
    sub.flush()
    clock.advance(61)
    sub.settle()
    assert got == [1]
    assert lag() == 0


def test_in_strict_order_an_expired_head_counts_as_ended(db, clock):
    got = []

    def fail_first(delivery):
        got.append(delivery.payload)
        if delivery.payload == "head":
            delivery.nack(1800)

    sub = Sub(handler(function=fail_first, on_failure="block"))
    publish("t", "head", key="k", expires_in=600)
    publish("t", "next", key="k")
    sub.settle()
    assert got == ["head"]
    clock.advance(601)
    sub.settle()
    assert got == ["head", "next"]


def test_only_the_live_messages_of_a_batch_are_handled(db):
    got = []
    sub = Sub(handler(function=lambda batch: got.append([one.payload for one in batch]), batch=True, batch_size=9))
    publish_many("t", [Message(n, key="k", expires_in=600 if n % 2 else None) for n in range(5)])
    sub.step()
    expire(sub)
    sub.settle()
    assert got == [[0, 2, 4]]
    assert lag() == 0
    publish_many("t", [Message(n, key="k", expires_in=600) for n in range(5)])
    sub.step()
    expire(sub)
    sub.settle()
    assert len(got) == 1
    assert lag() == 0


def test_the_writes_of_an_atomic_batch_do_not_settle_expired_messages(db):
    sub = Sub(handler(function=lambda batch: None, batch=True, batch_size=9, atomic=True, on_expiry="dead_letter"))
    publish_many("t", [Message(n, key="k", expires_in=600 if n else None) for n in range(2)])
    sub.step()
    expire(sub)
    sub.settle()
    sequence()
    assert QueueMessage.objects.get(topic="t_dlq").last_error.startswith("The message expired")


def test_a_message_that_expires_while_connections_are_opened_does_not_start(db, monkeypatch):
    got = []
    sub = Sub(getting(got))
    publish("t", 1, key="k", expires_in=600)
    monkeypatch.setattr(call, "_prepare", lambda *given: expire_running(sub))
    sub.step()
    sub.work()
    assert got == []
    sub.flush()
    assert DeliveryState.objects.get().retry_count == 0


def expire_running(sub):
    for held in sub.inbox._running:
        held.expires = time.monotonic()


def test_a_message_that_expires_while_its_transaction_is_opened_does_not_start(db, monkeypatch):
    got = []
    sub = Sub(getting(got, atomic=True))
    publish("t", 1, key="k", expires_in=600)
    begin = call._begin

    def begin_in_an_hour(*args):
        monkeypatch.setattr(call, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + 3600))
        begin(*args)

    monkeypatch.setattr(call, "_begin", begin_in_an_hour)
    sub.step()
    sub.work()
    sub.flush()
    assert got == []
    assert DeliveryState.objects.get().retry_count == 0


def test_a_suspected_poison_message_that_expires_lets_the_next_one_start(db, clock):
    first = Sub(handler(mode="shared"))
    publish_many("t", [Message(n, key=f"k{n}", expires_in=600) for n in range(2)])
    first.step()
    got = []
    clock.advance(120)
    sub = Sub(getting(got, mode="shared"))
    sub.step()
    while (held := sub.take()) is not None:
        held.expires = 0.0
        sub.run(held)
        sub.flush()
        sub.step()
    assert got == []
    assert lag() == 0


def test_an_expired_message_returns_its_slot(db):
    sub = Sub(handler(mode="shared", max_in_flight=1), threads=9)
    publish_many("t", [Message(n, key="k", expires_in=600) for n in range(3)])
    for _ in range(3):
        sub.step()
        expire(sub)
        sub.work()
        sub.flush()
    sub.settle()
    assert lag() == 0
    assert sub.inbox.passed_counts("expired")[GroupRef("g", "t")] == 3


@pytest.mark.parametrize("on_expiry", ["skip", "dead_letter"])
def test_expired_messages_do_not_use_up_the_rate(still, on_expiry):
    """If they expire after the claim has reserved their slots."""
    sub = Sub(handler(mode="shared", rate=parse_rate("2/h"), burst=2, on_expiry=on_expiry), threads=9)
    publish_many("t", [Message(n, key="k", expires_in=600) for n in range(2)])
    sub.step()
    expire(sub)
    assert sub.work() == 2
    returned = sub.inbox.take_returned(GroupRef("g", "t"))
    assert [one.number for one in returned.values()] == [2]
    sub.inbox.put_back_returned(GroupRef("g", "t"), returned)
    sub.flush()
    (group,) = sub.poller.groups
    assert group.counts.read().failed == 0


def test_expired_messages_of_a_batch_have_no_handler_time(db, settings):
    settings.MYSQLQUEUE = {"RECORD_DELIVERIES": "all"}
    sub = Sub(handler(function=lambda batch: time.sleep(0.05), batch=True, batch_size=9))
    publish_many("t", [Message(n, key="k", expires_at=PAST if n else None) for n in range(2)])
    sub.settle()
    assert {one.outcome: one.handled_ms >= 50 for one in DeliveryEvent.objects.all()} == {
        "acked": True,
        "expired": False,
    }
    assert DeliveryEvent.objects.get(outcome="expired").handled_ms == 0


# -- dead letters -------------------------------------------------------------


@pytest.mark.parametrize(("on_expiry", "expected"), [("skip", []), ("dead_letter", [("dead_lettered", 0.0)])])
def test_a_signal_is_sent_for_expired_messages_that_are_dead_lettered(db, on_expiry, expected):
    told = []

    def note(outcome, seconds, **kwargs):
        told.append((outcome, seconds))

    signals.delivery_settled.connect(note)
    try:
        sub = Sub(handler(on_expiry=on_expiry))
        publish("t", 1, key="k", expires_at=PAST)
        sub.settle()
    finally:
        signals.delivery_settled.disconnect(note)
    assert told == expected


@MODES
def test_expired_messages_can_be_dead_lettered(db, mode):
    got = []
    sub = Sub(getting(got, mode=mode, on_expiry="dead_letter"))
    publish_many("t", [Message(n, key="k", expires_at=PAST) for n in range(3)])
    sub.settle()
    assert got == []
    sequence()
    letters = list(QueueMessage.objects.filter(topic="t_dlq"))
    assert [letter.failure_count for letter in letters] == [0, 0, 0]
    assert letters[0].last_error.startswith("The message expired at 20")
    assert letters[0].last_error.endswith("+00:00, before attempt 1 had started.")


@MODES
def test_dead_letters_and_redriven_messages_do_not_expire(db, clock, mode):
    got = []

    def reject(delivery):
        got.append(delivery.expires_at)
        if len(got) == 1:
            delivery.reject("no")

    dead = []
    sub = Sub(handler(function=reject, mode=mode), getting(dead, topic="t_dlq", group="d", on_expiry="dead_letter"))
    publish("t", 1, key="k", expires_in=20)
    sub.settle()
    clock.advance(21)
    sub.settle()
    assert dead == [1]
    operations.redrive("t", actor="ops")
    sub.settle()
    assert got[1:] == [None]


def test_edited_dead_letters_do_not_expire(db):
    got = []
    sub = Sub(getting(got, on_expiry="dead_letter"))
    publish("t", 1, key="k", expires_at=PAST)
    sub.settle()
    sequence()
    letter = QueueMessage.objects.get(topic="t_dlq")
    operations.edit("t", 2, offset=letter.offset, actor="ops")
    sub.settle()
    assert got == [2]


# -- a backlog of expired messages ---------------------------------------------


@MODES
def test_a_backlog_of_expired_messages_is_passed_in_claims(db, mode):
    sub = Sub(handler(mode=mode))
    publish_many("t", [Message(n, key="k", expires_at=PAST) for n in range(2000)])
    publish("t", "live", key="k")
    sequence()
    assert sub.settle() == 1
    assert lag() == 0
    assert sub.inbox.passed_counts("expired") == {GroupRef("g", "t"): 2000}
    (group,) = sub.poller.groups
    rollups.add(USING, {GroupRef("g", "t"): group.counts.read()})
    assert set(Rollup.objects.values_list("acked", "expired")) == {(1, 2000)}


@MODES
def test_claims_get_no_metadata_to_pass_messages(db, mode, monkeypatch):
    found = []
    look = new_messages._look

    def looks(taking, places):
        rows = look(taking, places)
        found.extend(row for of_key in rows.values() for row in of_key)
        return rows

    monkeypatch.setattr(new_messages, "_look", looks)
    sub = Sub(handler(mode=mode))
    publish("t", 1, key="k", metadata={"expires_at": 1})
    publish("t", 2, key="k", expires_in=600)
    publish("t", 3, key="k", expires_at=FUTURE)
    sub.settle()
    assert [(row.metadata, row.expires_at is None) for row in found] == [("", True), ("", False), ("", False)]


def test_a_filter_and_expiry_work_together(db):
    got = []
    sub = Sub(getting(got, filter=parse({"region": ["eu"]})))
    publish_many(
        "t",
        [
            Message(n, key="k", expires_at=PAST if n % 3 else None, metadata={"region": "eu" if n % 2 else "us"})
            for n in range(300)
        ],
    )
    sub.settle()
    assert got == [n for n in range(300) if n % 2 and not n % 3]


# -- records ------------------------------------------------------------------


@MODES
@pytest.mark.parametrize(("level", "number"), [("all", 200), ("failures", 0), ("none", 0)])
def test_expired_messages_are_recorded_as_acks_are(db, mode, level, number):
    with override_settings(MYSQLQUEUE={"RECORD_DELIVERIES": level}):
        sub = Sub(handler(mode=mode))
        publish_many("t", [Message(n, key="k", expires_at=PAST) for n in range(200)])
        sub.settle()
    assert DeliveryEvent.objects.filter(outcome="expired").count() == number
    assert DeliveryEvent.objects.count() == number


# -- what publish() and plain SQL may say ---------------------------------------


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"expires_in": -1}, "expires_in -1: must be a timedelta or seconds, from 0 to"),
        ({"expires_in": 0}, "expires_in 0: must be at least a millisecond"),
        ({"expires_in": "5"}, "expires_in '5': must be a timedelta or seconds"),
        ({"expires_in": True}, "expires_in True: must be a timedelta or seconds"),
        ({"expires_in": 10**12}, "must be a timedelta or seconds, from 0 to 3162240000 (36600 days)"),
        ({"expires_in": 5, "delay": 5}, "expires_in 5: must be longer than the delay 5"),
        ({"expires_at": 5}, "expires_at 5: must be a datetime"),
        ({"expires_at": datetime.datetime(2030, 1, 1)}, "must be aware because USE_TZ is True"),  # noqa: DTZ001
        ({"expires_at": NOW, "deliver_at": NOW}, "must be after deliver_at"),
        ({"expires_at": NOW, "expires_in": 5}, "expires_at and expires_in were both given: pass one of them"),
    ],
)
def test_wrong_values_are_refused(db, given, says):
    with pytest.raises(InvalidMessage) as caught:
        publish("t", 1, key="k", **given)
    assert says in str(caught.value)
    with pytest.raises(InvalidMessage):
        publish_many("t", [Message(0), Message(1, **given)])
    assert not OutboxMessage.objects.exists()


@pytest.mark.parametrize("on_expiry", ["skip", "dead_letter"])
@MODES
def test_the_first_and_the_last_time_of_plain_sql(db, mode, on_expiry):
    got = []
    sub = Sub(handler(function=lambda one: got.append((one.payload, one.expires_at)), mode=mode, on_expiry=on_expiry))
    for value in (1, LATEST_DELIVERY):
        insert(value, value)
    sub.settle()
    assert got == [(LATEST_DELIVERY, datetime.datetime(9999, 12, 31, 23, 59, 59, tzinfo=datetime.UTC))]
    assert lag() == 0
    sequence()
    errors = [one.last_error for one in QueueMessage.objects.filter(topic="t_dlq")]
    assert len(errors) == (0 if on_expiry == "skip" else 1)
    assert all(error.startswith("The message expired at 19") for error in errors)


def insert(payload, expires_at):
    """Publishes as plain SQL does."""
    with connections[USING].cursor() as cursor:
        cursor.execute(
            "INSERT INTO queue_outbox (topic, partition_key, payload, expires_at) VALUES ('t', 'k', %s, %s)",
            [str(payload).encode(), expires_at],
        )


@MODES
def test_metadata_that_python_cannot_decode_stops_no_subscriber(db, mode, engine):
    if engine == "mysql":
        pytest.skip("MySQL refuses such a number")
    got = []
    sub = Sub(getting(got, mode=mode), getting([], group="f", mode=mode, filter=parse({"region": ["eu"]})))
    text = json.dumps({"a": 7}).replace("7", "1" * 5000)
    publish("t", 1, key="k")
    sequence()
    with connections[USING].cursor() as cursor:
        cursor.execute("UPDATE queue_messages SET metadata = %s", [text])
    sub.settle()
    assert got == [1]
    assert lag() == lag("f") == 0


@MODES
def test_plain_sql_may_publish_with_an_expiry(db, mode):
    got = []
    sub = Sub(getting(got, mode=mode))
    insert("1", 5)
    insert("2", Session(USING).now() + 3_600_000)
    insert("3", None)
    sub.settle()
    assert got == [2, 3]


def test_the_setting_may_dead_letter_expired_messages(settings, no_handlers):
    settings.MYSQLQUEUE = {"GROUPS": {"g": {"ON_EXPIRY": "dead_letter"}}}
    subscriber("t", group="g")(handle)


# -- tests of a project -------------------------------------------------------


def test_deliver_all_honours_expiry(db, no_handlers):
    subscriber("t", group="g")(handle)
    publish_many("t", [Message(n, key="k", expires_at=PAST if n < 150 else None) for n in range(151)])
    outcomes = [one.outcome for one in deliver_all()]
    assert outcomes == ["expired"] * 150 + ["acked"]


def test_deliver_all_lets_messages_expire_when_it_advances(db, no_handlers):
    subscriber("t", group="g")(handle)
    publish("t", 1, key="k", expires_in=600, delay=60)
    publish("t", 2, key="k", expires_at=datetime.datetime.now(datetime.UTC) + datetime.timedelta(minutes=10))
    publish("t", 3, key="k", expires_in=7200, delay=60)
    assert [(one.payload, one.outcome) for one in deliver_all(advance=700)] == [
        (2, "expired"),
        (1, "expired"),
        (3, "acked"),
    ]


def test_tests_see_when_a_message_expires(db):
    publish("t", 1, key="k", expires_at=PAST)
    publish("t", 2, key="k")
    first, second = published("t")
    assert abs(first.expires_at - PAST) < datetime.timedelta(milliseconds=1)
    assert second.expires_at is None
    one = delivery(1, topic="t", group="g", expires_at=FUTURE)
    assert abs(one.expires_at - FUTURE) < datetime.timedelta(milliseconds=1)

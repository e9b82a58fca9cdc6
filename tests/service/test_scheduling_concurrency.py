"""Cancelling and rescheduling beside a sequencer at work."""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager

import pytest
from django.db import OperationalError, connection, transaction
from django.test.utils import CaptureQueriesContext

from django_mysqlqueue import Message, cancel, publish, publish_many, reschedule
from django_mysqlqueue.exceptions import OperationRefused
from django_mysqlqueue.inspection import StallTimes, check_health
from django_mysqlqueue.models import Operation, OutboxMessage
from django_mysqlqueue.operations import scheduled
from tests.support.harness import USING, Sub, handler, in_thread, sequence
from tests.support.internals import Session, sequencing
from tests.support.scheduled import due, in_log, waiting

CHANGES = {
    "cancel": lambda: cancel("x", topic="t"),
    "reschedule": lambda: reschedule("x", topic="t", delay=3600),
}


@contextmanager
def elsewhere(change, *, isolation="READ COMMITTED", commit):
    """Another connection's transaction that has made a change, and ends it when the block does."""
    made, end = threading.Event(), threading.Event()
    result = []

    def work():
        with connection.cursor() as cursor:
            cursor.execute(f"SET SESSION TRANSACTION ISOLATION LEVEL {isolation}")
        with transaction.atomic():
            result.append(change())
            made.set()
            assert end.wait(30)
            transaction.set_rollback(not commit)

    def target():
        try:
            in_thread(work)
        except BaseException as error:
            result.append(error)
        finally:
            made.set()

    thread = threading.Thread(target=target)
    thread.start()
    try:
        assert made.wait(30)
        assert result == [1]
        yield
    finally:
        end.set()
        thread.join()
    assert result == [1], result


ISOLATIONS = ("READ COMMITTED", "REPEATABLE READ")


def soon(*ids, milliseconds=1500):
    """They come due in a moment."""
    OutboxMessage.objects.filter(message_id__in=ids).update(deliver_at=Session(USING).now() + milliseconds)


def until_due(clock, *ids):
    last = max(OutboxMessage.objects.filter(message_id__in=ids).values_list("deliver_at", flat=True))
    clock.advance((last - Session(USING).now()) / 1000 + 0.01)


@pytest.mark.promise("Cancelling")
@pytest.mark.servers_only
@pytest.mark.parametrize("isolation", ISOLATIONS)
@pytest.mark.parametrize("commit", [True, False])
@pytest.mark.parametrize("change", CHANGES)
def test_an_open_change_delays_its_own_message_alone(clock, change, commit, isolation):
    for name in ("x", "before", "after"):
        publish("t", name, id=name, key="k", delay=1000)
    soon("before", "x", "after")
    with elsewhere(CHANGES[change], isolation=isolation, commit=commit):
        until_due(clock, "before", "x", "after")
        publish("t", 1, id="at once")  # no gap is locked
        done = sequencing.sequence(USING)
        assert (done.moved, done.more, done.busy) == (3, False, False)
        assert in_log() == ["at once", "before", "after"]
        assert sequencing.sequence(USING) == sequencing.Sequenced(0, more=False)
    done = sequencing.sequence(USING)
    assert done.moved == (0 if commit else 1)
    assert in_log() == ["at once", "before", "after"] + ([] if commit else ["x"])
    assert waiting() == (["x"] if commit and change == "reschedule" else [])


@pytest.mark.promise("Cancelling")
@pytest.mark.servers_only
@pytest.mark.parametrize("change", CHANGES)
def test_a_message_that_is_being_sequenced_cannot_be_changed(db, change):
    """The change waits for the pass, which is short, and finds the message gone."""
    publish("t", 1, id="x", delay=1000)
    results = []
    with transaction.atomic():
        due("x")
        assert sequencing.sequence(USING).moved == 1
        thread = threading.Thread(target=lambda: results.append(in_thread(CHANGES[change])))
        thread.start()
        time.sleep(0.3)
    thread.join()
    assert results == [0]
    assert in_log() == ["x"]


@pytest.mark.servers_only
def test_of_two_cancels_one_succeeds(db):
    publish("t", 1, id="x", delay=1000)
    results = []
    with transaction.atomic():
        assert cancel("x", topic="t") == 1
        thread = threading.Thread(target=lambda: results.append(in_thread(CHANGES["cancel"])))
        thread.start()
        time.sleep(0.3)
        assert not results  # it waits: the first may still roll back
    thread.join()
    assert results == [0]


@pytest.mark.promise("Cancelling")
@pytest.mark.servers_only
@pytest.mark.parametrize("isolation", ISOLATIONS)
def test_a_change_that_finds_its_message_gone_holds_up_no_publisher(db, isolation):
    """Of a row that is not there, InnoDB would lock the gap: the end of the outbox, where publishers insert."""
    publish("t", 1, id="x", delay=1000)

    def work():
        with connection.cursor() as cursor:
            cursor.execute(f"SET SESSION TRANSACTION ISOLATION LEVEL {isolation}")
            if connection.mysql_is_mariadb:
                cursor.execute("SET SESSION innodb_snapshot_isolation = OFF")
        with transaction.atomic():
            assert OutboxMessage.objects.count() == 1  # a snapshot, where the isolation level keeps one
            in_thread(
                lambda: scheduled.change_rows(USING, [OutboxMessage.objects.get().pk], scheduled.NOW, actor="test")
            )
            in_thread(sequence)
            found = cancel("x", topic="t")

            def impatient():
                with connection.cursor() as cursor:
                    cursor.execute("SET SESSION innodb_lock_wait_timeout = 1")
                publish("t", 2, id="y")
                publish("t", 2, id="z", delay=1000)
                return sequencing.sequence(USING).moved

            return found, in_thread(impatient)

    assert in_thread(work) == (0, 1)
    assert in_log() == ["x", "y"]


@pytest.mark.promise("Cancelling")
@pytest.mark.servers_only
def test_a_bulk_of_open_cancels_holds_up_nothing_behind_it(clock):
    doomed = [f"c{number}" for number in range(30)]
    publish_many("t", [Message(1, id=name, delay=1000) for name in (*doomed, "y", "z")])
    soon(*doomed, "y", "z", milliseconds=4000)
    with elsewhere(lambda: sum(cancel(name, topic="t") for name in doomed) // 30, commit=True):
        until_due(clock, *doomed, "y", "z")
        assert sequencing.sequence(USING, max_rows=4) == sequencing.Sequenced(2, more=False)
        assert in_log() == ["y", "z"]
        publish_many("t", [Message(1, id=f"y{number}", delay=0.001) for number in range(6)])
        until_due(clock, "y5")
        passes = [sequencing.sequence(USING, max_rows=4) for _ in range(3)]
        assert [(one.moved, one.more) for one in passes] == [(4, True), (2, False), (0, False)]
    assert waiting() == []


@pytest.mark.servers_only
def test_subscribers_do_not_poll_for_a_message_whose_cancel_is_open(clock):
    """It is due and stays: they would come again at once, and again."""
    publish("t", 1, id="x", delay=1000)
    publish("t", 1, id="later", delay=500)
    soon("x")
    sub = Sub(handler(), poll_interval=3600.0, max_poll_interval=3600.0)
    sub.step()
    with elsewhere(CHANGES["cancel"], commit=False):
        until_due(clock, "x")
        sub.step()
        later = OutboxMessage.objects.get(message_id="later").deliver_at
        assert sub.poller.next_deliver_at == later
        with CaptureQueriesContext(connection) as captured:
            sub.poller.step()
        assert not [query["sql"] for query in captured if "queue_outbox" in query["sql"]]
    sub.settle()
    assert in_log() == ["x"]


@pytest.mark.servers_only
def test_an_open_cancel_is_not_taken_for_a_missing_sequencer(clock):
    """On an idle queue all that is due may be locked: it is no outbox that nobody sequences."""
    publish("t", 1, id="x", delay=1000)
    soon("x")
    sub = Sub(handler())
    sub.step()
    with elsewhere(CHANGES["cancel"], commit=False):
        until_due(clock, "x")
        clock.advance(1)
        sub.step()
        sub.heart.beat()
        found = check_health(using=USING, stall_times=StallTimes(outbox=0.5))
        assert not found.findings
        assert [note.kind for note in found.notes] == ["outbox_behind"]
    sub.leave()


@pytest.mark.servers_only
def test_an_operator_does_not_wait_for_an_open_cancel(db):
    publish_many("t", [Message(1, id=name, delay=1000) for name in "xy"])
    rows = list(OutboxMessage.objects.values_list("pk", flat=True))
    with elsewhere(CHANGES["cancel"], commit=False):
        began = time.monotonic()
        assert scheduled.change_rows(USING, rows, scheduled.NOW, actor="test", topic="t") == 1
        assert scheduled.change_rows(USING, rows, scheduled.CANCEL, actor="test") == 0
        assert time.monotonic() - began < 10
    assert list(Operation.objects.values_list("action", "topic", "changed")) == [("deliver now", "t", 1)]
    assert scheduled.change_rows(USING, rows, scheduled.CANCEL, actor="test") == 1


@pytest.mark.servers_only
def test_a_rescheduled_message_is_not_taken_by_a_pass_that_read_it_before(db, monkeypatch):
    publish_many("t", [Message(1, id=name, delay=1000) for name in "xy"])
    due("x", "y")
    lock = sequencing.lock_scheduled

    def late(session, ids, **options):
        later = Session(USING).now() + 10**6
        in_thread(lambda: OutboxMessage.objects.filter(message_id="x").update(deliver_at=later))
        return lock(session, ids, **options)

    monkeypatch.setattr(sequencing, "lock_scheduled", late)
    assert sequencing.sequence(USING).moved == 1
    assert in_log() == ["y"]


def test_a_cancel_is_three_statements_and_reads_few_rows(db):
    publish_many("t", [Message(1, id=f"x{number}", delay=1000) for number in range(500)])
    with CaptureQueriesContext(connection) as captured, transaction.atomic():
        assert cancel("x7", topic="t") == 1
    kinds = [query["sql"].split()[0] for query in captured]
    assert [kind for kind in kinds if kind in ("SELECT", "DELETE", "UPDATE")] == ["SELECT", "SELECT", "DELETE"]


@pytest.mark.servers_only
@pytest.mark.parametrize("change", CHANGES)
def test_a_serializable_transaction_is_refused(db, change):
    """There even the search would lock all that is scheduled."""
    publish("t", 1, id="x", delay=1000)

    def work():
        with connection.cursor() as cursor:
            cursor.execute("SET SESSION TRANSACTION ISOLATION LEVEL SERIALIZABLE")
        connection.isolation_level = "serializable"  # as OPTIONS would
        with pytest.raises(OperationRefused, match="SERIALIZABLE"), transaction.atomic():
            CHANGES[change]()
        return CHANGES[change]()

    assert in_thread(work) == 1


@pytest.mark.servers_only
def test_a_message_that_changed_since_the_callers_snapshot(db):
    """With MariaDB's snapshot isolation an error that rolls back, as for any other row; else the latest row counts."""
    publish("t", 1, id="x", delay=1000)

    def work():
        with connection.cursor() as cursor:
            cursor.execute("SET SESSION TRANSACTION ISOLATION LEVEL REPEATABLE READ")
            if connection.mysql_is_mariadb:
                cursor.execute("SET SESSION innodb_snapshot_isolation = ON")
        with transaction.atomic():
            assert OutboxMessage.objects.count() == 1
            in_thread(CHANGES["reschedule"])
            return cancel("x", topic="t")

    if connection.mysql_is_mariadb:
        with pytest.raises(OperationalError, match="1020"):
            in_thread(work)
        assert waiting() == ["x"]
    else:
        assert in_thread(work) == 1
        assert waiting() == []


# -- debounced messages -----------------------------------------------------------


def debounce_two():
    for name in ("x", "y"):
        publish("t", name, id=name, key="k", coalesce="c", delay=1000)


def come_due(*names):
    """By primary key: a search for ids may wait for the rows of others, depending on the plan."""
    for pk in list(OutboxMessage.objects.filter(message_id__in=names).values_list("pk", flat=True)):
        OutboxMessage.objects.filter(pk=pk).update(deliver_at=5)


@pytest.mark.promise("Debouncing", "Cancelling")
@pytest.mark.servers_only
@pytest.mark.parametrize("isolation", ISOLATIONS)
@pytest.mark.parametrize("commit", [True, False])
@pytest.mark.parametrize("change", CHANGES)
def test_an_open_change_of_an_earlier_message_delays_those_of_its_key(db, change, commit, isolation):
    """If it is rolled back, the earlier one is replaced, instead of following the later one into the log."""
    debounce_two()
    publish("t", 1, id="z", key="k", coalesce="d", delay=1000)
    with elsewhere(CHANGES[change], isolation=isolation, commit=commit):
        come_due("y", "z")
        publish("t", 1, id="more", key="k", coalesce="c", delay=1000)  # no gap is locked
        assert cancel("more", topic="t") == 1
        assert sequencing.sequence(USING) == sequencing.Sequenced(1, more=False)
        assert in_log() == ["z"]
    sequence()
    assert in_log() == ["z", "y"]
    assert waiting() == (["x"] if commit and change == "reschedule" else [])


@pytest.mark.promise("Debouncing", "Cancelling")
@pytest.mark.servers_only
@pytest.mark.parametrize("isolation", ISOLATIONS)
@pytest.mark.parametrize("commit", [True, False])
@pytest.mark.parametrize("change", CHANGES)
def test_an_open_change_of_the_latest_message_does_not_lose_the_earlier(db, change, commit, isolation):
    publish("t", "w", id="w", key="k", coalesce="c", delay=1000)
    publish("t", "x", id="x", key="k", coalesce="c", delay=1000)
    with elsewhere(CHANGES[change], isolation=isolation, commit=commit):
        come_due("w")
        sequence()
        assert in_log() == []
    sequence()
    if commit:
        assert in_log() == ["w"]
    else:
        assert (in_log(), waiting()) == ([], ["x"])


@pytest.mark.promise("Debouncing")
@pytest.mark.servers_only
def test_publishers_do_not_wait_for_each_other_or_for_the_sequencer(db):
    debounce_two()
    OutboxMessage.objects.filter(message_id="x").update(deliver_at=5)
    with transaction.atomic():
        sequencing.sequence(USING)  # It holds its locks.
        with elsewhere(lambda: len(publish("t", 1, id="1", key="k", coalesce="c", delay=1000)), commit=True):
            in_thread(lambda: publish("t", 1, id="2", key="k", coalesce="c", delay=1000))
    assert waiting() == ["1", "2", "y"]

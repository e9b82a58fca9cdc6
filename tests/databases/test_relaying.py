"""The relay: messages published via another database, once and in order."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from unittest.mock import Mock

import pytest
from django.db import OperationalError, connections, transaction
from django.test.utils import CaptureQueriesContext

from django_mysqlqueue import Message, publish, publish_many
from django_mysqlqueue.exceptions import CommitOutcomeUnknown
from django_mysqlqueue.models import OutboxMessage, QueueMessage, RelayPosition, RelayWatermark, Sequencer
from tests.support import garbage
from tests.support.internals import (
    Relayed,
    Session,
    Watermark,
    close_connections,
    relay,
    relaying,
    sequence,
    watermark,
)

SOURCE, TARGET = "default", "queue"


@pytest.fixture(autouse=True)
def _topics(queue_db, settings):
    settings.MYSQLQUEUE = {"RETENTION": 0, "TOPICS": {"orders": {"DATABASE": TARGET}, "events.*": {"DATABASE": TARGET}}}


def pass_on(**limits):
    """Runs passes until nothing is left; returns the number of messages."""
    sequence(SOURCE)
    messages = 0
    while True:
        done = relay(SOURCE, TARGET, **limits)
        messages += done.messages
        if not done.more:
            return messages


def arrived(topic="orders"):
    sequence(TARGET)
    rows = QueueMessage.objects.using(TARGET).filter(topic=topic).order_by("offset")
    return [bytes(payload).decode() for payload in rows.values_list("payload", flat=True)]


def publish_via(*payloads, **options):
    for payload in payloads:
        publish("orders", payload, via=SOURCE, **options)


# -- what arrives -------------------------------------------------------------


def test_messages_arrive_in_the_order_of_the_source(db):
    publish_via(1, 2)
    publish("other", 0)
    publish_many("events.a", [Message(number, key=f"k{number % 3}") for number in range(30)], via=SOURCE)
    publish_via(3)
    assert pass_on() == 33
    assert arrived() == ["1", "2", "3"]
    assert arrived("events.a") == [str(number) for number in range(30)]
    assert relay(SOURCE, TARGET).messages == 0
    assert not QueueMessage.objects.using(TARGET).filter(topic="other").exists()


def test_everything_of_a_message_arrives(db):
    publish(
        "orders",
        {"a": 1},
        via=SOURCE,
        key="k",
        id="i",
        metadata={"m": "ü"},
        priority=7,
        expires_in=60,
        coalesce="c",
    )
    pass_on()
    arrived()
    (row,) = QueueMessage.objects.using(TARGET).all()
    (sent,) = QueueMessage.objects.using(SOURCE).all()
    for name in ("partition_key", "message_id", "metadata", "created_at", "size", "original_id"):
        assert getattr(row, name) == getattr(sent, name), name
    assert bytes(row.payload) == b'{"a":1}'
    assert (sent.topic, row.topic) == ("orders@queue", "orders")


def test_a_priority_is_kept(db):
    publish_via(1)
    publish_via(2, priority=5)
    sequence(SOURCE)
    relay(SOURCE, TARGET)
    publish("orders", 3, priority=5, using=TARGET)
    publish("orders", 4, using=TARGET)
    rows = OutboxMessage.objects.using(TARGET).order_by("payload").values_list("priority", "deliver_at")
    assert list(rows) == [(0, 0), (5, 0), (5, 0), (0, 0)]


def test_a_scheduled_message_waits_at_the_source(db):
    publish_via(1, delay=60)
    publish_via(2, delay=0.001)
    time.sleep(0.01)
    assert pass_on() == 1
    assert arrived() == ["2"]
    assert OutboxMessage.objects.using(SOURCE).get().topic == "orders@queue"


def test_a_duplicate_is_dropped_by_either_log(db):
    publish("orders", 1, id="i", key="k", via=SOURCE)
    pass_on()
    publish("orders", 2, id="i", key="k", via=SOURCE)
    pass_on()
    publish("orders", 3, id="i", key="k", using=TARGET)
    assert arrived() == ["1"]


@pytest.mark.parametrize("limits", [{"max_rows": 1}, {"max_rows": 3}, {"max_bytes": 1}, {"max_bytes": 2500}])
def test_limits_of_a_pass(db, limits):
    publish_many("orders", (Message(f"{number:03}" + "x" * 1000, key="k") for number in range(10)), via=SOURCE)
    assert pass_on(**limits) == 10
    assert [text[1:4] for text in arrived()] == [f"{number:03}" for number in range(10)]


def test_a_long_log_of_other_topics_is_read_once(db, monkeypatch, django_assert_num_queries):
    monkeypatch.setattr(relaying, "PAGE", 50)
    publish_many("other", range(175))
    publish_via(1)
    assert pass_on() == 1
    reached = watermark(Session(SOURCE), TARGET)
    assert reached.read_offset == reached.relayed_offset == QueueMessage.objects.get(topic="orders@queue").offset
    with django_assert_num_queries(3, using=SOURCE):  # the id of the log, the watermark, the rest of the log
        assert relay(SOURCE, TARGET).messages == 0
    publish_many("other", range(175))
    sequence(SOURCE)
    assert pass_on() == 0
    assert watermark(Session(SOURCE), TARGET).read_offset > reached.read_offset + 100


def test_the_statements_of_a_pass(db):
    publish_via(0)
    pass_on()
    publish_many("orders", range(100), via=SOURCE)
    sequence(SOURCE)
    with CaptureQueriesContext(connections[SOURCE]) as source, CaptureQueriesContext(connections[TARGET]) as target:
        relay(SOURCE, TARGET)
    sent = [[query["sql"].split()[0] for query in one.captured_queries] for one in (source, target)]
    verbs = [[verb for verb in verbs if verb in ("SELECT", "INSERT", "UPDATE", "DELETE")] for verbs in sent]
    # At the source: the id of the log, the watermark, a page of the log, the contents. Later, the watermark.
    assert verbs == [["SELECT", "SELECT", "SELECT", "SELECT", "INSERT"], ["SELECT", "INSERT", "UPDATE"]]


# -- what is kept at the source -----------------------------------------------


def test_gc_keeps_what_has_not_arrived(db):
    publish_via(1, 2, 3)
    sequence(SOURCE)
    relay(SOURCE, TARGET, max_rows=2)
    assert garbage.collect(SOURCE).messages == 2
    assert [bytes(row.payload) for row in QueueMessage.objects.using(SOURCE)] == [b"3"]
    assert pass_on() == 1
    assert garbage.collect(SOURCE).messages == 1
    assert arrived() == ["1", "2", "3"]


def test_the_retention_is_that_of_the_topic(db, settings):
    settings.MYSQLQUEUE = {"RETENTION": 0, "TOPICS": {"orders": {"DATABASE": TARGET, "RETENTION": 60}}}
    publish_via(1)
    pass_on()
    assert garbage.collect(SOURCE).messages == 0


# -- crashes ------------------------------------------------------------------


class Crash(Exception):
    """The process is killed."""


class Stops:
    """Ends both connections at the n-th statement of either, before or (COMMIT) after it is carried out."""

    def __init__(self, number, monkeypatch):
        self.left = number
        for alias in (SOURCE, TARGET):
            connection = connections[alias]
            connection.ensure_connection()
            monkeypatch.setattr(connection, "_commit", self.around(connection._commit, connection))
        self.stack = [connections[alias].execute_wrapper(self.before) for alias in (SOURCE, TARGET)]

    def before(self, execute, sql, params, many, context):
        self.count()
        return execute(sql, params, many, context)

    def around(self, commit, connection):
        def counted():
            self.count()
            commit()
            self.count()

        return counted

    def count(self):
        self.left -= 1
        if self.left < 0:
            raise Crash

    def __enter__(self):
        for one in self.stack:
            one.__enter__()

    def __exit__(self, *error):
        for one in self.stack:
            one.__exit__(*error)


def test_killed_at_every_statement(db, monkeypatch):
    expected = []
    for number in range(1000):
        payloads = [f"{number}.{part}" for part in range(3)]
        publish_many("orders", [Message(payload, key="k") for payload in payloads], via=SOURCE)
        sequence(SOURCE)
        expected += [f'"{payload}"' for payload in payloads]
        with monkeypatch.context() as patched:
            stops = Stops(number, patched)
            with stops, contextlib.suppress(Crash):
                relay(SOURCE, TARGET, max_rows=2)
        close_connections()
        garbage.collect(SOURCE)
        assert pass_on() in (0, 1, 3)
        assert arrived() == expected
        if stops.left >= 0:
            assert number > 10
            return
    raise AssertionError("the pass never ended")


def test_a_watermark_that_was_not_stored_is_stored_by_the_next_pass(db, monkeypatch):
    """The process was killed before. Otherwise, the messages would wait for GC, and seem to wait for the relay."""
    publish_via(1, 2)
    sequence(SOURCE)
    with monkeypatch.context() as patched:
        patched.setattr(relaying, "_note", Mock(side_effect=Crash))
        with contextlib.suppress(Crash):
            relay(SOURCE, TARGET)
    assert watermark(Session(SOURCE), TARGET) == Watermark()
    assert relay(SOURCE, TARGET) == Relayed()
    end = QueueMessage.objects.latest("offset").offset
    assert watermark(Session(SOURCE), TARGET) == Watermark(end, end)
    assert garbage.collect(SOURCE).messages == 2


def test_a_commit_whose_outcome_is_unknown(db, monkeypatch):
    publish_via(1, 2)
    sequence(SOURCE)
    connection = connections[TARGET]
    connection.ensure_connection()
    commit = connection._commit

    def lost():
        commit()
        raise OperationalError("gone")

    with monkeypatch.context() as patched:
        patched.setattr(connection, "_commit", lost)
        with pytest.raises(CommitOutcomeUnknown):
            relay(SOURCE, TARGET)
    close_connections()
    assert pass_on() == 0
    assert arrived() == ["1", "2"]


def test_many_relays_at_once(db):
    """Relays, sequencers and GC of many processes, while messages are published and connections are closed."""
    count, threads, left = 300, [], threading.Event()
    errors = []

    def work():
        random_ = random.Random()
        try:
            while not left.is_set():
                try:
                    sequence(SOURCE)
                    relay(SOURCE, TARGET, max_rows=7)
                    garbage.collect(SOURCE)
                    sequence(TARGET)
                except OperationalError as error:  # SQLite
                    if "locked" not in str(error):
                        raise
                if random_.random() < 0.1:
                    close_connections()
        except BaseException as error:
            errors.append(error)
        finally:
            close_connections()

    for _ in range(4):
        threads.append(threading.Thread(target=work))
        threads[-1].start()
    for number in range(count):
        publish("orders", number, key=f"k{number % 5}", via=SOURCE)
    deadline = time.monotonic() + 60
    rows = QueueMessage.objects.using(TARGET).order_by("offset").values_list("payload", flat=True)
    while len(rows.all()) < count and time.monotonic() < deadline and not errors:
        time.sleep(0.05)
    left.set()
    for thread in threads:
        thread.join(30)
    assert not errors
    pass_on()
    assert [int(bytes(row)) for row in rows.all()] == list(range(count))
    assert RelayPosition.objects.using(TARGET).count() == 1


def test_a_busy_relay_is_left_alone(db, engine):
    if engine == "sqlite":
        pytest.skip("cannot hold on SQLite: one writer at a time")
    publish_via(1)
    pass_on()
    publish_via(2)
    sequence(SOURCE)
    held, free = threading.Event(), threading.Event()

    def hold():
        with transaction.atomic(using=TARGET):
            list(RelayPosition.objects.using(TARGET).select_for_update())
            held.set()
            free.wait(20)
        close_connections()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(20)
    try:
        assert relay(SOURCE, TARGET).busy
    finally:
        free.set()
        thread.join(20)
    assert pass_on() == 1


def test_a_watermark_that_another_process_stores_meanwhile(db, engine):
    """With MariaDB's snapshot isolation, the statement that waited for the row is an error."""
    if engine == "sqlite":
        pytest.skip("cannot hold on SQLite: one writer at a time")
    publish_via(1)
    pass_on()
    publish_via(2)
    sequence(SOURCE)
    done, errors = [], []

    def work():
        try:
            done.append(relay(SOURCE, TARGET))
        except BaseException as error:
            errors.append(error)
        finally:
            close_connections()

    thread = threading.Thread(target=work)
    with transaction.atomic(using=SOURCE):
        RelayWatermark.objects.update(read_at=1)
        thread.start()
        deadline = time.monotonic() + 20
        while (
            not RelayPosition.objects.using(TARGET)
            .filter(relayed_offset__gte=QueueMessage.objects.latest("offset").offset)
            .exists()
        ):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        time.sleep(0.5)  # It waits for the row of the watermark now.
    thread.join(20)
    assert not errors
    assert [one.messages for one in done] == [1]
    assert watermark(Session(SOURCE), TARGET).relayed_offset == QueueMessage.objects.latest("offset").offset


# -- databases that were restored ---------------------------------------------


def test_a_target_that_was_restored_receives_again_what_it_lacks(db, settings):
    settings.MYSQLQUEUE = {"RETENTION": 60, "TOPICS": {"orders": {"DATABASE": TARGET}}}
    publish_via(1, 2)
    pass_on()
    arrived()
    saved = RelayPosition.objects.using(TARGET).get()
    publish_via(3, 4, 5)
    pass_on(max_rows=1)
    saved.save(using=TARGET, force_update=True)  # A backup from before these messages.
    OutboxMessage.objects.using(TARGET).all().delete()
    publish_via(6)
    sequence(SOURCE)
    done = relay(SOURCE, TARGET)
    assert (done.repeats, done.messages, done.more) == ("the target was restored to an earlier state", 0, True)
    assert done.lost == ()
    assert pass_on() == 4
    assert arrived() == [str(number) for number in range(1, 7)]
    assert relay(SOURCE, TARGET).repeats == ""


def test_a_new_target_receives_what_the_source_has(db, settings):
    settings.MYSQLQUEUE = {"RETENTION": 60, "TOPICS": {"orders": {"DATABASE": TARGET}}}
    publish_via(1, 2)
    pass_on()
    for model in (RelayPosition, OutboxMessage, QueueMessage):
        model.objects.using(TARGET).all().delete()
    assert pass_on() == 2
    assert arrived() == ["1", "2"]


def test_a_target_that_was_restored_after_gc_does_not_wait_for_what_is_gone(db, monkeypatch):
    monkeypatch.setattr(relaying, "PAGE", 5)
    publish_via(1)
    pass_on()
    arrived()
    saved = RelayPosition.objects.using(TARGET).get()
    publish_via(2, 3)
    pass_on()
    gone = QueueMessage.objects.latest("offset").offset
    publish("t", 1)
    sequence(SOURCE)
    garbage.collect(SOURCE)
    saved.save(using=TARGET, force_update=True)
    publish_many("other", range(20))
    publish_via(4)
    assert sequence(SOURCE)
    assert relay(SOURCE, TARGET).lost == (("orders", saved.relayed_offset + 1, gone),)
    assert pass_on() == 1
    assert relay(SOURCE, TARGET).repeats == ""


def test_each_topic_of_a_restored_target_has_its_own_loss(db):
    """GC has deleted messages of other topics, too, and those of the second one only before the backup."""
    publish("events.a", 1, via=SOURCE)
    pass_on()
    garbage.collect(SOURCE)
    saved = RelayPosition.objects.using(TARGET).get()
    publish_many("other", range(3))
    publish_via(2)
    publish("events.b", 3, via=SOURCE)
    pass_on()
    lost = dict(QueueMessage.objects.filter(topic__endswith="@queue").values_list("topic", "offset"))
    garbage.collect(SOURCE)
    saved.save(using=TARGET, force_update=True)
    first = saved.relayed_offset + 1
    assert relay(SOURCE, TARGET).lost == (
        ("events.b", first, lost["events.b@queue"]),
        ("orders", first, lost["orders@queue"]),
    )


def test_a_source_that_lost_its_last_messages(db, settings):
    """A failover to a replica that lacked transactions: other messages have these offsets afterwards."""
    settings.MYSQLQUEUE = {"RETENTION": 60, "TOPICS": {"orders": {"DATABASE": TARGET}}}
    publish_via(1, 2)
    pass_on()
    known = RelayWatermark.objects.using(SOURCE).get()
    publish_via(3, 4)
    pass_on()
    lost = list(QueueMessage.objects.using(SOURCE).order_by("offset")[2:])
    for row, payload in zip(lost, (b"5", b"6"), strict=True):
        row.payload, row.message_id = payload, payload.decode()
        QueueMessage.objects.using(SOURCE).filter(pk=row.pk).update(payload=payload, message_id=payload.decode())
    known.save(using=SOURCE, force_update=True)
    done = relay(SOURCE, TARGET)
    assert (done.repeats, done.messages) == ("the source was restored to an earlier state", 2)
    assert relay(SOURCE, TARGET).repeats == ""
    assert arrived() == ["1", "2", "3", "4", "5", "6"]


def test_a_source_that_was_emptied_is_another_log(db):
    publish_via(1, 2)
    pass_on()
    QueueMessage.objects.using(SOURCE).all().delete()
    RelayWatermark.objects.using(SOURCE).all().delete()
    Sequencer.objects.using(SOURCE).all().delete()
    publish_via(3)
    assert pass_on() == 1
    assert arrived() == ["1", "2", "3"]
    assert RelayPosition.objects.using(TARGET).count() == 2


def test_two_names_of_one_database(db, settings):
    """Each target has its own position, although the table is the same."""
    settings.MYSQLQUEUE = {"TOPICS": {"orders": {"DATABASE": TARGET}, "b": {"DATABASE": "default"}}}
    publish("b", 1, via=TARGET)
    publish_via(2)
    sequence(TARGET)
    assert relay(TARGET, SOURCE).messages == 1
    assert pass_on() == 1

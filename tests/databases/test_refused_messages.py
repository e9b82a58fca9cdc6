"""Messages that the database to which they are relayed refuses."""

from __future__ import annotations

import contextlib
import logging

import pytest
from django.db import DatabaseError, OperationalError, connections

from django_mysqlqueue import Message, publish, publish_many
from django_mysqlqueue.checks import system as checks
from django_mysqlqueue.health import QueueHealth
from django_mysqlqueue.inspection import check_health, find_problems, get_overview
from django_mysqlqueue.models import OutboxMessage, QueueMessage
from django_mysqlqueue.options.backoff import Backoff
from tests.support.internals import (
    NotInserted,
    PassSize,
    Refusal,
    Relay,
    Session,
    close_connections,
    dialect_of,
    failures,
    is_server,
    relaying,
    relays,
    sequence,
)
from tests.support.processes import wait_for

SOURCE, TARGET = "default", "queue"
BAD = "refused"


@pytest.fixture(autouse=True)
def _topics(queue_db, settings, monkeypatch):
    settings.MYSQLQUEUE = {"TOPICS": {"orders": {"DATABASE": TARGET, "VIA": SOURCE}}}
    monkeypatch.setattr(relays, "RETRY", Backoff(initial=0.01, jitter=0.0))
    monkeypatch.setattr(relays, "IDLE", 0.2)


@pytest.fixture
def refusing():
    """A trigger of the target that refuses one payload; gives a function that drops it."""
    if is_server(connections[TARGET]):
        body = f"IF NEW.payload = '\"{BAD}\"' THEN SIGNAL SQLSTATE '45000' SET MESSAGE_TEXT = 'no such order'; END IF"
        trigger = f"BEFORE INSERT ON queue_outbox FOR EACH ROW {body}"
    else:
        body = "BEGIN SELECT RAISE(ABORT, 'no such order'); END"
        trigger = f"BEFORE INSERT ON queue_outbox WHEN CAST(NEW.payload AS TEXT) = '\"{BAD}\"' {body}"

    def execute(sql):
        with connections[TARGET].cursor() as cursor:
            cursor.execute(sql)

    execute("DROP TRIGGER IF EXISTS refuse")
    execute(f"CREATE TRIGGER refuse {trigger}")
    yield lambda: execute("DROP TRIGGER refuse")
    execute("DROP TRIGGER IF EXISTS refuse")


@pytest.fixture
def relay():
    one = Relay(SOURCE, TARGET)
    yield one
    one.stop()
    wait_for(lambda: one._thread is None)


def arrived():
    sequence(TARGET)
    rows = QueueMessage.objects.using(TARGET).order_by("offset").values_list("payload", flat=True)
    return [bytes(payload).decode().strip('"') for payload in rows]


def logged(caplog, name):
    return [(one.levelno, one.mysqlqueue) for one in caplog.records if one.mysqlqueue["event"] == name]


def problem():
    (found,) = [one for one in check_health(using=SOURCE).findings if one.kind == "relay"]
    return found


def test_only_what_follows_a_refused_message_waits(db, refusing, relay, caplog):
    caplog.set_level(logging.INFO, "django_mysqlqueue")
    payloads = [f"{number}" for number in range(20)] + [BAD] + [f"{number}" for number in range(20, 40)]
    publish_many("orders", [Message(payload, key="k", id=f"i{payload}") for payload in payloads])
    sequence(SOURCE)
    offset = QueueMessage.objects.get(message_id="irefused").offset
    relay.notify()
    wait_for(lambda: logged(caplog, "relay.refused"))
    assert arrived() == payloads[:20]
    level, fields = logged(caplog, "relay.refused")[0]
    assert level == logging.ERROR
    assert "no such order" in fields.pop("error")
    assert fields == {
        "event": "relay.refused",
        "source": SOURCE,
        "target": TARGET,
        "topic": "orders",
        "id": "irefused",
        "offset": offset,
        "bytes": len(BAD) + 2,
        "failures": 1,
    }
    wait_for(lambda: relaying.refusal(Session(SOURCE), TARGET).offset == offset)
    found = problem()
    assert (found.topic, found.message_id) == ("orders", "irefused")
    text = f"The database 'queue' refuses message 'irefused' of topic 'orders', at offset {offset} here. "
    assert found.text.startswith(text)
    assert "no such order" not in found.text
    assert ["no such order" in one.error for one in find_problems(using=SOURCE) if one.kind == "relay"] == [True]
    assert "21 messages are waiting to be relayed there" in found.text
    assert not logged(caplog, "relay.failed")
    refusing()
    wait_for(lambda: arrived() == payloads)
    wait_for(lambda: logged(caplog, "relay.recovered"))
    (backlog,) = get_overview(using=SOURCE).relays
    assert backlog.refused is None
    publish("orders", "later", key="k")
    sequence(SOURCE)
    relay.notify()
    wait_for(lambda: arrived() == [*payloads, "later"])


def test_a_deleted_message_is_passed(db, refusing, relay):
    publish_many("orders", ["1", BAD, "2"])
    sequence(SOURCE)
    relay.notify()
    wait_for(lambda: relaying.refusal(Session(SOURCE), TARGET).offset)
    refused = get_overview(using=SOURCE).relays[0].refused
    assert QueueMessage.objects.filter(offset=refused.offset, topic="orders@queue").delete()[0] == 1
    wait_for(lambda: arrived() == ["1", "2"])


def test_a_public_page_names_no_id(db, refusing, relay):
    publish("orders", BAD, id="a-person")
    sequence(SOURCE)
    relay.notify()
    wait_for(lambda: relaying.refusal(Session(SOURCE), TARGET).offset)
    with pytest.raises(Exception, match=r"orders: relay\.") as caught:
        QueueHealth(using=SOURCE).run()
    assert "a-person" not in str(caught.value)


def test_a_pass_names_what_failed(db, refusing, monkeypatch):
    monkeypatch.setattr(dialect_of(connections[TARGET]), "max_rows", 4)
    publish_many("orders", [*"abcde", BAD, *"fghij"])
    sequence(SOURCE)
    with pytest.raises(NotInserted) as caught:
        relaying.relay(SOURCE, TARGET)
    error = caught.value
    assert (error.before, error.messages, error.is_lost_connection) == (4, 4, False)
    assert error.place.offset == QueueMessage.objects.order_by("offset")[4].offset
    assert relaying.relay(SOURCE, TARGET, max_rows=4).messages == 4
    assert arrived() == [*"abcd"]


def failing(monkeypatch, fails, error):
    """Fails the INSERT of some payloads at the target, in this thread."""

    def insert(execute, sql, params, many, context):
        if sql.startswith("INSERT INTO queue_outbox") and any(fails(value) for value in params):
            raise error
        return execute(sql, params, many, context)

    return connections[TARGET].execute_wrapper(insert)


def passes(relay, failures_):
    for _ in range(10):
        pause = relay._passes(failures_)
        if pause or relay._done == relay._asked:
            return


@pytest.mark.parametrize(
    "message", ["Table 'queue_outbox' doesn't exist", "no such table: queue_outbox"], ids=["server", "sqlite"]
)
def test_errors_that_affect_all_messages_name_none(db, monkeypatch, message):
    error = OperationalError(1146, message)
    publish_many("orders", ["1", "2"])
    sequence(SOURCE)
    if failures.kind_of(TARGET, error) is None:
        pytest.skip("not an error of this database")
    with failing(monkeypatch, lambda value: True, error), pytest.raises(OperationalError):
        relaying.relay(SOURCE, TARGET)


@pytest.mark.parametrize("kind", ["no_answer", "interrupted"])
def test_a_lost_connection_is_a_refusal_only_with_the_same_message_again(db, monkeypatch, caplog, kind):
    """Servers close the connection for a statement that is too long, and end one that takes too long."""
    monkeypatch.setattr(failures, "kind_of", lambda using, error: kind)
    monkeypatch.setattr(relays, "drop_connection", lambda connection: None)
    relay, counted = Relay(SOURCE, TARGET), relays.Failures(Backoff(initial=0.01))
    relay._asked = 1
    publish_many("orders", ["1", BAD, "2"])
    sequence(SOURCE)
    lost = OperationalError(2013, "Lost connection to server during query")
    with failing(monkeypatch, lambda value: value == f'"{BAD}"'.encode(), lost):
        passes(relay, counted)
        assert arrived() == ["1"]
        assert not logged(caplog, "relay.refused")
        ((_, fields),) = logged(caplog, "relay.failed")
        assert f"of topic 'orders', at offset {QueueMessage.objects.order_by('offset')[1].offset}" in fields["error"]
        passes(relay, counted)
        assert len(logged(caplog, "relay.refused")) == 1
    passes(relay, counted)
    assert arrived() == ["1", BAD, "2"]


def test_a_refusal_that_cannot_be_stored_is_stored_later(db, refusing, monkeypatch, caplog):
    store = relaying.note_refusal
    errors = [DatabaseError("gone")]

    def fails(*arguments):
        if errors:
            raise errors.pop()
        store(*arguments)

    monkeypatch.setattr(relaying, "note_refusal", fails)
    relay, counted = Relay(SOURCE, TARGET), relays.Failures(Backoff(initial=0.01))
    relay._asked = 1
    publish("orders", BAD)
    sequence(SOURCE)
    passes(relay, counted)
    assert relaying.refusal(Session(SOURCE), TARGET) == Refusal()
    passes(relay, counted)
    assert "no such order" in relaying.refusal(Session(SOURCE), TARGET).error
    assert len(logged(caplog, "relay.refused")) == 2


def test_sizes_of_passes():
    size = PassSize()
    assert size.limit == relaying.BATCH_ROWS

    def fails(before, messages):
        place = relaying.LogPlace(1, "t@queue", "", 1, "i")
        return size.failed(NotInserted(DatabaseError(), TARGET, place, before=before, messages=messages))

    assert fails(8, 4)
    assert size.limit == 8
    size.passed(8)
    assert size.limit == 1
    size.passed(3)
    assert size.limit == 1
    assert not fails(0, 1)
    assert size.limit == 1
    size.passed(1)
    assert size.limit == relaying.BATCH_ROWS


@pytest.fixture
def small_packets():
    """A server whose new connections accept a megabyte; those that are open keep their limit."""
    with connections[SOURCE].cursor() as cursor:
        cursor.execute("SELECT @@GLOBAL.max_allowed_packet")
        (before,) = cursor.fetchone()
        cursor.execute("SET GLOBAL max_allowed_packet = 1048576")
        connections[TARGET].close()
        yield
        cursor.execute(f"SET GLOBAL max_allowed_packet = {before}")
    close_connections()


@pytest.mark.servers_only
def test_a_message_above_the_limit_of_the_target(db, settings, request, caplog):
    settings.MYSQLQUEUE = {**settings.MYSQLQUEUE, "MAX_PAYLOAD_BYTES": 4_000_000}
    publish_many("orders", ["1", "x" * 2_000_000, "2"])
    sequence(SOURCE)
    request.getfixturevalue("small_packets")
    relay, counted = Relay(SOURCE, TARGET), relays.Failures(Backoff(initial=0.01))
    relay._asked = 1
    # The source's connection must stay: it has the limit with which the message was published.
    with pytest.MonkeyPatch.context() as patched:
        drop = relays.drop_connection
        patched.setattr(relays, "drop_connection", lambda one: drop(one) if one.alias == TARGET else None)
        for _ in range(3):
            with contextlib.suppress(OperationalError):
                passes(relay, counted)
    assert arrived() == ["1"]
    assert OutboxMessage.objects.using(TARGET).count() == 0
    (_, fields) = logged(caplog, "relay.refused")[0]
    assert fields["bytes"] > 2_000_000
    assert fields["topic"] == "orders"


@pytest.mark.servers_only
def test_limits_of_the_databases_are_compared(db, settings, small_packets):
    (found,) = checks.check_packets(databases=[SOURCE, TARGET])
    assert found.id == "django_mysqlqueue.W023"
    assert "Database 'queue' has max_allowed_packet = 1048576, less than database 'default' with " in found.msg
    assert checks.check_packets(databases=[TARGET]) == checks.check_packets() == []
    settings.MYSQLQUEUE = {"TOPICS": {"orders": {"DATABASE": TARGET}}}
    assert checks.check_packets(databases=[SOURCE, TARGET]) == []
    settings.MYSQLQUEUE = {"TOPICS": {"orders": {"DATABASE": SOURCE, "VIA": TARGET}}}
    assert checks.check_packets(databases=[SOURCE, TARGET]) == []


def test_equal_limits_pass(db):
    assert checks.check_packets(databases=[SOURCE, TARGET]) == []

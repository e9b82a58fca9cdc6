"""Publishing on every engine: transactions, aliases, bounds, plain SQL, wake-ups."""

import contextlib
import datetime
import shutil
import subprocess
import time
import unittest
import uuid

import pytest
from django.db import OperationalError, connection, connections, transaction
from django.http import HttpResponse
from django.test import Client, TestCase
from django.test.utils import CaptureQueriesContext
from django.urls import path

from django_mysqlqueue import InvalidMessage, Message, TransactionMismatch, naming, publish, publish_many
from django_mysqlqueue.models import OutboxMessage, QueueMessage
from django_mysqlqueue.service import publishing, wakeups
from django_mysqlqueue.sql import dialect_of
from django_mysqlqueue.sql.session import Session
from tests.app.models import Effect
from tests.support.harness import USING, Sub, handler, in_thread, sequence


def stored():
    """The payloads in the outbox in order, as their JSON text."""
    return [
        bytes(payload).decode() for payload in OutboxMessage.objects.order_by("pk").values_list("payload", flat=True)
    ]


def committed():
    """What another connection sees: nothing that is still in a transaction."""
    return in_thread(stored)


def one_or_many(test):
    return pytest.mark.parametrize(
        "send",
        [publish, publish_one_of_many],
        ids=["publish", "publish_many"],
    )(test)


def publish_one_of_many(topic, payload, *, using=None, on_mismatch="error", **fields):
    return publish_many(topic, [Message(payload, **fields)], using=using, on_mismatch=on_mismatch)


def nested(levels):
    value = 1
    for _ in range(levels):
        value = [value]
    return value


class Undo(Exception):
    """Rolls a test's transaction back."""


@contextlib.contextmanager
def rolled_back(using=USING, **options):
    """A transaction that ends in a rollback."""
    with contextlib.suppress(Undo), transaction.atomic(using=using, **options):
        yield
        raise Undo


@pytest.fixture
def autocommit_off(db):
    connection.set_autocommit(False)
    yield
    connection.rollback()
    connection.set_autocommit(True)


@pytest.fixture
def other(db):
    """The second database, SQLite in memory, as an open connection."""
    connection = connections["other"]
    connection.ensure_connection()
    yield connection
    connection.close()


# -- the caller's transaction -------------------------------------------------


@one_or_many
def test_outside_a_transaction_it_commits_alone(db, send):
    send("t", 1)
    assert committed() == ["1"]
    assert not connection.in_atomic_block


@one_or_many
@pytest.mark.parametrize("durable", [False, True])
def test_it_joins_the_callers_transaction(db, send, durable):
    with transaction.atomic(durable=durable):
        Effect.objects.create(name="mine")
        send("t", 1)
        assert committed() == []
        assert stored() == ["1"]
    assert committed() == ["1"]
    assert Effect.objects.count() == 1


@one_or_many
@pytest.mark.parametrize("durable", [False, True])
def test_a_rollback_leaves_nothing(db, send, durable):
    with rolled_back(durable=durable):
        Effect.objects.create(name="mine")
        send("t", 1)
    assert committed() == []
    sequence()
    assert not QueueMessage.objects.exists()
    assert not Effect.objects.exists()


@one_or_many
def test_a_rolled_back_savepoint_takes_only_its_own(db, send):
    with transaction.atomic():
        send("t", 1)
        with rolled_back():
            send("t", 2)
            with transaction.atomic():
                send("t", 3)
        send("t", 4)
    assert committed() == ["1", "4"]


@one_or_many
def test_set_rollback(db, send):
    with transaction.atomic():
        send("t", 1)
        transaction.set_rollback(True)
    assert committed() == []


@one_or_many
def test_from_on_commit(db, send):
    """The hook runs after the commit, in autocommit mode: the message commits alone."""
    with transaction.atomic():
        send("t", "inside")
        transaction.on_commit(lambda: send("t", "hook"))
        assert stored() == ['"inside"']
    assert committed() == ['"inside"', '"hook"']


@one_or_many
def test_from_on_commit_of_a_transaction_that_rolls_back(db, send):
    with rolled_back():
        transaction.on_commit(lambda: send("t", "hook"))
    assert committed() == []


@one_or_many
@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_autocommit_off(autocommit_off, send, end):
    send("t", 1)
    send("t", 2)
    assert committed() == []
    getattr(connection, end)()
    assert committed() == (["1", "2"] if end == "commit" else [])


@one_or_many
def test_a_refused_message_leaves_the_callers_transaction_usable(db, send):
    with transaction.atomic():
        send("t", 1)
        with pytest.raises(InvalidMessage):
            send("t", float("nan"))
        with pytest.raises(InvalidMessage):
            send("no topic", 2)
        send("t", 3)
    assert committed() == ["1", "3"]


@one_or_many
def test_in_a_transaction_that_is_already_broken(db, send):
    """Django's own rule: it must end first. Nothing may slip through beside it."""
    with transaction.atomic():
        transaction.set_rollback(True)
        with pytest.raises(transaction.TransactionManagementError):
            send("t", 1)
    assert committed() == []


@one_or_many
def test_a_caller_who_catches_a_database_error_commits_nothing_of_the_transaction(db, send):
    """After a deadlock the server has rolled back what came before; the rest must not be committed alone."""

    def deadlock(execute, sql, params, many, context):
        if "INSERT INTO queue_outbox" in sql:
            raise OperationalError(1213, "Deadlock found when trying to get lock; try restarting transaction")
        return execute(sql, params, many, context)

    with transaction.atomic():
        Effect.objects.create(name="before")
        with connection.execute_wrapper(deadlock), pytest.raises(OperationalError):
            send("t", 1)
        with pytest.raises(transaction.TransactionManagementError):
            Effect.objects.create(name="after")
    assert committed() == []
    assert not Effect.objects.exists()


# -- requests -----------------------------------------------------------------


def view(request, outcome):
    Effect.objects.create(name="view")
    publish("t", outcome)
    publish_many("t", ["many"])
    if outcome == "raise":
        raise Undo
    return HttpResponse(status=204 if outcome == "succeed" else 404)


@transaction.non_atomic_requests
def view_outside(request):
    publish("t", "kept")
    raise Undo


@transaction.non_atomic_requests(using="default")
def view_on_the_other(request):
    publish("t", "x", on_mismatch=request.GET.get("on_mismatch", "error"))
    if "raise" in request.GET:
        raise Undo
    return HttpResponse()


urlpatterns = [
    path("atomic/<outcome>", view),
    path("outside", view_outside),
    path("other", view_on_the_other),
]


@pytest.fixture
def client(db, settings, monkeypatch):
    settings.ROOT_URLCONF = __name__
    monkeypatch.setitem(connections.settings["default"], "ATOMIC_REQUESTS", True)
    return Client(raise_request_exception=False)


@pytest.mark.parametrize(
    ("outcome", "status", "kept"), [("succeed", 204, True), ("missing", 404, True), ("raise", 500, False)]
)
def test_atomic_requests(client, outcome, status, kept):
    assert client.get(f"/atomic/{outcome}").status_code == status
    assert committed() == ([f'"{outcome}"', '"many"'] if kept else [])
    assert Effect.objects.count() == kept


def test_a_view_outside_atomic_requests_commits_at_once(client):
    assert client.get("/outside").status_code == 500
    assert committed() == ['"kept"']


def test_atomic_requests_of_another_database(client, other, monkeypatch):
    monkeypatch.setitem(connections.settings["other"], "ATOMIC_REQUESTS", True)
    failing = Client()
    with pytest.raises(TransactionMismatch, match="'default', which has no open transaction, but 'other' has one"):
        failing.get("/other")
    assert client.get("/other?on_mismatch=on_commit&raise").status_code == 500
    assert committed() == []
    assert client.get("/other?on_mismatch=on_commit").status_code == 200
    assert committed() == ['"x"']
    assert client.get("/other?on_mismatch=commit_now&raise").status_code == 500
    assert committed() == ['"x"', '"x"']


# -- TransactionMismatch ------------------------------------------------------


@one_or_many
def test_mismatch_is_refused(other, send):
    with transaction.atomic(using="other"):
        with pytest.raises(TransactionMismatch) as raised:
            send("t", 1)
        assert "'default'" in str(raised.value)
        assert "'other'" in str(raised.value)
        assert "on_mismatch='commit_now' or 'on_commit'" in str(raised.value)
    assert committed() == []


@one_or_many
def test_mismatch_with_autocommit_off(other, send):
    other.set_autocommit(False)
    try:
        with pytest.raises(TransactionMismatch):
            send("t", 1)
    finally:
        other.rollback()
        other.set_autocommit(True)
    send("t", 2)
    assert committed() == ["2"]


@one_or_many
def test_commit_now_stays_even_if_the_other_rolls_back(other, send):
    with rolled_back("other"):
        send("t", 1, on_mismatch="commit_now")
        assert committed() == ["1"]
    assert committed() == ["1"]


@one_or_many
def test_on_commit_waits_for_the_other(other, send):
    with transaction.atomic(using="other"):
        send("t", 1, on_mismatch="on_commit")
        assert stored() == []
    assert committed() == ["1"]


@one_or_many
def test_on_commit_goes_with_the_others_rollback(other, send):
    with rolled_back("other"):
        send("t", 1, on_mismatch="on_commit")
    with transaction.atomic(using="other"):
        with rolled_back("other"):
            send("t", 2, on_mismatch="on_commit")
        send("t", 3, on_mismatch="on_commit")
    assert committed() == ["3"]


@one_or_many
def test_on_commit_refuses_a_bad_message_at_once(other, send):
    """In the hook nobody could handle it any more."""
    with transaction.atomic(using="other"), pytest.raises(InvalidMessage):
        send("t", float("nan"), on_mismatch="on_commit")
    assert committed() == []


def test_on_commit_returns_what_it_will_publish(other):
    with transaction.atomic(using="other"):
        message_id = publish("t", 1, on_mismatch="on_commit")
        assert publish_many("t", iter([2, 3]), on_mismatch="on_commit") == 2
        assert publish_many("t", [], on_mismatch="on_commit") == 0
    assert committed() == ["1", "2", "3"]
    assert OutboxMessage.objects.first().message_id == message_id


@one_or_many
@pytest.mark.parametrize("on_mismatch", ["error", "commit_now", "on_commit"])
def test_no_mismatch_while_the_queues_transaction_is_open(other, send, on_mismatch):
    """It joins the queue's transaction, whatever was asked for in the other case."""
    for outer, inner in (("default", "other"), ("other", "default")):
        with rolled_back(outer), rolled_back(inner):
            send("t", 1, on_mismatch=on_mismatch)
            assert stored() == ["1"]
    assert committed() == []


@one_or_many
@pytest.mark.parametrize("on_mismatch", ["error", "commit_now", "on_commit"])
def test_no_mismatch_without_any_transaction(other, send, on_mismatch):
    send("t", 1, on_mismatch=on_mismatch)
    assert committed() == ["1"]


@one_or_many
def test_no_mismatch_with_autocommit_off_on_the_queue(other, autocommit_off, send):
    with transaction.atomic(using="other"):
        send("t", 1)
    assert committed() == []
    connection.commit()
    assert committed() == ["1"]


@one_or_many
def test_no_mismatch_in_the_others_on_commit_hook(other, send):
    with transaction.atomic(using="other"):
        transaction.on_commit(lambda: send("t", 1), using="other")
    assert committed() == ["1"]


@one_or_many
def test_a_transaction_of_another_thread_is_no_mismatch(other, send):
    with transaction.atomic(using="other"):
        in_thread(lambda: send("t", 1))
    assert committed() == ["1"]


@one_or_many
def test_unknown_on_mismatch(db, send):
    with pytest.raises(ValueError, match="on_mismatch='ignore': must be 'error', 'commit_now' or 'on_commit'"):
        send("t", 1, on_mismatch="ignore")
    assert committed() == []


@one_or_many
@pytest.mark.parametrize("name", ["using", "MYSQLQUEUE"])
def test_the_alias_given_decides_whose_transaction_counts(other, settings, send, name):
    """With the queue on ``other``, a transaction on ``default`` is the foreign one."""
    options = {}
    if name == "using":
        options["using"] = "other"
    else:
        settings.MYSQLQUEUE = {"DATABASE": "other"}
    with transaction.atomic(), pytest.raises(TransactionMismatch, match=r"'other', which has no .* but 'default' has"):
        send("t", 1, **options)


def test_the_blocks_of_testcase_do_not_count(db):
    """They wrap every test, on both databases; the user's own blocks inside count as always."""

    class Case(TestCase):
        databases = {"default", "other"}

        def runTest(self):  # noqa: N802
            assert connections["default"].in_atomic_block
            assert connections["other"].in_atomic_block
            publish("t", "bare")
            publish_many("t", ["many"])
            with transaction.atomic():
                publish("t", "joins")
            with transaction.atomic(using="other"):
                for send in (publish, publish_one_of_many):
                    with pytest.raises(TransactionMismatch):
                        send("t", "mismatch")
                publish("t", "now", on_mismatch="commit_now")
                with transaction.atomic():
                    publish("t", "both")
            with self.captureOnCommitCallbacks(using="other", execute=True), transaction.atomic(using="other"):
                publish("t", "hook", on_mismatch="on_commit")
            assert stored() == [f'"{name}"' for name in ("bare", "many", "joins", "now", "both", "hook")]

    result = unittest.TestResult()
    unittest.TestSuite([Case()]).run(result)
    assert [text for _, text in result.errors + result.failures] == []
    assert result.testsRun == 1
    assert committed() == []


# -- publish_many -------------------------------------------------------------


@pytest.mark.parametrize("count", [0, 1, 2, 499, 500, 501, 1203])
def test_publish_many_returns_how_many_and_keeps_their_order(db, count):
    assert publish_many("t", range(count)) == count
    assert committed() == [str(number) for number in range(count)]


def test_messages_and_payloads_may_be_mixed(db):
    when = datetime.datetime(2031, 1, 1, tzinfo=datetime.UTC)
    publish_many("t", [1, Message(2, key="k", id="i", metadata={"m": 1}, deliver_at=when), None])
    rows = list(
        OutboxMessage.objects.order_by("pk").values_list("payload", "partition_key", "message_id", "deliver_at")
    )
    assert [bytes(row[0]) for row in rows] == [b"1", b"2", b"null"]
    assert rows[1][1:] == ("k", "i", 1_924_992_000_000)
    assert rows[0][1].startswith("__p:")
    assert rows[0][3] == 0
    assert OutboxMessage.objects.get(message_id="i").metadata == {"m": 1, "content_type": "application/json"}


def failing_at(place, count=1500):
    for number in range(count):
        yield float("nan") if number == place else number


@pytest.mark.parametrize("place", [0, 1, 499, 500, 750, 1499])
def test_a_bad_message_anywhere_leaves_none(db, place):
    with pytest.raises(InvalidMessage, match=f"^message {place}: payload of type float"):
        publish_many("t", failing_at(place))
    assert committed() == []


def test_all_or_nothing_also_for_a_caller_who_goes_on(db):
    """The error is caught inside the caller's own transaction, which then commits."""
    with transaction.atomic():
        publish("t", "before")
        with pytest.raises(InvalidMessage):
            publish_many("t", failing_at(1200))
        publish("t", "after")
    assert committed() == ['"before"', '"after"']


def test_all_or_nothing_with_autocommit_off(autocommit_off):
    publish("t", "before")
    with pytest.raises(InvalidMessage):
        publish_many("t", failing_at(1200))
    publish("t", "after")
    connection.commit()
    assert committed() == ['"before"', '"after"']


def test_an_error_of_the_callers_generator_leaves_none(db):
    def broken():
        yield from range(1200)
        raise Undo

    with pytest.raises(Undo):
        publish_many("t", broken())
    assert committed() == []


def test_publish_many_streams(db):
    """What is read but not yet sent never exceeds a chunk; the generator sees the rows of its predecessors."""
    unsent = []

    def messages():
        for number in range(5000):
            if number % 100 == 0:
                unsent.append(number - OutboxMessage.objects.count())
            yield number

    assert publish_many("t", messages()) == 5000
    assert max(unsent) <= publishing.CHUNK_ROWS
    assert OutboxMessage.objects.count() == 5000


def test_publish_many_streams_large_messages_by_their_bytes(db):
    unsent = []

    def messages():
        for number in range(20):
            unsent.append(number - OutboxMessage.objects.count())
            yield bytes(300_000)

    assert publish_many("t", messages()) == 20
    assert max(unsent) * 300_000 <= publishing.CHUNK_BYTES + 300_000


def test_publish_many_needs_one_statement_a_chunk(db):
    """And the transaction's own."""
    publish_many("t", range(2))
    with CaptureQueriesContext(connection) as queries:
        publish_many("t", range(1500))
    assert [query["sql"][:6] for query in queries].count("INSERT") == 3
    assert len(queries) <= 5


@pytest.mark.parametrize(
    "messages",
    ["text", b"bytes", bytearray(b"ab"), memoryview(b"ab"), {"a": 1}, Message(1), 7, None],
    ids=lambda value: type(value).__name__,
)
def test_one_payload_is_not_many(db, messages):
    with pytest.raises(InvalidMessage, match="messages: must be an iterable of messages, not one"):
        publish_many("t", messages)
    assert committed() == []


# -- names, keys, sizes -------------------------------------------------------


@one_or_many
@pytest.mark.parametrize("topic", ["", "a b", "x" * 101, "t_dlq", "é", None])
def test_bad_topics_are_refused_before_anything_is_written(db, send, topic):
    with pytest.raises(InvalidMessage, match="topic"):
        send(topic, 1)
    assert committed() == []


LOOKALIKES = ["a", "A", "a ", " a", "a\t", "á", "a\u0301", "a\x00", "\x00", "😀", "😁", "ß", "ss", "ﬁ", "fi", "\ufeffa"]


def test_keys_that_look_alike_stay_different(db):
    """By case, padding, accents, NUL, four-byte characters, ligatures."""
    publish_many("t", [Message(key, key=key, id="same") for key in LOOKALIKES])
    assert sorted(OutboxMessage.objects.values_list("partition_key", flat=True)) == sorted(LOOKALIKES)
    for key in LOOKALIKES:
        assert OutboxMessage.objects.filter(partition_key=key).count() == 1
    sequence()
    assert sorted(QueueMessage.objects.values_list("partition_key", flat=True)) == sorted(LOOKALIKES)


def test_ids_that_look_alike_stay_different_and_equal_ones_do_not(db):
    publish_many("t", [Message(number, key="k", id=one) for number in (1, 2) for one in LOOKALIKES])
    sequence()
    assert sorted(QueueMessage.objects.values_list("message_id", flat=True)) == sorted(LOOKALIKES)
    assert {bytes(payload) for payload in QueueMessage.objects.values_list("payload", flat=True)} == {b"1"}


@pytest.mark.parametrize("character", ["x", "😀", "\x00"], ids=ascii)
def test_the_longest_names_go_all_the_way(db, character):
    got = []
    topic, group = "t" * 100, "g" * 100
    sub = Sub(
        handler(topic=topic, group=group, function=lambda delivery: (got.append(delivery), delivery.reject("no")))
    )
    key, message_id = character * 190, character * 190
    assert publish(topic, 1, key=key, id=message_id) == message_id
    sub.settle()
    sequence()
    assert [(one.key, one.id, one.topic, one.group) for one in got] == [(key, message_id, topic, group)]
    dead = QueueMessage.objects.get(topic=topic + "_dlq")
    assert (dead.partition_key, dead.original_id, dead.failed_group) == (key, message_id, group)


@pytest.mark.parametrize("byte", [b"x", b"'", b"\\", b"\x00", b"\xff", b"%"], ids=repr)
@pytest.mark.parametrize("many", [False, True])
def test_a_payload_of_exactly_the_limit(db, byte, many):
    """Bytes that the driver escapes double on the wire."""
    payload = byte * 1_048_576
    if many:
        publish_many("t", [payload, payload])
    else:
        publish("t", payload)
    got = []
    Sub(handler(function=lambda delivery: got.append(delivery.body))).settle()
    assert got == [payload] * (2 if many else 1)


@one_or_many
def test_a_payload_beyond_the_limit(db, send):
    with pytest.raises(InvalidMessage, match="payload of 1048577 bytes: MAX_PAYLOAD_BYTES allows 1048576"):
        send("t", bytes(1_048_577))
    assert committed() == []


@pytest.mark.servers_only
@one_or_many
def test_a_payload_that_the_server_would_not_take_is_refused_before_it_is_sent(db, settings, send):
    """The server would close the connection, and the caller's transaction with it."""
    settings.MYSQLQUEUE = {"MAX_PAYLOAD_BYTES": 2**30}
    limit = dialect_of(connection).max_statement_bytes(connection)
    with transaction.atomic():
        send("t", 1)
        with pytest.raises(InvalidMessage, match=f"max_allowed_packet of {limit} bytes takes at most half of that"):
            send("t", bytes(limit // 2 + 1))
        send("t", 2)
    assert committed() == ["1", "2"]


@pytest.mark.servers_only
def test_the_largest_payload_that_is_not_refused_fits(db, settings):
    """Every byte of it doubled by escaping, in one statement."""
    settings.MYSQLQUEUE = {"MAX_PAYLOAD_BYTES": 2**30}
    with connection.cursor() as cursor:
        cursor.execute("SELECT @@max_allowed_packet")
        (limit,) = cursor.fetchone()
    body = b"'" * min(limit // 2 - 3000, 8_000_000)
    publish("t", body)
    assert list(OutboxMessage.objects.values_list("size", flat=True)) == [len(body)]


@pytest.mark.parametrize(
    "metadata",
    [
        {"text": "é😀\x00'\\%"},
        {"n": [1, -(2**63), 2**64 - 1, 0.5, 1e300, True, None], "o": {"": {}}},
        {"a ": 1, "A": 2, "a": 3},
        {"deep": nested(28)},
    ],
    ids=["text", "values", "names", "deep"],
)
def test_metadata_comes_back(db, metadata):
    publish("t", 1, metadata=metadata)
    got = []
    Sub(handler(function=lambda delivery: got.append(delivery.metadata))).settle()
    assert got == [{**metadata, "content_type": "application/json"}]
    assert repr(got[0]["n"] if "n" in metadata else 0) == repr(metadata.get("n", 0))


@one_or_many
@pytest.mark.parametrize(
    "value",
    [
        pytest.param(2**64, id="2**64"),
        pytest.param([-(2**63) - 1], id="-2**63-1"),
        pytest.param(10**400, id="10**400"),
        *(pytest.param(nested(levels), id=f"{levels} deep") for levels in (29, 40, 110, 950, 5000, 30_000)),
    ],
)
def test_metadata_that_some_engine_cannot_hold_is_refused_on_all(db, send, value):
    """Not by the server, with an error of its own, in the middle of the caller's transaction; and not rounded."""
    with pytest.raises(InvalidMessage, match="metadata"):
        send("t", 1, metadata={"a": value})
    assert committed() == []


# -- when ---------------------------------------------------------------------


@one_or_many
@pytest.mark.parametrize("skew", [-3600, 3600])
def test_a_delay_counts_from_the_databases_clock(db, clock, monkeypatch, send, skew):
    """The client's clock is an hour off."""
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + skew)
    monkeypatch.setattr(time, "time_ns", lambda: int((real() + skew) * 1e9))
    clock.advance(-skew)
    before = Session(USING).now()
    send("t", 1, delay=60)
    after = Session(USING).now()
    assert before + 60_000 <= OutboxMessage.objects.get().deliver_at <= after + 60_000


@one_or_many
def test_created_at_is_the_databases_too(db, monkeypatch, send):
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + 3600)
    before = Session(USING).now()
    send("t", 1)
    assert before <= OutboxMessage.objects.get().created_at <= Session(USING).now()


def test_the_databases_clock_is_utc(db):
    """Whatever the time zones of server, session and client."""
    with connection.cursor() as cursor:
        if connection.vendor == "mysql":
            cursor.execute("SET time_zone = '+11:00'")
        try:
            assert abs(Session(USING).now() - time.time() * 1000) < 60_000
            publish("t", 1)
        finally:
            if connection.vendor == "mysql":
                cursor.execute("SET time_zone = '+00:00'")
    assert abs(OutboxMessage.objects.get().created_at - time.time() * 1000) < 60_000


def test_deliver_at_is_stored_to_the_millisecond(db):
    moment = datetime.datetime(2031, 2, 3, 4, 5, 6, 789_000, tzinfo=datetime.timezone(datetime.timedelta(hours=5)))
    publish("t", 1, deliver_at=moment)
    deliver_at = OutboxMessage.objects.get().deliver_at
    assert datetime.datetime.fromtimestamp(deliver_at / 1000, datetime.UTC) == moment


def test_a_batch_may_mix_all_kinds_of_times(db):
    """Placeholders of rows with and without a delay must not shift."""
    when = datetime.datetime(2031, 1, 1, tzinfo=datetime.UTC)
    publish_many(
        "t", [Message(0, delay=100), Message(1), Message(2, deliver_at=when), Message(3, delay=200), Message(4)]
    )
    now = Session(USING).now()
    found = dict(OutboxMessage.objects.values_list("payload", "deliver_at"))
    found = {bytes(payload): deliver_at for payload, deliver_at in found.items()}
    assert (found[b"1"], found[b"2"], found[b"4"]) == (0, 1_924_992_000_000, 0)
    assert now + 90_000 < found[b"0"] <= now + 100_000
    assert now + 190_000 < found[b"3"] <= now + 200_000


def test_a_moment_that_has_passed_is_due(db):
    publish("t", 1, deliver_at=datetime.datetime(1960, 1, 1, tzinfo=datetime.UTC))
    publish("t", 2, delay=0)
    sequence()
    assert QueueMessage.objects.count() == 2


# -- plain SQL ----------------------------------------------------------------


def deliveries(count):
    got = []
    Sub(handler(function=got.append)).settle()
    assert len(got) == count
    return got


def test_plain_sql_through_a_cursor(db):
    with connection.cursor() as cursor:
        cursor.execute("INSERT INTO queue_outbox (topic, payload) VALUES ('t', '{\"a\": [1, null]}')")
        cursor.execute(
            "INSERT INTO queue_outbox (topic, payload) VALUES (%s, %s), (%s, %s)", ["t", "text", "t", b"\xff"]
        )
    got = deliveries(3)
    assert [one.payload for one in got] == [{"a": [1, None]}, b"text", b"\xff"]
    assert {one.key for one in got} == {""}
    assert len({one.id for one in got}) == 3
    assert all(one.metadata == {} for one in got)
    assert all(one.attempt == 1 for one in got)
    now = Session(USING).now()
    assert all(0 <= now - one.created_at.timestamp() * 1000 < 60_000 for one in got)


def test_plain_sql_with_binary_literals(db):
    """What works on every engine, SQLite included."""
    with connection.cursor() as cursor:
        cursor.execute("INSERT INTO queue_outbox (topic, payload) VALUES ('t', X'7B7D'), ('t', X'00FF'), ('t', X'')")
    assert [one.payload for one in deliveries(3)] == [{}, b"\x00\xff", b""]


def test_plain_sql_may_give_key_id_metadata_and_time(db):
    with connection.cursor() as cursor:
        cursor.execute(
            "INSERT INTO queue_outbox (topic, payload, partition_key, id, metadata, deliver_at) "
            "VALUES ('t', X'31', 'k 😀', 'i', '{\"content_type\": \"text/plain\", \"m\": \"é\"}', 5)"
        )
    (one,) = deliveries(1)
    assert (one.key, one.id, one.payload, one.metadata) == ("k 😀", "i", b"1", {"content_type": "text/plain", "m": "é"})


def test_plain_sql_rolls_back_with_its_transaction(db):
    with rolled_back(), connection.cursor() as cursor:
        cursor.execute("INSERT INTO queue_outbox (topic, payload) VALUES ('t', '1')")
    deliveries(0)


def test_plain_sql_for_later_waits(db, clock):
    with connection.cursor() as cursor:
        cursor.execute(
            "INSERT INTO queue_outbox (topic, payload, deliver_at) "
            f"VALUES ('t', X'31', {dialect_of(connection).now_ms} + 60000)"
        )
    deliveries(0)
    clock.advance(61)
    deliveries(1)


def test_plain_sql_metadata_that_is_no_object_counts_as_empty(db):
    with connection.cursor() as cursor:
        for text in ("[]", "7", '"text"', "null"):
            cursor.execute("INSERT INTO queue_outbox (topic, payload, metadata) VALUES ('t', X'31', %s)", [text])
    assert [one.metadata for one in deliveries(4)] == [{}] * 4


@pytest.mark.servers_only
def test_plain_sql_through_the_command_line_client(db):
    """As a shell script or a client in any other language would."""
    client = shutil.which("mariadb") or shutil.which("mysql")
    if client is None:
        pytest.skip("no mariadb client on PATH")
    settings = connection.settings_dict
    socket = settings["OPTIONS"].get("unix_socket") or (settings["HOST"] if settings["HOST"].startswith("/") else "")
    command = [client, "--default-character-set=utf8mb4", f"--user={settings['USER']}"]
    if settings["PASSWORD"]:
        command.append(f"--password={settings['PASSWORD']}")
    if socket:
        command.append(f"--socket={socket}")
    else:
        command += [f"--host={settings['HOST']}", f"--port={settings['PORT'] or 3306}", "--protocol=TCP"]
    sql = (
        "INSERT INTO queue_outbox (topic, payload) VALUES ('t', '{\"a\": \"é😀\"}');"
        "INSERT INTO queue_outbox (topic, payload, partition_key) VALUES ('t', 'text', 'k 😀');"
        "INSERT INTO queue_outbox (topic, payload) VALUES ('t', X'00FF'), ('t', '2');"
    )
    subprocess.run([*command, settings["NAME"]], input=sql.encode(), check=True, capture_output=True, timeout=30)
    got = deliveries(4)
    by_key = {key: [one.payload for one in got if one.key == key] for key in ("", "k 😀")}
    assert by_key == {"": [{"a": "é😀"}, b"\x00\xff", 2], "k 😀": [b"text"]}
    assert all(uuid.UUID(one.id) for one in got)


@pytest.mark.servers_only
@pytest.mark.parametrize("value", ["", "a", "é", "😀", "123456789", "日本語"])
def test_sql_computes_the_same_hash(db, value):
    """So that other clients can put a key's messages where ours go."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT CONCAT('__p:', CRC32(%s) %% 16)", [value])
        assert cursor.fetchone()[0] == naming.hashed_partition(value, 16)


# -- wake-ups -----------------------------------------------------------------


@pytest.fixture
def woken(db):
    """What listeners saw when they were woken: the rows in the outbox at that moment."""
    seen = []
    stop = wakeups.listen(USING, lambda: seen.append(len(stored())))
    yield seen
    stop()
    assert not wakeups.has_listeners(USING)


@one_or_many
def test_wake_up_after_the_commit(woken, send):
    with transaction.atomic():
        send("t", 1)
        assert woken == []
    assert woken == [1]


@one_or_many
def test_wake_up_finds_the_message_without_a_transaction(woken, send):
    send("t", 1)
    assert woken == [1]


@one_or_many
def test_no_wake_up_after_a_rollback(woken, send):
    with rolled_back():
        send("t", 1)
    with transaction.atomic(), rolled_back():
        send("t", 1)
    assert woken == []


@one_or_many
def test_autocommit_off_while_somebody_listens(woken, autocommit_off, send):
    """Django cannot say when such a transaction commits: the next poll finds the message."""
    send("t", 1)
    assert committed() == []
    connection.commit()
    assert committed() == ["1"]


def test_a_listener_that_raises_does_not_fail_the_publisher(db):
    def broken():
        raise Undo

    stop = wakeups.listen(USING, broken)
    try:
        with transaction.atomic():
            publish("t", 1)
    finally:
        stop()
    assert committed() == ["1"]


@one_or_many
def test_listeners_of_another_alias_sleep_on(db, send):
    seen = []
    stop = wakeups.listen("other", lambda: seen.append(1))
    try:
        send("t", 1)
    finally:
        stop()
    assert seen == []


def test_every_listener_is_woken_until_it_stops(db):
    seen = []
    first = wakeups.listen(USING, lambda: seen.append("first"))
    second = wakeups.listen(USING, lambda: seen.append("second"))
    publish("t", 1)
    first()
    publish("t", 1)
    second()
    publish("t", 1)
    assert seen == ["first", "second", "second"]

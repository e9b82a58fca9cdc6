"""The view of server-sent events, on real servers: WSGI and ASGI."""

from __future__ import annotations

import time

import pytest
from django.contrib.auth.models import Permission, User
from django.db import OperationalError, connection
from django.test import Client

from django_mysqlqueue import Message, publish, publish_many
from django_mysqlqueue.models import QueueMessage
from django_mysqlqueue.tails import views
from tests.support import garbage
from tests.support.harness import USING, sequence
from tests.support.server_sessions import processlist
from tests.support.topic_permissions import OnTopics
from tests.tails.servers import Asgi, Stream, Wsgi

WAIT = 20.0


@pytest.fixture(params=["wsgi", "asgi"])
def server(request, db, settings):
    settings.ROOT_URLCONF = "tests.tails.servers"
    settings.ALLOWED_HOSTS = ["127.0.0.1"]
    settings.MIDDLEWARE = ["django.middleware.gzip.GZipMiddleware", *settings.MIDDLEWARE]
    found = {"wsgi": Wsgi, "asgi": Asgi}[request.param]()
    yield found
    found.stop()
    until(lambda: len(views.LISTENERS) == 0)


@pytest.fixture
def login(db, settings):
    """Returns the headers of a user with permissions."""
    settings.AUTHENTICATION_BACKENDS = ["tests.support.topic_permissions.OnTopics"]
    User.objects.all().delete()
    OnTopics.granted.clear()

    def make(*permissions, topics=()):
        user = User.objects.create_user(f"u{User.objects.count()}")
        for name in permissions:
            user.user_permissions.add(Permission.objects.get(codename=name))
        OnTopics.granted.update({(user.username, "django_mysqlqueue.see_payloads", topic) for topic in topics})
        client = Client()
        client.force_login(user)
        return {"Cookie": f"sessionid={client.cookies['sessionid'].value}"}

    yield make
    User.objects.all().delete()


@pytest.fixture
def open_stream(server, login):
    headers = login("see_payloads")
    streams = []

    def begin(where="/tail/t/", **more):
        stream = Stream(server, where, **{**headers, **more})
        streams.append(stream)
        return stream

    yield begin
    for stream in streams:
        stream.close()


def until(condition):
    deadline = time.monotonic() + WAIT
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def send(*payloads, **options):
    publish_many("t", (Message(payload, key="k", **options) for payload in payloads))
    sequence()


def refusal(stream):
    found = stream.response.status, stream.response.read().decode()
    stream.close()
    return found


@pytest.mark.promise("Tails")
def test_a_page_follows_a_topic_and_continues_after_a_reconnect(open_stream):
    send("before")
    stream = open_stream().first()
    assert (stream.response.status, stream.retry) == (200, 3000)
    assert stream.response.headers["Content-Type"] == "text/event-stream; charset=utf-8"
    assert stream.response.headers["Cache-Control"] == "no-store"
    send(1, {"ü": "\n"})
    assert stream.take(2) == [1, {"ü": "\n"}]
    last = stream.last_id
    stream.close()
    send(3, 4)
    stream = open_stream(**{"Last-Event-ID": str(last)})
    assert stream.take(2) == [3, 4]
    assert stream.last_id == QueueMessage.objects.latest("offset").offset


def test_a_reconnect_before_the_first_message_misses_nothing(open_stream):
    stream = open_stream().first()
    stream.close()
    send(1)
    assert open_stream(**{"Last-Event-ID": str(stream.last_id)}).take(1) == [1]


def test_the_data_is_what_the_command_prints(open_stream):
    stream = open_stream().first()
    publish("t", b"\x00", key="k", metadata={"a": 1}, expires_in=60, priority=3)
    sequence()
    ((kind, data),) = [next(stream.events())]
    row = QueueMessage.objects.get()
    assert kind == "message"
    assert {name: data[name] for name in ("offset", "topic", "key", "id", "priority", "payload_base64")} == {
        "offset": row.offset,
        "topic": "t",
        "key": "k",
        "id": row.message_id,
        "priority": 3,
        "payload_base64": "AA==",
    }
    assert data["metadata"]["a"] == 1
    assert data["expires_at"] > data["published_at"] >= data["created_at"]


def test_parameters_select_messages_and_the_beginning(open_stream):
    publish_many("t", (Message(n, key="ab"[n % 2], metadata={"n": n}) for n in range(10)))
    sequence()
    first = QueueMessage.objects.earliest("offset").offset
    assert open_stream("/tail/t/?offset=0&key=a").take(5) == [0, 2, 4, 6, 8]
    assert open_stream(f"/tail/t/?offset={first + 3}").take(1) == [3]
    assert open_stream("/tail/t/?since=10m&where=%7B%22n%22:[7]%7D").take(1) == [7]
    reconnected = open_stream("/tail/t/?offset=0", **{"Last-Event-ID": str(first + 7)})
    assert reconnected.take(2) == [8, 9], "the browser repeats the address, and knows more"


def test_a_gap_is_an_event(open_stream, settings):
    send(1, 2)
    last = QueueMessage.objects.latest("offset").offset
    settings.MYSQLQUEUE = {**settings.MYSQLQUEUE, "RETENTION": 0, "ORPHAN_RETENTION": 0}
    garbage.collect(USING)
    stream = open_stream("/tail/t/?offset=0")
    assert stream.take(1) == [{"after": 0, "until": last}]
    assert stream.last_id == 0, "what is left in it would follow"
    send(3)
    assert stream.take(1) == [3]


def test_heartbeats_move_the_position_past_what_does_not_match(open_stream):
    stream = open_stream("/tail/t/?key=other").first()
    send(*range(20))
    end = QueueMessage.objects.latest("offset").offset
    events = stream.events()
    deadline = time.monotonic() + WAIT
    before = stream.blocks
    while stream.last_id < end:
        assert time.monotonic() < deadline
        stream.blocks = 0
        stream.first()
    assert before
    publish("t", "x", key="other")
    sequence()
    assert next(events)[1]["payload"] == "x"


@pytest.mark.promise("Tails")
def test_a_position_beyond_the_end_is_a_gap_after_the_end(open_stream):
    """The log has lost its end, for example in a failover."""
    stream = open_stream(**{"Last-Event-ID": str(10**9)}).first()
    assert stream.last_id == 0
    assert stream.take(1) == [{"after": 0, "until": 10**9, "truncated": True}]
    assert stream.last_id == 0, "a browser that connects again does not get another gap"
    send(1)
    assert stream.take(1) == [1]


# -- permissions -----------------------------------------------------------------


@pytest.mark.any_engine
@pytest.mark.promise("Tails")
@pytest.mark.parametrize(
    ("permissions", "topics", "allowed"),
    [
        (("see_payloads",), (), {"t", "u"}),
        ((), ("t",), {"t"}),
        (("view_dashboard", "operate_dashboard"), ("u",), {"u"}),
        ((), (), set()),
    ],
)
def test_permission_by_topic(server, login, permissions, topics, allowed):
    headers = login(*permissions, topics=topics)
    for topic in ("t", "u"):
        stream = Stream(server, f"/tail/{topic}/?offset=0", **headers)
        if topic in allowed:
            assert stream.first().response.status == 200
            stream.close()
        else:
            assert refusal(stream) == (403, f"You do not have permission to follow the topic '{topic}'.\n")


@pytest.mark.any_engine
def test_a_dlq_topic_counts_as_its_topic(server, login):
    headers = login(topics=("t",))
    stream = Stream(server, "/tail/t_dlq/", **headers).first()
    assert stream.response.status == 200
    stream.close()


@pytest.mark.any_engine
def test_without_a_login_nothing_is_shown(server):
    assert refusal(Stream(server, "/tail/t/"))[0] == 403


@pytest.mark.any_engine
def test_a_subclass_has_its_own_rules_and_fields(server):
    stream = Stream(server, "/public/t/").first()
    send("secret", {"a": 1})
    assert next(stream.events()) == ("message", {"payload": {"a": 1}})
    stream.close()
    assert refusal(Stream(server, "/public/u/"))[0] == 403, "only its topics"


@pytest.mark.any_engine
def test_a_message_that_cannot_be_serialized_is_left_out_and_logged(server, caplog):
    """If it ended the stream, the browser would get it again and again, and nothing after it."""
    stream = Stream(server, "/public/t/").first()
    send({"total": 1}, "raise", {"total": 2})
    assert stream.take(2) == [{"total": 1}, {"total": 2}]
    assert "stream.message_left_out topic=t offset=" in caplog.text
    stream.close()


def test_heartbeats_come_while_all_is_left_out(server):
    stream = Stream(server, "/public/t/").first()
    send(*["slow secret"] * 20)
    first, end = (find("offset").offset for find in (QueueMessage.objects.earliest, QueueMessage.objects.latest))
    positions = []
    deadline = time.monotonic() + WAIT
    while stream.last_id < end:
        assert time.monotonic() < deadline
        stream.blocks = 0
        positions.append(stream.first().last_id)
    assert [position for position in positions if first <= position < end], "not only when there is nothing else"
    stream.close()


@pytest.mark.any_engine
@pytest.mark.parametrize("server", ["wsgi"], indirect=True)
def test_topics_must_be_a_list(server, settings):
    stream = Stream(server, "/wrong/t/")
    assert stream.response.status == 500
    stream.close()


@pytest.mark.any_engine
def test_redact(open_stream, settings):
    settings.MYSQLQUEUE = {**settings.MYSQLQUEUE, "REDACT": "tests.tails.test_view.hide"}
    stream = open_stream().first()
    publish("t", {"card": "4111", "total": 5}, key="k", metadata={"token": "4111"})
    publish("t", b"\xff4111", key="k")
    sequence()
    events = stream.events()
    (_, first), (_, second) = next(events), next(events)
    assert (first["payload"], first["metadata"]["token"]) == ({"card": "****", "total": 5}, "****")
    assert second["payload"] == "\\xff****"
    assert "payload_base64" not in second


@pytest.mark.any_engine
def test_an_invalid_redact_shows_nothing(open_stream, settings, caplog):
    settings.MYSQLQUEUE = {**settings.MYSQLQUEUE, "REDACT": "tests.nothing.here"}
    stream = open_stream()
    assert stream.response.status == 500
    stream.close()
    assert len(views.LISTENERS) == 0


def hide(text, *, topic, kind):
    return text.replace("4111", "****")


# -- bad requests ----------------------------------------------------------------


@pytest.mark.any_engine
@pytest.mark.parametrize(
    ("where", "headers", "text"),
    [
        ("/tail/t/?offset=x", {}, "offset 'x': must be an integer"),
        ("/tail/t/?since=yesterday", {}, "since='yesterday': must be a number of seconds"),
        ("/tail/t/?since=1&offset=1", {}, "since and offset were both given"),
        ("/tail/t/?where=x", {}, "where='x': must be JSON"),
        ("/tail/t/?where=%7B%22a%22:1%7D", {}, "where: filter['a']"),
        ("/tail/t/?limit=5", {}, "'limit' is not a parameter. Parameters: key, offset, since, where."),
        ("/tail/a%20b/", {}, "topic 'a b'"),
        ("/tail/t/", {"Last-Event-ID": "-1"}, "Last-Event-ID '-1': must be an integer"),
    ],
)
def test_bad_parameters_are_named_with_the_rule(open_stream, where, headers, text):
    status, answer = refusal(open_stream(where, **headers))
    assert status == 400
    assert text in answer


def test_a_database_that_does_not_answer(open_stream, monkeypatch):
    def fail(session):
        raise (
            OperationalError(2013, "Lost connection")
            if connection.vendor == "mysql"
            else OperationalError("database is locked")
        )

    monkeypatch.setattr(views.log, "end_of_log", fail)
    status, answer = refusal(open_stream())
    assert status == 503
    assert "The database 'default'" in answer


# -- cost ------------------------------------------------------------------------


@pytest.mark.any_engine
def test_streams_are_bounded_and_those_that_were_left_are_not_counted(open_stream):
    streams = [open_stream("/few/t/").first() for _ in range(2)]
    refused = open_stream("/few/t/")
    assert refused.response.headers["Retry-After"] == "30"
    assert refusal(refused) == (503, "There are 2 streams already. Try again later.\n")
    streams[0].close()
    until(lambda: len(views.LISTENERS) == 1)
    assert open_stream("/few/t/").first().response.status == 200


@pytest.mark.any_engine
def test_a_stream_ends_after_its_longest_duration(open_stream):
    stream = open_stream("/short/t/").first()
    begun = time.monotonic()
    assert stream.response.read().startswith(b"event: position\nid: ")
    assert time.monotonic() - begun < 5
    until(lambda: len(views.LISTENERS) == 0)


@pytest.mark.servers_only
def test_listeners_hold_no_connections_of_the_database(open_stream):
    def sessions():
        with connection.cursor() as cursor:
            cursor.execute(f"SELECT id FROM {processlist()} WHERE db = DATABASE()")
            return {session for (session,) in cursor.fetchall()}

    before = sessions()
    streams = [open_stream("/seldom/t/").first() for _ in range(20)]
    send(1)
    assert [stream.take(1) for stream in streams] == [[1]] * 20
    # The hub's, and perhaps one of a request. A session lives on for a moment after its client has closed it.
    until(lambda: len(sessions() - before) <= 2)

"""Publishing by plain SQL."""

from __future__ import annotations

import shutil
import subprocess
import uuid

import pytest
from django.db import connection

from django_mysqlqueue.names.keys import hashed_partition
from tests.support.harness import USING, Sub, handler
from tests.support.internals import Session, dialect_of
from tests.support.publishing import rolled_back


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
        assert cursor.fetchone()[0] == hashed_partition(value, 16)

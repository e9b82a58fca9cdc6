"""``manage.py queuetail``: what a terminal and a pipe get."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
import time

import pytest
from django.core.management import CommandError, call_command
from django.db import connection

from django_mysqlqueue import Message, publish, publish_many
from django_mysqlqueue.management.commands import queuetail
from django_mysqlqueue.models import QueueMessage
from tests.support import garbage
from tests.support.harness import USING, Sub, handler, sequence
from tests.support.paths import ROOT
from tests.support.processes import deaf_to_ctrl_c, environment, hear_ctrl_c
from tests.support.server_sessions import processlist

WAIT = 30.0
COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def lines(capsys, *arguments):
    call_command("queuetail", *arguments)
    return capsys.readouterr().out.splitlines()


def send(*payloads, **options):
    publish_many("t", (Message(payload, key="k", **options) for payload in payloads))
    sequence()


def test_a_pipe_gets_one_json_object_a_line(db, capsys):
    send({"ü": "\n\x1b"}, b"\xff", metadata={"a": 1})
    first, second = map(json.loads, lines(capsys, "t"))
    row = QueueMessage.objects.earliest("offset")
    assert first == {
        "offset": row.offset,
        "topic": "t",
        "key": "k",
        "id": row.message_id,
        "priority": 0,
        "created_at": first["created_at"],
        "published_at": first["published_at"],
        "metadata": {"content_type": "application/json", "a": 1},
        "payload": {"ü": "\n\x1b"},
    }
    assert second["payload_base64"] == "/w=="
    assert first["published_at"].endswith("+00:00")


def test_a_lone_surrogate_is_escaped(db, capsys):
    QueueMessage.objects.create(
        topic="t", partition_key="k", message_id="i", payload=b'"\\ud800"', created_at=1, published_at=1
    )
    (line,) = lines(capsys, "t")
    assert json.loads(line)["payload"] == "\ud800"
    line.encode()


def test_text_has_a_line_for_each_message(db, capsys):
    send(1, metadata={"region": "eu"}, priority=5)
    publish("t", b"\xff\x00")
    sequence()
    first, second = lines(capsys, "t", "--format", "text", "--no-color")
    offset = QueueMessage.objects.earliest("offset").offset
    assert re.fullmatch(rf'\S+ \S+  {offset}  k  1  {{"region":"eu"}}  priority 5', first)
    assert re.fullmatch(r"\S+ \S+  \d+  -  \\xff\\u0000", second)


def test_nothing_in_a_message_reaches_the_terminal_as_a_command(db, capsys):
    """Keys, payloads and metadata are the publishers'."""
    evil = "\x1b[2J\x9b2J\u202e\r"
    publish("t", evil, key=evil, metadata={evil: evil})
    publish("t", evil.encode(), key="k")
    sequence()
    call_command("queuetail", "t", "--format", "text", "--no-color")
    found = capsys.readouterr().out
    assert not re.search("[\x1b\x9b\u202e\r]", found)
    assert "\\u001b[2J\\u009b2J\\u202e\\u000d" in found


def test_dead_letters_name_their_group_and_error(db, capsys):
    send("x")
    sub = Sub(handler(function=lambda delivery: delivery.reject("it is wrong\x1b"))).step()
    sub.work()
    sub.flush()
    sequence()
    (line,) = lines(capsys, "t_dlq", "--format", "text", "--no-color")
    assert line.endswith("failed in g after 1 attempts: it is wrong\\u001b")
    assert json.loads(lines(capsys, "t_dlq", "--format", "json")[0])["failed_group"] == "g"


def test_options_select(db, capsys):
    publish_many("t", (Message(n, key="ab"[n % 2], metadata={"n": n}) for n in range(30)))
    sequence()

    def numbers(*arguments):
        return [json.loads(line)["payload"] for line in lines(capsys, "t", *arguments)]

    first = QueueMessage.objects.earliest("offset").offset
    assert numbers() == list(range(20, 30))
    assert numbers("--limit", "2") == [28, 29]
    assert numbers("--offset", str(first + 27)) == [27, 28, 29]
    assert numbers("--since", "10m", "--limit", "2") == [0, 1]
    assert numbers("--since", "2020-01-01T00:00", "--limit", "1") == [0]
    assert numbers("--key", "b", "--limit", "2") == [27, 29]
    assert numbers("--offset", "0", "--where", '{"n": [{"numeric": ["<", 2]}]}') == [0, 1]


def test_a_log_that_has_lost_its_end_is_a_line_of_its_own(db, capsys):
    send(1)
    end = QueueMessage.objects.get().offset
    call_command("queuetail", "t", offset=end + 3)
    (line,) = capsys.readouterr().out.splitlines()
    assert json.loads(line) == {"topic": "t", "gap": {"after": end, "until": end + 2, "truncated": True}}
    call_command("queuetail", "t", offset=end + 3, format="text")
    out = capsys.readouterr().out
    assert f"The log ends at offset {end}, and this tail was to continue after {end + 2}: that offset is wrong" in out


def test_a_gap_is_a_line_of_its_own(db, capsys, settings):
    send(1)
    last = QueueMessage.objects.latest("offset").offset
    settings.MYSQLQUEUE = {"RETENTION": 0, "ORPHAN_RETENTION": 0}
    garbage.collect(USING)
    (line,) = lines(capsys, "t", "--offset", "0")
    assert json.loads(line) == {"topic": "t", "gap": {"after": 0, "until": last}}
    (line,) = lines(capsys, "t", "--offset", "0", "--format", "text", "--no-color")
    assert line == f"GC has deleted messages up to offset {last} before they were read."


def test_without_messages_it_says_so_beside_the_output(db, capsys):
    send(1)
    call_command("queuetail", "t", "--key", "other", "--format", "text", "--no-color")
    found = capsys.readouterr()
    assert (found.out, found.err) == ("", "No messages.\n")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["tt"], "There is no topic 'tt'"),
        (
            ["t", "--since", "yesterday"],
            "--since 'yesterday': must be a duration such as 10m, or a time such as 2026",
        ),
        (["t", "--since", "2020-99-01"], "--since '2020-99-01': must be a duration"),
        (["t", "--where", "{"], "--where='{': must be JSON"),
        (["t", "--where", '{"a": 1}'], "where: filter"),
        (["t", "--offset", "-1"], "offset -1: must be an integer"),
        (["t", "--limit", "0"], "limit 0: must be an integer of at least 1"),
        (["t", "--since", "1", "--offset", "1"], "not allowed with argument"),
    ],
)
def test_bad_options_are_named_with_the_rule(db, arguments, text):
    send(1)
    with pytest.raises(CommandError, match=re.escape(text)):
        call_command("queuetail", *arguments)


# -- real processes --------------------------------------------------------------


def start(*arguments, **options):
    env = environment() | options.pop("env", {})
    command = [sys.executable, str(ROOT / "manage.py"), "queuetail", *arguments]
    return subprocess.Popen(command, env=env, cwd=ROOT, preexec_fn=hear_ctrl_c, **options)


@pytest.mark.processes
def test_it_follows_in_a_pipe_until_ctrl_c(db):
    send("before")
    with deaf_to_ctrl_c():
        process = start("t", "--follow", "--since", "10m", stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        assert json.loads(process.stdout.readline())["payload"] == "before"
        send(1)
        assert json.loads(process.stdout.readline())["payload"] == 1, "each line is written at once"
        process.send_signal(signal.SIGINT)
        assert process.wait(WAIT) == queuetail.INTERRUPTED
        assert process.communicate() == ("", "")
    finally:
        process.kill()
        process.communicate()


@pytest.mark.processes
def test_a_reader_that_ends_is_no_error(db):
    send(*range(2000))
    process = start("t", "--offset", "0", stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.stderr.read() == ""
    process.stderr.close()
    assert process.wait(WAIT) == 0


@pytest.mark.processes
def test_following_ends_when_nobody_reads_any_more(db):
    """Not only with the next message."""
    send(1)
    process = start("t", "--follow", "--offset", "0", stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stderr is not None
    assert json.loads(process.stdout.readline())["payload"] == 1
    process.stdout.close()
    assert process.wait(WAIT) == 0
    assert process.stderr.read() == ""
    process.stderr.close()


@pytest.mark.processes
@pytest.mark.parametrize("kind", ["json", "text"])
def test_an_output_that_lacks_characters_gets_them_escaped(db, kind):
    send("é\u20ac")
    env = {"PYTHONIOENCODING": "ascii"}
    process = start("t", "--format", kind, "--no-color", stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env)
    out, err = process.communicate(timeout=WAIT)
    assert (process.returncode, err) == (0, b"")
    if kind == "json":
        assert json.loads(out)["payload"] == "é\u20ac"
    else:
        assert rb'"\xe9\u20ac"' in out


@pytest.mark.processes
def test_an_output_that_is_full_is_one_line(db):
    send(1)
    with open("/dev/full", "wb") as full:
        process = start("t", stdout=full, stderr=subprocess.PIPE, text=True)
        _, err = process.communicate(timeout=WAIT)
    assert process.returncode == 1
    assert "The output cannot be written: [Errno 28]" in err


@pytest.mark.processes
def test_a_terminal_gets_colours_and_how_to_stop(db):
    send("before")
    outer, inner = pty.openpty()
    process = start("t", "--follow", "--limit", "1", stdin=inner, stdout=inner, stderr=inner, env={"TERM": "xterm"})
    os.close(inner)
    try:
        found = _read(outer, "Press Ctrl+C to stop.")
        send({"a": 1})
        found += _read(outer, '{"a":1}')
        assert process.wait(WAIT) == 0
    finally:
        process.kill()
        process.wait()
        os.close(outer)
    assert COLOUR.search(found)
    assert re.search(r"Following 't' from offset \d+\. Press Ctrl\+C to stop\.", COLOUR.sub("", found))
    assert re.search(r"  k  \{\"a\":1\}\r\n$", COLOUR.sub("", found))


def _read(terminal: int, text: str) -> str:
    found, deadline = "", time.monotonic() + WAIT
    while not re.search(f"{re.escape(text)}\r?\n", COLOUR.sub("", found)):
        assert time.monotonic() < deadline, found
        found += os.read(terminal, 1000).decode()
    return found


@pytest.mark.processes
@pytest.mark.servers_only
@pytest.mark.promise("Tails")
def test_it_survives_the_loss_of_its_connection(db):
    send("before")
    process = start("t", "--follow", "--offset", "0", stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        assert json.loads(process.stdout.readline())["payload"] == "before"
        with connection.cursor() as cursor:
            cursor.execute(f"SELECT id FROM {processlist()} WHERE db = DATABASE() AND id <> CONNECTION_ID()")
            for (session,) in cursor.fetchall():
                cursor.execute(f"KILL {session}")
        send("after")
        assert json.loads(process.stdout.readline())["payload"] == "after"
    finally:
        process.kill()
        process.communicate()

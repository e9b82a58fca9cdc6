"""Consumers in Node.js and in a shell, as docs/howto/sql.md prints them, beside subscribers: through kills."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
import urllib.parse
from collections import Counter
from pathlib import Path

import pytest
from django.db import connection, connections

from django_mysqlqueue import Message, publish_many
from django_mysqlqueue.models import DeliveryState
from tests.app.models import Effect
from tests.support import invariants
from tests.support.harness import USING, lag, sequence
from tests.support.internals import GroupRef, groups, installing
from tests.support.paths import ROOT
from tests.support.processes import drained, wait_for
from tests.support.sql_clients import Client
from tests.support.tables import Tables
from tools import servers

pytestmark = [
    pytest.mark.servers_only,
    pytest.mark.processes,
    pytest.mark.promise("Consumers in plain SQL"),
]

PAGE = ROOT / "docs" / "howto" / "sql.md"
PRINTED = "await connection.query('INSERT INTO sent_mails (order_id) VALUES (?)', [order.id])"


LEASES = {"LEASE_DURATION": 3, "LEASE_RENEWAL_INTERVAL": 1, "PREFETCH": 2}


@pytest.fixture(autouse=True)
def procedures(db, settings):
    settings.MYSQLQUEUE = {**settings.MYSQLQUEUE, **LEASES}
    installing.install(USING)


def node_folder() -> Path:
    try:
        return servers.node()
    except servers.NotAvailable as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(error))


def printed(language: str) -> str:
    (code,) = re.findall(rf"```{language}\n(.*?)```", PAGE.read_text(), re.DOTALL)
    return code


def url() -> str:
    """The test database's, as mysql2 wants it."""
    parameters = connections[USING].settings_dict
    socket = parameters["OPTIONS"].get("unix_socket") or parameters["HOST"]
    user, name = parameters["USER"], parameters["NAME"]
    password = urllib.parse.quote(parameters["PASSWORD"], safe="")
    if socket.startswith("/"):
        return f"mysql://{user}:{password}@localhost/{name}?socketPath={urllib.parse.quote(socket, safe='')}"
    return f"mysql://{user}:{password}@{socket}:{parameters['PORT'] or 3306}/{name}"


class Consumer:
    """A process of Node.js."""

    def __init__(self, script: Path) -> None:
        self.log = script.with_suffix(".log").open("a+")
        self._process = subprocess.Popen(
            ["node", script.name],
            cwd=script.parent,
            env={**os.environ, "DATABASE_URL": url()},
            stdin=subprocess.DEVNULL,
            stdout=self.log,
            stderr=self.log,
        )

    def kill(self) -> None:
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()

    def output(self) -> str:
        self.log.seek(0)
        return self.log.read()


@pytest.fixture
def node(tmp_path):
    """Starts consumers that run some code."""
    (tmp_path / "node_modules").symlink_to(node_folder() / "node_modules")
    running: list[Consumer] = []

    def start(code: str) -> Consumer:
        script = tmp_path / "consumer.mjs"
        script.write_text(code)
        running.append(Consumer(script))
        return running[-1]

    yield start
    for one in running:
        one.kill()
        one.log.close()


@pytest.fixture
def sent_mails(db):
    with connection.cursor() as cursor:
        cursor.execute("CREATE TABLE sent_mails (order_id INT PRIMARY KEY)")
    yield lambda: sorted(number for (number,) in rows("SELECT order_id FROM sent_mails"))
    with connection.cursor() as cursor:
        cursor.execute("DROP TABLE sent_mails")


def rows(statement):
    with connection.cursor() as cursor:
        cursor.execute(statement)
        return cursor.fetchall()


@pytest.mark.parametrize("mode", ["ordered", "shared"])
def test_the_consumer_of_the_page(node, sent_mails, mode):
    groups.register(USING, GroupRef("mail", "orders"), mode=mode, start="earliest")
    publish_many("orders", [Message({"id": n}, key=f"k{n % 3}") for n in range(10)])
    publish_many("orders", [Message(b"not JSON", key="k1")])
    sequence()
    consumer = node(printed("js"))
    wait_for(lambda: len(sent_mails()) == 10, timeout=30)
    assert sent_mails() == list(range(10))
    wait_for(lambda: DeliveryState.objects.filter(retry_count__gte=1).exists(), timeout=10)
    assert "SyntaxError" in DeliveryState.objects.get(retry_count__gte=1).last_error
    assert consumer.output() == ""


def shell(statement: str) -> list[dict[str, str]]:
    """What the ``mysql`` client prints."""
    to = connections[USING].settings_dict
    host = to["OPTIONS"].get("unix_socket") or to["HOST"]
    where = [f"--socket={host}"] if host.startswith("/") else [f"--host={host}", f"--port={to['PORT'] or 3306}"]
    command = [*servers.client(), *where, f"--user={to['USER']}", "--batch", f"--execute={statement}", to["NAME"]]
    env = {**os.environ, "MYSQL_PWD": to["PASSWORD"]}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    names, *lines = [line.split("\t") for line in done.stdout.splitlines()] or [[]]
    return [dict(zip(names, line, strict=True)) for line in lines]


@pytest.mark.parametrize("mode", ["ordered", "shared"])
def test_the_command_line_client(db, mode):
    groups.register(USING, GroupRef("mail", "orders"), mode=mode, start="earliest")
    shell("INSERT INTO queue_outbox (topic, payload) VALUES ('orders', '{\"id\": 7}')")
    sequence()
    (row,) = shell("CALL queue_claim('mail', 'orders', 1)")
    assert row["payload"] == '{"id": 7}'
    assert shell("CALL queue_claim('mail', 'orders', 1)") == []
    assert shell(f"CALL queue_ack('mail', 'orders', '{row['handle']}')") == [{"result": "acked"}]
    assert shell(f"CALL queue_ack('mail', 'orders', '{row['handle']}')") == [{"result": "stale"}]
    assert lag("mail", "orders") == 0


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("group", "topic"), [("atomic", "p.plain"), ("shared_atomic", "p.shared_atomic")])
def test_a_mixed_fleet_through_kills(node, start, group, topic):
    """Of two consumers in Node.js and two subscribers, one of each kind is killed again and again."""
    ref = GroupRef(group, topic)
    mode = "ordered" if group == "atomic" else "shared"
    groups.register(USING, ref, mode=mode, start="earliest")
    code = printed("js").replace("['mail', 'orders']", f"['{group}', '{topic}']")
    code = code.replace("setTimeout(500)", "setTimeout(5)")
    assert PRINTED in code
    effect = f"await connection.query('INSERT INTO {Effect._meta.db_table} (name, value) VALUES (?, ?)', ['{group}|'"
    code = code.replace(PRINTED, f"{effect} + message.key + '|' + message.attempt + '|sql', order.n])")
    total, rounds = 300, 5
    clients = [node(code) for _ in range(2)]
    arguments = ("--group", group, "--claim-size", "2")
    workers = [start(*arguments, **LEASES) for _ in range(2)]
    for chunk in range(rounds):
        first = chunk * total // rounds
        publish_many(topic, [Message({"n": n}, key=f"k{n % 6}") for n in range(first, first + total // rounds)])
        time.sleep(0.5)
        victim = chunk % 2
        clients[victim].kill()
        clients[victim] = node(code)
        workers[1 - victim].send(signal.SIGKILL)
        workers[1 - victim].wait()
        workers[1 - victim] = start(*arguments, **LEASES)
    wait_for(drained(group, topic), workers[0], timeout=150)
    effects = Effect.objects.filter(name__startswith=f"{group}|")
    assert Counter(effects.values_list("value", flat=True)) == dict.fromkeys(range(total), 1), "each exactly once"
    by_clients = effects.filter(name__endswith="|sql").count()
    assert 0 < by_clients < total
    if mode == "ordered":
        for key in range(6):
            mine = effects.filter(name__startswith=f"{group}|k{key}|1").order_by("pk").values_list("value", flat=True)
            assert list(mine) == sorted(mine)
    client = Client(ref)
    client.claim()
    client.close()
    assert invariants.at_any_moment(Tables.read()) == []
    assert all(consumer.output() == "" for consumer in clients)

"""A client is lost after each statement of each procedure: nothing is lost with it, and nothing is done by halves."""

from __future__ import annotations

import json
from collections.abc import Iterator

import MySQLdb
import pytest

from django_mysqlqueue import Message, publish, publish_many
from django_mysqlqueue.models import OutboxMessage
from tests.procedures import probes
from tests.support import invariants
from tests.support.harness import sequence
from tests.support.sql_clients import Client, pass_time, register
from tests.support.tables import Tables

pytestmark = [pytest.mark.servers_only, pytest.mark.promise("Consumers in plain SQL")]

MODES = pytest.mark.parametrize("mode", ["ordered", "shared"])


@pytest.fixture
def probed(procedures: None) -> Iterator[None]:
    probes.install()
    yield
    from django_mysqlqueue.procedures import installing

    installing.remove("default")


class Killed(Exception):
    """The server has ended the connection."""


class Mortal(Client):
    """A client whose connection ends after some statement."""

    def __init__(self, step: int) -> None:
        super().__init__()
        self.run("SET @queue_step = 0, @queue_kill = %s", step)

    def run(self, statement, *parameters):
        try:
            return super().run(statement, *parameters)
        except MySQLdb.Error as error:
            if error.args[0] in (1317, 1927, 2006, 2013, 3169):
                raise Killed from error
            raise


def fill(mode: str) -> None:
    """Messages of each kind: new, with an expiry, for another group, failed before, lost once and lost twice."""
    register(mode)
    publish_many("t", [Message({"n": n}, key=f"k{n % 3}") for n in range(9)])
    publish("t", {"n": 9}, key="k0", expires_in=0.001)
    publish("t", {"n": 10}, key="k9", priority=5)
    sequence()
    OutboxMessage.objects.create(topic="t", partition_key="k1", payload=b'{"n": 11}', target_group="other")
    sequence()
    before = Client()
    rows = before.claim(4)
    before.nack(rows[0]["handle"], delay=0)
    pass_time(3600)
    rows = before.claim(1)
    before.close()
    pass_time(3600)


def act(client: Client, done: dict[int, str], known: dict[int, str]) -> None:
    """Calls each procedure. ``done``: what the client was told; ``known``: what it had asked for."""
    for _ in range(3):
        for row in client.claim(3):
            number = json.loads(row["payload"])["n"]
            action = ("ack", "nack", "snooze", "reject", "extend", "in a transaction")[number % 6]
            known[number] = action
            if action == "in a transaction":
                with client.transaction():
                    result = client.ack(row["handle"])
            else:
                result = getattr(client, action)(row["handle"])
            done[number] = result


@MODES
def test_a_client_may_be_lost_after_any_statement(probed, mode, db):
    step, steps = 0, 0
    while True:
        step += 1
        from tests.conftest import empty

        empty()
        fill(mode)
        done: dict[int, str] = {}
        known: dict[int, str] = {}
        before = Tables.read()
        client = Mortal(step)
        try:
            act(client, done, known)
            killed = False
        except Killed:
            killed = True
        client.close()
        steps += killed
        after = Tables.read()
        assert invariants.at_any_moment(after) == [], f"step {step}"
        assert invariants.between(before, after) == [], f"step {step}"
        again = drain()
        where = f"step {step}: {done} of {known}, then {again}"
        assert not {n for n, result in done.items() if result in ("acked", "dead_lettered")} & set(again), where
        assert invariants.drained(Tables.read()) == [], where
        handled = set(again) | {n for n, result in done.items() if result in ("acked", "dead_lettered")}
        maybe = {n for n, action in known.items() if n not in done and action in ("ack", "reject", "in a transaction")}
        assert handled | maybe == set(range(11)) - {9}, where
        if not killed:
            break
    assert steps > 60


def drain() -> list[int]:
    """Handles everything that is left, and returns what that was."""
    client = Client()
    found: list[int] = []
    quiet = 0
    while quiet < 3:
        pass_time(3600)
        sequence()
        rows = client.claim(1000)
        quiet = 0 if rows else quiet + 1
        for row in rows:
            assert client.ack(row["handle"]) == "acked"
            found.append(json.loads(row["payload"])["n"])
    client.close()
    return found

"""A client is lost after each statement of each procedure: nothing is lost with it, and nothing is done by halves."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable, Iterator
from typing import Any

import MySQLdb
import pytest

from django_mysqlqueue import Message, publish, publish_many
from django_mysqlqueue.models import OutboxMessage
from tests.crash.audit import Observer
from tests.procedures import probes
from tests.support import invariants
from tests.support.harness import USING, Sub, handler, sequence
from tests.support.internals import installing
from tests.support.snapshots import Snapshot
from tests.support.sql_clients import Client, pass_time, register
from tests.support.tables import Tables

pytestmark = [
    pytest.mark.servers_only,
    pytest.mark.usefixtures("db"),
    pytest.mark.promise("Consumers in plain SQL"),
]

MODES = pytest.mark.parametrize("mode", ["ordered", "shared"])


@pytest.fixture(scope="module")
def probed(_database: None) -> Iterator[None]:
    """Creating them takes longer than many a test."""
    probes.install()
    yield
    installing.remove(USING)


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


def fill(mode: str) -> Snapshot:
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
    return Snapshot()


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


class Attempt:
    """What a client has done until a statement was killed, with messages of each kind."""

    def __init__(self, filled: Snapshot, step: int, *, query: bool = False) -> None:
        filled.restore()
        self.done: dict[int, str] = {}
        self.known: dict[int, str] = {}
        self.before = Tables.read()
        self.client = Mortal(step)
        self.client.run("SET @queue_query = %s", query)
        try:
            act(self.client, self.done, self.known)
            self.killed = False
        except Killed:
            self.killed = True
        self.where = f"step {step}: {self.done} of {self.known}"

    @property
    def settled(self) -> set[int]:
        """The messages of which the client was told that they are."""
        return {number for number, result in self.done.items() if result in ("acked", "dead_lettered")}

    def check(self, drained: Drained) -> None:
        """Of what was left, nothing is missing."""
        again = drained.handled(self.where)
        where = f"{self.where}, then {again}"
        assert not self.settled & set(again), where
        ends = ("ack", "reject", "in a transaction")
        maybe = {number for number, action in self.known.items() if number not in self.done and action in ends}
        assert set(again) | self.settled | maybe == set(range(11)) - {9}, where


class Drained:
    """What others handle after a crash. The same rows come to the same end, so each is looked for once."""

    def __init__(self, drain: Callable[[], list[int]]) -> None:
        self._drain = drain
        self._known: list[tuple[dict[str, Any], list[int]]] = []

    def handled(self, where: str) -> list[int]:
        tables = Observer().read().tables
        for known, again in self._known:
            if known == tables:
                return again
        again = self._drain()
        assert invariants.drained(Tables.read()) == [], f"{where}, then {again}"
        self._known.append((tables, again))
        return again


@MODES
def test_a_client_may_be_lost_after_any_statement(probed, mode):
    filled, drained = fill(mode), Drained(drain)
    for step in itertools.count(1):
        attempt = Attempt(filled, step)
        attempt.client.close()
        after = Tables.read()
        assert invariants.at_any_moment(after) == [], attempt.where
        assert invariants.between(attempt.before, after) == [], attempt.where
        attempt.check(drained)
        if not attempt.killed:
            break
    assert step > 60


STRIDE = 1 if os.environ.get("EVERY_STEP") else 8
"""Every how many statements one is killed. Each variant begins with another one."""
VARIANTS = [
    (mode, then, others)
    for mode in ("ordered", "shared")
    for then in ("START TRANSACTION", "COMMIT", "ROLLBACK", "close")
    for others in ("clients", "subscribers")
]


@pytest.mark.parametrize(("mode", "then", "others"), VARIANTS)
def test_a_statement_of_a_procedure_may_be_killed(probed, mode, then, others):
    """The server may leave the transaction of the procedure open, and what the client does next may commit it."""
    first = 1 + VARIANTS.index((mode, then, others)) % STRIDE
    filled = fill(mode)
    drained = Drained(drain if others == "clients" else lambda: drain_with_subscribers(mode))
    for step in itertools.count(first, STRIDE):
        attempt = Attempt(filled, step, query=True)
        if then != "close":
            attempt.client.run(then)
            attempt.client.run("ROLLBACK")
        attempt.client.close()
        attempt.check(drained)
        if not attempt.killed:
            break
    assert step > 60


@MODES
def test_after_a_kill_the_connection_says_what_to_do(probed, mode, engine):
    register(mode)
    publish_many("t", [Message({"n": n}, key="k") for n in range(3)])
    sequence()
    said = set()
    for step in itertools.count(1):
        client = Mortal(step)
        client.run("SET @queue_query = TRUE")
        try:
            client.claim(1)
        except Killed:
            said.add(refusal(client))
            client.run("ROLLBACK")
            client.claim(1)
            client.close()
            pass_time(3600)
        else:
            break
    assert said <= {"", "The last call was killed in its transaction. ROLLBACK, or close the connection"}
    assert len(said) == 2 or engine == "mariadb"


def refusal(client: Client) -> str:
    try:
        client.claim(1)
    except MySQLdb.Error as error:
        return str(error.args[1])
    return ""


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


def drain_with_subscribers(mode: str) -> list[int]:
    """The same by a subscriber in Python."""
    found: list[int] = []
    sub = Sub(handler(mode=mode, function=lambda delivery: found.append(delivery.payload["n"])), name="healthy")
    quiet = 0
    while quiet < 3:
        pass_time(3600)
        sub.beat()
        before = len(found)
        for group in sub.poller.groups:
            group.health.rests_until = 0.0  # It may have seen rows above the position. It continues behind them.
        sub.settle()
        quiet = 0 if len(found) > before else quiet + 1
    sub.leave()
    return found

"""The soak's client in plain SQL does with messages what the handlers do, and as docs/howto/sql.md says."""

from __future__ import annotations

import contextlib
import json
import threading
from itertools import count

import MySQLdb
import pytest
from soak import plan, records, sql_client
from soak.app import traps

pytestmark = pytest.mark.any_engine

ORDERED, ATOMIC = plan.SQL_GROUPS


class Server:
    """An imitation of the driver: it notes statements, and answers calls of procedures."""

    def __init__(self):
        self.statements = []
        self.errors = []
        """Errors of the next calls, by number; None: no error."""
        self.results = {"queue_ack": "acked", "queue_extend": "extended"}

    def connect(self, **parameters):
        assert parameters["autocommit"]
        return self

    @contextlib.contextmanager
    def cursor(self):
        yield self

    def execute(self, statement, values):
        procedure = statement[5:].partition("(")[0] if statement.startswith("CALL") else ""
        self.statements.append((procedure, *values[2:]) if procedure else statement.partition(" (")[0])
        if procedure and self.errors and (code := self.errors.pop(0)) is not None:
            raise MySQLdb.OperationalError(code, "")
        self.description = [("result",)] if procedure else None
        self._rows = [(self.results.get(procedure, "ok"),)]

    def fetchall(self):
        return self._rows

    def nextset(self):
        return None

    def close(self):
        pass


@pytest.fixture
def server(monkeypatch, tmp_path):
    monkeypatch.setenv("SOAK_FOLDER", str(tmp_path))
    monkeypatch.setenv("SOAK_SOCKET", "/nowhere")
    monkeypatch.setattr(sql_client, "PAUSE", 0.0)
    monkeypatch.setattr(plan, "SLOW", 0.0)
    monkeypatch.setattr(traps, "come_by", lambda name: None)
    server = Server()
    monkeypatch.setattr(MySQLdb, "connect", server.connect)
    return server


@pytest.fixture
def connection(server):
    connection = sql_client.Connection()
    server.statements.clear()
    return connection


def a_message(group, fate):
    return next(f"p:{n}" for n in count() if plan.fate(group.name, f"p:{n}") == fate)


def take(connection, tmp_path, group, message_id, *, attempt=1, since=None, inside=None):
    """Handles a message; returns what was recorded."""
    row = {
        "handle": "4:5",
        "id": message_id,
        "key": "k",
        "priority": 0,
        "payload": json.dumps({plan.NAME_INSIDE: message_id if inside is None else inside}),
        "attempt": attempt,
        "offset": 4,
    }
    stop = threading.Event()
    sql_client.Client(stop)._take(connection, group, row, records.now() if since is None else since)
    steps = records.steps(records.group_file(tmp_path, group.name))
    assert {(one.message_id, one.offset, one.attempt) for one in steps} <= {(message_id, 4, attempt)}
    assert all(one.process.endswith(records.SQL) for one in steps)
    return [one.verb for one in steps]


# -- calls --------------------------------------------------------------------


def test_calls_are_repeated_after_deadlocks_and_lock_wait_timeouts(server, connection, capsys):
    server.errors = [1213, 1205]
    assert connection.settle("queue_ack", ORDERED, "4:5") == "acked"
    assert server.statements == [("queue_ack", "4:5")] * 3
    assert capsys.readouterr().out.count("WARNING client.repeats procedure=queue_ack") == 2


@pytest.mark.parametrize(("errors", "calls"), [([2006], 1), ([1644], 1), ([1213] * 9, 6)])
def test_calls_are_not_repeated_after_other_errors_nor_for_ever(server, connection, errors, calls):
    server.errors = list(errors)
    with pytest.raises(MySQLdb.OperationalError):
        connection.settle("queue_ack", ORDERED, "4:5")
    assert len(server.statements) == calls


# -- messages -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("fate", "attempt", "end", "call"),
    [
        (plan.FINE, 1, records.DONE, ("queue_ack", "4:5")),
        (plan.POISON, 3, records.FAILED, ("queue_nack", "4:5", "Planned: poison", None)),
        (plan.FLAKY, 1, records.FAILED, ("queue_nack", "4:5", "Planned: flaky", None)),
        (plan.FLAKY, 2, records.DONE, ("queue_ack", "4:5")),
        (plan.PUT_OFF, 1, records.FAILED, ("queue_nack", "4:5", "Planned: put off", 0.3)),
        (plan.REJECT, 1, records.REJECTED, ("queue_reject", "4:5", "as planned")),
    ],
)
def test_what_is_planned_for_a_message(server, connection, tmp_path, fate, attempt, end, call):
    steps = take(connection, tmp_path, ORDERED, a_message(ORDERED, fate), attempt=attempt)
    assert steps == [records.STARTED, end]
    assert server.statements == [call]


@pytest.mark.parametrize(("result", "end"), [("acked", "COMMIT"), ("stale", "ROLLBACK")])
def test_an_effect_is_committed_with_its_ack(server, connection, tmp_path, result, end):
    server.results["queue_ack"] = result
    assert take(connection, tmp_path, ATOMIC, a_message(ATOMIC, plan.FINE)) == [records.STARTED, records.DONE]
    assert server.statements == ["START TRANSACTION", "INSERT INTO soak_effects", ("queue_ack", "4:5"), end]


def test_a_transaction_that_met_a_deadlock_is_rolled_back_and_run_again(server, connection, tmp_path):
    server.errors = [1213]
    assert take(connection, tmp_path, ATOMIC, a_message(ATOMIC, plan.FINE)) == [records.STARTED, records.DONE]
    once = ["START TRANSACTION", "INSERT INTO soak_effects", ("queue_ack", "4:5")]
    assert server.statements == [*once, "ROLLBACK", *once, "COMMIT"]


def test_an_error_is_recorded_as_the_end_of_the_work(server, connection, tmp_path):
    message_id = a_message(ORDERED, plan.FINE)
    server.errors = [2006]
    with pytest.raises(MySQLdb.OperationalError):
        take(connection, tmp_path, ORDERED, message_id)
    steps = records.steps(records.group_file(tmp_path, ORDERED.name))
    assert [one.verb for one in steps] == [records.STARTED, records.DONE, records.LEFT]


def test_the_payload_of_another_message_is_recorded(connection, tmp_path):
    steps = take(connection, tmp_path, ORDERED, a_message(ORDERED, plan.FINE), inside="other:1")
    assert steps == [records.STARTED, records.WRONG, records.DONE]


@pytest.mark.parametrize(("result", "handles"), [("extended", True), ("stale", False)])
def test_a_delivery_that_may_be_lost_is_extended_first(server, connection, tmp_path, result, handles):
    server.results["queue_extend"] = result
    late = records.now() - 2 * sql_client.FRESH
    steps = take(connection, tmp_path, ORDERED, a_message(ORDERED, plan.FINE), since=late)
    assert steps == ([records.STARTED, records.DONE] if handles else [])
    assert server.statements == [("queue_extend", "4:5", 8), *([("queue_ack", "4:5")] if handles else [])]


def test_what_was_claimed_before_it_stops_is_given_back(server, connection):
    stop = threading.Event()
    stop.set()
    sql_client.Client(stop)._take(connection, ORDERED, {"handle": "4:5"}, records.now())
    assert server.statements == [("queue_snooze", "4:5", 0)]

"""The gate of the crash tests: what others do on the server is nothing to it, and nobody waits for it for ever."""

from __future__ import annotations

import threading

import pytest
from django.db import connections

from django_mysqlqueue import publish
from tests.crash import crashes
from tests.crash.crashes import ALIAS, CUT, KILL, LOST, TOPIC
from tests.support.harness import USING
from tests.support.internals import sequencing

pytestmark = pytest.mark.servers_only
EMOJI = "\U0001f600"
BYTES = 100
"""After which SHOW PROCESSLIST cuts statements off."""


def publish_one():
    publish(TOPIC, 1, using=ALIAS)


def sequence():
    sequencing.sequence(ALIAS)


@pytest.fixture
def busy_neighbour(db):
    """Another session executes what can neither be shown as utf8mb3 nor be cut off after any number of bytes."""
    other = connections.create_connection(USING)
    other.inc_thread_sharing()
    name = f"{connections[USING].settings_dict['NAME']}:gate"
    start = f"DO GET_LOCK('{name}', 60), '"
    text = "x" * (BYTES - 2 - len(start)) + EMOJI

    def execute():
        with other.cursor() as cursor:
            cursor.execute(f"{start}{text}'")

    with connections[USING].cursor() as cursor:
        cursor.execute("SELECT GET_LOCK(%s, 0)", (name,))
        with other.cursor() as its:
            its.execute("SELECT CONNECTION_ID()")
            (number,) = its.fetchone()
        thread = threading.Thread(target=execute)
        thread.start()
        check = crashes.deadline("the neighbour does not execute anything")
        while crashes.commands(cursor)[number] == "Sleep":
            check()
        yield
        assert crashes.commands(cursor)[number] != "Sleep"
        cursor.execute("SELECT RELEASE_LOCK(%s)", (name,))
        thread.join(60)
        assert not thread.is_alive()
        other.close()


@pytest.mark.parametrize("mode", [CUT, KILL, LOST])
def test_statements_of_others_do_not_matter(busy_neighbour, crasher, mode):
    assert crasher.run(mode, 1, publish_one).stopped


@pytest.mark.parametrize("mode", [CUT, LOST])
def test_an_error_in_a_thread_of_the_gate_fails_the_run(db, crasher, monkeypatch, mode):
    def sleeps(session):
        raise RuntimeError("no answer")

    monkeypatch.setattr(crasher._gate, "sleeps", sleeps)
    publish_one()
    with pytest.raises(RuntimeError, match="no answer"):
        crasher.run(mode, 2 if mode == CUT else 1, sequence, packets=True)


def test_the_gate_says_that_it_has_waited_for_an_answer(db, crasher, monkeypatch):
    ended = threading.Event()
    monkeypatch.setattr(crashes.CountingLink, "_await_all", lambda link: ended.wait(60))
    monkeypatch.setattr(crasher._gate, "longest", 0.2)
    publish_one()
    with pytest.raises(AssertionError, match=r"the server has not answered the beginning of a packet \(within 0.2 s\)"):
        crasher.run(CUT, 2, sequence, packets=True)
    ended.set()


def test_the_gate_says_that_it_has_waited_for_the_end_of_a_statement(db, crasher, monkeypatch):
    monkeypatch.setattr(crasher._gate, "sleeps", lambda session: False)
    monkeypatch.setattr(crasher._gate, "longest", 0.2)
    publish_one()
    text = r"the server has not carried out what it has begun to answer \(within 0.2 s\)"
    with pytest.raises(AssertionError, match=text):
        crasher.run(LOST, 1, sequence, packets=True)

"""A transaction that holds the sequencer is named: by the problem, and once in the log of a subscriber."""

from __future__ import annotations

import contextlib
import re
import time
from types import SimpleNamespace

import pytest
from django.db import connections

from django_mysqlqueue import publish
from django_mysqlqueue.inspection import StallTimes, find_problems, get_overview
from tests.support.harness import USING, Sub, handler, lag, sequence
from tests.support.internals import Holder, Session, blocked, mysql, open_transactions
from tests.support.roles import own_user

SOON = StallTimes(outbox=1.0)


@contextlib.contextmanager
def held():
    """Another connection has the mutex in an open transaction; yields its id."""
    other = connections[USING].copy("other")
    try:
        with other.cursor() as cursor:
            cursor.execute("SELECT CONNECTION_ID()")
            (number,) = cursor.fetchone()
            cursor.execute("BEGIN")
            cursor.execute("SELECT id FROM queue_sequencer WHERE id = 1 FOR UPDATE")
            yield number
            cursor.execute("ROLLBACK")
    finally:
        other.close()


def stalled():
    return next(one for one in find_problems(get_overview(using=USING), stall_times=SOON) if one.kind == "outbox")


@pytest.fixture
def sub(db):
    one = Sub(handler())
    publish("t", 0, key="a")
    sequence()
    return one


@pytest.mark.promise("Health")
@pytest.mark.servers_only
@pytest.mark.own_server
def test_the_problem_names_who_holds_the_sequencer(sub, engine):
    with held() as number:
        publish("t", 1, key="a")
        time.sleep(2.1)
        sub.beat()
        problem = stalled()
        certain = "has locked the sequencer" if engine == "mysql" else "may have locked the sequencer"
        assert re.search(rf"Connection {number} \(\S+@\S+\) {certain}", problem.advice), problem.advice
        assert "Connection" not in problem.text, "public pages show it"
        assert problem.advice.endswith(f"KILL connection {number}.")
    sub.step()
    assert lag("g") == 2


@pytest.mark.servers_only
@pytest.mark.own_server
def test_another_transaction_that_has_locked_rows_is_only_suspected(sub, engine, monkeypatch):
    """As on a server that does not show its locks."""
    monkeypatch.setattr(type(Session(USING).dialect), "sequencer_holder", (mysql.LOCKED_ROWS,))
    with held() as number:
        publish("t", 1, key="a")
        time.sleep(2.1)
        sub.beat()
        assert f"Connection {number} (" in stalled().advice
        assert "may have locked the sequencer" in stalled().advice


@pytest.mark.servers_only
def test_nobody_is_named_to_a_user_who_may_not_look(sub):
    project, looks = connections[USING], own_user("looks")
    with project.cursor() as cursor:
        cursor.execute(f"CREATE USER {looks}@localhost")
        cursor.execute(f"GRANT ALL ON `{project.settings_dict['NAME']}`.* TO {looks}@localhost")
    own = project.copy(USING)
    own.settings_dict.update(USER=looks, PASSWORD="")
    try:
        with held():
            publish("t", 1, key="a")
            time.sleep(1.1)
            sub.beat()
            connections[USING] = own
            assert stalled().advice == ""
    finally:
        connections[USING] = project
        own.close()
        with project.cursor() as cursor:
            cursor.execute(f"DROP USER {looks}@localhost")


@pytest.mark.servers_only
def test_the_log_of_a_subscriber_names_it_once(sub, caplog, monkeypatch):
    monkeypatch.setattr(blocked, "BLOCKED_AFTER", 1.0)

    def told():
        return [record.mysqlqueue for record in caplog.records if "sequencer.blocked" in record.getMessage()]

    def poll_until_it_is_told(times):
        until, more = time.monotonic() + 40, 15
        while more:
            assert time.monotonic() < until, "it is not told"
            sub.poller.poll_soon()
            sub.step()
            time.sleep(0.1)
            more -= len(told()) >= times

    with held() as number:
        publish("t", 1, key="a")
        poll_until_it_is_told(1)
        (one,) = told()
        assert one["connection"] == number
        assert one["seconds"] >= 1
    sub.poller.poll_soon()
    sub.step()
    assert lag("g") == 2
    with held():
        publish("t", 2, key="a")
        poll_until_it_is_told(2)
    assert len(told()) == 2, "once each time"


SUSPECTED = "SELECT 7, 'ada@h', 90, 0"
NO_LOCK_IS_SHOWN = "SELECT 7, 'ada@h', 90, 1 WHERE 1 = 0"


@pytest.mark.parametrize(
    ("statements", "holder"),
    [
        ((NO_LOCK_IS_SHOWN, SUSPECTED), Holder(7, "ada@h", 90, False)),
        ((NO_LOCK_IS_SHOWN,), None),
        (("SELECT NULL, NULL, NULL, NULL", SUSPECTED), None),
    ],
)
def test_a_server_that_records_no_locks_is_asked_for_transactions(db, monkeypatch, statements, holder):
    """As MySQL without its performance schema: the table of locks is empty then. With it, nobody may hold the lock."""
    session = Session(USING)
    monkeypatch.setattr(type(session.dialect), "sequencer_holder", statements)
    assert open_transactions.sequencer_holder(session, least=60) == holder


@pytest.mark.servers_only
def test_a_transaction_that_has_locked_other_rows_is_no_suspect_if_the_server_shows_locks(sub, engine):
    if engine != "mysql":
        pytest.skip("MariaDB shows no locks")
    other = connections[USING].copy("other")
    try:
        with other.cursor() as cursor:
            cursor.execute("BEGIN")
            cursor.execute("SELECT topic FROM queue_consumer_groups FOR UPDATE")
            time.sleep(1.1)
            assert Session(USING).row(mysql.LOCKED_ROWS) is not None
            assert open_transactions.sequencer_holder(Session(USING), least=1) is None
            cursor.execute("ROLLBACK")
    finally:
        other.close()


def test_a_mutex_that_others_use_is_not_blocked(caplog, monkeypatch):
    """They move messages; this process reads once what they did."""
    seconds = iter((0.0, 20.0, 21.0, 40.0, 41.0))
    monkeypatch.setattr(blocked, "time", SimpleNamespace(monotonic=lambda: next(seconds)))
    asked = []
    monkeypatch.setattr(blocked.sequencing, "idle_for", lambda session: asked.append(1) or 0.3)
    watch = blocked.BlockedSequencer(USING)
    for _ in range(5):
        watch.passed(busy=True)
    assert len(asked) == 2
    assert "sequencer.blocked" not in caplog.text


def test_without_a_holder_the_log_says_for_how_long(sub, caplog, monkeypatch):
    monkeypatch.setattr(blocked, "BLOCKED_AFTER", 0.0)
    monkeypatch.setattr(blocked.open_transactions, "sequencer_holder", lambda session, *, least: None)
    watch = blocked.BlockedSequencer(USING)
    for _ in range(3):
        watch.passed(busy=True)
    assert caplog.text.count("sequencer.blocked") == 1
    assert "not shown by the server" in caplog.text

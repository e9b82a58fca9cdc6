"""Transactions that hold up GC, and servers that do not show them."""

from __future__ import annotations

import contextlib
import threading
import time

import pytest
from django.db import OperationalError, connection, connections

from django_mysqlqueue.inspection import StallTimes
from django_mysqlqueue.management.commands import queuehealth
from tests.support.harness import USING
from tests.support.health import run
from tests.support.internals import INNODB_TRANSACTIONS, Session
from tests.support.roles import own_user
from tests.support.server_sessions import processlist


@contextlib.contextmanager
def running(sql):
    """A statement that another connection is at."""
    other = connections[USING].copy("other")
    with other.cursor() as cursor:
        cursor.execute("SELECT CONNECTION_ID()")
        (number,) = cursor.fetchone()
    other.inc_thread_sharing()
    done = []

    def work():
        with contextlib.suppress(OperationalError), other.cursor() as cursor:
            cursor.execute("START TRANSACTION")
            cursor.execute("SELECT COUNT(*) FROM queue_consumer_groups")
            cursor.execute(sql)
            done.append(cursor.fetchall())

    thread = threading.Thread(target=work)
    thread.start()
    with connection.cursor() as cursor:
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            cursor.execute(f"SELECT info FROM {processlist()} WHERE id = %s", (number,))
            if any(info and info.startswith("SELECT SLEEP") for (info,) in cursor.fetchall()):
                break
            time.sleep(0.05)
        else:
            raise AssertionError(f"{sql} does not run")
        try:
            yield
        finally:
            assert not done, "it was over too soon for the test to mean anything"
            cursor.execute(f"KILL {number}")
            thread.join(20)
            other.close()


@pytest.fixture
def transactions_are_timed(engine):
    """MySQL's performance schema tells transactions, whatever instruments the server was started with."""
    which = (
        "UPDATE performance_schema.setup_instruments SET enabled = %s, timed = IF(name = 'transaction', %s, timed) "
        "WHERE name = 'transaction' OR name LIKE 'thread/%%'"
    )
    with connections[USING].cursor() as cursor:
        if engine == "mysql":
            cursor.execute(which, ("YES", "YES"))
        yield
        if engine == "mysql":
            cursor.execute(which, ("NO", "NO"))


@pytest.mark.promise("Health")
@pytest.mark.servers_only
@pytest.mark.usefixtures("transactions_are_timed")
def test_an_emoji_in_a_running_statement_fails_no_look(db, engine, monkeypatch):
    """MySQL cannot show its transactions while anybody's statement holds a character beyond the BMP (error 3854)."""
    monkeypatch.setattr(queuehealth.Command, "stall_times", StallTimes(transaction=1.0))
    with running("SELECT SLEEP(30), '\U0001f600'"):
        time.sleep(2.1)
        if engine == "mysql":
            with pytest.raises(OperationalError, match="3854"):
                Session(USING).rows(INNODB_TRANSACTIONS)
        assert "note     A transaction has been open for" in run()[1]
    deadline = time.monotonic() + 20
    while "A transaction has been open" in run()[1]:  # the server takes a moment to end it
        assert time.monotonic() < deadline
        time.sleep(0.2)  # it shows the same list to whoever asks again within 0.1 s


@pytest.mark.servers_only
def test_a_user_who_may_not_look_at_transactions_is_told_nothing_of_them(db, monkeypatch):
    monkeypatch.setattr(queuehealth.Command, "stall_times", StallTimes(transaction=0.0))
    project, looks = connections[USING], own_user("looks")
    with project.cursor() as cursor:
        cursor.execute(f"CREATE USER {looks}@localhost")
        cursor.execute(f"GRANT ALL ON `{project.settings_dict['NAME']}`.* TO {looks}@localhost")
    own = project.copy(USING)
    own.settings_dict.update(USER=looks, PASSWORD="")
    try:
        with running("SELECT SLEEP(30)"):
            deadline = time.monotonic() + 20
            while "A transaction has been open" not in run()[1]:  # as above
                assert time.monotonic() < deadline
                time.sleep(0.2)
            connections[USING] = own
            assert run() == (0, "Healthy: 0 groups, backlog 0, outbox 0.\n")
            connections[USING] = project
    finally:
        connections[USING] = project
        own.close()
        with project.cursor() as cursor:
            cursor.execute(f"DROP USER {looks}@localhost")

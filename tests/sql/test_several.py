"""Several databases are read at once, and none of them delays the others for long."""

from __future__ import annotations

import threading
import time

import pytest
from django.db import OperationalError, ProgrammingError, connections, transaction
from django.utils import timezone, translation

from tests.support.internals import Session, Unread, read_each, several, start_each

pytestmark = pytest.mark.usefixtures("queue_db")
BOTH = ["default", "queue"]


@pytest.fixture
def in_threads(monkeypatch):
    """SQLite is read in threads too, as servers are."""
    monkeypatch.setattr(several, "may_be_bounded", lambda alias: True)


def one(alias):
    return Session(alias).row("SELECT 1")


def test_what_was_read_or_why_it_could_not_be():
    found = read_each([*BOTH, "other"], lambda alias: Session(alias).row("SELECT COUNT(*) FROM queue_outbox"))
    assert list(found) == [*BOTH, "other"]
    assert [found[alias] for alias in BOTH] == [(0,), (0,)]
    assert found["other"].reason.startswith("The database 'other' lacks a table or column of the queue; run manage.py")


def test_at_once_in_the_callers_language_and_time_zone(in_threads):
    barrier = threading.Barrier(2)

    def read(alias):
        barrier.wait(10)
        return translation.get_language(), timezone.get_current_timezone_name(), threading.current_thread().name

    with translation.override("de"), timezone.override("Asia/Tokyo"):
        assert read_each(BOTH, read) == {alias: ("de", "Asia/Tokyo", f"mysqlqueue-read-{alias}") for alias in BOTH}


def test_the_threads_connections_are_closed(in_threads):
    used = []

    def read(alias):
        used.append(connections[alias])
        return one(alias)

    assert read_each(BOTH, read) == dict.fromkeys(BOTH, (1,))
    assert [connection.connection for connection in used] == [None, None]
    assert not {id(connections[alias]) for alias in BOTH} & set(map(id, used))


def test_all_of_them_are_waited_for_together(in_threads, monkeypatch):
    monkeypatch.setattr(several, "TOTAL_SECONDS", 0.5)
    end = threading.Event()
    began = time.monotonic()
    try:
        found = read_each(["default", "queue", "other"], lambda alias: alias == "default" or end.wait(30))
    finally:
        end.set()
    assert time.monotonic() - began < 5
    assert found == {
        "default": True,
        "queue": Unread("The database 'queue' does not answer: reading it took more than 0.5 seconds."),
        "other": Unread("The database 'other' does not answer: reading it took more than 0.5 seconds."),
    }


@pytest.mark.parametrize("databases", [["queue"], BOTH])
def test_a_limit_for_everything_holds_for_one_database_too(in_threads, databases):
    end = threading.Event()
    began = time.monotonic()
    try:
        found = read_each(databases, lambda alias: end.wait(30), within=0.5)
    finally:
        end.set()
    assert time.monotonic() - began < 5
    reason = "The database {!r} does not answer: reading it took more than 0.5 seconds."
    assert found == {alias: Unread(reason.format(alias)) for alias in databases}


@pytest.mark.parametrize("error", [ValueError("a bug"), ProgrammingError("a bug in a statement")])
@pytest.mark.parametrize("threads", [False, True])
def test_other_errors_are_raised(monkeypatch, error, threads):
    monkeypatch.setattr(several, "may_be_bounded", lambda alias: threads)

    def read(alias):
        if alias == "queue":
            raise error
        return 1

    with pytest.raises(type(error), match="a bug"):
        read_each(BOTH, read)


def test_one_database_alone_is_read_in_the_callers_thread(in_threads):
    assert read_each(["queue"], lambda alias: threading.current_thread()) == {"queue": threading.current_thread()}


@pytest.mark.servers_only
def test_limits_of_the_threads(monkeypatch):
    def read(alias):
        options = connections[alias].settings_dict["OPTIONS"]
        return options["connect_timeout"], options["read_timeout"]

    assert read_each(BOTH, read) == dict.fromkeys(BOTH, (several.ANSWER_SECONDS,) * 2)
    assert read_each(["queue"], read, within=3.0) == {"queue": (3, 3)}
    monkeypatch.setattr(several, "ANSWER_SECONDS", 1.0)
    began = time.monotonic()
    found = read_each(BOTH, lambda alias: one(alias) if alias == "queue" else Session(alias).row("SELECT SLEEP(20)"))
    assert time.monotonic() - began < several.TOTAL_SECONDS
    assert found["queue"] == (1,)
    assert found["default"].reason.startswith("The database 'default' does not answer: (2013")


@pytest.mark.servers_only
def test_inside_a_test_case_its_transaction_is_read():
    block = transaction.atomic(using="queue")
    block._from_testcase = True
    with block:
        found = read_each(BOTH, lambda alias: (threading.current_thread().name, connections[alias].in_atomic_block))
    assert found == {"default": ("mysqlqueue-read-default", False), "queue": ("MainThread", True)}


def test_a_database_that_refuses_in_the_callers_thread():
    def read(alias):
        raise OperationalError(2002, "no such table")

    assert [type(found) for found in read_each(["queue"], read).values()] == [Unread]


# -- with limits of the caller's ------------------------------------------------


def test_what_is_read_is_there_as_soon_as_it_was_read(in_threads):
    end = threading.Event()
    started = start_each(BOTH, lambda alias: alias == "queue" or end.wait(30))
    try:
        assert started["queue"].result(10) is True
        assert not started["default"].done()
    finally:
        end.set()
    assert started["default"].result(10) is True


@pytest.mark.parametrize("error", [OperationalError(2002, "gone"), TimeoutError("a bug"), SystemExit(3)])
@pytest.mark.parametrize("threads", [False, True])
def test_the_result_raises_what_was_raised(monkeypatch, error, threads):
    monkeypatch.setattr(several, "may_be_bounded", lambda alias: threads)

    def read(alias):
        raise error

    started = start_each(BOTH, read)
    with pytest.raises(type(error)):
        started["queue"].result(10)
    if isinstance(error, TimeoutError):
        with pytest.raises(TimeoutError, match="a bug"):
            read_each(BOTH, read)


@pytest.mark.servers_only
def test_limits_that_the_caller_says():
    def read(alias):
        options = connections[alias].settings_dict["OPTIONS"]
        return options["connect_timeout"], options["read_timeout"]

    started = start_each(BOTH, read, seconds=7, connect=3)
    assert [answer.result(10) for answer in started.values()] == [(3, 7), (3, 7)]
    assert start_each(["queue"], read)["queue"].result(10) == (10, 20)

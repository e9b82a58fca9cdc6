"""Subscribers of the same process are woken by a publisher's commit."""

from __future__ import annotations

import pytest
from django.db import connection, transaction

from django_mysqlqueue import publish
from tests.support.harness import USING
from tests.support.internals import wakeups
from tests.support.publishing import Undo, committed, one_or_many, rolled_back, stored


@pytest.fixture
def woken(db):
    """What listeners saw when they were woken: the rows in the outbox at that moment."""
    seen = []
    stop = wakeups.Listening(USING, ["t"], lambda: seen.append(len(stored()))).stop
    yield seen
    stop()
    assert not wakeups.has_listeners(USING, "t")


@one_or_many
def test_wake_up_after_the_commit(woken, send):
    with transaction.atomic():
        send("t", 1)
        assert woken == []
    assert woken == [1]


@one_or_many
def test_wake_up_finds_the_message_without_a_transaction(woken, send):
    send("t", 1)
    assert woken == [1]


@one_or_many
def test_no_wake_up_after_a_rollback(woken, send):
    with rolled_back():
        send("t", 1)
    with transaction.atomic(), rolled_back():
        send("t", 1)
    assert woken == []


@one_or_many
def test_autocommit_off_while_somebody_listens(woken, autocommit_off, send):
    """Django cannot say when such a transaction commits: the next poll finds the message."""
    send("t", 1)
    assert committed() == []
    connection.commit()
    assert committed() == ["1"]


def test_a_listener_that_raises_does_not_fail_the_publisher(db):
    def broken():
        raise Undo

    stop = wakeups.Listening(USING, ["t"], broken).stop
    try:
        with transaction.atomic():
            publish("t", 1)
    finally:
        stop()
    assert committed() == ["1"]


@one_or_many
def test_listeners_of_another_alias_sleep_on(db, send):
    seen = []
    stop = wakeups.Listening("other", ["t"], lambda: seen.append(1)).stop
    try:
        send("t", 1)
    finally:
        stop()
    assert seen == []


def test_every_listener_is_woken_until_it_stops(db):
    seen = []
    first = wakeups.Listening(USING, ["t"], lambda: seen.append("first")).stop
    second = wakeups.Listening(USING, ["t"], lambda: seen.append("second")).stop
    publish("t", 1)
    first()
    publish("t", 1)
    second()
    publish("t", 1)
    assert seen == ["first", "second", "second"]

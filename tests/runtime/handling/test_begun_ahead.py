"""Autocommit stays off between two transactions of a handler's thread, and is on for all that comes between them."""

from __future__ import annotations

import pytest
from django.db import OperationalError, connections, transaction

from django_mysqlqueue import publish
from django_mysqlqueue.models import OutboxMessage
from django_mysqlqueue.signals import delivery_handled
from tests.app.models import Effect
from tests.runtime.handling.test_handler_connections import sql, working
from tests.support.harness import USING, handler, lag
from tests.support.internals import sessions

pytestmark = pytest.mark.servers_only
TABLE = Effect._meta.db_table


def raw():
    return connections[USING].connection


def switched():
    """How often this session has switched something, which is what beginning a transaction does in Django."""
    return int(sql("SHOW SESSION STATUS LIKE 'Com_set_option'")[0][1])


def insert(name):
    """Write with the driver's own cursor, of which Django and the queue know nothing."""
    with raw().cursor() as cursor:
        cursor.execute(f"INSERT INTO {TABLE} (name, value) VALUES (%s, 1)", (name,))


def names():
    return sorted(Effect.objects.values_list("name", flat=True))


def is_settled(group, topic):
    return not OutboxMessage.objects.exists() and lag(group, topic) == 0


def handled(number, *functions, **options):
    """Publish messages for handlers of the same thread one by one, and let each be handled before the next."""
    groups = [
        handler(f"t{place}", f"g{place}", function=function, **({"atomic": True} | options.get(f"g{place}", {})))
        for place, function in enumerate(functions)
    ]
    with working(*groups) as until:
        for _ in range(number):
            for place, _ in enumerate(functions):
                publish(f"t{place}", 1, key="k")
                until(lambda place=place: is_settled(f"g{place}", f"t{place}"))


@pytest.mark.promise("Exactly-once effects")
def test_the_next_transaction_begins_with_its_first_statement(db):
    counts = []

    def write(delivery):
        counts.append((switched(), bool(raw().get_autocommit()), connections[USING].in_atomic_block))
        Effect.objects.create(name="a", value=1)

    handled(4, write)
    assert len({switches for switches, _, _ in counts}) == 1, "nothing was switched between two calls"
    assert [state for _, *state in counts] == [[False, True]] * 4
    assert names() == ["a"] * 4


@pytest.mark.promise("Exactly-once effects")
def test_what_a_transaction_that_began_so_has_written_is_rolled_back(db):
    calls = []

    def write(delivery):
        calls.append(delivery.attempt)
        insert(f"{len(calls)}")
        if len(calls) in (2, 4):
            raise ValueError

    handled(2, write, g0={"max_attempts": 3})
    assert len(calls) == 3
    assert names() == ["1", "3"]


@pytest.mark.promise("Exactly-once effects")
def test_a_handler_without_a_transaction_commits_each_statement(db):
    seen = []

    def write(delivery):
        Effect.objects.create(name="atomic", value=1)

    def plain(delivery):
        seen.append(bool(raw().get_autocommit()))
        insert("plain")
        raise ValueError

    handled(2, write, plain, g1={"atomic": False, "max_attempts": 1})
    assert seen == [True, True]
    assert names() == ["atomic"] * 2 + ["plain"] * 2


def test_statements_between_two_transactions_commit_by_themselves(db):
    """As those of code that the queue calls there, by Django's connection."""

    def write(delivery):
        Effect.objects.create(name="atomic", value=1)

    def plain(delivery):
        Effect.objects.create(name="plain", value=1)
        with transaction.atomic(using=USING):
            Effect.objects.create(name="nested", value=1)
        raise ValueError

    handled(2, write, plain, g1={"atomic": False, "max_attempts": 1})
    assert names() == ["atomic"] * 2 + ["nested"] * 2 + ["plain"] * 2


def test_hooks_find_autocommit_on(db):
    seen = []

    def write(delivery):
        Effect.objects.create(name="atomic", value=1)
        transaction.on_commit(lambda: seen.append(bool(raw().get_autocommit())))
        transaction.on_commit(lambda: insert("hook"))

    handled(3, write)
    assert seen == [True] * 3
    assert names() == ["atomic"] * 3 + ["hook"] * 3


def test_receivers_find_autocommit_on(db):
    seen = []

    def receive(**arguments):
        seen.append(bool(raw().get_autocommit()))

    delivery_handled.connect(receive)
    try:
        handled(3, lambda delivery: Effect.objects.create(name="a", value=1))
    finally:
        delivery_handled.disconnect(receive)
    assert seen == [True] * 3


@pytest.mark.promise("Server outages")
def test_a_connection_that_is_lost_meanwhile_costs_a_handler_without_a_transaction_no_attempt(db, monkeypatch):
    attempts, end_ahead = [], sessions.end_ahead

    def lost(connection):
        if connection.begun_ahead is connection.connection:
            raise OperationalError(2013, "lost")
        end_ahead(connection)

    def write(delivery):
        Effect.objects.create(name="atomic", value=1)

    def plain(delivery):
        attempts.append(delivery.attempt)
        Effect.objects.create(name="plain", value=1)

    monkeypatch.setattr(sessions, "end_ahead", lost)
    handled(2, write, plain, g1={"atomic": False})
    assert attempts == [1, 1]
    assert names() == ["atomic"] * 2 + ["plain"] * 2

"""How many statements the hot paths need, and by which indexes they run."""

from __future__ import annotations

import re

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from django_mysqlqueue import Message, publish, publish_many
from django_mysqlqueue.models import OutboxMessage, PartitionLease
from tests.support import garbage
from tests.support.harness import USING, Sub, handler, sequence
from tests.support.internals import GroupRef, claiming, dialect_of, heartbeats, leasing, sequencing, settling
from tests.support.still_time import Time

REF = GroupRef("g0", "t")
TRANSACTION = re.compile(r"^(BEGIN|COMMIT|SET |ROLLBACK|SAVEPOINT|RELEASE)")


def statements(operation):
    with CaptureQueriesContext(connection) as captured:
        operation()
    return [query["sql"] for query in captured if not TRANSACTION.match(query["sql"])]


def subscriber(groups, mode):
    handlers = (handler(group=f"g{number}", mode=mode) for number in range(groups))
    # On a slow machine a step may otherwise poll twice, or say "SELECT 1" to keep its session.
    return Sub(*handlers, prefetch=2000, claim_size=500, poll_interval=3600.0, max_poll_interval=3600.0)


@pytest.mark.promise("Cost")
@pytest.mark.parametrize("mode", ["ordered", "shared"])
@pytest.mark.parametrize("groups", [1, 5])
@pytest.mark.parametrize("partitions", [1, 500])
def test_an_idle_poll_needs_three_queries_at_most(db, mode, groups, partitions):
    publish_many("t", (Message(number, key=f"k{number}") for number in range(partitions)))
    sub = subscriber(groups, mode)
    sub.settle()
    queries = statements(lambda: sub.step(tick=False))
    assert len(queries) <= (3 if mode == "shared" else 2), queries


@pytest.mark.promise("Cost")
@pytest.mark.parametrize("partitions", [1, 100])
@pytest.mark.parametrize("mode", ["ordered", "shared"])
def test_a_batch_needs_a_bounded_number_of_statements(db, monkeypatch, mode, partitions):
    """Not a number per message, nor per partition."""
    Time(monkeypatch)  # Nothing becomes due, however slow the machine is.

    def cost(messages):
        publish_many("t", (Message(number, key=f"k{number % partitions}") for number in range(messages)))
        sequence()
        sub = subscriber(1, mode)
        sub.step()  # leases and offsets rows
        sub.work()
        sub.flush()
        publish_many("t", (Message(number, key=f"k{number % partitions}") for number in range(messages)))
        sequence()

        def batch():
            sub.step(tick=False)
            sub.work()
            sub.flush()

        found = statements(batch)
        sub.leave()
        return found

    few, many = cost(100), cost(400)
    assert len(many) == len(few), many
    assert len(many) <= 24, many


@pytest.mark.promise("Cost")
def test_a_tick_needs_the_same_statements_for_any_number_of_leases(db, monkeypatch):
    Time(monkeypatch)

    def cost(partitions):
        publish_many("t", (Message(number, key=f"k{number}") for number in range(partitions)))
        sub = Sub(
            handler(group="g0", function=lambda delivery: delivery.nack(delay=999)), prefetch=1000, claim_size=500
        )
        sub.settle()
        return len(statements(sub.step))

    assert cost(1) == cost(300)


def test_renewal_is_one_statement_however_many_leases(db):
    refs = [GroupRef(f"g{number}", "t") for number in range(5)]
    assert len(statements(lambda: heartbeats.beat(USING, "s:1", refs, {}))) == 1


def test_publishing_is_one_statement(db):
    publish("t", 1)
    assert len(statements(lambda: publish("t", 1))) == 1
    assert len(statements(lambda: publish_many("t", range(500)))) == 1


def test_sequencing_is_a_bounded_number_of_statements(db):
    publish("t", 1)
    sequence()
    publish_many("t", range(900))
    assert len(statements(lambda: sequencing.sequence(USING))) <= 6


def test_scheduled_messages_cost_a_pass_one_statement_and_only_where_some_are_due(db):
    def cost():
        publish("t", 1)
        return statements(lambda: sequencing.sequence(USING))

    sequence()
    at_once = cost()
    assert not [sql for sql in at_once if "s.deliver_at" in sql]
    publish("t", 1, delay=1000)
    assert len(cost()) == len(at_once)
    OutboxMessage.objects.update(deliver_at=1)
    found = statements(lambda: sequencing.sequence(USING))
    assert len(found) == len(at_once) + 1
    assert len([sql for sql in found if "s.deliver_at" in sql]) == 1


def test_a_mark_costs_a_pass_one_statement_and_only_if_it_is_due(db, clock):
    publish("t", 1)
    sequence()

    def cost():
        publish("t", 1)
        return statements(lambda: sequencing.sequence(USING))

    usual = cost()
    assert not [sql for sql in usual if "queue_log_marks" in sql]
    clock.advance(61)
    found = cost()
    assert len([sql for sql in found if "queue_log_marks" in sql]) == 1
    assert len(found) <= len(usual) + 1
    assert len(cost()) == len(usual)


def plans(sql):
    """The plan's rows as the server tells them: (table, access type, key, extra)."""
    with connection.cursor() as cursor:
        traditional = "FORMAT=TRADITIONAL " if dialect_of(connection).name == "mysql" else ""
        cursor.execute(f"EXPLAIN {traditional}{sql}")
        names = [column[0].lower() for column in cursor.description]
        for row in cursor.fetchall():
            plan = dict(zip(names, row, strict=True))
            if plan["select_type"] == "INSERT":
                continue  # the table that is written to: MySQL shows it as read in full
            yield str(plan["table"]), str(plan["type"]), str(plan["key"]), str(plan["extra"] or "")


def protocol_statements():
    """Every statement of a life of the queue: published to collected, retried, taken over."""

    def life():
        sequence()
        failing = Sub(
            handler(group="g0", function=lambda d: d.nack() if d.attempt == 1 else None),
            handler(group="g1", mode="shared", function=lambda d: d.nack() if d.attempt == 1 else None),
        )
        failing.settle()
        leasing.verify_owned(USING, REF, failing.name, ["k1"])
        held = claiming.Claimed(REF, "k1", 1, 1, 1, False, 1)
        settling.extend_all(USING, GroupRef("g1", "t"), [held], milliseconds=1)
        garbage.collect(USING)

    return statements(life)


# -- EXPLAIN ------------------------------------------------------------------


@pytest.mark.promise("Cost")
@pytest.mark.servers_only
@pytest.mark.parametrize("rows", [20, 3000])
def test_no_hot_statement_scans_or_sorts_a_table(db, settings, rows):
    """On nearly empty and on filled tables: a filesort in a claim locks every candidate row."""
    settings.MYSQLQUEUE = {"RETENTION": 0}
    publish_many("t", (Message(number, key=f"k{number % 20}") for number in range(rows)))
    publish_many("other", (Message(number, key=f"k{number % 20}") for number in range(rows)))
    Sub(*(handler(topic="other", group=f"o{number}") for number in range(3))).step()
    with connection.cursor() as cursor:
        for table in ("queue_messages", "queue_outbox", "queue_delivery_state", "queue_offsets"):
            cursor.execute(f"ANALYZE TABLE {table}")
            cursor.fetchall()
    captured = protocol_statements()
    publish_many("t", (Message(number, key=f"k{number % 20}") for number in range(rows)))
    Sub(handler(group="g0")).step()
    seen = set()
    tables = ("queue_messages", "queue_outbox", "queue_delivery_state", "queue_offsets", "queue_partition_leases")
    for sql in captured:
        shape = re.sub(r"'[^']*'|\d+", "?", sql)[:300]
        if shape in seen or not any(table in sql for table in tables):
            continue
        if sql.startswith("EXPLAIN") or (sql.startswith("INSERT") and "SELECT" not in sql):
            continue  # it reads nothing
        seen.add(shape)
        for table, access, key, extra in plans(sql):
            physical = table in tables or table in ("s", "m", "d", "n", "h")
            if not physical:
                continue
            assert not (access == "ALL" and key == "None"), (table, access, sql)
            locking = "FOR UPDATE" in sql or "SHARE MODE" in sql or sql.startswith(("UPDATE", "DELETE"))
            if locking:
                assert "filesort" not in extra.lower(), (table, extra, sql)
    assert len(seen) > 15


@pytest.mark.servers_only
def test_keys_are_looked_up_by_the_whole_primary_key(db):
    """A derived table of literals compares in the column's collation, not the connection's."""
    PartitionLease.objects.bulk_create(
        [PartitionLease(consumer_group="g0", topic="t", partition_key=f"k{number}") for number in range(500)]
    )
    dialect = dialect_of(connection)
    sql = (
        f"SELECT s.leased_by FROM {dialect.rows(('k',), 2)} {dialect.join_to('queue_partition_leases', 's')} "
        f"ON {leasing.BY_KEY}{dialect.for_update}"
    )
    with connection.cursor() as cursor:
        text = cursor.mogrify(sql, ("k1", "k2", "g0", "t"))
    plan = {table: access for table, access, _, _ in plans(text)}
    assert plan["s"] == "eq_ref"

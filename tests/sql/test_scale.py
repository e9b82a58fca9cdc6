"""What the service layer sends reads no more rows for a long log, and no table as a whole.

Nothing here is a list of statements: a scripted life of the queue is recorded, each statement is explained
before it runs and, on the servers, its reads are counted; and every function of the service layer that sends
statements must have sent one.
"""

from __future__ import annotations

import ast
import re
import time

import pytest
from django.db import connection, connections

from django_mysqlqueue import Message, publish, publish_many
from django_mysqlqueue.models import OutboxMessage, QueueMessage
from tests.conftest import empty
from tests.support.claims import claimant_of
from tests.support.harness import USING, Sub, handler, lag, sequence
from tests.support.internals import (
    Action,
    Checkpoint,
    GroupRef,
    Session,
    Settlement,
    Subset,
    Want,
    claiming,
    groups,
    leasing,
    polling,
    retention,
    sequencing,
    settling,
    watermarks,
)
from tests.support.queue_life import KEYS, live
from tests.support.recorded_statements import TABLES, recorded, unneeded
from tests.support.rooms import sources

SENDING = ("execute", "rows", "row", "one", "named", "each", "joined", "whole")
"""Methods of ``Session`` that send a statement."""

NOT_ON_SQLITE = {
    "operations.steps._require_privileges",
    "inspection.topics._estimate",
    "service.open_transactions._shown",
}
"""It has no grants to try out, no estimates of rows, and no list of transactions."""


def fill(rows: int) -> None:
    """A log of so many settled messages in ``KEYS`` partitions, and state, outbox, offsets and leases to match.

    By doubling, since one statement for each hundred thousand rows is what makes this a matter of seconds.
    """
    publish_many("t", (Message(number, key=f"k{number % KEYS}") for number in range(500)))
    publish_many("other", (Message(number, key=f"k{number % 200}") for number in range(500)))
    publish_many("unread", (Message(number, key=f"k{number % KEYS}") for number in range(500)))
    sequence()
    with connection.cursor() as cursor:
        _double(cursor, QueueMessage, "offset", "id", rows)
        for group, topic, count in (("o", "t", KEYS), ("s", "t", KEYS), ("other", "other", 10**6)):
            groups.register(USING, GroupRef(group, topic), mode="ordered" if group == "o" else "shared", start="latest")
            cursor.execute(
                "INSERT INTO queue_offsets (consumer_group, topic, partition_key, offset_acked, offset_claimed) "
                "SELECT %s, topic, partition_key, MAX(`offset`), MAX(`offset`) FROM queue_messages WHERE topic = %s "
                "GROUP BY topic, partition_key LIMIT %s",
                (group, topic, count),
            )
        # Of another group: settled rows behind a stuck head, and as many that wait out a backoff.
        for topic, acked in (("t", True), ("other", False)):
            cursor.execute(
                "INSERT INTO queue_delivery_state "
                "(consumer_group, topic, partition_key, message_offset, acked, invisible_until, retry_count) "
                "SELECT 'other', topic, partition_key, `offset`, %s, 9000000000000, 1 "
                "FROM queue_messages WHERE topic = %s",
                (acked, topic),
            )
        cursor.execute(
            "INSERT INTO queue_partition_leases (consumer_group, topic, partition_key, leased_by) "
            "SELECT 'other', topic, id, 'somebody' FROM queue_messages WHERE topic = 'other' LIMIT 20000"
        )
        publish_many("t", (Message(number, delay=10**6) for number in range(500)))
        _double(cursor, OutboxMessage, "outbox_id", "id", rows // 4)


def _double(cursor, model, key: str, unique: str, rows: int) -> None:
    table = model._meta.db_table
    columns = [
        f"`{one.column}`" for one in model._meta.local_concrete_fields if one.column != key and not one.generated
    ]
    count = model.objects.count()
    while count < rows:
        longer = f"{unique} || '-{count}'" if connection.vendor == "sqlite" else f"CONCAT({unique}, '-{count}')"
        values = [longer if one == f"`{unique}`" else one for one in columns]
        cursor.execute(f"INSERT INTO {table} ({', '.join(columns)}) SELECT {', '.join(values)} FROM {table}")
        count *= 2


def analyze() -> None:
    with connection.cursor() as cursor:
        for table in sorted(TABLES):
            if connection.vendor == "sqlite":
                continue  # nobody runs it there
            cursor.execute(f"ANALYZE TABLE {table}")
            cursor.fetchall()


@pytest.mark.promise("Cost")
@pytest.mark.timeout(1800)
def test_nothing_that_a_subscriber_sends_scans_sorts_or_copies_a_table(db):
    """On nearly empty tables, too: there a scan or a sort under lock locks the rows of others."""
    faults: list[str] = []
    needed: set[tuple[str, str]] = set()
    for rows in (0, 100_000):
        empty()
        if rows:
            fill(rows)
        analyze()
        with recorded() as recorder:
            live()
        found, used = recorder.faults()
        faults += found
        needed |= used
        assert lag("o") == lag("s") == 0
        left_out = senders() - recorder.senders
        assert left_out == (NOT_ON_SQLITE if connection.vendor == "sqlite" else set()), (
            f"the script leaves out {left_out}"
        )
    faults += unneeded(needed, "walk", "sort", "count")
    assert not faults, "\n".join(dict.fromkeys(faults))


def senders() -> set[str]:
    """The functions of the service layer that send statements, read from its source."""
    found = set()
    for module, path in sources():
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and any(_sends(inner) for inner in ast.walk(node)):
                found.add(f"{module}.{node.name}")
    return found


def _sends(node: ast.AST) -> bool:
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return False
    on = ast.unparse(node.func.value)
    by_session = node.func.attr in SENDING and re.match(r"session\b|Session\(", on)
    return bool(by_session) or on.endswith(".objects")


@pytest.mark.promise("Cost")
@pytest.mark.servers_only
@pytest.mark.timeout(300)
def test_a_turn_reads_no_more_rows_of_a_long_log(db, settings):
    """Counted by the server: poll, claim, flush, and a slice of each kind of housekeeping."""

    def costs(mode: str) -> dict[str, int]:
        settings.MYSQLQUEUE = {}
        ref = GroupRef(mode[0], "t")
        sub = Sub(handler(group=ref.group, mode=mode), prefetch=100, claim_size=100)
        sub.settle()
        publish_many("t", (Message(number, key=f"k{number % KEYS}") for number in range(100)))
        cost_of = {}
        keys = [f"k{number}" for number in range(KEYS)]
        session = Session(USING)

        def cost(name, action):
            with recorded() as recorder:
                result = action()
            assert recorder.sent
            cost_of[name] = recorder.reads()
            return result

        cost("look", lambda: polling.poll(session, [ref]))
        cost("sequence", lambda: sequencing.sequence(USING))
        cost("news", lambda: polling.read_news(session, sub.poller._tail, limit=2000))
        cost("next due", lambda: polling.next_due(session, {ref: Subset.parse(["k1*"]).minus(("k11",))}))
        assert cost("poll and claim", lambda: sub.step(tick=False)) is sub
        assert sub.work() == 100
        cost("flush", sub.flush)
        cost("tick", lambda: leasing.read(session, [ref], 30_000))
        cost("load", lambda: leasing.load(session, ref, keys))
        cost("work", lambda: leasing.with_work(session, ref, keys))
        cost("find work", lambda: leasing.find_work(session, ref, after=None, limit=500))
        cost("sweep", lambda: watermarks.sweep(USING, ref, keys))
        settings.MYSQLQUEUE = {"RETENTION": 86_400}
        cost("gc", lambda: retention.collect_step(USING, Checkpoint()))
        return cost_of

    found = []
    for rows in (1000, 100_000):
        empty()
        fill(rows)
        analyze()
        found.append({mode: costs(mode) for mode in ("ordered", "shared")})
    for mode in found[0]:
        few, many = (costs[mode] for costs in found)
        # GC looks at the rows of a step where there are so many; find_work at a page, then at four rows a partition.
        bounds = {"gc": few["gc"] + 2 * retention.STEP.rows, "find work": few["find work"] + 500 + 8 * KEYS}
        for name, count in many.items():
            assert count <= bounds.get(name, few[name] * 1.2 + 60), (mode, name, few, many)


@pytest.mark.own_server
@pytest.mark.servers_only
def test_a_flush_walks_no_rows_that_purge_has_left(db):
    """While anybody holds a snapshot, rows that were deleted stay: not at the head of what a flush looks at."""
    ref = GroupRef("s", "t")
    publish("t", 0, key="k0")
    sub = Sub(handler(group="s", mode="shared"))
    sub.settle()
    claimant = claimant_of(ref, sub.name, 5, 60_000)

    def flush_cost() -> int:
        publish("t", 0, key="k0")
        sequence()
        claim = claiming.claim(
            USING, claiming.ClaimRequest(claimant, [Want("k0", look_at=1)], token=claiming.new_token())
        )
        outcomes = [Settlement(one, Action.ACK) for one in claim.deliveries]
        assert outcomes
        before = quiet_pages()
        settling.flush(USING, ref, outcomes, max_attempts=5, shared=True)
        return pages() - before

    holder = connections[USING].copy("holder")
    try:
        with holder.cursor() as cursor:
            cursor.execute("SET SESSION TRANSACTION ISOLATION LEVEL REPEATABLE READ")
            cursor.execute("START TRANSACTION WITH CONSISTENT SNAPSHOT")
            cursor.execute("SELECT COUNT(*) FROM queue_offsets")
        before = min(flush_cost() for _ in range(5))
        with connection.cursor() as cursor:
            cursor.execute(
                "INSERT INTO queue_delivery_state (consumer_group, topic, partition_key, message_offset, acked, "
                "delivered_by) WITH RECURSIVE n (i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 900) "
                "SELECT 's', 't', 'k0', -a.i * 1000 - b.i, 1, 'somebody' FROM n a JOIN n b ON b.i <= 40"
            )
            cursor.execute("DELETE FROM queue_delivery_state WHERE message_offset < 0")
        after = min(flush_cost() for _ in range(5))
    finally:
        holder.close()
    assert after < before + 100, (before, after)


def quiet_pages() -> int:
    """The same when it stands still: purge may still be at work on what the tests before have deleted."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        before = pages()
        time.sleep(0.05)
        if pages() - before < 10:
            break
    return pages()


def pages() -> int:
    """How many pages the server has looked up in its buffer pool."""
    with connection.cursor() as cursor:
        cursor.execute("SHOW GLOBAL STATUS LIKE 'Innodb_buffer_pool_read_requests'")
        return int(cursor.fetchone()[1])

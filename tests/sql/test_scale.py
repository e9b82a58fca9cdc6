"""What the service layer sends reads no more rows for a long log, and no table as a whole.

Nothing here is a list of statements: a scripted life of the queue is recorded, each statement is explained
before it runs and, on the servers, its reads are counted; and every function of the service layer that sends
statements must have sent one.
"""

from __future__ import annotations

import ast
import contextlib
import re
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
from django.db import connection, connections, transaction
from django.test import override_settings

from django_mysqlqueue import Message, naming, publish, publish_many
from django_mysqlqueue.inspection import (
    PAGES,
    Bounds,
    dead_letters,
    find_problems,
    get_group,
    get_overview,
    list_messages,
    list_scheduled,
    log_entries,
    message_history,
    partitions,
    problems,
)
from django_mysqlqueue.inspection import scheduled as timetable
from django_mysqlqueue.management.commands.queuestatus import read_status
from django_mysqlqueue.models import ConsumerOffset, DeliveryState, OutboxMessage, QueueMessage
from django_mysqlqueue.operations import dead_lettering, pausing, redriving, rescheduling, retrying, seeking
from django_mysqlqueue.service import (
    audit,
    claiming,
    delivery_events,
    groups,
    heartbeats,
    leasing,
    log,
    payloads,
    polling,
    releasing,
    retention,
    rollups,
    scheduling,
    sequencing,
    settling,
    watermarks,
)
from django_mysqlqueue.service.claiming import Claimant, Want
from django_mysqlqueue.service.dead_letters import DeadLetterFilter, matching_offsets
from django_mysqlqueue.service.deliveries import Action, Settlement
from django_mysqlqueue.service.refs import GroupRef
from django_mysqlqueue.service.retention import Checkpoint
from django_mysqlqueue.service.subsets import Subset
from django_mysqlqueue.sql import dialect_of
from django_mysqlqueue.sql.session import Session
from tests.conftest import QUEUE_MODELS, empty
from tests.support.harness import USING, Sub, handler, lag, sequence
from tests.support.rooms import module_of, sources

TABLES = {model._meta.db_table for model in QUEUE_MODELS}
KEYS = 20
ROUNDS = 12
"""Enough for what the script publishes; those groups that begin with the long log stay behind."""
MAY_WALK = {
    "inspection.topics.read_topics": "counts, for people",
    "inspection.subscribers.read_subscribers": "reads all subscribers of a day, for people",
    "inspection.partitions.shares": "counts the leases, of partitions that have work, for people",
    "service.archiving.archived_offset": "reads the archive's ranges, once for each chunk of GC that waits for it",
    "service.retention._next_group": "lists the groups, once in a round of GC",
    "service.scheduling.find": "reads the ids of all that is scheduled, once for each cancel",
    "service.heartbeats.remove": "reads all subscribers of a day, by an operator",
    "service.heartbeats.names": "reads all subscribers of a day, by an operator",
    "service.log.known": "lists the groups, by an operator",
    "service.log.used": "lists the collected topics, at the start of a subscriber and by an operator",
    "service.heartbeats.forget_old": "reads all subscribers of a day, once in a round of housekeeping",
}
"""Functions whose statements may read a whole table, and why."""
MAY_SORT = {
    "service.sequencing._append": "the scheduled rows of one pass, at most 2,000, by when they came due",
    "operations.retrying._pages": "on SQLite those of one due time, 500 at a time",
    "inspection.scheduled.topics": "on SQLite the topics of the next 2,500 messages of the outbox",
    "service.polling.read_news": "the rows of one look, at most 2,000, that the LIMIT inside has let through",
    "inspection.outbox.read_outbox": "the topics of the messages that the LIMIT inside has let through",
}
"""Functions whose statements may sort, and what."""
CAPPED = {
    "inspection.backlog.held": "deliveries, up to 10,000",
    "inspection.backlog.claimed": "deliveries, up to 10,000, by partition",
    "inspection.backlog.unclaimed": "messages, up to 10,000",
    "inspection.outbox.read_outbox": "messages, up to 10,000",
    "inspection.dead_letters.count_by_group": "dead letters, up to 10,000 of a topic",
    "inspection.groupless._look": "messages, up to 10,000 of a topic",
}
"""Functions that count, for people, and no further than that."""
SORT_ON_SQLITE = {
    "inspection.problems._with_leases": "leases of at most 100 lost subscribers",
    "inspection.overview._registered": "the groups",
    "inspection.dead_letters.count_by_group": "up to 10,000 of a topic, by group",
    "inspection.backlog.claimed": "up to 10,000, by partition",
    "inspection.outbox.read_outbox": "up to 10,000, by topic",
    "inspection.partitions.in_flight": "up to 10,000, by how long they are held",
    "inspection.partitions.leases": "those of one owner",
    "service.groups.registered_refs": "the groups",
}
"""Functions for people that sort there what the servers read in order or do not sort."""
SMALL = {
    "queue_consumer_groups": "a row for each group",
    "queue_sequencer": "one row",
    "innodb_trx": "a row for each transaction",
}
"""Tables that may be read as a whole, since nothing that is published makes them longer."""
NOT_IN_THE_SCRIPT = {
    "service.audit.stop": "by an operator who runs what another one is running",
    "operations.dropping.drop": "by an operator",
    "operations.lookups.group_of": "by an operator",
    "operations.lookups.dead_letters_by_id": "by an operator: reads the topic's dead letters",
    "operations.lookups.unsettled_by_id": "by an operator: reads the group's unsettled deliveries",
    "operations.redriving.check_groups": "by an operator",
    "operations.redriving.find_replaced": "by an operator",
    "service.heartbeats.count_lost": "by an operator: reads all subscribers of a day",
    "service.dead_letters.failed_groups": "before an error that an operator gets",
    "operations.steps._locked_text": "before an error that an operator gets",
    "operations.dropping._delete_some": "by an operator",
    "operations.dropping._end": "by an operator",
    "operations.dropping._begin": "by an operator",
    "service.groups.delete_rows": "by an operator",
    "service.scheduling.advance": "in tests of users",
    "service.sequencing.count_due": "the command queuesequence",
}
"""Functions that no subscriber runs at work, and who does."""


@dataclass
class Sent:
    """A statement of the service layer, as it was sent."""

    function: str
    sql: str
    plan: list[tuple[str, str]]
    """(base table, what the plan says against it); only of statements that were explained."""
    reads: int
    """Rows and index entries that the engine was asked for; 0 on SQLite, which does not count."""


@dataclass
class Recorder:
    """Explains each statement of the service layer just before it runs, with its real parameters."""

    sent: list[Sent] = field(default_factory=list)
    _seen: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    _inside: bool = False
    _before: int | None = None
    """What had been read when the last statement was over, if nothing has been sent since."""

    def __call__(self, execute, sql, params, many, context):
        if self._inside:
            return execute(sql, params, many, context)
        function = _sender()
        if function is None or not re.match(r"\(?SELECT|INSERT|UPDATE|DELETE", sql):
            self._before = None
            return execute(sql, params, many, context)
        plan, before, self._before = [], self._before, None
        self._inside = True
        try:
            shape = _shape(sql)
            # One plan does not stand for all: it depends on the values. Three are enough to see a change.
            if self._seen[shape] < 3 and not re.match(r"INSERT\b(?!.*\bSELECT\b)", sql, re.DOTALL):
                self._seen[shape] += 1
                plan, before = complaints(sql, params), None
            before = _reads() if before is None else before
            result = execute(sql, params, many, context)
            self._before = _reads()
            self.sent.append(Sent(function, sql, plan, max(0, self._before - before)))
        finally:
            self._inside = False
        return result

    def reads(self) -> int:
        return sum(one.reads for one in self.sent)

    def complaints(self) -> list[str]:
        return [
            f"{one.function}: {table}: {what}\n    {one.sql[:600]}"
            for one in self.sent
            if one.function not in MAY_WALK
            for table, what in one.plan
            if not (one.function in MAY_SORT and "sort" in what.lower())
            if not (connection.vendor == "sqlite" and one.function in SORT_ON_SQLITE and "sort" in what)
            if table not in SMALL
        ]


@contextlib.contextmanager
def recorded() -> Iterator[Recorder]:
    recorder = Recorder()
    with connection.execute_wrapper(recorder):
        yield recorder


def _sender() -> str | None:
    """The function of the service layer that sends a statement, as module.function; None: it is another's."""
    frame = sys._getframe(2)
    while frame is not None:
        module = module_of(frame.f_code.co_filename)
        if module is not None:
            return f"{module}.{frame.f_code.co_qualname.partition('.')[0]}"
        frame = frame.f_back
    return None


def _shape(sql: str) -> str:
    """The statement without how often a term is repeated."""
    text = re.sub(r"\d+", "N", sql)
    text = re.sub(r"(\([%s, ]+\))(, \1)+", r"\1", text)
    text = re.sub(r"%s(, %s)+", "%s", text)
    return re.sub(r"(UNION ALL SELECT .*?)( \1)+", r"\1", text)


def _reads() -> int:
    """How many rows this session has read so far; asking costs a constant number on MySQL."""
    if connection.vendor != "mysql":
        return 0
    with connection.cursor() as cursor:
        cursor.execute("SHOW SESSION STATUS LIKE 'Handler_read%'")
        # Not what temporary tables and derived ones cost: their rows were read from a base table before.
        return sum(int(count) for name, count in cursor.fetchall() if "rnd" not in name)


def complaints(sql, params) -> list[tuple[str, str]]:
    """What an EXPLAIN has against a statement: scans, sorts and temporary tables over base tables."""
    with connection.cursor() as cursor:
        if connection.vendor == "sqlite":
            cursor.execute(f"EXPLAIN QUERY PLAN {sql}", params)
            return list(_of_sqlite(sql, [row[3] for row in cursor.fetchall()]))
        traditional = "FORMAT=TRADITIONAL " if dialect_of(connection).name == "mysql" else ""
        cursor.execute(f"EXPLAIN {traditional}{sql}", params)
        names = [column[0].lower() for column in cursor.description]
        locking = re.match(r"UPDATE|DELETE", sql) is not None or re.search(r"FOR UPDATE|SHARE MODE", sql) is not None
        rows = [dict(zip(names, row, strict=True)) for row in cursor.fetchall()]
        return list(_of_server(rows, locking=locking))


def _of_server(rows, *, locking) -> Iterator[tuple[str, str]]:
    for row in rows:
        table, access, extra = str(row["table"] or "<none>"), str(row["type"]), str(row["extra"] or "").lower()
        if table.startswith("<") or row["select_type"] == "INSERT":
            continue  # literal keys, or what a LIMIT has let through; or what is written to
        # An index with next to nothing in it may be read from end to end, but not under lock.
        if access == "ALL" or (access == "index" and (locking or int(row["rows"] or 0) > 10)):
            yield table, f"{access} over {row['rows']} rows"
        for bad in ("filesort", "using temporary"):
            if bad in extra:
                yield table, extra


def _of_sqlite(sql, details) -> Iterator[tuple[str, str]]:
    base = TABLES | {alias for _, alias in re.findall(r"\b(queue_\w+)(?: AS)? ([a-z])\b", sql)}
    for detail in details:
        scanned = re.match(r"SCAN (\w+)", detail)
        if scanned and scanned[1] in base:
            yield scanned[1], detail
        if "TEMP B-TREE" in detail:
            yield "?", detail.replace("USE TEMP B-TREE", "sort in a temporary b-tree")


def live() -> None:
    """Everything that subscribers do: both modes, subsets, failures, losses, housekeeping, a look at the state."""
    publish("t", 0, key="k0")
    publish_many("t", (Message(number, key=f"k{number % KEYS}") for number in range(200)))
    publish_many("t", (Message(number, key="k1", delay=0.001) for number in range(5)))
    sequence()
    endings = {0: lambda d: d.nack(), 1: lambda d: d.snooze(0), 2: lambda d: d.reject("no")}
    seen = set()

    def handle(delivery):
        ending = endings.get(delivery.payload % 50)
        if ending is not None and (delivery.group, delivery.id) not in seen:
            seen.add((delivery.group, delivery.id))  # a snooze leaves the attempt alone
            ending(delivery)

    def atomic(delivery):
        if delivery.payload % 50 == 7:
            raise ValueError("on purpose")

    def batch(deliveries):
        deliveries[-1].reject("no")

    part = Subset.parse(["k1*", "k3"])
    whole = [
        handler(group="o", function=handle),
        handler(group="s", mode="shared", function=handle),
        handler(group="oa", function=atomic, atomic=True),
        handler(group="ob", function=batch, atomic=True, batch=True, batch_size=10, max_attempts=1),
    ]
    others = [handler(group="os"), handler(group="ss", mode="shared")]
    _life(Sub(*whole, batch_size=50), Sub(*others, name="part", subset=part, batch_size=50))
    for name in ("o", "s"):
        _lose_and_take_over(name)
    last = Sub(*whole)
    last.settle(rounds=ROUNDS)
    last.leave()
    _settle_many_partitions()
    watermarks.create_missing(USING, GroupRef("o", "t"), ["gone"])
    assert retention.collect(USING).offsets_rows
    QueueMessage.objects.create(
        topic="old", partition_key="k", message_id="i", payload=b"", created_at=1, published_at=1
    )
    for required in (True, False):
        with override_settings(MYSQLQUEUE={"ARCHIVE_REQUIRED": required}):
            assert retention.collect(USING).messages == (0 if required else 1)
    read_status(USING, PAGES)  # the command counts to the end, so it walks what is unsettled
    _operate(GroupRef("o", "t"))
    _operate(GroupRef("s", "t"))
    end = Sub(handler(group="o"), handler(group="s", mode="shared"))
    end.settle(rounds=100)
    end.leave()


def _settle_many_partitions() -> None:
    """More of them at a time than ``watermarks`` reads one by one."""
    publish_many("wide", (Message(number, key=f"k{number}") for number in range(watermarks.FEW_PARTITIONS + 10)))
    wide = Sub(handler("wide", "w"))
    wide.settle()
    wide.leave()
    assert lag("w") == 0


def _operate(ref: GroupRef) -> None:
    """Everything that operators do to a group."""
    session = Session(USING)
    mode = "ordered" if ref.group == "o" else "shared"
    publish_many("t", (Message(number, key=f"k{number % KEYS}") for number in range(60)))
    publish_many("t", (Message(number, key="k1", delay=1000) for number in range(5)))
    held = Sub(handler(group=ref.group, mode=mode, function=lambda delivery: delivery.nack(delay=3600))).step()
    held.work(30)
    held.flush()
    pausing.pause(USING, ref, actor="test")
    pausing.resume(USING, ref, actor="test")
    groups.group_controls(session, [ref])
    _glance(session, ref)
    assert retrying.waiting(USING, ref, most=1000) >= 20
    waiting = DeliveryState.objects.filter(consumer_group=ref.group, delivered_by="", acked=False)
    offset = waiting.values_list("message_offset", flat=True)[0]
    rows = retrying.at(USING, ref, [offset])
    assert retrying.retry_now(USING, ref, actor="test", rows=rows) == 1
    assert len(dead_lettering.find(USING, ref, [offset])) == 1
    assert dead_lettering.dead_letter_now(USING, ref, [offset], actor="test") == 1
    assert retrying.retry_now(USING, ref, actor="test", reset_attempts=True) >= 19
    assert {"t", "t_dlq"} <= set(log.known(session))
    assert held.name in heartbeats.names(session)
    if mode == "ordered":
        assert leasing.owners(session, ref, ["k0", "none"]) == {"k0": held.name}
        assert leasing.revoke(USING, ref, ["k0", "k1"], actor="test") == 2
    heartbeats.deregister(USING, held.name, [ref])
    assert heartbeats.remove(USING, held.name, actor="test", lease_ms=30_000) == 1
    for place in (seeking.position_of(USING, time_ms=session.now() - 1000), seeking.position_of(USING, "latest")):
        seeking.preview(USING, ref, place)
        seeking.seek(USING, ref, place, actor="test")
    dead = DeadLetterFilter("t_dlq", group=ref.group, since=1)
    assert redriving.count(USING, dead, most=2) == 2
    assert "t_dlq" in dict(dead_letters.dlq_topics(session))
    found = dead_letters.look(session, dead)
    assert dead_letters.look(session, DeadLetterFilter("t_dlq", offsets=found.offsets)).offsets == found.offsets
    assert dead_letters.kinds(session, found)
    dead_letters.look(session, DeadLetterFilter("t_dlq", error="no"))
    full = dead_letters.one(session, dead_letters.at(session, found.offsets)[0].offset)
    assert full is not None
    message_history.recorded(session, full.listed.original_offset)
    places = [offset for page in matching_offsets(session, dead, size=10) for offset in page]
    redriving.replace(USING, "t_dlq", places[0], "new", actor="test")
    assert redriving.discard(USING, DeadLetterFilter("t_dlq", offsets=(places[1],)), actor="test", reason="test") == 1
    redriving.redrive(USING, dead, actor="test", limit=3)
    scheduled = timetable.next_scheduled(USING, topic="t")
    timetable.next_scheduled(USING, after=(scheduled[0].deliver_at, scheduled[0].outbox_id))
    ids = [one.outbox_id for one in scheduled]
    assert "t" in dict(timetable.topics(session))
    assert list_scheduled(topic="t", limit=2).after
    assert list_scheduled(limit=2).after
    assert scheduling.count_scheduled(session, ids) == len(timetable.contents(session, ids)) == len(ids)
    assert scheduling.reschedule(scheduled[3].message_id, topic="t", key="k1", delay=900) == 1
    assert scheduling.cancel(scheduled[4].message_id, topic="t") == 1
    del ids[4]
    assert "nope" not in log.known(session)
    assert rescheduling.cancel(USING, ids[:1], actor="test") == 1
    assert rescheduling.move(USING, ids[1:2], session.now() + 10**6, actor="test") == 1
    assert rescheduling.deliver_now(USING, ids[2:], actor="test") == len(ids) - 2
    rollups.add(USING, {ref: rollups.Tally(failed=1)})
    rollups.since(session, rollups.MINUTE, session.now() - 3_600_000)
    rollups.since(session, rollups.MINUTE, session.now() - 3_600_000, ref)
    delivery_events.of_message(session, places[:2])
    _look(session, ref, places)
    for collect in (delivery_events.collect, rollups.collect, audit.collect):
        collect(USING)


def _glance(session: Session, ref: GroupRef) -> None:
    """Everything that people see at a glance, with a backlog."""
    publish_many("t", (Message(number, key=f"k{number % KEYS}") for number in range(60)))
    publish("unread", 1)
    sequence()
    found = get_overview(using=USING)
    assert found.lag.value > 60
    assert not get_overview(using=USING, bounds=Bounds(partitions=2)).lag.exact  # of tens of thousands
    seen = find_problems(found)
    assert "unread" in {one.topic for one in seen}
    problems._with_leases(Session(USING), ["gone", "vanished"])
    group = get_group(*ref, using=USING)
    assert group is not None
    assert partitions.at(session, ref, [head.key for head in group.heads])
    places = partitions.partitions(session, ref, start=0, limit=10)
    assert partitions.partitions(session, ref, start=0, prefix="k", limit=10)
    assert partitions.partitions(session, ref, after=places[2].key, prefix="k", start=0, limit=10)
    for subscriber in (None, "nobody"):
        partitions.in_flight(session, ref, subscriber=subscriber)
    for owner in (None, "", "nobody"):
        for one in (None, ref):
            partitions.leases(session, ref=one, owner=owner)
            partitions.leases(session, ref=one, owner=owner, after=(*ref, "k1"))
    partitions.shares(session)
    assert ref in groups.registered_refs(USING)


def _look(session: Session, ref: GroupRef, letters: list[int]) -> None:
    """Everything that people look at in the log."""
    listing = list_messages(using=USING, limit=10)
    for place in ({"before": listing.older}, {"after": listing.older}):
        for what in ({}, {"topic": "t"}, {"topic": "t", "key": "k1"}):
            found = list_messages(using=USING, limit=10, **what, **place)
            assert found.entries or "after" in place
    few = Bounds(merged_partitions=2)  # as if there were thousands of partitions
    for place in ({"before": listing.older}, {"after": listing.older}):
        assert list_messages(using=USING, topic="t", limit=10, bounds=few, **place).entries
    entry = list_messages(using=USING, topic="t", key="k1", limit=1).entries[0]
    for what in ({}, {"topic": "t"}, {"topic": "t", "key": "k1"}, {"topic": "t_dlq"}):
        found = log_entries.by_id(session, entry.message_id, **what)
        assert [one.offset for one in found.entries] == ([] if what.get("topic") == "t_dlq" else [entry.offset])
    log_entries.by_id(session, naming.new_message_id())
    content = message_history.content(session, entry.offset, most=100)
    assert content is not None
    assert message_history.states(session, entry)
    message_history.made_of(session, message_history.recorded(session, letters[0])[0])
    message_history.successors(session, ref, entry.key, entry.offset, content)


def _life(*subs: Sub) -> None:
    for sub in subs:
        sub.settle(rounds=ROUNDS)
        assert not any(work.failures.count for work in sub.poller.groups)
    # What comes round: ticks, extensions, the scan for work, the sweep, GC.
    publish_many("t", (Message(number, key=f"k{number % KEYS}") for number in range(100)))
    for sub in subs:
        sub.step()
        for work in sub.poller.groups:
            work.turn()
            work.reset()
        sub.poller.look_now()
        sub.heart.in_doubt = True
        sub.step()
        sub.poller.maintenance.reset()
        for _ in sub.poller.maintenance.round():
            pass
        sub.work(50)
    assert payloads.deleted(USING, [1, 10**15]) >= {10**15}
    for sub in subs:
        sub.settle(rounds=ROUNDS)
        sub.leave()


def _lose_and_take_over(group: str) -> None:
    """A subscriber vanishes with what it holds; another one finds the suspects and records their starts."""
    mode = "ordered" if group == "o" else "shared"
    one = handler(group=group, mode=mode, visibility_timeout=0.001)
    publish_many("t", (Message(1, key=f"k{number % KEYS}") for number in range(40)))
    lost = Sub(one, name="lost").step()
    ref = GroupRef(group, "t")
    held = lost.inbox.held(ref) if mode == "shared" else [item.claimed for item in iter(lost.take, None)]
    assert held
    token = held[0].token
    first = held[0]
    settling.extend(USING, first, milliseconds=1, shared=mode == "shared")
    settling.extend_all(USING, ref, held, milliseconds=1)
    with transaction.atomic():
        settling.ack_here(USING, first)
        transaction.set_rollback(True)
    settling.extend_all(USING, ref, held, milliseconds=600_000)
    released = releasing.release_all(USING, lost.name, [ref], shared=[ref] if mode == "shared" else [])
    assert (released.deliveries if mode == "shared" else released.leases) > 0
    heir = Sub(handler(group=group, mode=mode), name="heir")
    heir.settle(rounds=100)  # suspects come one by one
    # A late word, and a redelivery that is settled already.
    late = settling.flush(USING, ref, [Settlement(first, Action.ACK)], max_attempts=5, shared=mode == "shared")
    assert late.stale or first.offset <= ConsumerOffset.objects.get(pk=(*ref, first.key)).offset_acked
    if mode == "ordered":
        claimant = Claimant(ref, heir.name, 5, None)
        wants = [Want("k0", due=(first.offset,))]
        assert claiming.claim(USING, claiming.ClaimRequest(claimant, wants, token=claiming.new_token())).settled
    heir.leave()
    if mode == "ordered":
        heartbeats.forget(USING, lost.name, [ref])
    claiming.undo(USING, ref, token)


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


@pytest.mark.defect(22)
@pytest.mark.timeout(300)
@pytest.mark.parametrize("rows", [0, 100_000])
def test_nothing_that_a_subscriber_sends_scans_sorts_or_copies_a_table(db, rows):
    """On nearly empty tables, too: there a scan or a sort under lock locks the rows of others."""
    if rows:
        fill(rows)
    analyze()
    with recorded() as recorder:
        live()
    assert not recorder.complaints(), "\n".join(dict.fromkeys(recorder.complaints()))
    walks = [
        f"{one.function}: {one.reads} rows\n    {one.sql[:600]}"
        for one in recorder.sent
        # More than any LIMIT here lets through: a plan of type ref may stand for a whole topic.
        if one.reads > (25_000 if one.function in CAPPED else 6000) and one.function not in MAY_WALK
    ]
    assert not walks, "\n".join(walks)
    assert lag("o") == lag("s") == 0
    functions = {one.function for one in recorder.sent}
    not_asked = {"inspection.problems._oldest_transaction"} if connection.vendor == "sqlite" else set()
    assert senders() - functions - set(NOT_IN_THE_SCRIPT) - not_asked == set(), "the script leaves these out"
    assert set(MAY_WALK) | set(CAPPED) <= functions


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
    by_session = node.func.attr in ("execute", "rows", "row") and re.match(r"session\b|Session\(", on)
    return bool(by_session) or on.endswith(".objects")


@pytest.mark.servers_only
@pytest.mark.defect(22)
@pytest.mark.timeout(300)
def test_a_turn_reads_no_more_rows_of_a_long_log(db, settings):
    """Counted by the server: poll, claim, flush, and a slice of each kind of housekeeping."""

    def costs(mode: str) -> dict[str, int]:
        settings.MYSQLQUEUE = {}
        ref = GroupRef(mode[0], "t")
        sub = Sub(handler(group=ref.group, mode=mode), prefetch=100, batch_size=100)
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
        cost("next due", lambda: polling.next_due(session, [ref], Subset.parse(["k1*"])))
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


@pytest.mark.servers_only
def test_a_flush_walks_no_rows_that_purge_has_left(db):
    """While anybody holds a snapshot, rows that were deleted stay: not at the head of what a flush looks at."""
    ref = GroupRef("s", "t")
    publish("t", 0, key="k0")
    sub = Sub(handler(group="s", mode="shared"))
    sub.settle()
    claimant = Claimant(ref, sub.name, 5, 60_000)

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

"""Records statements with who sends them, and complains of their plans."""

from __future__ import annotations

import contextlib
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from django.db import connection

from django_mysqlqueue.sql import dialect_of
from tests.conftest import QUEUE_MODELS
from tests.support.rooms import module_of

TABLES = {model._meta.db_table for model in QUEUE_MODELS}
MAY_WALK = {
    "inspection.topics.read_topics": "counts, for people",
    "inspection.subscribers.read_subscribers": "reads all subscribers of a day, for people",
    "inspection.refusals._started": "reads all subscribers of a day, for people, if one has refused to start",
    "inspection.deaths.read": "reads all subscribers of a day, for people",
    "inspection.partitions.shares": "counts the leases, of partitions that have work, for people",
    "service.archiving.archived_offset": "reads the archive's ranges, once for each chunk of GC that waits for it",
    "service.retention._next_group": "lists the groups, once in a round of GC",
    "service.job_messages._in_outbox": "reads the ids of all that is scheduled, if a job has no message elsewhere",
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
    "inspection.refusals.read_refusals": "a row for each process that has refused to start in the last day",
    "service.rollups.sums": "for people, a row for each group, or for each topic and minute",
}
"""Functions whose statements may sort or group in a temporary table, and what."""
CAPPED = {
    "inspection.backlog.held": "deliveries, up to 10,000",
    "inspection.backlog.claimed": "deliveries, up to 10,000, by partition",
    "service.unclaimed.count": "messages, up to 10,000",
    "inspection.outbox.read_outbox": "messages, up to 10,000",
    "inspection.partitions._counts": "messages, up to 1,000 of each partition, 10,000 in a statement of a survey",
    "service.partitions.last_offsets": "messages, four for each partition that is wanted, if the server does not jump",
    "inspection.dead_letters.count_by_group": "dead letters, up to 10,000 of a topic",
    "inspection.groupless._look": "messages, up to 10,000 of a topic",
}
"""Functions that count, for people, and no further than that."""
SORT_ON_SQLITE = {
    "inspection.queue_problems._with_leases": "leases of at most 100 lost subscribers",
    "inspection.overview._registered": "the groups",
    "inspection.dead_letters.count_by_group": "up to 10,000 of a topic, by group",
    "inspection.backlog.claimed": "up to 10,000, by partition",
    "inspection.busy.read_busy": "up to 10,000 deliveries of a group, by subscriber",
    "inspection.outbox.read_outbox": "up to 10,000, by topic",
    "inspection.jobs._places": "jobs of the same millisecond, or all that have not ended, by id",
    "inspection.task_problems.jobs_of": "jobs of the same millisecond, by id",
    "inspection.partitions.in_flight": "up to 10,000, by how long they are held",
    "inspection.partitions.owned": "those of one owner",
    "service.groups.registered_refs": "the groups",
    "operations.replaying._insert": "the originals of one transaction",
    "service.job_messages._page": "results that have not ended, by id",
}
"""Functions for people that sort there what the servers read in order or do not sort."""
SMALL = {
    "queue_consumer_groups": "a row for each group",
    "queue_sequencer": "one row",
    "innodb_trx": "a row for each transaction",
}
"""Tables that may be read as a whole, since nothing that is published makes them longer."""


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
            if not (one.function in MAY_SORT and ("sort" in what.lower() or "using temporary" in what))
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

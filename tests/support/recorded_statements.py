"""Records statements with who sends them, and complains of their plans."""

from __future__ import annotations

import contextlib
import functools
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from django.db import connection

from tests.conftest import QUEUE_MODELS
from tests.support.internals import dialect_of
from tests.support.one_at_a_time import one_at_a_time
from tests.support.rooms import module_of
from tests.support.statement_names import name_of, without_lock

TABLES = {model._meta.db_table for model in QUEUE_MODELS}
FEW, COUNTED = 6000, 25_000
"""Rows that a statement may read: more than any LIMIT here lets through, as a plan of type ref may stand for a whole
topic; and those that a statement may read that counts up to 10,000 of them, for people."""
EXCEPTIONS = Path(__file__).parent.parent / "sql" / "exceptions.txt"
SMALL = {
    "queue_consumer_groups": "a row for each group",
    "queue_sequencer": "one row",
    "queue_readers": "a row for each topic of a registered reader",
    "innodb_trx": "a row for each transaction",
    "tables": "a row for each table; of information_schema",
}
"""Tables that may be read as a whole, since nothing that is published makes them longer."""


@dataclass
class Sent:
    """A statement of the service layer, as it was sent."""

    name: str
    """See ``statement_names``."""
    sql: str
    plan: list[tuple[str, str]]
    """(base table, what the plan says against it); only of statements that were explained."""
    reads: int
    """Rows and index entries that the engine was asked for; 0 on SQLite, which does not count."""

    def faults(self) -> Iterator[tuple[str, tuple[str, ...]]]:
        """What speaks against it, and the kinds of exceptions of which one lets it pass."""
        for table, what in self.plan:
            if table not in SMALL:
                sorts = "sort" in what.lower() or "using temporary" in what
                yield f"{table}: {what}", ("sort", "walk") if sorts else ("walk",)
        if self.reads > FEW:
            yield f"{self.reads} rows", ("count", "walk") if self.reads <= COUNTED else ("walk",)


@dataclass
class Recorder:
    """Explains each statement of the service layer just before it runs, with its real parameters."""

    sent: list[Sent] = field(default_factory=list)
    senders: set[str] = field(default_factory=set)
    """The functions that have sent something."""
    _seen: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    _inside: bool = False
    _before: int | None = None
    """What had been read when the last statement was over, if nothing has been sent since."""

    def __call__(self, execute, sql, params, many, context):
        if self._inside:
            return execute(sql, params, many, context)
        if (function := sender()) is not None:
            self.senders.add(function)
        if function is None or not re.match(r"\(?SELECT|INSERT|UPDATE|DELETE", sql):
            self._before = None
            return execute(sql, params, many, context)
        plan, before, self._before = [], self._before, None
        self._inside = True
        try:
            shape = shape_of(sql)
            # One plan does not stand for all: it depends on the values. Three are enough to see a change.
            if self._seen[shape] < 3 and not re.match(r"INSERT\b(?!.*\bSELECT\b)", sql, re.DOTALL):
                self._seen[shape] += 1
                plan, before = complaints(sql, params), None
            before = _reads() if before is None else before
            result = execute(sql, params, many, context)
            self._before = _reads()
            self.sent.append(Sent(name_of(sql), sql, plan, max(0, self._before - before)))
        finally:
            self._inside = False
        return result

    def reads(self) -> int:
        return sum(one.reads for one in self.sent)

    def faults(self) -> tuple[list[str], set[tuple[str, str]]]:
        """What speaks against statements, and which exceptions, as (kind, name), were needed.

        A statement that may read a whole table may sort it, too.
        """
        found: list[str] = []
        needed: set[tuple[str, str]] = set()
        exceptions = excepted()
        for one in self.sent:
            for what, kinds in one.faults():
                kind = next((kind for kind in kinds if (kind, one.name) in exceptions), None)
                if kind is None:
                    found.append(f"{one.name}: {what}\n    {one.sql[:600]}")
                else:
                    needed.add((kind, one.name))
        return found, needed


def excepted() -> frozenset[tuple[str, str]]:
    """Kind and name of the exceptions of the engine under test, and of its version."""
    engine = dialect_of(connection).name
    if engine == "sqlite":
        return frozenset((kind, without_lock(name)) for kind, name in _excepted("all", engine))
    version = ".".join(map(str, connection.mysql_version[:2]))
    return _excepted("all", "servers", engine, f"{engine}-{version}")


@functools.cache
def _excepted(*mine: str) -> frozenset[tuple[str, str]]:
    lines = (line.split(" | ") for line in EXCEPTIONS.read_text().splitlines() if not line.startswith("#"))
    return frozenset(
        (kind, name)
        for kinds, engines, name, _why in lines
        for kind in kinds.split()
        if not set(mine).isdisjoint(engines.split())
    )


def unneeded(needed: set[tuple[str, str]], *kinds: str) -> list[str]:
    """The exceptions of these kinds that nothing has needed on the engine under test."""
    left = {one for one in excepted() - needed if one[0] in kinds}
    return [f"no longer needed: {kind} | {name}" for kind, name in sorted(left)]


@contextlib.contextmanager
def recorded() -> Iterator[Recorder]:
    recorder = Recorder()
    with one_at_a_time(), connection.execute_wrapper(recorder):
        yield recorder


def sender() -> str | None:
    """The function of the service layer that sends a statement, as module.function; None: it is another's."""
    frame = sys._getframe(2)
    while frame is not None:
        module = module_of(frame.f_code.co_filename)
        if module is not None:
            return f"{module}.{frame.f_code.co_qualname.partition('.')[0]}"
        frame = frame.f_back
    return None


def shape_of(sql: str) -> str:
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
        return list(_of_server(rows, walked=0 if locking else 10))


def _of_server(rows, *, walked) -> Iterator[tuple[str, str]]:
    for row in rows:
        table, access, extra = str(row["table"] or "<none>"), str(row["type"]), str(row["extra"] or "").lower()
        if table.startswith("<") or row["select_type"] == "INSERT":
            continue  # literal keys, or what a LIMIT has let through; or what is written to
        # An index with next to nothing in it may be read from end to end, but not under lock.
        if access == "ALL" or (access == "index" and (not walked or int(row["rows"] or 0) > walked)):
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

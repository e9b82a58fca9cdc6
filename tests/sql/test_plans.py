"""No statement of the queue takes another index than the one that it is written for, on either server.

What a statement locks depends on that. So each that the service layer sends is explained, where it is sent and once
more with nothing in the tables, as the server takes the tables to be new, small and large. ``plans.txt`` names
the index by which each statement reads each table.
"""

from __future__ import annotations

import os
import re
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from django.db import connection

from tests.conftest import empty
from tests.sql.scenario import scenario
from tests.support.one_at_a_time import one_at_a_time
from tests.support.recorded_statements import SMALL, excepted, sender, shape_of, unneeded
from tests.support.statement_names import name_of
from tests.support.statistics import SIZES, TABLES, pinned, reread

pytestmark = [pytest.mark.servers_only, pytest.mark.own_server]

FILE = Path(__file__).with_name("plans.txt")
"""Written with TEST_WRITE_PLANS=1. It is the same for both servers."""
WHOLE = ", whole"
CLUSTERED = {f"no index{WHOLE}": "PRIMARY"}
"""A table is its primary key: servers call reading the whole of it a scan of the table or of that index. In the file,
which is the same for all of them, it is the latter; the faults tell the two apart."""
LOCKING = re.compile(r": UPDATE|: DELETE|: INSERT|FOR UPDATE|IN SHARE MODE")
DIVES = (200, 1)
"""``eq_range_index_dive_limit``: the optimizer looks into the index to count rows, or believes the statistics."""


@dataclass
class Plans:
    """Explains the statements of the service layer just before they run; a few of each shape."""

    size: str = ""
    found: dict[tuple[str, str], dict[str, set[str]]] = field(default_factory=lambda: defaultdict(dict))
    """(Function and statement, table) → index → how it was found."""
    texts: dict[str, dict[str, tuple[str, Any]]] = field(default_factory=lambda: defaultdict(dict))
    """Function and statement → what was sent, a few."""
    _seen: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    _inside: bool = False

    def __call__(self, execute, sql, params, many, context):
        function = None if self._inside else sender()
        if function is not None and re.match(r"\(?SELECT|INSERT|UPDATE|DELETE", sql):
            # One plan does not stand for all: it depends on the values, and on how many there are.
            numbered = f"{self.size} {function} {re.sub(r'[0-9]+', 'N', sql)}"
            self._seen[numbered] += 1
            if self._seen[numbered] <= 3:
                shape = f"{function}: {shape_of(sql)}"
                if len(self.texts[shape]) < 4:
                    self.texts[shape].setdefault(sql, (sql, params))
                self._explain(shape, sql, params)
        return execute(sql, params, many, context)

    def explain_all(self) -> None:
        for shape, texts in self.texts.items():
            for sql, params in texts.values():
                self._explain(shape, sql, params)

    def _explain(self, shape: str, sql: str, params: Any) -> None:
        self._inside = True
        try:
            for dives in DIVES:
                for alias, index in _accesses(sql, params, dives):
                    self.found[shape, alias].setdefault(index, set()).add(self.size)
        finally:
            self._inside = False

    def lines(self) -> set[str]:
        """Statement, table and index of each access."""
        return {
            f"{self._name(shape)} | {self._table(shape, alias)} {CLUSTERED.get(index, index.removesuffix(WHOLE))}"
            for (shape, alias), indexes in self.found.items()
            for index in indexes
        }

    def faults(self) -> list[str]:
        """Statements that read a table by more than one index, or the whole of it; and exceptions without need."""
        found: list[str] = []
        needed: set[tuple[str, str]] = set()
        exceptions = excepted()
        for (shape, alias), indexes in self.found.items():
            name = self._name(shape)
            for kind, what in self._faults(shape, alias, indexes):
                if (kind, name) in exceptions:
                    needed.add((kind, name))
                else:
                    table = self._table(shape, alias)
                    found.append(f"{name}: {table} ({alias}): {what}: {indexes}\n    {shape[:800]}")
        return found + unneeded(needed, "index", "plan")

    def _faults(self, shape: str, alias: str, indexes: dict[str, set[str]]) -> Iterator[tuple[str, str]]:
        if len({index.removesuffix(WHOLE) for index in indexes}) > 1:
            yield "index", "not always by the same index"
        for index, sizes in indexes.items():
            if not index.endswith(WHOLE):
                continue
            # An index with next to nothing in it is as well read from end to end, if that locks nothing.
            is_meant = f"({index.removesuffix(WHOLE)})" in shape and sizes <= {"empty", "small"}
            if LOCKING.search(shape) or not (is_meant or self._table(shape, alias) in SMALL):
                yield "plan", "the whole of it"

    def _name(self, shape: str) -> str:
        return name_of(next(iter(self.texts[shape])))

    def _table(self, shape: str, alias: str) -> str:
        return _tables(self.texts[shape]).get(alias, alias)


def _tables(texts) -> dict[str, str]:
    return {
        alias: table
        for sql, _ in texts.values()
        for table, alias in re.findall(r"\b(queue_\w+)(?: AS)? ([a-z])\b", sql)
    }


def _accesses(sql: str, params: Any, dives: int) -> Iterator[tuple[str, str]]:
    """The tables of a statement, by the names that it gives them, and the index by which each is read."""
    aliases = _tables({sql: (sql, params)})
    with connection.cursor() as cursor:
        cursor.execute(f"SET SESSION eq_range_index_dive_limit = {dives}")
        traditional = "" if connection.mysql_is_mariadb else "FORMAT=TRADITIONAL "
        cursor.execute(f"EXPLAIN {traditional}{sql}", params)
        names = [column[0].lower() for column in cursor.description]
        rows = [dict(zip(names, row, strict=True)) for row in cursor.fetchall()]
        cursor.execute("SET SESSION eq_range_index_dive_limit = DEFAULT")
    for row in rows:
        name = str(row["table"])
        if aliases.get(name, name) in TABLES and row["select_type"] != "INSERT":
            yield name, f"{row['key'] or 'no index'}{WHOLE if row['type'] in ('ALL', 'index') else ''}"


def await_purge() -> None:
    """Until the server removes no more deleted rows: those that are left are kept for another test's transaction."""
    lengths = [0]
    with connection.cursor() as cursor:
        while len(lengths) < 200 and (len(lengths) < 5 or lengths[-1] < lengths[-4]):
            cursor.execute("SELECT count FROM information_schema.innodb_metrics WHERE name = 'trx_rseg_history_len'")
            lengths.append(cursor.fetchone()[0])
            time.sleep(0.1)


@pytest.mark.timeout(600)
def test_every_statement_reads_by_the_index_that_it_is_written_for(db, alias):
    plans = Plans()
    for size in SIZES:
        await_purge()
        with pinned(connection, size):
            plans.size = size
            with one_at_a_time(), connection.execute_wrapper(plans):
                scenario()
            empty()
            await_purge()
            reread(connection)
            plans.explain_all()
    lines = plans.lines()
    recorded = FILE.read_text().splitlines()
    comments = [line for line in recorded if line.startswith("#")]
    if os.environ.get("TEST_WRITE_PLANS"):
        recorded = [*comments, *sorted(lines)]
        FILE.write_text("".join(f"{line}\n" for line in recorded))
    faults = plans.faults()
    assert not faults, "\n".join(faults)
    assert lines == set(recorded) - set(comments)

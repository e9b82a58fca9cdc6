"""What a statement is called, and which other statements it could meet."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from tests.conftest import TABLES

APPENDED = frozenset({"queue_operations", "queue_delivery_events"})
"""Tables whose new rows nobody else knows: an INSERT into them commutes with any other write."""

READ, SHARE, LOCK, WRITE, APPEND = "read", "share", "lock", "write", "append"
COMMITTED, APPENDED_FOR_ALL = "committed", "appended"
"""What a transaction has written or appended, once others can read it."""

_STRENGTH = {kind: place for place, kind in enumerate((READ, APPEND, SHARE, LOCK, APPENDED_FOR_ALL, WRITE, COMMITTED))}
_MEETS: Mapping[str, frozenset[str]] = {
    READ: frozenset({COMMITTED, APPENDED_FOR_ALL}),
    SHARE: frozenset({LOCK, WRITE, COMMITTED}),
    LOCK: frozenset({SHARE, LOCK, WRITE, COMMITTED}),
    WRITE: frozenset({SHARE, LOCK, WRITE, COMMITTED}),
    APPEND: frozenset(),
    APPENDED_FOR_ALL: frozenset({READ}),
    COMMITTED: frozenset({READ, SHARE, LOCK, WRITE, COMMITTED}),
}
"""Kinds of access to one table that do not commute. Transactions are READ COMMITTED: a read meets commits alone."""

Access = Mapping[str, str]
"""Table → how strongly it is accessed."""
NOTHING: Access = {}

_NAME = re.compile(r"\b(?:" + "|".join(sorted(TABLES, key=len, reverse=True)) + r")\b")
_TARGET = re.compile(r"\s*(?:INSERT\s+INTO|REPLACE\s+INTO|UPDATE|DELETE\s+FROM)\s+[`\"]?(\w+)", re.IGNORECASE)
_CALL = re.compile(r"CALL (queue_\w+)")
_JOINED = re.compile(r"JOIN\s+(\w+)\s+s\b", re.IGNORECASE)


@dataclass(frozen=True)
class Statement:
    """One kind of statement."""

    label: str
    """Its verb and its tables: ``lock-skip:delivery_state``."""
    access: Access = field(default_factory=dict)


_known: dict[str, Statement] = {}


NAMED_LOCKS = "lock:names"
"""The label of a statement that takes locks with names."""


def statement(sql: str) -> Statement:
    """Names a statement; its access is empty if it touches no table of the queue."""
    if sql not in _known:
        if len(_known) > 20_000:
            _known.clear()
        _known[sql] = _read(sql)
    return _known[sql]


def _read(sql: str) -> Statement:
    if called := _CALL.match(sql):  # It may do anything, in several transactions.
        return Statement(f"call:{called[1]}", dict.fromkeys(TABLES, WRITE))
    if sql.startswith("SELECT GET_LOCK("):
        return Statement(NAMED_LOCKS, {"queue_job_results": LOCK})  # Those who insert unique jobs take them.
    tables = list(dict.fromkeys(_NAME.findall(sql)))
    if not tables or sql.startswith("EXPLAIN "):
        return Statement("", NOTHING)
    verb = sql.lstrip(" (").split(None, 1)[0].lower()
    access = dict.fromkeys(tables, READ)
    if verb == "select":
        ending = sql.rstrip()[-40:].upper()
        for suffix, kind, name in (
            ("SKIP LOCKED", LOCK, "lock-skip"),
            ("FOR UPDATE", LOCK, "lock"),
            ("LOCK IN SHARE MODE", SHARE, "share"),
        ):
            if ending.endswith(suffix):
                verb, access = name, dict.fromkeys(tables, kind)
                break
    else:
        target = _TARGET.match(sql)
        written = target[1] if target and target[1] in access else None
        if written is None:  # UPDATE (SELECT …) v STRAIGHT_JOIN table s, DELETE s FROM (…) v STRAIGHT_JOIN table s
            joined = _JOINED.search(sql)
            written = joined[1] if joined else ""
            assert written in access, f"which table does this write? {sql[:300]}"
        access[written] = APPEND if verb == "insert" and written in APPENDED else WRITE
        tables = [written, *(table for table in tables if table != written)]
    return Statement(f"{verb}:{'+'.join(table.removeprefix('queue_') for table in tables)}", access)


def at_once(access: Access) -> Access:
    """The access of a statement that is a transaction by itself, or of the COMMIT that ends one."""
    seen = {WRITE: COMMITTED, APPEND: APPENDED_FOR_ALL}
    return {table: seen.get(kind, kind) for table, kind in access.items()}


def union(one: Access, other: Access) -> Access:
    """Both, the stronger for each table."""
    return dict(one) | {
        table: max(kind, one.get(table, kind), key=_STRENGTH.__getitem__) for table, kind in other.items()
    }


def locks(access: Access) -> Access:
    """What of it is held until the transaction ends."""
    return {table: kind for table, kind in access.items() if kind != READ}


def meets(one: Access, others: Iterable[tuple[str, str]]) -> bool:
    """Whether it could come to something else before one of these (table, kind) than after it."""
    return any(kind in _MEETS[one[table]] for table, kind in others if table in one)

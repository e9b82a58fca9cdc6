"""What a statement is called: by what it does and reads, whoever sends it and whatever it is sent with."""

from __future__ import annotations

import functools
import re

from tests.conftest import QUEUE_MODELS
from tests.interleavings.steps import NAMED_LOCKS, statement

COLUMNS = frozenset(one.column for model in QUEUE_MODELS for one in model._meta.local_concrete_fields)
_TOKEN = re.compile(r"'[^']*'|\b(?:ORDER|GROUP) BY\b|\bON (?:CONFLICT|DUPLICATE)\b|\w+|[()]")
_NUMBERS = re.compile(r"\b(?:COUNT|SUM)\(")
_CLAUSES = {
    **dict.fromkeys(("WHERE", "ON", "HAVING"), "by"),
    **dict.fromkeys(("ORDER BY", "GROUP BY"), "order"),
    **dict.fromkeys(("SELECT", "FROM", "SET", "VALUES", "LIMIT", "ON CONFLICT", "ON DUPLICATE"), ""),
}
"""The part of the name to which the columns of a clause belong."""


@functools.lru_cache(maxsize=10_000)
def name_of(sql: str) -> str:
    """``lock:delivery_state by consumer_group, topic, acked order invisible_until``, or "" if it touches no table.

    The verb or lock (``count``: it sums up) and the tables, then the columns of all its conditions and joins, and those
    that it sorts or groups by, as they are first named. What it selects and writes, its values and their number, hints,
    and an engine's way to write it are no part of the name.
    """
    label = statement(sql).label
    if label in ("", NAMED_LOCKS):
        return ""
    if _NUMBERS.search(sql):
        label = label.replace("select:", "count:")
    columns: dict[str, dict[str, None]] = {"": {}}
    clauses = [""]
    for token in _TOKEN.findall(sql):
        if token == "(":  # noqa: S105
            clauses.append(clauses[-1])
        elif token == ")":  # noqa: S105
            clauses.pop()
        elif token in _CLAUSES:
            clauses[-1] = _CLAUSES[token]
            columns.setdefault(clauses[-1], {})
        elif token in COLUMNS:
            columns[clauses[-1]][token] = None
    parts = [f"{clause} {', '.join(columns[clause])}".rstrip() for clause in ("by", "order") if clause in columns]
    return " ".join([label, *(part for part in parts if part != "by")])


def without_lock(name: str) -> str:
    """The name of the same statement on an engine that has no locks of rows."""
    return re.sub(r"^(?:lock|lock-skip|share):", "select:", name)

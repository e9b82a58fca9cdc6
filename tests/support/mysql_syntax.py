"""SQL that MySQL understands only since some version after 8.0.19, the oldest that the queue is let in on."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

OLDEST = (8, 0, 19)


@dataclass(frozen=True, slots=True)
class Feature:
    """Something that a newer server understands."""

    name: str
    since: tuple[int, ...]
    pattern: re.Pattern[str]
    example: str
    """A statement that uses it."""


def _feature(name: str, since: tuple[int, ...], pattern: str, example: str) -> Feature:
    # Keywords are upper case everywhere in the package: prose in messages ("except", "intersect") is not.
    return Feature(name, since, re.compile(pattern, re.DOTALL), example)


NEWER = (
    _feature(
        "index-level optimizer hint",
        (8, 0, 20),
        r"/\*\+.*?\b(?:NO_)?(?:JOIN_|GROUP_|ORDER_)?INDEX\(",
        "SELECT /*+ INDEX(m queue_messages_partition) */ m.topic FROM queue_messages m",
    ),
    _feature("JSON_VALUE()", (8, 0, 21), r"\bJSON_VALUE\(", "SELECT JSON_VALUE(metadata, '$.a') FROM queue_messages"),
    _feature(
        "nested parenthesized query expression",
        (8, 0, 22),
        # After a name, or an f-string's value, it is the call of a function with a subquery.
        r"(?<![\w?])\(\s*\(\s*SELECT\b",
        "((SELECT 1 LIMIT 1) UNION ALL (SELECT 2)) LIMIT 1",
    ),
    _feature(
        "ORDER BY or LIMIT behind a parenthesized UNION",
        (8, 0, 22),
        r"^\(\s*SELECT\b(?:(?!\)).)*\bUNION\b(?:(?!\)).)*\)\s*(?:ORDER BY|LIMIT)\b",
        "(SELECT 1 AS n UNION SELECT 2) ORDER BY n",
    ),
    _feature("AT TIME ZONE", (8, 0, 22), r"\bAT TIME ZONE\b", "SELECT CAST(a AT TIME ZONE '+00:00' AS DATETIME)"),
    _feature("SHOW REPLICA STATUS", (8, 0, 22), r"\b(?:SHOW|START|STOP|RESET) REPLICA", "SHOW REPLICA STATUS"),
    _feature("invisible column", (8, 0, 23), r"\bINVISIBLE\b", "ALTER TABLE t ADD COLUMN a INT INVISIBLE"),
    _feature(
        "variables named source_ and replica_",
        (8, 0, 26),
        r"@@(?:\w+\.)?(?:\w+_)?(?:source|replica)_",
        "SELECT @@GLOBAL.replica_parallel_workers",
    ),
    _feature(
        "IF NOT EXISTS of a routine or trigger",
        (8, 0, 29),
        r"\bCREATE (?:PROCEDURE|FUNCTION|TRIGGER) IF NOT EXISTS\b",
        "CREATE TRIGGER IF NOT EXISTS a BEFORE INSERT ON t FOR EACH ROW SET NEW.b = 1",
    ),
    _feature(
        "generated invisible primary key",
        (8, 0, 30),
        r"\bsql_generate_invisible_primary_key\b",
        "SET SESSION sql_generate_invisible_primary_key = 1",
    ),
    _feature("INTERSECT", (8, 0, 31), r"\bINTERSECT\b", "SELECT a FROM t INTERSECT SELECT a FROM u"),
    _feature("EXCEPT", (8, 0, 31), r"\bEXCEPT\b", "SELECT a FROM t EXCEPT SELECT a FROM u"),
    _feature("EXPLAIN INTO", (8, 1), r"\bEXPLAIN\b.*\bINTO @", "EXPLAIN FORMAT=JSON INTO @plan SELECT 1"),
    _feature("SHOW BINARY LOG STATUS", (8, 2), r"\bSHOW BINARY LOG STATUS\b", "SHOW BINARY LOG STATUS"),
    _feature("EXPLAIN FOR SCHEMA", (8, 3), r"\bEXPLAIN\b.*\bFOR SCHEMA\b", "EXPLAIN FOR SCHEMA other SELECT 1"),
    _feature("VECTOR", (9, 0), r"\bVECTOR\b|_VECTOR\(|\bVECTOR_", "CREATE TABLE t (a VECTOR(3))"),
)


def newer(sql: str) -> list[Feature]:
    """What of ``sql`` only newer servers understand."""
    return [feature for feature in NEWER if feature.pattern.search(sql)]


def texts(path: Path) -> Iterator[tuple[int, str]]:
    """The string literals of a module but its docstrings, with their lines; a value in an f-string is ``?``."""
    yield from _texts(ast.parse(path.read_text()))


def _texts(node: ast.AST) -> Iterator[tuple[int, str]]:
    match node:
        case ast.Expr(value=ast.Constant(value=str())):
            return
        case ast.JoinedStr(values=values, lineno=line):
            yield line, "".join(str(one.value) if isinstance(one, ast.Constant) else "?" for one in values)
        case ast.Constant(value=str() as text, lineno=line):
            yield line, text
            return
    for child in ast.iter_child_nodes(node):
        if not (isinstance(node, ast.JoinedStr) and isinstance(child, ast.Constant)):
            yield from _texts(child)

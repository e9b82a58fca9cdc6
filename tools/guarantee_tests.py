#!/usr/bin/env python3
"""Write docs/contributing/guarantee-tests.md: the tests for each guarantee.

    python tools/guarantee_tests.py            write the page
    python tools/guarantee_tests.py --check    change nothing; exit with 1 if the page is out of date

A test names its guarantees, headings of docs/guarantees.md, with ``@pytest.mark.promise("Order")``; that of releases is
a heading of docs/howto/upgrade.md. The exit status is also 1 if a heading does not exist or a guarantee has no test.
Standard library only.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "contributing" / "guarantee-tests.md"
ELSEWHERE = {"Rolling upgrades": "howto/upgrade.md"}
"""The guarantees of other pages, which do not hold before 1.0."""
INTRODUCTION = """# Tests for each guarantee

<!-- Written by tools/guarantee_tests.py (make reference): change the markers of the tests instead. -->

Each of these tests fails if its [guarantee](../guarantees.md) does not hold. Each heading links to the guarantee.
*(servers)* marks a test that runs only on MariaDB and MySQL, because SQLite has only one writer at a time.
"""


def headings() -> tuple[list[str], list[str]]:
    """Return the headings of the guarantees and those of the limits, in their order."""
    guarantees, limits = (ROOT / "docs" / "guarantees.md").read_text().split("\n## How they are tested\n")
    other = [name for name, page in ELSEWHERE.items() if name in _headings((ROOT / "docs" / page).read_text())]
    return [*_headings(guarantees), *other], _headings(limits)


def _headings(text: str) -> list[str]:
    return re.findall(r"^### (.*)$", text, re.MULTILINE)


def marked() -> Iterator[tuple[str, str, bool]]:
    """Yield each guarantee that a test names, the test, and whether only servers can run it."""
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        tree = ast.parse(path.read_text())
        of_file = [
            mark
            for node in tree.body
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark"
            for mark in (node.value.elts if isinstance(node.value, ast.List) else [node.value])
        ]
        name = str(path.relative_to(ROOT))
        servers = any("servers_only" in ast.unparse(mark) for mark in of_file)
        for promise in _promises(of_file):
            yield promise, f"`{name}` (all tests)", servers
        for node in tree.body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                only = servers or any("servers_only" in ast.unparse(mark) for mark in node.decorator_list)
                for promise in _promises(node.decorator_list):
                    yield promise, f"`{name}`: `{node.name}`", only


def _promises(marks: list[ast.expr]) -> Iterator[str]:
    for mark in marks:
        if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.promise":
            yield from (ast.literal_eval(argument) for argument in mark.args)


def written() -> str:
    """Return the page's text.

    Raises:
        SystemExit: A test names a heading that does not exist, or a guarantee has no test.
    """
    guarantees, limits = headings()
    tests: dict[str, list[str]] = {}
    for promise, test, servers in marked():
        tests.setdefault(promise, []).append(test + (" *(servers)*" if servers else ""))
    if unknown := sorted(set(tests) - {*guarantees, *limits}):
        raise SystemExit(f"Tests name guarantees that are not headings: {', '.join(unknown)}")
    if unguarded := [name for name in guarantees if name not in tests]:
        raise SystemExit(f"Guarantees without a test: {', '.join(unguarded)}")
    parts = [INTRODUCTION]
    for name in (*guarantees, *limits):
        if name in tests:
            anchor = re.sub(r"[^a-z0-9 _-]", "", name.lower()).replace(" ", "-")
            listed = "\n".join(f"- {test}" for test in tests[name])
            page = ELSEWHERE.get(name, "guarantees.md")
            parts.append(f"## [{name}](../{page}#{anchor})\n\n{listed}\n")
    return "\n".join(parts)


def main() -> int:
    text = written()
    if "--check" in sys.argv[1:]:
        return int(not PAGE.exists() or PAGE.read_text() != text)
    PAGE.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The documents' pages and the blocks of code in them."""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

from tests.support.paths import ROOT

DOCS = ROOT / "docs"
PAGES = sorted([*DOCS.rglob("*.md"), *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md"))])
COMMANDS = ROOT / "django_mysqlqueue" / "management" / "commands"


def blocks(page: Path, *languages: str) -> Iterator[tuple[int, str]]:
    """(line, text) of each fenced block in one of the languages, dedented."""
    text = page.read_text()
    for found in re.finditer(r"^( *)```(\w+)\n(.*?)^\1```$", text, re.MULTILINE | re.DOTALL):
        if found[2] in languages:
            yield text[: found.start()].count("\n") + 2, textwrap.dedent(found[3])


def parsed(*only: Path) -> Iterator[tuple[str, ast.Module]]:
    """(where, tree) of every Python block."""
    for page in only or PAGES:
        for line, text in blocks(page, "python"):
            yield f"{page.relative_to(ROOT)}:{line}", ast.parse(text, str(page))


def identify(page: Path) -> str:
    return str(page.relative_to(ROOT))


def _block(page: str, containing: str) -> str:
    (found,) = [text for _, text in blocks(DOCS / page, "python") if containing in text]
    return found

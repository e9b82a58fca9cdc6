"""What users read has the terms of docs/reference/glossary.md, and none of the phrases that readers stumbled over."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.paths import ROOT

pytestmark = pytest.mark.any_engine

INSTEAD = {
    r"\bin hand\b|subscribers?' hands?": "in flight",
    r"\bg(?:iven?|ives|iving|ave) back\b": "release",
    r"\bgo(?:es)? on\b|\bwent on\b": "continue, resume",
    r"\bset(?:s|ting)? right\b": "correct",
    r"\blets? go of\b": "release",
    r"\b(?:stands?|standing|stood) still\b": "is stalled",
    r"\bsigns? of life\b": "heartbeat",
    r"\b(?:nobody|who) works for\b": "no live subscribers",
    r"\b(?:gives?|gave|given) up on\b": "dead-letter",
    r"\bwait(?:s|ing|ed)? out\b": "be in backoff",
    r"\bcomes? again\b|\bcame again\b": "be redelivered",
    r"\btaken? back\b": "undo",
    r"\b(?:at most )?so many\b": "n, maximum number of",
    r"\bon record\b": "in the audit log, recorded",
    r"\banew\b": "again, from scratch",
    r"\bno matter of\b": "regardless of",
    r"\btime-outs?\b": "timeout",
    r"\btake-overs?\b": "takeover",
    r"(?<!dead\s)(?<!dead-)\bletters?\b(?!-spacing|,? (?:or |and )?digits?)": "dead letter",
    r"\bfirst starts?\b|\bfirst started\b": "first attempt",
    r"\bthe heart\b": "heartbeat",
    r"\b(?:in|and) words\b": "problems, text",
    r"\bmend(?:s|ed|ing)?\b": "fix",
    r"(?<!there )\b(?:is|are|was|were|be) no (?!longer\b|more\b|later\b|earlier\b|less\b)": "is not a",
    r"\bwhoever\b|\bwhatever\b": "name who or what it is",
    r"\b(?:fall|falls|fell|fallen|is|are|be|was|goes) silent\b|\bvanish(?:es|ed)?\b": "no heartbeat, lost",
    r"\bto who\b|\bfor who\b|\bof who\b": "users who, you",
    r"\ba note and no\b": "not",
    r"\bplay(?:s|ed)? (?:it |them )?back\b": "replay",
    r"\b(?:neighbour|colour|behaviour|honour|favour)\w*": "the American spelling, as in Django's documentation",
}
"""A phrase → what to write instead."""
PHRASES = {re.compile(pattern, re.IGNORECASE): instead for pattern, instead in INSTEAD.items()}
DOCUMENTS = [
    *(ROOT / "docs").rglob("*.md"),
    *(ROOT / "docs").rglob("*.yml"),
    *ROOT.glob("*.md"),
    ROOT / "spark" / "README.md",
]
TEMPLATES = [
    *(ROOT / "django_mysqlqueue").rglob("*.html"),
    *(ROOT / "example_project").rglob("*.html"),
    *(ROOT / "spark").rglob("*.html"),
]
SOURCES = [
    path
    for folder in ("django_mysqlqueue", "example_project", "spark")
    for path in (ROOT / folder).rglob("*.py")
    if path.parent.name != "migrations"  # what is in them cannot be taken back
]
NOT_ENGLISH = {"docs/reference/glossary.md"}
"""It says what a phrase is not."""


def texts(path: Path) -> Iterator[tuple[int, str]]:
    """Yields what a user reads in a file, with its line: a document's text, or a module's strings without docstrings.

    Docstrings of the public API are in the reference, which is a document.
    """
    source = path.read_text()
    if path.suffix != ".py":
        text = re.sub(r"```.*?```|`[^`\n]*`", lambda found: re.sub(r"[^\n]", " ", found[0]), source, flags=re.DOTALL)
        yield 1, text
        return
    nodes = list(ast.walk(ast.parse(source)))
    docstrings = [node.value for node in nodes if isinstance(node, ast.Expr)]
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in docstrings:
            yield node.lineno, re.sub(r"``.*?``", "", node.value)


@pytest.mark.parametrize("path", [*DOCUMENTS, *TEMPLATES, *SOURCES], ids=lambda path: str(path.relative_to(ROOT)))
def test_texts_use_the_terms_of_the_glossary(path):
    if str(path.relative_to(ROOT)) in NOT_ENGLISH:
        return
    found = [
        f"{path.relative_to(ROOT)}:{line + text[: match.start()].count(chr(10))}: {match[0]!r}: write {instead!r}"
        for line, text in texts(path)
        for phrase, instead in PHRASES.items()
        for match in phrase.finditer(text)
    ]
    assert not found, "\n".join(found)


def test_the_glossary_is_in_alphabetical_order():
    terms = re.findall(r"^\| ([^|]+?) \|", (ROOT / "docs" / "reference" / "glossary.md").read_text(), re.MULTILINE)[1:]
    terms = [term for term in terms if not term.startswith("-")]
    assert len(terms) > 50
    assert terms == sorted(terms, key=str.lower)

"""Outputs of commands that the pages print are the outputs of the commands.

The packaging tests run the whole tutorial as printed. These tests need no installation, so a changed text of a command
is noticed in every run.
"""

from __future__ import annotations

import re

from django_mysqlqueue import publish
from tests.support.commands import run
from tests.support.consoles import commands, pattern
from tests.support.documents import DOCS, PAGES, blocks
from tests.support.harness import USING
from tests.support.internals import GroupRef, groups

GROUPS_HEADING = [
    "group/topic", "state", "backlog", "in flight", "retrying", "oldest", "dead letters", "subscribers",
]  # fmt: skip


def printed(page: str, command: str) -> list[str]:
    """Return the outputs that a page prints below a command."""
    return [
        one.output
        for _, text in blocks(DOCS / page, "console")
        for one in commands(text)
        if one.text.strip() == command and one.output is not None
    ]


def test_status_before_the_first_group(db):
    for _ in range(3):
        publish("orders", {"order": 1}, key="ada@example.com")
    first, _ = printed("tutorial.md", "python manage.py queuestatus")
    output = run("queuestatus").replace(f"database {USING!r}", "database 'default'")
    assert pattern(first).fullmatch(output), output


def test_headings_of_the_status(db):
    """The tables of groups on all pages have the columns of the command."""
    groups.register(USING, GroupRef("g", "t"), mode="ordered", start="earliest")
    headings = [
        re.split(r"  +", line.strip())
        for text in [run("queuestatus"), *(page.read_text() for page in PAGES)]
        for line in text.splitlines()
        if re.match(r"  group/topic +state ", line)
    ]
    assert headings[0] == GROUPS_HEADING
    assert len(headings) == 3
    assert all(set(heading) <= set(GROUPS_HEADING) for heading in headings)


def test_healthy(db):
    groups.register(USING, GroupRef("hello", "greetings"), mode="ordered", start="earliest")
    (output,) = printed("installation.md", "python manage.py queuehealth")
    assert run("queuehealth") == output

"""queuestatus on a screen: what is shown of much, and how wide it is."""

from __future__ import annotations

import io
import json
import re
import unicodedata

import pytest
from django.core.management.base import OutputWrapper

from django_mysqlqueue import Message, operations, publish_many
from django_mysqlqueue.management.tables import Page, cut, folded, table_lines, width_of
from django_mysqlqueue.models import ConsumerGroup
from django_mysqlqueue.options.backoff import Backoff
from tests.support.commands import run
from tests.support.harness import USING, Sub, handler, sequence
from tests.support.internals import GroupRef, groups

LATER = Backoff(initial=3600, jitter=0)


def columns(text):
    """How many columns of a terminal a text takes."""
    wide = sum(unicodedata.east_asian_width(one) in "WF" for one in text)
    return len(text) + wide - sum(unicodedata.category(one) == "Mn" for one in text)


# -- lines -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "width"), [("", 0), ("orders", 6), ("注文", 4), ("e\u0301", 1), ("｢ｶﾅ｣", 4), ("\uff37", 2), ("…", 1)]
)
def test_the_width_of_a_text(text, width):
    assert width_of(text) == width


@pytest.mark.parametrize(
    ("text", "width", "shown"),
    [
        ("orders", 6, "orders"),
        ("orders", 5, "orde…"),
        ("注文です", 8, "注文です"),
        ("注文です", 7, "注文で…"),
        ("注文です", 6, "注文…"),
        ("a", 0, "…"),
    ],
)
def test_cutting(text, width, shown):
    assert cut(text, width) == shown


def test_folding():
    assert folded("a bb ccc dddd", 6, most=9) == ["a bb", "ccc", "dddd"]
    assert folded("a bb ccc dddd", 6, most=2) == ["a bb", "ccc d…"]
    assert folded("x" * 9, 6, most=2) == ["xxxxx…"]
    assert folded("注文 注文", 8, most=2) == ["注文", "注文"]
    assert folded("a bb", float("inf"), most=1) == ["a bb"]


def test_the_widest_columns_of_a_table_become_narrower():
    rows = [("n" * 100, "注文" * 30, 1), ("n", "文", 12_345)]
    lines = table_lines(("name", "text", "number"), rows, width=40)
    assert {columns(line) for line in lines} == {40}
    assert lines[1].split() == ["nnnnnnnnnnnnn…", "注文注文注文…", "1"]
    assert lines[2].endswith("   12345"), "numbers are aligned to the right"
    assert "n" * 100 in table_lines(("name", "text", "number"), rows)[1]


@pytest.mark.parametrize("left", range(-1, 12))
def test_a_section_keeps_within_its_lines(left):
    out = OutputWrapper(io.StringIO())
    blocks = [[f"{number}", f"{number}"] for number in range(4)]
    Page(out, 100, left + 3).section(["Head"], blocks, "problem", keep=3)
    lines = out._out.getvalue().splitlines()
    assert len(lines) <= max(left, 2), "that there is more is always said"
    shown = len({line for line in lines if line.isdigit()})
    assert shown == {10: 4, 11: 4}.get(left, max(0, (left - 3) // 2))
    assert ("Head" in lines) == (shown > 0)
    assert (lines[-1] == f"  {4 - shown} {'more ' if shown else ''}problem{'s' if shown < 3 else ''}: --all") == (
        shown < 4
    )


# -- the command -----------------------------------------------------------------


def register(count, name="group-{:03}"):
    for number in range(count):
        groups.register(USING, GroupRef(name.format(number), "t"), mode="ordered", start="earliest")


@pytest.fixture
def much(db, clock):
    """Thirty groups whose names, topics and errors are as long as they may be."""

    def fail(delivery):
        raise ValueError(f"失敗しました{delivery.payload:03} " + "注文" * 200)

    handlers = []
    for number in range(30):
        topic = f"{number:03}-" + "t" * 96
        publish_many(topic, [Message(1, key="鍵" * 60), Message(2, key="k")])
        handlers.append(handler(topic, f"{number:03}-" + "g" * 96, fail, max_attempts=9, backoff=LATER))
    sub = Sub(*handlers)
    sub.settle()
    operations.pause(*ConsumerGroup.objects.values_list("consumer_group", "topic")[7], actor="ada" * 60)
    clock.advance(120)
    sub.heart.beat()


@pytest.mark.parametrize("lines", [None, 10, 25, 33, 500])
def test_it_fits_a_screen(much, monkeypatch, lines):
    if lines is not None:
        monkeypatch.setenv("LINES", str(lines))
        monkeypatch.setattr(OutputWrapper, "isatty", lambda self: True)
    shown = run("queuestatus").splitlines()
    assert max(map(columns, shown)) <= 100
    most = {None: 40, 10: 24, 25: 24, 33: 32, 500: 40}[lines]
    assert most - 6 <= len(shown) <= most
    assert "…" in "".join(shown)


def test_nothing_is_lost_without_saying_so(much):
    shown, whole, facts = (
        run("queuestatus"),
        run("queuestatus", "--all"),
        json.loads(run("queuestatus", "--format", "json")),
    )
    listed = len(re.findall(r"^  \d\d\d-g+…", shown.split("Groups\n")[1], re.MULTILINE))
    assert 5 <= listed < 30
    assert f"  {30 - listed} more groups: --all\n" in shown
    assert re.search(r"\nWith --all: .*Errors \(30\)", shown)
    assert "--all" not in whole
    for name in ConsumerGroup.objects.values_list("consumer_group", "topic"):
        assert "/".join(name) in whole
    assert "注文" * 200 in json.dumps(facts["problems"] + facts["causes"], ensure_ascii=False)
    assert max(map(len, whole.splitlines())) > 200
    assert len(facts["groups"]) == 30


def test_the_worst_comes_first_with_its_error_and_since_when(much):
    lines = run("queuestatus").splitlines()
    place = next(number for number, line in enumerate(lines) if line.startswith(("Degraded: ", "Stopped: ")))
    head = "\n".join(lines[place : lines.index("Groups")])
    assert "ValueError: 失敗しました" in head
    assert re.search(r"since \d{4}-\d\d-\d\d \d\d:\d\d:\d\d \(", head)
    assert lines.index("Groups") > place


def test_a_small_queue_is_shown_as_a_whole(db):
    register(2)
    shown = run("queuestatus")
    assert "--all" not in shown
    assert "Groups\n" in shown


def test_groups_with_problems_come_before_idle_ones(db, clock):
    register(60)
    publish_many("late", [1])
    groups.register(USING, GroupRef("z", "late"), mode="ordered", start="earliest")
    sequence()
    clock.advance(120)
    lines = run("queuestatus").splitlines()
    place = lines.index("Groups")
    assert re.match("  z/late +no subscribers", lines[place + 2])
    assert re.match(r"  \d\d more groups: --all", next(line for line in lines if "more groups" in line))

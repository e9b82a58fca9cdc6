"""The keys of queuestatus --watch, without a terminal."""

from __future__ import annotations

import pytest

from django_mysqlqueue.management.keys import HELP, START, Place, View, press, split
from tests.support.internals import GroupRef

A, B, C = PLACES = [Place("default", GroupRef(name, "t")) for name in "abc"]


def after(keys, view=START, places=PLACES):
    for key in split(keys):
        view = press(view, key, places)
    return view


def test_an_escape_sequence_is_one_key():
    assert split("j\x1b[A\x1bOBq\x1b") == ["j", "\x1b[A", "\x1bOB", "q", "\x1b"]
    assert split("\x1b[1;5Cä") == ["\x1b[1;5C", "ä"]


@pytest.mark.parametrize(
    ("keys", "chosen"),
    [
        ("", None),
        ("j", A),
        ("k", A),
        ("jj", B),
        ("\x1b[B\x1bOB\x1b[B", C),
        ("jjjjj", C),
        ("jjk", A),
        ("jj\x1b[A\x1bOA", A),
        ("J", A),
        ("x", None),
        ("\x1b[C", None),
    ],
)
def test_choosing(keys, chosen):
    assert after(keys).chosen == chosen


def test_nothing_can_be_chosen_in_an_empty_list():
    assert after("jkp\r", places=[]) == START


def test_a_group_that_is_gone_is_not_acted_on():
    view = after("jj")
    for key in ("\r", "p"):
        assert press(view, key, [A, C]) == view
    assert press(view, "j", [A, C]).chosen == A


@pytest.mark.parametrize("enter", ["\r", "\n"])
def test_opening_and_going_back(enter):
    view = after(f"j{enter}")
    assert (view.mode, view.chosen) == ("group", A)
    assert after("j", view).chosen == B
    assert after("p", view).is_asked
    assert after("\x1b", view) == after("j")
    assert after(enter) == START, "none is chosen"


def test_pausing_needs_a_chosen_group():
    assert not after("p").is_asked
    assert after("jp") == View(chosen=A, is_asked=True)


def test_filtering():
    view = after("/Qj?h")
    assert (view.mode, view.filter) == ("filter", "Qj?h"), "these are letters of the text"
    assert after("\x7f\b", view).filter == "Qj"
    assert after("\x1b[A\x01", view) == view
    assert after("\r", view) == View(filter="Qj?h")
    assert after("\r\x1b", view) == START
    assert after("\x1b", view) == START
    assert len(after("/" + "x" * 500).filter) == 60


def test_going_back_from_a_group_keeps_the_filter():
    assert after("/a\rj\r\x1b").filter == "a"


@pytest.mark.parametrize("key", ["h", "?"])
def test_help(key):
    assert after(key).mode == "help"
    assert after(f"{key}x") == START
    assert len(HELP) == 8


@pytest.mark.parametrize("keys", ["q", "Q", "j\rq", "hq"])
def test_quitting(keys):
    assert after(keys).mode == "end"

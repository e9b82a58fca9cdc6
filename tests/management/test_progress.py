"""The progress of long operations: on a terminal, and nowhere else."""

from __future__ import annotations

import io
import re

import pytest

from django_mysqlqueue import publish_many
from django_mysqlqueue.management import operations as management
from tests.management.test_operations import scene
from tests.support.commands import run
from tests.support.harness import Sub, handler

BARS = {
    "queuediscard": "discard: .*0/2 ",
    "queuedropgroup": "drop: 0 ",
    "queuegc": "gc: 0 ",
    "queueredrive": "redrive: .*0/2 ",
    "queuereplayrange": "replay: .*0/2 ",
    "queueretry": "retry: .*0/2 ",
    "queueseek": "seek: 0 ",
    "queuesequence": "sequence: 0 ",
}
"""How the progress begins: with a number of which, or if the end is not known, with a number."""


class Stderr(io.StringIO):
    def __init__(self, *, is_terminal):
        super().__init__()
        self._is_terminal = is_terminal

    def isatty(self):
        return self._is_terminal


def arguments_of(name):
    if name in ("queuegc", "queuesequence"):
        publish_many("t", range(2))
        return []
    if name == "queuedropgroup":
        publish_many("t", range(2))
        Sub(handler()).settle()
        return ["g", "t", "--noinput"]
    return [*scene(name), "--noinput"]


@pytest.mark.parametrize("name", BARS)
def test_it_is_shown_on_a_terminal(db, monkeypatch, name):
    arguments = arguments_of(name)
    err = Stderr(is_terminal=True)
    monkeypatch.setattr("sys.stderr", err)
    out = run(name, *arguments)
    assert re.search(BARS[name], err.getvalue())
    assert err.getvalue().endswith("\r"), "it is gone at the end"
    assert BARS[name].split(":")[0] + ":" not in out


@pytest.mark.parametrize("name", BARS)
@pytest.mark.parametrize(
    ("is_terminal", "more"),
    [(False, []), (True, ["--format", "json"]), (True, ["--verbosity", "0"])],
    ids=["pipe", "JSON", "quiet"],
)
def test_it_is_not_shown_elsewhere(db, monkeypatch, name, is_terminal, more):
    arguments = arguments_of(name)
    err = Stderr(is_terminal=is_terminal)
    monkeypatch.setattr("sys.stderr", err)
    run(name, *arguments, *more)
    assert err.getvalue() == ""


def test_a_count_that_stopped_is_no_end(db, monkeypatch):
    monkeypatch.setattr(management, "COUNTED", 2)
    arguments = arguments_of("queueredrive")
    err = Stderr(is_terminal=True)
    monkeypatch.setattr("sys.stderr", err)
    run("queueredrive", *arguments)
    assert "redrive: 0 " in err.getvalue()

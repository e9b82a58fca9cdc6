"""Options of supervised processes."""

from __future__ import annotations

import io
import subprocess

import pytest
from django.core.management import CommandError, call_command

from django_mysqlqueue.management.commands.runsubscriber import Command

pytestmark = pytest.mark.any_engine


# -- options ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"processes": 2, "reload": True}, "--reload is for a single process"),
        ({"processes": 2, "group": ["nobody"]}, "--group nobody: no handler has this group"),
        ({"processes": 2, "heartbeat_file": "/nonexistent/alive"}, "/nonexistent/alive cannot be written: No such"),
        ({"heartbeat_file": "/nonexistent/alive"}, "/nonexistent/alive cannot be written: No such"),
        ({"max_memory": 5}, r"--max-memory 5: the process uses \d+ MB before"),
        ({"processes": 2, "database": "nowhere"}, "'nowhere'"),
    ],
)
def test_wrong_options_are_refused_before_any_child_starts(db, monkeypatch, options, text):
    monkeypatch.setattr(subprocess, "Popen", None)
    with pytest.raises(CommandError, match=text):
        call_command("runsubscriber", **options)


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(
    ("debug", "out", "more", "expected"),
    [
        (True, Terminal(), {}, True),
        (False, Terminal(), {}, False),
        (True, io.StringIO(), {}, False),
        (True, Terminal(), {"processes": 2}, False),
        (True, Terminal(), {"drain": True}, False),
        (True, Terminal(), {"max_messages": 5}, False),
        (True, Terminal(), {"reload": False}, False),
        (False, io.StringIO(), {"reload": True}, True),
    ],
)
def test_when_the_code_is_watched(settings, debug, out, more, expected):
    settings.DEBUG = debug
    options = {"processes": None, "drain": False, "max_messages": None, "reload": None, **more}
    assert Command(stdout=out)._reloads(options) is expected


def test_a_supervisor_needs_a_command_line_to_start_again(db):
    """Called from a script it would start that script."""
    with pytest.raises(CommandError, match="run this command line again"):
        call_command("runsubscriber", processes=2, group=["plain"])

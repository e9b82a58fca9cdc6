"""queuestatus --watch, in real terminals."""

from __future__ import annotations

import contextlib
import itertools
import os
import pty
import re
import signal
import subprocess
import sys
import termios
import threading
from concurrent.futures import Future
from dataclasses import replace

import pytest
from django.core.management import CommandError, call_command
from django.db.models import F

from django_mysqlqueue import Message, publish_many
from django_mysqlqueue.inspection import get_overview
from django_mysqlqueue.management import screen, watching
from django_mysqlqueue.management.base import INTERRUPTED
from django_mysqlqueue.management.keys import START, Place, press
from django_mysqlqueue.management.watching import Watched, read_snapshot
from django_mysqlqueue.models import ConsumerGroup, Operation, QueueMessage
from tests.support.commands import run
from tests.support.harness import USING, Sub, handler, sequence
from tests.support.internals import GroupRef, groups
from tests.support.paths import ROOT
from tests.support.processes import deaf_to_ctrl_c, environment
from tests.support.pseudo_terminal import ENTER, LEAVE, Terminal, opened, resize

HOUR_MS = 3_600_000
EVIL = "\x1b[2J\x1b]0;title\x07\u202e\x9b31m"
"""What would clear the screen, set the title, reverse the text, and color it."""


def backlog(group, topic="t"):
    groups.register(USING, GroupRef(group, topic), mode="ordered", start="earliest")


def opened_watch(*arguments, **options):
    command = [sys.executable, str(ROOT / "manage.py"), "queuestatus", "--watch", "0.5", *arguments]
    return opened(command, environment=environment() | options.pop("env", {}), **options)


@pytest.fixture
def world(db):
    publish_many("t", [Message(number, key=f"k{number}") for number in range(3)])
    backlog("g")
    sequence()
    age()


def age():
    """All has been so for an hour."""
    ConsumerGroup.objects.update(registered_at=F("registered_at") - HOUR_MS)
    QueueMessage.objects.update(published_at=F("published_at") - HOUR_MS)


# -- a process in a terminal -----------------------------------------------------


@pytest.mark.processes
def test_it_shows_the_state_and_changes_of_it_until_q(world):
    with opened_watch() as terminal:
        before = terminal.mode()
        lines = terminal.wait_for("g/t")
        assert lines[0] == "queuestatus, every 500 ms. Press h for the keys, q to quit."
        assert lines[1].startswith(f"Database {USING!r}  20")
        assert lines[2].startswith(" STOPPED  No subscriber is running; 3 messages are waiting")
        assert any(line.startswith("Next step: Start “manage.py runsubscriber”.") for line in lines)
        (row,) = (line for line in lines if line.startswith("g/t"))
        assert re.match(r"g/t  +no subscribers  +3 ", row)
        assert not terminal.mode()[3] & (termios.ICANON | termios.ECHO)
        publish_many("t", range(4))
        sequence()
        terminal.wait_for("7 messages are waiting")
        terminal.press("x\x1b[A")
        terminal.press("q")
        assert terminal.end() == 0
        assert terminal.mode() == before
        assert terminal.output.count(ENTER) == terminal.output.count(LEAVE) == 1
        assert terminal.output.endswith(LEAVE) or "\x1b[?25h" in terminal.output.split(LEAVE)[-1]


@pytest.mark.processes
def test_a_group_is_chosen_opened_paused_and_resumed(world):
    with opened_watch(columns=120, lines=40) as terminal:
        before = terminal.mode()
        terminal.wait_for("g/t")
        terminal.press("\x1b[B")
        terminal.wait_for("Chosen: g/t.")
        terminal.press("\r")
        lines = terminal.wait_for("backlog         3")
        assert lines[2].startswith("g/t  no subscribers")
        terminal.press("p")
        terminal.wait_for("queuepause g t")
        assert terminal.mode() == before, "the reason is a line"
        said = converse(terminal, ("the warehouse moves\r", "Continue? [y/N]"), ("y\r", "Press Enter"))
        assert "The group g/t will be paused" in said
        (done,) = Operation.objects.all()
        assert (done.action, done.reason) == ("pause", "the warehouse moves")
        assert "@" in done.actor
        terminal.press("\r")
        terminal.wait_for("g/t  paused")
        assert not terminal.mode()[3] & (termios.ICANON | termios.ECHO)
        terminal.press("p")
        terminal.wait_for("queueresume g t")
        said = converse(terminal, ("\r", "Continue? [y/N]"), ("n\r", "Press Enter"))
        assert "Nothing was changed." in said
        terminal.press("\r")
        terminal.wait_for("g/t  paused")
        assert ConsumerGroup.objects.get().paused
        terminal.press("\x1b")
        terminal.wait_for("group/topic")
        terminal.press("q")
        assert terminal.end() == 0
        assert terminal.mode() == before
        assert terminal.output.count(ENTER) == terminal.output.count(LEAVE) == 3


def converse(terminal, *parts):
    """Types texts and waits for the answer to each; returns all that was shown."""
    begun = len(terminal.output)
    for typed, shown in parts:
        place = len(terminal.output)
        terminal.press(typed)
        terminal.wait_until(lambda lines: shown in terminal.output[place:])  # noqa: B023
    return terminal.output[begun:]


@pytest.mark.processes
def test_the_list_is_filtered_and_the_keys_are_shown(world):
    backlog("other")
    with opened_watch(columns=120) as terminal:
        terminal.wait_for("other/t")
        terminal.press("/OTH")
        lines = terminal.wait_for("Filter: OTH_")
        assert any(line.startswith("other/t") for line in lines)
        assert not any(line.startswith("g/t") for line in lines)
        terminal.press("\rj")
        terminal.wait_for("Filter: OTH. Chosen: other/t.")
        terminal.press("\x1b")
        terminal.wait_until(lambda lines: any(line.startswith("g/t") for line in lines))
        terminal.press("?")
        lines = terminal.wait_for("pause or resume the chosen group")
        assert not any("other/t" in line for line in lines[1:])
        terminal.press("h")
        terminal.wait_for("group/topic")
        terminal.press("q")
        assert terminal.end() == 0


@pytest.mark.processes
@pytest.mark.parametrize(("end", "status"), [("\x03", INTERRUPTED), (signal.SIGTERM, 128 + signal.SIGTERM)])
def test_the_terminal_is_restored_while_it_asks(world, end, status):
    with opened_watch(columns=120) as terminal:
        before = terminal.mode()
        terminal.wait_for("g/t")
        terminal.press("jp")
        terminal.wait_for("queuepause g t")
        if end == "\x03":
            terminal.press(end)
        else:
            terminal.process.send_signal(end)
        assert terminal.end() == status
        assert terminal.mode() == before
        assert terminal.output.count(ENTER) == terminal.output.count(LEAVE) == 1
        assert not Operation.objects.exists()


def test_the_terminal_is_restored_after_an_error(world):
    master, slave = pty.openpty()
    before = termios.tcgetattr(slave)

    def show(databases, view):
        assert termios.tcgetattr(slave) != before
        raise RuntimeError

    try:
        with open(slave, closefd=False) as keys, pytest.raises(RuntimeError):
            watching.watch([USING], read_snapshot, show, seconds=1, size=lambda: (80, 24), keys=keys, change=None)
        assert termios.tcgetattr(slave) == before
    finally:
        os.close(master)
        os.close(slave)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("end", "status"),
    [
        (lambda terminal: terminal.press("\x03"), INTERRUPTED),
        (lambda terminal: terminal.process.send_signal(signal.SIGTERM), 128 + signal.SIGTERM),
    ],
    ids=["Ctrl-C", "SIGTERM"],
)
def test_the_terminal_is_restored(world, end, status):
    with contextlib.ExitStack() as stack:
        with deaf_to_ctrl_c():
            terminal = stack.enter_context(opened_watch())
        before = terminal.mode()
        terminal.wait_for("g/t")
        terminal.press("\x1a")  # Ctrl-Z
        # When the kernel gets to the key, it discards what has not been read.
        terminal.wait_for_frames(2)
        end(terminal)
        assert terminal.end() == status
        assert terminal.mode() == before
        assert LEAVE in terminal.output
        assert "\x1b[?25h" in terminal.output, "the cursor is shown again"
        assert "Traceback" not in terminal.output


@pytest.mark.processes
def test_another_size(world):
    for number in range(40):
        backlog(f"group-{number}")
    with opened_watch(columns=160, lines=50, env={"COLUMNS": "300", "LINES": "300"}) as terminal:
        terminal.wait_for("group-0/t")  # the first screen says that it reads
        lines = terminal.wait_until(lambda lines: len(lines) == 50)
        assert max(map(len, lines)) <= 160
        (header,) = (line for line in lines if line.startswith("group/topic"))
        assert header.split()[-1] == "subscribers"
        terminal.resize(60, 20)
        lines = terminal.wait_until(lambda lines: len(lines) == 20 and "more groups" in lines[-1])
        assert max(map(len, lines)) <= 60
        assert re.fullmatch(r"\d+ more groups", lines[-1])
        (header,) = (line for line in lines if line.startswith("group/topic"))
        assert "subscribers" not in header
        terminal.resize(20, 4)
        terminal.wait_until(lambda lines: len(lines) == 4 and lines[-1].startswith("The window is too"))
        terminal.press("Q")
        assert terminal.end() == 0


@pytest.mark.processes
@pytest.mark.parametrize(
    ("env", "arguments", "problem"),
    [
        ({"TERM": "dumb"}, [], "but TERM is 'dumb': use --format json, or omit --watch."),
        ({"TERM": ""}, [], "but TERM is '': use --format json"),
        ({}, ["--key", "a"], "--watch shows all keys: it cannot be combined with --key."),
        ({}, ["--format", "json"], "--watch shows a screen: it cannot be combined with --format json."),
        ({}, ["--watch", "0"], "'0': must be a number of seconds from 0.5 to 3600"),
        ({}, ["--watch", "nan"], "'nan': must be a number of seconds"),
        ({}, ["--watch", "soon"], "'soon': must be a number of seconds"),
    ],
)
def test_where_it_cannot_be_shown(world, env, arguments, problem):
    with opened_watch(*arguments, env=env, columns=200) as terminal:
        assert terminal.end() in (1, 2)
        assert problem in terminal.output
        assert ENTER not in terminal.output


def test_in_a_pipe(db):
    with pytest.raises(CommandError, match="needs a terminal with a screen, but stdout is not one: use --format json"):
        call_command("queuestatus", "--watch")


@pytest.mark.processes
def test_without_rich(world):
    code = (
        "import sys; sys.modules['rich'] = None; from django.core.management import execute_from_command_line; "
        "execute_from_command_line(['manage.py', 'queuestatus', *sys.argv[1:]])"
    )
    with opened([sys.executable, "-c", code, "--watch"], environment=environment(), columns=200) as terminal:
        assert terminal.end() == 1
        assert "--watch needs the extra 'watch': run pip install 'django-mysqlqueue[watch]'" in terminal.output
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment(), cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert "Groups" in done.stdout


# -- the screen ------------------------------------------------------------------


@contextlib.contextmanager
def screen_of(columns=80, lines=24, **options):
    """A screen on a terminal of this process, and what it shows."""
    master, slave = pty.openpty()
    resize(slave, columns, lines)
    terminal = Terminal(None, master, slave)
    try:
        with open(slave, "w", closefd=False) as out, screen.opened(out, seconds=2.0, **options) as shown:
            yield shown, terminal
    finally:
        os.close(master)
        os.close(slave)


def test_nothing_controls_the_terminal(db):
    def fail(delivery):
        raise ValueError(f"no {EVIL}")

    publish_many("t", [Message(number, key=f"{EVIL}{number}") for number in range(3)])
    Sub(handler("t", f"g{EVIL}", fail, max_attempts=1)).settle()
    found = read_snapshot(USING)
    (row,) = found.rows
    assert "\x1b" in str(row.group.ref)
    assert any("\x1b" in cause.text for cause in found.causes)
    said = run("queuestatus", "--all")
    assert r"g\u001b[2J\u001b]0;title\u0007\u202e\u009b31m" in said
    assert not re.search(r"[\x1b\x07\u202e\x9b]", said)
    for lines in (24, 60):
        with screen_of(200, lines) as (shown, terminal):
            shown.show([Watched(f"default{EVIL}", found), Watched("other", problem=f"no {EVIL}")])
            text = "\n".join(terminal.lines())
        written = terminal.output
        assert r"g\u001b[2J\u001b]0;title\u0007\u202e\u009b31m/t" in text
        assert r"no \u001b[2J" in text
        for one in ("\x1b[2J", "\x1b]", "\x07", "\u202e", "\x9b"):
            assert one not in written


def test_groups_are_sorted_by_state_then_backlog(db):
    for group, number in (("few", 1), ("many", 5), ("most", 9)):
        publish_many(group, range(number))
        backlog(group, group)
    backlog("idle", "idle")
    backlog("paused", "idle")
    ConsumerGroup.objects.filter(consumer_group="paused").update(paused=True)
    sequence()
    found = read_snapshot(USING)
    rows = [(row.group.ref.group, row.state.rank) for row in found.rows]
    assert [name for name, _rank in rows][3:] == ["idle", "paused"]
    assert [name for name, _rank in rows][:3] == ["most", "many", "few"]
    assert [rank for _name, rank in rows] == sorted(rank for _name, rank in rows)


def test_columns_that_do_not_fit_are_left_out(world):
    found = read_snapshot(USING)
    headers = []
    for columns in (200, 80, 45, 20):
        with screen_of(columns, 40) as (shown, terminal):
            shown.show([Watched(USING, found)])
            (header,) = (line for line in terminal.lines() if line.startswith("group/topic"))
        headers.append(header.split())
    assert headers[0] == [
        "group/topic", "state", "mode", "backlog", "flight", "retrying", "oldest", "in/s", "out/s", "drain", "30",
        "min", "letters", "limits", "subscribers",
    ]  # fmt: skip
    assert headers[2][:3] == ["group/topic", "state", "backlog"]
    assert all(set(narrow) <= set(wide) for wide, narrow in itertools.pairwise(headers))
    assert headers[3] == ["group/topic"]


def test_at_most_seven_causes_are_listed_with_their_symptoms(world):
    for number in range(3):
        backlog(f"s{number}")
    found = read_snapshot(USING)
    (cause,) = found.causes
    assert len(cause.problems) > 1
    many = [replace(cause, text=f"cause {number}") for number in range(12)]
    with screen_of(120, 60) as (shown, terminal):
        shown.show([Watched(USING, replace(found, causes=many))])
        lines = terminal.lines()
    listed = [line for line in lines if line.startswith("● cause")]
    assert listed == [f"● cause {number} ({len(cause.symptoms)} symptoms)" for number in range(7)]
    assert "  5 more problems" in lines
    assert any(f"({len(cause.symptoms)} symptoms)" in line for line in lines if not line.startswith("●"))


def test_the_chosen_group_is_always_shown(world):
    for number in range(40):
        backlog(f"group-{number:02}")
    found = Watched(USING, read_snapshot(USING))
    places = [Place(USING, row.group.ref) for row in found.rows(START)]
    view = START
    with screen_of(120, 24) as (shown, terminal):
        for place in places:
            view = press(view, "j", places)
            assert view.chosen == place
            shown.show([found], view)
            lines = terminal.lines()
            assert len(lines) == 24
            assert any(line.startswith(str(place.ref)) for line in lines[1:])
    assert "\x1b[7m" in terminal.output


def test_several_databases_one_below_the_other(world):
    found = read_snapshot(USING)
    with screen_of(100, 30) as (shown, terminal):
        shown.show([Watched("one", found), Watched("two", problem="The database 'two' is away."), Watched("three")])
        lines = terminal.lines()
    places = [number for number, line in enumerate(lines) if line.startswith("Database ")]
    assert [lines[place].split()[1] for place in places] == ["'one'", "'two'", "'three'"]
    assert any("STOPPED  The database 'two' is away." in line for line in lines[places[1] :])
    assert lines[places[2] + 1] == "Reading…"


def test_colors_can_be_switched_off(world, monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    found = read_snapshot(USING)
    outputs = []
    for color in (True, False):
        with screen_of(color=color) as (shown, terminal):
            shown.show([Watched(USING, found)])
            terminal.lines()
        outputs.append(terminal.output)
    assert "\x1b[1;37;41m" in outputs[0]
    assert not re.search(r"\x1b\[[0-9;]*(3|4)[0-7]m", outputs[1])


# -- the loop --------------------------------------------------------------------


def test_reads_are_bounded_like_the_pages(db, monkeypatch):
    used = []

    def read(**options):
        used.append(options["bounds"])
        return get_overview(**options)

    monkeypatch.setattr(watching, "get_overview", read)
    read_snapshot(USING)
    assert used == [watching.PAGES]


def test_a_database_that_is_gone_is_tried_again(world, monkeypatch):
    """The screen says so, and shows the groups again afterwards."""
    answers = iter([True, False, False, True])

    def read(alias):
        if not next(answers, True):
            raise CommandError("The database 'default' does not answer: gone.")
        return read_snapshot(alias)

    master, slave = pty.openpty()
    frames = []

    def show(databases, view):
        (one,) = databases
        frames.append((one.problem, one.found is not None))
        if one.problem == "" and any(problem for problem, _ in frames):
            os.write(master, b"q")

    try:
        with open(slave, closefd=False) as keys:
            watching.watch([USING], read, show, seconds=0.05, size=lambda: (80, 24), keys=keys, change=None)
    finally:
        os.close(master)
        os.close(slave)
    gone = [frame for frame in frames if frame[0]]
    assert gone == [("The database 'default' does not answer: gone.", True)] * len(gone)
    assert len(gone) >= 2
    assert frames[-1] == ("", True)


def test_a_read_that_takes_long_is_reported_and_not_repeated(monkeypatch):
    monkeypatch.setattr(watching, "TOTAL_SECONDS", 0.0)
    ended, started = threading.Event(), []

    def start(aliases, read, **limits):
        started.append(aliases)
        future = Future()
        threading.Thread(target=lambda: (ended.wait(), future.set_result("state")), daemon=True).start()
        return {aliases[0]: future}

    monkeypatch.setattr(watching, "start_each", start)
    one = Watched("default")
    assert one.turn(read_snapshot, 1.0)
    assert "'default' does not answer" in one.problem
    assert not one.turn(read_snapshot, 1.0)
    ended.set()
    answer = one.answer
    assert answer.result(10) == "state"
    assert one.turn(read_snapshot, 1.0)
    assert (one.problem, one.found) == ("", "state")
    assert len(started) == 1
    assert not one.turn(read_snapshot, 1.0), "the next read is due in a second"


def test_without_a_keyboard_it_waits(world):
    """stdin is not a terminal: only signals end it."""
    shown = []

    def show(databases, view):
        shown.append(1)
        if len(shown) == 2:
            raise KeyboardInterrupt

    with open(os.devnull) as keys, pytest.raises(KeyboardInterrupt):
        watching.watch([USING], read_snapshot, show, seconds=0.1, size=lambda: (80, 24), keys=keys, change=None)


def test_an_empty_queue(db):
    found = read_snapshot(USING)
    assert not found.rows
    with screen_of() as (shown, terminal):
        shown.show([Watched(USING, found)])
        assert any("No consumer group is registered yet." in line for line in terminal.lines())

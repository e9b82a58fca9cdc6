"""The soak moves a topic as the documentation describes, through kills and failures of the command."""

from __future__ import annotations

from itertools import count
from types import SimpleNamespace

import pytest
from soak import mover, plan
from soak.fleet import Slot
from soak.mover import KILLS, Mover

pytestmark = pytest.mark.any_engine

LONG = 100
"""Number of polls after which a command ends that the mover kills before."""


class Command:
    """A process that ends after a number of polls."""

    pid = 7

    def __init__(self, polls, code=0):
        self._polls, self._code = polls, code
        self.returncode = None

    def poll(self):
        self._polls -= 1
        if self._polls < 0 and self.returncode is None:
            self.returncode = self._code
        return self.returncode

    def kill(self):
        self.returncode = -9

    def wait(self):
        return self.returncode


class Run:
    """A mover whose commands and processes are imitations. Each look at the clock takes a second."""

    def __init__(self, monkeypatch, folder, commands, *, restarts=True):
        self.folder, self.commands, self.restarts = folder, list(commands), restarts
        self.log = []
        clock = count()
        monkeypatch.setattr(mover, "time", SimpleNamespace(monotonic=lambda: next(clock)))
        monkeypatch.setattr(mover.subprocess, "Popen", self._run)
        self.slots = [Slot(name, (), folder, is_publisher=name == "p") for name in ("a", "p", "b")]
        self._terminated = []
        fleet = SimpleNamespace(slots=self.slots, mark={}, terminate=self._terminate, has_started=self._has_started)
        self.mover = Mover(fleet, folder, seed=1, seconds=0, restarted=lambda slot: self._say(f"{slot.name} restarted"))

    def _say(self, what):
        self.log.append((what, (self.folder / plan.MOVED_SETTINGS).exists()))

    def _run(self, command, **options):
        assert command[1:5] == ["-m", "django", "queuemove", plan.MOVED]
        self._say("prepare" if "--prepare" in command else "move")
        return self.commands.pop(0)

    def _terminate(self, slot):
        assert all(one.starts and (one.is_ready or one.is_publisher) for one in self._terminated), "two at a time"
        self._say(f"{slot.name} terminated")
        self._terminated.append(slot)
        return [f"pid of {slot.name}"]

    def _has_started(self, slot):
        return slot.is_ready

    def killed(self):
        return [one.pid for one in self.mover.troubles if one.kind == plan.KILL_MOVE]

    def turns(self, most=1000):
        for _ in range(most):
            if self.mover.is_done:
                return
            self.mover.turn()
            for slot in self._terminated:  # It starts in one turn, and is ready in the next.
                slot.is_ready = slot.starts > 0
                slot.starts = int(self.restarts)
        raise AssertionError("it never ends")


def test_it_prepares_deploys_and_moves(monkeypatch, tmp_path):
    run = Run(monkeypatch, tmp_path, [Command(0), Command(0)])
    run.turns()
    assert run.log == [
        ("prepare", False),
        *((f"{name} {what}", True) for name in "apb" for what in ("terminated", "restarted")),
        ("move", True),
    ]
    assert list(run.mover.times) == ["prepared", "deployed", "moved"]
    assert run.mover.report()["commands run"] == 2
    assert [(one.kind, one.pid) for one in run.mover.troubles] == [(plan.DEPLOY, f"pid of {name}") for name in "apb"]


def test_commands_that_fail_are_run_again(monkeypatch, tmp_path):
    run = Run(
        monkeypatch, tmp_path, [Command(0, code=1), Command(0, code=1), Command(0), Command(0, code=1), Command(0)]
    )
    run.turns()
    commands = [what for what, _ in run.log if what in ("prepare", "move")]
    assert commands == ["prepare"] * 3 + ["move"] * 2
    assert run.mover.counts == {"commands run": 5, "commands failed": 3}
    assert run.killed() == [Command.pid] * 3


def test_each_command_is_killed_a_few_times_and_then_left_alone(monkeypatch, tmp_path):
    run = Run(monkeypatch, tmp_path, [Command(LONG) for _ in range(2 * (KILLS + 1))])
    run.turns()
    assert run.mover.counts == {"commands run": 2 * (KILLS + 1), "commands killed": 2 * KILLS}
    assert len(run.killed()) == 2 * KILLS


def test_a_process_that_does_not_restart_ends_the_run(monkeypatch, tmp_path):
    run = Run(monkeypatch, tmp_path, [Command(0)], restarts=False)
    with pytest.raises(TimeoutError, match="a did not restart"):
        run.turns()


def test_it_waits_for_its_part_of_the_run(monkeypatch, tmp_path):
    run = Run(monkeypatch, tmp_path, [Command(0), Command(0)])
    run.mover._begin_at = 20
    run.mover.turn()
    assert run.log == []
    run.turns()
    assert run.log

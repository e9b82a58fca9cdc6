"""Move a topic to the other database during the run, as docs/howto/databases.md describes.

The steps are: prepare, deploy the new settings by restarting one process after the other, move. Commands that fail,
because connections are cut or the server is away, are run again, and so are those that are killed on purpose.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from soak import plan, records
from soak.facts import Trouble
from soak.fleet import ROOT, Fleet, Slot

BEGIN = 0.3
"""The part of the run after which the move begins."""
KILLS = 3
"""How often the command is killed on purpose in each of the two steps."""
LONGEST_LIFE = 3.0
"""Maximum seconds after which it is killed."""
AGAIN = 0.5
"""Seconds until it is run again."""
PATIENCE = 60.0
"""Seconds to wait for a process to restart."""


class Mover:
    """The move, one step at a time: ``turn`` never waits."""

    def __init__(
        self,
        fleet: Fleet,
        folder: Path,
        seed: int,
        seconds: float,
        restarted: Callable[[Slot], None] = lambda slot: None,
    ) -> None:
        self._fleet = fleet
        self._folder = folder
        self._rng = random.Random(f"{seed} move")
        self._began = time.monotonic()
        self._begin_at = self._began + BEGIN * seconds
        self._restarted = restarted
        self._steps = self._move()
        self.is_done = False
        self.times: dict[str, float] = {}
        """Step → when it ended, in seconds since the beginning of the run."""
        self.counts: Counter[str] = Counter()
        self.troubles: list[Trouble] = []

    def turn(self) -> None:
        if not self.is_done and time.monotonic() >= self._begin_at:
            self.is_done = next(self._steps, "done") == "done"

    def report(self) -> Mapping[str, object]:
        times = {f"{step} after seconds": at for step, at in self.times.items()}
        return {**times, **self.counts}

    def _move(self) -> Iterator[str]:
        yield from self._run("prepared", "--prepare")
        (self._folder / plan.MOVED_SETTINGS).touch()
        for slot in self._fleet.slots:
            yield from self._restart(slot)
        self._end("deployed")
        yield from self._run("moved")

    def _end(self, step: str) -> None:
        self.times[step] = round(time.monotonic() - self._began, 1)

    def _run(self, step: str, *options: str) -> Iterator[str]:
        """Run the command until it succeeds."""
        command = ("-m", "django", "queuemove", plan.MOVED, "--to", plan.OTHER, "--noinput", "--traceback", *options)
        kills = KILLS
        while True:
            with (self._folder / "queuemove.txt").open("ab") as output:
                process = subprocess.Popen(
                    [sys.executable, *command],
                    cwd=ROOT,
                    env={**os.environ, **self._fleet.mark},
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    process_group=0,
                )
            kill_at = time.monotonic() + self._rng.uniform(0.5, LONGEST_LIFE) if kills else float("inf")
            while process.poll() is None:
                if time.monotonic() >= kill_at:
                    process.kill()
                    process.wait()
                    break
                yield step
            self.counts["commands run"] += 1
            if process.returncode == 0:
                self._end(step)
                return
            if process.returncode < 0:
                kills -= 1
            self.counts["commands killed" if process.returncode < 0 else "commands failed"] += 1
            since, until = records.now(), time.monotonic() + AGAIN
            while time.monotonic() < until:
                yield step
            self.troubles.append(Trouble(plan.KILL_MOVE, since, records.now(), process.pid))

    def _restart(self, slot: Slot) -> Iterator[str]:
        """Restart a process, unless it has been restarted with the new settings already."""
        starts, until, now = slot.starts, time.monotonic() + PATIENCE, records.now()
        self.troubles += [Trouble(plan.DEPLOY, now, now, one) for one in self._fleet.terminate(slot)]
        while slot.starts == starts or not (slot.is_publisher or self._fleet.has_started(slot)):
            if time.monotonic() > until:
                raise TimeoutError(f"{slot.name} did not restart")
            yield "deployed"
        self._restarted(slot)

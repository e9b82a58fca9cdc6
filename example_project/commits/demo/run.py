"""One run: publishing while real subscriber processes handle.

In three steps. *Live*: events one by one at a steady rate, each in a
transaction of its own; this is where latency means something. *Backlog*: the
rest as fast as it goes, in transactions of some hundred, which is where
throughput does. *Rolling restart*: when all is published the subscribers are
replaced one after another by draining ones, which end by themselves when
nothing is left.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from django.db import reset_queries

from example_project.commits.demo import samples
from example_project.commits.demo.processes import Process, Subscribers
from example_project.commits.demo.progress import Progress
from example_project.commits.demo.samples import SampleReader
from example_project.commits.events import CommitEvent
from example_project.commits.publishing import store

GROUPS = ("statistics", "order-check", "review")
BATCH = 500
LIVE_EVENTS = 1000
LIVE_RATE = 200
"""Events a second."""
LOOK = 0.1
"""Seconds between two looks at what the subscribers have recorded."""
LOOK_EVERY = round(LIVE_RATE * LOOK)


@dataclass(slots=True)
class Times:
    """When what happened: seconds of this machine's clock."""

    live_events: int
    backlog_from: float = 0.0
    published_at: float = 0.0


class Run:
    """Publishes ``events`` (``total`` of them) and waits until every group has handled them."""

    def __init__(
        self, events: Iterator[CommitEvent], total: int, *, processes: int, seed: int, logs: Path, samples_folder: Path
    ) -> None:
        self.samples = SampleReader(samples_folder, GROUPS)
        self.times = Times(live_events=min(LIVE_EVENTS, total // 4))
        self._events = events
        self._total = total
        self._processes = processes
        self._logs = logs
        self._environment = {
            **os.environ,
            samples.FOLDER: str(samples_folder),
            "DEMO_SEED": str(seed),
            # With DEBUG on Django keeps the text of every statement.
            "DEBUG": "0",
        }

    def run(self, say: Callable[[str], None]) -> None:
        """Runs to the end.

        Raises:
            CommandError: a subscriber has failed, or nothing moves any more.
        """
        with (
            Subscribers(self._logs, self._environment) as subscribers,
            Progress(self._total, self._total * len(GROUPS), say) as progress,
        ):
            first = [subscribers.start() for _ in range(self._processes)]
            self._wait(progress, subscribers, lambda: all(process.is_ready for process in first))
            say(f"{self._processes} subscribers are at work. Publishing {self.times.live_events} events one by one …")
            self._publish_live(progress, subscribers)
            live = self.times.live_events * len(GROUPS)
            self._wait(progress, subscribers, lambda: self.samples.handled >= live)
            say(f"Publishing the rest in transactions of {BATCH} …")
            self._publish_backlog(progress, subscribers)
            say("All is published. Replacing the subscribers by draining ones …")
            draining = [self._replace(subscribers, process) for process in first]
            self._wait(progress, subscribers, lambda: not any(process.is_running for process in draining))
            say("The subscribers have drained the queue and ended.")

    def _publish_live(self, progress: Progress, subscribers: Subscribers) -> None:
        began = time.monotonic()
        for number, event in enumerate(islice(self._events, self.times.live_events)):
            time.sleep(max(0.0, began + number / LIVE_RATE - time.monotonic()))
            store([event])
            progress.published.update()
            if number % LOOK_EVERY == 0:
                self._look(progress, subscribers)

    def _publish_backlog(self, progress: Progress, subscribers: Subscribers) -> None:
        self.times.backlog_from = time.time()
        while batch := list(islice(self._events, BATCH)):
            store(batch)
            reset_queries()  # which Django keeps while DEBUG is on
            progress.published.update(len(batch))
            self._look(progress, subscribers)
        self.times.published_at = time.time()

    def _replace(self, subscribers: Subscribers, process: Process) -> Process:
        subscribers.stop(process)
        return subscribers.start("--drain")

    def _wait(self, progress: Progress, subscribers: Subscribers, condition: Callable[[], bool]) -> None:
        while not condition():
            time.sleep(LOOK)
            self._look(progress, subscribers)
        self._look(progress, subscribers)

    def _look(self, progress: Progress, subscribers: Subscribers) -> None:
        subscribers.check()
        self.samples.read()
        progress.handled(self.samples.handled)

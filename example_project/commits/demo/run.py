"""One run of the demo: publish events while subscriber processes handle them.

A run has three phases:

- *Live*: events are published at a steady rate, one per transaction. This phase measures latency.
- *Backlog*: the other events are published as fast as possible, several hundred per transaction. This phase measures
  throughput.
- *Rolling restart*: after all events are published, a chain of jobs is enqueued, and each subscriber is replaced by one
  that drains the queue and exits.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from django.db import reset_queries

from example_project.commits.demo import samples
from example_project.commits.demo.processes import Process, Subscribers
from example_project.commits.demo.progress import Progress
from example_project.commits.demo.samples import SampleReader
from example_project.commits.demo.verification import Expected
from example_project.commits.events import CommitEvent
from example_project.commits.publishing import store
from example_project.commits.subscribers import WORTH_A_REVIEW
from example_project.commits.tasks import enqueue_ranking

GROUPS = ("statistics", "order-check", "review")
BATCH = 500
LIVE_EVENTS = 1000
LIVE_RATE = 200
"""Events per second."""
LOOK = 0.1
"""Seconds between reads of the subscribers' samples."""
LOOK_EVERY = round(LIVE_RATE * LOOK)
"""Events between reads of the samples in the live phase."""


@dataclass(slots=True)
class Times:
    """The times at which the phases began and ended, in seconds of this machine's clock."""

    live_events: int
    burst_from: float = 0.0
    published_at: float = 0.0


class Run:
    """Publish events and wait until every group has handled those that it gets."""

    def __init__(
        self,
        events: Iterator[CommitEvent],
        expected: Expected,
        *,
        processes: int,
        seed: int,
        logs: Path,
        samples_folder: Path,
    ) -> None:
        self.samples = SampleReader(samples_folder, GROUPS)
        self.times = Times(live_events=min(LIVE_EVENTS, expected.total // 4))
        self._events = events
        self._expected = expected
        self.live_deliveries = 0
        self.ranking: Any = None
        """The result of the job that ranks the repositories."""
        self._processes = processes
        self._logs = logs
        self._environment = {
            **os.environ,
            samples.FOLDER: str(samples_folder),
            "DEMO_SEED": str(seed),
            # With DEBUG on, Django keeps the text of every statement in memory.
            "DEBUG": "0",
        }

    def run(self, say: Callable[[str], None]) -> None:
        """Run all phases.

        Raises:
            CommandError: A subscriber failed, or the queue is stalled.
        """
        with (
            Subscribers(self._logs, self._environment) as subscribers,
            Progress(self._expected.total, sum(self._expected.handled.values()), say) as progress,
        ):
            first = [subscribers.start() for _ in range(self._processes)]
            self._wait(progress, subscribers, lambda: all(process.is_ready for process in first))
            say(f"Started {_subscribers(self._processes)}.")
            say(f"Publishing the first {self.times.live_events} events, {LIVE_RATE} per second …")
            self._publish_live(progress, subscribers)
            self._wait(progress, subscribers, lambda: self.samples.handled >= self.live_deliveries)
            say(f"Publishing the other events, up to {BATCH} per transaction …")
            self._publish_burst(progress, subscribers)
            self.ranking = enqueue_ranking(sorted(self._expected.commits))
            say("Published all events, and enqueued the jobs. Replacing the subscribers one after another …")
            draining = [self._replace(subscribers, process) for process in first]
            self._wait(progress, subscribers, lambda: not any(process.is_running for process in draining))
            say("The subscribers have drained the queue and exited.")

    def _publish_live(self, progress: Progress, subscribers: Subscribers) -> None:
        began = time.monotonic()
        for number, event in enumerate(islice(self._events, self.times.live_events)):
            time.sleep(max(0.0, began + number / LIVE_RATE - time.monotonic()))
            store([event])
            self.live_deliveries += len(GROUPS) - (event.files <= WORTH_A_REVIEW)
            progress.published.update()
            if number % LOOK_EVERY == 0:
                self._look(progress, subscribers)

    def _publish_burst(self, progress: Progress, subscribers: Subscribers) -> None:
        self.times.burst_from = time.time()
        while batch := list(islice(self._events, BATCH)):
            store(batch)
            reset_queries()  # with DEBUG on, Django keeps all queries in memory
            progress.published.update(len(batch))
            self._look(progress, subscribers)
        self.times.published_at = time.time()

    @staticmethod
    def _replace(subscribers: Subscribers, process: Process) -> Process:
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


def _subscribers(count: int) -> str:
    return "1 subscriber" if count == 1 else f"{count} subscribers"

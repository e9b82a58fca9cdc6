"""What the poller does now and then, one small step at a turn."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from django_mysqlqueue.runtime.log import orphans_deleted
from django_mysqlqueue.service import audit, heartbeats, history, leasing, retention, rollups, watermarks
from django_mysqlqueue.service.retention import Place
from django_mysqlqueue.service.transactions import Session

if TYPE_CHECKING:
    from django_mysqlqueue.runtime.poller import Poller

EVERY = 60.0
"""Seconds between two rounds."""
SLICE = 500
"""Partitions that one step looks at."""
PAUSE = 0.05
"""Seconds between two steps of a round, so that claims and flushes have their turn."""


class Housekeeping:
    """Rounds of small steps: the safety net of the to-look lists, watermarks, GC."""

    def __init__(self, poller: Poller) -> None:
        self._poller = poller
        self._steps: Iterator[None] | None = None
        self._scan: Iterator[None] | None = None
        self.next_at = time.monotonic() + EVERY * random.random()

    def start_anew(self) -> None:
        self._steps = self._scan = None

    def scan_all(self) -> None:
        """Looks for work in every partition, slice by slice: at the start and after a reconnect."""
        self._scan = self._find_work()
        self.next_at = 0.0

    def is_scanning(self) -> bool:
        return self._scan is not None

    def turn(self) -> None:
        """One step, if one is due."""
        now = time.monotonic()
        if now < self.next_at:
            return
        if self._scan is not None:
            # Nobody waits for the rest of this scan to sleep in between.
            if next(self._scan, "done") == "done":
                self._scan = None
            self.next_at = time.monotonic() if self._scan is not None else now + PAUSE
            return
        if self._steps is None:
            self._steps = self._round()
        if next(self._steps, "done") == "done":
            self._steps = None
            self.next_at = now + EVERY * (0.75 + random.random() / 2)
        else:
            self.next_at = time.monotonic() + PAUSE

    def _round(self) -> Iterator[None]:
        poller = self._poller
        poller.check_tail(Session(poller.using))
        yield
        yield from self._find_work()
        yield from self._sweep_watermarks()
        yield from self._collect()
        heartbeats.forget_old(poller.using)
        yield
        for forget in (history.collect, rollups.collect, audit.collect):
            while forget(poller.using):
                yield

    def _find_work(self) -> Iterator[None]:
        """Every partition that may have work goes on its group's list, known or not."""
        for work in list(self._poller.works):
            after: str | None = None
            while True:
                keys, after = leasing.find_work(Session(self._poller.using), work.ref, after=after, limit=SLICE)
                for key in keys:
                    work.news(key)
                yield
                if after is None:
                    break

    def _sweep_watermarks(self) -> Iterator[None]:
        """Watermarks of shared groups that a subscriber left behind when it vanished."""
        for work in list(self._poller.shared):
            work.look_after_clock_step = True
            after: str | None = None
            while True:
                keys, after = watermarks.behind(Session(self._poller.using), work.ref, after=after, limit=SLICE)
                unfinished = set(keys)
                while unfinished:
                    unfinished = watermarks.sweep(self._poller.using, work.ref, unfinished)
                    yield
                yield
                if after is None:
                    break

    def _collect(self) -> Iterator[None]:
        place: Place | None = Place()
        while place is not None:
            step = retention.collect_step(self._poller.using, place)
            for orphans in step.orphans:
                orphans_deleted(orphans)
            place = step.place
            yield

"""The poller's periodic maintenance, in small steps, one per turn."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from django_mysqlqueue.runtime.log import orphans_deleted
from django_mysqlqueue.runtime.polling.group import Group
from django_mysqlqueue.runtime.polling.shared import SharedMode
from django_mysqlqueue.service import leasing, pruning, samples, watermarks
from django_mysqlqueue.service.refs import GroupRef
from django_mysqlqueue.service.samples import Sample
from django_mysqlqueue.sql.session import Session

EVERY = 60.0
"""Seconds between two rounds: one in each minute, so that each minute gets a sample of the backlog."""
MARGIN = 5.0
"""Seconds around the full minute in which no round starts."""
SLICE = 500
"""Partitions per step."""
PAUSE = 0.05
"""Seconds between two steps of a round, for claims and flushes."""


class Maintenance:
    """Rounds of small steps: find work that the lists of partitions missed, sample backlogs, sweep watermarks, run GC.

    Args:
        using: alias of the queue's database.
        groups: all groups of the process.
        shared: those in shared mode.
        check_tail: called at the start of each round.
        clock: returns the database's time in epoch milliseconds.
        entered: returns how many messages entered the log, see ``samples.claim``.
        apart: returns a context manager for work for one group, see ``Poller``.
        only_scans: if True, there are no rounds: partitions are scanned only after ``scan_all``.
    """

    def __init__(
        self,
        using: str,
        groups: Sequence[Group[Any]],
        shared: Sequence[Group[SharedMode]],
        *,
        check_tail: Callable[[Session], None],
        clock: Callable[[], int],
        entered: Callable[[], Mapping[int, Mapping[tuple[str, str], int]]],
        apart: Callable[[Group[Any]], AbstractContextManager[None]],
        only_scans: bool = False,
    ) -> None:
        self._using = using
        self._groups = groups
        self._shared = shared
        self._check_tail = check_tail
        self._clock = clock
        self._entered = entered
        self._apart = apart
        self._second = random.uniform(MARGIN, EVERY - MARGIN)
        """The second of a minute of the database's clock in which rounds start."""
        self._only_scans = only_scans
        self._search = pruning.Search()
        self._steps: Iterator[None] | None = None
        self._scan: Iterator[None] | None = None
        self.next_at = float("inf") if only_scans else time.monotonic() + EVERY * random.random()

    def reset(self) -> None:
        """Abandon the current round and scan."""
        self._steps = self._scan = None

    def scan_all(self) -> None:
        """Look for work in all partitions, slice by slice: at the start and after a reconnect."""
        self._scan = self._find_work()
        self.next_at = 0.0

    def is_scanning(self) -> bool:
        """Return whether a scan asked for by ``scan_all`` has not finished."""
        return self._scan is not None

    def turn(self) -> None:
        """Do one step if one is due."""
        now = time.monotonic()
        if now < self.next_at:
            return
        if self._scan is not None:
            # Without a pause: messages wait for the rest of this scan.
            scan = self._scan
            if next(scan, "done") == "done" and self._scan is scan:
                self._scan = None
            self.next_at = time.monotonic() if self._scan is not None else now + PAUSE
            return
        if self._only_scans:
            self.next_at = float("inf")
            return
        if self._steps is None:
            self._steps = self.round()
        if next(self._steps, "done") == "done":
            self._steps = None
            self.next_at = now + (self._second - self._clock() / 1000) % EVERY
        else:
            self.next_at = time.monotonic() + PAUSE

    def round(self) -> Iterator[None]:
        """Run one round, step by step."""
        self._check_tail(Session(self._using))
        yield
        claimed = samples.claim(self._using, [group.ref for group in self._groups], self._entered())
        yield
        yield from self._find_work(claimed)
        yield from self._sweep_watermarks()
        if self._groups and not claimed:
            return  # The processes that have claimed the samples of this minute prune, for all.
        for step in pruning.prune(self._using, search=self._search):
            for orphans in step.orphans:
                orphans_deleted(orphans)
            yield

    def _find_work(self, claimed: Mapping[GroupRef, int] | None = None) -> Iterator[None]:
        """Notify each group of all partitions that may have work, known to it or not."""
        for group in list(self._groups):
            with self._apart(group):
                yield from self._find_work_of(group, (claimed or {}).get(group.ref))

    def _find_work_of(self, group: Group[Any], minute: int | None) -> Iterator[None]:
        sample = None if minute is None else Sample(self._using, group.ref, minute)
        if sample is not None:
            sample.begin()
            yield
        after: str | None = None
        while True:
            keys, after = leasing.find_work(Session(self._using), group.ref, after=after, limit=SLICE)
            group.notify(keys)
            yield
            if sample is not None:
                sample.add(keys)
                while not sample.is_counted():
                    yield
                    sample.count()
                yield
            if after is None:
                break
        if sample is not None:
            sample.end()
            yield

    def _sweep_watermarks(self) -> Iterator[None]:
        """Advance watermarks of shared groups that lost subscribers left behind."""
        for group in list(self._shared):
            with self._apart(group):
                yield from self._sweep_watermarks_of(group)

    def _sweep_watermarks_of(self, group: Group[SharedMode]) -> Iterator[None]:
        group.mode.expect_clock_step()
        after: str | None = None
        while True:
            keys, after = watermarks.behind(Session(self._using), group.ref, after=after, limit=SLICE)
            unfinished = set(keys)
            while unfinished:
                unfinished = watermarks.sweep(self._using, group.ref, unfinished)
                yield
            yield
            if after is None:
                break

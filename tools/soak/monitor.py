"""Take samples during the run: lags, memory and the tables."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from django.db import Error, connections

from soak import evidence, moments, plan, records, schedule_evidence
from soak.facts import Progress
from soak.fleet import Fleet, Slot, resident_mb
from soak.job_evidence import JobMoments
from soak.publisher import HOLD
from soak.schedule_checker import Row
from tests.support.tables import Tables

EVERY = 5.0
"""Seconds between samples."""
MOST = 2000
"""Maximum lag of a group in messages. Above it, publishers pause until the lag is half of it."""


@dataclass(frozen=True, slots=True)
class Sample:
    at: float
    """Seconds since the beginning of the run."""
    committed: int
    lags: dict[str, int]
    held_back: bool
    """Whether publishers are paused."""


class Monitor:
    """Take samples. The killer may cut its connection; then a sample is missing."""

    def __init__(self, fleet: Fleet, folder: Path) -> None:
        self._fleet = fleet
        self._hold = folder / HOLD
        self._began = time.monotonic()
        self._next_at = 0.0
        self._fell_at = self._began
        self.samples: list[Sample] = []
        self.memory: dict[str, list[float]] = {slot.name: [] for slot in fleet.subscribers if slot.is_spared}
        """Megabytes of memory of the subscribers that are never killed."""
        self.progress: list[Progress] = []
        self.moments = {alias: moments.Moments(alias) for alias in plan.ALIASES}
        self.jobs = JobMoments()
        self.schedules: list[dict[str, Row]] = []

    def stuck_for(self) -> float:
        """Return the seconds since the lags last decreased."""
        return time.monotonic() - self._fell_at

    def forget(self, slot: Slot) -> None:
        """Begin the samples of a process's memory again: it was restarted."""
        if slot.name in self.memory:
            self.memory[slot.name].clear()

    def turn(self) -> None:
        now = time.monotonic()
        if now < self._next_at:
            return
        self._next_at = now + EVERY
        for slot in self._fleet.subscribers:
            if slot.is_spared and slot.pid is not None and (resident := resident_mb(slot.pid)) is not None:
                self.memory[slot.name].append(resident)
        try:
            sample = Sample(round(now - self._began, 1), evidence.committed(), evidence.lags(), self._hold.exists())
            tables = {}
            for alias in plan.ALIASES:
                with moments.one_moment(alias):
                    if alias == plan.HOME:
                        jobs = JobMoments.read()
                        schedules = schedule_evidence.read_rows()
                    tables[alias] = (Tables.read(alias), records.now())
        except Error:
            connections.close_all()
            return
        if not self.samples or sum(sample.lags.values()) < sum(self.samples[-1].lags.values()):
            self._fell_at = now
        self.samples.append(sample)
        for alias, (there, at) in tables.items():
            self.progress.append(moments.progress(alias, there, at))
            self.moments[alias].add(there, jobs.cancelled)
        self.schedules.append(schedules)
        self.jobs.add(tables[plan.HOME][0], jobs)
        lag = max(sample.lags.values())
        if lag > MOST:
            self._hold.touch()
        elif lag < MOST / 2:
            self._hold.unlink(missing_ok=True)

"""Explore pairs of operations; see ``docs/interleavings.md``."""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass, field
from itertools import permutations
from random import Random

from tests.interleavings import known, pictures, schedules
from tests.interleavings.pictures import Picture
from tests.interleavings.schedules import Diverged, Named, Prefix, Segment, Space
from tests.interleavings.trials import Trial, Verdict

ATTEMPTS = 3
"""How often a schedule is begun that its operations do not follow."""


@dataclass
class Unserial:
    """An outcome that neither order of the operations has."""

    digest: str
    schedule: str
    """One in which the transactions are as if run one after the other, if there is any."""
    between: bool
    """There is."""
    nearest: str
    lines: list[str]
    """Where it differs from the nearest serial one."""
    passed_over: bool
    """In that schedule a statement found rows locked and skipped them, or may have."""
    waited: bool
    """In that schedule a statement waited for a lock."""
    read_before: bool
    """In that schedule a transaction went on after another one had committed what it had read before."""


@dataclass
class Report:
    """What the schedules of a pair have come to."""

    pair: str
    bound: int
    schedules: int = 0
    pruned: int = 0
    seconds: float = 0.0
    outcomes: int = 0
    digests: list[str] = field(default_factory=list)
    """Of all outcomes."""
    serial: int = 0
    longest: int = 0
    """Steps of the longest schedule."""
    broken: dict[str, str] = field(default_factory=dict)
    """What is wrong → the shortest schedule that shows it."""
    unserial: list[Unserial] = field(default_factory=list)
    waits: dict[str, str] = field(default_factory=dict)
    """Who waited for whom (``known.wait``) → a schedule."""
    deadlocks: dict[str, str] = field(default_factory=dict)
    spent: dict[str, float] = field(default_factory=dict)
    """Seconds: to restore the tables, to execute, to judge, to drain."""


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:10]


def explore(
    trial: Trial,
    bound: int,
    *,
    most: int | None = None,
    random: Random | None = None,
    shrink: bool = True,
    reduce: bool = True,
) -> Report:
    """All schedules of a pair with at most ``bound`` preemptions.

    Args:
        trial: the pair at its start.
        bound: how often an operation may be interrupted that could have gone on.
        most: only so many schedules, …
        random: … chosen by this.
        shrink: look for the shortest schedule of each thing that is wrong.
        reduce: leave out schedules that come to the same as others.
    """
    began = time.perf_counter()
    space = Space(bound, random, reduce=reduce)
    seen = _Seen(trial, Report(trial.pair.name, bound))
    for choices in space:
        verdict = follow(trial, choices)
        space.add(choices, verdict.run)
        seen.add(verdict)
        if most is not None and seen.report.schedules >= most:
            break
    report = seen.finish()
    report.pruned = space.pruned
    if shrink:
        for text, name in report.broken.items():
            report.broken[text] = shortest(trial, text, name)
    report.seconds = time.perf_counter() - began
    report.spent = {name: round(seconds, 3) for name, seconds in trial.spent.items()}
    return report


def judge(trial: Trial, name: str) -> Report:
    """The report on one schedule, beside both serial orders."""
    seen = _Seen(trial, Report(trial.pair.name, 0))
    for one in (name, *map(" ".join, permutations(trial.threads))):
        seen.add(replay(trial, one))  # which drains what the schedule has left
    return seen.finish()


class _Seen:
    """What the schedules of a pair have come to so far."""

    def __init__(self, trial: Trial, report: Report) -> None:
        self._trial, self.report = trial, report
        self._operations = dict(zip(trial.threads, trial.pair.operations, strict=True))
        self._serial: dict[str, Picture] = {}
        self._verdicts: dict[str, Verdict] = {}
        """By the text of the outcome: one with serializable transactions, if there is any."""

    def add(self, verdict: Verdict) -> None:
        report = self.report
        report.schedules += 1
        report.longest = max(report.longest, len(verdict.run.steps))
        if verdict.is_serial:
            self._serial[verdict.name] = verdict.outcome
        known_one = self._verdicts.get(verdict.text)
        if known_one is None or (not known_one.is_between and verdict.is_between):
            self._verdicts[verdict.text] = verdict
        for text in verdict.broken + self._trial.drain(verdict):
            report.broken.setdefault(text, verdict.name)
        names = {thread: operation.name for thread, operation in self._operations.items()} | {"": known.NOBODY}
        for one in verdict.run.waits:
            report.waits.setdefault(known.wait(names[one.thread], one.label, names[one.holder]), verdict.name)
        for thread, label in verdict.run.deadlocks:
            others = sorted(name for other, name in names.items() if other not in (thread, ""))
            report.deadlocks.setdefault(known.deadlock(names[thread], label, others), verdict.name)

    def finish(self) -> Report:
        """The report, with the outcomes that are not serial."""
        report = self.report
        texts = {pictures.text(one) for one in self._serial.values()}
        report.outcomes, report.serial = len(self._verdicts), len(texts)
        report.digests = sorted(map(digest, self._verdicts))
        for text, verdict in self._verdicts.items():
            if text not in texts and self._serial:
                nearest, lines = pictures.difference(verdict.outcome, self._serial)
                report.unserial.append(
                    Unserial(
                        digest(text),
                        verdict.name,
                        verdict.is_between,
                        nearest,
                        lines,
                        verdict.passed_over,
                        bool(verdict.run.waits),
                        verdict.read_before,
                    )
                )
        return report


def follow(trial: Trial, choices: list[tuple[str, str]]) -> Verdict:
    """One schedule by its first choices.

    Raises:
        Diverged: the operations did not do again what they had done.
    """
    for attempt in range(1, ATTEMPTS + 1):
        try:
            return trial.run(Prefix(choices))
        except Diverged:
            if attempt == ATTEMPTS:
                raise
    raise AssertionError("unreachable")


def replay(trial: Trial, name: str) -> Verdict:
    """One schedule by its name."""
    return trial.run(Named(schedules.parse(name)))


def shortest(trial: Trial, text: str, name: str) -> str:
    """The name of the shortest schedule found that has the same thing wrong."""

    def fails(candidate: list[Segment]) -> bool:
        try:
            verdict = trial.run(Named(candidate))
        except Diverged:
            return False
        return text in verdict.broken or text in trial.drain(verdict)

    return " ".join(map(str, schedules.shrink(schedules.parse(name), fails)))

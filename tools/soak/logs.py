"""Judge the log lines of a run: which are expected, and which are not."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from soak.facts import Trouble, Verdict, verdict
from soak.plan import AWAY, CONNECTIONS, CUT, FREEZES, IMPATIENT

# Error codes of lost connections and of a server that stops, starts or is away.
LOST = frozenset(
    {1040, 1053, 1077, 1079, 1152, 1158, 1159, 1160, 1161, 1184, 1317, 1927, 2002, 2003, 2006, 2013, 3169, 4031}
)
LOCK_WAIT = 1205
"""A lock wait timeout: a frozen process holds the lock. It costs one poll and nothing else."""
DEADLOCK = 1213
DETECTED = "Transactions deadlock detected"
"""How both servers begin a deadlock in their logs, with ``innodb_print_all_deadlocks``."""

BOUNDED = (
    "database.unavailable",
    "poller.failed",
    "heartbeat.failed",
    "heartbeat.withheld",
    "group.failed",
    "shutdown.timed_out",
    "handlers.abandoned",
    "release.failed",
    "child.died",
    "child.killed",
)
"""Events that the disturbances explain, up to a maximum number."""
LINES = 2
"""Number of lines per event and affected process that are explained."""
FROZEN = 2
"""Number of processes that a freeze affects: the frozen one, and one that waits for its locks."""
LINES_AT_LEAST = 5
IN_A_ROW, IN_A_ROW_PER_SECOND = 16, 4
"""Maximum number of consecutive failures, and additional ones per second of the longest outage of the server. The
heartbeat makes 2.4 attempts per second."""

_FAILURES = re.compile(r"\bfailures=(\d+)")
_CODE = re.compile(r"\((\d{4}), ?[\"']")
"""The driver's form of errors: (2006, 'Server has gone away')."""
_AWAITED = re.compile(r"^RECORD LOCKS .* index (\S+) of table `[^`]*`\.`([^`]*)` .* waiting$")
_NAMES = "Error|Exception|Planned|Stale|Delivery|NotStarted|Exit|Interrupt|Unknown"
_EXCEPTION = re.compile(rf"^(?:[a-z_]\w*\.)*(_?[A-Z]\w*(?:{_NAMES})|Planned)(?::|$)")
_EVENT = re.compile(r"^\S+ \S+ (DEBUG|INFO|WARNING|ERROR|CRITICAL) (?:\[\d+\] )?([a-z_]+\.[a-z_]+)\b")
EXPECTED_EXCEPTIONS = frozenset({"Planned", "CommitOutcomeUnknown", "StaleDelivery", "_NotStarted"})
"""Raised as planned, or because of a lost connection (its cause is judged too)."""
EXPECTED_ERRORS = frozenset(
    {
        "child.died",
        "child.killed",
        "database.unavailable",
        "delivery.dead_lettered",
        "handlers.abandoned",
        "heartbeat.withheld",
        "sequencer.quarantined",
        "shutdown.timed_out",
    }
)
"""Events of level ERROR that a killed child, a frozen process, an outage of the server, or a message that the log is to
refuse explains."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """The numbers of failures that are explained."""

    lines: int = LINES_AT_LEAST
    """Maximum number of lines of each event in ``BOUNDED``, and of lock wait timeouts."""
    in_a_row: int = IN_A_ROW
    """Maximum number of consecutive failures."""


def bounds(troubles: Iterable[Trouble], processes: int) -> Bounds:
    """Return the bounds for a run.

    Args:
        troubles: The disturbances.
        processes: The number of subscriber processes.
    """
    hit, away = 0, 0.0
    for one in troubles:
        if one.kind in AWAY:
            away = max(away, one.until - one.since)
        if one.kind in AWAY or one.kind == IMPATIENT:
            hit += processes
        elif one.kind == CUT:
            hit += CONNECTIONS
        else:
            hit += FROZEN if one.kind in FREEZES else 1
    return Bounds(LINES_AT_LEAST + LINES * hit, IN_A_ROW + round(IN_A_ROW_PER_SECOND * away))


@dataclass(slots=True)
class Findings:
    """The contents of the logs of a run."""

    events: Counter[str] = field(default_factory=Counter)
    codes: Counter[int] = field(default_factory=Counter)
    in_a_row: dict[str, int] = field(default_factory=dict)
    """Event → the highest number of consecutive failures that it reported."""
    deadlocks: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)

    def read(self, name: str, lines: Iterable[str]) -> None:
        previous = ""
        for number, line in enumerate(lines, 1):
            self._judge(f"{name}:{number}", line.rstrip(), previous)
            previous = line.rstrip() or previous

    def _judge(self, where: str, line: str, previous: str) -> None:
        codes = [int(code) for code in _CODE.findall(line)]
        self.codes.update(codes)
        if DEADLOCK in codes or "Deadlock found" in line:
            self.deadlocks.append(f"{where}: {line[:300]}")
            return
        found = _EVENT.match(line)
        if found:
            self.events[found[2]] += 1
            if failures := _FAILURES.search(line):
                self.in_a_row[found[2]] = max(self.in_a_row.get(found[2], 0), int(failures[1]))
            waited = found[2] == "group.failed" and codes == [LOCK_WAIT]
            # After its COMMIT, a handler's connection was lost: the message is acked. Or a process was asked to end
            # while the server was away: its messages are redelivered like those of a killed one.
            lost = found[2] in ("on_commit.failed", "release.failed") and bool(codes) and LOST.issuperset(codes)
            expected = found[2] in EXPECTED_ERRORS or waited or lost
            if found[1] == "CRITICAL" or (found[1] == "ERROR" and not expected):
                self.unexpected.append(f"{where}: {line[:300]}")
                return
        strange = [code for code in codes if code not in LOST and code != LOCK_WAIT]
        exception = _EXCEPTION.match(line)
        if strange or (exception and not codes and exception[1] not in EXPECTED_EXCEPTIONS):
            self.unexpected.append(f"{where}: {line[:300]}")

    def verdicts(self, explained: Bounds = Bounds()) -> list[Verdict]:
        told = f"{self.events.total()} events, {self.codes.total()} database errors"
        most = max((self.events[name] for name in BOUNDED), default=0)
        failing = f"; the most frequent failure {most} times (explained: {explained.lines}), consecutive failures "
        failing += f"{max(self.in_a_row.values(), default=0)} (explained: {explained.in_a_row})"
        return [
            verdict("no deadlock was reported", told, self.deadlocks),
            verdict("no unexpected log lines", told + failing, [*self.unexpected, *self._unexplained(explained)]),
        ]

    def _unexplained(self, explained: Bounds) -> Iterator[str]:
        """Yield failures that are more frequent than the disturbances explain."""
        counts = {name: self.events[name] for name in BOUNDED} | {f"error {LOCK_WAIT}": self.codes[LOCK_WAIT]}
        for name, count in counts.items():
            if count > explained.lines:
                yield f"{name}: {count} times, but only {explained.lines} are explained"
        for name, count in self.in_a_row.items():
            if count > explained.in_a_row:
                yield f"{name}: {count} consecutive failures, but only {explained.in_a_row} are explained"


def server_deadlocks(lines: Iterable[str]) -> dict[str, int]:
    """Count the deadlocks in the log of a server, by the indexes whose locks were waited for.

    The clients know of few of them: subscribers and procedures run their transactions again.
    """
    found: list[set[str]] = []
    for line in lines:
        if DETECTED in line:
            found.append(set())
        elif found and (awaited := _AWAITED.match(line)):
            found[-1].add(f"{awaited[2]}.{awaited[1]}")
    return dict(Counter(", ".join(sorted(indexes)) for indexes in found))


def read_all(logs: Mapping[str, Iterable[str]]) -> Findings:
    findings = Findings()
    for name, lines in logs.items():
        findings.read(name, lines)
    return findings

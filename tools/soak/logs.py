"""What may stand in a log, and what may not."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from soak.facts import Trouble, Verdict, verdict
from soak.plan import AWAY, CONNECTIONS, CUT, FREEZES, IMPATIENT

# Codes of a connection that is or was cut, of a server that goes, comes or is away.
LOST = frozenset(
    {1040, 1053, 1077, 1079, 1152, 1158, 1159, 1160, 1161, 1184, 1317, 1927, 2002, 2003, 2006, 2013, 3169, 4031}
)
LOCK_WAIT = 1205
"""A lock of somebody frozen was waited for: costs a turn of a poller, no more."""
DEADLOCK = 1213

BOUNDED = (
    "poller.failed",
    "heartbeat.failed",
    "heartbeat.withheld",
    "group.failed",
    "shutdown.timed_out",
    "child.died",
    "child.killed",
)
"""Events that what is done to a run explains: so many of them, and no more."""
LINES = 2
"""Lines of one such event for each process that something was done to."""
FROZEN = 2
"""Processes that a freeze is felt by: its own, and one that waits for its locks."""
LINES_AT_LEAST = 5
IN_A_ROW, IN_A_ROW_PER_SECOND = 16, 4
"""Failures in a row, and for each second of the longest time without a server: the heart tries 2.4 times in one."""

_FAILURES = re.compile(r"\bfailures=(\d+)")
_CODE = re.compile(r"\((\d{4}), ?[\"']")
"""As the driver shows its errors: (2006, 'Server has gone away')."""
_NAMES = "Error|Exception|Planned|Stale|Delivery|NotStarted|Exit|Interrupt|Unknown"
_EXCEPTION = re.compile(rf"^(?:[a-z_]\w*\.)*(_?[A-Z]\w*(?:{_NAMES})|Planned)(?::|$)")
_EVENT = re.compile(r"^\S+ \S+ (DEBUG|INFO|WARNING|ERROR|CRITICAL) (?:\[\d+\] )?([a-z_]+\.[a-z_]+)\b")
EXPECTED_EXCEPTIONS = frozenset({"Planned", "CommitOutcomeUnknown", "StaleDelivery", "_NotStarted"})
"""Raised by plan, or because of a lost connection (their cause is judged as well)."""
EXPECTED_ERRORS = frozenset(
    {"delivery.dead_lettered", "child.died", "child.killed", "heartbeat.withheld", "shutdown.timed_out"}
)
"""Events of the level ERROR that a killed child, a frozen process or a server that is away explains."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """How much failing is explained."""

    lines: int = LINES_AT_LEAST
    """Of each event in ``BOUNDED``, and of lock waits."""
    in_a_row: int = IN_A_ROW


def bounds(troubles: Iterable[Trouble], processes: int) -> Bounds:
    """For a run of so many subscriber processes to which that was done."""
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
    """What the logs of a run say."""

    events: Counter[str] = field(default_factory=Counter)
    codes: Counter[int] = field(default_factory=Counter)
    in_a_row: dict[str, int] = field(default_factory=dict)
    """By event: the most failures in a row that it told of."""
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
            if found[1] == "CRITICAL" or (found[1] == "ERROR" and found[2] not in EXPECTED_ERRORS and not waited):
                self.unexpected.append(f"{where}: {line[:300]}")
                return
        strange = [code for code in codes if code not in LOST and code != LOCK_WAIT]
        exception = _EXCEPTION.match(line)
        if strange or (exception and not codes and exception[1] not in EXPECTED_EXCEPTIONS):
            self.unexpected.append(f"{where}: {line[:300]}")

    def verdicts(self, explained: Bounds = Bounds()) -> list[Verdict]:
        told = f"{self.events.total()} events, {self.codes.total()} database errors"
        most = max((self.events[name] for name in BOUNDED), default=0)
        failing = f"; one kind of failure {most} times of {explained.lines} that are explained, in a row "
        failing += f"{max(self.in_a_row.values(), default=0)} of {explained.in_a_row}"
        return [
            verdict("no deadlock came to the surface", told, self.deadlocks),
            verdict(
                "nothing unexpected in the logs", told + failing, [*self.unexpected, *self._unexplained(explained)]
            ),
        ]

    def _unexplained(self, explained: Bounds) -> Iterator[str]:
        """What may be there, but not so often: a part that fails all the time looks like one that was disturbed."""
        counts = {name: self.events[name] for name in BOUNDED} | {f"error {LOCK_WAIT}": self.codes[LOCK_WAIT]}
        for name, count in counts.items():
            if count > explained.lines:
                yield f"{name} {count} times: {explained.lines} are explained"
        for name, count in self.in_a_row.items():
            if count > explained.in_a_row:
                yield f"{name}: {count} failures in a row: {explained.in_a_row} are explained"


def read_all(logs: Mapping[str, Iterable[str]]) -> Findings:
    findings = Findings()
    for name, lines in logs.items():
        findings.read(name, lines)
    return findings

"""What may stand in a log, and what may not."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from soak.checker import Verdict, verdict

# Codes of a connection that is or was cut, of a server that goes, comes or is away.
LOST = frozenset(
    {1040, 1053, 1077, 1079, 1152, 1158, 1159, 1160, 1161, 1184, 1317, 1927, 2002, 2003, 2006, 2013, 3169, 4031}
)
LOCK_WAIT = 1205
"""A lock of somebody frozen was waited for: costs a turn of a poller, no more."""
DEADLOCK = 1213

_CODE = re.compile(r"\((\d{4}), ?[\"']")
"""As the driver shows its errors: (2006, 'Server has gone away')."""
_NAMES = "Error|Exception|Planned|Stale|Delivery|NotStarted|Exit|Interrupt|Unknown"
_EXCEPTION = re.compile(rf"^(?:[a-z_]\w*\.)*(_?[A-Z]\w*(?:{_NAMES})|Planned)(?::|$)")
_EVENT = re.compile(r"^\S+ \S+ (DEBUG|INFO|WARNING|ERROR|CRITICAL) (?:\[\d+\] )?([a-z_]+\.[a-z_]+)\b")
EXPECTED_EXCEPTIONS = frozenset({"Planned", "CommitOutcomeUnknown", "StaleDelivery", "_NotStarted"})
"""Raised by plan, or because of a lost connection (their cause is judged as well)."""
EXPECTED_ERRORS = frozenset(
    {"delivery.dead_lettered", "child.died", "child.killed", "heart.withheld", "subscriber.gave_up"}
)
"""Events of the level ERROR that a killed child, a frozen process or a server that is away explains."""


@dataclass(slots=True)
class Findings:
    """What the logs of a run say."""

    events: Counter[str] = field(default_factory=Counter)
    codes: Counter[int] = field(default_factory=Counter)
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
            waited = found[2] == "group.failed" and codes == [LOCK_WAIT]
            if found[1] == "CRITICAL" or (found[1] == "ERROR" and found[2] not in EXPECTED_ERRORS and not waited):
                self.unexpected.append(f"{where}: {line[:300]}")
                return
        strange = [code for code in codes if code not in LOST and code != LOCK_WAIT]
        exception = _EXCEPTION.match(line)
        if strange or (exception and not codes and exception[1] not in EXPECTED_EXCEPTIONS):
            self.unexpected.append(f"{where}: {line[:300]}")

    def verdicts(self) -> list[Verdict]:
        told = f"{self.events.total()} events, {self.codes.total()} database errors"
        return [
            verdict("no deadlock came to the surface", told, self.deadlocks),
            verdict("nothing unexpected in the logs", told, self.unexpected),
        ]


def read_all(logs: Mapping[str, Iterable[str]]) -> Findings:
    findings = Findings()
    for name, lines in logs.items():
        findings.read(name, lines)
    return findings

"""The report of a run, as Markdown and JSON: the disturbances, the traffic, and a verdict for each check."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from soak import job_plan
from soak.facts import Evidence, Verdict
from soak.job_facts import JobEvidence
from soak.monitor import Sample
from soak.plan import GROUPS, LOG_SIZE, MOVED_GROUPS, RELAYED, topic_of
from soak.records import COMMITTED, REPEATED, ROLLED_BACK, SQL, STARTED, UNKNOWN

ROWS = 12
"""Approximate number of rows in the table of lags."""


@dataclass(frozen=True, slots=True)
class Report:
    """The results of a run."""

    command: str
    engine: str
    version: str
    machine: str
    seed: int
    seconds: float
    drained_after: float
    """Seconds from the last publish until the queue was drained."""
    done_to_it: Mapping[str, int]
    downtimes: Sequence[tuple[float, float]]
    restarts: Mapping[str, int]
    traffic: Mapping[str, int]
    groups: Sequence[Mapping[str, object]]
    jobs: Mapping[str, int]
    move: Mapping[str, object]
    samples: Sequence[Sample]
    memory: Mapping[str, Sequence[float]]
    log_events: Mapping[str, int]
    database_errors: Mapping[int, int]
    server_deadlocks: Mapping[str, int]
    """Indexes whose locks were waited for → number of deadlocks."""
    verdicts: Sequence[Verdict]

    @property
    def ok(self) -> bool:
        return all(one.ok for one in self.verdicts)

    def as_json(self) -> str:
        return json.dumps({**dataclasses.asdict(self), "ok": self.ok}, indent=1)

    def as_markdown(self) -> str:
        rate = self.traffic["messages committed"] / self.seconds
        result = "passed" if self.ok else "FAILED"
        said = (
            f"`{self.command}` on {self.machine}. {self.traffic['messages committed']} messages committed "
            f"({rate:.0f} per second), on {len({group.topic for group in GROUPS})} topics with {len(GROUPS)} groups. "
            f"The queue was drained {self.drained_after:.0f} s after the last message."
        )
        held = f"Publishers were paused in {sum(one.held_back for one in self.samples)} of {len(self.samples)} samples."
        away = sum(to - since for since, to in self.downtimes)
        codes = ", ".join(f"{code}: {count}" for code, count in sorted(self.database_errors.items())) or "none"
        deadlocks = "; ".join(f"{count} ({indexes})" for indexes, count in sorted(self.server_deadlocks.items()))
        parts = [
            f"# Soak: {self.engine} {self.version}, {self.seconds / 60:.1f} minutes: {result}",
            said,
            "## Disturbances",
            table(("", "times"), self.done_to_it.items()),
            f"The server was unavailable {len(self.downtimes)} times, for {away:.0f} s in total.",
            "## Traffic",
            table(("", "count"), self.traffic.items()),
            "## Groups",
            table(tuple(self.groups[0]), (tuple(group.values()) for group in self.groups)),
            "## Jobs",
            table(("", "count"), self.jobs.items()),
            "## Move of a topic",
            table(("", ""), self.move.items()),
            "## Lag over time (messages)",
            held,
            self._lags(),
            "## Memory (MB)",
            table(("process", "first", "highest", "last"), (_span(*item) for item in self.memory.items())),
            "## Log events",
            table(("event", "times"), sorted(self.log_events.items())),
            f"Database errors by code: {codes}.",
            f"Deadlocks in the server's log: {deadlocks or 'none'}.",
            "## Checks",
            table(("check", "compared", "verdict"), ((v.name, v.compared, _said(v)) for v in self.verdicts)),
        ]
        for one in self.verdicts:
            if not one.ok:
                parts += [f"### {one.name}: {one.count} violations", "\n".join(f"- {line}" for line in one.violations)]
        return "\n\n".join(parts) + "\n"

    def _lags(self) -> str:
        step = max(1, len(self.samples) // ROWS)
        names = ("outbox", "relay", job_plan.GROUP, *(group.name for group in GROUPS))
        return table(
            ("second", "committed", *names),
            ((f"{one.at:.0f}", one.committed, *(one.lags[name] for name in names)) for one in self.samples[::step]),
        )

    def write(self, folder: Path) -> list[Path]:
        folder.mkdir(parents=True, exist_ok=True)
        paths = [folder / f"soak-{self.engine}.{suffix}" for suffix in ("json", "md")]
        for path, text in zip(paths, (self.as_json() + "\n", self.as_markdown()), strict=True):
            path.write_text(text)
        return paths


def table(header: Sequence[object], lines: Iterable[Sequence[object]]) -> str:
    body = [[str(cell) for cell in line] for line in (header, *lines)]
    widths = [max(len(line[column]) for line in body) for column in range(len(header))]
    shown = [f"| {' | '.join(cell.ljust(width) for cell, width in zip(line, widths, strict=True))} |" for line in body]
    return "\n".join([shown[0], f"|{'|'.join('-' * (width + 2) for width in widths)}|", *shown[1:]])


def _said(one: Verdict) -> str:
    return "ok" if one.ok else f"{one.count} VIOLATIONS"


def _span(name: str, values: Sequence[float]) -> tuple[object, ...]:
    if not values:
        return (name, "", "", "")
    return (name, *(f"{value:.0f}" for value in (values[0], max(values), values[-1])))


def traffic(evidence: Evidence) -> dict[str, int]:
    verbs = Counter(one.verb for one in evidence.transactions)
    longs = Counter(one.verb for one in evidence.transactions if one.publisher.startswith("long"))
    return {
        "messages committed": len(evidence.ledger),
        "of those scheduled": sum(entry.scheduled for entry in evidence.ledger),
        "of those relayed to the other database": sum(
            topic_of(entry.message_id) == RELAYED for entry in evidence.ledger
        ),
        "partitions": len({entry.key for entry in evidence.ledger}),
        "in the largest partition": max(Counter(entry.key for entry in evidence.ledger).values(), default=0),
        "transactions committed": verbs[COMMITTED],
        "rolled back": verbs[ROLLED_BACK],
        "that met an error": verbs[UNKNOWN],
        "long ones committed": longs[COMMITTED],
        "long ones that met an error": longs[UNKNOWN],
        "ids published once more": verbs[REPEATED],
        "refused by the log": len(evidence.refused),
    }


def jobs(evidence: JobEvidence) -> dict[str, int]:
    """Return how many jobs of each task were enqueued, and what has become of them."""
    found = {job: one for one in evidence.ledger for job in [one.job]}
    kinds = Counter(one.kind for one in found.values())
    statuses = Counter(one.status for one in evidence.results.values())
    errors = Counter(path.rpartition(".")[2] for one in evidence.results.values() for path, _ in one.errors)
    verbs = Counter(one.verb for one in evidence.transactions)
    return {
        **{f"of the task {kind}": count for kind, count in sorted(kinds.items())},
        "of them in chains": sum(bool(one.of) and one.kind != job_plan.UNIQUE for one in found.values()),
        "chains": len({one.of for one in found.values() if one.of and one.kind != job_plan.UNIQUE}),
        "calls for unique jobs": sum(one.kind == job_plan.UNIQUE for one in evidence.ledger),
        "transactions committed": verbs[COMMITTED],
        "rolled back": verbs[ROLLED_BACK],
        "that met an error": verbs[UNKNOWN],
        "redriven": sum(evidence.redriven.values()),
        "calls of cancel_job": sum(map(len, evidence.cancelled.values())),
        "starts": sum(step.verb == STARTED for step in evidence.steps),
        **dict(sorted(statuses.items())),
        **{f"errors {name}": count for name, count in sorted(errors.items())},
    }


def moved(evidence: Evidence) -> dict[str, int]:
    """Return how many starts of the moved groups were in each database."""
    starts = [step for group in MOVED_GROUPS for step in evidence.steps[group.name] if step.verb == STARTED]
    before = sum(step.offset < LOG_SIZE for step in starts)
    return {"starts in the old database": before, "starts in the new one": len(starts) - before}


def groups(evidence: Evidence) -> list[dict[str, object]]:
    found: list[dict[str, object]] = []
    for group in GROUPS:
        steps = [step for step in evidence.steps[group.name] if step.verb == STARTED]
        starts = [step.message_id for step in steps]
        found.append(
            {
                "group": group.name,
                "topic": group.topic,
                "messages started": len(set(starts)),
                "starts": len(starts),
                "in plain SQL": sum(step.process.endswith(SQL) for step in steps),
                "more than one start": sum(count > 1 for count in Counter(starts).values()),
                "dead letters": sum(one.group == group.name for one in evidence.dead),
            }
        )
    return found

#!/usr/bin/env python3
"""Compare the jobs of this package with those of other task backends, and with plain Django transactions, side by side.

    python tools/servers.py run mariadb -- python benchmarks/jobs.py

It uses the environment, the workers and the measurements of ``rivals.py``: jobs enqueued per second, one by one and in
bulk; no-op jobs with results processed per second; statements and CPU time per job. Atomic jobs are compared with
Django transactions that write as much: one updated and one deleted row. In addition, it measures the *time to start*:
jobs are enqueued one by one at a steady rate while the workers are running, and the task writes the time at which it
starts to a file. The publisher and the workers use the same clock.

Everything runs in turn in each round. On a machine with other work, compare the ratios within rounds, which are
printed at the end, instead of the rates.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks import rivals

RATE = 20.0
"""Jobs per second in the measurement of the time to start: few enough that no worker falls behind."""
SECONDS = 15.0
"""Seconds for which jobs are enqueued at this rate."""
WARM = 2.0
"""Seconds at its beginning that are left out."""
WORKERS = [["runsubscriber", "--group", "jobs"]] * 2


def results_done(query: rivals.Query, who: rivals.Contender, count: int) -> float | None:
    """Wait until all jobs of this package are done. Return the seconds from their start to their end."""
    rivals.wait_until(
        lambda: query(f"SELECT COUNT(*) FROM {who.table} WHERE status = 'SUCCESSFUL'")[0][0] >= count,
        lambda: str(query(f"SELECT status, COUNT(*) FROM {who.table} GROUP BY status")),
        every=0.5,
    )
    return float(query(f"SELECT MAX(finished_at) - MIN(started_at) FROM {who.table}")[0][0]) / 1e3


THEIRS = rivals.RIVALS[:3]
OWN = (
    rivals.Contender(
        f"{rivals.OURS}, jobs",
        "with_jobs",
        WORKERS,
        rivals.rows_begun,
        results_done,
        settings="2 x runsubscriber, CLAIM_SIZE 500, PREFETCH 1000, THREADS 8, results, atomic=False",
        table="queue_job_results",
        kind="noop",
        topic="jobs.default",
        jobs=4,
        bulk=True,
    ),
    rivals.Contender(
        f"{rivals.OURS}, atomic jobs",
        "with_jobs",
        WORKERS,
        rivals.rows_begun,
        results_done,
        settings="2 x runsubscriber, CLAIM_SIZE 500, PREFETCH 1000, THREADS 8, results",
        table="queue_job_results",
        kind="atomic",
        topic="jobs.default",
        enqueues=False,
    ),
)


def measure_start(
    server: rivals.Server, who: rivals.Contender, figures: rivals.Figures, log: Path, options: argparse.Namespace
) -> None:
    """Measure the milliseconds from the answer of the COMMIT to the start of the job."""
    if not who.enqueues:
        return
    server.empty(who)
    stamps = log.with_suffix(".stamps")
    stamps.unlink(missing_ok=True)
    stamps.touch()
    os.environ["RIVALS_STAMPS"] = str(stamps)
    count = int(RATE * SECONDS)
    with rivals.workers(who, log):
        command = [sys.executable, str(rivals.PROJECTS / "enqueue.py"), "steady", str(count), "stamp", str(RATE)]
        done = subprocess.run(command, env=who.env, check=True, stdout=subprocess.PIPE, text=True)
        rivals.wait_until(lambda: len(_times(stamps.read_text())) >= count, lambda: "some jobs have not started")
    committed, started = _times(done.stdout), _times(stamps.read_text())
    waits = sorted(1000 * (started[number] - at) for number, at in committed.items() if number >= RATE * WARM)
    cuts = statistics.quantiles(waits, n=20)
    figures.start_p50.append(cuts[9])
    figures.start_p95.append(cuts[18])


def _times(text: str) -> dict[int, float]:
    """Return times by the numbers of jobs, from lines with both."""
    return {int(number): float(at) for number, at in (line.split() for line in text.splitlines())}


def ratios(found: rivals.Found) -> str:
    """Return the ratios within the rounds, as lines of text."""
    ours, atomic = (found.get(who.name) for who in OWN)
    bare = found.get(rivals.BARE)
    lines = []
    for who in THEIRS:
        theirs, name = found.get(who.name), who.name
        if theirs is None:
            continue
        if ours:
            lines.append(_line(f"no-op jobs processed, x {name}", ours.processed, theirs.processed))
            lines.append(_line(f"CPU of a no-op job, x {name}", _cpu(ours), _cpu(theirs)))
            lines.append(_line(f"enqueued in a transaction each, x {name}", ours.single, theirs.single))
            lines.append(_line(f"enqueued outside of a transaction, x {name}", ours.alone, theirs.alone))
            lines.append(_line(f"CPU of enqueueing one by one, x {name}", ours.single_cpu, theirs.single_cpu))
            lines.append(_line(f"enqueued in bulk, x {name} one by one", ours.bulk, theirs.single))
            lines.append(_line(f"time to start (p50), x {name}", ours.start_p50, theirs.start_p50))
            lines.append(_line(f"time to start (p95), x {name}", ours.start_p95, theirs.start_p95))
        if atomic:
            lines.append(_line(f"atomic jobs processed, x {name}", atomic.processed, theirs.processed))
    if atomic and bare:
        lines.append(_line("atomic jobs, x a plain transaction", atomic.processed, bare.processed))
        lines.append(_line("CPU of an atomic job, x a plain transaction", _cpu(atomic), _cpu(bare)))
    return "\n".join(lines)


def _cpu(one: rivals.Figures) -> list[float]:
    return [sum(both) for both in zip(one.worker_cpu, one.server_cpu, strict=True)]


def _line(name: str, ours: Sequence[float], theirs: Sequence[float]) -> str:
    found = sorted(one / other for one, other in zip(ours, theirs, strict=True))
    return f"{name}: {statistics.median(found):.2f} (rounds: {', '.join(f'{one:.2f}' for one in found)})"


def main() -> None:
    options = rivals.parser(__doc__).parse_args()
    rivals.begin()
    found = rivals.compare(options, (*THEIRS, *OWN), measure_start)
    print(ratios(found), file=sys.stderr)


if __name__ == "__main__":
    main()

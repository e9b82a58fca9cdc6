"""Explores interleavings: what ``make explore`` runs, on the server that DATABASE_URL names."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import fcntl
import hashlib
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from random import Random

import django

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "tests.settings")
django.setup()

from django.core.management import call_command  # noqa: E402
from tqdm import tqdm  # noqa: E402

from tests.interleavings import exploration, explore, reasons, statements  # noqa: E402
from tests.interleavings.exploration import Exploration, exploring  # noqa: E402
from tests.interleavings.explore import Report, Unserial  # noqa: E402
from tests.interleavings.known import FOLDER, Known  # noqa: E402
from tests.interleavings.pairs import pairs  # noqa: E402
from tests.interleavings.trials import Pair, Verdict  # noqa: E402

ROOT = Path(__file__).parent.parent.parent
SEED = 16


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.interleavings", description=__doc__)
    parser.add_argument(
        "--bound", type=int, default=2, metavar="N", help="preemptions per schedule, at most (default: 2)"
    )
    parser.add_argument("--statistics", choices=("small", "large"), default="small", help="what the optimizer is told")
    parser.add_argument("--only", default="", metavar="TEXT", help="only pairs whose name contains TEXT")
    parser.add_argument("--exact", action="store_true", help="TEXT is the whole name of a pair")
    parser.add_argument("--list", action="store_true", help="print the names of the pairs, then exit")
    parser.add_argument("--replay", metavar="SCHEDULE", help="run one schedule of the pair and print its statements")
    parser.add_argument("--part", default="1/1", metavar="I/N", help="only every Nth pair, beginning with the Ith")
    parser.add_argument("--results", type=Path, metavar="FILE", help="keep results there, and go on from what is there")
    parser.add_argument(
        "--record", action="store_true", help="add what is new and has a reason to the expected results"
    )
    parser.add_argument(
        "--statements",
        action="store_true",
        help="record the statements of each operation on this server, then exit",
    )
    options = parser.parse_args()
    known_pairs = pairs()
    chosen = [
        one for name, one in known_pairs.items() if (name == options.only if options.exact else options.only in name)
    ]
    if options.list:
        print(*(one.name for one in chosen), sep="\n")
        return 0
    if not chosen:
        parser.error(f"--only {options.only!r}: no pair has that in its name (--list shows all)")
    place, number = map(int, options.part.split("/"))
    Random(SEED).shuffle(chosen)  # so that the time left can be told from the time passed
    chosen.sort(key=lambda pair: len(pair.operations))  # a triple takes as long as fifty pairs
    chosen = chosen[place - 1 :: number]
    call_command("migrate", verbosity=0, run_syncdb=True)
    with exploring(options.statistics) as found:
        if options.statements:
            statements.record(statements.sent(found))
            return 0
        if options.replay is not None:
            if len(chosen) > 1:
                parser.error(f"--replay: {len(chosen)} pairs have {options.only!r} in their names; add --exact")
            return show(found, chosen[0], options.replay)
        return run(found, chosen, options)


# -- all of them --------------------------------------------------------------------


def run(found: Exploration, chosen: list[Pair], options: argparse.Namespace) -> int:
    reports = read(options.results)
    known = Known.read()
    began = time.monotonic()
    problems: list[str] = []
    failed: list[str] = []
    left = [pair for pair in chosen if pair.name not in reports]
    with tqdm(left, unit="pair", disable=None, mininterval=1.0) as progress:
        for pair in progress:
            try:
                report = found.explore(pair, options.bound)
            except Exception as error:
                failed.append(f"{pair.name}: {error!r}")
                tqdm.write(f"{pair.name}: the tool failed: {error!r}")
                found.renew()
                continue
            reports[pair.name] = report
            if options.results is not None:
                with options.results.open("a") as file:
                    file.write(json.dumps(dataclasses.asdict(report)) + "\n")
            if new := exploration.findings(report, known):
                tqdm.write(f"{pair.name}: {len(new)} findings, the first: {new[0][:200]}")
    there = [reports[pair.name] for pair in chosen if pair.name in reports]
    if options.record:
        with changing() as known:
            problems += [f"{one.pair}: {line}" for one in there for line in exploration.learn(one, known)]
    else:
        problems += [f"{one.pair}: {line}" for one in there for line in exploration.findings(one, known)]
    summary(there, time.monotonic() - began)
    print(f"{len(problems)} findings, {len(failed)} pairs that the tool could not explore")
    for line in problems:
        print(f"  {line[:600]}")
    return 1 if problems or failed else 0


@contextlib.contextmanager
def changing() -> Iterator[Known]:
    """What is known, to be added to: one process at a time, since several explore a part each."""
    with (FOLDER / "deadlocks.txt").open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        known = Known.read()
        yield known
        known.write({reason.name: reason.sentence for reason in reasons.REASONS})


def read(path: Path | None) -> dict[str, Report]:
    """The results of an exploration that was begun with the same code; others are renamed to ``….old``."""
    if path is None:
        return {}
    mark = json.dumps({"code": fingerprint()})
    lines = path.read_text().splitlines() if path.exists() else []
    if not lines or lines[0] != mark:
        path.parent.mkdir(parents=True, exist_ok=True)
        if lines:
            path.replace(path.with_suffix(".old"))
        path.write_text(mark + "\n")
        return {}
    found = {}
    for line in lines[1:]:
        try:
            values = json.loads(line)
        except ValueError:
            continue  # it was being written when the exploration was ended
        values["unserial"] = [Unserial(**one) for one in values["unserial"]]
        found[values["pair"]] = Report(**values)
    return found


def fingerprint() -> str:
    """Of all that the results depend on."""
    files = sorted(
        [
            *ROOT.glob("django_mysqlqueue/**/*.py"),
            *ROOT.glob("django_mysqlqueue/**/*.sql"),
            *ROOT.glob("tests/interleavings/*.py"),
            *ROOT.glob("tests/*.py"),
        ]
    )
    return hashlib.sha256(b"\0".join(file.read_bytes() for file in files)).hexdigest()


def summary(reports: list[Report], seconds: float) -> None:
    total = sum(report.schedules for report in reports)
    left_out = sum(report.pruned for report in reports)
    worked = sum(report.seconds for report in reports)
    unserial = sum(len(report.unserial) for report in reports)
    waits = {what for report in reports for what in report.waits}
    deadlocks = {what for report in reports for what in report.deadlocks}
    spent: Counter[str] = Counter()
    for report in reports:
        spent.update(report.spent)
    print(f"{len(reports)} pairs, {total:,} schedules in {worked / 60:.1f} minutes (now {seconds / 60:.1f}),")
    print(f"  {total / max(worked, 0.001):.0f} schedules a second; {left_out:,} left out as equal to others")
    print(f"  outcomes: {sum(report.outcomes for report in reports):,}, of which no serial order has {unserial:,}")
    print(f"  waits: {len(waits)}, deadlocks: {len(deadlocks)}")
    print("  seconds: " + ", ".join(f"{what} {count:.0f}" for what, count in spent.most_common()))
    longest = sorted(reports, key=lambda report: -report.seconds)[:5]
    print("  slowest: " + "; ".join(f"{one.pair} ({one.schedules}, {one.seconds:.0f} s)" for one in longest))


# -- one of them ----------------------------------------------------------------------


def show(found: Exploration, pair: Pair, name: str) -> int:
    trial = found.trial(pair)
    verdict = explore.replay(trial, name)
    print_side_by_side(pair, verdict)
    print(json.dumps(verdict.outcome, indent=1, default=str))
    problems = verdict.broken + trial.drain(verdict)
    print(*(problems or ["Nothing is wrong."]), sep="\n")
    return 1 if problems else 0


def print_side_by_side(pair: Pair, verdict: Verdict) -> None:
    """The statements in their order, a column for each operation."""
    width = max(30, min(60, 150 // len(pair.operations)))
    threads = "ABC"[: len(pair.operations)]
    print(
        "  ".join(
            f"{thread}: {one.name}"[:width].ljust(width) for thread, one in zip(threads, pair.operations, strict=True)
        )
    )
    for step in verdict.run.steps:
        text = f"{step.label}#{step.number}" + (" (waits)" if step.waited else "")
        columns = [text[:width].ljust(width) if thread == step.thread else " " * width for thread in threads]
        print("  ".join(columns).rstrip())
    print(verdict.name)


if __name__ == "__main__":
    sys.exit(main())

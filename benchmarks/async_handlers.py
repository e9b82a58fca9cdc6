#!/usr/bin/env python3
"""Measure how many calls of async handlers, and of async tasks, that only wait one process completes in a second.

    python tools/servers.py run mariadb -- python benchmarks/async_handlers.py

Each call awaits ``asyncio.sleep()``. A process has up to ``--concurrency`` of them at a time. The messages are there
before the process starts; a rate is from the first call's end to the last one's. Jobs store results.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks import common

TASKS = {
    "default": {"BACKEND": "django_mysqlqueue.tasks.MySQLQueueBackend", "QUEUES": ["default"], "OPTIONS": {}},
}


def prepare(case: str, messages: int) -> None:
    from benchmarks.app.tasks import waiting
    from django_mysqlqueue import Message, publish_many
    from django_mysqlqueue.tasks import call, enqueue_many

    for begin in range(0, messages, 500):
        numbers = range(begin, min(begin + 500, messages))
        if case == "jobs":
            enqueue_many([call(waiting, number) for number in numbers])
        else:
            publish_many(f"async.{case}", [Message({"n": n, **common.PAYLOAD}, key=f"k{n % 1000}") for n in numbers])


def measure(case: str, messages: int, arguments: argparse.Namespace) -> dict[str, float]:
    """Let one process handle messages, and return what it has recorded."""
    common.reset()
    prepare(case, messages)
    chosen = ["--group", "jobs"] if case == "jobs" else ["--group", "g1", "--topic", f"async.{case}"]
    settings = {"ASYNC_CONCURRENCY": arguments.concurrency, "THREADS": arguments.threads}
    running = common.Running(1, [*chosen, "--drain"], settings)
    running.processes[0].wait(600)
    running.stop()
    (record,) = running.records
    assert record["count"] == messages, f"{record['count']} of {messages} messages were handled"
    return {
        "rate": messages / (record["last"] - record["first"]),
        "memory": record["memory_kb"] / 1024,
        "threads": record["threads"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--messages", type=int, default=10_000)
    parser.add_argument("--sleep", type=float, default=0.05, help="seconds that each call waits (default: %(default)s)")
    parser.add_argument("--concurrency", type=int, default=500, help="calls at a time (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=4, help="THREADS (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", help="write the results to this file")
    arguments = parser.parse_args()
    os.environ |= {"BENCH_TASKS": json.dumps(TASKS), "BENCH_SLEEP": str(arguments.sleep)}
    common.set_up()
    cases = ("shared", "ordered", "jobs")
    found: dict[str, list[dict[str, float]]] = {case: [] for case in cases}
    for _ in range(arguments.rounds):
        for case in cases:
            found[case].append(measure(case, arguments.messages, arguments))
    table = [("", "calls/s", "MB", "threads")]
    for case in cases:
        values = [f"{common.median([one[name] for one in found[case]]):,.0f}" for name in ("rate", "memory", "threads")]
        table.append((case, *values))
    common.report("async_handlers", {"arguments": vars(arguments), "found": found}, table, arguments.json)


if __name__ == "__main__":
    main()

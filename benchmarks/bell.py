#!/usr/bin/env python3
"""Measure what the bell costs, with and without it by turns.

    python tools/servers.py run mariadb -- python benchmarks/bell.py

*Idle*: the queries of idle processes of one supervisor. *Busy*: those of several subscribers on one topic while
messages are published at a steady rate. *Publish*: transactions in a loop while a subscriber that stands still
(SIGSTOP) listens, so that the publisher rings and nobody answers.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks import common
from benchmarks.latency import publish_steadily

ARGUMENTS = ("--topic", "latency", "--group", "g1")
CASES: dict[str, dict[str, Any]] = {"with the bell": {}, "without": {"BELL": None}}


def queries() -> int:
    """Return how many queries the server has got."""
    from django.db import connection

    with connection.cursor() as cursor:
        cursor.execute("SHOW GLOBAL STATUS LIKE 'Questions'")
        return int(cursor.fetchone()[1])


def started(count: int) -> bool:
    from django_mysqlqueue.models import SubscriberHeartbeat

    return SubscriberHeartbeat.objects.filter(deregistered_at=0).count() >= count


def idle(processes: int, seconds: float, settings: dict[str, Any]) -> float:
    """Return queries per second of idle processes of one supervisor."""
    with common.subscribers(1, *ARGUMENTS, "--processes", str(processes), **settings):
        common.wait_for(lambda: started(processes))
        time.sleep(30)  # until they poll at the longest interval
        before = queries()
        time.sleep(seconds)
        return (queries() - before) / seconds


def busy(processes: int, rate: float, seconds: float, settings: dict[str, Any]) -> float:
    """Return queries per second of subscribers, and of a publisher, while there are messages at a steady rate."""
    with common.subscribers(processes, *ARGUMENTS, **settings):
        common.wait_for(lambda: started(processes))
        time.sleep(5)
        before, began = queries(), time.monotonic()
        publish_steadily(rate, seconds)
        took = time.monotonic() - began
        found = (queries() - before) / took
        common.wait_for(lambda: common.is_drained("latency", ["g1"]))
        return found


def publish(count: int, settings: dict[str, Any]) -> float:
    """Return transactions per second of a publisher."""
    from django.db import transaction

    from django_mysqlqueue import publish

    with common.subscribers(1, *ARGUMENTS, **settings) as running:
        common.wait_for(lambda: started(1))
        time.sleep(2)
        (process,) = running.processes
        process.send_signal(signal.SIGSTOP)
        try:
            began = time.monotonic()
            for number in range(count):
                with transaction.atomic():
                    publish("latency", {"n": number, **common.PAYLOAD}, key="k")
            return count / (time.monotonic() - began)
        finally:
            process.send_signal(signal.SIGCONT)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="number of rounds (default: 3)")
    parser.add_argument("--only", choices=["idle", "busy", "publish"], help="measure only this")
    parser.add_argument("--idle", type=int, default=50, help="number of idle processes (default: 50)")
    parser.add_argument("--busy", type=int, default=16, help="number of busy subscribers (default: 16)")
    parser.add_argument("--rate", type=float, default=1000.0, help="messages per second for them (default: 1,000)")
    parser.add_argument("--json", metavar="FILE", help="write the JSON to this file instead of stdout")
    options = parser.parse_args()
    common.set_up()
    from django.test import override_settings

    measures: dict[str, Callable[[dict[str, Any]], float]] = {
        "idle": lambda settings: idle(options.idle, 20.0, settings),
        "busy": lambda settings: busy(options.busy, options.rate, 10.0, settings),
        "publish": lambda settings: publish(3000, settings),
    }
    names = [options.only] if options.only else list(measures)
    found: dict[str, dict[str, list[float]]] = {name: {case: [] for case in CASES} for name in names}
    for number in range(options.rounds):
        for name in names:
            for case, settings in CASES.items():
                common.reset()
                with override_settings(MYSQLQUEUE=settings):
                    found[name][case].append(measures[name](settings))
                print(f"  round {number + 1}  {name} {case}  {found[name][case][-1]:,.1f}", file=sys.stderr, flush=True)
    units = {"idle": "queries/s", "busy": "queries/s", "publish": "transactions/s"}
    table = [["medians", *CASES, "ratio"]]
    for name in names:
        medians = [common.median(found[name][case]) for case in CASES]
        table.append([f"{name}, {units[name]}", *(f"{one:,.1f}" for one in medians), f"{medians[0] / medians[1]:.2f}"])
    common.report("bell", {"rounds": options.rounds, "results": found}, table, options.json)


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""Measure the latency from a publisher's COMMIT to the start of the handler, with the default settings.

    python tools/servers.py run mariadb -- python benchmarks/latency.py

Some threads publish messages to 20 partitions, one per transaction, at a steady rate that does not depend on the
subscriber (an open loop), with and without the bell by turns. The publisher records when each COMMIT was answered, the
subscriber when each handler started. Both processes run on the same machine and use the same clock.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import threading
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks import common

PARTITIONS = 20
PUBLISHERS = 4


def publish_steadily(
    rate: float, seconds: float, *, using: str = "default", via: str | None = None
) -> dict[int, float]:
    """Publish at a steady rate. Return when each message's COMMIT was answered, in epoch seconds.

    Args:
        rate: messages per second.
        seconds: how long.
        using: alias of the database in whose transactions they are published.
        via: as in ``publish``.
    """
    from django.db import connections, transaction

    from django_mysqlqueue import publish

    total = int(rate * seconds)
    committed: dict[int, float] = {}
    began = time.time() + 0.5

    def work(place: int) -> None:
        for number in range(place, total, PUBLISHERS):
            time.sleep(max(0.0, began + number / rate - time.time()))
            with transaction.atomic(using):
                publish("latency", {"n": number, **common.PAYLOAD}, key=f"k{number % PARTITIONS}", via=via)
            committed[number] = time.time()
        connections.close_all()

    threads = [threading.Thread(target=work, args=(place,)) for place in range(PUBLISHERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return committed


def measure(rate: float, seconds: float, **settings: Any) -> dict[str, float]:
    """Return p50, p95, p99 and the maximum in milliseconds, and the rate that was reached.

    Args:
        rate: messages per second.
        seconds: how long.
        settings: those of the queue, of the publisher and of the subscriber.
    """
    from django.test import override_settings

    common.reset()
    arguments = ("--topic", "latency", "--group", "g1")
    with override_settings(MYSQLQUEUE=settings), common.subscribers(1, *arguments, **settings) as running:
        from django_mysqlqueue.models import SubscriberHeartbeat

        common.wait_for(lambda: SubscriberHeartbeat.objects.exists())
        committed = publish_steadily(rate, seconds)
        common.wait_for(lambda: common.is_drained("latency", ["g1"]))
    starts = {number: at for record in running.records for number, at in record["starts"]}
    if starts.keys() != committed.keys():
        raise RuntimeError(f"published {len(committed)} messages, but {len(starts)} were handled")
    # Leave out the first two seconds, in which the subscriber takes leases and caches are warmed.
    waits = sorted(1000 * (starts[number] - at) for number, at in committed.items() if number >= rate * 2)
    cuts = statistics.quantiles(waits, n=100)
    took = max(committed.values()) - min(committed.values())
    return {"p50": cuts[49], "p95": cuts[94], "p99": cuts[98], "longest": waits[-1], "rate": len(committed) / took}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20.0, help="seconds per rate and round (default: 20)")
    parser.add_argument("--rounds", type=int, default=3, help="number of rounds (default: 3)")
    parser.add_argument(
        "--rate", type=float, action="append", help="messages per second; may be repeated (default: 0.2, 10, 100, 1000)"
    )
    parser.add_argument("--json", metavar="FILE", help="write the JSON to this file instead of stdout")
    options = parser.parse_args()
    common.set_up()
    environment = common.environment()
    rates = options.rate or [0.2, 10.0, 100.0, 1000.0]
    cases: dict[str, dict[str, Any]] = {"with the bell": {}, "without": {"BELL": None}}
    found: dict[tuple[float, str], list[dict[str, float]]] = {(rate, case): [] for rate in rates for case in cases}
    for number in range(options.rounds):
        for rate, case in found:
            took = measure(rate, max(options.seconds, min(60.0, 200 / rate)), **cases[case])
            found[rate, case].append(took)
            print(f"  round {number + 1}  {rate:g}/s {case}  {took}", file=sys.stderr, flush=True)
    table = [["commit to handler, ms (medians)", "p50", "p95", "p99", "max", "messages/s"]]
    result: dict[str, Any] = {}
    for (rate, case), rounds in found.items():
        row = {name: round(common.median([one[name] for one in rounds]), 1) for name in rounds[0]}
        result[f"{rate:g}, {case}"] = row
        table.append([f"{rate:g} messages/s, {case}", *(f"{value:,}" for value in row.values())])
    settings = {"seconds": options.seconds, "rounds": options.rounds}
    common.report("latency", {**settings, "environment": environment, "results": result}, table, options.json)


if __name__ == "__main__":
    main()

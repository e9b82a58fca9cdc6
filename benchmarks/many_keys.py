#!/usr/bin/env python3
"""Measure a subscriber's memory and the size of the tables with one message for each of a large number of keys.

    python tools/servers.py run mariadb -- python benchmarks/many_keys.py --keys 1000000

Without DATABASE_URL, it runs on SQLite.
"""

from __future__ import annotations

import argparse
import gc
import sys
import threading
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks import common


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keys", type=int, default=1_000_000, help="number of keys (default: 1000000)")
    parser.add_argument("--claim-size", type=int, default=500, help="messages per claim (default: 500)")
    parser.add_argument("--mode", choices=("ordered", "shared"), default="ordered", help="mode (default: ordered)")
    parser.add_argument("--json", metavar="FILE", help="write the JSON to this file instead of stdout")
    options = parser.parse_args()
    common.set_up()
    from django.db import connection
    from django.test import override_settings

    from django_mysqlqueue import Message, publish_many, subscriber
    from django_mysqlqueue.models import ConsumerOffset, DeliveryState, OutboxMessage, PartitionLease, QueueMessage
    from django_mysqlqueue.options.conf import Settings
    from django_mysqlqueue.runtime.process.memory import resident_mb
    from django_mysqlqueue.runtime.process.subscriber import Subscriber
    from django_mysqlqueue.service import retention
    from django_mysqlqueue.service.refs import GroupRef
    from django_mysqlqueue.service.sequencing import sequence
    from django_mysqlqueue.sql import dialect_of
    from django_mysqlqueue.subscriptions.registry import handlers

    environment = common.environment()
    seconds: dict[str, float] = {}
    peaks = {"resident_mb": 0.0, "leases": 0, "state_rows": 0}
    handled = 0

    def timed(name, action):  # type: ignore[no-untyped-def]
        began = time.monotonic()
        action()
        seconds[name] = round(time.monotonic() - began, 1)

    def count(delivery):  # type: ignore[no-untyped-def]
        nonlocal handled
        handled += 1

    def drain_outbox() -> None:
        while sequence("default").moved:
            pass

    def watch(stop: threading.Event) -> None:
        while not stop.wait(1):
            peaks["resident_mb"] = max(peaks["resident_mb"], resident_mb())
            peaks["leases"] = max(peaks["leases"], PartitionLease.objects.count())
            peaks["state_rows"] = max(peaks["state_rows"], DeliveryState.objects.count())
        connection.close()

    subscriber("bench.keys", group="bench", mode=options.mode)(count)
    timed("publish", lambda: publish_many("bench.keys", (Message(n, key=f"key-{n}") for n in range(options.keys))))
    timed("sequence", drain_outbox)
    ref = GroupRef("bench", "bench.keys")
    threads = 8 if dialect_of(connection).has_row_locks else 1
    settings = Settings(prefetch=2 * options.claim_size)
    process = Subscriber(
        {"default": {ref: handlers()[ref]}},
        settings,
        threads={"default": threads},
        claim_size=options.claim_size,
        drain=True,
    )
    before = resident_mb()
    stop = threading.Event()
    watcher = threading.Thread(target=watch, args=(stop,))
    watcher.start()
    timed("handle", process.run)
    stop.set()
    watcher.join()
    assert handled == options.keys, handled
    gc.collect()
    after = resident_mb()
    ordered = process.workers[0].poller.ordered
    held = sum(len(work.mode.partitions) + len(work.memory.todo) + len(work.mode.waiting) for work in ordered)
    with override_settings(MYSQLQUEUE={"RETENTION": 0}):
        timed("collect", lambda: [*retention.steps("default"), *retention.steps("default")])
    left = {
        model._meta.db_table: model.objects.count()
        for model in (OutboxMessage, QueueMessage, PartitionLease, DeliveryState, ConsumerOffset)
    }
    result: dict[str, Any] = {
        "engine": dialect_of(connection).name,
        "environment": environment,
        "keys": options.keys,
        "mode": options.mode,
        "seconds": seconds,
        "handled_per_second": round(options.keys / seconds["handle"]),
        "resident_mb": {"before": round(before), "peak": round(peaks["resident_mb"]), "after": round(after)},
        "most_leases": peaks["leases"],
        "most_state_rows": peaks["state_rows"],
        "partitions_in_memory_afterwards": held,
        "rows_left": left,
    }
    table = [["", f"{options.keys:,} keys"], *([name, f"{took} s"] for name, took in seconds.items())]
    table += [[f"resident MB, {when}", str(value)] for when, value in result["resident_mb"].items()]
    common.report("many_keys", result, table, options.json)
    assert not held, held
    assert not any(left.values()), left


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""How much a batch handler gains: one row inserted for each message, atomically.

    python tools/servers.py run mariadb -- python benchmarks/batch_handlers.py

Both handlers run by turns on one server in one run; what counts is the ratio.
Without DATABASE_URL it runs on SQLite.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
os.environ.setdefault("DJANGO_SETTINGS_MODULE", "tests.settings")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--messages", type=int, default=10_000)
    parser.add_argument("--partitions", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()

    import django

    django.setup()
    from django.core.management import call_command
    from django.db import connection

    from django_mysqlqueue import Message, publish_many, subscriber
    from django_mysqlqueue.conf import get_settings
    from django_mysqlqueue.runtime.process import Subscriber
    from django_mysqlqueue.runtime.registry import handlers
    from django_mysqlqueue.service.groups import GroupRef
    from django_mysqlqueue.service.sequencing import sequence
    from django_mysqlqueue.sql import dialect_of
    from tests.app.models import Effect

    call_command("migrate", verbosity=0, run_syncdb=True)

    calls: list[float] = []

    def one(delivery):  # type: ignore[no-untyped-def]
        calls.append(time.monotonic())
        Effect.objects.create(name="one", value=delivery.payload["n"])
        calls.append(time.monotonic())

    def many(deliveries):  # type: ignore[no-untyped-def]
        calls.append(time.monotonic())
        Effect.objects.bulk_create(Effect(name="many", value=delivery.payload["n"]) for delivery in deliveries)
        calls.append(time.monotonic())

    subscriber("bench.one", group="bench", atomic=True)(one)
    for size in (10, 100, 500):
        subscriber(f"bench.{size}", group="bench", atomic=True, batch=True, batch_size=size)(many)
    rates: dict[str, list[float]] = {}
    for _ in range(options.rounds):
        for topic in ("bench.one", "bench.10", "bench.100", "bench.500"):
            payload = {"text": "x" * 180}
            publish_many(
                topic,
                (Message({"n": n, **payload}, key=f"k{n % options.partitions}") for n in range(options.messages)),
            )
            while sequence("default").moved:
                pass
            ref = GroupRef("bench", topic)
            threads = get_settings().threads if dialect_of(connection).has_row_locks else 1
            process = Subscriber("default", {ref: handlers()[ref]}, get_settings(), threads=threads, drain=True)
            calls.clear()
            process.run()
            # From the first call to the end of the last: without the start and the wait for "drained".
            rates.setdefault(topic, []).append(options.messages / (max(calls) - min(calls)))
            assert Effect.objects.count() == options.messages
            Effect.objects.all().delete()
    base = statistics.median(rates["bench.one"])
    result = {
        topic: {
            "messages_per_second": round(statistics.median(found)),
            "ratio": round(statistics.median(found) / base, 2),
        }
        for topic, found in rates.items()
    }
    print(json.dumps({"engine": dialect_of(connection).name, "messages": options.messages, "results": result}))
    for topic, row in result.items():
        print(f"{topic:12}{row['messages_per_second']:>8}/s  {row['ratio']:>5} x", file=sys.stderr)


if __name__ == "__main__":
    main()

"""Publish in a process of its own.

python -m benchmarks.publisher ours|ceiling TOPIC MESSAGES PARTITIONS BATCH [VIA]
"""

from __future__ import annotations

import sys
import time

from benchmarks import ceiling, common


def main(kind: str, topic: str, messages: int, partitions: int, batch: int, via: str | None = None) -> None:
    if kind == "ceiling":
        rows = [ceiling.row(topic, number, partitions, common.PAYLOAD) for number in range(messages)]
        connection = ceiling.connect()
        print(time.time(), flush=True)
        ceiling.publish_many(connection, rows, batch)
        return
    import django

    django.setup()
    from django.db import connections

    from django_mysqlqueue import Message, publish_many
    from django_mysqlqueue.options.conf import get_settings

    connections[via or get_settings().database_of(topic) or "default"].ensure_connection()
    ready = [Message({"n": n, **common.PAYLOAD}, key=f"k{n % partitions}") for n in range(messages)]
    print(time.time(), flush=True)
    for start in range(0, messages, batch):
        publish_many(topic, ready[start : start + batch], via=via)


if __name__ == "__main__":
    name, topic, messages, partitions, batch, *via = sys.argv[1:]
    main(name, topic, int(messages), int(partitions), int(batch), *via)

"""Measure the calls of the stored procedures for clients in plain SQL, for different numbers of partitions.

python tools/servers.py run mariadb -- python benchmarks/sql_clients.py
python tools/servers.py run mysql -- python benchmarks/sql_clients.py
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import common

TOPIC, CLAIMED, CLAIMS, IDLE = "t", 10, 20, 10
MODES = ("shared", "ordered")


def timed(function: Callable[[], Any]) -> tuple[float, Any]:
    """Return how many milliseconds a call took, and its result."""
    began = time.perf_counter()
    result = function()
    return 1000 * (time.perf_counter() - began), result


class Client:
    """A consumer with a connection of its own."""

    def __init__(self, group: str) -> None:
        from django.db import connections

        connection = connections["default"].copy()
        connection.ensure_connection()
        self._group, self._connection = group, connection

    def call(self, procedure: str, *values: object) -> list[tuple[Any, ...]]:
        """Call a procedure, and return its rows."""
        marks = ", ".join(["%s"] * (2 + len(values)))
        with self._connection.cursor() as cursor:
            cursor.execute(f"CALL {procedure}({marks})", (self._group, TOPIC, *values))
            rows: list[tuple[Any, ...]] = list(cursor.fetchall())
            while cursor.nextset():
                pass
        return rows

    def claim(self) -> list[tuple[Any, ...]]:
        """Claim some messages."""
        return self.call("queue_claim", CLAIMED)

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()


def measure(mode: str, partitions: int) -> dict[str, float]:
    """Return the median milliseconds of claims with and without messages, and of acks."""
    from django_mysqlqueue import Message, publish_many
    from django_mysqlqueue.models import ConsumerOffset
    from django_mysqlqueue.service import groups
    from django_mysqlqueue.service.refs import GroupRef
    from django_mysqlqueue.service.sequencing import sequence
    from django_mysqlqueue.sql.session import Session

    common.reset()
    groups.register("default", GroupRef(mode, TOPIC), mode=mode, start="earliest")
    count = max(partitions, (CLAIMS + 1) * CLAIMED)
    publish_many(TOPIC, (Message(common.PAYLOAD, key=f"k{number % partitions}") for number in range(count)))
    while sequence("default").more:
        pass
    client = Client(mode)
    first, rows = timed(client.claim)
    claims, acks, idle = [], [], []
    for _ in range(CLAIMS):
        acks += [timed(lambda row=row: client.call("queue_ack", row[0]))[0] for row in rows]  # type: ignore[misc]
        taken, rows = timed(client.claim)
        claims.append(taken)
    # Everything else counts as claimed by others.
    session = Session("default")
    session.execute(
        "INSERT INTO queue_offsets (consumer_group, topic, partition_key, offset_acked, offset_claimed, updated_at) "
        "SELECT %s, topic, partition_key, MAX(`offset`), MAX(`offset`), 0 FROM queue_messages GROUP BY topic, "
        "partition_key ON DUPLICATE KEY UPDATE offset_claimed = 4611686018427387904",
        (mode,),
    )
    assert ConsumerOffset.objects.count() >= partitions
    nothing, found = timed(client.claim)
    for _ in range(IDLE):
        taken, more = timed(client.claim)
        assert not found
        assert not more
        idle.append(taken)
    client.close()
    median = statistics.median
    return {"first": first, "claim": median(claims), "ack": median(acks), "nothing": nothing, "idle": median(idle)}


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--partitions", type=int, nargs="+", default=[100, 1000, 10_000, 100_000])
    options = parser.parse_args()
    common.set_up()
    from django_mysqlqueue.procedures import installing

    installing.install("default")
    print("| partitions | mode | claim of 10 | ack | nothing found, first | nothing found, then |")
    print("|---|---|---|---|---|---|")
    for partitions in options.partitions:
        for mode in MODES:
            found = measure(mode, partitions)
            shown = " | ".join(f"{found[name]:.1f} ms" for name in ("claim", "ack", "nothing", "idle"))
            print(f"| {partitions:,} | {mode} | {shown} |", flush=True)


if __name__ == "__main__":
    main()

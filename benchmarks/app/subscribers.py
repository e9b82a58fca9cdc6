"""The handlers of the benchmarks, and records of their calls.

If BENCH_RECORD names a folder, each process writes a file there at its end: when its first and its last message arrived
(epoch seconds), the number of messages, the most memory that it has used (kilobytes), its number of threads, and for
the topics "latency" and "control" the number of each measured message and the start of its handler. BENCH_SLEEP is the
duration in seconds of the handlers of "control" and "backlog", and of the async ones.
While it runs, another file there has the number of deliveries of the topics "backlog" and "scale.…" so far.
"""

from __future__ import annotations

import asyncio
import atexit
import json
import mmap
import os
import resource
import sys
import threading
import time
from pathlib import Path

from benchmarks.app.models import Effect
from django_mysqlqueue import Delivery, subscriber


class Record:
    first = 0.0
    last = 0.0
    count = 0
    starts: list[tuple[int, float]] = []
    threads = 0


def note(messages: int = 1) -> None:
    now = time.time()
    if not Record.first:
        Record.first = now
    Record.last = now
    if not Record.count % 1000:
        Record.threads = max(Record.threads, threading.active_count())
    Record.count += messages  # not thread-safe, but good enough for a rate


class Tally:
    """A number that other processes can read in a file, which is made at the first call."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0
        self._file: mmap.mmap | None = None

    def add(self) -> None:
        with self._lock:
            if self._file is None:
                with Path(os.environ["BENCH_RECORD"], f"{os.getpid()}.count").open("w+b") as file:
                    file.write(bytes(8))
                    file.flush()
                    self._file = mmap.mmap(file.fileno(), 8)
            self._count += 1
            self._file[:8] = self._count.to_bytes(8, sys.byteorder)


tally = Tally()


def leave_record() -> None:
    folder = os.environ.get("BENCH_RECORD")
    if folder and Record.count:
        content = {
            "first": Record.first,
            "last": Record.last,
            "count": Record.count,
            "starts": Record.starts,
            "memory_kb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
            "threads": Record.threads,
        }
        Path(folder, f"{os.getpid()}.json").write_text(json.dumps(content))


atexit.register(leave_record)


@subscriber("noop", group="g1")
@subscriber("noop", group="g2")
@subscriber("noop", group="g3")
def noop(delivery: Delivery) -> None:
    note()


@subscriber("noop.shared", group="g1", mode="shared")
def noop_shared(delivery: Delivery) -> None:
    note()


@subscriber("atomic", group="g1", atomic=True)
def atomic(delivery: Delivery) -> None:
    note()


@subscriber("atomic.insert", group="g1", atomic=True)
def atomic_insert(delivery: Delivery) -> None:
    note()
    Effect.objects.create(value=delivery.payload["n"])


@subscriber("batch.10", group="g1", atomic=True, batch=True, batch_size=10)
@subscriber("batch.100", group="g1", atomic=True, batch=True, batch_size=100)
@subscriber("batch.500", group="g1", atomic=True, batch=True, batch_size=500)
def batch(deliveries: list[Delivery]) -> None:
    note(len(deliveries))
    Effect.objects.bulk_create([Effect(value=delivery.payload["n"]) for delivery in deliveries])


@subscriber("latency", group="g1")
def latency(delivery: Delivery) -> None:
    Record.starts.append((delivery.payload["n"], time.time()))
    note()


SLEEP = float(os.environ.get("BENCH_SLEEP", "0"))


@subscriber("control", group="ordered")
@subscriber("control", group="shared", mode="shared")
def control(delivery: Delivery) -> None:
    if "n" in delivery.payload:
        Record.starts.append((delivery.payload["n"], time.time()))
    note()
    time.sleep(SLEEP)


@subscriber("backlog", group="ordered")
@subscriber("backlog", group="shared", mode="shared")
def backlog(delivery: Delivery) -> None:
    tally.add()
    time.sleep(SLEEP)


@subscriber("async.ordered", group="g1")
@subscriber("async.shared", group="g1", mode="shared")
async def waiting(delivery: Delivery) -> None:
    await asyncio.sleep(SLEEP)
    note()


@subscriber("beside", group="g1")
def beside(delivery: Delivery) -> None:
    pass


@subscriber("scale.a", group="g1", atomic=True)
@subscriber("scale.b", group="g1", atomic=True)
@subscriber("scale.c", group="g1", atomic=True)
def scale(delivery: Delivery) -> None:
    tally.add()

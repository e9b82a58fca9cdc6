#!/usr/bin/env python3
"""Measure the throughput of each step and of all steps together, compared with hand-written SQL (the ceiling).

    python tools/servers.py run mariadb -- python benchmarks/throughput.py
    python tools/servers.py run mysql -- python benchmarks/throughput.py --only "everything"

Every case and its ceiling run in turn on one server with full durability. The relevant result is the ratio. In the
cases "everything", a publisher process and a subscriber process run together until the last message is settled.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks import ceiling, common

PUBLISHER = "benchmarks.publisher"


def timed(action: Callable[[], object]) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


class Cases:
    """The measurements. Each method returns messages per second."""

    def __init__(self, messages: int) -> None:
        self.messages = messages

    # -- publishing -----------------------------------------------------------

    def publish_single(self, *, atomic: bool) -> float:
        from django.db import transaction

        from django_mysqlqueue import publish

        count = self.messages // 4

        def run() -> None:
            for number in range(count):
                if atomic:
                    with transaction.atomic():
                        publish("noop", {"n": number, **common.PAYLOAD}, key=f"k{number % 10}")
                else:
                    publish("noop", {"n": number, **common.PAYLOAD}, key=f"k{number % 10}")

        return count / timed(run)

    def ceiling_single(self, *, atomic: bool) -> float:
        count = self.messages // 4
        rows = [ceiling.row("noop", number, 10, common.PAYLOAD) for number in range(count)]
        with self.bare() as connection:
            return count / timed(lambda: ceiling.publish_one_by_one(connection, rows, transactions=atomic))

    def publish_many(self, size: int) -> float:
        from django_mysqlqueue import Message, publish_many

        messages = [Message({"n": n, **common.PAYLOAD}, key=f"k{n % 10}") for n in range(self.messages)]

        def run() -> None:
            for start in range(0, len(messages), size):
                publish_many("noop", messages[start : start + size])

        return self.messages / timed(run)

    def ceiling_many(self, size: int) -> float:
        rows = [ceiling.row("noop", number, 10, common.PAYLOAD) for number in range(self.messages)]
        with self.bare() as connection:
            return self.messages / timed(lambda: ceiling.publish_many(connection, rows, size))

    # -- sequencing -----------------------------------------------------------

    def fill_outbox(self, topic: str = "noop", partitions: int = 10) -> None:
        rows = [ceiling.row(topic, number, partitions, common.PAYLOAD) for number in range(self.messages)]
        with self.bare() as connection:
            ceiling.publish_many(connection, rows, 500)

    def fill_log(self, topic: str, partitions: int) -> None:
        self.fill_outbox(topic, partitions)
        with self.bare() as connection:
            while ceiling.sequence(connection, 2000):
                pass

    def sequence(self, size: int) -> float:
        from django_mysqlqueue.service.sequencing import sequence

        self.fill_outbox()

        def run() -> None:
            while sequence("default", max_rows=size).moved:
                pass

        return self.messages / timed(run)

    def ceiling_sequence(self, size: int) -> float:
        self.fill_outbox()

        def run(connection: Any) -> None:
            while ceiling.sequence(connection, size):
                pass

        with self.bare() as connection:
            return self.messages / timed(lambda: run(connection))

    # -- claim, handle, ack ---------------------------------------------------

    def consume(self, topic: str, *, partitions: int, batch: int, groups: int = 1, processes: int = 1) -> float:
        """Measure from the start of the first handler until all messages, which are in the log already, are settled."""
        names = [f"g{number}" for number in range(1, groups + 1)]
        self.register(topic, names)
        self.fill_log(topic, partitions)
        arguments = ["--topic", topic, "--claim-size", str(batch)]
        for name in names:
            arguments += ["--group", name]
        with common.subscribers(processes, *arguments, PREFETCH=max(200, 2 * batch)) as running:
            ended = common.wait_for(lambda: common.is_drained(topic, names))
        return groups * self.messages / (ended - min(one["first"] for one in running.records))

    def ceiling_consume(self, *, partitions: int, batch: int) -> float:
        self.fill_log("noop", partitions)
        with self.bare() as connection:
            ceiling.create_offsets(connection, "g1", "noop", partitions)
            consumer = ceiling.Consumer(connection, "g1", "noop", partitions, batch, depth=min(10, batch))

            def run() -> None:
                left = self.messages
                while left:
                    left -= consumer.step()
                while consumer.held:
                    consumer.step()

            return self.messages / timed(run)

    # -- everything at once ---------------------------------------------------

    def everything(self, topic: str, *, partitions: int, batch: int, groups: int = 1, processes: int = 1) -> float:
        """Measure from the first publish, ``batch`` messages per transaction, until all messages are settled.

        Each delivery of a message to a group is counted.
        """
        names = [f"g{number}" for number in range(1, groups + 1)]
        self.register(topic, names)
        arguments = ["--topic", topic, "--claim-size", str(batch)]
        for name in names:
            arguments += ["--group", name]
        with common.subscribers(processes, *arguments, PREFETCH=max(200, 2 * batch), RETENTION=0):
            common.wait_for(lambda: self.live() >= processes * groups)
            with self.publisher("ours", topic, partitions, batch) as started:
                began = started()
            ended = common.wait_for(lambda: common.is_drained(topic, names))
        return groups * self.messages / (ended - began)

    def ceiling_everything(self, *, partitions: int, batch: int) -> float:
        """Measure with one process that publishes and one that sequences and consumes, without garbage collection."""
        with self.bare() as connection:
            ceiling.create_offsets(connection, "g1", "noop", partitions)
            consumer = ceiling.Consumer(connection, "g1", "noop", partitions, batch, depth=min(10, batch))
            with self.publisher("ceiling", "noop", partitions, batch) as started:
                began = started()
                left = to_sequence = self.messages
                while left or consumer.held:
                    if to_sequence:
                        to_sequence -= ceiling.sequence(connection, 2000)
                    # Claim only full batches as long as messages are published: small ones would be slower.
                    if left - to_sequence >= batch or not to_sequence:
                        left -= consumer.step()
                    else:
                        time.sleep(0.001)
            return self.messages / (time.time() - began)

    @contextlib.contextmanager
    def publisher(self, kind: str, topic: str, partitions: int, batch: int) -> Iterator[Callable[[], float]]:
        """Run a process that publishes. Yield a function that returns when it began, without its startup."""
        process = subprocess.Popen(
            [sys.executable, "-m", PUBLISHER, kind, topic, str(self.messages), str(partitions), str(batch)],
            cwd=common.ROOT,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        yield lambda: float(process.stdout.readline())
        if process.wait(600):
            raise RuntimeError("the publisher failed")

    # -- helpers --------------------------------------------------------------

    @contextlib.contextmanager
    def bare(self) -> Iterator[Any]:
        connection = ceiling.connect()
        try:
            yield connection
        finally:
            connection.close()

    def register(self, topic: str, names: list[str]) -> None:
        from django_mysqlqueue.service import groups
        from django_mysqlqueue.service.refs import GroupRef

        for name in names:
            mode = "shared" if topic.endswith("shared") else "ordered"
            groups.register("default", GroupRef(name, topic), mode=mode, start="earliest")

    def live(self) -> int:
        from django_mysqlqueue.models import SubscriberHeartbeat

        return SubscriberHeartbeat.objects.filter(deregistered_at=0).count()


def cases(do: Cases) -> dict[str, tuple[Callable[[], float], Callable[[], float] | None]]:
    """Return the cases: name → (the measurement, its ceiling or None)."""
    found: dict[str, tuple[Callable[[], float], Callable[[], float] | None]] = {
        "publish, one statement each": (
            partial(do.publish_single, atomic=False),
            partial(do.ceiling_single, atomic=False),
        ),
        "publish, one transaction each": (
            partial(do.publish_single, atomic=True),
            partial(do.ceiling_single, atomic=True),
        ),
    }
    for size in (100, 500):
        found[f"publish_many, batches of {size}"] = (partial(do.publish_many, size), partial(do.ceiling_many, size))
    for size in (100, 2000):
        found[f"sequence, batches of {size}"] = (partial(do.sequence, size), partial(do.ceiling_sequence, size))
    for partitions in (1, 10, 1000):
        for batch in (100, 500) if partitions == 10 else (100,):
            found[f"claim, handle, ack, batches of {batch}, {partitions} partitions"] = (
                partial(do.consume, "noop", partitions=partitions, batch=batch),
                partial(do.ceiling_consume, partitions=partitions, batch=batch),
            )
    found["claim, handle, ack, batches of 100, 10 partitions, 3 groups"] = (
        partial(do.consume, "noop", partitions=10, batch=100, groups=3),
        None,
    )
    found["claim, handle, ack, batches of 100, shared"] = (
        partial(do.consume, "noop.shared", partitions=10, batch=100),
        None,
    )
    found["atomic handlers, 10 partitions"] = (partial(do.consume, "atomic", partitions=10, batch=100), None)
    found["atomic handlers that insert, 10 partitions"] = (
        partial(do.consume, "atomic.insert", partitions=10, batch=100),
        None,
    )
    for size in (10, 100, 500):
        found[f"atomic batches of {size} that insert, 10 partitions"] = (
            partial(do.consume, f"batch.{size}", partitions=10, batch=100),
            None,
        )
    for partitions in (1, 10, 1000):
        for batch in (100, 500) if partitions == 10 else (100,):
            found[f"everything, batches of {batch}, {partitions} partitions"] = (
                partial(do.everything, "noop", partitions=partitions, batch=batch),
                partial(do.ceiling_everything, partitions=partitions, batch=batch),
            )
    found["everything, batches of 500, 10 partitions, 2 processes"] = (
        partial(do.everything, "noop", partitions=10, batch=500, processes=2),
        None,
    )
    found["everything, batches of 100, 10 partitions, 3 groups"] = (
        partial(do.everything, "noop", partitions=10, batch=100, groups=3),
        None,
    )
    found["everything, batches of 100, 10 partitions, 2 processes"] = (
        partial(do.everything, "noop", partitions=10, batch=100, processes=2),
        None,
    )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--messages", type=int, default=20_000, help="messages per case (default: 20000)")
    parser.add_argument("--rounds", type=int, default=3, help="number of rounds (default: 3)")
    parser.add_argument(
        "--only", action="append", metavar="TEXT", help="run only cases whose name contains TEXT; may be repeated"
    )
    parser.add_argument("--json", metavar="FILE", help="write the JSON to this file instead of stdout")
    options = parser.parse_args()
    if not os.environ.get("DATABASE_URL", "").startswith("mysql"):
        parser.error("set DATABASE_URL to a MySQL or MariaDB server: python tools/servers.py run mariadb -- …")
    common.set_up()
    environment = common.environment()
    chosen = {
        name: pair
        for name, pair in cases(Cases(options.messages)).items()
        if not options.only or any(text in name for text in options.only)
    }
    runs: dict[str, Callable[[], float]] = {}
    for name, (ours, bare) in chosen.items():
        runs[name] = ours
        if bare is not None:
            runs[f"{name} (ceiling)"] = bare
    rates = {name: common.median(found) for name, found in common.interleaved(runs, options.rounds).items()}
    result: dict[str, Any] = {}
    table = [["messages per second (medians)", "queue", "ceiling", "ratio"]]
    for name in chosen:
        top = rates.get(f"{name} (ceiling)")
        ratio = None if top is None else round(rates[name] / top, 2)
        result[name] = {"messages_per_second": round(rates[name]), "ceiling": top and round(top), "ratio": ratio}
        table.append([name, f"{rates[name]:,.0f}", f"{top:,.0f}" if top else "", f"{ratio}" if ratio else ""])
    settings = {"messages": options.messages, "rounds": options.rounds}
    common.report("throughput", {**settings, "environment": environment, "results": result}, table, options.json)


if __name__ == "__main__":
    main()

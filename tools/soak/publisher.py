"""A process with publishers, one per thread, that publish until they are stopped.

    python -m soak.publisher NAME SEED --threads 4 --rate 20
    python -m soak.publisher NAME SEED --long 60

A transaction publishes some messages and inserts a row for each into the ledger. So the ledger has exactly the
committed messages, even if the answer to a COMMIT was lost. A number is never used for a second message. Now and then,
a transaction also publishes a message that the log refuses.
"""

from __future__ import annotations

import argparse
import functools
import gzip
import itertools
import json
import os
import random
import secrets
import signal
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import django

from soak import plan, records

ROLLBACKS = 0.05
LATER = 0.02
"""Share of the messages that are scheduled."""
PRIORITIES = [0] * 8 + [10, -10]
REPEATS = 0.03
"""Share of the transactions after which a message is published again."""
REFUSALS = 0.02
"""Share of the transactions with a message in plain SQL that the log refuses."""
HOLD = "hold-back"
"""While this file exists, only the long transactions publish, because the backlog is too large."""
HELD_BACK = 0.5
INSERT_LEDGER = "INSERT INTO soak_ledger (message_id, publisher, number, partition_key, scheduled, at) VALUES "
LEDGER_ROW = "(%s, %s, %s, %s, %s, UNIX_TIMESTAMP(NOW(3)) * 1000)"
INSERT_REFUSED = "INSERT INTO queue_outbox (topic, id, payload) VALUES (%s, %s, '{}')"
NOTE_REFUSED = "INSERT INTO soak_refused (message_id) VALUES (%s)"
EVENTS = Path(__file__).parents[2] / "example_project" / "data" / "commit_events.jsonl.gz"


class RollBack(Exception):
    """Raised to roll a transaction back."""


def read_events() -> list[str]:
    """Return real commit events as lines of JSON. Their repositories give partitions of realistic sizes."""
    with gzip.open(EVENTS, "rt") as lines:
        return list(lines)


def key_of(event: dict[str, object]) -> str:
    """Return one of 200 keys: 5 for each of 40 repositories."""
    return f"{event['repository']}#{int(str(event['sha'])[:6], 16) % (plan.PARTITIONS // 40)}"


class Publisher:
    """A publisher. It runs one transaction at a time."""

    def __init__(self, name: str, seed: int, events: list[str], stop: threading.Event) -> None:
        self.name = f"{name}-{secrets.token_hex(3)}"
        self._rng = random.Random(f"{seed} {name}")
        self._events = events
        self._stop = stop
        self._number = 0
        self._hold = Path(os.environ["SOAK_FOLDER"]) / HOLD
        self._path = records.publishers_file(Path(os.environ["SOAK_FOLDER"]))

    def run(self, rate: float) -> None:
        """Publish ``rate`` messages per second, in transactions of 0 to 200 ms."""
        due = time.monotonic() + self._rng.random()
        while not self._stop.wait(max(0.0, due - time.monotonic())):
            if self._hold.exists():
                due = time.monotonic() + HELD_BACK
                continue
            count = self._rng.choice([1, 1, 1, 2, 3, 4, 8])
            self._transaction(count, self._rng.uniform(0, 0.2))
            # After an outage, do not catch up on the messages that were not published meanwhile.
            due = max(due, time.monotonic() - 1) + self._rng.expovariate(rate / count)

    def run_long(self, seconds: float) -> None:
        """Run one transaction after another. Each stays open for ``seconds``."""
        while not self._stop.is_set():
            self._transaction(4, seconds)

    def _transaction(self, count: int, seconds: float) -> None:
        from django.db import DatabaseError, Error, connection, transaction

        first, last = self._number, self._number + count
        self._number = last
        rolls_back = self._rng.random() < ROLLBACKS
        try:
            with transaction.atomic():
                ids = self._publish(range(first, last), seconds)
                if rolls_back:
                    raise RollBack
        except RollBack:
            self._note(records.ROLLED_BACK, first, last)
        except (Error, DatabaseError) as error:
            self._note(records.UNKNOWN, first, last, f"{type(error).__name__}: {error}")
            connection.close()
            time.sleep(0.2)
        else:
            self._note(records.COMMITTED, first, last)
            if ids and self._rng.random() < REPEATS:
                self._repeat(*self._rng.choice(ids))

    def _publish(self, numbers: range, seconds: float) -> list[tuple[str, str, int]]:
        """Publish messages, with pauses in between.

        Returns:
            The id, the key and the priority of each that may be published again. A duplicate of one that has a coalesce
            key might be published after the one that has replaced it, and replace that.
        """
        from django.db import connection

        from django_mysqlqueue import Message, publish, publish_many
        from django_mysqlqueue.names.keys import lane

        sent = []
        rows: list[str | int] = []
        at_once = self._rng.random() < 0.5
        batches: dict[str, list[Message]] = defaultdict(list)
        for number in numbers:
            event = json.loads(self._rng.choice(self._events))
            key, message_id = key_of(event), f"{self.name}:{number}"
            delay = self._rng.uniform(0, 3) if self._rng.random() < LATER else None
            event[plan.NAME_INSIDE] = message_id
            priority = self._rng.choice(PRIORITIES)
            options: dict[str, Any] = {
                "metadata": {"region": plan.region(message_id)},
                "expires_at": plan.expiry(message_id),
            }
            coalescing = plan.coalescing(message_id)
            if coalescing is not None:
                key, priority, delay = coalescing.partition, 0, None
                options["coalesce"] = coalescing.key
                if coalescing.debounces:
                    delay = self._rng.uniform(0.1, 8)
                    options["max_delay"] = delay + 8
            options |= {"delay": delay, "priority": priority}
            topic = plan.topic_of(message_id)
            batches[topic].append(Message(event, key=key, id=message_id, **options))
            # After a move, ids from before it are not recognized as duplicates.
            if coalescing is None and topic != plan.MOVED:
                sent.append((message_id, key, priority))
            rows += [message_id, self.name, number, lane(key, priority), delay is not None]
            if not at_once:
                publish(topic, event, key=key, id=message_id, **options)
                self._pause(seconds / len(numbers))
        if at_once:
            for topic, batch in batches.items():
                publish_many(topic, batch)
            self._pause(seconds)
        with connection.cursor() as cursor:
            cursor.execute(INSERT_LEDGER + ", ".join([LEDGER_ROW] * len(numbers)), rows)
            if self._rng.random() < REFUSALS:
                refused = f"{self.name}:{numbers.start}:refused"
                cursor.execute(INSERT_REFUSED, (plan.REFUSED, refused))
                cursor.execute(NOTE_REFUSED, (refused,))
        return sent

    def _pause(self, seconds: float) -> None:
        """Wait, and send a query every half second: the server may close connections that are idle for 2 seconds."""
        from django.db import connection

        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0 and not (seconds > 1 and self._stop.is_set()):
            time.sleep(min(0.5, left))
            if left > 0.5:
                with connection.cursor() as cursor:
                    cursor.execute("SELECT 1")

    def _repeat(self, message_id: str, key: str, priority: int) -> None:
        """Publish a duplicate. It must not be delivered in addition to the first message, nor instead of it.

        If the first message is scheduled and not in the log yet, the duplicate may be delivered instead.
        """
        from django.db import Error, connection

        from django_mysqlqueue import publish

        try:
            body = {plan.NAME_INSIDE: message_id, plan.REPEAT: True}
            metadata = {"region": plan.region(message_id)}
            options: dict[str, Any] = {
                "priority": priority,
                "metadata": metadata,
                "expires_at": plan.expiry(message_id),
            }
            publish(plan.topic_of(message_id), body, key=key, id=message_id, **options)
        except Error:
            connection.close()
        else:
            self._note(records.REPEATED, 0, 0, message_id)

    def _note(self, verb: str, first: int, last: int, note: str = "") -> None:
        records.write(self._path, [records.Transaction(verb, self.name, first, last, note, records.now())])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name")
    parser.add_argument("seed", type=int)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rate", type=float, default=1.0, help="messages per second, of all threads together")
    parser.add_argument("--long", type=float, default=0.0, help="seconds that each transaction stays open")
    options = parser.parse_args()
    django.setup()
    stop = threading.Event()
    events = read_events()
    publishers = [Publisher(f"{options.name}.{n}", options.seed, events, stop) for n in range(options.threads)]
    publish = (
        (lambda one: one.run_long(options.long))
        if options.long
        else (lambda one: one.run(options.rate / options.threads))
    )
    run_all([functools.partial(publish, one) for one in publishers], stop)


def run_all(functions: Iterable[Callable[[], None]], stop: threading.Event) -> None:
    """Run functions in threads until the soak test stops publishing, or this process is asked to end.

    Args:
        functions: the functions, which return soon after ``stop`` is set.
        stop: the event.
    """
    signal.signal(signal.SIGTERM, lambda number, frame: stop.set())
    threads = [threading.Thread(target=function) for function in functions]
    for thread in threads:
        thread.start()
    stop_file = Path(os.environ["SOAK_FOLDER"]) / "stop-publishing"
    for _ in _every(0.2):
        if stop.is_set() or stop_file.exists() or not any(thread.is_alive() for thread in threads):
            break
    stop.set()
    for thread in threads:
        thread.join()


def _every(seconds: float) -> Iterator[int]:
    for number in itertools.count():
        yield number
        time.sleep(seconds)


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""Measure how long single messages wait while a subscriber works on a large backlog, what limits cost, and how fast
messages are passed because of a filter or their expiry.

    python tools/servers.py run mariadb -- python benchmarks/control.py

- priority: messages with priority 10. The backlog has priority 0 and many keys.
- fairness: messages of some keys. The backlog belongs to one other key.
- limits: messages per second of a subscriber whose group has limits that are not reached, and of one without limits, by
  turns. Handlers do nothing.
- waiting: statements per second that the server gets from a subscriber whose messages all wait for a slot, and from an
  idle one. Polls have their default intervals. Not on SQLite, which does not count statements.
- filters: messages per second of a subscriber whose filter passes all of them, or nine of ten, and of one without a
  filter, by turns. Handlers do nothing.
- expiry: messages per second of a subscriber that passes a backlog of expired messages, and of one that handles
  messages, by turns.
- coalescing: seconds until messages with few keys, published while a slow handler runs, are settled, and how many of
  them were handled, with the keys as coalesce keys and, with fewer messages, without.
- debouncing: messages per second that are published one by one with a delay, and moved into the log when they come due,
  and of debounced messages, of which one for each key is moved, by turns. No subscriber runs.

The backlog is in the log before a measurement starts. One message is published every 50 to 150 ms. The time is from
the call of publish() to the start of the handler. Subscriber and publisher run on the same machine and use the same
clock. The baseline is the same measurement on empty tables, in the same run.
"""

from __future__ import annotations

import argparse
import datetime
import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks import common

TOPIC = "control"
MODES = ("ordered", "shared")
"""Each mode is measured with a group of the same name, so that one backlog serves both."""
PRIORITY = 10
KEYS = {"priority": 1000, "fairness": 50}
"""Number of keys of the measured messages. With priorities, the backlog has the same keys."""
SETTINGS = {"POLL_INTERVAL": 0.1, "MAX_POLL_INTERVAL": 0.1}
"""A fixed interval: otherwise an idle subscriber would poll less and less often, and the baseline would be slower."""
LIMITS: dict[str, dict[str, Any]] = {
    "no limits": {},
    "rate": {"RATE": "10000/s"},
    "rate per key": {"RATE_PER_KEY": "10000/s"},
    "in flight": {"MAX_IN_FLIGHT": 10_000},
    "in flight per key": {"MAX_IN_FLIGHT_PER_KEY": 10_000},
}
"""Limits that are not reached."""
LIMITED_KEYS = 100
WAITING: dict[str, dict[str, Any]] = {"idle": {}, "rate": {"RATE": "1/h"}, "rate per key": {"RATE_PER_KEY": "1/h"}}
"""Limits that one message for each key uses up."""
FILTER = {"region": ["eu"], "total": [{"numeric": [">=", 100]}]}
MATCHING = {"no filter": 1, "none matches": 0, "one of ten matches": 10}
"""Every how many messages of a key one matches; 0: none does. Without a filter, all messages are handled."""
FILTERED_KEYS = (100, 1)
EXPIRED_KEYS = 100
COALESCED_KEYS = 100
PAST = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
WARM_UP = 2.0
LAST = 5.0
"""Seconds to wait for the last message."""
QUIET = 20.0
"""Seconds after which a subscriber without work, or without slots, asks as seldom as it ever will."""


def fill(case: str, backlog: int) -> None:
    """Publish the backlog and move it into the log."""
    from django_mysqlqueue import Message, publish_many
    from django_mysqlqueue.service.sequencing import sequence

    for start in range(0, backlog, 10_000):
        numbers = range(start, min(start + 10_000, backlog))
        publish_many(
            TOPIC,
            [
                Message(common.PAYLOAD, key="noise" if case == "fairness" else f"k{number % KEYS[case]}")
                for number in numbers
            ],
        )
    while sequence("default").moved:
        pass


def publish_slowly(case: str, messages: int, seed: str) -> dict[int, float]:
    """Publish one message every 50 to 150 ms. Return when publish() was called for each, in epoch seconds."""
    from django_mysqlqueue import publish

    chance = random.Random(seed)
    called: dict[int, float] = {}
    for number in range(messages):
        time.sleep(chance.uniform(0.05, 0.15))
        key = f"k{chance.randrange(KEYS[case])}"
        called[number] = time.time()
        publish(TOPIC, {"n": number, **common.PAYLOAD}, key=key, priority=PRIORITY if case == "priority" else 0)
    return called


def measure(case: str, mode: str, options: argparse.Namespace, seed: str) -> tuple[list[float], int]:
    """Return the milliseconds that each message waited, and the number of other messages that were handled."""
    from django_mysqlqueue.models import SubscriberHeartbeat

    os.environ["BENCH_SLEEP"] = str(options.handler_ms / 1000)
    arguments = ("--topic", TOPIC, "--group", mode, "--threads", str(options.threads))
    with common.subscribers(1, *arguments, **SETTINGS) as running:
        common.wait_for(lambda: SubscriberHeartbeat.objects.exists())
        time.sleep(WARM_UP)
        called = publish_slowly(case, options.messages, seed)
        time.sleep(LAST)
    (record,) = running.records
    starts = dict(record["starts"])
    if starts.keys() != called.keys():
        raise RuntimeError(f"published {len(called)} messages, but {len(starts)} were handled within {LAST:g} s")
    return [1000 * (starts[number] - at) for number, at in called.items()], record["count"] - len(called)


def handled_per_second(mode: str, limits: dict[str, Any], messages: int, threads: int, processes: int) -> float:
    """Return the rate at which subscribers handle a backlog of 100 keys, from the first to the last message."""
    from django_mysqlqueue import Message, publish_many
    from django_mysqlqueue.service.sequencing import sequence

    os.environ["BENCH_SLEEP"] = "0"
    publish_many(TOPIC, [Message(common.PAYLOAD, key=f"k{number % LIMITED_KEYS}") for number in range(messages)])
    while sequence("default").moved:
        pass
    arguments = ("--topic", TOPIC, "--group", mode, "--threads", str(threads))
    with common.subscribers(processes, *arguments, **SETTINGS, GROUPS={mode: limits}) as running:
        common.wait_for(lambda: common.is_drained(TOPIC, [mode]))
    records = [record for record in running.records if record["count"]]
    count = sum(record["count"] for record in records)
    if count != messages:
        raise RuntimeError(f"{count} of {messages} messages were handled")
    first, last = min(record["first"] for record in records), max(record["last"] for record in records)
    return (messages - 1) / (last - first)


def publish_with_metadata(messages: int, keys: int, matching: int, expires_at: datetime.datetime | None = None) -> None:
    """Publish a backlog of which one of ``matching`` messages of each key matches the filter, and move it into the log.

    The others fail one of its two conditions: half of them the first, half of them only the second.
    """
    from django_mysqlqueue import Message, publish_many
    from django_mysqlqueue.service.sequencing import sequence

    for start in range(0, messages, 10_000):
        batch = []
        for number in range(start, min(start + 10_000, messages)):
            place = number // keys  # within the key
            matches = matching > 0 and place % matching == 0
            metadata = {
                "region": "eu" if matches or place % 2 else "us",
                "total": (100 if matches else 0) + place % 100,
                "tenant": f"tenant-{number % 1000}",
            }
            batch.append(Message(common.PAYLOAD, f"k{number % keys}", metadata=metadata, expires_at=expires_at))
        publish_many(TOPIC, batch)
    while sequence("default").moved:
        pass


def count_settled(group: str) -> int:
    """Return the number of messages up to the watermarks of a group, including those that its filter has passed."""
    from django.db import connection

    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT COUNT(*) FROM queue_offsets o JOIN queue_messages m ON m.topic = o.topic "
            "AND m.partition_key = o.partition_key AND m.`offset` <= o.offset_acked "
            "WHERE o.consumer_group = %s AND o.topic = %s",
            (group, TOPIC),
        )
        return int(cursor.fetchone()[0])


def filtered_per_second(mode: str, case: str, keys: int, messages: int, threads: int) -> float:
    """Return the rate at which a subscriber passes or handles a backlog with or without a filter."""
    publish_with_metadata(messages, keys, MATCHING[case])
    group = {} if case == "no filter" else {"FILTER": FILTER}
    handled = messages // MATCHING[case] if MATCHING[case] else 0
    return settled_per_second(mode, group, messages, handled, threads)


def expired_per_second(mode: str, *, expired: bool, messages: int, threads: int) -> float:
    """Return the rate at which a subscriber passes a backlog of expired messages, or handles one of others."""
    publish_with_metadata(messages, EXPIRED_KEYS, 1, PAST if expired else None)
    return settled_per_second(mode, {}, messages, 0 if expired else messages, threads)


def settled_per_second(mode: str, group: dict[str, Any], messages: int, expected: int, threads: int) -> float:
    """Return the rate at which a subscriber passes or handles a backlog, without its start and its first claims.

    Args:
        mode: the mode, and the name of the group.
        group: its options.
        messages: number of messages of the backlog, which is in the log.
        expected: number of them that are handled.
        threads: number of handler threads.
    """
    from django.db.models import Max

    from django_mysqlqueue.models import ConsumerOffset, QueueMessage

    os.environ["BENCH_SLEEP"] = "0"
    last = dict(QueueMessage.objects.filter(topic=TOPIC).values_list("partition_key").annotate(Max("offset")))
    watermarks = ConsumerOffset.objects.filter(consumer_group=mode, topic=TOPIC)
    arguments = ("--topic", TOPIC, "--group", mode, "--threads", str(threads))
    with common.subscribers(1, *arguments, **SETTINGS, GROUPS={mode: group}) as running:
        common.wait_for(lambda: watermarks.filter(offset_acked__gt=0).exists())
        began = time.time()
        before = count_settled(mode)
        # Not ``is_drained``, which would read the whole log each time.
        ended = common.wait_for(lambda: dict(watermarks.values_list("partition_key", "offset_acked")) == last)
    handled = sum(record["count"] for record in running.records)
    if handled != expected:
        raise RuntimeError(f"{mode}, {group}: {handled} messages were handled, not {expected}")
    return (messages - before) / (ended - began)


def run_filters(options: argparse.Namespace) -> tuple[dict[str, Any], list[list[str]]]:
    """Measure with and without a filter by turns. Return the figures, and the rows of a table."""
    cases: dict[str, Callable[[], float]] = {}
    names = {(mode, keys): f"{mode}, {keys} key{'s' * (keys > 1)}" for mode in MODES for keys in FILTERED_KEYS}
    for (mode, keys), name in names.items():
        for case, matching in MATCHING.items():
            messages = options.handled_messages * max(1, matching) if matching else options.passed_messages
            cases[f"{name}, {case}"] = partial(filtered_per_second, mode, case, keys, messages, options.threads)
    return _ratios(common.interleaved(cases, options.filtered_rounds), "no filter")


def run_expiry(options: argparse.Namespace) -> tuple[dict[str, Any], list[list[str]]]:
    """Measure with and without an expiry by turns. Return the figures, and the rows of a table."""
    kinds = {"handled": (False, options.handled_messages), "expired": (True, options.expired_messages)}
    cases = {
        f"{mode}, {name}": partial(
            expired_per_second, mode, expired=expired, messages=messages, threads=options.threads
        )
        for mode in MODES
        for name, (expired, messages) in kinds.items()
    }
    return _ratios(common.interleaved(cases, options.expired_rounds), "handled")


def _ratios(
    found: dict[str, list[float]], base: str, title: str = "messages per second", digits: int = 0
) -> tuple[dict[str, Any], list[list[str]]]:
    """Return the figures and the rows of a table, with ratios to the case ``base`` of the same mode."""
    medians = {name: common.median(values) for name, values in found.items()}
    table = [[title, "median", "ratio"]]
    result: dict[str, Any] = {}
    for name, value in medians.items():
        ratio = round(value / medians[f"{name.rpartition(', ')[0]}, {base}"], 2)
        result[name] = {
            "median": round(value, digits or None),
            "all": [round(one, digits or None) for one in found[name]],
            "ratio": ratio,
        }
        table.append([name, f"{value:,.{digits}f}", str(ratio)])
    return result, table


def run_limits(options: argparse.Namespace) -> tuple[dict[str, Any], list[list[str]]]:
    """Measure all limits by turns. Return the figures, and the rows of a table."""
    cases = {
        f"{mode}, {name}": partial(
            handled_per_second,
            mode,
            limits,
            options.limited_messages,
            options.threads,
            options.limited_processes,
        )
        for mode in MODES
        for name, limits in LIMITS.items()
    }
    return _ratios(common.interleaved(cases, options.limited_rounds), "no limits")


def statements_per_second(mode: str, limits: dict[str, Any], messages: int, threads: int, seconds: float) -> float:
    """Return how many statements the server gets from a subscriber; with limits, while all messages wait for a slot."""
    from django.db import connection

    from django_mysqlqueue import Message, publish_many
    from django_mysqlqueue.service.sequencing import sequence

    def count() -> int:
        with connection.cursor() as cursor:
            cursor.execute("SHOW GLOBAL STATUS LIKE 'Questions'")
            return int(cursor.fetchone()[1])

    os.environ["BENCH_SLEEP"] = "0"
    if limits:
        publish_many(TOPIC, [Message(common.PAYLOAD, key=f"k{number % LIMITED_KEYS}") for number in range(messages)])
        while sequence("default").moved:
            pass
    with common.subscribers(1, "--topic", TOPIC, "--group", mode, "--threads", str(threads), GROUPS={mode: limits}):
        time.sleep(QUIET)
        before, began = count(), time.monotonic()
        time.sleep(seconds)
        return (count() - before) / (time.monotonic() - began)


def run_waiting(options: argparse.Namespace) -> tuple[dict[str, Any], list[list[str]]]:
    """Measure without work and without slots by turns. Return the figures, and the rows of a table."""
    from django.db import connection

    if connection.vendor == "sqlite":
        return {}, [["statements per second", "not on SQLite"]]
    cases = {
        f"{mode}, {name}": partial(
            statements_per_second, mode, limits, options.limited_messages, options.threads, options.waiting_seconds
        )
        for mode in MODES
        for name, limits in WAITING.items()
    }
    return _ratios(common.interleaved(cases, 1), "idle", "statements per second", digits=1)


def coalesced(mode: str, *, coalesce: bool, messages: int, seconds: float) -> tuple[float, int]:
    """Publish messages to a subscriber with a slow handler. Return how long it takes, and how many are handled."""
    from django_mysqlqueue import Message, publish_many

    common.reset()
    os.environ["BENCH_SLEEP"] = str(seconds)
    arguments = ("--topic", TOPIC, "--group", mode, "--threads", str(COALESCED_KEYS))
    with common.subscribers(1, *arguments, **SETTINGS, GROUPS={mode: {}}) as running:
        time.sleep(WARM_UP)
        began = time.time()
        names = [f"c{number % COALESCED_KEYS}" for number in range(messages)]
        publish_many(TOPIC, (Message(common.PAYLOAD, key=name, coalesce=name if coalesce else None) for name in names))
        ended = common.wait_for(lambda: common.is_drained(TOPIC, [mode]), every=0.1)
    return ended - began, sum(record["count"] for record in running.records)


def run_coalescing(options: argparse.Namespace) -> tuple[dict[str, Any], list[list[str]]]:
    """Measure with and without coalesce keys by turns. Return the figures, and the rows of a table."""
    table = [["coalescing", "messages", "handled per key", "seconds"]]
    result: dict[str, Any] = {}
    for mode in MODES:
        for coalesce, messages in ((True, options.coalesced_messages), (False, options.coalesced_messages // 20)):
            seconds, handled = coalesced(
                mode, coalesce=coalesce, messages=messages, seconds=options.coalesced_handler_seconds
            )
            name = f"{mode}, {'coalesce keys' if coalesce else 'no coalesce keys'}"
            per_key = round(handled / COALESCED_KEYS, 2)
            result[name] = {"messages": messages, "handled": handled, "per_key": per_key, "seconds": round(seconds, 1)}
            table.append([name, f"{messages:,}", str(per_key), f"{seconds:.1f}"])
    return result, table


def scheduled_per_second(*, debounced: bool, messages: int) -> tuple[float, float]:
    """Publish scheduled messages, bring them due, and move them. Return messages per second of each."""
    from django_mysqlqueue import publish
    from django_mysqlqueue.service import sequencing
    from django_mysqlqueue.testing import _advance

    common.reset()
    began = time.monotonic()
    for number in range(messages):
        name = f"c{number % COALESCED_KEYS}"
        publish(TOPIC, common.PAYLOAD, key=name, delay=3600, coalesce=name if debounced else None)
    published = time.monotonic() - began
    _advance("default", 3_600_000)
    began = time.monotonic()
    while sequencing.sequence("default").more:
        pass
    return messages / published, messages / (time.monotonic() - began)


def run_debouncing(options: argparse.Namespace) -> tuple[dict[str, Any], list[list[str]]]:
    """Measure with and without coalesce keys by turns. Return the figures, and the rows of a table."""
    steps = ("published", "moved or replaced")
    rates: dict[str, dict[str, list[float]]] = {name: {step: [] for step in steps} for name in ("delay", "debounced")}
    for _ in range(options.debounced_rounds):
        for name, by_step in rates.items():
            found = scheduled_per_second(debounced=name == "debounced", messages=options.coalesced_messages)
            for step, rate in zip(steps, found, strict=True):
                by_step[step].append(rate)
    table = [["debouncing, messages/s", *rates, "ratio"]]
    result: dict[str, Any] = {}
    for step in steps:
        plain, debounced = (common.median(by_step[step]) for by_step in rates.values())
        ratio = round(debounced / plain, 2)
        result[step] = {"delay": round(plain), "debounced": round(debounced), "ratio": ratio}
        table.append([step, f"{plain:,.0f}", f"{debounced:,.0f}", str(ratio)])
    return result, table


RATES = {
    "debouncing": run_debouncing,
    "coalescing": run_coalescing,
    "limits": run_limits,
    "waiting": run_waiting,
    "filters": run_filters,
    "expiry": run_expiry,
}


def percentiles(waits: list[float]) -> dict[str, float]:
    cuts = statistics.quantiles(waits, n=100)
    return {"p50": round(cuts[49], 1), "p99": round(cuts[98], 1), "longest": round(max(waits), 1)}


def run(case: str, options: argparse.Namespace) -> tuple[dict[str, Any], float]:
    """Measure all modes without and with the backlog. Return the figures and how long it took to make the backlog."""
    waits: dict[str, dict[str, list[float]]] = {mode: {"baseline": [], "backlog": []} for mode in MODES}
    handled = dict.fromkeys(MODES, 0)
    seconds = 0.0
    for state in ("baseline", "backlog"):
        if state == "backlog":
            common.reset()
            began = time.monotonic()
            fill(case, options.backlog)
            seconds = time.monotonic() - began
        for number in range(options.rounds):
            for mode in MODES:
                if state == "baseline":
                    common.reset()  # A new group would begin with the messages of the others.
                found, others = measure(case, mode, options, f"{case} {mode} {number}")
                waits[mode][state] += found
                handled[mode] += others
                text = f"  {case}, {mode}, {state}: {percentiles(found)}, {others:,} others"
                print(text, file=sys.stderr, flush=True)
    result: dict[str, Any] = {}
    for mode, by_state in waits.items():
        if not 0 < handled[mode] < options.backlog:
            raise RuntimeError(f"{case}, {mode}: {handled[mode]:,} of {options.backlog:,} other messages were handled")
        figures = {state: percentiles(values) for state, values in by_state.items()}
        ratios = {name: round(figures["backlog"][name] / figures["baseline"][name], 2) for name in ("p50", "p99")}
        result[mode] = {**figures, "ratio": ratios, "others_handled": handled[mode]}
    return result, seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backlog", type=int, default=1_000_000, help="messages that wait (default: 1000000)")
    parser.add_argument("--messages", type=int, default=200, help="measured messages per round (default: 200)")
    parser.add_argument("--rounds", type=int, default=2, help="number of rounds (default: 2)")
    parser.add_argument("--threads", type=int, default=4, help="handler threads (default: 4)")
    parser.add_argument("--handler-ms", type=float, default=2.0, help="duration of each handler (default: 2)")
    parser.add_argument("--limited-messages", type=int, default=20_000, help="messages per round (default: 20000)")
    parser.add_argument("--limited-processes", type=int, default=1, help="subscriber processes (default: 1)")
    parser.add_argument("--limited-rounds", type=int, default=5, help="number of rounds of limits (default: 5)")
    parser.add_argument(
        "--waiting-seconds", type=float, default=20.0, help="seconds that statements are counted (default: 20)"
    )
    parser.add_argument(
        "--passed-messages", type=int, default=400_000, help="messages that a filter passes per round (default: 400000)"
    )
    parser.add_argument(
        "--handled-messages",
        type=int,
        default=10_000,
        help="messages that are handled per round with a filter, and for comparison without one (default: 10000)",
    )
    parser.add_argument("--filtered-rounds", type=int, default=3, help="number of rounds of filters (default: 3)")
    parser.add_argument(
        "--expired-messages", type=int, default=1_000_000, help="expired messages per round (default: 1000000)"
    )
    parser.add_argument("--expired-rounds", type=int, default=1, help="number of rounds of expiry (default: 1)")
    parser.add_argument(
        "--coalesced-messages", type=int, default=10_000, help="messages with 100 coalesce keys (default: 10000)"
    )
    parser.add_argument(
        "--coalesced-handler-seconds", type=float, default=2.0, help="duration of their handler (default: 2)"
    )
    parser.add_argument("--debounced-rounds", type=int, default=3, help="number of rounds of debouncing (default: 3)")
    parser.add_argument("--only", choices=(*KEYS, *RATES), help="measure only one of them")
    parser.add_argument("--json", metavar="FILE", help="write the JSON to this file instead of stdout")
    options = parser.parse_args()
    common.set_up()
    environment = common.environment()
    results: dict[str, Any] = {}
    filled: dict[str, float] = {}
    table = [["publish() to handler, ms", "p50", "p99", "longest"]]
    for case in [options.only] if options.only in KEYS else [] if options.only else KEYS:
        found, seconds = run(case, options)
        results[case], filled[case] = found, round(seconds, 1)
        for mode, figures in found.items():
            for state, name in (("baseline", "without backlog"), ("backlog", f"{options.backlog:,} waiting")):
                table.append([f"{case}, {mode}, {name}", *(f"{value:,}" for value in figures[state].values())])
            table.append([f"{case}, {mode}, ratio", *(str(value) for value in figures["ratio"].values()), ""])
    for name, measured in RATES.items():
        if options.only in (None, name):
            results[name], rows = measured(options)
            table += [["", "", "", ""], *([*row, ""][:4] for row in rows)]
    names = ("backlog", "messages", "rounds", "threads", "handler_ms")
    settings: dict[str, Any] = {name: getattr(options, name) for name in names}
    settings |= {"queue": SETTINGS, "pause_ms": [50, 150], "keys": KEYS, "priority": PRIORITY}
    result = {"settings": settings, "environment": environment, "seconds_to_fill": filled, "results": results}
    common.report("control", result, table, options.json)


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""Measure what several databases give, and what it costs to publish via another one.

    python benchmarks/databases.py                                # everything, on private MariaDB servers
    python benchmarks/databases.py --engine mysql --only relay

``scale``: messages per second of three topics on one server and on three, in turn, with the same publishers and
subscribers: for each topic, one process with some threads, each of which publishes one message per transaction as fast
as it can, and one ``runsubscriber`` with as many handler threads, which are atomic. Each server flushes at each commit,
and writes a binary log. ``--limits`` selects what limits the servers:

- none: this machine. With few cores, its CPUs are the limit, which all servers share with the clients.
- flush: a slow disk. The server's own option (binlog_commit_wait_usec, binlog_group_commit_sync_delay) makes each group
  of commits wait for ``--flush-ms`` before it is flushed. Transactions that commit meanwhile are in the next group.
- cpu: servers with ``--server-cores`` of a core each. This process stops a server (SIGSTOP) that has used its share of
  the time, and continues it (SIGCONT) when it may use more, as a limit of a container would.

``stopped``: deliveries per second from a backlog in one database, while the server of another one answers and while it
is stopped (SIGSTOP), in turn; and seconds until a new process calls its first handler and, after SIGTERM, until it has
released its leases in the database that answers, and until it exits. Meanwhile, messages are published via the first
database for the second.

``relay``: messages per second, and latency, of messages that are published directly, and of messages that are published
via another database, in turn.

``size``: bytes of the log's table, and bytes that the server writes to its redo log, per message that is published
directly and handled by one group; and connections of a subscriber process that works on two databases and relays.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]
from benchmarks import common  # noqa: E402

ALIASES = ("default", "shop", "events")
SHOP = ALIASES[1]
SCALED = ("scale.a", "scale.b", "scale.c")
KEYS = 50
TOPICS = {topic: {"DATABASE": SHOP} for topic in ("beside", "noop", "latency")}
FLUSHED = {"mariadb": (), "mysql": ("--sync-binlog=1",)}
"""Options for the default of the server, if tools/servers.py has another one."""
WITH_LOG = {"mariadb": ("--log-bin",), "mysql": ()}
"""Options with which the server writes a binary log, if it would not."""
BOTH = ("--group", "g1", "--group", "ordered", "--topic", "backlog")
"""Options of subscribers that relay: a group in each database."""
LIMITS = ("none", "flush", "cpu")
WARM_UP = 3.0
CATCH_UP = 3.0
"""Seconds after a server continues until the next measurement begins."""
BESIDE_RATE = 20.0
"""Messages per second that are published via one database while the other one is stopped."""


# -- servers and processes ----------------------------------------------------


@contextlib.contextmanager
def running(options: argparse.Namespace, count: int) -> Iterator[dict[str, Any]]:
    """Start private servers, create the tables, and yield the servers by alias."""
    import servers

    servers.end_servers_on_sigterm()
    extra = ("--innodb-flush-log-at-trx-commit=1", *FLUSHED[options.engine])
    if "scale" in options.only:
        extra += WITH_LOG[options.engine]
    with contextlib.ExitStack() as stack:
        found = {alias: stack.enter_context(servers.running(options.engine, extra=extra)) for alias in ALIASES[:count]}
        urls = {alias: server.url for alias, server in found.items()}
        os.environ["DATABASE_URL"] = urls.pop("default")
        os.environ["BENCH_DATABASES"] = json.dumps(urls)
        os.environ["BENCH_MYSQLQUEUE"] = json.dumps({"TOPICS": TOPICS})
        os.environ["DJANGO_SETTINGS_MODULE"] = "benchmarks.settings"
        import django

        django.setup()
        from django.core.management import call_command

        for alias in found:
            call_command("migrate", verbosity=0, run_syncdb=True, database=alias)
        yield found


def reset() -> None:
    from django.conf import settings

    for alias in settings.DATABASES:
        common.reset(alias)


def rows(alias: str, sql: str) -> list[tuple[Any, ...]]:
    from django.db import connections

    with connections[alias].cursor() as cursor:
        cursor.execute(sql)
        return list(cursor.fetchall()) if cursor.description else []


@contextlib.contextmanager
def worker(*arguments: str, **settings: Any) -> Iterator[subprocess.Popen[bytes]]:
    """Run a process of this file that publishes, and end it after the block."""
    env = os.environ | {"BENCH_MYSQLQUEUE": json.dumps(settings)}
    command = [sys.executable, __file__, "--worker", *arguments]
    process = subprocess.Popen(command, cwd=ROOT, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    try:
        yield process
        if process.poll() is not None:
            raise RuntimeError(f"a publisher ended with status {process.returncode}")
    finally:
        process.kill()
        process.wait()


def publish_as_fast_as_possible(topic: str, clients: str) -> None:
    """Publish in some threads, one message per transaction, until the process is killed."""
    from django.db import transaction

    from django_mysqlqueue import publish
    from django_mysqlqueue.options.conf import get_settings

    using = get_settings().database_of(topic)

    def work(place: int) -> None:
        number = place
        while True:
            number += int(clients)
            with transaction.atomic(using):
                publish(topic, {"n": number, **common.PAYLOAD}, key=f"k{number % KEYS}")

    threads = [threading.Thread(target=work, args=(place,), daemon=True) for place in range(int(clients))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def publish_beside() -> None:
    """Publish to the second database via the first one at a steady rate, until the process is killed."""
    from django_mysqlqueue import publish

    began = time.monotonic()
    number = 0
    while True:
        number += 1
        publish("beside", {"n": number, **common.PAYLOAD}, key=f"k{number % KEYS}", via="default")
        time.sleep(max(0.0, began + number / BESIDE_RATE - time.monotonic()))


def work(name: str, *arguments: str) -> None:
    import django

    django.setup()
    {"scale": publish_as_fast_as_possible, "beside": publish_beside}[name](*arguments)


def cpu_seconds(pids: Sequence[int]) -> float:
    """Return the user and system time of processes."""
    total = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        total += int(fields[11]) + int(fields[12])
    return total / os.sysconf("SC_CLK_TCK")


def flush_ms(folder: Path) -> float:
    """Return the median time of an fdatasync() after a write of 512 bytes, in milliseconds."""
    times = []
    with (folder / "flushed").open("wb", buffering=0) as file:
        for _ in range(300):
            file.write(bytes(512))
            began = time.perf_counter()
            os.fdatasync(file.fileno())
            times.append(1000 * (time.perf_counter() - began))
    return statistics.median(times)


def say(text: str) -> None:
    print(f"  {text}", file=sys.stderr, flush=True)


def medians(found: Sequence[dict[str, float]], digits: int = 0) -> dict[str, float]:
    return {name: round(common.median([one[name] for one in found]), digits) for name in found[0]}


# -- scale --------------------------------------------------------------------


def delay_flushes(engine: str, milliseconds: float) -> None:
    """Let each group of commits of all servers wait, in addition to its flush."""
    micros = round(1000 * milliseconds)
    for alias in ALIASES:
        if engine == "mysql":
            rows(alias, f"SET GLOBAL binlog_group_commit_sync_delay = {micros}")
        else:
            # The number of commits after which a group does not wait any longer; 0: no group waits.
            rows(alias, f"SET GLOBAL binlog_commit_wait_count = {100_000 if micros else 0}")
            rows(alias, f"SET GLOBAL binlog_commit_wait_usec = {micros}")


class Throttle:
    """Limits the CPU time of servers, like a container's limit, but with signals. Used as a context manager.

    Args:
        pids: the servers' process ids.
        cores: the cores that each of them may use; 0: no limit.
    """

    INTERVAL = 0.002
    BURST = 0.01
    """CPU seconds that a server that was idle may use at once."""

    def __init__(self, pids: Sequence[int], cores: float) -> None:
        self._pids = pids if cores else ()
        self._cores = cores
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()

    @staticmethod
    def _used(pid: int) -> float:
        return time.clock_gettime((~pid << 3) | 2)  # as clock_getcpuclockid(3) makes it

    def _run(self) -> None:
        left = dict.fromkeys(self._pids, self.BURST)
        used = {pid: self._used(pid) for pid in self._pids}
        waiting: set[int] = set()
        then = time.monotonic()
        try:
            while self._pids and not self._ended.wait(self.INTERVAL):
                now = time.monotonic()
                for pid in self._pids:
                    before, used[pid] = used[pid], self._used(pid)
                    left[pid] = min(self.BURST, left[pid] + self._cores * (now - then) - (used[pid] - before))
                    if left[pid] < 0 and pid not in waiting:
                        os.kill(pid, signal.SIGSTOP)
                        waiting.add(pid)
                    elif left[pid] >= 0 and pid in waiting:
                        os.kill(pid, signal.SIGCONT)
                        waiting.discard(pid)
                then = now
        finally:
            for pid in waiting:
                os.kill(pid, signal.SIGCONT)


def scaled(
    servers: dict[str, Any], options: argparse.Namespace, limit: str, count: int, clients: int
) -> dict[str, float]:
    """Return the messages per second of three topics on one server or on three, and the cores that this used."""
    delay_flushes(options.engine, 0)
    reset()
    delay_flushes(options.engine, options.flush_ms if limit == "flush" else 0)
    used = dict(zip(SCALED, ALIASES if count > 1 else ALIASES[:1] * 3, strict=True))
    topics = {topic: {"DATABASE": alias} for topic, alias in used.items()}
    server_pids = [servers[alias].pid for alias in sorted(set(used.values()))]
    with contextlib.ExitStack() as stack:
        subscribers = [
            stack.enter_context(
                common.subscribers(
                    1, "--topic", topic, "--database", alias, "--threads", str(clients), TOPICS=topics, RETENTION=0
                )
            )
            for topic, alias in used.items()
        ]
        publishers = [stack.enter_context(worker("scale", topic, str(clients), TOPICS=topics)) for topic in used]
        stack.enter_context(Throttle(server_pids, options.server_cores if limit == "cpu" else 0.0))
        common.wait_for(lambda: all(one.handled() for one in subscribers), timeout=60)
        time.sleep(WARM_UP)
        client_pids = [process.pid for one in subscribers for process in one.processes]
        client_pids += [process.pid for process in publishers]

        def measure() -> dict[str, float]:
            places = [rows(alias, "SELECT last_offset FROM queue_sequencer") for alias in set(used.values())]
            return {
                "published": sum(int(place[0][0]) for place in places),
                "handled": sum(one.handled() for one in subscribers),
                "cores of servers": cpu_seconds(server_pids),
                "cores of clients": cpu_seconds(client_pids),
            }

        before, began = measure(), time.monotonic()
        time.sleep(options.seconds)
        after, took = measure(), time.monotonic() - began
    return {name: (after[name] - value) / took for name, value in before.items()}


def scale(servers: dict[str, Any], options: argparse.Namespace) -> tuple[dict[str, Any], list[list[str]]]:
    """Measure one server and three in turn. Return the figures, and the rows of a table."""
    result: dict[str, Any] = {"fdatasync_ms": round(flush_ms(servers["default"].folder), 2), "cases": {}}
    titles = {
        "none": "no limit",
        "flush": f"flush +{options.flush_ms:g} ms",
        "cpu": f"{options.server_cores:g} cores per server",
    }
    cases = [(limit, clients, count) for limit in options.limits for clients in options.clients for count in (1, 3)]
    found: dict[tuple[str, int, int], list[dict[str, float]]] = {case: [] for case in cases}
    for number in range(options.rounds):
        for limit, clients, count in cases:
            values = scaled(servers, options, limit, count, clients)
            found[limit, clients, count].append(values)
            figures = {name: round(value, 2) for name, value in values.items()}
            say(f"round {number + 1}  {titles[limit]}, {clients} publishers per topic, {count} servers: {figures}")
    delay_flushes(options.engine, 0)
    table = [["scale", "published/s", "handled/s", "cores of servers", "of clients"]]
    for limit in options.limits:
        for clients in options.clients:
            one, three = (medians(found[limit, clients, count], 2) for count in (1, 3))
            ratio = {name: round(three[name] / one[name], 2) for name in ("published", "handled")}
            name = f"{titles[limit]}, {clients} publishers per topic"
            result["cases"][name] = {
                "one": one,
                "three": three,
                "ratio": ratio,
                "all": {count: found[limit, clients, count] for count in (1, 3)},
            }
            for title, figures in (("one server", one), ("three servers", three)):
                rates = [f"{figures[key]:,.0f}" for key in ("published", "handled")]
                cores = [f"{figures[key]:.2f}" for key in ("cores of servers", "cores of clients")]
                table.append([f"{name}, {title}", *rates, *cores])
            table.append([f"{name}, ratio", str(ratio["published"]), str(ratio["handled"]), "", ""])
    return result, table


# -- stopped ------------------------------------------------------------------


@contextlib.contextmanager
def frozen(server: Any) -> Iterator[None]:
    """Stop a server during the block."""
    os.kill(server.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(server.pid, signal.SIGCONT)


def fill(messages: int) -> None:
    """Publish a backlog for two groups, and move it into the log."""
    from django_mysqlqueue import Message, publish_many
    from django_mysqlqueue.service.sequencing import sequence

    for start in range(0, messages, 10_000):
        numbers = range(start, min(start + 10_000, messages))
        publish_many("backlog", [Message(common.PAYLOAD, key=f"k{number % KEYS}") for number in numbers])
    while sequence("default").moved:
        pass


def rates_beside(server: Any, options: argparse.Namespace) -> tuple[dict[str, Any], list[list[str]]]:
    """Measure deliveries per second while a server answers, and while it is stopped, in turn."""
    os.environ["BENCH_SLEEP"] = str(options.handler_ms / 1000)
    reset()
    fill(options.backlog)
    arguments = ("--topic", "backlog", "--topic", "beside")
    answers: list[dict[str, float]] = []
    stopped: list[dict[str, float]] = []

    def measure(values: list[dict[str, float]]) -> None:
        pids = [process.pid for process in one.processes]
        before, used, began = one.handled(), cpu_seconds(pids), time.monotonic()
        time.sleep(options.seconds)
        count, used = one.handled() - before, cpu_seconds(pids) - used
        took = time.monotonic() - began
        values.append({"deliveries/s": count / took, "deliveries/CPU s": count / used})
        text = ", ".join(f"{value:,.0f} {name}" for name, value in values[-1].items())
        say(f"{'stopped' if values is stopped else 'answers'}: {text}")

    with common.subscribers(1, *arguments, TOPICS=TOPICS) as one, worker("beside", TOPICS=TOPICS):
        common.wait_for(lambda: one.handled() > 0, timeout=60)
        time.sleep(WARM_UP)
        measure(answers)
        for _ in range(options.stopped_rounds):
            with frozen(server):
                measure(stopped)
            time.sleep(CATCH_UP)
            measure(answers)
        if one.handled() >= 2 * options.backlog:
            raise RuntimeError("the backlog was too small: use --backlog")
    result: dict[str, Any] = {}
    table: list[list[str]] = []
    for name in answers[0]:
        # Each one compared with those before and after it.
        ratios = [
            value[name] / statistics.mean((before[name], after[name]))
            for value, (before, after) in zip(stopped, itertools.pairwise(answers), strict=True)
        ]
        ratio = round(common.median(ratios), 2)
        rates = [round(common.median([value[name] for value in values])) for values in (answers, stopped)]
        result[name] = {
            "answers": rates[0],
            "stopped": rates[1],
            "ratio": ratio,
            "ratios": [round(value, 2) for value in ratios],
        }
        table.append([name, *(f"{rate:,}" for rate in rates), str(ratio)])
    return result, table


STATES = ("answers", "stopped before", "stopped meanwhile")
"""When the server of the second database stops, compared with the start of a subscriber process."""


def start_and_stop(server: Any, state: str, messages: int) -> dict[str, float]:
    """Return the seconds that a process needs to start and to stop while it has a backlog."""
    os.environ["BENCH_SLEEP"] = "0.02"
    reset()
    fill(messages)
    owned = "SELECT COUNT(*) FROM queue_partition_leases WHERE leased_by <> ''"
    live = "SELECT COUNT(*) FROM queue_subscriber_heartbeats WHERE deregistered_at = 0 AND topic = 'backlog'"
    with worker("beside", TOPICS=TOPICS), contextlib.ExitStack() as stack:
        if state == "stopped before":
            stack.enter_context(frozen(server))
        time.sleep(1)
        began = time.monotonic()
        running = common.Running(1, ("--topic", "backlog", "--topic", "beside"), {"TOPICS": TOPICS})
        ended = threading.Thread(target=lambda: running.stop(check=False))
        try:
            common.wait_for(lambda: running.handled() > 0, timeout=120, every=0.005)
            started = time.monotonic() - began
            common.wait_for(lambda: rows("default", owned)[0][0] > 0, timeout=60)
            time.sleep(2)
            if state == "stopped meanwhile":
                stack.enter_context(frozen(server))
                time.sleep(2)
        finally:
            began = time.monotonic()
            ended.start()
        common.wait_for(lambda: rows("default", owned)[0][0] == 0, timeout=120, every=0.005)
        released = time.monotonic() - began
        common.wait_for(lambda: rows("default", live)[0][0] == 0, timeout=120, every=0.005)
        deregistered = time.monotonic() - began
        ended.join()
        exited = time.monotonic() - began
    if running.handled() >= 2 * messages:
        raise RuntimeError("the backlog was too small")
    return {
        "start to first handler": started,
        "SIGTERM to leases released": released,
        "SIGTERM to deregistered": deregistered,
        "SIGTERM to exit": exited,
        "exit status": running.codes[0],
    }


def stopped(servers: dict[str, Any], options: argparse.Namespace) -> tuple[dict[str, Any], list[list[str]]]:
    """Measure with the second server stopped and not, in turn. Return the figures, and the rows of a table."""
    result, lines = rates_beside(servers[SHOP], options)
    table = [["stopped", "answers", "is stopped", "ratio"], *lines]
    if not options.rounds:
        return result, table
    table.append(["seconds", *STATES])
    found: dict[str, list[dict[str, float]]] = {state: [] for state in STATES}
    for number in range(options.rounds):
        for name, values in found.items():
            values.append(start_and_stop(servers[SHOP], name, messages=20_000))
            figures = {key: round(value, 2) for key, value in values[-1].items()}
            say(f"round {number + 1}  {name}: {figures}")
    seconds = {name: medians(values, 2) for name, values in found.items()}
    result["seconds"] = {**seconds, "all": found}
    table += [[key, *(f"{by_key[key]:g}" for by_key in seconds.values())] for key in seconds["answers"]]
    return result, table


# -- relay --------------------------------------------------------------------


def passed_per_second(messages: int, batch: int, via: str | None) -> float:
    """Return the messages per second from the first publish to the last call of the handler."""
    reset()
    from django_mysqlqueue.models import SubscriberHeartbeat

    with common.subscribers(
        1, *BOTH, "--topic", "noop", "--claim-size", str(batch), TOPICS=TOPICS, PREFETCH=max(200, 2 * batch)
    ) as one:
        common.wait_for(lambda: SubscriberHeartbeat.objects.using(SHOP).exists(), timeout=60)
        command = [sys.executable, "-m", "benchmarks.publisher", "ours", "noop", str(messages), "10", str(batch)]
        done = subprocess.run([*command, *([via] if via else [])], cwd=ROOT, capture_output=True, text=True, check=True)
        common.wait_for(partial(is_handled, "noop", messages), timeout=120)
    (record,) = one.records
    if record["count"] != messages:
        raise RuntimeError(f"{record['count']} of {messages} messages were handled")
    return float(messages / (record["last"] - float(done.stdout)))


def is_handled(topic: str, messages: int) -> bool:
    """Return whether all messages of a topic are in the log of the second database and settled."""
    moved = rows(SHOP, "SELECT COALESCE(MAX(last_offset), 0) FROM queue_sequencer")[0][0]
    return moved >= messages and common.is_drained(topic, ["g1"], SHOP)


def waits(rate: float, seconds: float, via: str | None) -> list[float]:
    """Return the milliseconds from COMMIT to the handler for each message."""
    from benchmarks.latency import publish_steadily
    from django_mysqlqueue.models import SubscriberHeartbeat

    reset()
    with common.subscribers(1, *BOTH, "--topic", "latency", TOPICS=TOPICS) as one:
        common.wait_for(lambda: SubscriberHeartbeat.objects.using(SHOP).exists(), timeout=60)
        committed = publish_steadily(rate, seconds, using=via or SHOP, via=via)
        common.wait_for(partial(is_handled, "latency", len(committed)), timeout=60)
    starts = {number: at for record in one.records for number, at in record["starts"]}
    if starts.keys() != committed.keys():
        raise RuntimeError(f"published {len(committed)} messages, but {len(starts)} were handled")
    # Without the first two seconds, as in benchmarks/latency.py.
    return [1000 * (starts[number] - at) for number, at in committed.items() if number >= rate * 2]


def relay(servers: dict[str, Any], options: argparse.Namespace) -> tuple[dict[str, Any], list[list[str]]]:
    """Measure with and without a relay in turn. Return the figures, and the rows of a table."""
    ways: dict[str, str | None] = {"direct": None, "via": "default"}
    table = [["relay", *ways, "ratio"]]
    result: dict[str, Any] = {}
    cases: dict[str, Callable[[str | None], float]] = {
        f"messages/s, batches of {batch}": partial(passed_per_second, options.messages, batch) for batch in (100, 500)
    }
    for title, case in cases.items():
        rates: dict[str, list[float]] = {name: [] for name in ways}
        for number in range(options.rounds):
            for name, via in ways.items():
                rates[name].append(case(via))
                say(f"round {number + 1}  {name}, {title}: {rates[name][-1]:,.0f}")
        middle = {name: common.median(values) for name, values in rates.items()}
        ratio = round(middle["via"] / middle["direct"], 2)
        result[title] = {
            **{name: round(value) for name, value in middle.items()},
            "ratio": ratio,
            "all": {name: [round(value) for value in values] for name, values in rates.items()},
        }
        table.append([title, *(f"{value:,.0f}" for value in middle.values()), str(ratio)])
    for rate in options.rate:
        found: dict[str, list[float]] = {name: [] for name in ways}
        for number in range(options.rounds):
            for name, via in ways.items():
                values = waits(rate, options.seconds, via)
                found[name] += values
                say(f"round {number + 1}  {name}, {rate:g}/s: median {common.median(values):.0f} ms")
        figures = {
            "median": {name: common.median(values) for name, values in found.items()},
            "p95": {name: statistics.quantiles(values, n=20)[18] for name, values in found.items()},
            "longest": {name: max(values) for name, values in found.items()},
        }
        result[f"{rate:g}"] = figures
        for title, by_way in figures.items():
            ratio = round(by_way["via"] / by_way["direct"], 2)
            table.append([f"ms, {rate:g}/s, {title}", *(f"{value:.0f}" for value in by_way.values()), str(ratio)])
    return result, table


# -- size ---------------------------------------------------------------------


def size(servers: dict[str, Any], options: argparse.Namespace) -> tuple[dict[str, Any], list[list[str]]]:
    """Measure the space that messages take, and connections. Return the figures, and the rows of a table."""
    status = "SHOW GLOBAL STATUS LIKE 'Innodb_os_log_written'"
    before = int(rows(SHOP, status)[0][1])
    passed_per_second(options.messages, 100, None)
    written = (int(rows(SHOP, status)[0][1]) - before) / options.messages
    rows(SHOP, "ANALYZE TABLE queue_messages")
    space = "FROM information_schema.tables WHERE table_schema = DATABASE() AND table_name = 'queue_messages'"
    ((table_bytes,),) = rows(SHOP, f"SELECT data_length + index_length {space}")
    reset()
    others = "SELECT COUNT(*) FROM information_schema.processlist WHERE user <> 'system user' AND id <> CONNECTION_ID()"
    idle = {alias: rows(alias, others)[0][0] for alias in (ALIASES[0], SHOP)}
    arguments = ("--topic", "backlog", "--topic", "beside", "--threads", "4")
    with common.subscribers(1, *arguments, TOPICS=TOPICS) as one, worker("beside", TOPICS=TOPICS):
        time.sleep(WARM_UP)
        fill(200)
        common.wait_for(lambda: one.handled() == 400, timeout=60)
        time.sleep(1)
        connections = {alias: rows(alias, others)[0][0] - idle[alias] for alias in idle}
    connections[ALIASES[0]] -= 1  # that of the publisher
    result = {
        "log_bytes_per_message": round(int(table_bytes) / options.messages),
        "redo_bytes_per_message": round(written),
        "connections_with_4_threads": connections,
    }
    table = [
        ["size", "value"],
        ["bytes of the log's table per message", f"{result['log_bytes_per_message']:,}"],
        ["bytes of redo log per message", f"{result['redo_bytes_per_message']:,}"],
        *([f"connections to {alias}, 4 threads", str(count)] for alias, count in connections.items()),
    ]
    return result, table


# -- the command --------------------------------------------------------------

PARTS = {"scale": scale, "stopped": stopped, "relay": relay, "size": size}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--engine", choices=tuple(FLUSHED), default="mariadb", help="the private servers (default: mariadb)")
    add("--only", nargs="+", choices=tuple(PARTS), default=list(PARTS), help="measurements to run (default: all)")
    add("--rounds", type=int, default=3, help="number of rounds; 0: of stopped, only the rates (default: 3)")
    add("--seconds", type=float, default=8.0, help="seconds of a measurement (default: 8)")
    add(
        "--limits",
        nargs="+",
        choices=LIMITS,
        default=list(LIMITS),
        help="scale: what limits the servers (default: all)",
    )
    add("--flush-ms", type=float, default=10.0, help="scale: milliseconds to add to each flush (default: 10)")
    add("--server-cores", type=float, default=0.2, help="scale: cores of each server with a limit (default: 0.2)")
    add("--clients", type=int, nargs="+", default=[1, 4], help="scale: publishers per topic (default: 1 4)")
    add("--backlog", type=int, default=600_000, help="stopped: messages of the backlog (default: 600000)")
    add("--stopped-rounds", type=int, default=5, help="stopped: how often the server is stopped (default: 5)")
    add("--handler-ms", type=float, default=0.0, help="stopped: duration of each handler (default: 0)")
    add("--messages", type=int, default=20_000, help="relay, size: messages (default: 20000)")
    add("--rate", type=float, nargs="+", default=[50.0], help="relay: messages per second for latencies (default: 50)")
    add("--json", metavar="FILE", help="write the JSON to this file instead of stdout")
    add("--worker", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(*options.worker)
        return
    results: dict[str, Any] = {}
    table: list[list[str]] = []
    with running(options, 3 if "scale" in options.only else 2) as servers:
        environment = common.environment()
        for name, part in PARTS.items():
            if name in options.only:
                results[name], lines = part(servers, options)
                table += [[*line, *[""] * (5 - len(line))] for line in ([[""]] if table else []) + lines]
        settings = {name: value for name, value in vars(options).items() if name not in ("worker", "json")}
        result = {"settings": settings, "environment": environment, "results": results}
        common.report("databases", result, table, options.json)


if __name__ == "__main__":
    main()

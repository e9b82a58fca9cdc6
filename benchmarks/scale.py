#!/usr/bin/env python3
"""Measure how cost grows with partitions, processes, backlog, settled rows after an unsettled one, and purge lag.

    python benchmarks/scale.py --engine mariadb            # everything, on a private server with full durability
    python benchmarks/scale.py --engine mysql --only claims --messages 1000000
    DATABASE_URL=mysql://… python benchmarks/scale.py      # on your own server (uses two scratch databases)

``idle``: queries and server CPU of idle subscriber processes.
``claims``: the statements of a subscriber's poll, on a small and on a large backlog in turn.
``snapshot``: the same while another connection holds a consistent snapshot, which prevents purging.
Ratios compare medians of one run on one server. JSON goes to stdout, a table to stderr.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]
os.environ.setdefault("DJANGO_SETTINGS_MODULE", "tests.settings")

DURABLE = ("--innodb-flush-log-at-trx-commit=1", "--sync-binlog=1")
SMALL, LARGE = "default", "queue"
"""The databases with the small and with the large backlog. Both are on the same server."""
GROUPS = {"ordered": "o", "shared": "s"}
PAYLOAD = 200
BATCH = 100
FILL = 100_000


def main() -> None:
    options = _options()
    if options.worker:
        _work(options)
        return
    with _server(options) as pid:
        import django

        django.setup()
        from django.core.management import call_command

        from benchmarks import common

        for alias in (SMALL, LARGE):
            _create_database(alias)
            call_command("migrate", verbosity=0, run_syncdb=True, database=alias)
            _make_numbers(alias)
        chosen = options.only or ("idle", "claims", "snapshot")
        result: dict[str, Any] = {
            "benchmark": "scale",
            "environment": common.environment(),
            "options": {name: value for name, value in vars(options).items() if name != "worker"},
        }
        for name, run in (("idle", idle), ("claims", claims), ("snapshot", snapshot)):
            if name in chosen:
                result[name] = run(options, pid)
        print(json.dumps(result))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add(
        "--engine",
        choices=("mariadb", "mysql"),
        default="mariadb",
        help="engine of the private server; not used with DATABASE_URL (default: mariadb)",
    )
    add(
        "--buffer-pool",
        default="512M",
        help="buffer pool of the private server, smaller than the large backlog (default: 512M)",
    )
    add("--only", nargs="+", choices=("idle", "claims", "snapshot"), help="measurements to run (default: all)")
    add("--partitions", type=int, nargs="+", default=[1, 100, 10_000], help="idle: numbers of partitions")
    add("--processes", type=int, nargs="+", default=[1, 10, 50], help="idle: numbers of subscriber processes")
    add(
        "--settle",
        type=float,
        default=75.0,
        help="idle: seconds to wait after all processes own their fair share (default: 75)",
    )
    add("--seconds", type=float, default=60.0, help="idle: seconds of a measurement (default: 60)")
    add("--messages", type=int, default=10_000_000, help="claims: size of the large backlog (default: 10000000)")
    add("--small", type=int, default=20_000, help="claims: size of the small backlog (default: 20000)")
    add("--acked", type=int, default=1_000_000, help="claims: settled rows after an unsettled one (default: 1000000)")
    add("--keys", type=int, default=20, help="claims: number of partitions (default: 20)")
    add("--rounds", type=int, default=60, help="claims: number of polls per case (default: 60)")
    add("--minutes", type=float, default=3.0, help="snapshot: minutes for which it is held (default: 3)")
    add("--worker", nargs=3, metavar=("TOPIC", "MODE", "MESSAGES"), help=argparse.SUPPRESS)
    add("--alias", default=SMALL, help=argparse.SUPPRESS)
    return parser.parse_args()


# -- the machine and the server -----------------------------------------------


@contextlib.contextmanager
def _server(options: argparse.Namespace) -> Iterator[int | None]:
    """Start a private server unless DATABASE_URL is set. Yield its pid, or None."""
    if os.environ.get("DATABASE_URL"):
        yield None
        return
    import servers

    servers.end_servers_on_sigterm()
    extra = (*DURABLE, f"--innodb-buffer-pool-size={options.buffer_pool}")
    with servers.running(options.engine, extra=extra) as server:
        os.environ["DATABASE_URL"] = server.url
        yield server.pid


def _server_pid(pid: int | None) -> int | None:
    if pid is not None:
        return pid
    path = Path(str(_rows(SMALL, "SELECT @@pid_file")[0][0]))
    return int(path.read_text()) if path.is_absolute() and path.exists() else None


def _cpu_seconds(pid: int | None) -> float | None:
    """Return the user and system time of a process."""
    if pid is None:
        return None
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _resident_mb(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1_048_576


def _counters() -> dict[str, int]:
    """Return the server's counters: statements, and rows that the storage engine passed to the SQL layer."""
    rows = _rows(SMALL, "SHOW GLOBAL STATUS WHERE Variable_name = 'Questions' OR Variable_name LIKE 'Handler_read%'")
    found = {name: int(value) for name, value in rows}
    return {"questions": found.pop("Questions"), "rows": sum(found.values())}


def _history() -> int:
    """Return the number of transactions that purge has not processed yet."""
    rows = _rows(SMALL, "SELECT count FROM information_schema.innodb_metrics WHERE name = 'trx_rseg_history_len'")
    return int(rows[0][0]) if rows else -1


# -- SQL ----------------------------------------------------------------------


def _rows(alias: str, sql: str, parameters: Iterable[Any] = ()) -> list[tuple[Any, ...]]:
    from django.db import connections

    with connections[alias].cursor() as cursor:
        # Without parameters, the driver does not interpret percent signs.
        cursor.execute(sql, tuple(parameters) or None)
        return list(cursor.fetchall()) if cursor.description else []


def _create_database(alias: str) -> None:
    from django.db import connections

    connection = connections[alias]
    with connection._nodb_cursor() as cursor:
        cursor.execute(f"CREATE DATABASE IF NOT EXISTS {connection.settings_dict['NAME']} CHARACTER SET utf8mb4")


def _make_numbers(alias: str) -> None:
    """Create a table with the numbers 0 to 999, for cross joins."""
    _rows(alias, "CREATE TABLE IF NOT EXISTS scale_numbers (n INT PRIMARY KEY)")
    _rows(alias, f"INSERT IGNORE INTO scale_numbers VALUES {', '.join(f'({number})' for number in range(1000))}")


def _empty(alias: str) -> None:
    from tests.conftest import QUEUE_MODELS

    for model in QUEUE_MODELS:
        _rows(alias, f"TRUNCATE TABLE {model._meta.db_table}")


def _fill_log(alias: str, topic: str, count: int, keys: int) -> tuple[int, int]:
    """Insert messages into the log, as the sequencer would. Return the first and the last offset."""
    first = int(_rows(alias, "SELECT COALESCE(MAX(`offset`), 0) + 1 FROM queue_messages")[0][0])
    number = f"{first} + b.n * 1000 + a.n"
    done = 0
    while done < count:
        piece = min(FILL, count - done)
        _rows(
            alias,
            "INSERT INTO queue_messages (`offset`, topic, partition_key, id, payload, created_at, published_at) "
            f"SELECT {number} + {done}, %s, CONCAT('k', ({number} + {done}) %% {keys}), "
            f"LPAD({number} + {done}, 20, '0'), REPEAT('x', {PAYLOAD}), x.now, x.now "
            "FROM (SELECT ROUND(UNIX_TIMESTAMP(NOW(3)) * 1000) AS now) x STRAIGHT_JOIN scale_numbers b "
            f"STRAIGHT_JOIN scale_numbers a WHERE b.n < {FILL // 1000} AND b.n * 1000 + a.n < {piece}",
            (topic,),
        )
        done += piece
    last = first + count - 1
    _rows(alias, "REPLACE INTO queue_sequencer (id, last_offset, sequenced_at) VALUES (1, %s, 0)", (last,))
    return first, last


def _fill_states(alias: str, group: str, topic: str, *, acked: bool) -> None:
    """Insert a state row for every message of a topic: settled, or in a long backoff."""
    _rows(
        alias,
        "INSERT INTO queue_delivery_state (consumer_group, topic, partition_key, message_offset, acked, "
        "invisible_until, retry_count, delivered_at) SELECT %s, topic, partition_key, `offset`, %s, "
        "published_at + 86400000, 1, published_at FROM queue_messages WHERE topic = %s",
        (group, acked, topic),
    )


def _fill_offsets(alias: str, group: str, topic: str, acked: str, claimed: str) -> None:
    _rows(
        alias,
        "INSERT INTO queue_offsets (consumer_group, topic, partition_key, offset_acked, offset_claimed) "
        f"SELECT %s, topic, partition_key, {acked}, {claimed} FROM queue_messages WHERE topic = %s "
        "GROUP BY topic, partition_key",
        (group, topic),
    )


def _analyze(alias: str) -> None:
    from tests.conftest import QUEUE_MODELS

    for model in QUEUE_MODELS:
        _rows(alias, f"ANALYZE TABLE {model._meta.db_table}")


# -- subscriber processes -----------------------------------------------------


def _start(topic: str, mode: str, *, alias: str = SMALL, messages: int = 0) -> subprocess.Popen[bytes]:
    command = [sys.executable, __file__, "--worker", topic, mode, str(messages), "--alias", alias]
    output = subprocess.PIPE if messages else subprocess.DEVNULL
    return subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.DEVNULL)


def _work(options: argparse.Namespace) -> None:
    """Run ``runsubscriber`` with one handler. With a limit, print the rate and the memory at the end."""
    import django

    django.setup()
    from django.core.management import call_command

    from django_mysqlqueue import subscriber

    topic, mode, messages = options.worker
    times: list[float] = []

    def note(delivery):  # type: ignore[no-untyped-def]
        times.append(time.monotonic())

    subscriber(topic, group=GROUPS[mode], mode=mode)(note)
    limit = ["--max-messages", messages] if int(messages) else []
    with contextlib.redirect_stdout(sys.stderr):
        call_command("runsubscriber", "--topic", topic, "--database", options.alias, "--verbosity", "0", *limit)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    rate = (len(times) - 1) / (times[-1] - times[0])
    print(json.dumps({"messages": len(times), "per_second": round(rate), "peak_rss_mb": round(peak, 1)}))


def _subscribe(topic: str, mode: str, alias: str, messages: int) -> dict[str, Any]:
    """Handle a number of messages with a subscriber process. Return its rate and memory."""
    process = _start(topic, mode, alias=alias, messages=messages)
    output, _ = process.communicate(timeout=600)
    return dict(json.loads(output))


def _end(processes: Iterable[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        process.send_signal(signal.SIGKILL)
        process.wait()


# -- idle load ----------------------------------------------------------------


def idle(options: argparse.Namespace, pid: int | None) -> list[dict[str, Any]]:
    """Measure idle subscribers of an ordered group, without messages or with one message in backoff per partition."""
    from django_mysqlqueue.service import groups
    from django_mysqlqueue.service.refs import GroupRef

    pid = _server_pid(pid)
    found = []
    _say("idle", "partitions", "processes", "queries/s", "rows/s", "server CPU %", "client CPU %", "RSS MB", "settled")
    for partitions in options.partitions:
        for state in ("drained", "waiting"):
            _empty(SMALL)
            groups.register(SMALL, GroupRef("o", "idle"), mode="ordered", start="earliest")
            _fill_log(SMALL, "idle", partitions, partitions)
            settled = state == "drained"
            _fill_offsets(SMALL, "o", "idle", "MAX(`offset`)" if settled else "0", "MAX(`offset`)")
            if not settled:
                _fill_states(SMALL, "o", "idle", acked=False)
            _analyze(SMALL)
            workers: list[subprocess.Popen[bytes]] = []
            try:
                for count in sorted(options.processes):
                    workers += [_start("idle", "ordered") for _ in range(count - len(workers))]
                    balanced = _await_shares(count, 0 if settled else partitions)
                    # Wait until the initial scan is over and the polls have reached their longest interval.
                    time.sleep(options.settle)
                    row = {"state": state, "partitions": partitions, "processes": count, "balanced": balanced}
                    row |= _measure_idle(options.seconds, pid, workers)
                    found.append(row)
                    _say(*row_of(row))
            finally:
                _end(workers)
    return found


def row_of(row: dict[str, Any]) -> list[Any]:
    names = ("state", "partitions", "processes", "queries", "rows", "server_cpu", "client_cpu", "rss_mb", "balanced")
    return [row[name] for name in names]


def _await_shares(processes: int, leases: int) -> bool:
    """Wait until all subscribers have heartbeats and equal shares. Return False after three minutes."""
    deadline = time.monotonic() + 180
    while time.monotonic() < deadline:
        time.sleep(1)
        beating = _rows(SMALL, "SELECT COUNT(*) FROM queue_subscriber_heartbeats")[0][0]
        owned = [
            count
            for (count,) in _rows(
                SMALL, "SELECT COUNT(*) FROM queue_partition_leases WHERE leased_by <> '' GROUP BY leased_by"
            )
        ]
        fair = sum(owned) == leases and (not leases or max(owned) <= -(-leases // processes))
        if beating == processes and fair:
            return True
    return False


def _measure_idle(seconds: float, pid: int | None, workers: list[subprocess.Popen[bytes]]) -> dict[str, Any]:
    def read() -> tuple[float, dict[str, int], float, float]:
        clients = sum(_cpu_seconds(worker.pid) or 0 for worker in workers)
        return time.monotonic(), _counters(), _cpu_seconds(pid) or 0.0, clients

    assert all(worker.poll() is None for worker in workers), "a subscriber has exited"
    began, before, server, clients = read()
    time.sleep(seconds)
    ended, after, server_after, clients_after = read()
    took = ended - began
    return {
        "queries": round((after["questions"] - before["questions"]) / took, 1),
        "rows": round((after["rows"] - before["rows"]) / took),
        "server_cpu": round((server_after - server) / took * 100, 2),
        "client_cpu": round((clients_after - clients) / took * 100, 2),
        "rss_mb": round(statistics.median(_resident_mb(worker.pid) for worker in workers), 1),
    }


# -- a subscriber's poll, statement by statement ------------------------------


@dataclass
class Case:
    """A group in one of the databases, on which this process performs the steps of a subscriber's poll."""

    name: str
    base: str
    alias: str
    topic: str
    mode: str
    keys: list[str]
    times: dict[str, list[float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        from django_mysqlqueue.service import groups, heartbeats, leasing, log, watermarks
        from django_mysqlqueue.service.claims import Claimant
        from django_mysqlqueue.service.refs import GroupRef
        from django_mysqlqueue.sql.session import Session

        self.ref = GroupRef(GROUPS[self.mode], self.topic)
        self.session = Session(self.alias)
        groups.register(self.alias, self.ref, mode=self.mode, start="earliest")
        self.claimant = Claimant(self.ref, "bench:1", 5, 60_000 if self.mode == "shared" else None)
        heartbeats.beat(self.alias, "bench:1", [self.ref], {})
        watermarks.create_missing(self.alias, self.ref, self.keys)
        if self.mode == "ordered":
            leasing.acquire(self.alias, self.ref, "bench:1", self.keys, lease_ms=30_000)
        self.tail = log.end_of_log(self.session)

    def timed(self, step: str, action: Callable[[], Any]) -> Any:
        began = time.perf_counter()
        result = action()
        self.times.setdefault(step, []).append((time.perf_counter() - began) * 1000)
        return result

    def turn(self) -> None:
        """Publish, sequence, claim and settle a batch, so that the size of the backlog does not change."""
        from django_mysqlqueue import Message, publish_many
        from django_mysqlqueue.service import claiming, leasing, payloads, polling, sequencing, settling
        from django_mysqlqueue.service.claims import Want
        from django_mysqlqueue.service.deliveries import Action, Settlement

        each = max(1, BATCH // len(self.keys))
        wants = [Want(key, look_at=each) for key in self.keys]
        messages = [Message("x" * PAYLOAD, key=self.keys[number % len(self.keys)]) for number in range(BATCH)]
        self.timed("publish", lambda: publish_many(self.topic, messages, using=self.alias))
        self.timed("look", lambda: polling.poll(self.session))
        self.timed("sequence", lambda: sequencing.sequence(self.alias))
        self.tail = self.timed("news", lambda: polling.read_news(self.session, self.tail, limit=2000)).tail
        max_due = 0
        if self.mode == "shared":
            due = self.timed("next due", lambda: polling.next_due(self.session, [self.ref]))
            # As a subscriber that found due messages, even if another one claims them first.
            max_due = BATCH if due else 0
        claim = self.timed(
            "claim",
            lambda: claiming.claim(
                self.alias, claiming.ClaimRequest(self.claimant, wants, token=claiming.new_token(), max_due=max_due)
            ),
        )
        assert len(claim.deliveries) == BATCH, f"{self.name}: {len(claim.deliveries)} claimed"
        self.timed("read", lambda: payloads.read(self.alias, [one.offset for one in claim.deliveries]))
        acks = [Settlement(delivery, Action.ACK) for delivery in claim.deliveries]
        shared = self.mode == "shared"
        self.timed("flush", lambda: settling.flush(self.alias, self.ref, acks, max_attempts=5, shared=shared))
        if self.mode == "ordered":
            self.timed("tick", lambda: leasing.read(self.session, [self.ref], 30_000))

    def housekeeping(self) -> None:
        """Do a part of the housekeeping that subscribers do every minute."""
        from django_mysqlqueue.service import leasing, partitions, retention
        from django_mysqlqueue.service.retention import Checkpoint

        self.timed("find work", lambda: leasing.find_work(self.session, self.ref, after=None, limit=500))
        self.timed("collect", lambda: retention.collect_step(self.alias, Checkpoint(self.topic)))
        if self.mode == "shared":
            self.timed(
                "sweep",
                lambda: partitions.in_state(self.session, self.ref, after=None, limit=500),
            )

    def forget_times(self) -> None:
        self.times = {}


def claims(options: argparse.Namespace, pid: int | None) -> dict[str, Any]:
    """Compare a small backlog with a large one, and with settled rows after an unsettled one."""
    began = time.monotonic()
    for alias, many in ((SMALL, options.small), (LARGE, options.messages)):
        _empty(alias)
        _fill_log(alias, "log", many, options.keys)
        _fill_stuck(alias, 0 if alias == SMALL else options.acked, options.small)
        _analyze(alias)
    _say(f"Filled the tables in {time.monotonic() - began:.0f} s")
    keys = [f"k{number}" for number in range(options.keys)]
    cases = []
    for mode in GROUPS:
        cases.append(Case(f"small {mode}", f"small {mode}", SMALL, "log", mode, keys))
        cases.append(Case(f"backlog {mode}", f"small {mode}", LARGE, "log", mode, keys))
        cases.append(Case(f"hole {mode}", f"hole {mode}", SMALL, "stuck", mode, ["k0"]))
        cases.append(Case(f"stuck {mode}", f"hole {mode}", LARGE, "stuck", mode, ["k0"]))
    warm = max(3, options.rounds // 10)
    for number in range(warm + options.rounds):
        if number == warm:
            for case in cases:
                case.forget_times()
        # Reverse the order in every second round, because the second case finds the server's caches warm.
        for case in cases if number % 2 else cases[::-1]:
            case.turn()
            if number % 5 == 0:
                case.housekeeping()
    result = {"steps": _compare(cases), "subscribers": []}
    _say("subscriber", "per second", "peak RSS MB")
    for case in cases:
        heartbeat = "DELETE FROM queue_subscriber_heartbeats"  # deregister "bench:1"
        _rows(case.alias, heartbeat)
        row = {"case": case.name} | _subscribe(case.topic, case.mode, case.alias, options.small // 2)
        result["subscribers"].append(row)
        _say(row["case"], row["per_second"], row["peak_rss_mb"])
    return result


def _fill_stuck(alias: str, acked: int, above: int) -> None:
    """Fill one partition: an unsettled message, settled ones after it, and new ones above the group's position."""
    first, last = _fill_log(alias, "stuck", 1 + acked, 1)
    for group in GROUPS.values():
        _fill_offsets(alias, group, "stuck", f"{first} - 1", f"{last}")
        _fill_states(alias, group, "stuck", acked=True)
        _rows(
            alias,
            "UPDATE queue_delivery_state SET acked = 0 WHERE consumer_group = %s AND topic = 'stuck' "
            "AND partition_key = 'k0' AND message_offset = %s",
            (group, first),
        )
    _fill_log(alias, "stuck", above, 1)


def _compare(cases: list[Case]) -> list[dict[str, Any]]:
    """Return medians in milliseconds, and their ratios to the base case."""
    by_name = {case.name: case for case in cases}
    found = []
    _say("case", "step", "median ms", "p95 ms", "ratio")
    for case in cases:
        for step, times in case.times.items():
            base = statistics.median(by_name[case.base].times[step])
            median = statistics.median(times)
            row = {
                "case": case.name,
                "step": step,
                "median_ms": round(median, 3),
                "p95_ms": round(sorted(times)[int(len(times) * 0.95)], 3),
                "ratio": None if case.base == case.name else round(median / base, 2),
            }
            found.append(row)
            _say(*row.values())
    return found


# -- purge lag ----------------------------------------------------------------


def snapshot(options: argparse.Namespace, pid: int | None) -> dict[str, Any]:
    """Measure polls without pauses, before and while a snapshot is held, on one partition and on several."""
    from django.db import connections

    _empty(SMALL)
    keys = [f"k{number}" for number in range(options.keys)]
    cases = []
    for mode in GROUPS:
        for topic, chosen in (("hot", ["k0"]), ("wide", keys)):
            _fill_log(SMALL, topic, 1000, len(chosen))
            cases.append(Case(f"{topic} {mode}", "", SMALL, topic, mode, chosen))
    _analyze(SMALL)

    def busy(seconds: float) -> dict[str, dict[str, float]]:
        for case in cases:
            case.forget_times()
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            for case in cases:
                case.turn()
        return {
            case.name: {step: round(statistics.median(times), 3) for step, times in case.times.items()}
            for case in cases
        }

    busy(5)
    before = busy(10)
    holder = connections[SMALL].copy("holder")
    periods = []
    try:
        with holder.cursor() as cursor:
            cursor.execute("SET SESSION TRANSACTION ISOLATION LEVEL REPEATABLE READ")
            cursor.execute("START TRANSACTION WITH CONSISTENT SNAPSHOT")
            cursor.execute("SELECT COUNT(*) FROM queue_sequencer")
        began = time.monotonic()
        while time.monotonic() - began < options.minutes * 60:
            medians = busy(min(30.0, options.minutes * 60))
            periods.append({"held_s": round(time.monotonic() - began), "history": _history(), "medians": medians})
        last = periods[-1]["medians"]
        ratios = {
            case.name: {step: round(last[case.name][step] / ms, 2) for step, ms in before[case.name].items()}
            for case in cases
        }
        during = [{"case": case.name} | _subscribe(case.topic, case.mode, SMALL, 800) for case in cases]
    finally:
        holder.close()
    _say("case", "step", "before ms", "last ms", "ratio")
    for case in cases:
        for step, ms in before[case.name].items():
            _say(case.name, step, ms, last[case.name][step], ratios[case.name][step])
    return {"before": before, "periods": periods, "ratios": ratios, "subscribers": during}


def _say(*columns: Any) -> None:
    print("  ".join(f"{column!s:>14}" for column in columns), file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""Measure the response time of every page of the dashboard on a large queue.

    python benchmarks/dashboard.py --engine mariadb        # a private server with full durability
    python benchmarks/dashboard.py --engine mysql --messages 1000000

It fills the log (10 million messages), delivery rows (a million settled ones after an unsettled message), partitions
(10,000 per group, and a million of a topic with one message in each), dead letters, recorded deliveries, results of
jobs, recurring schedules, 100,000 retrying messages, then requests each page with Django's test client. JSON goes to
stdout, a table to stderr: the median, the minimum, the maximum, the CPU time of a request (Python and server together),
the number of queries, the time spent in SQL, and the number of rows and index entries that the server has read. The CPU
time hardly depends on other work of the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]
os.environ.setdefault("DJANGO_SETTINGS_MODULE", "tests.settings")

PLACE = "/admin/django_mysqlqueue/dashboard/"
GROUPS = {"billing": "ordered", "search": "ordered", "mail": "shared"}
TOPIC, BUSY, MANY = "orders", "clicks", "devices"
JOBS = "jobs.default"
FILL = 100_000
SHARED = ", read by another viewer"
"""The end of the names of pages that are requested while the overview is shared; otherwise each request reads it."""


def main() -> None:
    options = _options()
    import servers

    servers.end_servers_on_sigterm()
    extra = (
        "--innodb-flush-log-at-trx-commit=1",
        "--sync-binlog=1",
        f"--innodb-buffer-pool-size={options.buffer_pool}",
    )
    with servers.running(options.engine, extra=extra) as server:
        os.environ["DATABASE_URL"] = server.url
        import django
        from django.conf import settings

        settings.ROOT_URLCONF = "benchmarks.dashboard_urls"
        settings.TASKS = {"default": {"BACKEND": "django_mysqlqueue.tasks.MySQLQueueBackend", "QUEUES": ["default"]}}
        settings.ALLOWED_HOSTS = ["testserver"]
        django.setup()
        from django.core.management import call_command

        from benchmarks import common, scale

        scale._create_database("default")
        call_command("migrate", verbosity=0)
        scale._make_numbers("default")
        began = time.monotonic()
        places = _fill(options)
        _say(f"Filled the tables in {time.monotonic() - began:.0f} s")
        result = {"benchmark": "dashboard", "environment": common.environment(), "options": vars(options)}
        print(json.dumps({**result, "pages": _measure(options, places, server.pid)}))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--engine", choices=("mariadb", "mysql"), default="mariadb", help="server (default: mariadb)")
    add("--buffer-pool", default="1G", help="buffer pool, smaller than the log (default: 1G)")
    add("--messages", type=int, default=10_000_000, help="number of messages in the log (default: 10000000)")
    add("--states", type=int, default=1_000_000, help="settled delivery rows after an unsettled one (default: 1000000)")
    add("--partitions", type=int, default=10_000, help="number of partitions per group (default: 10000)")
    add("--keys", type=int, default=1_000_000, help="number of partitions of another topic (default: 1000000)")
    add("--jobs", type=int, default=1_000_000, help="number of results of jobs (default: 1000000)")
    add("--schedules", type=int, default=50, help="number of recurring schedules (default: 50)")
    add("--letters", type=int, default=20_000, help="number of dead letters (default: 20000)")
    add("--rounds", type=int, default=15, help="number of requests per page (default: 15)")
    add("--only", metavar="NAME", nargs="+", default=[""], help="only pages whose names begin with one of these")
    return parser.parse_args()


def _fill(options: argparse.Namespace) -> dict[str, int]:
    """Fill the log, the groups' positions, delivery rows and dead letters. Return offsets for the pages."""
    from benchmarks.scale import _analyze, _fill_log, _fill_offsets, _rows
    from django_mysqlqueue.service import groups, leasing, rollups
    from django_mysqlqueue.service.refs import GroupRef

    began = time.monotonic()

    def done(part: str) -> None:
        nonlocal began
        _say(f"{part}: {time.monotonic() - began:.0f} s")
        began = time.monotonic()

    refs = [GroupRef(group, TOPIC) for group in GROUPS]
    stuck = GroupRef("stuck", BUSY)
    for ref in refs:
        groups.register("default", ref, mode=GROUPS[ref.group], start="earliest")
    groups.register("default", stuck, mode="ordered", start="earliest")
    first, _last = _fill_log("default", TOPIC, options.messages - options.states, options.partitions)
    done("log")
    for ref in refs:
        # A tenth of the partitions has a backlog.
        low = f"CASE WHEN partition_key LIKE '%%7' THEN MAX(`offset`) - {options.partitions * 3} ELSE MAX(`offset`) END"
        _fill_offsets("default", ref.group, TOPIC, low, low)
    done("positions")
    head, _ = _fill_log("default", BUSY, options.states, 1)
    _fill_offsets("default", stuck.group, BUSY, "MIN(`offset`) - 1", "MAX(`offset`)")
    _rows(
        "default",
        "INSERT INTO queue_delivery_state (consumer_group, topic, partition_key, message_offset, acked, "
        "invisible_until, retry_count, delivered_at, last_error) SELECT 'stuck', topic, partition_key, `offset`, "
        "`offset` > %s, published_at + 86400000, 3, published_at, 'ValueError: no' FROM queue_messages "
        "WHERE topic = %s",
        (head, BUSY),
    )
    failing = GroupRef("failing", BUSY)
    groups.register("default", failing, mode="ordered", start="earliest")
    _fill_offsets("default", failing.group, BUSY, "MIN(`offset`) - 1", "MAX(`offset`)")
    _rows(
        "default",
        "INSERT INTO queue_delivery_state (consumer_group, topic, partition_key, message_offset, acked, "
        "invisible_until, retry_count, delivered_at, last_error) SELECT 'failing', topic, partition_key, `offset`, 0, "
        "published_at + 86400000, 3, published_at, CONCAT('Traceback (most recent call last):\\n', "
        "REPEAT('  File shop.py\\n', 100), ELT(`offset` %% 3 + 1, 'ValueError', 'KeyError', 'OSError'), ': ', "
        "`offset`) FROM queue_messages WHERE topic = %s LIMIT 100000",
        (BUSY,),
    )
    done("delivery rows")
    _fill_keys(options.keys)
    done("many keys")
    _fill_jobs(options.jobs)
    _fill_schedules(options.schedules)
    done("jobs and schedules")
    letter, _ = _fill_log("default", f"{TOPIC}_dlq", options.letters, 100)
    _rows(
        "default",
        "UPDATE queue_messages SET failed_group = 'billing', original_topic = %s, original_offset = %s, "
        "original_id = id, failed_at = published_at, failure_count = 5, "
        "last_error = CONCAT('Traceback (most recent call last):\\n  …\\nValueError: case ', `offset` %% 20) "
        "WHERE topic = %s",
        (TOPIC, first, f"{TOPIC}_dlq"),
    )
    done("dead letters")
    _rows(
        "default",
        "INSERT INTO queue_delivery_events (consumer_group, topic, partition_key, message_offset, attempt, outcome, "
        "delivered_at, settled_at, handled_ms, settled_by, error) SELECT 'billing', topic, partition_key, `offset`, 1, "
        "'failed', published_at, published_at, 5, 'host:1', 'ValueError: no' FROM queue_messages "
        "WHERE topic = %s AND partition_key < 'k2' LIMIT 1000000",
        (TOPIC,),
    )
    done("recorded deliveries")
    _rows(
        "default",
        "INSERT INTO queue_outbox (topic, partition_key, payload, deliver_at) SELECT %s, 'k1', '1', "
        "published_at + 86400000 + `offset` FROM queue_messages WHERE topic = %s LIMIT 100000",
        (TOPIC, BUSY),
    )
    _rows(
        "default",
        "INSERT INTO queue_operations (action, consumer_group, topic, actor, detail, reason, changed, started_at, "
        "ended_at) SELECT 'pause', 'billing', topic, 'ada', 'at night', 'the warehouse moves', 0, published_at, "
        "published_at FROM queue_messages WHERE topic = %s LIMIT 100000",
        (BUSY,),
    )
    keys = [f"k{number}" for number in range(options.partitions)]
    for number, ref in enumerate(refs[:2]):
        for start in range(0, len(keys), 1000):
            leasing.acquire("default", ref, f"host:{number}", keys[start : start + 1000], lease_ms=30_000)
    for ref in refs:
        tally = rollups.Tally(failed=3)
        for _place in range(1000):
            tally.acked(20)
        rollups.add("default", {ref: tally})
    # What the charts read: six hours of minutes and a week of hours, of many groups.
    columns = "consumer_group, topic, acked, failed, backlog, oldest_ms, entered, entered_minutes, latency_100ms"
    for grain, number in ((rollups.MINUTE, 360), (rollups.HOUR, 168)):
        _rows(
            "default",
            f"INSERT INTO queue_rollups (grain, bucket_at, {columns}) SELECT %s, "
            "FLOOR(UNIX_TIMESTAMP() / %s - n.n) * %s, CASE WHEN g.n < 3 THEN ELT(g.n + 1, 'billing', 'search', 'mail') "
            "ELSE CONCAT('group', g.n) END, %s, 600, 3, 1000 + n.n, 5000, 600, 1, 600 "
            "FROM scale_numbers n JOIN scale_numbers g WHERE n.n > 0 AND n.n < %s AND g.n < 100",
            (grain, grain, grain * 1000, TOPIC, number),
        )
    done("outbox, operations, leases and rollups")
    _analyze("default")
    done("statistics")
    return {"message": first, "stuck": head, "letter": letter}


def _fill_keys(number: int) -> None:
    """Fill a topic with one message per key. Its group has handled each second one, but none of the last tenth."""
    from benchmarks.scale import _fill_log, _rows
    from django_mysqlqueue.service import groups, leasing
    from django_mysqlqueue.service.refs import GroupRef

    ref = GroupRef("sensors", MANY)
    groups.register("default", ref, mode="ordered", start="earliest")
    first, _ = _fill_log("default", MANY, number, number)
    _rows(
        "default",
        "INSERT INTO queue_offsets (consumer_group, topic, partition_key, offset_acked, offset_claimed) "
        "SELECT %s, topic, partition_key, `offset` - `offset` %% 2, `offset` - `offset` %% 2 FROM queue_messages "
        "WHERE topic = %s AND `offset` < %s",
        (*ref, first + number - number // 10),
    )
    # _fill_log names the keys by the remainders of the offsets.
    keys = [f"k{place % number}" for place in range(first, first + min(number, 20_000))]
    for start in range(0, len(keys), 1000):
        leasing.acquire("default", ref, f"host:{start // 1000 % 20}", keys[start : start + 1000], lease_ms=30_000)


def _fill_jobs(number: int) -> None:
    """Insert results of jobs of 50 tasks. Most have succeeded; some have failed, are ready, or run."""
    from benchmarks.scale import FILL, _rows

    for start in range(0, number, FILL):
        place = f"({start} + b.n * 1000 + a.n)"
        _rows(
            "default",
            "INSERT INTO queue_job_results (id, backend, queue_name, task_path, arguments, status, enqueued_at, "
            "started_at, last_attempted_at, finished_at, return_value, errors, worker_ids) "
            f"SELECT CONCAT('job-', LPAD({place}, 10, '0')), 'default', 'default', "
            f"CONCAT('shop.tasks.task', {place} %% 50), '{{\"args\": [1], \"kwargs\": {{}}}}', "
            f"CASE WHEN {place} < 1000 THEN 'READY' WHEN {place} %% 100000 = 77777 THEN 'RUNNING' "
            f"WHEN {place} %% 100 = 1 THEN 'FAILED' ELSE 'SUCCESSFUL' END, x.now - {place}, "
            f"CASE WHEN {place} < 1000 THEN 0 ELSE x.now - {place} + 5 END, "
            f"CASE WHEN {place} < 1000 THEN 0 ELSE x.now - {place} + 5 END, "
            f"CASE WHEN {place} < 1000 OR {place} %% 100000 = 77777 THEN 0 ELSE x.now - {place} + 50 END, 'null', "
            f"CASE WHEN {place} %% 100 = 1 THEN "
            'CONCAT(\'{"exception_class_path": "builtins.ValueError", "traceback": "ValueError: no"}\', CHAR(10)) '
            "ELSE '' END, CONCAT('host:1', CHAR(10)) "
            "FROM (SELECT ROUND(UNIX_TIMESTAMP(NOW(3)) * 1000) AS now) x STRAIGHT_JOIN scale_numbers b "
            f"STRAIGHT_JOIN scale_numbers a WHERE b.n < {FILL // 1000} AND b.n * 1000 + a.n < %s",
            (min(FILL, number - start),),
        )


def _fill_schedules(number: int) -> None:
    """Register schedules of tasks, with results of their last runs."""
    from django_mysqlqueue.models import JobResult, Schedule
    from django_mysqlqueue.names.ids import run_id
    from django_mysqlqueue.schedules.definitions import Definition
    from django_mysqlqueue.schedules.timetables import timetable
    from django_mysqlqueue.service import schedules

    every = timetable(None, 3600, None, "UTC")
    path = "shop.tasks.task1"
    payload = {"task": path, "args": [], "kwargs": {}}
    definition = Definition(every, JOBS, payload, task=path, backend="default")
    names = [f"schedule-{place}" for place in range(number)]
    schedules.register("default", dict.fromkeys(names, definition))
    JobResult.objects.bulk_create(
        JobResult(
            id=run_id(one.name, one.last_tick - place * 3_600_000),
            backend="default",
            queue_name="default",
            task_path=path,
            arguments="{}",
            status="SUCCESSFUL",
            enqueued_at=one.last_tick - place * 3_600_000,
            started_at=one.last_tick - place * 3_600_000,
            last_attempted_at=one.last_tick - place * 3_600_000,
            finished_at=one.last_tick - place * 3_600_000 + 500,
        )
        for one in Schedule.objects.all()
        for place in range(10)
    )


def _measure(options: argparse.Namespace, places: dict[str, int], server: int) -> list[dict[str, Any]]:
    from django.contrib.auth.models import User
    from django.db import connection, reset_queries
    from django.test import Client
    from django.test.utils import CaptureQueriesContext
    from django.utils import timezone

    from benchmarks import scale
    from django_mysqlqueue.admin.shared import SharedReads
    from django_mysqlqueue.names.ids import new_message_id
    from django_mysqlqueue.service import heartbeats
    from django_mysqlqueue.service.refs import GroupRef

    user = User.objects.create_superuser("admin", password="admin")  # noqa: S106
    client = Client()
    client.force_login(user)
    group = {"group": "billing", "topic": TOPIC}
    many = {"group": "sensors", "topic": MANY}
    letters = {"topic": f"{TOPIC}_dlq"}
    pages: list[tuple[str, str, dict[str, Any]]] = [
        ("overview", "", {}),
        ("overview" + SHARED, "", {}),
        ("overview, a day", "", {"span": "day"}),
        ("group", "group/", group),
        *((f"group, {span}", "group/", {**group, "range": span}) for span in ("15m", "1h", "6h", "24h", "7d")),
        ("group, shared", "group/", {"group": "mail", "topic": TOPIC}),
        ("group, first message stalled", "group/", {"group": "stuck", "topic": BUSY}),
        ("group, a million partitions", "group/", many),
        ("offsets", "offsets/", {}),
        ("offsets, of a group", "offsets/", group),
        ("offsets, furthest behind", "offsets/", {**group, "order": "behind"}),
        ("offsets, first message stalled", "offsets/", {"group": "stuck", "topic": BUSY}),
        ("offsets, a million partitions", "offsets/", many),
        ("offsets, a million partitions, furthest behind", "offsets/", {**many, "order": "behind"}),
        ("offsets, a million partitions, filtered by key", "offsets/", {**many, "prefix": "k99"}),
        ("offsets, a million partitions, of one owner", "offsets/", {**many, "owner": "host:7"}),
        (
            "offsets, a million partitions, a later page",
            "offsets/",
            {**many, "after": json.dumps(["sensors", MANY, "k99"])},
        ),
        ("offsets, a million partitions, without an owner", "offsets/", {**many, "unowned": "1"}),
        ("in flight", "inflight/", {}),
        ("in flight, of a group", "inflight/", group),
        ("dead letters", "deadletters/", {}),
        ("dead letters, errors of a group", "deadletters/", {"group": "failing", "topic": BUSY, "state": "retrying"}),
        ("dead letters, by error", "deadletters/", {**letters, "error": "case 7"}),
        ("dead letters, an error", "deadletters/", {**letters, "kind": "ValueError: case <number>"}),
        ("dead letter", "deadletter/", {"offset": places["letter"]}),
        ("scheduled", "scheduled/", {}),
        ("scheduled, of a topic", "scheduled/", {"topic": TOPIC}),
        ("scheduled, by id", "scheduled/", {"topic": TOPIC, "id": "none"}),
        ("offsets, of an owner", "offsets/", {"owner": "host:1"}),
        ("tasks", "tasks/", {}),
        ("jobs", "jobs/", {}),
        ("jobs, failed", "jobs/", {"status": "FAILED"}),
        ("jobs, of a task", "jobs/", {"task": "shop.tasks.task7"}),
        ("jobs, failed, of a task", "jobs/", {"status": "FAILED", "task": "shop.tasks.task7"}),
        ("jobs, of a queue", "jobs/", {"topic": JOBS}),
        ("job", "job/", {"id": f"job-{options.jobs - 99:010d}"}),
        ("recurring", "recurring/", {}),
        ("messages", "messages/", {}),
        ("messages, of a topic", "messages/", {"topic": TOPIC}),
        ("messages, of a partition", "messages/", {"topic": TOPIC, "key": "k17", "keyed": "1"}),
        ("messages, by id", "messages/", {"topic": TOPIC, "id": f"{places['message'] + 5:020d}"}),
        ("messages, by id, any topic", "messages/", {"id": f"{places['message'] + 5:020d}"}),
        ("messages, an id that does not exist", "messages/", {"id": new_message_id()}),
        ("messages, far back", "messages/", {"topic": TOPIC, "before": places["message"] + 100_000}),
        ("messages, before a time", "messages/", {"time": timezone.now().replace(tzinfo=None).isoformat()}),
        ("messages, with a text", "messages/", {"topic": TOPIC, "contains": "none has it"}),
        ("messages, with a text, any topic", "messages/", {"contains": "none has it"}),
        ("messages, a million partitions", "messages/", {"topic": MANY}),
        ("operations", "operations/", {}),
        ("operations, of one user", "operations/", {"by": "nobody"}),
        ("operations, of a group", "operations/", group),
        ("operations, interrupted", "operations/", {"state": "interrupted"}),
        ("message", "message/", {"offset": places["message"] + 5}),
        ("message, stalled", "message/", {"offset": places["stuck"]}),
        ("publish, preview", "do/publish/", {"topic": TOPIC, "payload": '{"n": 1}', "key": "k17"}),
        ("replay, preview", "do/replay/", {**group, "first": places["message"], "last": places["message"] + 100_000}),
        (
            "replay, over messages of other topics",
            "do/replay/",
            {**group, "first": places["stuck"], "last": places["letter"]},
        ),
        ("replay, of one partition", "do/replay/", {**group, "first": 1, "last": options.messages // 2, "key": "k17"}),
        ("seek to the end, preview", "do/seek/", {**group, "target": "latest"}),
        ("seek to the beginning, preview", "do/seek/", {**group, "target": "earliest"}),
        ("retry, preview", "do/retry/", {"group": "stuck", "topic": BUSY}),
        ("drop, preview", "do/drop/", group),
        ("redrive, preview", "do/redrive/", {**letters, "upto": places["letter"] + options.letters}),
        ("discard, preview", "do/discard/", {**letters, "error": "case 7", "upto": places["letter"] + options.letters}),
    ]
    found = []
    _say("page", "median ms", "min ms", "max ms", "CPU ms", "first ms", "queries", "SQL ms", "rows read")
    for name, path, query in (page for page in pages if page[0].startswith(tuple(options.only))):
        times, in_sql, queries = [], [], 0
        for number in range(20):  # keep the subscribers live
            refs = [*(GroupRef(one, TOPIC) for one in GROUPS), GroupRef("stuck", BUSY), GroupRef("failing", BUSY)]
            heartbeats.beat("default", f"host:{number}", refs, {"host": "host", "pid": number})
        SharedReads.SECONDS = 60.0 if name.endswith(SHARED) else 0.0
        read = _rows_read()
        cpu = time.process_time() + (scale._cpu_seconds(server) or 0)
        for _round in range(options.rounds):
            reset_queries()  # Django keeps at most 9,000 queries
            with CaptureQueriesContext(connection) as captured:
                began = time.perf_counter()
                answer = client.get(PLACE + path, query)
                times.append((time.perf_counter() - began) * 1000)
            assert answer.status_code == 200, (name, answer.status_code, answer.content[:2000])
            assert not name.endswith("preview") or b"mq-preview" in answer.content, name
            queries = len(captured)
            in_sql.append(sum(float(one["time"]) for one in captured.captured_queries) * 1000)
        row = {
            "page": name,
            "median_ms": round(statistics.median(times[1:]), 1),
            "shortest_ms": round(min(times[1:]), 1),
            "longest_ms": round(max(times[1:]), 1),
            "cpu_ms": round((time.process_time() + (scale._cpu_seconds(server) or 0) - cpu) * 1000 / options.rounds),
            "first_ms": round(times[0], 1),
            "queries": queries,
            "sql_ms": round(statistics.median(in_sql[1:])),
            "rows_read": round((_rows_read() - read) / options.rounds),
        }
        found.append(row)
        _say(*row.values())
    return found


def _rows_read() -> int:
    """Return how many rows and index entries the server has read."""
    from django.db import connection

    with connection.cursor() as cursor:
        cursor.execute("SHOW GLOBAL STATUS LIKE 'Handler\\_read%'")
        return sum(int(number) for _, number in cursor.fetchall())


def _say(*columns: Any) -> None:
    print(
        "  ".join(f"{column!s:>{36 if not place else 12}}" for place, column in enumerate(columns)),
        file=sys.stderr,
        flush=True,
    )


if __name__ == "__main__":
    main()

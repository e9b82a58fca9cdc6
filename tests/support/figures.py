"""The figures of a queue by plain SQL, by name: nothing here calls the package."""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from typing import Any

from django.db import connection

WINDOW, LATELY, HOUR, DAY, LEASE = 600_000, 1_800_000, 3_600_000, 86_400_000, 30_000
"""Milliseconds."""
UNSETTLED = """
    FROM queue_messages m
    JOIN queue_consumer_groups g ON g.topic = m.topic AND m.target_group IN ('', g.consumer_group)
    LEFT JOIN queue_offsets o ON o.consumer_group = g.consumer_group AND o.topic = m.topic
        AND o.partition_key = m.partition_key
    LEFT JOIN queue_delivery_state s ON s.consumer_group = g.consumer_group AND s.topic = m.topic
        AND s.partition_key = m.partition_key AND s.message_offset = m.`offset`
    WHERE g.consumer_group = %s AND g.topic = %s AND m.`offset` > COALESCE(o.offset_acked, g.start_offset)
        AND COALESCE(s.acked, 0) = 0
"""
DUE = "CASE WHEN deliver_at <= 0 THEN created_at ELSE deliver_at END"
KINDS = ("retrying", "dead letters", "attempts")

Figures = dict[str, Any]


def rows(sql: str, *parameters: object) -> list[tuple[Any, ...]]:
    with connection.cursor() as cursor:
        cursor.execute(sql, parameters)
        return list(cursor.fetchall())


def one(sql: str, *parameters: object) -> Any:
    """The only value of the only row."""
    ((value,),) = rows(sql, *parameters)
    return value


def last_line(error: str) -> str:
    return re.sub(r"\d+", "<number>", error.strip().splitlines()[-1])


def true_figures(now: int, retention: float | None) -> Figures:
    """Ages are in seconds. ``retention``: that of topics with groups."""
    found: Figures = {}
    refs = rows(
        "SELECT consumer_group, topic, paused, start_offset, registered_at, sought_at FROM queue_consumer_groups"
    )
    for group, topic, paused, start, *placed in refs:
        found |= _group(group, topic, start, max(placed), now) | {f"{group}/{topic} paused": bool(paused)}
    ages = {ref.removesuffix(" age"): age for ref, age in found.items() if ref.endswith(" age") and age is not None}
    for name in ("lag", "in flight", "retrying"):
        found[f"queue {name}"] = sum(number for key, number in found.items() if key.endswith(f" {name}"))
    due, since = rows(f"SELECT COUNT(*), MIN({DUE}) FROM queue_outbox WHERE deliver_at <= %s", now)[0]
    outbox_age = None if since is None else max(0, now - since) / 1000
    found |= {
        "queue age": max([*ages.values(), *([] if outbox_age is None else [outbox_age])], default=None),
        "queue dead letters": one("SELECT COUNT(*) FROM queue_messages WHERE failed_group <> ''"),
        "queue outbox": due,
        "queue outbox age": outbox_age,
        "queue scheduled": one("SELECT COUNT(*) FROM queue_outbox WHERE deliver_at > %s", now),
        "queue last offset": one("SELECT COALESCE(MAX(last_offset), 0) FROM queue_sequencer"),
        "queue refusals": one("SELECT COUNT(*) FROM queue_subscriber_heartbeats WHERE consumer_group = ''"),
    }
    return found | _topics(now, retention, ages) | _subscribers(now) | _errors(now) | _tasks(now)


def _group(group: str, topic: str, start: int, placed: int, now: int) -> Figures:
    ref, key = f"{group}/{topic}", (group, topic)
    ((lag, first),) = rows(f"SELECT COUNT(*), MIN(m.published_at) {UNSETTLED}", *key)
    due = one(
        f"SELECT MIN({DUE}) FROM queue_outbox WHERE topic = %s AND target_group IN ('', %s) AND deliver_at <= %s",
        topic,
        group,
        now,
    )
    # Publishers' transactions take the time from the server, whose clock has not been stopped.
    waits = [max(0, now - max(at, placed)) for at in (first, due) if at is not None]
    held = "FROM queue_delivery_state WHERE consumer_group = %s AND topic = %s AND acked = 0"
    dead = "FROM queue_messages WHERE topic = %s AND failed_group = %s AND original_topic = %s"
    letters = (f"{topic}_dlq", group, topic)
    live = "deregistered_at = 0 AND heartbeat_at > %s AND consumer_group = %s AND topic = %s"
    found = {
        "lag": lag,
        "age": max(waits) / 1000 if waits else None,
        "in flight": one(f"SELECT COUNT(*) {held} AND delivery_token <> 0", *key),
        "retrying": one(f"SELECT COUNT(*) {held} AND delivery_token = 0 AND retry_count > 0", *key),
        "dead letters": one(f"SELECT COUNT(*) {dead}", *letters),
        "recent dead letters": one(f"SELECT COUNT(*) {dead} AND failed_at >= %s", *letters, now - WINDOW),
        "subscribers": one(f"SELECT COUNT(*) FROM queue_subscriber_heartbeats WHERE {live}", now - LEASE, *key),
    }
    # Until subscribers have written their counts, the charts have none.
    counted = "SELECT COALESCE(SUM(failed + dead_lettered), 0) FROM queue_rollups WHERE consumer_group = %s"
    failed = (
        "SELECT COUNT(*) FROM queue_delivery_events WHERE consumer_group = %s AND topic = %s "
        "AND outcome IN ('failed', 'dead_lettered') AND settled_at >= %s"
    )
    found["failed lately"] = one(failed, *key, now - LATELY) if one(counted, group) else 0
    unsettled = {
        partition: (number, offset)
        for partition, number, offset in rows(
            f"SELECT m.partition_key, COUNT(*), MIN(m.`offset`) {UNSETTLED} GROUP BY m.partition_key", *key
        )
    }
    of_group = "WHERE consumer_group = %s AND topic = %s"
    places = {
        name: place
        for name, *place in rows(
            f"SELECT partition_key, offset_acked, offset_claimed FROM queue_offsets {of_group}", *key
        )
    }
    owners = dict(rows(f"SELECT partition_key, leased_by FROM queue_partition_leases {of_group}", *key))
    ends = dict(
        rows("SELECT partition_key, MAX(`offset`) FROM queue_messages WHERE topic = %s GROUP BY partition_key", topic)
    )
    for name in {*places, *ends}:
        lag, offset = unsettled.get(name, (0, None))
        watermark, position = places.get(name, (start, start))
        found[f"partition {name}"] = (watermark, position, ends.get(name), lag, offset, owners.get(name))
    for owner, number in Counter(owners.values()).items():
        found[f"owned by {owner}"] = number
    return {f"{ref} {name}": value for name, value in found.items()}


def _topics(now: int, retention: float | None, ages: dict[str, float]) -> Figures:
    of_groups = rows("SELECT topic FROM queue_consumer_groups")
    found = {f"topic {topic} {name}": 0 for (topic,) in of_groups for name in ("messages", "bytes")}
    select = "SELECT topic, COUNT(*), AVG(size), MIN(published_at) FROM queue_messages GROUP BY topic"
    for topic, number, size, first in rows(select):
        late = {ref.split("/")[0]: age for ref, age in ages.items() if ref.endswith(f"/{topic}")}
        slowest = min(late, key=lambda group: (-late[group], group), default="")
        is_held = retention is not None and slowest and late[slowest] > retention
        found |= {
            f"topic {topic} messages": number,
            f"topic {topic} bytes": (float(size) + 350) * 1.3 * number,
            f"topic {topic} age": (now - first) / 1000,
            f"topic {topic} held by": slowest if is_held else None,
            f"topic {topic} held for": late[slowest] - retention if is_held else None,
            f"topic {topic} newest": [
                offset
                for (offset,) in rows(
                    "SELECT `offset` FROM queue_messages WHERE topic = %s ORDER BY `offset` DESC LIMIT 50", topic
                )
            ],
        }
    return found


def _subscribers(now: int) -> Figures:
    found: Figures = {}
    live, slowest = set(), []
    select = "SELECT subscriber_name, heartbeat_at, info FROM queue_subscriber_heartbeats"
    for name, at, text in rows(f"{select} WHERE deregistered_at = 0"):
        info = json.loads(text)
        held = "SELECT COUNT(*) FROM queue_delivery_state WHERE acked = 0 AND delivery_token <> 0 AND delivered_by = %s"
        took = tuple(info[key] / 1e6 for key in ("p50_us", "p95_us")) if "p50_us" in info else None
        found |= {
            f"subscriber {name} live": at > now - LEASE,
            f"subscriber {name} heartbeat": (now - at) / 1000,
            f"subscriber {name} holds": one(held, name),
            f"subscriber {name} round trip": took,
        }
        if at > now - LEASE:
            live.add(name)
            slowest += [took] if took else []
    return found | {"queue live": len(live), "queue round trip": max(slowest, default=None)}


def _errors(now: int) -> Figures:
    """Retrying messages, dead letters and failed attempts of a day by the last lines of their errors, and by key."""
    retrying = rows(
        "SELECT consumer_group, topic, last_error, partition_key FROM queue_delivery_state "
        "WHERE acked = 0 AND delivery_token = 0 AND retry_count > 0"
    )
    dead = rows(
        "SELECT failed_group, original_topic, last_error, partition_key FROM queue_messages WHERE failed_group <> ''"
    )
    attempts = rows(
        "SELECT consumer_group, topic, error, partition_key FROM queue_delivery_events "
        "WHERE outcome IN ('failed', 'dead_lettered') AND settled_at >= %s",
        now - DAY,
    )
    found: Figures = Counter()
    keys: defaultdict[str, defaultdict[str, list[int]]] = defaultdict(lambda: defaultdict(lambda: [0, 0, 0]))
    for place, failures in enumerate((retrying, dead, attempts)):
        for group, topic, error, key in failures:
            kind = f"error {group}/{topic} {last_line(error)}"
            found[f"{kind} {KINDS[place]}"] += 1
            keys[kind]["no key" if key.startswith("__p:") else key][place] += 1
    for kind, numbers in keys.items():
        ten = sorted(numbers, key=lambda key: (-sum(numbers[key][:2]), -numbers[key][2], key))[:10]
        found |= {f"{kind}, {key} {KINDS[place]}": numbers[key][place] for key in ten for place in range(3)}
    return {name: number for name, number in found.items() if number}


def _tasks(now: int) -> Figures:
    found: Figures = Counter()
    select = "SELECT task_path, status, run_after, retry_at, enqueued_at, finished_at FROM queue_job_results"
    for task, status, after, retried, enqueued, finished in rows(select):
        is_later = max(after, retried) > now
        found[f"task {task} waiting"] += status == "READY" and not is_later
        found[f"task {task} scheduled"] += status == "READY" and is_later
        found[f"task {task} running"] += status == "RUNNING"
        found[f"task {task} enqueued"] += enqueued > now - HOUR
        found[f"task {task} failed"] += status == "FAILED" and finished > now - HOUR
    return dict(found)

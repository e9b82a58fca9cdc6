"""Facts made by hand, for tests of what a report says of them."""

from __future__ import annotations

import datetime
from typing import Any

import pyarrow as pa

from pyspark_mysqlqueue.report.queries import Facts
from pyspark_mysqlqueue.tables import Group

DAY = datetime.datetime(2026, 11, 2, tzinfo=datetime.UTC)
"""A Monday."""
NAMES = (
    "topics",
    "throughput",
    "publish_latency",
    "hours",
    "days",
    "skew",
    "top_keys",
    "concentration",
    "recording",
    "settle_latency",
    "handler_time",
    "settle_latency_bounds",
    "failures",
    "dead_letters",
    "subscribers",
    "lag",
)
HOSTILE = "</script></svg><img src=x onerror=alert(1)>&\"'\u202e{{ 7*7 }}\x00\n=1+1"
SHOWN = "</script></svg><img src=x onerror=alert(1)>&\"'\\u202e{{ 7*7 }}\\u0000\\u000a=1+1"


def at(minutes: float) -> datetime.datetime:
    return DAY + datetime.timedelta(minutes=minutes)


def facts_of(
    *, chart: Any = (), latency: Any = (), trend: Any = None, retention: Any = None, groups: Any = (), **given: Any
) -> Facts:
    """Empty tables where none is given."""
    rows = {name: list(given.pop(name, [])) for name in NAMES}
    return Facts(
        **{
            "since": None,
            "until": None,
            "topics": None,
            "now": at(600),
            "with_archive": False,
            "archived": 0,
            "collected": [],
            "groups": list(groups),
            "step": 60,
            "table_step": 60,
            "lag_source": {},
            "lag_step": 60,
            "chart": list(chart),
            "latency_over_time": list(latency),
            "trend": trend,
            "retention": retention,
            "tables": {name: pa.Table.from_pylist(found) for name, found in rows.items()},
            **given,
        }
    )


def latency_row(**keys: Any) -> dict[str, Any]:
    return {**keys, "p50_ms": 20.0, "p90_ms": 90.0, "p99_ms": 1500.0, "max_ms": 90_000}


def full(text: str = "orders", *, days: int = 9) -> Facts:
    """A bit of everything, with a name of one's own for topic, group, key, error and subscriber."""
    ref = {"consumer_group": text, "topic": text}
    plain = {"consumer_group": "mail", "topic": text}
    topic = {"topic": text, "messages": 900, "bytes": 90_000, "keys": 3, "dead_letters": 2}
    by_day = [
        {"day": (DAY + datetime.timedelta(days=n)).date(), "topic": text, "messages": 100, "bytes": 10_000}
        for n in range(days)
    ]
    keys = [
        {"topic": text, "place": n, "partition_key": key, "messages": count, "bytes": 10 * count, "share": count / 900}
        for n, (key, count) in enumerate(((text, 600), ("b", 200), ("", 100)), 1)
    ]
    return facts_of(
        topics=[{**topic, "first_at": at(0), "last_at": at(days * 1440 - 1)}],
        chart=[{"at": at(n), "topic": text, "messages": 10 * (n + 1), "bytes": 1} for n in range(20)],
        throughput=[{"at": at(n), "topic": text, "messages": 10 * (n + 1), "bytes": 1} for n in range(20)],
        latency=[latency_row(at=at(n), messages=5) for n in range(20)],
        publish_latency=[latency_row(topic=text, messages=900)],
        hours=[
            {"weekday": 1, "hour": 9, "messages": 800, "days": 2},
            {"weekday": 7, "hour": 0, "messages": 100, "days": 1},
        ],
        days=by_day,
        trend={
            "days": days - 2,
            "messages_per_day": 100.0,
            "bytes_per_day": 10_000.0,
            "slope": 4.0,
            "slope_error": 1.0,
            "at_end": 112.0,
        },
        retention={text: 86_400.0, "kept": None},
        skew=[
            {
                "topic": text,
                "keys": 3,
                "messages": 900,
                "gini": 0.37,
                "top_share": 2 / 3,
                "top_1_percent": 2 / 3,
                "top_10_percent": 2 / 3,
            }
        ],
        top_keys=keys,
        concentration=[
            {"topic": text, "keys_share": n / 3, "messages_share": share}
            for n, share in ((1, 0.67), (2, 0.89), (3, 1.0))
        ],
        recording=[
            {
                **plain,
                "recorded": "failures",
                "acks_recorded": 0,
                "acks_counted": 890,
                "failures_recorded": 3,
                "failures_counted": 3,
            },
            {
                **ref,
                "recorded": "all",
                "acks_recorded": 898,
                "acks_counted": 898,
                "failures_recorded": 9,
                "failures_counted": 9,
            },
        ],
        settle_latency=[latency_row(**ref, messages=900)],
        handler_time=[latency_row(**ref, acks=898)],
        settle_latency_bounds=[
            {**plain, "acks": 890, "p50_within_ms": 25, "p90_within_ms": 100, "p99_within_ms": 2500},
            {**ref, "acks": 898, "p50_within_ms": 25, "p90_within_ms": 100, "p99_within_ms": None},
        ],
        failures=[{**ref, "error": text, "failed": 7, "lost": 0, "dead_lettered": 2, "messages": 4, "last_at": at(3)}],
        dead_letters=[
            {**ref, "error": text, "dead_letters": 2, "mean_attempts": 2.5, "first_at": at(1), "last_at": at(3)}
        ],
        subscribers=[
            {**ref, "subscriber": text, "settled": 675, "share": 0.75, "of_fair_share": 1.5},
            {**ref, "subscriber": "b", "settled": 225, "share": 0.25, "of_fair_share": 0.5},
        ],
        lag=[
            {**(ref if n % 2 else plain), "at": at(n + 1), "published": 10, "settled": 5, "lag": 5 * n}
            for n in range(20)
        ],
        lag_source={(text, text): "events", ("mail", text): "rollups"},
        groups=[Group(text, text, "ordered", 0, False, 17), Group("mail", text, "shared", 0, False, 0)],
    )

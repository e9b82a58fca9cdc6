"""Read the checks' data from the database. Runs in the main process of the soak test."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from django.db import connection

from django_mysqlqueue.inspection import EXACT, get_overview
from django_mysqlqueue.models import DeliveryState, OutboxMessage, PartitionLease, QueueMessage
from django_mysqlqueue.service import retention
from soak import plan, records
from soak.facts import Collected, DeadLetter, Entry, Evidence, Progress, Trouble

TABLES = (
    """
    CREATE TABLE soak_ledger (
        message_id VARCHAR(100) CHARACTER SET ascii PRIMARY KEY, publisher VARCHAR(60) NOT NULL,
        number BIGINT NOT NULL, partition_key VARCHAR(200) NOT NULL, scheduled BOOLEAN NOT NULL, at DOUBLE NOT NULL
    )
    """,
    """
    CREATE TABLE soak_effects (
        id BIGINT AUTO_INCREMENT PRIMARY KEY, consumer_group VARCHAR(60) NOT NULL,
        message_id VARCHAR(100) CHARACTER SET ascii NOT NULL
    )
    """,
)
MUST_BE_EMPTY = (OutboxMessage, DeliveryState, PartitionLease)
LOG = QueueMessage._meta.db_table


def rows(sql: str, parameters: Any = ()) -> list[tuple[Any, ...]]:
    with connection.cursor() as cursor:
        cursor.execute(sql, parameters)
        return list(cursor.fetchall())


def create_tables() -> None:
    with connection.cursor() as cursor:
        for statement in TABLES:
            cursor.execute(statement)


def lags() -> dict[str, int]:
    """Return the number of unsettled messages of each group, and of the rows in the outbox."""
    queue = get_overview(using="default", bounds=EXACT, lease_duration=plan.LEASE)
    names = {group.name for group in plan.GROUPS}
    found = {one.ref.group: one.lag.value for one in queue.groups if one.ref.group in names}
    return found | {"outbox": OutboxMessage.objects.count()}


def committed() -> int:
    return int(rows("SELECT COUNT(*) FROM soak_ledger")[0][0])


def is_drained() -> bool:
    return not any(model.objects.exists() for model in MUST_BE_EMPTY) and not any(lags().values())


def gather(folder: Path, progress: Sequence[Progress], troubles: Sequence[Trouble]) -> Evidence:
    effects: dict[str, Counter[str]] = {group.name: Counter() for group in plan.GROUPS if group.atomic}
    for group, message_id, count in rows(
        "SELECT consumer_group, message_id, COUNT(*) FROM soak_effects GROUP BY consumer_group, message_id"
    ):
        effects[group][message_id] = int(count)
    return Evidence(
        ledger=[
            Entry(message_id, publisher, int(number), key, bool(scheduled), float(at))
            for message_id, publisher, number, key, scheduled, at in rows(
                "SELECT message_id, publisher, number, partition_key, scheduled, at FROM soak_ledger"
            )
        ],
        transactions=records.transactions(records.publishers_file(folder)),
        steps={group.name: records.steps(records.group_file(folder, group.name)) for group in plan.GROUPS},
        effects=effects,
        dead=[
            DeadLetter(*row)
            for row in QueueMessage.objects.filter(topic=plan.DLQ).values_list(
                "original_id", "failed_group", "failure_count", "last_error"
            )
        ],
        progress=progress,
        troubles=troubles,
    )


def collect_garbage() -> Collected:
    """Run GC on an idle queue. Return the log before and after it."""
    now = float(rows("SELECT UNIX_TIMESTAMP(NOW(3)) * 1000")[0][0])
    before = _log()
    retention.collect("default")
    return Collected(now, before, _log())


def _log() -> dict[str, float]:
    return {
        message_id: float(at)
        for message_id, at in rows(f"SELECT id, published_at FROM {LOG} WHERE topic = %s", (plan.TOPIC,))
    }

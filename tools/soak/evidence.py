"""Read the checks' data from the database. Runs in the main process of the soak test."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from django.db import connections

from django_mysqlqueue.inspection import EXACT, get_overview
from django_mysqlqueue.models import DeliveryState, OutboxMessage, PartitionLease, QuarantinedMessage, QueueMessage
from django_mysqlqueue.names.rules import relayed_topic
from django_mysqlqueue.service import retention
from soak import job_plan, plan, records, schedule_plan
from soak.facts import Collected, DeadLetter, Entry, Evidence, Progress, SetAside, Trouble

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
ON_BOTH = TABLES[1:]
REFUSALS = (
    "CREATE TABLE soak_refused (message_id VARCHAR(100) CHARACTER SET ascii PRIMARY KEY)",
    f"""
    CREATE TRIGGER soak_refuses BEFORE INSERT ON {QueueMessage._meta.db_table} FOR EACH ROW
        IF NEW.topic = '{plan.REFUSED}' THEN
            SIGNAL SQLSTATE '45000' SET MESSAGE_TEXT = 'as planned';
        END IF
    """,
)
"""A log that refuses a topic, and the ids of the committed messages on it."""
MUST_BE_EMPTY = (OutboxMessage, DeliveryState, PartitionLease)
LOG = QueueMessage._meta.db_table


def rows(sql: str, parameters: Any = (), alias: str = plan.HOME) -> list[tuple[Any, ...]]:
    with connections[alias].cursor() as cursor:
        cursor.execute(sql, parameters)
        return list(cursor.fetchall())


def create_tables(more: Iterable[str] = ()) -> None:
    """Create the tables of the test.

    Args:
        more: further statements for the first database.
    """
    for alias in plan.ALIASES:
        with connections[alias].cursor() as cursor:
            for statement in (*TABLES, *REFUSALS, *more) if alias == plan.HOME else ON_BOTH:
                cursor.execute(statement)


def lags() -> dict[str, int]:
    """Return the unsettled messages of each group, those to be relayed, and those in the outboxes."""
    found = dict.fromkeys(
        ("outbox", "relay", job_plan.GROUP, schedule_plan.GROUP, *(group.name for group in plan.GROUPS)), 0
    )
    for alias in plan.ALIASES:
        queue = get_overview(using=alias, bounds=EXACT, lease_duration=plan.LEASE)
        for one in queue.groups:
            if one.ref.group in found:
                found[one.ref.group] += one.lag.value
        found["relay"] += sum(one.messages.value for one in queue.relays)
        found["outbox"] += OutboxMessage.objects.using(alias).count()
    return found


def committed() -> int:
    return int(rows("SELECT COUNT(*) FROM soak_ledger")[0][0])


def is_drained() -> bool:
    left = any(model.objects.using(alias).exists() for model in MUST_BE_EMPTY for alias in plan.ALIASES)
    return not left and not any(lags().values())


def gather(folder: Path, progress: Sequence[Progress], troubles: Sequence[Trouble]) -> Evidence:
    effects: dict[str, Counter[str]] = {group.name: Counter() for group in plan.GROUPS if group.atomic}
    counted = (
        "SELECT consumer_group, message_id, COUNT(*) FROM soak_effects GROUP BY consumer_group, message_id "
        "ORDER BY MIN(id)"
    )
    for group, message_id, count in (row for alias in plan.ALIASES for row in rows(counted, alias=alias)):
        effects[group][message_id] += int(count)
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
            for alias in plan.ALIASES
            for row in QueueMessage.objects.using(alias)
            .exclude(failed_group="")
            .values_list("original_id", "failed_group", "failure_count", "last_error")
        ],
        progress=progress,
        troubles=troubles,
        refused=[message_id for (message_id,) in rows("SELECT message_id FROM soak_refused")],
        set_aside=[
            SetAside(alias, *row)
            for alias in plan.ALIASES
            for row in QuarantinedMessage.objects.using(alias).values_list("topic", "message_id", "reason")
        ],
    )


def collect_garbage(alias: str) -> Collected:
    """Run GC on an idle queue. Return the log before and after it."""
    now = float(rows("SELECT UNIX_TIMESTAMP(NOW(3)) * 1000", alias=alias)[0][0])
    before = _log(alias)
    for _ in retention.steps(alias):
        pass
    return Collected(now, before, _log(alias), alias, tuple(PASSING[alias]))


PASSING = {
    plan.HOME: {plan.TOPIC: plan.TOPIC, plan.RELAYED: relayed_topic(plan.RELAYED, plan.OTHER)},
    plan.OTHER: {plan.RELAYED: plan.RELAYED},
}
"""Database → the topics of which each message enters its log, and their names there."""


def _log(alias: str) -> dict[str, float]:
    names = tuple(PASSING[alias].values())
    query = f"SELECT id, published_at FROM {LOG} WHERE topic IN %s"
    return {message_id: float(at) for message_id, at in rows(query, (names,), alias)}

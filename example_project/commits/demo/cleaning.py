"""Delete the rows of an earlier run, and nothing else."""

from __future__ import annotations

import io
import json
from typing import Any

from django.core.management import call_command
from django.core.management.base import CommandError
from django.db import transaction

from django_mysqlqueue.models import (
    ConsumerOffset,
    DeliveryState,
    JobResult,
    JobStage,
    OutboxMessage,
    PartitionLease,
    QueueMessage,
    Rollup,
    Schedule,
    Slots,
    SubscriberHeartbeat,
)
from example_project.commits.events import REPLAYED, TOPIC
from example_project.commits.models import (
    Commit,
    DailyStatistics,
    OrderViolation,
    ReplayedStatistics,
    RepositoryOrder,
    RepositorySummary,
    ReviewTask,
)

DLQ = f"{TOPIC}_dlq"
JOBS = "jobs.default"
TOPICS = (TOPIC, DLQ, REPLAYED, f"{REPLAYED}_dlq", JOBS, f"{JOBS}_dlq")
OWN_TABLES = (
    Commit,
    DailyStatistics,
    ReplayedStatistics,
    RepositoryOrder,
    OrderViolation,
    RepositorySummary,
    ReviewTask,
)
QUEUE_TABLES = (
    DeliveryState,
    PartitionLease,
    ConsumerOffset,
    Slots,
    SubscriberHeartbeat,
    OutboxMessage,
    QueueMessage,
    Rollup,
)


def queue_status() -> dict[str, Any]:
    """Return the output of ``manage.py queuestatus --format json``."""
    output = io.StringIO()
    call_command("queuestatus", format="json", stdout=output)
    status: dict[str, Any] = json.loads(output.getvalue())
    return status


def refuse_a_queue_in_use() -> None:
    """Check that the demo is the only user of the queue.

    Raises:
        CommandError: The queue has other topics, or live subscribers.
    """
    status = queue_status()
    others = {entry["topic"] for entry in [*status["topics"], *status["groups"]]} - set(TOPICS)
    if others:
        raise CommandError(
            f"The queue in this database has topics that do not belong to the demo: {', '.join(sorted(others))}. "
            "Use a separate database for the demo: set DATABASE_URL."
        )
    busy = {name for group in status["groups"] for name in group["subscribers"]}
    if busy:
        raise CommandError(
            f"The queue has live subscribers: {', '.join(sorted(busy))}. Stop them first. "
            "(A killed subscriber counts as live until its heartbeat expires, after about 30 seconds.)"
        )


def empty() -> int:
    """Delete all rows of the application and of the demo's topics. Return the number of deleted rows.

    Never do this to a queue in use: garbage collection deletes its messages.
    """
    with transaction.atomic():
        rows = sum(model._default_manager.all().delete()[0] for model in (*OWN_TABLES, JobResult, JobStage, Schedule))
        return rows + sum(model._default_manager.filter(topic__in=TOPICS).delete()[0] for model in QUEUE_TABLES)


def sequence_the_rest() -> None:
    """Move the last dead letters from the outbox into the log. The subscribers have exited and do not do it."""
    call_command("queuesequence", stdout=io.StringIO())

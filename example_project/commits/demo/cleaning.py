"""Emptying what an earlier run left behind, and only that."""

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
    OutboxMessage,
    PartitionLease,
    QueueMessage,
    SubscriberHeartbeat,
)
from example_project.commits.events import REPLAYED, TOPIC
from example_project.commits.models import (
    Commit,
    DailyStatistics,
    OrderViolation,
    ReplayedStatistics,
    RepositoryOrder,
    ReviewTask,
)

DLQ = f"{TOPIC}_dlq"
TOPICS = (TOPIC, DLQ, REPLAYED, f"{REPLAYED}_dlq")
OWN_TABLES = (Commit, DailyStatistics, ReplayedStatistics, RepositoryOrder, OrderViolation, ReviewTask)
QUEUE_TABLES = (DeliveryState, PartitionLease, ConsumerOffset, SubscriberHeartbeat, OutboxMessage, QueueMessage)


def queue_status() -> dict[str, Any]:
    """What ``manage.py queuestatus`` says."""
    output = io.StringIO()
    call_command("queuestatus", format="json", stdout=output)
    status: dict[str, Any] = json.loads(output.getvalue())
    return status


def refuse_a_queue_in_use() -> None:
    """Raises CommandError if the queue serves anything but the demo, or somebody works on it."""
    status = queue_status()
    others = {entry["topic"] for entry in [*status["topics"], *status["groups"]]} - set(TOPICS)
    if others:
        raise CommandError(
            f"The queue in this database has other topics than the demo's: {', '.join(sorted(others))}. "
            "Please give the demo a database of its own: DATABASE_URL=… names it."
        )
    busy = {name for group in status["groups"] for name in group["subscribers"]}
    if busy:
        raise CommandError(
            f"A subscriber is at work on this queue: {', '.join(sorted(busy))}. Please stop it first. "
            "(One that was killed counts as alive until its lease has run out, half a minute.)"
        )


def empty() -> int:
    """Empties the application's tables and the topic's part of the queue; returns how many rows went.

    Not what a running queue is cleaned with: the retention does that.
    """
    with transaction.atomic():
        rows = sum(model._default_manager.all().delete()[0] for model in OWN_TABLES)
        return rows + sum(model._default_manager.filter(topic__in=TOPICS).delete()[0] for model in QUEUE_TABLES)


def sequence_the_rest() -> None:
    """Moves what the subscribers' last transactions put into the outbox: dead letters, which no group waits for."""
    call_command("queuesequence", stdout=io.StringIO())

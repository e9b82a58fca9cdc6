"""The tables. ``docs/tables.md`` describes every column for users of plain SQL.

Times are in epoch milliseconds by the database's clock. The tables have no foreign keys: the log is append-only, and
the keys of the state tables name their group, topic and partition.
"""

from __future__ import annotations

from django_mysqlqueue.models.groups import (
    ConsumerGroup,
    ConsumerOffset,
    Dashboard,
    DeliveryState,
    PartitionLease,
    Slots,
    SubscriberHeartbeat,
    Topic,
)
from django_mysqlqueue.models.history import (
    ArchiveSegment,
    DeliveryEvent,
    Operation,
    Rollup,
)
from django_mysqlqueue.models.jobs import JobResult, JobStage, Schedule
from django_mysqlqueue.models.log import (
    CoalesceKey,
    CollectedTopic,
    DebouncedMessage,
    OutboxMessage,
    QuarantinedMessage,
    QueueMessage,
    RelayPosition,
    RelayWatermark,
    Sequencer,
)

MODELS = (
    QueueMessage,
    OutboxMessage,
    Sequencer,
    ConsumerGroup,
    DeliveryState,
    PartitionLease,
    ConsumerOffset,
    Slots,
    CoalesceKey,
    DebouncedMessage,
    QuarantinedMessage,
    SubscriberHeartbeat,
    DeliveryEvent,
    Operation,
    Rollup,
    CollectedTopic,
    RelayPosition,
    RelayWatermark,
    ArchiveSegment,
    JobResult,
    JobStage,
    Schedule,
)
"""The models of the tables that the protocol uses."""

__all__ = [
    "MODELS",
    "ArchiveSegment",
    "CoalesceKey",
    "CollectedTopic",
    "ConsumerGroup",
    "ConsumerOffset",
    "Dashboard",
    "DebouncedMessage",
    "DeliveryEvent",
    "DeliveryState",
    "JobResult",
    "JobStage",
    "Operation",
    "OutboxMessage",
    "PartitionLease",
    "QuarantinedMessage",
    "QueueMessage",
    "RelayPosition",
    "RelayWatermark",
    "Rollup",
    "Schedule",
    "Sequencer",
    "Slots",
    "SubscriberHeartbeat",
    "Topic",
]

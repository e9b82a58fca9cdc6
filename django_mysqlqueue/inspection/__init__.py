"""Read the queue's state: backlogs, problems, health, messages, dead letters, the log.

This is the public API; nothing here changes the queue. Each function reads the database in ``using``, else that of the
topic, ``MYSQLQUEUE["DATABASE"]`` or the router's choice. It raises ``InvalidMessage`` if ``using`` is not an alias in
``DATABASES``, and ``django.db.Error`` if the database refuses or does not answer. Names are loaded on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from django_mysqlqueue.exports import loaded_on_use

if TYPE_CHECKING:
    from django_mysqlqueue.inspection.bounds import CHECKS, EXACT, PAGES, SCRAPES, Bounds, StallTimes
    from django_mysqlqueue.inspection.causes import Cause, QueueStatus, find_causes
    from django_mysqlqueue.inspection.dead_letters import DeadLetterListing, DeadLetterSummary, list_dead_letters
    from django_mysqlqueue.inspection.error_kinds import ErrorKind, ErrorListing, KeyShare, list_errors
    from django_mysqlqueue.inspection.health import HealthFinding, HealthLimits, HealthReport, check_health
    from django_mysqlqueue.inspection.jobs import (
        JobDetails,
        JobError,
        JobListing,
        JobSummary,
        count_jobs,
        get_job,
        list_jobs,
    )
    from django_mysqlqueue.inspection.log_entries import LogMessage, MessageListing, list_messages
    from django_mysqlqueue.inspection.message_history import (
        GroupState,
        MessageContent,
        MessageHistory,
        RecordedDelivery,
        get_message,
    )
    from django_mysqlqueue.inspection.outbox import (
        DueMessages,
        OutboxOverview,
        QuarantinedRow,
        RefusedMessage,
        RelayBacklog,
        list_quarantined,
    )
    from django_mysqlqueue.inspection.overview import (
        GroupOverview,
        QueueOverview,
        get_overview,
        list_options,
    )
    from django_mysqlqueue.inspection.partitions import (
        HeadMessage,
        Partition,
        PartitionListing,
        list_partitions,
    )
    from django_mysqlqueue.inspection.problem import Problem
    from django_mysqlqueue.inspection.problems import find_problems
    from django_mysqlqueue.inspection.scheduled import ScheduledListing, ScheduledMessage, list_scheduled
    from django_mysqlqueue.inspection.schedules import ScheduleRun, ScheduleStatus, list_schedules
    from django_mysqlqueue.inspection.subscribers import SubscriberStatus
    from django_mysqlqueue.inspection.tasks import (
        Spread,
        TaskBacklog,
        TaskListing,
        TaskPeriod,
        TaskSummary,
        summarize_tasks,
    )
    from django_mysqlqueue.service.counts import Count
    from django_mysqlqueue.service.heartbeats import RoundTrip
    from django_mysqlqueue.subscriptions.effective import GroupOption
    from django_mysqlqueue.subscriptions.options import Override

__all__ = [
    "CHECKS",
    "EXACT",
    "PAGES",
    "SCRAPES",
    "Bounds",
    "Cause",
    "Count",
    "DeadLetterListing",
    "DeadLetterSummary",
    "DueMessages",
    "ErrorKind",
    "ErrorListing",
    "GroupOption",
    "GroupOverview",
    "GroupState",
    "HeadMessage",
    "HealthFinding",
    "HealthLimits",
    "HealthReport",
    "JobDetails",
    "JobError",
    "JobListing",
    "JobSummary",
    "KeyShare",
    "LogMessage",
    "MessageContent",
    "MessageHistory",
    "MessageListing",
    "OutboxOverview",
    "Override",
    "Partition",
    "PartitionListing",
    "Problem",
    "QuarantinedRow",
    "QueueOverview",
    "QueueStatus",
    "RecordedDelivery",
    "RefusedMessage",
    "RelayBacklog",
    "RoundTrip",
    "ScheduleRun",
    "ScheduleStatus",
    "ScheduledListing",
    "ScheduledMessage",
    "Spread",
    "StallTimes",
    "SubscriberStatus",
    "TaskBacklog",
    "TaskListing",
    "TaskPeriod",
    "TaskSummary",
    "check_health",
    "count_jobs",
    "find_causes",
    "find_problems",
    "get_job",
    "get_message",
    "get_overview",
    "list_dead_letters",
    "list_errors",
    "list_jobs",
    "list_messages",
    "list_options",
    "list_partitions",
    "list_quarantined",
    "list_scheduled",
    "list_schedules",
    "summarize_tasks",
]

_HOMES = {
    ".bounds": "CHECKS EXACT PAGES SCRAPES Bounds StallTimes",
    ".causes": "Cause QueueStatus find_causes",
    ".dead_letters": "DeadLetterListing DeadLetterSummary list_dead_letters",
    ".error_kinds": "ErrorKind ErrorListing KeyShare list_errors",
    ".health": "HealthFinding HealthLimits HealthReport check_health",
    ".jobs": "JobDetails JobError JobListing JobSummary count_jobs get_job list_jobs",
    ".log_entries": "LogMessage MessageListing list_messages",
    ".message_history": "GroupState MessageContent MessageHistory RecordedDelivery get_message",
    ".outbox": "DueMessages OutboxOverview QuarantinedRow RefusedMessage RelayBacklog list_quarantined",
    ".overview": "GroupOverview QueueOverview get_overview list_options",
    ".partitions": "HeadMessage Partition PartitionListing list_partitions",
    ".problem": "Problem",
    ".problems": "find_problems",
    ".scheduled": "ScheduledListing ScheduledMessage list_scheduled",
    ".schedules": "ScheduleRun ScheduleStatus list_schedules",
    ".subscribers": "SubscriberStatus",
    ".tasks": "Spread TaskBacklog TaskListing TaskPeriod TaskSummary summarize_tasks",
    "..service.counts": "Count",
    "..service.heartbeats": "RoundTrip",
    "..subscriptions.effective": "GroupOption",
    "..subscriptions.options": "Override",
}
__getattr__, __dir__ = loaded_on_use(__name__, _HOMES)

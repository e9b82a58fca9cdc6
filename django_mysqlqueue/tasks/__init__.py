"""Jobs: a backend for ``django.tasks``, whose results commit with the jobs' own writes.

``TASKS = {"default": {"BACKEND": "django_mysqlqueue.tasks.MySQLQueueBackend"}}``
"""

from __future__ import annotations

from django_mysqlqueue.schedules.registry import recurring
from django_mysqlqueue.service.job_progress import Progress
from django_mysqlqueue.subscriptions.retry_later import RetryLater
from django_mysqlqueue.tasks.attempts import JobContext
from django_mysqlqueue.tasks.backend import MySQLQueueBackend
from django_mysqlqueue.tasks.calls import Call, call, enqueue_chain, enqueue_many
from django_mysqlqueue.tasks.control import acancel_job, async_wait, cancel_job, progress_of, wait
from django_mysqlqueue.tasks.exceptions import JobCancelled
from django_mysqlqueue.tasks.options import job

__all__ = [
    "Call",
    "JobCancelled",
    "JobContext",
    "MySQLQueueBackend",
    "Progress",
    "RetryLater",
    "acancel_job",
    "async_wait",
    "call",
    "cancel_job",
    "enqueue_chain",
    "enqueue_many",
    "job",
    "progress_of",
    "recurring",
    "wait",
]

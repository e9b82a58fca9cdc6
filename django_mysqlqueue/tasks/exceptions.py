"""The exceptions in ``TaskResult.errors`` of jobs that did not end by a call of their task."""

from __future__ import annotations

from django_mysqlqueue.exceptions import QueueError


class JobNotRun(QueueError):
    """The job ended without a call of its task. Base class of the others."""


class JobCancelled(JobNotRun):
    """The job was cancelled before it started. A task that stops because it was asked to may raise it, too."""


class JobExpired(JobNotRun):
    """The job expired while it waited for its first or its next attempt (``expires_in``)."""


class JobSuperseded(JobNotRun):
    """A later job replaced this one before it started."""


class JobSkipped(JobNotRun):
    """A seek has skipped the message of the job, or its group was dropped, before the job ended."""


class JobDeleted(JobNotRun):
    """The message of the job was deleted before the job ended."""


class EarlierJobFailed(JobNotRun):
    """A job of an earlier stage of the chain has failed."""


class DeadLettered(JobNotRun):
    """An operator has dead-lettered the message of the job."""


class WorkerLost(QueueError):
    """A subscriber was lost after it had claimed the job, or could not store the outcome."""


class UnknownTask(QueueError):
    """No code of this process has the task: it was renamed or removed, or the process runs an earlier version."""


class InvalidJob(QueueError):
    """The payload of a message on a queue of jobs is not a job."""


class InvalidResult(QueueError):
    """The task returned a value that cannot be stored."""


class RetriedTooLong(QueueError):
    """The job asked for another attempt without counting one, and would have waited for more than a day in all so."""

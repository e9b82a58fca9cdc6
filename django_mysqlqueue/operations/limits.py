"""Limits of operations: rows per transaction, counts of previews, and waits."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class OperationLimits:
    """Limits of operations. They are arguments, so that tests can reach them with few rows."""

    rows: int = 1000
    """Maximum number of rows that one transaction changes."""
    dead_letters: int = 200
    """Maximum number of dead letters that one transaction redrives or deletes, with their payloads."""
    jobs: int = 200
    """Maximum number of jobs that one transaction cancels. It reads their arguments and errors."""
    jobs_seconds: float = 10.0
    """Seconds after which a seek leaves the jobs that it has skipped, and that have not ended, to GC."""
    counted: int = 10_000
    """Previews stop counting here."""
    read: int = 100_000
    """Maximum number of messages that the preview of a seek reads, since no index has the target group."""
    seconds: float = 0.1
    """Seconds after which it reads no further partitions, apart from the first ``rows``."""
    read_first: int = 100
    """Number of messages that it first reads per partition, before it reads more of the longer ones."""
    locked_wait: float = 60.0
    """Seconds to wait for rows that other transactions have locked, about as long as InnoDB waits for a lock."""


LIMITS = OperationLimits()
COUNTED = LIMITS.counted
"""Limit of the counts in previews."""

"""The outcomes of deliveries: one word for each, in signals, tests, metrics, traces, logs and recorded deliveries."""

from __future__ import annotations

from enum import StrEnum

__all__ = ["Outcome"]


class Outcome(StrEnum):
    """What became of a delivery. Each is a string: compare it with ``"acked"`` and so on."""

    ACKED = "acked"
    FAILED = "failed"
    """The message will be redelivered after a backoff, and the attempt counts."""
    SNOOZED = "snoozed"
    """It will be redelivered when the handler asked for it."""
    DEAD_LETTERED = "dead_lettered"
    """It failed for the last time, or was rejected."""
    RELEASED = "released"
    """It will be redelivered, and no attempt is counted."""
    DELETED = "deleted"
    """It was deleted from the log before it was handled."""
    LOST = "lost"
    """It was handed out again or settled by someone else."""

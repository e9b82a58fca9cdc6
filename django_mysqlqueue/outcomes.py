"""The outcomes of deliveries, with the same names in signals, tests, metrics, traces, logs and recorded deliveries."""

from __future__ import annotations

from enum import StrEnum

__all__ = ["Outcome"]


class Outcome(StrEnum):
    """The outcome of a delivery. Outcomes are strings: you can compare them with ``"acked"`` and so on."""

    ACKED = "acked"
    """The message was handled."""
    FAILED = "failed"
    """The attempt failed. The message will be redelivered after a backoff, and the attempt counts."""
    SNOOZED = "snoozed"
    """The message will be redelivered after the delay that the handler asked for."""
    DEAD_LETTERED = "dead_lettered"
    """The message failed for the last time, or was rejected."""
    RELEASED = "released"
    """The message will be redelivered, and no attempt is counted."""
    DELETED = "deleted"
    """The message was deleted from the log before it was handled."""
    EXPIRED = "expired"
    """The message expired before its handler was called."""
    SUPERSEDED = "superseded"
    """A later message with the same coalesce key is in the log. The handler was not called."""
    LOST = "lost"
    """The delivery was revoked, claimed again by another subscriber, or settled by somebody else."""

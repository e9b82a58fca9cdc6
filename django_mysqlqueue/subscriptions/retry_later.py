"""``RetryLater``, which a handler or a task raises to be called again after a delay."""

from __future__ import annotations

import datetime

from django_mysqlqueue.exceptions import InvalidMessage, QueueError
from django_mysqlqueue.options.validators import LONGEST_DELAY
from django_mysqlqueue.service.messages import duration_ms


class RetryLater(QueueError):
    """Raise it in a handler or a task: the attempt was not possible, and the next one follows after a delay.

    The writes of an atomic handler or task are rolled back. ``reject_on`` and ``retry_on`` do not apply.

    Args:
        delay: time until the next attempt, in seconds or as a timedelta; at most 30 days.
        reason: why, for people.
        counts: whether the attempt counts as a failed one: then the last attempt dead-letters the message, and a job
            has FAILED. If False, no attempt is counted and no error is stored; a job may wait for a day in all so.

    Raises:
        InvalidMessage: an argument breaks a rule, which the error names. In a handler or a task, it fails the attempt.
    """

    delay_ms: int = 0
    reason: str = ""
    counts: bool = True

    def __init__(self, delay: float | datetime.timedelta, *, reason: str = "", counts: bool = True) -> None:
        if not isinstance(reason, str):
            raise InvalidMessage(f"RetryLater: reason {reason!r}: must be a str")
        if not isinstance(counts, bool):
            raise InvalidMessage(f"RetryLater: counts {counts!r}: must be True or False")
        self.delay_ms = duration_ms("RetryLater: delay", delay, longest=LONGEST_DELAY)
        self.reason = reason
        self.counts = counts
        after = f"{self.delay_ms / 1000:g} s"
        super().__init__(f"in {after}: {reason}" if reason else f"in {after}")

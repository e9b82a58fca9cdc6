"""How much an operation changes in one transaction, counts for a preview, and waits for."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """Passed to what it bounds, so that a test can reach a bound with a few rows."""

    rows: int = 1000
    """Rows that one transaction changes."""
    dead_letters: int = 200
    """Dead letters that one transaction sends back or deletes, payloads and all."""
    counted: int = 10_000
    """A preview counts no further."""
    read: int = 100_000
    """The preview of a seek reads no more messages of the log: which group a message is for is in no index."""
    read_first: int = 100
    """It reads so many messages of each partition, and then more of those that have more."""
    locked_wait: float = 60.0
    """Seconds that it waits for rows that others have locked: about as long as InnoDB waits for a lock."""


LIMITS = Limits()
COUNTED = LIMITS.counted
"""What every preview counts up to."""

"""How many messages enter the log in each minute, by topic and target group: every poller reads all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

MINUTE_MS = 60_000
KEPT = 2
"""Number of minutes that are kept."""
LATE_MS = MINUTE_MS
"""A pause between two polls after which the counts would be those of other minutes."""


class Entered:
    """The numbers of messages that this process has seen entering the log, by minute of the database's clock."""

    def __init__(self) -> None:
        self._minutes: dict[int, Counter[tuple[str, str]]] = {}
        self._polled_at = 0

    def reset(self) -> None:
        """Forget all, because messages may have been missed."""
        self._minutes.clear()
        self._polled_at = 0

    def add(self, now: int, numbers: Mapping[tuple[str, str], int]) -> None:
        """Add the result of a poll.

        ``numbers``: the numbers of messages by topic and ``target_group``.
        """
        minute = now // MINUTE_MS * MINUTE_MS
        if not 0 <= now - self._polled_at <= LATE_MS:
            self._minutes.clear()
        elif minute > self._polled_at:
            # From the first poll of a minute on, all of it is counted. The minute of the first poll of all is not.
            self._minutes[minute] = Counter()
            for old in sorted(self._minutes)[:-KEPT]:
                del self._minutes[old]
        if minute in self._minutes:
            self._minutes[minute].update(numbers)
        self._polled_at = now

    def whole(self) -> dict[int, Counter[tuple[str, str]]]:
        """Return the numbers by the beginning of each minute, of minutes that were polled to their end."""
        minute = self._polled_at // MINUTE_MS * MINUTE_MS
        return {at: numbers for at, numbers in self._minutes.items() if at < minute}

"""The demo's two progress bars."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import NoReturn

from django.core.management.base import CommandError
from tqdm import tqdm

STALLED = 180
"""Seconds without progress after which the demo fails. Much longer than any lease or timeout."""
QUIET = 10
"""Seconds between progress lines if stderr is not a terminal."""


class Progress:
    """Show progress bars for published and handled messages, or regular lines if stderr is not a terminal."""

    def __init__(self, events: int, deliveries: int, say: Callable[[str], None]) -> None:
        self._say = say
        self._said_at = time.monotonic()
        self._deliveries = deliveries
        self.published = self._bar("Published", events, 0)
        self._handled = self._bar("Handled", deliveries, 1)
        self._seen = 0
        self._moved_at = time.monotonic()

    @staticmethod
    def _bar(name: str, total: int, position: int) -> tqdm[NoReturn]:
        return tqdm(
            desc=f"{name:9}",
            total=total,
            position=position,
            unit=" msg",
            disable=not sys.stderr.isatty(),
            dynamic_ncols=True,
        )

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._handled.close()
        self.published.close()

    def handled(self, count: int) -> None:
        """Show how many messages have been handled so far.

        Raises:
            CommandError: The number has not changed for ``STALLED`` seconds.
        """
        now = time.monotonic()
        if count > self._seen:
            self._handled.update(count - self._seen)
            self._seen, self._moved_at = count, now
        elif now > self._moved_at + STALLED:
            raise CommandError(
                f"The queue is stalled: no message was handled for {STALLED} s, after {count:,} of "
                f"{self._deliveries:,} deliveries."
            )
        if self._handled.disable and now > self._said_at + QUIET:
            self._say(f"… handled {count:,} of {self._deliveries:,} deliveries")
            self._said_at = now

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
"""Seconds without a single event handled after which the demo gives up; leases and time-outs are well below."""
QUIET = 10
"""Seconds between two lines where there are no bars."""


class Progress:
    """Bars for what is published and for what is handled; where stderr is no terminal, a line now and then."""

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
        """Shows how many messages have been handled so far.

        Raises:
            CommandError: the number has not changed for long.
        """
        now = time.monotonic()
        if count > self._seen:
            self._handled.update(count - self._seen)
            self._seen, self._moved_at = count, now
        elif now > self._moved_at + STALLED:
            raise CommandError(f"Nothing has been handled for {STALLED} s; {count:,} of {self._deliveries:,} are.")
        if self._handled.disable and now > self._said_at + QUIET:
            self._say(f"… {count:,} of {self._deliveries:,} handled")
            self._said_at = now

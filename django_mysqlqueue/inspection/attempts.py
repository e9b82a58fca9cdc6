"""How the newest attempts of a group ended: whether it fails now, and since when.

Time alone must not make a group fail, as it would if old successes left a window while failures stayed in it. So the
share of failures is that of a number of newest attempts: a success can only lower it. Within a minute, which is all
that rollups distinguish, attempts count as evenly mixed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from django_mysqlqueue.service.rollups import HOUR, MINUTE, Bucket

MINUTE_MS, HOUR_MS = MINUTE * 1000, HOUR * 1000


def failed(bucket: Bucket) -> int:
    """Return the number of failed attempts of a minute or an hour.

    The last attempt at a dead letter is a failure, too. A poison message has no failures, only the dead letter.
    """
    return max(bucket.failed, bucket.dead_lettered)


@dataclass(slots=True)
class Ended:
    """Attempts of a group that ended within some time, as subscribers count them, up to 10 seconds late."""

    buckets: list[Bucket] = field(default_factory=list)
    """Their minutes, in order of time."""

    def since(self, at: int) -> Ended:
        """Return the attempts of the minute of a time, and of later ones."""
        return Ended([one for one in self.buckets if one.at > at - MINUTE_MS])

    @property
    def acked(self) -> int:
        """Number of attempts that succeeded."""
        return sum(one.acked for one in self.buckets)

    @property
    def failed(self) -> int:
        """Number of attempts that failed."""
        return sum(map(failed, self.buckets))

    @property
    def dead_lettered(self) -> int:
        """Number of dead-lettered messages."""
        return _dead(self.buckets)

    @property
    def attempts(self) -> int:
        """Number of attempts that ended."""
        return self.acked + self.failed


@dataclass(frozen=True, slots=True)
class Run:
    """Failures that continue: no success has ended them."""

    since: int
    """When the first minute with one of them began, in epoch milliseconds."""
    is_first: bool
    """True if no attempt is known before them: they may have begun earlier."""


@dataclass(frozen=True, slots=True)
class Rule:
    """When attempts fail too often."""

    share: float
    """The largest share of failures that is tolerated; 1: as long as any attempt succeeds, each share is."""
    newest: int
    """Number of newest attempts whose share counts."""

    def is_over(self, failures: float, attempts: float) -> bool:
        """Return whether too many of some attempts have failed."""
        return failures >= attempts if self.share >= 1 else failures > self.share * attempts


def continuing(buckets: Iterable[Bucket], rule: Rule) -> Run | None:
    """Return the failures that continue at the end of some minutes; None if the newest attempts succeed."""
    newest: deque[Bucket] = deque()
    began = first = None
    is_over = False
    for bucket in buckets:
        attempts = bucket.acked + failed(bucket)
        if not attempts:
            continue
        first = bucket.at if first is None else first
        newest.append(bucket)
        while sum(one.acked + failed(one) for one in list(newest)[1:]) >= rule.newest:
            newest.popleft()
        is_over = rule.is_over(*_newest(newest, rule.newest))
        if began is None and rule.is_over(failed(bucket), attempts):
            began = bucket.at
        elif began is None and is_over:
            began = next(one.at for one in newest if failed(one))
        elif not is_over and not rule.is_over(failed(bucket), attempts):
            began = None
    return Run(began, began == first) if is_over and began is not None else None


def _newest(buckets: Sequence[Bucket], number: int) -> tuple[float, float]:
    """Return how many of a number of newest attempts have failed, and that number. The oldest minute counts in part."""
    failures, attempts = 0.0, 0.0
    for bucket in reversed(buckets):
        ended = bucket.acked + failed(bucket)
        part = 1.0 if ended <= number - attempts or not attempts else (number - attempts) / ended
        failures += part * failed(bucket)
        attempts += part * ended
    return failures, attempts


def began_by_hour(hours: Sequence[Bucket], rule: Rule, minute: int) -> int:
    """Return when failures began that were there in the first minute that is known: that minute, or an hour before."""
    began = minute
    for bucket in reversed(hours):
        attempts = bucket.acked + failed(bucket)
        if not attempts:
            continue
        if rule.is_over(failed(bucket), attempts):
            began = bucket.at
            continue
        if failed(bucket) and began // HOUR_MS * HOUR_MS - bucket.at <= HOUR_MS:
            began = bucket.at  # They began in this hour, after successes.
        break
    return began


def burst(buckets: Iterable[Bucket], most: int, window_ms: int) -> int | None:
    """Return the first minute of the dead letters of which there have been too many within a window ever since."""
    window: deque[Bucket] = deque()
    began = None
    for bucket in buckets:
        while window and window[0].at < bucket.at - window_ms:
            window.popleft()
        if not _dead(window):
            began = None
        window.append(bucket)
        if _dead(window) <= most:
            began = None
        elif began is None:
            began = next(one.at for one in window if one.dead_lettered)
    return began


def _dead(buckets: Iterable[Bucket]) -> int:
    return sum(one.dead_lettered for one in buckets)

"""Decide which starts a shutdown has cut off. Uses no database and no files.

A process that shuts down waits ``SHUTDOWN_TIMEOUT`` for its handlers, and then releases what still runs as never
started. No attempt is counted for such a start, although it is recorded, perhaps even with an end: the handler runs on
until the process exits.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from soak.facts import Trouble
from soak.plan import AWAY, FREEZES, PROCESSING, SHUTDOWN, SHUTDOWNS
from soak.records import ENDS, STARTED, Step

NOTICED = 5.0
"""Seconds within which a process stops starting handlers: a child looks for its supervisor once a second, and the
poller may be waiting for a lock."""
RETURNS = 0.5
"""Seconds by which a call may be longer than its records tell: before them, a job is made RUNNING, and after them, an
atomic handler commits."""


@dataclass(frozen=True, slots=True)
class Shutdown:
    """When a process can have noticed that it has to end."""

    earliest: float
    latest: float

    def cuts_off(self, start: Step, end: Step | None) -> bool:
        """Return whether a handler was running when the process stopped waiting for it.

        The process starts no handler while it waits. What has run for longer than ``MAX_PROCESSING_TIME`` then has
        failed.
        """
        waited_until = max(self.earliest, start.at) + SHUTDOWN
        began = self.earliest - PROCESSING < start.at < self.latest
        return began and (end is None or end.at > waited_until - RETURNS)


def cut_off(steps: Iterable[Step], troubles: Sequence[Trouble]) -> dict[Step, Step | None]:
    """Return the starts that a shutdown has cut off, each with the end that was recorded nevertheless, or None.

    One with an end may also have ended in time, if the process noticed late.

    Args:
        steps: the steps of a group.
        troubles: the disturbances.
    """
    shutdowns = _shutdowns(troubles)
    return {
        start: end
        for start, end in _calls(steps)
        if any(one.cuts_off(start, end) for one in shutdowns.get(start.pid, ()))
    }


def _calls(steps: Iterable[Step]) -> Iterator[tuple[Step, Step | None]]:
    """Yield each start, and the end in the same process that belongs to it."""
    running: dict[tuple[str, str], Step] = {}
    for step in sorted(steps, key=lambda step: step.at):
        which = (step.process, step.message_id)
        if step.verb == STARTED:
            if (before := running.get(which)) is not None:
                yield before, None
            running[which] = step
        elif step.verb in ENDS and (start := running.pop(which, None)) is not None:
            yield start, step
    yield from ((start, None) for start in running.values())


def _shutdowns(troubles: Sequence[Trouble]) -> dict[int, list[Shutdown]]:
    """Return the shutdowns of each process. A frozen one, or one that waits for the server, notices later."""
    found: dict[int, list[Shutdown]] = defaultdict(list)
    stalls = sorted((one for one in troubles if one.kind in FREEZES | AWAY), key=lambda one: one.since)
    for shutdown in (one for one in troubles if one.kind in SHUTDOWNS):
        earliest, latest = shutdown.since, shutdown.since + NOTICED
        for stall in stalls:
            is_frozen = stall.kind in FREEZES and stall.pid == shutdown.pid
            if is_frozen and stall.since <= earliest < stall.until:
                earliest = stall.until
            if (is_frozen or stall.kind in AWAY) and stall.since < latest and stall.until > shutdown.since:
                latest = max(latest, stall.until + NOTICED)
        found[shutdown.pid].append(Shutdown(earliest, latest))
    return found

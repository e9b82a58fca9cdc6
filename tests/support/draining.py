"""How healthy subscribers handle whatever an experiment has left."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tests.support.harness import Sub
from tests.support.internals import PollingLimits

IMPATIENT = PollingLimits(locked_pause_ms=0)
"""For healthy subscribers: what an experiment has locked is free by now."""


def handle_all(healthy: Sub, done: Sequence[object], check: Callable[[], object] = lambda: None) -> None:
    """Steps until two rounds in a row have neither called a handler nor ended an expired message.

    Args:
        healthy: a subscriber, ``IMPATIENT``.
        done: what its handlers append their calls to.
        check: called after each round.
    """
    quiet = 0
    while quiet < 2:
        before = len(done), healthy.inbox.passed_counts("expired")
        for work in healthy.poller.groups:
            work.health.rests_until = 0.0
        healthy.step()
        healthy.work()
        healthy.flush()
        check()
        quiet = quiet + 1 if (len(done), healthy.inbox.passed_counts("expired")) == before else 0


def keep_house(healthy: Sub) -> None:
    """A whole round of housekeeping, and a last turn."""
    for _ in healthy.poller.maintenance.round():
        pass
    healthy.step()

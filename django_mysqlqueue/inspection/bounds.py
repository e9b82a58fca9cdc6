"""How far a look at the queue goes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Bounds:
    """Limits of what an overview reads, whatever the log, the backlog and the history hold."""

    groups: int = 200
    """Of the groups, in order of topic and group."""
    count: int = 10_000
    """A count goes no further, and says so."""
    partitions: int = 20_000
    """Of a topic. Of one with more, those that the newest messages are in are read as well."""
    seconds: float = 0.1
    """Looking into partitions with a backlog takes no longer for all groups together; then counts say that they
    stopped."""
    heads: int = 50
    """Partitions of a group that are named, those that wait longest."""
    piece: int = 100
    """Partitions that one statement looks into."""
    depth: int = 100
    """Messages of each of them; deeper ones are counted one by one."""


PAGES = Bounds()
"""For the dashboard, which is read every few seconds."""
SCRAPES = Bounds(groups=1000, partitions=100_000, seconds=1.0)
"""For metrics."""
CHECKS = Bounds(groups=10_000, partitions=1_000_000, seconds=10.0)
"""For health checks: they are asked now and then, and a count that stopped is an alarm."""
EXACT = Bounds(groups=2**31, count=2**62, partitions=2**31, seconds=float("inf"))
"""For ``queuestatus``: everything is counted, however long that takes."""

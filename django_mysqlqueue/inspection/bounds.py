"""How much an inspection reads, and from when on something that does not move is a problem."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Bounds:
    """Limits of what is read, however long the log, the backlogs and the history are."""

    groups: int = 200
    """Maximum number of groups, in order of topic and group."""
    count: int = 10_000
    """Counts stop here, and say so."""
    partitions: int = 20_000
    """Maximum number of partitions of a topic. If it has more, those of the newest messages are read as well."""
    seconds: float = 0.1
    """Seconds for counting the backlogs of all groups together; then counts say that they stopped."""
    heads: int = 50
    """Maximum number of partitions of a group whose first message is read, those that wait longest."""
    piece: int = 100
    """Partitions that one statement counts."""
    depth: int = 100
    """Messages that it counts of each; longer backlogs are counted one by one."""
    partition_count: int = 1000
    """Counts of messages in one partition stop here."""
    in_flight: int = 10_000
    """Unsettled deliveries of a group from which those in flight are listed."""
    merged_partitions: int = 50
    """Topics with at most so many partitions are listed from all of them at once; others by walking the log."""
    walked: int = 3000
    """Messages that a walk along the log reads."""
    searched_partitions: int = 20_000
    """Partitions in which an id is searched for."""
    groupless_partitions: int = 1000
    """The oldest message of a topic without groups is searched for if it has at most so many partitions."""
    scheduled: int = 2500
    """Scheduled messages that are read to find those of one topic."""
    dead_letters: int = 10_000
    """Dead letters of a topic that are read, the first ones by partition key."""
    errors: int = 2000
    """Errors whose text is searched, or told apart: the newest that match otherwise."""
    recorded: int = 200
    """Recorded deliveries of a message that are read, the newest."""
    message_groups: int = 50
    """Groups of its topic that a message's state is read for."""
    redriven: int = 500
    """Records of a group's dead letters in which a redriven one is searched for, the newest."""


PAGES = Bounds()
"""For the dashboard, which is read every few seconds."""
SCRAPES = Bounds(groups=1000, partitions=100_000, seconds=1.0)
"""For metrics."""
CHECKS = Bounds(groups=10_000, partitions=1_000_000, seconds=10.0)
"""For health checks: they run now and then, and a count that stopped is an alarm."""
EXACT = Bounds(groups=2**31, count=2**62, partitions=2**31, seconds=float("inf"))
"""For ``queuestatus``: everything is counted, however long that takes."""


@dataclass(frozen=True, slots=True)
class StallTimes:
    """Seconds after which something that does not move is a problem."""

    stuck: float = 60.0
    """For a message that has failed, for a partition that no subset covers, and for a group without subscribers."""
    outbox: float = 15.0
    """For a message that is due in the outbox: subscribers poll it every second at the latest."""
    still: float = 600.0
    """For a group with a backlog and live subscribers of which no delivery ends."""
    transaction: float = 300.0
    """For an open transaction, which holds back the server's purge."""


STALL_TIMES = StallTimes()

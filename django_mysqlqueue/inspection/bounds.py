"""Limits of what inspections read, and times after which a lack of progress is a problem."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Bounds:
    """Limits of what is read, regardless of the length of the log, the backlogs and the history."""

    groups: int = 200
    """Maximum number of groups, in order of topic and group."""
    count: int = 10_000
    """Counts stop here and are then marked as not exact."""
    partitions: int = 10_000
    """Maximum number of partitions of a topic to read. If it has more, the partitions of its newest messages are
    added."""
    seconds: float = 0.1
    """Seconds for counting the backlogs of all groups together; counts that take longer are not exact."""
    heads: int = 50
    """Maximum number of partitions of a group whose first message is read, the longest waiting first."""
    surveyed_partitions: int = 5_000
    """Maximum number of partitions of a group whose backlogs are compared. If the topic has more, the partitions of its
    newest messages are added."""
    piece: int = 100
    """Number of partitions that one statement counts."""
    depth: int = 100
    """Number of messages per partition that such a statement counts. Partitions with more are counted one at a time."""
    partition_count: int = 1000
    """Counts of messages in one partition stop here."""
    in_flight: int = 10_000
    """Maximum number of unsettled deliveries of a group that are searched for those in flight."""
    merged_partitions: int = 50
    """Maximum number of partitions to list messages from at once; topics with more are listed by walking the log."""
    walked: int = 3000
    """Number of messages that a walk along the log reads."""
    contents: int = 500
    """Maximum number of messages whose contents a search reads."""
    content_bytes: int = 8_000_000
    """Bytes of payloads after which such a search ends."""
    content_seconds: float = 0.1
    """Seconds after which it ends."""
    searched_partitions: int = 20_000
    """Maximum number of partitions in which an id is searched for."""
    groupless_partitions: int = 1000
    """Maximum number of partitions in which the oldest message of a topic without groups is searched for."""
    scheduled: int = 2500
    """Number of scheduled messages that are read to find those of one topic."""
    dead_letters: int = 10_000
    """Maximum number of dead letters of a topic that are read, in the order of their partition keys."""
    errors: int = 2000
    """Maximum number of dead letters whose error is searched or grouped: the newest that meet the other conditions.
    Errors by kind are those of about as many dead letters, retrying messages and recorded deliveries each."""
    jobs: int = 2500
    """Number of jobs that are searched for a page of those that match, if an index does not have all conditions."""
    job_tasks: int = 100
    """Maximum number of tasks whose jobs are merged into one list, and that are listed."""
    task_count: int = 50_000
    """Maximum number of jobs that are counted for a list of tasks, of all tasks together."""
    task_jobs: int = 5000
    """Maximum number of jobs whose times are read for it, of all tasks together."""
    operations: int = 5000
    """Number of operations of the audit log, newest first, that are searched for those that match."""
    recorded: int = 200
    """Maximum number of recorded deliveries of a message to read, newest first."""
    message_groups: int = 50
    """Maximum number of groups for which a message's state is read."""
    redriven: int = 500
    """Maximum number of a group's recorded dead letters, newest first, that are searched for a redriven message's
    original."""


PAGES = Bounds()
"""Limits for the dashboard, which reads every few seconds."""
SCRAPES = Bounds(groups=1000, partitions=100_000, seconds=1.0)
"""Limits for metrics."""
CHECKS = Bounds(groups=10_000, partitions=1_000_000, seconds=10.0)
"""Limits for health checks: they run rarely, and fail if they cannot finish counting."""
EXACT = Bounds(groups=2**31, count=2**62, partitions=2**31, seconds=float("inf"))
"""No limits, for ``queuestatus``: all counts are exact, however long that takes."""


@dataclass(frozen=True, slots=True)
class StallTimes:
    """Seconds after which a lack of progress is a problem."""

    stuck: float = 60.0
    """For a message that has failed, a partition that no subset covers, and a group without live subscribers or with a
    filter that cannot be parsed."""
    outbox: float = 15.0
    """For a message that is due in the outbox, which subscribers poll every ``MAX_POLL_INTERVAL`` or more often."""
    still: float = 600.0
    """For a group with a backlog and live subscribers, if no delivery ends. They must have been live for that long."""
    started: float = 60.0
    """For which a group must have had live subscribers before their failures, and partitions that none of them claims,
    are a problem."""
    tick: float = 60.0
    """For a tick of a recurring schedule that is due."""
    missing: float = 30.0
    """For a task that no subscriber is known to run, although jobs of it wait. Subscribers try again after 30 s."""
    reader: float = 172_800.0
    """For a registered reader that has not read, although there are messages."""
    transaction: float = 300.0
    """For an open transaction, which delays the server's purge."""


STALL_TIMES = StallTimes()

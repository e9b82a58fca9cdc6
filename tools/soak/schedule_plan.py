"""The plan of the recurring schedules: what they run, and how often."""

from __future__ import annotations

from dataclasses import dataclass

from soak import plan

TOPIC = "soak.ticks"
AWAY = "soak.ticks.away"
"""A topic in the other database. The rows of its schedules are in the first one."""
GROUP = "ticks"
PUBLISHED = f"{TOPIC}%"
"""The pattern of the topics in the outbox, where those to be relayed have a suffix."""


@dataclass(frozen=True, slots=True)
class Planned:
    """A schedule of the soak test."""

    name: str
    every: int
    """Seconds."""
    catch_up: str = "latest"
    overlap: str = "queue"
    topic: str = ""
    """Empty: it runs a task."""

    @property
    def is_whole(self) -> bool:
        """Whether each of its ticks must run."""
        return self.catch_up == "all"


EVERY_TICK = Planned("every-tick", 2, catch_up="all")
NEWEST_TICK = Planned("newest-tick", 1)
ONE_AT_A_TIME = Planned("one-at-a-time", 1, overlap="skip")
EVERY_MESSAGE = Planned("every-message", 2, catch_up="all", topic=TOPIC)
NEWEST_MESSAGE = Planned("newest-message", 1, topic=AWAY)
SCHEDULES = (EVERY_TICK, NEWEST_TICK, ONE_AT_A_TIME, EVERY_MESSAGE, NEWEST_MESSAGE)
BY_NAME = {one.name: one for one in SCHEDULES}
HOME = plan.HOME
"""The database with all rows."""
LONGEST = 1.5
"""Maximum number of seconds that a task of which only one job may be unfinished takes."""

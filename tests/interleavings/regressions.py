"""Schedules that once broke a promise, in the words of today's statements."""

from __future__ import annotations

from typing import NamedTuple


class Regression(NamedTuple):
    """A schedule, and what it showed."""

    pair: str
    schedule: str
    was: str
    """What was wrong."""


REGRESSIONS = (
    Regression(
        "busy: seek to the beginning x seek to the beginning, claim, pause",
        "A..share:consumer_groups#2 B A",
        "a seek that was frozen deleted the state rows of messages claimed since: they were lost",
    ),
    Regression(
        "busy: drop x drop, join",
        "A..share:consumer_groups#4 B A",
        "a drop that was frozen deleted rows of the group that had been registered since",
    ),
    Regression(
        "fresh: join x set_mode shared",
        "A..insert:subscriber_heartbeats#1 B A",
        "a subscriber that had read the old mode took leases in a shared group",
    ),
    Regression(
        "forsaken: set_mode shared x claim",
        "A B",
        "a change of the mode left the leases, and their frozen owner claimed",
    ),
    Regression(
        "busy: seek to the beginning x ack in a transaction",
        "B..commit#1 A..sleep#1 B A",
        "a seek waited for an atomic handler",
    ),
    Regression(
        "busy: drop x ack in a transaction",
        "B..commit#1 A..sleep#1 B A",
        "a drop waited for an atomic handler, with the group's row locked",
    ),
    Regression(
        "busy: drop x flush failures",
        "A..commit#3 B A",
        "a drop and a flush deadlocked",
    ),
    Regression(
        "busy: claim and flush x settle in a transaction",
        "A..update:delivery_state#1 B..waits A B",
        "a flush and an atomic batch of the same messages deadlocked",
    ),
    Regression(
        "busy: collect x collect",
        "B..insert:collected#1 A..waits B A",
        "two GCs counted the same messages",
    ),
    Regression(
        "busy: seek to the beginning x seek to the end",
        "A..share:consumer_groups#1 B A",
        "the record of a seek that another one stopped never ended",
    ),
    *(
        Regression(
            f"{world}: {first} x {change}, claim that supersedes, with another filter",
            "A B",
            f"{world}: a message superseded by one that a changed filter passed was lost ({first} x {change})",
        )
        for world in ("superseding", "superseding_shared")
        for first in ("claim that supersedes, with a filter", "give up what is superseded at its start")
        for change in ("register another filter", "override the filter")
    ),
)

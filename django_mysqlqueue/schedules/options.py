"""The options of recurring schedules, with their texts for the documentation. None is as if an option was not given."""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, TypedDict


class Times(TypedDict, total=False):
    """When a schedule runs."""

    every: Annotated[Any, "the interval, a timedelta or a number of seconds, in place of a cron line."]
    start: Annotated[datetime.datetime | None, "the first run of the interval; the others are counted from it."]
    timezone: Annotated[str | None, "the time zone of the cron line (default: ``TIME_ZONE``)."]
    catch_up: Annotated[
        str | None,
        'which ticks that were missed in an outage run after it: ``"latest"`` (the default): the newest; ``"all"``: '
        "each, at most the newest 100.",
    ]


class TaskOptions(Times, total=False):
    """When and how a schedule runs a task."""

    args: Annotated[Sequence[Any] | None, "the positional arguments of the task, which must be JSON-serializable."]
    kwargs: Annotated[Mapping[str, Any] | None, "its keyword arguments, which must be JSON-serializable."]
    overlap: Annotated[
        str | None,
        'what becomes of a tick if the job of an earlier one has not ended: ``"queue"`` (the default): its job waits; '
        '``"skip"``: the tick is skipped.',
    ]


class _OfPeople(TypedDict, total=False):
    cron: Annotated[
        str | None, 'minute, hour, day of the month, month and day of the week, for example ``"0 3 * * *"``.'
    ]
    at: Annotated[
        datetime.datetime | None,
        "when to run once, in place of a cron line and an interval. A naive datetime is in the project's time zone.",
    ]


class ScheduleOptions(_OfPeople, TaskOptions, total=False):
    """The options of a schedule that people make, except for its task."""


def given(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of ``ScheduleOptions`` that are given."""
    known = ScheduleOptions.__optional_keys__
    return {name: value for name, value in options.items() if name in known and value is not None}

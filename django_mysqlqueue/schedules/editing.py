"""The schedules that people make: from their options to a definition, and back."""

from __future__ import annotations

import datetime
import sys
from collections.abc import Mapping
from typing import Any

from django_mysqlqueue.exceptions import SubscriberError
from django_mysqlqueue.schedules import registry
from django_mysqlqueue.schedules.definitions import Definition
from django_mysqlqueue.schedules.options import ScheduleOptions, given
from django_mysqlqueue.schedules.registry import Destination
from django_mysqlqueue.schedules.timetables import once
from django_mysqlqueue.text.humanize import close_names, did_you_mean

TIMES = ("cron", "every", "at")
"""The options of which a schedule has one."""
CELERY_TASKS = "django_mysqlqueue.contrib.celery.tasks"
"""The module of the tasks that have a name in Celery. Only projects that use them import it."""
OF_TIMES = (*TIMES, "start", "timezone")


def definition_of(name: str, task: Any, options: Mapping[str, Any], place: Destination | None = None) -> Definition:
    """Return the definition of a schedule. Of the options, those of ``ScheduleOptions`` count.

    ``task``: a task, or its path. ``place``: where its jobs go, if the path is that of a schedule that exists.

    Raises:
        SubscriberError: a value breaks a rule. The error names the schedule, the value and the rule.
    """
    wanted = given(options)
    try:
        if (function := getattr(task, "func", None)) is not None:
            task, place = f"{function.__module__}.{function.__qualname__}", Destination.of(task)
        elif place is None:
            task = _imported(task)
        times = None
        if (at := wanted.pop("at", None)) is not None:
            if more := [option for option in OF_TIMES if option in wanted]:
                raise ValueError(f"at={at!r}: pass it without {' and '.join(more)}")
            times = once(at)
        spread = "every" in wanted and "start" not in wanted
        return registry.defined(registry.parsed(name, "", place, times, task=task, spread=spread, **wanted))
    except ValueError as error:
        raise SubscriberError(f"Schedule {name!r}: {error}") from None


def changed(name: str, definition: Definition, task: Any, options: Mapping[str, Any]) -> Definition:
    """Return the definition with other options. The queue and the priority stay, unless the task is given.

    Raises:
        SubscriberError: as for ``definition_of``.
    """
    changes = given(options)
    if task is None and not changes:
        return definition
    kept = given(options_of(definition))
    if any(option in changes for option in TIMES):
        kept = {option: value for option, value in kept.items() if option not in OF_TIMES}
    if task is not None:
        return definition_of(name, task, {**kept, **changes})
    return definition_of(name, definition.task, {**kept, **changes}, registry.destination(definition))


def options_of(definition: Definition) -> ScheduleOptions:
    """Return the options from which a definition was made."""
    times = definition.timetable
    found = ScheduleOptions(
        args=definition.payload["args"],
        kwargs=definition.payload["kwargs"],
        catch_up=definition.catch_up,
        overlap=definition.overlap,
    )
    if times.cron:
        return {**found, "cron": times.cron, "timezone": times.timezone}
    moment = None if times.start_ms is None else datetime.datetime.fromtimestamp(times.start_ms / 1000, datetime.UTC)
    if not times.every_ms:
        return {**found, "at": moment}
    every = datetime.timedelta(milliseconds=times.every_ms)
    return {**found, "every": every, "start": None if times.spread else moment}


def topic_of(path: str) -> str:
    """Return the topic of the jobs of a task that this process has imported; empty if it cannot run."""
    try:
        return registry.topic_of(_imported(path))
    except ValueError:
        return ""


def path_of(name: Any) -> Any:
    """Return the path of a task of ``contrib.celery`` with a name in Celery; anything else is a path already."""
    named = getattr(sys.modules.get(CELERY_TASKS), "_by_name", {})
    return named[name].module_path if isinstance(name, str) and name in named else name


def _imported(path: Any) -> str:
    """Require the path of a task that this process has imported: nothing else is imported because somebody names it."""
    path = path_of(path)
    if not isinstance(path, str) or "." not in path:
        raise ValueError(f"task={path!r}: must be a task, or its dotted path")
    module, _, name = path.rpartition(".")
    if not hasattr(sys.modules.get(module), name):
        near = did_you_mean(close_names(path, registry.known_tasks() if registry.known_tasks else (), most=1))
        raise ValueError(f"task={path!r}: no module that subscribers import declares it.{near and ' '}{near}")
    return path

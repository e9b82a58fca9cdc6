"""The schedules that people make: from their options to a definition, and back."""

from __future__ import annotations

import datetime
import sys
from typing import Any, TypedDict

from django_mysqlqueue.exceptions import SubscriberError
from django_mysqlqueue.names.rules import JOB_PREFIX
from django_mysqlqueue.schedules import registry
from django_mysqlqueue.schedules.definitions import Definition
from django_mysqlqueue.schedules.registry import Destination
from django_mysqlqueue.schedules.timetables import once
from django_mysqlqueue.text.humanize import close_names, did_you_mean


class Options(TypedDict, total=False):
    """The options of such a schedule, as ``recurring`` has them; None: its default, or if it is changed, as it was."""

    task: Any
    """A task, or its path."""
    cron: Any
    every: Any
    at: Any
    """When it runs once, in place of ``cron`` and ``every``."""
    start: Any
    timezone: Any
    args: Any
    kwargs: Any
    catch_up: Any
    overlap: Any


TIMES = ("cron", "every", "at")
"""The options of which a schedule has one."""
OF_TIMES = (*TIMES, "start", "timezone")


def definition_of(name: str, options: Options) -> Definition:
    """Return the definition of a schedule.

    Raises:
        SubscriberError: a value breaks a rule. The error names the schedule, the value and the rule.
    """
    task = options.get("task")
    function = getattr(task, "func", None)
    place = None
    try:
        if function is not None:
            path = f"{function.__module__}.{function.__qualname__}"
            place = Destination(task.backend, task.queue_name, task.priority)  # type: ignore[union-attr]
        else:
            path = _imported(task)
        return _defined(name, path, place, options)
    except ValueError as error:
        raise SubscriberError(f"Schedule {name!r}: {error}") from None


def changed(name: str, definition: Definition, changes: Options) -> Definition:
    """Return the definition with other options. The queue and the priority stay, unless the task is given.

    Raises:
        SubscriberError: as for ``definition_of``.
    """
    given = {option: value for option, value in changes.items() if value is not None}
    if not given:
        return definition
    kept = dict(options_of(definition))
    if any(option in given for option in TIMES):
        kept = {option: value for option, value in kept.items() if option not in OF_TIMES}
    options = Options(**{**kept, **given})  # type: ignore[typeddict-item]
    if "task" in given:
        return definition_of(name, options)
    place = Destination(definition.backend, definition.topic.removeprefix(JOB_PREFIX), definition.priority)
    try:
        return _defined(name, definition.task, place, options)
    except ValueError as error:
        raise SubscriberError(f"Schedule {name!r}: {error}") from None


def options_of(definition: Definition) -> Options:
    """Return the options from which a definition was made."""
    times = definition.timetable
    found = Options(
        task=definition.task,
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


def _defined(name: str, path: str, place: Destination | None, options: Options) -> Definition:
    given = {option: value for option, value in options.items() if value is not None and option != "task"}
    at, times = given.pop("at", None), None
    if at is not None:
        if more := [option for option in OF_TIMES if option in given]:
            raise ValueError(f"at={at!r}: pass it without {' and '.join(more)}")
        times = once(at)
    spread = "every" in given and "start" not in given
    return registry.defined(registry.parsed(name, "", place, times, task=path, spread=spread, **given))


def _imported(path: Any) -> str:
    """Require the path of a task that this process has imported: nothing else is imported because somebody names it."""
    if not isinstance(path, str) or "." not in path:
        raise ValueError(f"task={path!r}: must be a task, or its dotted path")
    module, _, name = path.rpartition(".")
    if not hasattr(sys.modules.get(module), name):
        near = did_you_mean(close_names(path, registry.known_tasks() if registry.known_tasks else (), most=1))
        raise ValueError(f"task={path!r}: no module that subscribers import declares it.{near and ' '}{near}")
    return path

"""The schedules that a project declares: with ``@recurring``, ``recurring_message`` and ``RECURRING``."""

from __future__ import annotations

import inspect
import json
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar, Unpack

from django.conf import settings as django_settings
from django.core.exceptions import ImproperlyConfigured
from django.core.serializers.json import DjangoJSONEncoder

from django_mysqlqueue.arguments import shown, spelled_out
from django_mysqlqueue.exceptions import InvalidMessage, SubscriberError
from django_mysqlqueue.names.ids import SCHEDULE_NAME_LENGTH
from django_mysqlqueue.names.keys import check_key
from django_mysqlqueue.names.rules import JOB_PREFIX, job_topic
from django_mysqlqueue.options.conf import get_settings
from django_mysqlqueue.options.topics import check_topic
from django_mysqlqueue.schedules.definitions import ALL, LATEST, QUEUE, SKIP, Definition
from django_mysqlqueue.schedules.options import TaskOptions, Times, given
from django_mysqlqueue.schedules.timetables import Timetable, timetable
from django_mysqlqueue.text.humanize import close_names, did_you_mean

T = TypeVar("T")
_NAME = re.compile(rf"[A-Za-z0-9._-]{{1,{SCHEDULE_NAME_LENGTH}}}")


class Destination(NamedTuple):
    """Where the jobs of a task go."""

    backend: str
    """The alias in ``TASKS``."""
    queue_name: str
    priority: int

    @classmethod
    def of(cls, task: Any) -> Destination:
        """Return that of a task object."""
        return cls(task.backend, task.queue_name, task.priority)


class OtherBackend(Exception):
    """The task's backend is not the queue's, so that its jobs cannot be published. The text says so."""


place_of: Callable[[str, Destination | None], Destination] | None = None
"""Returns where the jobs of the task with a path go; set by the app if there is a framework for tasks.

It takes the place of the task object that was declared, or None, and raises ValueError or ImportError if the task
cannot run, and OtherBackend if it runs elsewhere.
"""


known_tasks: Callable[[], Collection[str]] | None = None
"""Returns the paths of the tasks that this process has imported; set by the app like ``place_of``."""


@dataclass(frozen=True, slots=True)
class Declared:
    """A schedule as it was declared."""

    name: str
    where: str = field(compare=False)
    """The place of the declaration, for messages."""
    definition: Definition
    """The definition; that of a task lacks its topic, priority and backend."""
    place: Destination | None = None
    """Where its jobs go, if a task object was declared."""


class Schedules(NamedTuple):
    """The schedules of a project."""

    definitions: dict[str, Definition]
    errors: list[str]
    """The rules that the others break."""
    elsewhere: list[str]
    """Which schedules do not run here, because their tasks have other backends, and why."""


_declared: dict[str, Declared] = {}


@spelled_out
def recurring(
    cron: str | None = None, *, name: str | None = None, spread: bool = False, **options: Unpack[TaskOptions]
) -> Callable[[T], T]:
    """Run a task at the times of a cron line, or after each interval. It may stand above or below ``@task``.

    For a task that exists: ``recurring(every=timedelta(minutes=5))(task)``. Subscribers enqueue its jobs.

    Args:
        cron: minute, hour, day of the month, month and day of the week, for example ``"0 3 * * *"``.
        name: the name of the schedule (default: the path of the task). A task may have several schedules.
        spread: True to choose the start by a hash of the name, so that schedules with the same interval do not all run
            in the same second (default: it is one interval after the schedule was registered).

    Raises:
        SubscriberError: a value breaks a rule, or another schedule has the name. The error names the rule or the place.
    """
    where = _caller()

    def decorate(decorated: T) -> T:
        task: Any = decorated
        function = getattr(task, "func", task)
        if not callable(function):
            raise SubscriberError(f"@recurring on {decorated!r} ({where}): it is not a task or a function")
        path = f"{function.__module__}.{function.__qualname__}"
        place = None if function is task else Destination.of(task)
        called = path if name is None else name
        _remember(parsed(called, where, place, cron=cron, task=path, spread=spread, **given(options)))
        return decorated

    return decorate


@spelled_out
def recurring_message(
    name: str,
    cron: str | None = None,
    *,
    topic: str,
    payload: Any,
    key: str | None = None,
    metadata: Mapping[str, Any] | None = None,
    spread: bool = False,
    **options: Unpack[Times],
) -> None:
    """Publish a message at the times of a cron line, or after each interval.

    Call it where subscribers import it, such as at the end of a ``subscribers.py``: they publish the messages.

    Args:
        name: the name of the schedule.
        cron: minute, hour, day of the month, month and day of the week, for example ``"0 3 * * *"``.
        topic: the topic.
        payload: the payload, a value that ``DjangoJSONEncoder`` can encode.
        key: the partition key.
        metadata: a JSON object to store beside the payload.
        spread: True to choose the start by a hash of the name, so that schedules with the same interval do not all run
            in the same second (default: it is one interval after the schedule was registered).

    Raises:
        SubscriberError: a value breaks a rule, or another schedule has the name. The error names the rule or the place.
    """
    message = {"topic": topic, "payload": payload, "key": key, "metadata": metadata}
    _remember(parsed(name, _caller(), cron=cron, spread=spread, **message, **given(options)))


def _caller() -> str:
    frame = sys._getframe(3)  # Beyond ``@spelled_out``.
    return f"{frame.f_globals.get('__name__', '?')}, line {frame.f_lineno}"


def _remember(declared: Declared) -> None:
    known = _declared.get(declared.name)
    # A module that is imported again replaces its own.
    if known is not None and known.where != declared.where and known != declared:
        raise SubscriberError(_twice(known, declared))
    _declared[declared.name] = declared


def _twice(one: Declared, other: Declared) -> str:
    return (
        f"Two schedules have the name {one.name!r}: {one.where}, and {other.where}. Pass name= to one of them, or give "
        "both the same definition."
    )


_REQUIRED: Any = object()


def parsed(
    name: Any,
    where: str,
    place: Destination | None = None,
    times: Timetable | None = None,
    *,
    cron: Any = None,
    every: Any = None,
    start: Any = None,
    spread: Any = False,
    timezone: Any = None,
    task: Any = None,
    args: Any = (),
    kwargs: Any = None,
    topic: Any = None,
    payload: Any = _REQUIRED,
    key: Any = None,
    metadata: Any = None,
    catch_up: Any = LATEST,
    overlap: Any = QUEUE,
) -> Declared:
    """Return a checked declaration. Its options are the keys of an entry of ``RECURRING``.

    ``where``: the place of the declaration; empty: there is none. ``times``: its times, if no option has them.

    Raises:
        SubscriberError: a value breaks a rule. The error names the schedule, its place, the value and the rule.
    """
    try:
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise ValueError(
                f"name={name!r}: must be 1 to {SCHEDULE_NAME_LENGTH} letters, digits, '.', '_' or '-'; pass another "
                "name=, if it is the path of a task"
            )
        _among("catch_up", catch_up, LATEST, ALL)
        _among("overlap", overlap, QUEUE, SKIP)
        if catch_up == ALL and overlap == SKIP:
            raise ValueError("catch_up='all' with overlap='skip': of the missed ticks, all but the first were skipped")
        by = _spread_by(name, start, spread)
        times = times or timetable(cron, every, timezone, django_settings.TIME_ZONE, start=start, spread=by)
        if (task is None) == (topic is None):
            raise ValueError("pass a task or a topic, and not both")
        if topic is None:
            content = {"task": _path(task), "args": _arguments(args), "kwargs": _keywords(kwargs)}
            if payload is not _REQUIRED or key is not None or metadata is not None:
                raise ValueError("payload, key and metadata are for topics: a task has args and kwargs")
            definition = Definition(times, "", content, task=task, catch_up=catch_up, overlap=overlap)
            return Declared(name, where, definition, place)
        if overlap != QUEUE:
            raise ValueError(f"overlap={overlap!r}: it is for tasks: a message has no result that says when it ended")
        if payload is _REQUIRED:
            raise ValueError("payload is missing")
        if args or kwargs:
            raise ValueError("args and kwargs are for tasks: a topic has a payload")
        check_topic(topic)
        if metadata is not None and not isinstance(metadata, Mapping):
            raise ValueError(f"metadata={shown(metadata)}: must be a dict")
        definition = Definition(
            times,
            topic,
            _as_json("payload", payload),
            key=None if key is None else check_key(key),
            metadata=None if metadata is None else _as_json("metadata", dict(metadata)),
            catch_up=catch_up,
        )
        return Declared(name, where, definition)
    except (ValueError, InvalidMessage) as error:
        raise SubscriberError(f"Schedule {name!r}{where and f' ({where})'}: {error}") from None


def _spread_by(name: str, start: Any, spread: Any) -> str:
    """Return the name by whose hash the start of an interval is chosen; empty if it is not."""
    if not isinstance(spread, bool):
        raise ValueError(f"spread={spread!r}: must be True or False")
    if spread and start is not None:
        raise ValueError("pass start or spread, and not both")
    return name if spread else ""


def _among(option: str, value: Any, *known: str) -> None:
    if value not in known:
        raise ValueError(f"{option}={value!r}: must be {' or '.join(map(repr, known))}")


def _path(task: Any) -> str:
    if not isinstance(task, str) or "." not in task:
        raise ValueError(f"task={task!r}: must be the dotted path of a task")
    return task


def _arguments(args: Any) -> list[Any]:
    if isinstance(args, (str, bytes)) or not isinstance(args, Sequence):
        raise ValueError(f"args={shown(args)}: must be a list")
    return list(_as_json("args", list(args), encoder=None))


def _keywords(kwargs: Any) -> dict[str, Any]:
    if kwargs is None:
        return {}
    if not isinstance(kwargs, Mapping) or not all(isinstance(name, str) for name in kwargs):
        raise ValueError(f"kwargs={shown(kwargs)}: must be a dict of names")
    return dict(_as_json("kwargs", dict(kwargs), encoder=None))


def _as_json(option: str, value: Any, encoder: type[json.JSONEncoder] | None = DjangoJSONEncoder) -> Any:
    try:
        return json.loads(json.dumps(value, allow_nan=False, cls=encoder))
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{option}={shown(value)}: must be JSON-serializable ({error})") from None


OPTIONS = tuple(
    parameter.name.upper()
    for parameter in inspect.signature(parsed).parameters.values()
    if parameter.kind is parameter.KEYWORD_ONLY
)
"""Keys of an entry of ``RECURRING``."""


def _from_settings() -> Iterator[Declared | str]:
    """Yield the schedules of ``RECURRING``; of those that break a rule, the error."""
    for name, entry in get_settings().recurring.items():
        where = f"MYSQLQUEUE['RECURRING'][{name!r}]"
        if not isinstance(entry, Mapping):
            yield f"{where} must be a dict, not {type(entry).__name__}."
        elif unknown := [key for key in entry if key not in OPTIONS]:
            nearest = did_you_mean(close_names(str(unknown[0]), OPTIONS, most=1)) or f"Known: {', '.join(OPTIONS)}."
            yield f"{where} has the unknown key {unknown[0]!r}. {nearest}"
        else:
            try:
                yield parsed(name, where, **{key.lower(): value for key, value in entry.items()})
            except SubscriberError as error:
                yield str(error)


def find() -> Schedules:
    """Return the schedules that the imported code and the settings declare."""
    found = Schedules({}, [], [])
    try:
        configured = list(_from_settings())
    except ImproperlyConfigured:
        configured = []  # reported by E001 to E006
    declared = dict(_declared)
    for schedule in configured:
        if isinstance(schedule, str):
            found.errors.append(schedule)
        elif declared.get(schedule.name, schedule) != schedule:
            found.errors.append(_twice(declared[schedule.name], schedule))
        else:
            declared[schedule.name] = schedule
    for name in sorted(declared):
        try:
            found.definitions[name] = _defined(declared[name])
        except OtherBackend as error:
            found.elsewhere.append(f"Schedule {name!r} ({declared[name].where}): {error}")
        except (ValueError, ImportError) as error:
            found.errors.append(f"Schedule {name!r} ({declared[name].where}): {error}")
    return found


def definitions() -> dict[str, Definition]:
    """Return the definitions of all schedules, by name.

    Raises:
        SubscriberError: one of them breaks a rule.
    """
    found = find()
    if found.errors:
        raise SubscriberError(found.errors[0])
    return found.definitions


def _defined(declared: Declared) -> Definition:
    """Return the definition of a schedule: that of a task needs its queue.

    Raises:
        ValueError, ImportError: the task does not exist, or cannot run.
        OtherBackend: the task has another backend.
    """
    definition = declared.definition
    if not definition.task:
        return definition
    place = _place_of(definition.task, declared.place)
    return definition._replace(topic=job_topic(place.queue_name), priority=place.priority, backend=place.backend)


def _place_of(task: str, declared: Destination | None) -> Destination:
    if place_of is None:
        raise ValueError(f"task {task!r}: tasks need Django 6.0, or the package django-tasks")
    return place_of(task, declared)


def defined(declared: Declared) -> Definition:
    """Return the definition of a schedule that people make, whose task this process knows.

    Raises:
        ValueError: the task cannot run. The error names it and the reason.
    """
    try:
        return _defined(declared)
    except (OtherBackend, ImportError) as error:
        raise ValueError(f"task {declared.definition.task!r}: {error}") from None


def topic_of(task: str) -> str:
    """Return the topic of the jobs of a task.

    Raises:
        ValueError: the task cannot run.
    """
    try:
        return job_topic(_place_of(task, None).queue_name)
    except (OtherBackend, ImportError) as error:
        raise ValueError(f"task {task!r}: {error}") from None


def destination(definition: Definition) -> Destination:
    """Return where the jobs of a schedule that people make go."""
    return Destination(definition.backend, definition.topic.removeprefix(JOB_PREFIX), definition.priority)


def require_task(definition: Definition) -> None:
    """Require that this process can run the task of a schedule that people have made.

    Raises:
        ValueError: it cannot. The error names the task and the reason.
    """
    try:
        _place_of(definition.task, destination(definition))
    except (OtherBackend, ImportError) as error:
        raise ValueError(f"task {definition.task!r}: {error}") from None


def why_not(definition: Definition) -> str:
    """Return why the task of a schedule that people have made cannot run; empty if it can.

    It is also empty if this process cannot tell, because it has no backend of the queue in ``TASKS``.
    """
    if place_of is None:
        return ""
    try:
        place_of(definition.task, destination(definition))
    except OtherBackend:
        return ""
    except (ValueError, ImportError) as error:
        return f"task {definition.task!r}: {error}"
    return ""

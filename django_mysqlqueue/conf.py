"""The ``MYSQLQUEUE`` setting: one dict, durations in seconds.

``get_settings()`` validates at access and follows ``override_settings``. The
same rules, in the same place, serve the system checks (``problems``).
"""

from __future__ import annotations

import difflib
import random
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from os import PathLike, fspath
from typing import Any, TypeVar

from django.conf import settings as django_settings
from django.core.exceptions import ImproperlyConfigured
from django.core.signals import setting_changed
from django.db import InterfaceError, OperationalError

from django_mysqlqueue.exceptions import CommitOutcomeUnknown, StaleDelivery

RECORD = "record_deliveries"
LONGEST_DELAY = 30 * 86400.0
"""Longest visibility timeout, backoff, nack or snooze delay, in seconds."""


@dataclass(frozen=True, slots=True)
class Backoff:
    """Exponential backoff with jitter, in seconds.

    The wait after attempt n is ``initial * factor ** (n - 1)``, at most
    ``maximum``, times a random factor between ``1 - jitter`` and ``1 + jitter``.
    """

    initial: float = 1.0
    factor: float = 2.0
    maximum: float = 3600.0
    jitter: float = 0.2

    def delay(self, attempt: int, rng: Callable[[], float] = random.random) -> float:
        """Seconds to wait after the given attempt (1 is the first) has failed."""
        try:
            # As a float: whole numbers would be multiplied out to millions of digits.
            wait = min(self.initial * float(self.factor) ** (attempt - 1), self.maximum)
        except OverflowError:  # a float's exponent ends near 2 ** 1024
            wait = self.maximum if self.initial else 0.0
        return max(0.0, wait * (1 + self.jitter * (2 * rng() - 1)))


@dataclass(frozen=True, slots=True)
class TopicSettings:
    """What ``TOPICS`` says of one topic; None: the general setting serves."""

    retention: float | None = None
    has_retention: bool = False
    partitions: int | None = None


@dataclass(frozen=True, slots=True)
class Settings:
    """The validated setting. Durations in seconds, sizes in bytes."""

    database: str | None = None
    poll_interval: float = 0.1
    max_poll_interval: float = 1.0
    batch_size: int = 100
    prefetch: int = 200
    threads: int = 4
    lease_duration: float = 30.0
    lease_renewal_interval: float = 10.0
    visibility_timeout: float = 60.0
    max_processing_time: float = 600.0
    shutdown_timeout: float = 25.0
    max_attempts: int | None = 5
    backoff: Backoff = Backoff()
    retention: float | None = 86400.0
    dlq_suffix: str = "_dlq"
    dlq_retention: float | None = None
    max_payload_bytes: int = 1_048_576
    keyless_partitions: int = 16
    eager: bool = False
    record_deliveries: str = "failures"
    history_retention: float = 7 * 86400.0
    archive_path: str | None = None
    archive_required: bool = False
    metrics_token: str | None = field(default=None, repr=False)
    redact: Callable[..., str] | str | None = None
    """What pages leave of a payload, of metadata and of an error: a function or its dotted path."""
    topics: Mapping[str, TopicSettings] = field(default_factory=dict)
    groups: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Handler options by group."""
    recorded: Mapping[str, str] = field(default_factory=dict)
    """``RECORD_DELIVERIES`` of the groups that have their own."""

    def retention_of(self, topic: str, *, has_groups: bool) -> float | None:
        """Seconds that a settled message stays in the log; None: for ever.

        A dead letter that no group reads is kept unless ``DLQ_RETENTION`` is set.
        """
        special = self.topics.get(topic)
        if special is not None and special.has_retention:
            return special.retention
        if topic.endswith(self.dlq_suffix) and not has_groups:
            return self.dlq_retention
        return self.retention

    def recorded_of(self, group: str) -> str:
        """Which deliveries of a group are recorded: ``"all"``, ``"failures"`` or ``"none"``."""
        return self.recorded.get(group, self.record_deliveries)

    def partitions_of(self, topic: str) -> int | None:
        """The number of partitions that the topic's keys are hashed to, if they are."""
        special = self.topics.get(topic)
        return special.partitions if special is not None else None


@dataclass(frozen=True, slots=True)
class Problem:
    """One broken rule of the setting."""

    id: str
    message: str
    hint: str


class _Invalid(Exception):
    """Carries the rule that a value breaks."""


# -- what a value may be ------------------------------------------------------


def _number(*, minimum: float = 0.0, exclusive: bool = False, maximum: float = 1e9) -> Callable[[Any], float]:
    def parse(value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or value != value:
            raise _Invalid("must be a number of seconds")
        if value < minimum or (exclusive and value == minimum) or value > maximum:
            comparison = "above" if exclusive else "at least"
            raise _Invalid(f"must be {comparison} {minimum:g} and at most {maximum:g}")
        return float(value)

    return parse


def _integer(minimum: int, maximum: int = 2**31 - 1) -> Callable[[Any], int]:
    def parse(value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise _Invalid("must be a whole number")
        if not minimum <= value <= maximum:
            raise _Invalid(f"must be from {minimum} to {maximum}")
        return value

    return parse


_T = TypeVar("_T")


def _or_none(parse: Callable[[Any], _T]) -> Callable[[Any], _T | None]:
    return lambda value: None if value is None else parse(value)


def _choice(*values: str) -> Callable[[Any], str]:
    def parse(value: Any) -> str:
        if value not in values:
            raise _Invalid(f"must be one of {', '.join(map(repr, values))}")
        return str(value)

    return parse


def _boolean(value: Any) -> bool:
    if not isinstance(value, bool):
        raise _Invalid("must be True or False")
    return value


def _function(value: Any) -> Callable[..., str] | str:
    if isinstance(value, str):
        if not all(part.isidentifier() for part in value.split(".")) or "." not in value:
            raise _Invalid("must be a function or a dotted path to one")
    elif not callable(value):
        raise _Invalid("must be a function or a dotted path to one")
    return value  # type: ignore[no-any-return]


def _alias(value: Any) -> str:
    if not isinstance(value, str) or value not in django_settings.DATABASES:
        raise _Invalid(f"must be an alias of DATABASES ({', '.join(django_settings.DATABASES)})")
    return value


def _archive_path(value: Any) -> str:
    if not isinstance(value, (str, PathLike)) or not str(value):
        raise _Invalid("must be a path or a URI of a folder")
    return fspath(value)


def _suffix(value: Any) -> str:
    allowed = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-"
    if not isinstance(value, str) or not 1 <= len(value) <= 20 or not set(value) <= set(allowed):
        raise _Invalid("must be 1 to 20 letters, digits, '.', '_' or '-'")
    return value


def _token(value: Any) -> str:
    if not isinstance(value, str) or not re.fullmatch(r"[!-~]{20,}", value):
        raise _Invalid("must be at least 20 printable ASCII characters without a space")
    return value


_BACKOFF_FIELDS: dict[str, Callable[[Any], float]] = {
    "initial": _number(maximum=LONGEST_DELAY),
    "factor": _number(minimum=1.0, maximum=1000.0),
    "maximum": _number(maximum=LONGEST_DELAY / 2),
    "jitter": _number(maximum=1.0),
}


def parse_backoff(value: Any) -> Backoff:
    """A ``Backoff`` from itself or from a dict of some of its fields (either case)."""
    if isinstance(value, Backoff):
        value = {name.name: getattr(value, name.name) for name in fields(Backoff)}
    if not isinstance(value, Mapping):
        raise _Invalid("must be a Backoff or a dict with 'initial', 'factor', 'maximum', 'jitter'")
    given: dict[str, float] = {}
    for key, item in value.items():
        name = str(key).lower()
        if name not in _BACKOFF_FIELDS:
            raise _Invalid(f"has the unknown key {key!r}")
        try:
            given[name] = _BACKOFF_FIELDS[name](item)
        except _Invalid as error:
            raise _Invalid(f"{name} {item!r} {error}") from None
    return Backoff(**given)


NEVER_REJECTED: tuple[type[Exception], ...] = (OperationalError, InterfaceError, CommitOutcomeUnknown, StaleDelivery)
"""A lost connection, a deadlock, a lock wait timeout, a stale delivery: they say nothing about the message."""


def _exceptions(value: Any) -> tuple[type[Exception], ...]:
    found = tuple(value) if isinstance(value, (tuple, list)) else (value,)
    if not found:
        raise _Invalid("must name at least one exception class")
    for one in found:
        if not isinstance(one, type) or not issubclass(one, Exception):
            raise _Invalid("must be a subclass of Exception or a tuple of them")
        if issubclass(one, BaseExceptionGroup):
            raise _Invalid("must name the exceptions inside groups: a group counts as what is in it")
    return found


def _rejected_exceptions(value: Any) -> tuple[type[Exception], ...]:
    found = _exceptions(value)
    for one in found:
        if issubclass(one, NEVER_REJECTED):
            raise _Invalid(f"must not name {one.__name__}, which is always retried: it says nothing about the message")
    return found


HANDLER_OPTIONS: dict[str, Callable[[Any], Any]] = {
    "mode": _choice("ordered", "shared"),
    "atomic": _boolean,
    "start": _choice("earliest", "latest"),
    "on_failure": _choice("skip", "block"),
    "max_attempts": _or_none(_integer(1)),
    "visibility_timeout": _number(exclusive=True, maximum=LONGEST_DELAY),
    "max_processing_time": _number(exclusive=True, maximum=LONGEST_DELAY),
    "timeout": _or_none(_number(exclusive=True, maximum=LONGEST_DELAY)),
    "backoff": parse_backoff,
    "batch_size": _integer(1, 10_000),
}
"""What ``@subscriber`` takes and ``GROUPS`` may override."""
CODE_OPTIONS: dict[str, Callable[[Any], Any]] = {
    "reject_on": _rejected_exceptions,
    "retry_on": _exceptions,
}
"""What only ``@subscriber`` takes."""

_FIELDS: dict[str, Callable[[Any], Any]] = {
    "database": _or_none(_alias),
    "poll_interval": _number(exclusive=True),
    "max_poll_interval": _number(exclusive=True),
    "batch_size": HANDLER_OPTIONS["batch_size"],
    "prefetch": _integer(1, 1_000_000),
    "threads": _integer(1, 1000),
    "lease_duration": _number(exclusive=True),
    "lease_renewal_interval": _number(exclusive=True),
    "visibility_timeout": HANDLER_OPTIONS["visibility_timeout"],
    "max_processing_time": HANDLER_OPTIONS["max_processing_time"],
    "shutdown_timeout": _number(),
    "max_attempts": HANDLER_OPTIONS["max_attempts"],
    "backoff": parse_backoff,
    "retention": _or_none(_number()),
    "dlq_suffix": _suffix,
    "dlq_retention": _or_none(_number()),
    "max_payload_bytes": _integer(1, 2**30),
    "keyless_partitions": _integer(1, 100_000),
    "eager": _boolean,
    "record_deliveries": _choice("all", "failures", "none"),
    "history_retention": _number(),
    "archive_path": _or_none(_archive_path),
    "archive_required": _boolean,
    "metrics_token": _or_none(_token),
    "redact": _or_none(_function),
}
_SECRETS = ("METRICS_TOKEN",)
"""Whose values are not shown."""


def check_handler_option(name: str, value: Any) -> Any:
    """The parsed value of one handler option.

    Raises:
        ValueError: naming the option, the value and the rule.
    """
    parse = HANDLER_OPTIONS.get(name) or CODE_OPTIONS.get(name)
    if parse is None:
        raise ValueError(f"{name} is not a handler option")
    try:
        return parse(value)
    except _Invalid as error:
        raise ValueError(f"{name}={value!r}: {error}") from None


# -- reading the setting ------------------------------------------------------


def _nearest(name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name.upper(), known, 1)
    return f"Did you mean {close[0]}?" if close else f"Known: {', '.join(sorted(known))}."


def _parse(raw: Any) -> tuple[Settings, list[Problem]]:
    if not isinstance(raw, Mapping):
        return Settings(), [Problem("E001", f"MYSQLQUEUE must be a dict, not {type(raw).__name__}.", "")]
    problems: list[Problem] = []
    values: dict[str, Any] = {}
    known = [name.upper() for name in _FIELDS] + ["TOPICS", "GROUPS"]
    for key, value in raw.items():
        if key not in known:
            problems.append(Problem("E002", f"MYSQLQUEUE has the unknown key {key!r}.", _nearest(str(key), known)))
        elif key not in ("TOPICS", "GROUPS"):
            try:
                values[key.lower()] = _FIELDS[key.lower()](value)
            except _Invalid as error:
                default = getattr(Settings(), key.lower())
                hint = f"The default is {default!r}."
                shown = "…" if key in _SECRETS else repr(value)
                problems.append(Problem("E003", f"MYSQLQUEUE[{key!r}] = {shown} {error}.", hint))
    settings = Settings(**values)
    problems += _relations(settings)
    topics, groups = raw.get("TOPICS", {}), raw.get("GROUPS", {})
    by_topic, options = dict(_topics(topics, problems)), dict(_groups(groups, problems))
    settings = replace(
        settings,
        topics=by_topic,
        recorded={group: given.pop(RECORD) for group, given in options.items() if RECORD in given},
        groups=options,
    )
    return settings, problems


def _relations(settings: Settings) -> Iterator[Problem]:
    if settings.lease_renewal_interval * 2 > settings.lease_duration:
        yield Problem(
            "E004",
            f"MYSQLQUEUE['LEASE_RENEWAL_INTERVAL'] = {settings.lease_renewal_interval:g} is more than half of "
            f"LEASE_DURATION = {settings.lease_duration:g}: one late heartbeat would lose every lease.",
            "A third of the lease duration is usual.",
        )
    if settings.max_poll_interval < settings.poll_interval:
        yield Problem(
            "E004",
            f"MYSQLQUEUE['MAX_POLL_INTERVAL'] = {settings.max_poll_interval:g} is below "
            f"POLL_INTERVAL = {settings.poll_interval:g}.",
            "",
        )


def _topics(raw: Any, problems: list[Problem]) -> Iterator[tuple[str, TopicSettings]]:
    if not isinstance(raw, Mapping):
        problems.append(Problem("E005", f"MYSQLQUEUE['TOPICS'] must be a dict, not {type(raw).__name__}.", ""))
        return
    parsers: dict[str, Callable[[Any], Any]] = {"RETENTION": _FIELDS["retention"], "PARTITIONS": _integer(1, 100_000)}
    for topic, options in raw.items():
        _check_name(f"MYSQLQUEUE['TOPICS'] has {topic!r}", topic, "E005", problems)
        parsed = _options(f"MYSQLQUEUE['TOPICS'][{topic!r}]", options, parsers, "E005", problems)
        yield (
            str(topic),
            TopicSettings(
                retention=parsed.get("RETENTION"),
                has_retention="RETENTION" in parsed,
                partitions=parsed.get("PARTITIONS"),
            ),
        )


def _groups(raw: Any, problems: list[Problem]) -> Iterator[tuple[str, dict[str, Any]]]:
    if not isinstance(raw, Mapping):
        problems.append(Problem("E006", f"MYSQLQUEUE['GROUPS'] must be a dict, not {type(raw).__name__}.", ""))
        return
    parsers = {name.upper(): parse for name, parse in HANDLER_OPTIONS.items()}
    parsers[RECORD.upper()] = _FIELDS[RECORD]
    parsers |= {name.upper(): _only_in_code for name in CODE_OPTIONS}
    for group, options in raw.items():
        _check_name(f"MYSQLQUEUE['GROUPS'] has {group!r}", group, "E006", problems)
        parsed = _options(f"MYSQLQUEUE['GROUPS'][{group!r}]", options, parsers, "E006", problems)
        yield str(group), {name.lower(): value for name, value in parsed.items()}


def _only_in_code(value: Any) -> Any:
    raise _Invalid("can only be given to @subscriber: exception classes belong to the handler's code")


def _check_name(what: str, name: Any, problem_id: str, problems: list[Problem]) -> None:
    # names.py has the rule for what is published; it imports this module.
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9._-]{1,120}", name):
        problems.append(Problem(problem_id, f"{what}: names are letters, digits, '.', '_' and '-'.", ""))


def _options(
    where: str, options: Any, parsers: Mapping[str, Callable[[Any], Any]], problem_id: str, problems: list[Problem]
) -> dict[str, Any]:
    parsed: dict[str, Any] = {}
    if not isinstance(options, Mapping):
        problems.append(Problem(problem_id, f"{where} must be a dict, not {type(options).__name__}.", ""))
        return parsed
    for key, value in options.items():
        if key not in parsers:
            hint = _nearest(str(key), list(parsers))
            problems.append(Problem(problem_id, f"{where} has the unknown key {key!r}.", hint))
            continue
        try:
            parsed[key] = parsers[key](value)
        except _Invalid as error:
            problems.append(Problem(problem_id, f"{where}[{key!r}] = {value!r} {error}.", ""))
    return parsed


def problems() -> list[Problem]:
    """Every rule that the ``MYSQLQUEUE`` setting breaks; empty when it is sound."""
    return _parse(getattr(django_settings, "MYSQLQUEUE", {}))[1]


@cache
def get_settings() -> Settings:
    """The validated setting.

    Raises:
        ImproperlyConfigured: naming the first value that breaks a rule.
    """
    settings, found = _parse(getattr(django_settings, "MYSQLQUEUE", {}))
    if found:
        raise ImproperlyConfigured(" ".join(filter(None, (found[0].message, found[0].hint))))
    return settings


def _forget(*, setting: str, **kwargs: Any) -> None:
    if setting in ("MYSQLQUEUE", "DATABASES"):
        get_settings.cache_clear()


setting_changed.connect(_forget, dispatch_uid="django_mysqlqueue.conf")

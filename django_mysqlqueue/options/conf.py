"""The ``MYSQLQUEUE`` setting: a dict with durations in seconds.

``get_settings()`` validates it on first access and again after ``override_settings``. The system checks report all
broken rules (``problems``).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Annotated, Any, NamedTuple, get_type_hints

from django.conf import settings as django_settings
from django.core.exceptions import ImproperlyConfigured
from django.core.signals import setting_changed

from django_mysqlqueue.names.rules import relay_target
from django_mysqlqueue.options import job_queues, validators
from django_mysqlqueue.options.backoff import Backoff
from django_mysqlqueue.options.table import NOT_IN_GROUPS, OPTIONS
from django_mysqlqueue.options.topic_settings import DATABASES, WILDCARDS, TopicMap
from django_mysqlqueue.options.validators import or_none
from django_mysqlqueue.text.humanize import close_names, did_you_mean

RECORD = "record_deliveries"
SQL_TOPICS = "sql_topics"


class HealthSettings(NamedTuple):
    """Limits above which failures are a problem; None: no limit.

    Rollups by the minute are kept for six hours; counts stop at 10,000.
    """

    window: Annotated[float, validators.number(minimum=60.0, maximum=6 * 3600.0)] = 600.0
    """Length, in seconds, of the window that ends now."""
    max_recent_dead_letters: Annotated[int | None, or_none(validators.integer(0, 9_999))] = 10
    """Maximum number of dead letters per group in the window."""
    max_failure_ratio: Annotated[float | None, or_none(validators.ratio)] = 0.5
    """Maximum share of a group's attempts in the window that fail, of those that ended."""
    min_attempts: Annotated[int, validators.integer(1)] = 10
    """Number of attempts in the window below which the ratio is not checked."""
    max_round_trip: Annotated[float | None, or_none(validators.number())] = 0.25
    """Maximum number of seconds that the database may take to answer half of a subscriber's polls."""
    max_log_size: Annotated[int | None, or_none(validators.integer(0, 2**62))] = 10 * 2**30
    """Maximum number of bytes of disk that the log may take."""


class BellSettings(NamedTuple):
    """Where publishers wake the subscribers of their host."""

    directory: Annotated[str | None, or_none(validators.absolute_path)] = None
    """The runtime directory; None: one of the user's own, in memory."""
    group: Annotated[str | None, or_none(validators.name_of_group)] = None
    """The group of users whose processes wake each other; None: only those of the same user."""
    listen: Annotated[validators.Address | None, or_none(validators.address)] = None
    """Where the publishers of other hosts ring by UDP; None: they do not."""
    announce: Annotated[validators.Address | None, or_none(validators.reachable_address)] = None
    """The address of ``listen`` for other hosts; None: it is found out."""
    secret: Annotated[validators.Secret | None, or_none(validators.secret)] = None
    """The key of the rings between hosts; None: there are none."""


@dataclass(frozen=True, slots=True)
class Settings:
    """The validated setting. Durations are in seconds, sizes in bytes.

    Each field with a parser, and each that an option of ``options.table`` has by default, is a key of the setting.
    """

    database: Annotated[str | None, or_none(validators.alias)] = None
    poll_interval: float = 0.1
    max_poll_interval: float = 1.0
    claim_size: int = 100
    prefetch: int = 200
    priority_share: int = 16
    threads: Annotated[int, validators.integer(1, 1000)] = 4
    async_concurrency: Annotated[int, validators.integer(1, 10_000)] = 100
    lease_duration: Annotated[float, validators.number(exclusive=True)] = 30.0
    lease_renewal_interval: Annotated[float, validators.number(exclusive=True)] = 10.0
    visibility_timeout: float = 60.0
    max_processing_time: float = 600.0
    shutdown_timeout: Annotated[float, validators.number()] = 25.0
    max_attempts: int | None = 5
    backoff: Backoff = Backoff()  # noqa: RUF009  # it is frozen
    retention: Annotated[float | None, or_none(validators.number())] = 86400.0
    orphan_retention: Annotated[float | None, or_none(validators.number())] = 7 * 86400.0
    strict_topics: Annotated[bool, validators.boolean] = False
    dlq_suffix: Annotated[str, validators.suffix] = "_dlq"
    dlq_retention: Annotated[float | None, or_none(validators.number())] = None
    max_payload_bytes: Annotated[int, validators.integer(1, 2**30)] = 1_048_576
    keyless_partitions: Annotated[int, validators.integer(1, 100_000)] = 16
    eager: Annotated[bool, validators.boolean] = False
    run_in_server: Annotated[bool, validators.boolean] = False
    record_deliveries: Annotated[str, validators.choice("all", "failures", "none")] = "failures"
    history_retention: Annotated[float, validators.number()] = 7 * 86400.0
    results_retention: Annotated[float, validators.number()] = 7 * 86400.0
    archive_path: Annotated[str | None, or_none(validators.archive_path)] = None
    archive_required: Annotated[bool, validators.boolean] = False
    topics: TopicMap = field(default_factory=lambda: TopicMap({}, "_dlq"))
    groups: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Handler options by group."""
    recorded: Mapping[str, str] = field(default_factory=dict)
    """``RECORD_DELIVERIES`` by group, for groups that override it."""
    bell: Annotated[BellSettings | None, or_none(_bell)] = field(default_factory=BellSettings)
    """How publishers wake subscribers; None: they do not."""
    recurring: Annotated[Mapping[str, Any], validators.mapping] = field(default_factory=dict)
    sql_topics: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """By group, the topics that clients in plain SQL consume."""
    monitoring: Mapping[str, Any] = field(
        default_factory=lambda: {"metrics_token": None, "redact": None, "health": HealthSettings()}, repr=False
    )
    """``METRICS_TOKEN``, ``REDACT`` and ``HEALTH``; in place of an invalid value, the exception to raise."""

    @property
    def metrics_token(self) -> str | None:
        """The token that the metrics view accepts, or None if none is configured."""
        found: str | None = self._monitoring("metrics_token")
        return found

    @property
    def redact(self) -> Callable[..., str] | str | None:
        """The function, or its dotted path, that redacts payloads, metadata and errors on pages; None: show them."""
        found: Callable[..., str] | str | None = self._monitoring("redact")
        return found

    @property
    def health(self) -> HealthSettings:
        """Limits above which failures are a problem."""
        found: HealthSettings = self._monitoring("health")
        return found

    def _monitoring(self, name: str) -> Any:
        """Return a setting that neither publishing nor subscribers need.

        Raises:
            ImproperlyConfigured: the value is invalid; the text names it and the rule. An invalid token must not open
                the metrics view, and an invalid ``REDACT`` must not reveal payloads.
        """
        found = self.monitoring[name]
        if isinstance(found, ImproperlyConfigured):
            raise ImproperlyConfigured(*found.args)
        return found

    def retention_of(self, topic: str, *, has_groups: bool) -> float | None:
        """Return for how many seconds settled messages of a topic stay in the log; None: forever.

        A dead letter that no group reads is kept unless ``DLQ_RETENTION`` is set. A message on any other topic
        without a group is kept for the longer of ``RETENTION`` and ``ORPHAN_RETENTION``, in case its group is
        registered late.
        """
        special = self.topics.of(topic)
        if special.has_retention:
            return special.retention
        if not has_groups and topic.endswith(self.dlq_suffix):
            return self.dlq_retention
        if not has_groups and not self.may_lack_groups(topic):
            both = (self.retention, self.orphan_retention)
            return None if None in both else max(seconds for seconds in both if seconds is not None)
        return self.retention

    def may_lack_groups(self, topic: str) -> bool:
        """Return True if the topic may have no consumer group: it is ``GROUPLESS``, a DLQ topic, or relayed."""
        return topic.endswith(self.dlq_suffix) or relay_target(topic) is not None or self.topics.of(topic).groupless

    def recorded_of(self, group: str) -> str:
        """Return which deliveries of a group are recorded: ``"all"``, ``"failures"`` or ``"none"``."""
        return self.recorded.get(group, self.record_deliveries)

    def partitions_of(self, topic: str) -> int | None:
        """Return the number of partitions that the topic's keys are hashed to, or None if they are not hashed.

        Those of a queue of jobs are not: each task has a partition of its own, for each priority.
        """
        return None if job_queues.is_queue(topic) else self.topics.of(topic).partitions

    def database_of(self, topic: str) -> str | None:
        """Return the alias of the database that ``TOPICS`` names for a topic, else ``DATABASE``.

        A DLQ topic is in the database of its topic.
        """
        return self.topics.of(topic.removesuffix(self.dlq_suffix)).database or self.database


class Problem(NamedTuple):
    """A broken rule of the setting."""

    id: str
    message: str
    hint: str
    optional: bool = False
    """True if only monitoring needs the value: it is refused where it is used, and everything else works."""

    def __str__(self) -> str:
        return " ".join(filter(None, (self.message, self.hint)))


# -- valid values -------------------------------------------------------------


def _parsers(declared: type) -> dict[str, Callable[[Any], Any]]:
    """Return the parsers of a class's fields, as their annotations have them."""
    hints = get_type_hints(declared, include_extras=True)
    return {name: hint.__metadata__[0] for name, hint in hints.items() if hasattr(hint, "__metadata__")}


def _parsed(declared: Any, value: Any) -> Any:
    """Return a setting that is a dict, as the class that declares its keys."""
    if isinstance(value, declared):
        value = {name.upper(): item for name, item in value._asdict().items()}
    if not isinstance(value, Mapping):
        raise validators.Invalid("must be a dict")
    parsers = {name.upper(): parse for name, parse in _parsers(declared).items()}
    given: dict[str, Any] = {}
    for key, item in value.items():
        if key not in parsers:
            raise validators.Invalid(f"has the unknown key {key!r} ({_nearest(str(key), list(parsers)).rstrip('.')})")
        try:
            given[key.lower()] = parsers[key](item)
        except validators.Invalid as error:
            raise validators.Invalid(f"has {key} = {_shown(key, item)}, which {error}") from None
    return declared(**given)


def _bell(value: Any) -> BellSettings:
    found: BellSettings = _parsed(BellSettings, value)
    if found.listen is not None and found.secret is None:
        raise validators.Invalid("has LISTEN, which requires SECRET")
    if found.announce is not None and found.listen is None:
        raise validators.Invalid("has ANNOUNCE, which requires LISTEN")
    return found


_FIELDS = {name: option.parse for name, option in OPTIONS.items() if option.setting} | _parsers(Settings)
HEALTH_OPTIONS = _parsers(HealthSettings)
"""Keys of ``HEALTH``, in lower case."""


_MONITORING: dict[str, Callable[[Any], Any]] = {
    "metrics_token": or_none(validators.token),
    "redact": or_none(validators.function),
    "health": partial(_parsed, HealthSettings),
}
"""Settings that only monitoring needs: an invalid value is refused where it is used, and by ``check``."""
_SECRETS = ("TOKEN", "SECRET")
"""Parts of the names of settings, and of keys of settings, whose values are not shown."""


def _shown(key: object, value: Any) -> str:
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{name!r}: {_shown(name, item)}' for name, item in value.items())}}}"
    return "…" if any(name in str(key).upper() for name in _SECRETS) else repr(value)  # It may be misspelled.


def check_health_option(name: str, value: Any) -> Any:
    """Return the parsed value of a threshold of ``HEALTH``.

    ``name``: key of ``HEALTH`` in lower case.

    Raises:
        ValueError: the value is invalid; the text names the threshold, the value and the rule.
    """
    try:
        return HEALTH_OPTIONS[name](value)
    except validators.Invalid as error:
        raise ValueError(f"{name} {value!r}: {error}") from None


# -- reading the setting ------------------------------------------------------


def _nearest(name: str, known: list[str]) -> str:
    return did_you_mean(close_names(name, known, most=1)) or f"Known: {', '.join(sorted(known))}."


def _parse(raw: Any) -> tuple[Settings, list[Problem]]:
    if not isinstance(raw, Mapping):
        return Settings(), [Problem("E001", f"MYSQLQUEUE must be a dict, not {type(raw).__name__}.", "")]
    problems: list[Problem] = []
    values: dict[str, Any] = {}
    monitoring = dict(Settings().monitoring)
    known = [name.upper() for name in (*_FIELDS, *_MONITORING)] + ["TOPICS", "GROUPS"]
    for key, value in raw.items():
        if key not in known:
            problems.append(Problem("E002", f"MYSQLQUEUE has the unknown key {key!r}.", _nearest(str(key), known)))
        elif key.lower() in _MONITORING:
            try:
                monitoring[key.lower()] = _MONITORING[key.lower()](value)
            except validators.Invalid as error:
                message = f"MYSQLQUEUE[{key!r}] = {_shown(key, value)} {error}."
                problem = Problem("E003", message, "", optional=True)
                problems.append(problem)
                monitoring[key.lower()] = ImproperlyConfigured(str(problem))
        elif key not in ("TOPICS", "GROUPS"):
            try:
                values[key.lower()] = _FIELDS[key.lower()](value)
            except validators.Invalid as error:
                default = getattr(Settings(), key.lower())
                hint = f"The default is {default!r}."
                problems.append(Problem("E003", f"MYSQLQUEUE[{key!r}] = {_shown(key, value)} {error}.", hint))
    settings = Settings(**values)
    problems += _relations(settings)
    topics, groups = raw.get("TOPICS", {}), raw.get("GROUPS", {})
    by_topic, options = _topics(topics, settings, problems), dict(_groups(groups, problems))
    settings = replace(
        settings,
        topics=by_topic,
        recorded={group: given.pop(RECORD) for group, given in options.items() if RECORD in given},
        sql_topics={group: given.pop(SQL_TOPICS) for group, given in options.items() if SQL_TOPICS in given},
        groups=options,
        monitoring=monitoring,
    )
    return settings, problems


def _relations(settings: Settings) -> Iterator[Problem]:
    if settings.lease_renewal_interval * 2 > settings.lease_duration:
        yield Problem(
            "E004",
            f"MYSQLQUEUE['LEASE_RENEWAL_INTERVAL'] = {settings.lease_renewal_interval:g} is more than half of "
            f"LEASE_DURATION = {settings.lease_duration:g}: a single late heartbeat would lose all leases.",
            "Use about a third of LEASE_DURATION.",
        )
    if settings.max_poll_interval < settings.poll_interval:
        yield Problem(
            "E004",
            f"MYSQLQUEUE['MAX_POLL_INTERVAL'] = {settings.max_poll_interval:g} is less than "
            f"POLL_INTERVAL = {settings.poll_interval:g}.",
            "",
        )


def _topics(raw: Any, settings: Settings, problems: list[Problem]) -> TopicMap:
    entries: dict[str, Mapping[str, Any]] = {}
    if not isinstance(raw, Mapping):
        problems.append(Problem("E005", f"MYSQLQUEUE['TOPICS'] must be a dict, not {type(raw).__name__}.", ""))
        raw = {}
    parsers: dict[str, Callable[[Any], Any]] = {
        "RETENTION": _FIELDS["retention"],
        "PARTITIONS": validators.integer(1, 100_000),
        "GROUPLESS": validators.boolean,
        **dict.fromkeys(DATABASES, validators.alias),
    }
    for topic, options in raw.items():
        where = f"MYSQLQUEUE['TOPICS'][{topic!r}]"
        _check_name(f"MYSQLQUEUE['TOPICS'] has {topic!r}", WILDCARDS.sub("x", str(topic)), "E005", problems)
        entries[str(topic)] = parsed = _options(where, options, parsers, "E005", problems)
        if str(topic).endswith(settings.dlq_suffix):
            for name in sorted(parsed.keys() & {*DATABASES}):
                hint = "Dead letters are in the database of their topic: set it there."
                problems.append(Problem("E005", f"{where}[{name!r}] is set for a DLQ topic.", hint))
    return TopicMap(entries, settings.dlq_suffix)


def _groups(raw: Any, problems: list[Problem]) -> Iterator[tuple[str, dict[str, Any]]]:
    if not isinstance(raw, Mapping):
        problems.append(Problem("E006", f"MYSQLQUEUE['GROUPS'] must be a dict, not {type(raw).__name__}.", ""))
        return
    parsers = {name.upper(): option.parse for name, option in OPTIONS.items()}
    parsers[RECORD.upper()] = _FIELDS[RECORD]
    parsers[SQL_TOPICS.upper()] = validators.topics
    parsers |= {name.upper(): partial(_refuse, rule) for name, rule in NOT_IN_GROUPS.items()}
    for group, options in raw.items():
        _check_name(f"MYSQLQUEUE['GROUPS'] has {group!r}", group, "E006", problems)
        parsed = _options(f"MYSQLQUEUE['GROUPS'][{group!r}]", options, parsers, "E006", problems)
        yield str(group), {name.lower(): value for name, value in parsed.items()}


def _refuse(rule: str, value: Any) -> Any:
    raise validators.Invalid(rule)


def _check_name(what: str, name: Any, problem_id: str, problems: list[Problem]) -> None:
    # naming.py has the rule for published names, but imports this module.
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9._-]{1,120}", name):
        problems.append(Problem(problem_id, f"{what}: a name must be 1 to 120 letters, digits, '.', '_' or '-'.", ""))


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
        except validators.Invalid as error:
            problems.append(Problem(problem_id, f"{where}[{key!r}] = {value!r} {error}.", ""))
    return parsed


def problems() -> list[Problem]:
    """Return every rule that the ``MYSQLQUEUE`` setting breaks; none if it is valid."""
    return _parse(getattr(django_settings, "MYSQLQUEUE", {}))[1]


@cache
def get_settings() -> Settings:
    """Return the validated setting.

    An invalid ``METRICS_TOKEN``, ``REDACT`` or ``HEALTH``, which only monitoring needs, raises where it is read,
    not here.

    Raises:
        ImproperlyConfigured: a value breaks a rule; the text names the first such value.
    """
    settings, found = _parse(getattr(django_settings, "MYSQLQUEUE", {}))
    for problem in found:
        if not problem.optional:
            raise ImproperlyConfigured(str(problem))
    return settings


def _forget(*, setting: str, **kwargs: Any) -> None:
    if setting in ("MYSQLQUEUE", "DATABASES"):
        get_settings.cache_clear()


setting_changed.connect(_forget, dispatch_uid="django_mysqlqueue.options.conf")

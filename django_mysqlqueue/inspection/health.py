"""Check the queue's health: limits that an operator sets, and problems that need no limit."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from django_mysqlqueue.arguments import checked
from django_mysqlqueue.exceptions import KnownNames, OperationRefused, SubscriberError
from django_mysqlqueue.inspection.bounds import CHECKS, STALL_TIMES, Bounds, StallTimes
from django_mysqlqueue.inspection.causes import Cause, find_causes
from django_mysqlqueue.inspection.overview import GroupOverview, QueueOverview, get_overview
from django_mysqlqueue.inspection.problem import Problem, age
from django_mysqlqueue.inspection.problems import find_problems
from django_mysqlqueue.names.rules import relayed_from
from django_mysqlqueue.options.conf import HealthSettings, check_health_option, get_settings
from django_mysqlqueue.options.topics import first_topic
from django_mysqlqueue.service.counts import Count
from django_mysqlqueue.service.databases import queue_aliases, works_on
from django_mysqlqueue.service.refs import GroupRef
from django_mysqlqueue.subscriptions import registry
from django_mysqlqueue.text.humanize import duration

URGENT = 0
"""Severity of problems that make the queue unhealthy, regardless of limits."""
LOSES_MESSAGES = ("groupless",)
"""Kinds of problems that make the queue unhealthy, regardless of their severity."""


@dataclass(frozen=True, slots=True)
class HealthLimits:
    """Limits for each group. None means no limit, or for the last four the value of the setting ``HEALTH``.

    Raises:
        OperationRefused: a value is invalid; the text names the value and the rule.
    """

    lag: int | None = None
    """Maximum number of messages in the log that the group has not settled."""
    age: float | None = None
    """Maximum number of seconds that a message waits for the group, or in the outbox."""
    dead_letters: int | None = None
    """Maximum number of dead letters."""
    subscribers: int | None = None
    """Minimum number of live subscribers."""
    recent_dead_letters: int | None = None
    """Maximum number of dead letters within the window."""
    failure_ratio: float | None = None
    """Maximum share of the newest attempts that fail, 0 to 1."""
    min_attempts: int | None = None
    """Number of newest attempts whose share counts; with fewer within the window, the ratio is not checked."""
    window: float | None = None
    """Length, in seconds, of the window that ends now."""

    def thresholds(self) -> HealthSettings:
        """Return the setting ``HEALTH``, overridden by these limits.

        Raises:
            ImproperlyConfigured: the setting is invalid.
        """
        return get_settings().health._replace(**self._of_settings())

    def _of_settings(self) -> dict[str, Any]:
        given = {
            "max_recent_dead_letters": self.recent_dead_letters,
            "max_failure_ratio": self.failure_ratio,
            "min_attempts": self.min_attempts,
            "window": self.window,
        }
        return {name: value for name, value in given.items() if value is not None}

    def __post_init__(self) -> None:
        for name, value in self._of_settings().items():
            try:
                check_health_option(name, value)
            except ValueError as error:
                raise OperationRefused(str(error)) from None
        for name in ("lag", "age", "dead_letters", "subscribers"):
            value = getattr(self, name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int if name != "age" else (int, float)):
                raise OperationRefused(f"{name} {value!r}: must be a number")
            if not value >= 0:
                raise OperationRefused(f"{name} {value!r}: must be at least 0")
            if name in ("lag", "dead_letters") and value >= CHECKS.count:
                raise OperationRefused(f"{name} {value!r}: must be below {CHECKS.count:,}: counting stops there")


@dataclass(frozen=True, slots=True)
class HealthFinding:
    """A problem that a health check found."""

    kind: str
    """The kind of a ``Problem``, or the exceeded limit: ``lag``, ``age``, ``dead_letters`` or ``subscribers``."""
    text: str
    """A description in the active language."""
    ref: GroupRef | None = None
    """The group that has the problem, and its topic."""
    key: str | None = None
    """Key of the partition or of the messages that have the problem; the text then contains it."""
    topic: str | None = None
    """The topic that has the problem, if it has no group."""
    message_id: str | None = None
    """Id of the message that has the problem; the text then contains it."""
    is_private: bool = False
    """Whether the text names a host, a database user or a subscriber, or contains an error."""
    since: int | None = None
    """When it began in epoch milliseconds or, if this is not known, since when the oldest message has waited."""
    error: str = ""
    """The last error of the message or of the subscriber that has the problem. It may contain personal data."""


@dataclass(frozen=True, slots=True)
class HealthReport:
    """The result of a health check."""

    groups: tuple[GroupOverview, ...]
    """The groups that were checked."""
    state: QueueOverview
    """The whole queue."""
    findings: tuple[HealthFinding, ...]
    """The problems that make the queue unhealthy."""
    notes: tuple[HealthFinding, ...]
    """Problems that do not make the queue unhealthy."""
    beyond: tuple[HealthFinding, ...] = ()
    """The findings that are limits which are exceeded."""
    causes: tuple[Cause, ...] = ()
    """The causes of the problems, worst first."""

    @property
    def healthy(self) -> bool:
        """True if there are no findings."""
        return not self.findings


@checked()
def check_health(
    limits: HealthLimits | None = None,
    *,
    groups: Collection[str] = (),
    topics: Collection[str] = (),
    using: str | None = None,
    bounds: Bounds = CHECKS,
    stall_times: StallTimes = STALL_TIMES,
) -> HealthReport:
    """Check whether the queue is healthy, as ``manage.py queuehealth`` does.

    Args:
        limits: limits for each group (default: only those of the setting ``HEALTH``).
        groups: check only these consumer groups; if empty, all.
        topics: check only these topics; if empty, all.
        using: alias of the database (default: that of the queue).
        bounds: limits of what is read. A count that stops below its limit is a problem, too.
        stall_times: times after which a lack of progress is a problem.

    Raises:
        OperationRefused: one of the ``groups`` is not registered, or one of the ``topics`` has no registered group.
        ImproperlyConfigured: the setting ``HEALTH`` is invalid.
    """
    limits = limits or HealthLimits()
    report = check_selected(limits, groups=groups, topics=topics, using=using, bounds=bounds, stall_times=stall_times)
    require_registered([report.state], groups=groups, topics=topics)
    return report


def databases_of(topics: Collection[str]) -> list[str]:
    """Return the aliases of the databases to check: those on which topics are, or all if there are no topics."""
    return list(dict.fromkeys(alias for topic in topics for alias in works_on(topic))) or queue_aliases()


def check_selected(
    limits: HealthLimits,
    *,
    groups: Collection[str],
    topics: Collection[str],
    using: str | None,
    bounds: Bounds = CHECKS,
    stall_times: StallTimes = STALL_TIMES,
) -> HealthReport:
    """Check one of several databases, which may lack groups: ``require_registered`` then takes the states of all."""
    thresholds = limits.thresholds()
    state = get_overview(using=using, bounds=bounds, window=thresholds.window)
    chosen = tuple(group for group in state.groups if _is_selected(group.ref, groups, topics))
    others = find_problems(state, thresholds=thresholds, stall_times=stall_times)
    outbox = _outbox_beyond(limits, state)
    selects = bool(groups or topics)
    if selects:
        refs = {group.ref for group in chosen}
        passing = {topic for topic in topics or _topics_of(groups) if state.using in works_on(topic)}
        here = passing | {ref.topic for ref in refs}
        others = [one for one in others if _concerns(one, refs, here)]
        outbox = outbox if here else iter(())
    alarming = [one for one in others if _is_alarming(one)]
    notes = [_finding(one) for one in others if one not in alarming]
    groups_beyond = (_group_beyond(limits, group, age(state.now, group.oldest_at)) for group in chosen)
    beyond = (*outbox, *itertools.chain.from_iterable(groups_beyond))
    causes = find_causes(dataclasses.replace(state, topics=None) if selects else state, others)
    return HealthReport(chosen, state, (*beyond, *map(_finding, alarming)), tuple(notes), beyond, tuple(causes))


def require_registered(states: Iterable[QueueOverview], *, groups: Collection[str], topics: Collection[str]) -> None:
    """Require that the selected groups and topics are registered in one of the databases, as ``check_health`` does."""
    refs = {group.ref for state in states for group in state.groups}
    _require("group", groups, {ref.group for ref in refs})
    _require("topic", topics, {ref.topic for ref in refs})
    if (groups or topics) and not any(_is_selected(ref, groups, topics) for ref in refs):
        raise OperationRefused(
            f"No group {' or '.join(sorted(groups))} is registered on topic {' or '.join(sorted(topics))}."
        )


def _is_selected(ref: GroupRef, groups: Collection[str], topics: Collection[str]) -> bool:
    return (not groups or ref.group in groups) and (not topics or ref.topic in topics)


def _concerns(problem: Problem, refs: Collection[GroupRef], topics: Collection[str]) -> bool:
    """Return whether a problem holds up some groups, or messages of some topics on their way to their database."""
    if problem.kind == "relay":
        return any(problem.database in works_on(topic) for topic in topics)
    if problem.ref is not None:
        return problem.ref in refs
    if problem.topic is not None:
        return first_topic(relayed_from(problem.topic)) in topics
    return bool(topics)


def _topics_of(groups: Collection[str]) -> set[str]:
    """Return the topics of groups in the code. Where they are registered, the overview of that database has them."""
    try:
        return {ref.topic for ref in registry.handlers() if ref.group in groups}
    except SubscriberError:
        return set()  # reported by E008


def is_alarm(cause: Cause) -> bool:
    """Return whether one of its problems makes the queue unhealthy."""
    return any(map(_is_alarming, cause.problems))


def _is_alarming(problem: Problem) -> bool:
    return problem.severity == URGENT or problem.kind in LOSES_MESSAGES


def _finding(problem: Problem) -> HealthFinding:
    found = HealthFinding(*(getattr(problem, field.name) for field in dataclasses.fields(HealthFinding)))
    return dataclasses.replace(found, since=problem.began_at)


def _require(what: str, names: Collection[str], known: Collection[str]) -> None:
    for name in names:
        if name not in known:
            registered = KnownNames(dict.fromkeys(sorted(known)), _registered)
            raise OperationRefused(f"No {what} {name!r} is registered.", known=registered)


def _registered(names: Collection[str]) -> str:
    return f"Registered: {', '.join(names) or 'none'}."


def _outbox_beyond(limits: HealthLimits, state: QueueOverview) -> Iterator[HealthFinding]:
    outbox = age(state.now, state.outbox.waiting_since)
    if limits.age is not None and outbox > limits.age:
        text = _("The oldest message in the outbox has waited for %(age)s; the limit is %(limit)s.")
        text %= {"age": duration(outbox), "limit": duration(limits.age)}
        yield HealthFinding("age", text, since=state.outbox.waiting_since)


def _group_beyond(limits: HealthLimits, group: GroupOverview, waits: float) -> Iterator[HealthFinding]:
    ref = group.ref
    if limits.lag is not None and _may_pass(group.lag, limits.lag):
        text = _("The backlog of %(ref)s is %(lag)s; the limit is %(limit)s.")
        yield HealthFinding("lag", text % {"ref": ref, "lag": group.lag, "limit": f"{limits.lag:,}"}, ref)
    if limits.age is not None and waits > limits.age:
        text = _("The oldest message of %(ref)s has waited for %(age)s; the limit is %(limit)s.")
        text %= {"ref": ref, "age": duration(waits), "limit": duration(limits.age)}
        yield HealthFinding("age", text, ref, since=group.oldest_at)
    if limits.dead_letters is not None and _may_pass(group.dead_letters, limits.dead_letters):
        text = ngettext(
            "%(ref)s has %(number)s dead letter; the limit is %(limit)s.",
            "%(ref)s has %(number)s dead letters; the limit is %(limit)s.",
            group.dead_letters.value,
        )
        text %= {"ref": ref, "number": group.dead_letters, "limit": f"{limits.dead_letters:,}"}
        yield HealthFinding("dead_letters", text, ref)
    if limits.subscribers is not None and len(group.live) < limits.subscribers:
        text = ngettext(
            "%(ref)s has %(number)s live subscriber; the minimum is %(limit)s.",
            "%(ref)s has %(number)s live subscribers; the minimum is %(limit)s.",
            len(group.live),
        )
        text %= {"ref": ref, "number": len(group.live), "limit": limits.subscribers}
        yield HealthFinding("subscribers", text, ref)


def _may_pass(count: Count, limit: int) -> bool:
    """Return True if a count is above its limit, or may be: a false alarm is better than a missed one."""
    return count.value > limit or not count.exact

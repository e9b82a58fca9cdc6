"""Options of a subscription: the rules between them, and the overrides that operators set while subscribers run.

The first of these that sets an option wins: an override, ``GROUPS``, the decorator, the setting of the same name.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

from django_mysqlqueue.filter_policies import FilterPolicy
from django_mysqlqueue.options.conf import Settings, get_settings
from django_mysqlqueue.options.delivery_limits import LIMIT_OPTIONS, DeliveryLimits
from django_mysqlqueue.options.table import (
    OF_PROCESSES,
    OPTIONS,
    OVERRIDABLE,
    REGISTERED,
    as_text,
    check_option,
    storable,
)
from django_mysqlqueue.options.topics import is_dlq
from django_mysqlqueue.service.groups import OptionColumns
from django_mysqlqueue.service.job_results import is_of_jobs
from django_mysqlqueue.subscriptions.handler import Handler
from django_mysqlqueue.text.humanize import close_names, did_you_mean


@dataclass(frozen=True, slots=True)
class Override:
    """An option's value that an operator has set for a group."""

    name: str
    value: Any
    """The value as JSON has it; ``None`` for no limit."""
    at: int
    """When it was set, in epoch milliseconds."""
    by: str
    """Who set it."""

    @property
    def text(self) -> str:
        """The value as it is typed, for example ``30s``."""
        return as_text(self.name, self.value)


# -- rules --------------------------------------------------------------------


FILTERED_JOBS = "is not possible for a queue of jobs: jobs that do not match it would never end"
PAUSED_TASKS = "paused_tasks"
"""The option with the tasks that are paused: it has a command of its own."""
ONLY_JOBS = "has no effect on a group that is not that of a queue of jobs"
LIMIT_BY_TASK = "has no effect on a queue of jobs: its limits per key apply to the tasks that have a rate (@job(rate=))"


class BrokenRule(NamedTuple):
    """A rule between options that is broken."""

    names: tuple[str, ...]
    text: str


def broken_rules(options: Mapping[str, Any]) -> Iterator[BrokenRule]:
    """Yield the rules between a subscription's options that are broken."""
    if options["mode"] == "shared" and options["on_failure"] == "block":
        yield BrokenRule(
            ("mode", "on_failure"),
            "on_failure='block' keeps the order of a partition, but mode='shared' has no order. Use mode='ordered'",
        )
    timeout, longest = options.get("timeout"), options.get("max_processing_time")
    if timeout is not None and longest is not None and timeout >= longest:
        yield BrokenRule(
            ("timeout",),
            f"timeout={timeout:g} must be less than max_processing_time={longest:g}, after which its whole process "
            "exits",
        )
    often, seldom = options.get("poll_interval"), options.get("max_poll_interval")
    if often is not None and seldom is not None and often > seldom:
        yield BrokenRule(
            ("poll_interval", "max_poll_interval"),
            f"poll_interval={often:g} must be at most max_poll_interval={seldom:g}",
        )


def rules_of_limits(limits: DeliveryLimits) -> Iterator[BrokenRule]:
    """Yield the limits that have no effect, because the one that they belong to is not set."""
    if limits.burst is not None and limits.rate is None and limits.rate_per_key is None:
        yield BrokenRule(("burst",), f"burst={limits.burst} requires rate or rate_per_key")
    if limits.limit_by is not None and not limits.limits_keys:
        text = f"limit_by={limits.limit_by!r} requires rate_per_key or max_in_flight_per_key"
        yield BrokenRule(("limit_by",), text)


SYNC_CONCURRENCY = "requires an async handler: THREADS limits how many calls of sync handlers run at a time"
SYNC_TIMEOUT = (
    "requires an async handler: a sync handler runs in a thread, which cannot be stopped. Declare it with async def, "
    "set a timeout on the calls that it makes (timeout= of an HTTP client, read_timeout of a database), or set "
    "max_processing_time, after which its whole process exits"
)


def overridden(handler: Handler, values: Mapping[str, Any]) -> tuple[Handler, dict[str, str]]:
    """Return a handler with overrides, and why some of them are ignored, by option.

    Overrides may have been set for code with other options. Those that are not possible for the handler, or not
    together with its other options, must not stop its subscribers.
    """
    found: dict[str, Any] = {}
    ignored: dict[str, str] = {}
    for name, value in values.items():
        try:
            found[name] = check_override(handler, name, value)
        except ValueError as error:
            ignored[name] = str(error)
    for rule in list(broken_by(replace(handler, **found))):
        ignored |= {name: rule.text for name in rule.names if name in found}
        found = {name: value for name, value in found.items() if name not in rule.names}
    return replace(handler, **found), ignored


def broken_by(handler: Handler) -> Iterator[BrokenRule]:
    """Yield the rules between options that a handler breaks, with the process's settings."""
    settings = get_settings()
    options = {one.name: getattr(handler, one.name) for one in fields(Handler)}
    options |= {name: option_value(handler, name, settings) for name in OF_PROCESSES}
    yield from broken_rules(options)
    yield from rules_of_limits(handler.limits)
    if handler.limit_by is not None and is_of_jobs(handler.ref):
        yield BrokenRule(("limit_by",), f"limit_by={handler.limit_by!r} {LIMIT_BY_TASK}")
    if handler.paused_tasks and not is_of_jobs(handler.ref):
        yield BrokenRule((PAUSED_TASKS,), f"{PAUSED_TASKS}={handler.paused_tasks} {ONLY_JOBS}")
    if handler.filter is not None and is_of_jobs(handler.ref):
        yield BrokenRule(("filter",), f"filter {FILTERED_JOBS}")


def changed(before: Handler, after: Handler) -> list[str]:
    """Return the names of the options in which two handlers differ."""
    return [name for name in OVERRIDABLE if getattr(before, name) != getattr(after, name)]


def defaults(settings: Settings) -> dict[str, Any]:
    """Return the options of a group for which neither code nor ``GROUPS`` says anything."""
    return {
        name: getattr(settings, name) if option.setting == "group" else option.default
        for name, option in OPTIONS.items()
    }


def option_value(handler: Handler, name: str, settings: Settings) -> Any:
    """Return the value of an option: that of the process's settings, if the handler leaves it open."""
    value = getattr(handler, name)
    return getattr(settings, name) if value is None and name in OF_PROCESSES else value


def check_override(handler: Handler | None, name: str, value: Any) -> Any:
    """Return the parsed value of an option that an operator overrides.

    ``handler``: the handler; None if this project does not declare it.

    Raises:
        ValueError: the option or the value is not possible; the text names the option, the value and the rule.
    """
    if name not in OVERRIDABLE:
        if name in OPTIONS or name == "batch":
            raise ValueError(f"{name} cannot change while subscribers run. Change the code or GROUPS, and restart them")
        hint = did_you_mean(close_names(name, list(OVERRIDABLE), most=1)) or f"Options: {', '.join(OVERRIDABLE)}"
        raise ValueError(f"there is no option {name!r}. {hint}")
    parsed = check_option(name, value)
    if handler is not None and (reason := without_effect(handler, name)):
        raise ValueError(f"{name}={value!r} {reason}")
    return parsed


def without_effect(handler: Handler, name: str) -> str:
    """Return why an option has no effect for a handler, or an empty string."""
    if name == "batch_size" and not handler.batch:
        return "requires a handler with batch=True"
    if name == "visibility_timeout" and not handler.shared:
        return "has no effect in ordered mode, in which LEASE_DURATION protects deliveries"
    if name == "timeout" and not handler.is_async:
        return SYNC_TIMEOUT
    if name == "concurrency" and not handler.is_async and not is_of_jobs(handler.ref):
        return SYNC_CONCURRENCY
    if name == "max_attempts" and is_dlq(handler.ref.topic):
        return "has no effect on a DLQ topic: its messages are retried until the handler succeeds"
    if name == "limit_by" and is_of_jobs(handler.ref):
        return LIMIT_BY_TASK
    if OPTIONS[name].jobs == "job" and is_of_jobs(handler.ref):
        return "has no effect on a queue of jobs, whose tasks have such options of their own (@job, OPTIONS in TASKS)"
    if name == "filter" and is_of_jobs(handler.ref):
        return FILTERED_JOBS
    if name == PAUSED_TASKS and not is_of_jobs(handler.ref):
        return ONLY_JOBS
    return ""


# -- the stored form ----------------------------------------------------------


def stored(column: str) -> list[Override]:
    """Return the overrides in a group row's column, in the order of ``OVERRIDABLE``; unknown ones come last.

    Plain SQL may have stored anything there, and no subscriber may stop because of it: a value without ``value``,
    ``at`` and ``by`` counts as the value alone, and a column that is not an object as empty.
    """
    found = json.loads(column)
    if not isinstance(found, Mapping):
        return []
    order = {name: place for place, name in enumerate(OVERRIDABLE)}
    overrides = [_override(name, one) for name, one in found.items()]
    return sorted(overrides, key=lambda one: (order.get(one.name, len(order)), one.name))


def _override(name: str, stored: object) -> Override:
    if not isinstance(stored, Mapping) or "value" not in stored:
        return Override(name, stored, 0, "")
    at = stored.get("at")
    return Override(name, stored["value"], at if type(at) is int else 0, str(stored.get("by") or ""))


# -- registered options -------------------------------------------------------


def registrable(handler: Handler) -> dict[str, dict[str, Any]]:
    """Return a handler's options that are registered: by column of the group row, a JSON object."""
    limits = {name: storable(getattr(handler, name)) for name in LIMIT_OPTIONS}
    return {
        "limits": {name: value for name, value in limits.items() if value is not None},
        "filter": {} if handler.filter is None else handler.filter.as_json(),
        "allowed_users": {} if handler.allowed_users is None else {"users": list(handler.allowed_users)},
    }


def with_registered(handler: Handler, columns: OptionColumns) -> tuple[Handler, dict[str, str]]:
    """Return a handler with the registered options of its group, and why some of them are ignored, by option.

    They count for all subscribers, so that these agree even while some of them run other code.
    """
    found, ignored = registered_options(columns)
    return replace(handler, **found), ignored


def registered_options(columns: OptionColumns) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the registered options, and why some of them are ignored."""
    limits, policy, users = (json.loads(one) for one in (columns.limits, columns.filter, columns.allowed_users))
    given: dict[str, Any] = {**limits} if isinstance(limits, Mapping) else {}
    if policy != {}:
        given["filter"] = policy
    if users != {}:
        given["allowed_users"] = users.get("users", users) if isinstance(users, Mapping) else users
    found: dict[str, Any] = dict.fromkeys(REGISTERED)
    ignored: dict[str, str] = {}
    for name, value in given.items():
        try:
            if name not in found:
                raise ValueError(f"there is no limit {name!r}")
            found[name] = check_option(name, value)
        except ValueError as error:
            ignored[name] = str(error)
    return found, ignored


def limits_of(columns: OptionColumns, overrides: Mapping[str, Any] | None = None) -> DeliveryLimits:
    """Return the limits that apply to a group, whether or not this project has a handler for it.

    ``overrides``: the stored values of overrides by option, instead of those of the row.
    """
    found, _ = registered_options(columns)
    values = {one.name: one.value for one in stored(columns.overrides)} if overrides is None else overrides
    for name, value in values.items():
        if name in LIMIT_OPTIONS:
            with contextlib.suppress(ValueError):  # Subscribers ignore it, too.
                found[name] = check_option(name, value)
    return DeliveryLimits(**{name: found[name] for name in LIMIT_OPTIONS})


def paused_tasks_of(overrides: Iterable[Override]) -> dict[str, int]:
    """Return the tasks of a queue of jobs that are paused, from the overrides of its group, and since when."""
    for one in overrides:
        if one.name == PAUSED_TASKS:
            with contextlib.suppress(ValueError):  # Subscribers ignore it, too.
                return dict.fromkeys(check_option(one.name, one.value), one.at)
    return {}


def filter_of(columns: OptionColumns) -> FilterPolicy | None:
    """Return the filter that applies to a group, whether or not this project has a handler for it; None if it has none.

    Raises:
        ValueError: this release cannot parse it. Its subscribers then claim nothing.
    """
    policy: FilterPolicy | None = _strict(columns, "filter")
    return policy


def allowed_users_of(columns: OptionColumns) -> tuple[str, ...] | None:
    """Return the database users that may use a group; None: all.

    Raises:
        ValueError: this release cannot parse them. Its subscribers then claim nothing.
    """
    users: tuple[str, ...] | None = _strict(columns, "allowed_users")
    return users


def _strict(columns: OptionColumns, name: str) -> Any:
    """Return the value of an option that must not be ignored because it is invalid."""
    found, ignored = registered_options(columns)
    for one in stored(columns.overrides):
        if one.name == name:
            return check_option(one.name, one.value)
    if name in ignored:
        raise ValueError(ignored[name])
    return found[name]

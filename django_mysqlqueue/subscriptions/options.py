"""Options of a subscription: the rules between them, and the overrides that operators set while subscribers run.

The first of these that sets an option wins: an override, ``GROUPS``, the decorator, the setting of the same name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

from django_mysqlqueue.backoff import Backoff
from django_mysqlqueue.conf import CODE_OPTIONS, HANDLER_OPTIONS, check_handler_option, get_settings
from django_mysqlqueue.humanize import close_names, did_you_mean
from django_mysqlqueue.subscriptions.handler import Handler

OVERRIDABLE = (
    "claim_size",
    "batch_size",
    "prefetch",
    "poll_interval",
    "max_poll_interval",
    "visibility_timeout",
    "max_attempts",
    "backoff",
    "timeout",
)
"""Options that an operator can override while subscribers run, in the order in which they are listed."""
PROCESS = ("claim_size", "prefetch", "poll_interval", "max_poll_interval")
"""Options that a handler may leave open: then the settings of its process apply."""
DURATIONS = frozenset({"poll_interval", "max_poll_interval", "visibility_timeout", "timeout"})
UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


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


class BrokenRule(NamedTuple):
    """A rule between options that is broken."""

    names: tuple[str, ...]
    text: str


def broken_rules(options: Mapping[str, Any]) -> Iterator[BrokenRule]:
    """Yield the rules between a subscription's options that are broken.

    Args:
        options: the options that are known, by name.
    """
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


SYNC_TIMEOUT = (
    "requires an async handler: a sync handler runs in a thread, which cannot be stopped. Declare it with async def, "
    "set a timeout on the calls that it makes (timeout= of an HTTP client, read_timeout of a database), or set "
    "max_processing_time, after which its whole process exits"
)


def usable(handler: Handler, values: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the parsed values that are possible for a handler, and the reasons why the others are not.

    Args:
        handler: the handler as it was declared.
        values: stored values by option.
    """
    found: dict[str, Any] = {}
    refused: list[str] = []
    for name, value in values.items():
        try:
            found[name] = check_override(handler, name, value)
        except ValueError as error:
            refused.append(str(error))
    return found, refused


def with_overrides(handler: Handler, column: str) -> tuple[Handler, list[str]]:
    """Return a handler with the overrides of its group row, and the reasons why some of them are ignored.

    Args:
        handler: the handler as it was declared.
        column: the JSON text of the group row's column.
    """
    values, ignored = usable(handler, {one.name: one.value for one in stored(column)})
    # They may have been set for code with other options.
    for rule in list(broken_by(replace(handler, **values))):
        ignored.append(rule.text)
        values = {name: value for name, value in values.items() if name not in rule.names}
    return replace(handler, **values), ignored


def broken_by(handler: Handler) -> Iterator[BrokenRule]:
    """Yield the rules between options that a handler breaks, with the process's settings."""
    settings = get_settings()
    options = {one.name: getattr(handler, one.name) for one in fields(Handler)}
    for name in ("poll_interval", "max_poll_interval"):
        options[name] = options[name] or getattr(settings, name)
    yield from broken_rules(options)


def changed(before: Handler, after: Handler) -> list[str]:
    """Return the names of the options in which two handlers differ."""
    return [name for name in OVERRIDABLE if getattr(before, name) != getattr(after, name)]


def check_override(handler: Handler | None, name: str, value: Any) -> Any:
    """Return the parsed value of an option that an operator overrides.

    Args:
        handler: the handler; None if this project does not declare it.
        name: name of the option.
        value: its value.

    Raises:
        ValueError: the option or the value is not possible; the text names the option, the value and the rule.
    """
    if name not in OVERRIDABLE:
        if name in HANDLER_OPTIONS or name in CODE_OPTIONS or name == "batch":
            raise ValueError(f"{name} cannot change while subscribers run. Change the code or GROUPS, and restart them")
        hint = did_you_mean(close_names(name, list(OVERRIDABLE), most=1)) or f"Options: {', '.join(OVERRIDABLE)}"
        raise ValueError(f"there is no option {name!r}. {hint}")
    parsed = check_handler_option(name, value)
    if handler is not None and (reason := without_effect(handler, name)):
        raise ValueError(f"{name}={value!r} {reason}")
    return parsed


def without_effect(handler: Handler, name: str) -> str:
    """Return why an option has no effect for a handler, or an empty string.

    Args:
        handler: the handler.
        name: name of the option.
    """
    if name == "batch_size" and not handler.batch:
        return "requires a handler with batch=True"
    if name == "visibility_timeout" and not handler.shared:
        return "has no effect in ordered mode, in which LEASE_DURATION protects deliveries"
    if name == "timeout" and not handler.is_async:
        return SYNC_TIMEOUT
    return ""


# -- the stored form ----------------------------------------------------------


def stored(column: object) -> list[Override]:
    """Return the overrides in a group row's column, in the order of ``OVERRIDABLE``; unknown ones come last.

    Plain SQL may have stored anything there, and no subscriber may stop because of it: a value without ``value``,
    ``at`` and ``by`` counts as the value alone, and a column that is not an object as empty.

    Args:
        column: the column's JSON text, or its value.
    """
    found = json.loads(column) if isinstance(column, str) else column
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


def storable(value: Any) -> Any:
    """Return a parsed value in the form in which it is stored as JSON."""
    if isinstance(value, Backoff):
        return {one.name: getattr(value, one.name) for one in fields(Backoff)}
    return value


# -- text ---------------------------------------------------------------------


def parse_text(name: str, text: str) -> Any:
    """Return the value that a text stands for, as it is typed on a command line or into a form.

    Durations may have a unit (``ms``, ``s``, ``m``, ``h``, ``d``; default: seconds). ``none`` means no limit.
    ``backoff`` is a list such as ``initial=1s,factor=2,maximum=1h,jitter=0.1``; the fields that are left out have their
    defaults.

    Args:
        name: name of the option.
        text: the text.

    Raises:
        ValueError: the text is not such a value; the error names the option, the text and the rule.
    """
    text = text.strip()
    if name not in OVERRIDABLE:
        return text  # check_override refuses it
    if text.lower() == "none":
        return None
    if name == "backoff":
        return _parse_backoff(text)
    if name in DURATIONS:
        return _parse_duration(name, text)
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{name}={text!r}: must be an integer") from None


def _parse_duration(name: str, text: str) -> float:
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*(ms|s|m|h|d)?", text, re.IGNORECASE)
    if found is None:
        raise ValueError(f"{name}={text!r}: must be a number of seconds, or a number with ms, s, m, h or d")
    return float(found[1]) * UNITS[(found[2] or "s").lower()]


def _parse_backoff(text: str) -> dict[str, float]:
    found: dict[str, float] = {}
    for part in text.split(","):
        name, equals, value = part.partition("=")
        if not equals:
            raise ValueError(f"backoff={text!r}: must be a list such as initial=1s,factor=2,maximum=1h,jitter=0.1")
        found[name.strip()] = _parse_duration(f"backoff: {name.strip()}", value.strip())
    return found


def as_text(name: str, value: Any) -> str:
    """Return the text of a value, which ``parse_text`` reads again.

    Args:
        name: name of the option.
        value: its parsed or stored value.
    """
    if value is None:
        return "none"
    if isinstance(value, Backoff):
        value = storable(value)
    if isinstance(value, Mapping) and all(isinstance(item, (int, float)) for item in value.values()):
        seconds = ("initial", "maximum")
        return ",".join(f"{key}={item:g}{'s' if key in seconds else ''}" for key, item in value.items())
    if name in DURATIONS and isinstance(value, (int, float)):
        return f"{value:g}s"
    return value if isinstance(value, str) else json.dumps(value, default=str)

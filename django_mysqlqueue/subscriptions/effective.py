"""The options that a group's subscribers use now: what the code says, and what operators have overridden."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from django_mysqlqueue.conf import get_settings
from django_mysqlqueue.service.refs import GroupRef
from django_mysqlqueue.subscriptions import registry
from django_mysqlqueue.subscriptions.handler import Handler
from django_mysqlqueue.subscriptions.options import (
    OVERRIDABLE,
    PROCESS,
    Override,
    as_text,
    check_override,
    without_effect,
)

OVERRIDE = "override"
"""The source of an option that an operator has overridden."""


@dataclass(frozen=True, slots=True)
class GroupOption:
    """An option of a group, as its subscribers use it."""

    name: str
    value: Any
    """The value that applies. Durations are in seconds; None: no limit."""
    source: str
    """Where it comes from: ``override``, ``GROUPS``, ``@subscriber``, ``MYSQLQUEUE`` or ``default``."""
    code_value: Any
    """The value without an override; None, too, if this project has no handler for the group."""
    code_source: str
    """Where that comes from; empty if this project has no handler for the group."""
    at: int = 0
    """When it was overridden, in epoch milliseconds; 0: it is not."""
    by: str = ""
    """Who has overridden it."""
    ignored: str = ""
    """Why subscribers ignore the override; empty if they do not."""

    @property
    def is_overridden(self) -> bool:
        """True if an operator has overridden it, even if subscribers ignore that."""
        return self.source == OVERRIDE

    @property
    def text(self) -> str:
        """The value as it is typed, for example ``30s``."""
        return as_text(self.name, self.value)

    @property
    def code_text(self) -> str:
        """The value without the override as it is typed."""
        return as_text(self.name, self.code_value)


def effective_options(ref: GroupRef, overrides: Sequence[Override]) -> list[GroupOption]:
    """Return the options that operators can override, with their values and where these come from.

    Without a handler in this project, only the overridden ones are known. Options that have no effect for the handler
    are left out.

    Args:
        ref: the group and its topic.
        overrides: the overrides in its row.
    """
    handler = registry.handlers().get(ref)
    by_name = {one.name: one for one in overrides}
    found: list[GroupOption] = []
    for name in dict.fromkeys([*OVERRIDABLE, *by_name]):
        code, source = _in_code(handler, name)
        override = by_name.get(name)
        if override is not None:
            try:
                value, ignored = check_override(handler, name, override.value), ""
            except ValueError as error:
                value, ignored = override.value, str(error)
            found.append(GroupOption(name, value, OVERRIDE, code, source, override.at, override.by, ignored))
        elif handler is not None and not without_effect(handler, name):
            found.append(GroupOption(name, code, source, code, source))
    return found


def _in_code(handler: Handler | None, name: str) -> tuple[Any, str]:
    """Return an option's value without an override, and where it comes from."""
    if handler is None or name not in OVERRIDABLE:
        return None, ""
    value = getattr(handler, name)
    general = getattr(get_settings(), name, None)  # what the process uses for options that the handler leaves open
    return general if value is None and name in PROCESS else value, registry.option_source(handler.ref, name)

"""The options that a group's subscribers use now: what the code says, and what operators have overridden."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from django.utils.translation import gettext as _

from django_mysqlqueue.exceptions import SubscriberError
from django_mysqlqueue.models import ConsumerGroup
from django_mysqlqueue.options.conf import get_settings
from django_mysqlqueue.options.table import OVERRIDABLE, as_text
from django_mysqlqueue.service.groups import OptionColumns
from django_mysqlqueue.service.refs import GroupRef
from django_mysqlqueue.subscriptions import registry
from django_mysqlqueue.subscriptions.handler import Handler
from django_mysqlqueue.subscriptions.options import (
    Override,
    check_override,
    option_value,
    overridden,
    registered_options,
    stored,
    with_registered,
    without_effect,
)

STRICT = ("filter", "allowed_users")
"""Options that subscribers do not ignore if they cannot parse them. They claim nothing then."""


@dataclass(frozen=True, slots=True)
class GroupOption:
    """An option of a group."""

    name: str
    value: Any
    """The value that applies, unless the command line of a process says otherwise (``--claim-size``). Durations are in
    seconds; None: no limit."""
    code_value: Any
    """The value without an override; None, too, if this project has no handler for the group."""
    source: str
    """Where that comes from: ``GROUPS``, ``@subscriber``, ``MYSQLQUEUE`` or ``default``; empty if this project has no
    handler for the group. ``PREFETCH`` of ``MYSQLQUEUE`` is that of a process, which its groups share."""
    registered: Any = None
    """For limits and the filter, the registered value, which applies unless it is overridden; for other options,
    ``code_value``."""
    override: Override | None = None
    """What an operator has set; None if nothing."""
    ignored: str = ""
    """Why subscribers ignore the override, or cannot parse the filter; empty if they do not, or can."""

    @property
    def refused(self) -> bool:
        """True if this release cannot parse it and may not ignore it: subscribers then claim nothing."""
        return self.name in STRICT and bool(self.ignored)

    @property
    def text(self) -> str:
        """The value that applies as it is typed, for example ``30s``."""
        return as_text(self.name, self.value)

    @property
    def code_text(self) -> str:
        """The value without the override as it is typed."""
        return as_text(self.name, self.code_value)

    @property
    def registered_text(self) -> str:
        """The registered value as it is typed; empty if it is that of the code."""
        return "" if self.registered == self.code_value else as_text(self.name, self.registered)

    @property
    def origin(self) -> str:
        """Where the value without the override comes from, for people."""
        if not self.registered_text:
            return self.source
        if not self.source:
            return _("registered")
        return _("registered; %(source)s says %(value)s") % {"source": self.source, "value": self.code_text}

    @property
    def without_override(self) -> str:
        """The value without the override, and where it comes from, for people."""
        return f"{self.registered_text or self.code_text} ({self.origin})"


def known_handlers() -> dict[GroupRef, Handler]:
    """Return the handlers of this project; none if two are declared for a group, which ``check`` reports."""
    try:
        return registry.subscriptions()
    except SubscriberError:
        return {}


def blocks_on_failure(mode: str, handler: Handler | None) -> bool | None:
    """Return whether the messages of a partition wait for one that has failed.

    ``mode``: the mode of the group, ``"ordered"`` or ``"shared"``. ``handler``: its handler, if this project has one.

    Returns:
        True for ``on_failure="block"``; None if this project has no handler for an ordered group.
    """
    if mode != ConsumerGroup.Mode.ORDERED:
        return False
    return None if handler is None else handler.on_failure == "block"


def effective_options(
    ref: GroupRef, columns: OptionColumns, handlers: Mapping[GroupRef, Handler] | None = None
) -> list[GroupOption]:
    """Return the options that operators can override, with their values and where these come from.

    Without a handler in this project, only those that are registered or overridden are known. Options that have no
    effect for the handler are left out.

    ``handlers``: the handlers of this project, if the caller has resolved them.

    Raises:
        SubscriberError: this project declares two handlers for a group.
    """
    overrides = stored(columns.overrides)
    handler = (registry.subscriptions() if handlers is None else handlers).get(ref)
    by_name = {one.name: one for one in overrides}
    if handler is None:
        return _without_handler(columns, by_name)
    registered, unknown = with_registered(handler, columns)
    after, ignored = overridden(registered, {one.name: one.value for one in overrides})
    settings = get_settings()
    found: list[GroupOption] = []
    for name in OVERRIDABLE:
        override = by_name.pop(name, None)
        if override is None and without_effect(handler, name):
            continue
        value, code, kept = (option_value(one, name, settings) for one in (after, handler, registered))
        source = registry.option_source(ref, name)
        why = (unknown if override is None else ignored).get(name, "")
        if name in STRICT and name in unknown:
            kept = json.loads(getattr(columns, name))
        if name in STRICT and why:  # subscribers do not ignore it
            value = kept if override is None else override.value
        found.append(GroupOption(name, value, code, source, kept, override, why))
    for name, one in by_name.items():
        found.append(GroupOption(name, None, None, "", override=one, ignored=ignored[name]))
    return found


def _without_handler(columns: OptionColumns, overrides: Mapping[str, Override]) -> list[GroupOption]:
    registered, unknown = registered_options(columns)
    found: list[GroupOption] = []
    for name in [*OVERRIDABLE, *(name for name in overrides if name not in OVERRIDABLE)]:
        override, kept, why = overrides.get(name), registered.get(name), unknown.get(name, "")
        value = kept
        if override is not None:
            value, why = override.value, ""
            try:
                check_override(None, name, value)
            except ValueError as error:
                value, why = value if name in STRICT else kept, str(error)
        elif name in STRICT and why:
            value = kept = json.loads(getattr(columns, name))
        if override is not None or kept is not None:
            found.append(GroupOption(name, value, None, "", kept, override, why))
    return found

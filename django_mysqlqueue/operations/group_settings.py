"""Override options of a consumer group while its subscribers run: a single write to the group row, under its lock."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Unpack

from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from django_mysqlqueue.arguments import spelled_out
from django_mysqlqueue.exceptions import KnownNames, OperationRefused, SubscriberError
from django_mysqlqueue.operations.arguments import texts
from django_mysqlqueue.operations.declaring import How, operating
from django_mysqlqueue.operations.lookups import group_of
from django_mysqlqueue.operations.results import Result, result_of
from django_mysqlqueue.options.conf import get_settings
from django_mysqlqueue.options.table import OVERRIDABLE, as_text, storable
from django_mysqlqueue.service import audit, groups
from django_mysqlqueue.service.audit import By
from django_mysqlqueue.service.groups import OptionColumns
from django_mysqlqueue.service.refs import GroupRef
from django_mysqlqueue.sql.connection import apart
from django_mysqlqueue.sql.session import Session, run
from django_mysqlqueue.subscriptions.effective import effective_options
from django_mysqlqueue.subscriptions.handler import Handler
from django_mysqlqueue.subscriptions.options import (
    PAUSED_TASKS,
    Override,
    check_override,
    limits_of,
    overridden,
    rules_of_limits,
    stored,
    with_registered,
)
from django_mysqlqueue.subscriptions.registry import subscriptions
from django_mysqlqueue.text.humanize import close_names, did_you_mean

SETTINGS = audit.Action("settings", gettext_lazy("Override options"))


@dataclass(frozen=True, slots=True)
class Difference:
    """What a change does to the overrides in effect."""

    new: Mapping[str, Any]
    """Values by option that are set, or set to another value."""
    removed: Collection[str]
    """Options whose override is removed."""
    before: Mapping[str, Any]
    """The values of all overrides before, by option."""
    after: Mapping[str, Any]
    """The values of all overrides afterwards, by option."""

    def __len__(self) -> int:
        """The number of options that change."""
        return len(self.new) + len(self.removed)


@spelled_out
def settings(
    group: str, topic: str, values: Mapping[str, Any] | None = None, *, unset: Sequence[str] = (), **how: Unpack[How]
) -> Result:
    """Override options of a consumer group, until they are unset. Every subscriber process uses them within a tick.

    They take precedence over the code, ``GROUPS`` and ``MYSQLQUEUE``, and outlive deployments. Handlers that run keep
    the options with which they started.

    Args:
        group: the consumer group.
        topic: the topic that it reads.
        values: the new values by option, of those that can change while subscribers run. They have the types of the
            arguments of ``@subscriber``.
        unset: names of options whose overrides to remove.

    Raises:
        OperationRefused: there is no such group; a seek or drop of it has not finished; or an option or its value is
            not possible for the group's handler. The error names the rule.
    """
    with operating(how, group=group, topic=topic) as (alias, by, dry_run):
        ref = group_of(alias, group, topic).ref
        names = texts("unset", unset) if unset else []
        columns = read(Session(alias), ref)
        handler = _handler_of(ref, columns)
        parsed = _parsed(handler, values or {}, names)
        check = partial(_check, handler, columns)
        if dry_run:
            found = difference(by_name(columns), parsed, names)
            check(found)
        else:
            found = override(alias, ref, lambda _: (parsed, names), check=check, **by)
        sentences = _sentences(ref, found, columns, dry_run=dry_run) if found else _nothing(ref, parsed, names)
        return result_of(Result, SETTINGS, len(found), *sentences, dry_run=dry_run)


def read(session: Session, ref: GroupRef) -> OptionColumns:
    """Return the columns of a group row from which its subscribers take options."""
    found = groups.group_controls(session, [ref]).get(ref)
    return OptionColumns() if found is None else found.options


def by_name(columns: OptionColumns) -> dict[str, Override]:
    """Return the overrides of a group, by option."""
    return {one.name: one for one in stored(columns.overrides)}


def _json(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def difference(overrides: Mapping[str, Override], values: Mapping[str, Any], unset: Collection[str]) -> Difference:
    """Return what a change does."""
    before = {name: one.value for name, one in overrides.items()}
    # As JSON: to Python, true is 1; to a filter, it is not.
    same = {name for name, value in before.items() if name in values and _json(value) == _json(storable(values[name]))}
    new = {name: value for name, value in values.items() if name not in same}
    removed = [name for name in unset if name in before]
    return Difference(new, removed, before, {name: one for name, one in before.items() if name not in removed} | new)


Change = Callable[[Mapping[str, Override]], tuple[Mapping[str, Any], Collection[str]]]
"""Returns the values to set by option, and the options whose overrides to remove, from the overrides of a group."""


def override(
    using: str,
    ref: GroupRef,
    change: Change,
    *,
    check: Callable[[Difference], None],
    action: audit.Action = SETTINGS,
    detail: str = "",
    **by: Unpack[By],
) -> Difference:
    """Set and remove overrides of a group's options. Subscribers notice with their next claim.

    ``change`` and ``check`` are called under the lock of the group row; ``check`` raises an error if the change is not
    possible.
    """

    def write(session: Session) -> Difference:
        groups.refuse_unfinished(ref, groups.lock(session, ref).after_seek)
        overrides = by_name(read(session, ref))
        found = difference(overrides, *change(overrides))
        check(found)
        if not found:
            return found
        now = session.now()
        added = {name: Override(name, storable(value), now, by["actor"]) for name, value in found.new.items()}
        after = {name: one for name, one in overrides.items() if name not in found.removed} | added
        column = {name: {"value": one.value, "at": one.at, "by": one.by} for name, one in after.items()}
        # So that subscribers look for the jobs of tasks that they left out.
        groups.change(session, ref, revise=PAUSED_TASKS in (*found.new, *found.removed), overrides=column)
        said = [f"{name}={as_text(name, value)}" for name, value in found.new.items()]
        said += [f"{name} is no longer overridden" for name in found.removed]
        audit.once(session, action, 0, ref, detail=detail or ", ".join(said), **by)
        return found

    with apart(using):
        return run(using, write)


def _handler_of(ref: GroupRef, columns: OptionColumns) -> Handler | None:
    """Return a group's handler with the registered options; None if this project declares none."""
    try:
        handler = subscriptions().get(ref)
        return None if handler is None else with_registered(handler, columns)[0]
    except SubscriberError as error:
        # Its text may be about groups of other topics.
        known = KnownNames({str(error): None}, " ".join)
        raise OperationRefused("The handlers of this project cannot be resolved.", known=known) from error


def _parsed(handler: Handler | None, values: Any, unset: Sequence[str]) -> dict[str, Any]:
    if not isinstance(values, Mapping) or not all(isinstance(name, str) for name in values):
        raise OperationRefused(f"values {values!r}: must be a mapping of options to values")
    if not values and not unset:
        raise OperationRefused("values or unset: pass at least one option")
    for name in unset:
        if name in values:
            raise OperationRefused(f"{name}: cannot be both set and unset")
    try:
        return {name: check_override(handler, name, value) for name, value in values.items()}
    except ValueError as error:
        raise OperationRefused(str(error)) from None


def _check(handler: Handler | None, columns: OptionColumns, found: Difference) -> None:
    """Refuse a change after which subscribers would ignore an override that they do not ignore now."""
    if handler is None:
        # Of the other options, the rules depend on the code.
        broken = list(rules_of_limits(limits_of(columns, found.before)))
        for rule in rules_of_limits(limits_of(columns, found.after)):
            if rule not in broken or not found.new.keys().isdisjoint(rule.names):
                raise OperationRefused(rule.text)
        return
    ignored = overridden(handler, found.before)[1]
    for name, text in overridden(handler, found.after)[1].items():
        if name in found.new or name not in ignored:
            raise OperationRefused(text)


def _sentences(ref: GroupRef, found: Difference, columns: OptionColumns, *, dry_run: bool) -> list[str]:
    code = {one.name: one for one in effective_options(ref, columns._replace(overrides="{}"))}
    text = _("%(name)s will be %(value)s") if dry_run else _("%(name)s is %(value)s now")
    sentences = []
    for name, value in found.new.items():
        one = code.get(name)
        values = {"name": name, "value": as_text(name, value)}
        instead = "" if one is None else _("instead of %(value)s") % {"value": one.without_override}
        sentences.append(f"{text % values}{f', {instead}' if instead else ''}.")
    text = _("%(name)s will no longer be overridden") if dry_run else _("%(name)s is no longer overridden")
    for name in found.removed:
        one = code.get(name)
        sentences.append(f"{text % {'name': name}}{'' if one is None else f': {one.without_override}'}.")
    seconds = f"{get_settings().lease_renewal_interval:g}"
    noticed = _("The subscribers of the group %(ref)s notice within %(seconds)s seconds.")
    return [*sentences, noticed % {"ref": ref, "seconds": seconds}]


def _nothing(ref: GroupRef, values: Mapping[str, Any], unset: Sequence[str]) -> list[str]:
    same = _("%(name)s of the group %(ref)s is already overridden with %(value)s.")
    sentences = [same % {"name": name, "ref": ref, "value": as_text(name, value)} for name, value in values.items()]
    for name in unset:
        hint = "" if name in OVERRIDABLE else did_you_mean(close_names(name, OVERRIDABLE, most=1))
        text = _("%(name)s of the group %(ref)s is not overridden.") % {"name": name, "ref": ref}
        sentences.append(f"{text} {hint}".rstrip())
    return sentences

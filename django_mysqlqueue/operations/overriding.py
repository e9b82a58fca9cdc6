"""Override options of a group while its subscribers run: a single write to the group row, under its lock."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from django_mysqlqueue.options.table import as_text, storable
from django_mysqlqueue.service import audit, groups
from django_mysqlqueue.service.groups import OptionColumns
from django_mysqlqueue.service.refs import GroupRef
from django_mysqlqueue.sql.connection import apart
from django_mysqlqueue.sql.session import Session, run
from django_mysqlqueue.subscriptions.options import Override, stored


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


def override(
    using: str,
    ref: GroupRef,
    values: Mapping[str, Any],
    unset: Collection[str],
    *,
    check: Callable[[Difference], None],
    actor: str,
    reason: str = "",
) -> Difference:
    """Set and remove overrides of a group's options. Subscribers notice with their next claim.

    ``check``: called under the lock of the group row; it raises an error if the change is not possible.

    Raises:
        OperationRefused: there is no such group, a seek or drop of it has not finished, or ``check`` refuses.
    """

    def write(session: Session) -> Difference:
        groups.refuse_unfinished(ref, groups.lock(session, ref).after_seek)
        overrides = by_name(read(session, ref))
        found = difference(overrides, values, unset)
        check(found)
        if not found:
            return found
        now = session.now()
        added = {name: Override(name, storable(value), now, actor) for name, value in found.new.items()}
        after = {name: one for name, one in overrides.items() if name not in found.removed} | added
        column = {name: {"value": one.value, "at": one.at, "by": one.by} for name, one in after.items()}
        groups.change(session, ref, overrides=column)
        detail = [f"{name}={as_text(name, value)}" for name, value in found.new.items()]
        detail += [f"{name} is no longer overridden" for name in found.removed]
        names = {"actor": actor, "reason": reason, "group": ref.group, "topic": ref.topic}
        audit.once(session, "settings", 0, **names, detail=", ".join(detail))
        return found

    with apart(using):
        return run(using, write)

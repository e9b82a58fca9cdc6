"""Claims of tests that make them without a subscriber process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from django_mysqlqueue.filter_policies import FilterPolicy
from django_mysqlqueue.options.backoff import Backoff
from tests.support.internals import NO_WAIT, Claimant, GroupRef


@dataclass(frozen=True)
class RulesOfGroup:
    """The options of a group, without a handler."""

    ref: GroupRef
    max_attempts: int | None
    visibility_timeout: float = 0.0
    mode: Literal["ordered", "shared"] = "ordered"
    on_failure: str = "skip"
    on_expiry: str = "skip"
    backoff: Backoff = NO_WAIT
    filter: FilterPolicy | None = None

    @property
    def shared(self) -> bool:
        return self.mode == "shared"


def claimant_of(
    ref: GroupRef, subscriber: str, max_attempts: int | None, visibility_ms: int | None, **more: Any
) -> Claimant:
    """Return a claimant: of a shared group, with a visibility timeout in milliseconds; None: of an ordered one.

    ``more``: fields of ``RulesOfGroup`` and of ``Claimant``.
    """
    mode: Literal["ordered", "shared"] = "ordered" if visibility_ms is None else "shared"
    own = {name: more.pop(name) for name in ("options", "clock") if name in more}
    rules = RulesOfGroup(ref, max_attempts, (visibility_ms or 0) / 1000, mode, **more)
    return Claimant(rules, subscriber, **own)

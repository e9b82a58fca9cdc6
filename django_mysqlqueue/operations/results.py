"""What an operation returns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What an operation did or, with ``dry_run``, would do."""

    operation: str
    """Its name in the audit log."""
    dry_run: bool
    """Nothing was changed: the rest says what would be."""
    planned: int
    """With ``dry_run``: how many messages, leases, heartbeats or groups would change; otherwise as ``changed``."""
    changed: int
    """How many have changed; 0 with ``dry_run``, and where there was nothing to do."""
    summary: tuple[str, ...]
    """Sentences that say what was done or would be done; why there is nothing to do, if ``planned`` is 0."""
    warnings: tuple[str, ...] = ()
    """Sentences on what may come as a surprise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SeekResult(Result):
    """Of ``seek``. The counts are those of the preview: 0 where ``dry_run`` is not set."""

    offset: int
    """The group continues with the first message from this offset on."""
    replayed: int = 0
    """Settled messages that would be redelivered; counted up to 10,000."""
    skipped: int = 0
    """Unsettled messages that would never be delivered; counted up to 10,000."""
    exact: bool = True
    """False: counting stopped early, and there may be more of both."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DropResult(Result):
    """Of ``drop_group``. The counts are those of the preview."""

    group: str
    topic: str
    unsettled: int = 0
    """Messages that the group has not settled; counted up to 10,000."""
    kept_for_it_alone: int = 0
    """Messages that GC keeps for no other group; counted up to 10,000."""
    live_subscribers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduledResult(Result):
    """Of ``cancel``, ``reschedule`` and ``deliver_now``."""

    not_scheduled: tuple[str, ...] = ()
    """Those of the given ids that no scheduled message has: they are due, cancelled or unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EditResult(Result):
    """Of ``edit``."""

    message_id: str = ""
    """The id of the new message; '' with ``dry_run``."""


R = TypeVar("R", bound=Result)


def result_of(kind: type[R], operation: str, number: int, *summary: str, dry_run: bool, **details: Any) -> R:
    """The result of an operation that has changed ``number`` or, with ``dry_run``, would change that many."""
    changed = 0 if dry_run else number
    return kind(operation=operation, dry_run=dry_run, planned=number, changed=changed, summary=summary, **details)


def sentence(number: int, *, dry_run: bool, planned: str, done: str, nothing: str) -> str:
    """The one of three sentences that is true of an operation that changes ``number``."""
    if not number:
        return nothing
    return planned if dry_run else done

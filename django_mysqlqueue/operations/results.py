"""What an operation returns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

from django_mysqlqueue.humanize import up_to
from django_mysqlqueue.operations.limits import COUNTED


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
    """Sentences on consequences that are easily overlooked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SeekResult(Result):
    """The result of ``seek``. Only a preview counts: without ``dry_run`` the counts are None."""

    offset: int
    """The group continues with the first message from this offset on."""
    replayed: int | None = None
    """Settled messages that would be redelivered; counted up to 10,000."""
    skipped: int | None = None
    """Unsettled messages that would never be delivered; counted up to 10,000."""
    exact: bool | None = None
    """False: counting stopped early, and there may be more of both."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DropResult(Result):
    """The result of ``drop_group``. Only a preview counts: without ``dry_run`` the counts are None."""

    group: str
    topic: str
    unsettled: int | None = None
    """Messages that the group has not settled; counted up to 10,000."""
    kept_for_it_alone: int | None = None
    """Messages that GC keeps for no other group; counted up to 10,000."""
    live_subscribers: tuple[str, ...] | None = None
    """The names of those that have a heartbeat."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduledResult(Result):
    """The result of an operation on scheduled messages."""

    not_scheduled: tuple[str, ...] = ()
    """Those of the given ids that no scheduled message has: they are due, cancelled or unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EditResult(Result):
    """The result of ``edit``."""

    message_id: str = ""
    """The id of the new message; '' with ``dry_run``."""


R = TypeVar("R", bound=Result)


def result_of(kind: type[R], operation: str, number: int, *summary: str, dry_run: bool, **details: Any) -> R:
    """The result of an operation that has changed ``number`` or, with ``dry_run``, would change that many."""
    changed = 0 if dry_run else number
    return kind(operation=operation, dry_run=dry_run, planned=number, changed=changed, summary=summary, **details)


def number_said(number: int, *, dry_run: bool) -> str:
    """A number in a sentence: a preview stops counting, an operation does not."""
    return up_to(COUNTED, number) if dry_run else f"{number:,}"


def sentence(number: int, *, dry_run: bool, planned: str, done: str, nothing: str) -> str:
    """The one of three sentences that is true of an operation that changes ``number``."""
    if not number:
        return nothing
    return planned if dry_run else done

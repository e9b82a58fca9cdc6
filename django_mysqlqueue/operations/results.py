"""The results of operations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

from django.utils.translation import gettext as _

from django_mysqlqueue.operations.limits import COUNTED
from django_mysqlqueue.service.audit import Action
from django_mysqlqueue.text.humanize import up_to


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The result of an operation or, with ``dry_run``, of its preview."""

    operation: str
    """Its name in the audit log."""
    dry_run: bool
    """True if nothing was changed and the other attributes say what would be."""
    planned: int
    """With ``dry_run``, the number of messages, leases, heartbeats or groups to change; otherwise as ``changed``."""
    changed: int
    """The number of messages, leases, heartbeats or groups that were changed; 0 with ``dry_run`` or if there was
    nothing to do."""
    summary: tuple[str, ...]
    """Sentences that say what was or would be changed, or if ``planned`` is 0, why there is nothing to do."""
    warnings: tuple[str, ...] = ()
    """Sentences about consequences that are easy to overlook."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SeekResult(Result):
    """The result of ``seek``. Messages are counted only in a preview: without ``dry_run`` the counts are None."""

    offset: int
    """The group continues with the first message at or after this offset."""
    replayed: int | None = None
    """Settled messages that would be replayed; counted up to 10,000."""
    skipped: int | None = None
    """Unsettled messages that would never be delivered; counted up to 10,000."""
    exact: bool | None = None
    """False if counting stopped early, so that ``replayed`` and ``skipped`` may be higher."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DropResult(Result):
    """The result of ``drop_group``. Messages are counted only in a preview: without ``dry_run`` the counts are None."""

    group: str
    topic: str
    unsettled: int | None = None
    """Messages that the group has not settled; counted up to 10,000."""
    kept_for_it_alone: int | None = None
    """Messages that GC keeps only for this group; counted up to 10,000."""
    live_subscribers: tuple[str, ...] | None = None
    """Names of the group's live subscribers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduledResult(Result):
    """The result of an operation on scheduled messages."""

    not_scheduled: tuple[str, ...] = ()
    """Given ids without a scheduled message: they are due, cancelled or unknown. In a queue of jobs: those that have
    ended or are unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EditResult(Result):
    """The result of ``edit``."""

    message_id: str = ""
    """The id of the new message; empty with ``dry_run``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishResult(Result):
    """The result of ``operations.publish``."""

    message_id: str
    partition_key: str
    database: str
    """Alias of the database that stores the message. If the topic is in another one, subscribers relay it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportResult(Result):
    """The result of ``import_celery_beat``."""

    created: tuple[str, ...] = ()
    """The names of the schedules that were, or would be created."""
    not_taken: tuple[str, ...] = ()
    """The names of the periodic tasks that have no counterpart, or were taken before; ``summary`` says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayResult(Result):
    """The result of ``replay``."""

    run: str
    """The name of the run."""
    upto: int
    """The highest offset that was considered: the end of the range unless ``limit`` ended the replay earlier."""
    filtered: int
    """Messages that were left out because the group's filter does not match."""
    left_out: int
    """Messages that were left out because they are for other groups, or repeat other messages of the topic."""
    already_published: int
    """Messages that were left out because this run has published their copies before."""
    unsettled: int | None = None
    """Messages of ``planned`` that the group has not settled, and will get twice; None without ``dry_run``."""


R = TypeVar("R", bound=Result)


def result_of(kind: type[R], action: Action, number: int, *summary: str, dry_run: bool, **details: Any) -> R:
    """Return the result of an operation."""
    changed = 0 if dry_run else number
    return kind(operation=action.name, dry_run=dry_run, planned=number, changed=changed, summary=summary, **details)


def number_said(number: int, *, dry_run: bool) -> str:
    """Format a number for a sentence: a preview stops counting, an operation does not."""
    return up_to(COUNTED, number) if dry_run else f"{number:,}"


def sentence(number: int, *, dry_run: bool, planned: str, done: str, nothing: str) -> str:
    """Return the sentence for an operation that changes ``number``."""
    if not number:
        return nothing
    return planned if dry_run else done


def ends_keys() -> str:
    """Return the warning of a preview that takes messages with coalesce keys from a group."""
    return _("If one of them has superseded earlier messages with its coalesce key, those are not handled either.")

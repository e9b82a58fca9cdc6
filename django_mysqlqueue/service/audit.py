"""The audit log: one row for each operation of an operator, with the number of messages that it has changed so far.

It is written in the operation's own transactions, so that it is exact even after a crash.
"""

from __future__ import annotations

import contextlib
import datetime
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Required, TypedDict, Unpack

from django.db.models import F
from django.utils.translation import ngettext_lazy

from django_mysqlqueue.db.fields import NowMilliseconds
from django_mysqlqueue.db.tables import OPERATIONS
from django_mysqlqueue.exceptions import OperationRefused
from django_mysqlqueue.models import Operation
from django_mysqlqueue.names.rules import KEY_LENGTH
from django_mysqlqueue.options import job_queues
from django_mysqlqueue.options.topics import first_topic
from django_mysqlqueue.service import delivery_events
from django_mysqlqueue.service.refs import GroupRef
from django_mysqlqueue.sql.session import Session, run
from django_mysqlqueue.text.humanize import listed

KEEP_SECONDS = 365 * 86400.0
"""Seconds for which rows are kept."""
BEAT_SECONDS = 10.0
"""Seconds after which an operation between two transactions records that it is still running."""
ERROR_FILTER = "error contains "
"""The beginning of a filter by error text in the details of an operation."""
SILENT_MS = 60_000
"""Milliseconds without progress after which an operation that has not ended counts as interrupted."""

NOTHING = GroupRef("", "")
"""What an operation changes if that is neither a group nor a single topic."""

DEAD_LETTERS = ngettext_lazy("%(number)s dead letter", "%(number)s dead letters", "count")
DELIVERIES = ngettext_lazy("%(number)s delivery", "%(number)s deliveries", "count")
GROUPS = ngettext_lazy("%(number)s group", "%(number)s groups", "count")
JOBS = ngettext_lazy("%(number)s job", "%(number)s jobs", "count")
LEASES = ngettext_lazy("%(number)s lease", "%(number)s leases", "count")
MESSAGES = ngettext_lazy("%(number)s message", "%(number)s messages", "count")

ACTIONS: dict[str, Action] = {}
"""The kinds of operations by name. The module of an operation declares its own."""


class By(TypedDict, total=False):
    """Who runs an operation and why."""

    actor: Required[str]
    reason: str


@dataclass(frozen=True, slots=True, eq=False)
class Action:
    """A kind of operation. Each that is declared is in ``ACTIONS``."""

    name: str
    label: Any
    """Its name for people."""
    unit: Any = None
    """The text for the number of what it has changed; None: it changes no countable rows."""

    def __post_init__(self) -> None:
        ACTIONS[self.name] = self

    def __str__(self) -> str:
        return self.name


def begin(
    session: Session,
    action: Action,
    on: GroupRef = NOTHING,
    *,
    detail: str = "",
    total: int = 0,
    **by: Unpack[By],
) -> int:
    """Write an operation into the audit log, and return its id.

    ``on``: what it changes: a group, or a topic without a group. ``total``: the maximum number of messages that it will
    change; 0: not known.
    """
    row = Operation.objects.using(session.using).create(
        action=action.name,
        consumer_group=on.group,
        topic=on.topic,
        actor=by["actor"][:KEY_LENGTH],
        detail=detail,
        reason=by.get("reason", ""),
        total=total,
    )
    return int(row.pk)


def add(session: Session, operation: int, changed: int) -> None:
    """Add the number of messages that the current transaction changes."""
    if changed:
        row = Operation.objects.using(session.using).filter(pk=operation)
        row.update(changed=F("changed") + changed, progress_at=NowMilliseconds())


def beats(using: str, operation: int) -> Callable[[], None]:
    """Return a function to call between two transactions of an operation.

    Every ``BEAT_SECONDS``, it records that the operation is still running, so that one that waits or searches does not
    count as interrupted.
    """
    last = time.monotonic()

    def beat() -> None:
        nonlocal last
        if time.monotonic() - last >= BEAT_SECONDS:
            last = time.monotonic()
            run(using, lambda session: touch(session, operation))

    return beat


def time_text(milliseconds: int) -> str:
    """Return a time for the details of an operation, which pages show in the project's time zone."""
    moment = datetime.datetime.fromtimestamp(milliseconds / 1000, datetime.UTC)
    return moment.isoformat(timespec="milliseconds")


def error_text(error: str) -> str:
    """Return a filter by error text for the details of an operation."""
    return f"{ERROR_FILTER}{error!r}"


def kind_text(kind: str) -> str:
    """Return a filter by kind of error, of which users without permissions see as little as of another error."""
    return f"{error_text(kind)} apart from numbers, ids and addresses"


def key_text(topic: str, key: str) -> str:
    """Return a filter by key for the details of an operation: that of jobs is their task."""
    return f"task {key}" if job_queues.is_queue(first_topic(topic)) else f"key {key!r}"


def offsets_text(offsets: Sequence[int]) -> str:
    """Return selected offsets for the details of an operation: the first ones, and how many others there are."""
    return f"offset {offsets[0]}" if len(offsets) == 1 else f"offsets {listed([str(one) for one in offsets])}"


def touch(session: Session, operation: int) -> None:
    """Record that the operation is still running."""
    Operation.objects.using(session.using).filter(pk=operation, ended_at=0).update(progress_at=NowMilliseconds())


def end(session: Session, operation: int) -> None:
    """Note that the operation is complete."""
    Operation.objects.using(session.using).filter(pk=operation).update(ended_at=NowMilliseconds())


def stop(session: Session, operation: int, why: str) -> None:
    """Note that the operation will not be completed. An operation that has ended is not changed."""
    row = Operation.objects.using(session.using).filter(pk=operation, ended_at=0)
    for detail in list(row.values_list("detail", flat=True)):
        row.update(ended_at=NowMilliseconds(), detail=f"{detail}; {why}" if detail else why)


@contextlib.contextmanager
def stopping(using: str, operation: int, kind: type[OperationRefused] = OperationRefused) -> Iterator[None]:
    """End the record of an operation if it is refused between two of its transactions, and store the reason."""
    try:
        yield
    except kind as refusal:
        why = f"stopped: {refusal}"
        run(using, lambda session: stop(session, operation, why))
        raise


@contextlib.contextmanager
def ending(using: str, operation: int) -> Iterator[None]:
    """End the record of an operation after its last transaction, or if it is refused."""
    with stopping(using, operation):
        yield
    run(using, lambda session: end(session, operation))


def outdated(session: Session) -> tuple[str, tuple[object, ...]]:
    """Return the FROM and WHERE of the rows that are older than ``KEEP_SECONDS``."""
    return delivery_events.older(session, OPERATIONS, "started_at", int(KEEP_SECONDS * 1000))


def collect(using: str) -> int:
    """Delete some of the rows that are older than ``KEEP_SECONDS``, by primary key; return how many."""

    def delete(session: Session) -> int:
        return delivery_events.delete_old(session, OPERATIONS, "started_at", int(KEEP_SECONDS * 1000))

    return run(using, delete)


def once(
    session: Session, action: Action, changed: int, on: GroupRef = NOTHING, *, detail: str = "", **by: Unpack[By]
) -> None:
    """Record an operation that the current transaction does as a whole, and that changes ``changed`` messages."""
    operation = begin(session, action, on, detail=detail, **by)
    add(session, operation, changed)
    end(session, operation)

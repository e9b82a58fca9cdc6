"""The record of what operators did: one row for each operation, with how much it has changed so far.

It is written in the operation's own transactions, so after a crash it says
exactly what was done.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from django.db.models import F

from django_mysqlqueue.exceptions import OperationRefused
from django_mysqlqueue.fields import NowMilliseconds
from django_mysqlqueue.models import Operation
from django_mysqlqueue.naming import KEY_LENGTH
from django_mysqlqueue.service import delivery_events
from django_mysqlqueue.sql.session import Session, run

OPERATIONS = Operation._meta.db_table

KEEP_SECONDS = 365 * 86400.0
"""How long the record stays."""


def begin(
    session: Session,
    action: str,
    *,
    actor: str,
    reason: str = "",
    group: str = "",
    topic: str = "",
    detail: str = "",
) -> int:
    """Write an operation into the audit log; returns its id.

    Args:
        actor: who does it.
        reason: why, in that person's words.
        detail: what it does, beyond its group and topic.
    """
    row = Operation.objects.using(session.using).create(
        action=action, consumer_group=group, topic=topic, actor=actor[:KEY_LENGTH], detail=detail, reason=reason
    )
    return int(row.pk)


def add(session: Session, operation: int, changed: int) -> None:
    """Counts what the present transaction changes."""
    if changed:
        Operation.objects.using(session.using).filter(pk=operation).update(changed=F("changed") + changed)


def end(session: Session, operation: int) -> None:
    """The operation is complete."""
    Operation.objects.using(session.using).filter(pk=operation).update(ended_at=NowMilliseconds())


def stop(session: Session, operation: int, why: str) -> None:
    """The operation will not be completed; one that has ended stays as it is.

    Args:
        why: added to its detail.
    """
    row = Operation.objects.using(session.using).filter(pk=operation, ended_at=0)
    for detail in list(row.values_list("detail", flat=True)):
        row.update(ended_at=NowMilliseconds(), detail=f"{detail}; {why}" if detail else why)


@contextlib.contextmanager
def stopping(using: str, operation: int, kind: type[OperationRefused] = OperationRefused) -> Iterator[None]:
    """Ends the record of an operation that is refused between two of its transactions, and says in it why.

    Args:
        kind: the refusals after which the operation is not to be completed by another run.
    """
    try:
        yield
    except kind as refusal:
        why = f"stopped: {refusal}"
        run(using, lambda session: stop(session, operation, why))
        raise


@contextlib.contextmanager
def ending(using: str, operation: int) -> Iterator[None]:
    """Ends the record of an operation after its last transaction, or when it is refused."""
    with stopping(using, operation):
        yield
    run(using, lambda session: end(session, operation))


def collect(using: str) -> int:
    """Deletes some of the oldest rows, by primary key, that are older than ``KEEP_SECONDS``; returns how many."""

    def delete(session: Session) -> int:
        return delivery_events.delete_old(session, OPERATIONS, "started_at", int(KEEP_SECONDS * 1000))

    return run(using, delete)


def once(
    session: Session,
    action: str,
    changed: int,
    *,
    actor: str,
    reason: str = "",
    group: str = "",
    topic: str = "",
    detail: str = "",
) -> None:
    """Record an operation that the present transaction does as a whole; arguments as in ``begin``."""
    operation = begin(session, action, actor=actor, reason=reason, group=group, topic=topic, detail=detail)
    add(session, operation, changed)
    end(session, operation)

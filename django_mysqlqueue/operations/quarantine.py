"""Operations on messages that the log has refused: requeue, delete."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from django.db import Error
from django.utils.translation import gettext as _

from django_mysqlqueue.exceptions import OperationRefused
from django_mysqlqueue.models import QuarantinedMessage
from django_mysqlqueue.operations.arguments import alias_for, offsets_of
from django_mysqlqueue.operations.results import Result, result_of
from django_mysqlqueue.service import audit, quarantine
from django_mysqlqueue.sql.session import Session, run


def requeue_quarantined(
    rows: Sequence[int], *, actor: str, reason: str = "", using: str | None = None, dry_run: bool = False
) -> Result:
    """Move messages that the log has refused back into the outbox, after you have fixed the cause.

    They enter the log after the messages that did so in the meantime, and have no coalesce key. One whose id has entered
    the log in the meantime is dropped. All of them are moved, or none.

    Args:
        rows: their primary keys in ``queue_quarantine``.
        actor: who runs the operation, for the audit log.
        reason: why, for the audit log.
        using: alias of the queue's database (default: ``MYSQLQUEUE["DATABASE"]``, else the router's choice).
        dry_run: change nothing; return what would be changed.

    Raises:
        OperationRefused: none of the messages is in the quarantine, or the outbox refuses one of them.
    """
    said = _("Messages that will be moved back into the outbox: %(number)s.")
    if not dry_run:
        said = _("Messages moved back into the outbox: %(number)s.")
    return _change("requeue", quarantine.requeue, said, rows, actor, reason, using, dry_run=dry_run)


def delete_quarantined(
    rows: Sequence[int], *, actor: str, reason: str = "", using: str | None = None, dry_run: bool = False
) -> Result:
    """Delete messages that the log has refused. No consumer group receives them.

    Args:
        rows: their primary keys in ``queue_quarantine``.
        actor: who runs the operation, for the audit log.
        reason: why, for the audit log.
        using: alias of the queue's database (default: ``MYSQLQUEUE["DATABASE"]``, else the router's choice).
        dry_run: change nothing; return what would be changed.

    Raises:
        OperationRefused: none of the messages is in the quarantine.
    """
    said = _("Messages that will be deleted from the quarantine: %(number)s. No group receives them.")
    if not dry_run:
        said = _("Messages deleted from the quarantine: %(number)s.")
    return _change("delete quarantined", quarantine.delete, said, rows, actor, reason, using, dry_run=dry_run)


def _change(
    operation: str,
    change: Callable[[Session, Sequence[int]], int],
    said: str,
    rows: Sequence[int],
    actor: str,
    reason: str,
    using: str | None,
    *,
    dry_run: bool,
) -> Result:
    with alias_for(using, actor, reason) as alias:
        chosen = offsets_of(rows, "rows")
        if dry_run:
            number = QuarantinedMessage.objects.using(alias).filter(pk__in=chosen).count()
        else:
            number = run(alias, partial(_recorded, operation, change, chosen, actor, reason))
        if not number:
            raise OperationRefused("None of these messages is in the quarantine.")
        return result_of(Result, operation, number, said % {"number": f"{number:,}"}, dry_run=dry_run)


def _recorded(
    operation: str,
    change: Callable[[Session, Sequence[int]], int],
    rows: Sequence[int],
    actor: str,
    reason: str,
    session: Session,
) -> int:
    try:
        number = change(session, rows)
    except Error as error:
        if not session.dialect.refuses_row(error):
            raise
        raise OperationRefused(f"Nothing was changed. The outbox refuses one of these messages: {error}") from error
    if number:
        audit.once(session, operation, number, actor=actor, reason=reason)
    return number

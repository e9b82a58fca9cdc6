"""The operation on jobs: cancel."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from django.utils.translation import gettext as _

from django_mysqlqueue.exceptions import OperationRefused
from django_mysqlqueue.limits import JOB_PREFIX
from django_mysqlqueue.operations import job_cancelling
from django_mysqlqueue.operations.arguments import alias_for, texts
from django_mysqlqueue.operations.job_cancelling import ACTION, Cancelled
from django_mysqlqueue.operations.results import ScheduledResult, result_of
from django_mysqlqueue.service import job_rows
from django_mysqlqueue.sql.session import Session


def cancel_jobs(
    ids: Sequence[str],
    *,
    topic: str = "",
    actor: str,
    reason: str = "",
    using: str | None = None,
    dry_run: bool = False,
) -> ScheduledResult:
    """Cancel jobs that wait, and ask those that run to stop.

    ``topic``: the topic of their queue. Other jobs are not changed, and it is an error if there is none to change.
    Empty: jobs of any queue. ``dry_run``: change nothing; return what would be changed.

    Raises:
        OperationRefused: an argument is invalid; or with ``topic``, none of the jobs is waiting or running.
    """
    names = {"topic": topic} if topic else {}
    with alias_for(using, actor, reason, **names) as alias:
        wanted = texts("ids", ids)
        found = job_cancelling.find(alias, wanted, topic)
        there = {*found.waiting, *found.running, *found.asked}
        missing = [one for one in wanted if one not in there] if topic else []
        if topic and not there:
            raise OperationRefused(f"Nothing was changed. {not_cancelled_text(topic, missing)}")
        if dry_run:
            done = Cancelled(len(found.waiting), len(found.running))
        else:
            done = job_cancelling.cancel(alias, wanted, topic, actor=actor, reason=reason)
        number = done.ended + done.asked
        summary = _summary(done, max(0, len(wanted) - len(missing) - number), dry_run=dry_run)
        warnings = []
        if dry_run and job_cancelling.has_later_jobs(alias, found):
            warnings.append(_("Jobs of later stages of their chains will fail, with EarlierJobFailed."))
        return result_of(
            ScheduledResult,
            ACTION,
            number,
            *summary,
            dry_run=dry_run,
            not_scheduled=tuple(missing),
            warnings=tuple(warnings),
        )


def _summary(done: Cancelled, left: int, *, dry_run: bool) -> list[str]:
    said = []
    if done.ended:
        text = _("Waiting jobs that will be cancelled: %(number)s.") if dry_run else _("Jobs cancelled: %(number)s.")
        said.append(text % {"number": f"{done.ended:,}"})
    if done.asked:
        text = _("Running jobs that will be asked to stop: %(number)s.")
        text = text if dry_run else _("Running jobs that were asked to stop: %(number)s.")
        said.append(text % {"number": f"{done.asked:,}"})
        said.append(_("Running jobs stop only if their tasks read context.cancelled."))
    if left:
        text = _(
            "Jobs not changed, because they have ended, were asked to stop before, or another transaction is changing "
            "them: %(number)s."
        )
        if dry_run:
            text = _("Jobs that will not be changed, because they have ended or were asked to stop before: %(number)s.")
        said.append(text % {"number": f"{left:,}"})
    return said


def not_cancelled_text(topic: str, ids: Sequence[str]) -> str:
    """Return the error about ids of jobs that cannot be cancelled."""
    return f"Neither waiting nor running in topic {topic!r}: {', '.join(map(repr, ids))} (ended or unknown)."


def topics_of(using: str, ids: Collection[str]) -> set[str]:
    """Return the topics of the queues of jobs, without those that do not exist."""
    return {JOB_PREFIX + row.queue_name for row in job_rows.read(Session(using), ids).values()}

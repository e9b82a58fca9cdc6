"""The operations of the dashboard: each has a form, a preview and a call of ``django_mysqlqueue.operations``."""

from __future__ import annotations

from django.http import Http404, HttpRequest, HttpResponse

from django_mysqlqueue.admin.context import DashboardContext
from django_mysqlqueue.admin.operations import (
    base,
    dead_letters,
    errors,
    groups,
    jobs,
    publishing,
    quarantine,
    recurring,
    scheduled,
    subscribers,
)

OPERATIONS = {
    one.name: one
    for one in (
        groups.Pause,
        groups.Resume,
        groups.Seek,
        groups.Replay,
        groups.Retry,
        groups.RetrySelected,
        groups.MoveRetries,
        groups.MoveSelectedRetries,
        groups.DeadLetter,
        errors.RetryError,
        errors.DeadLetterError,
        groups.OverrideOption,
        groups.RestoreOption,
        groups.Drop,
        subscribers.ReleaseLeases,
        subscribers.ForgetSubscriber,
        dead_letters.Redrive,
        dead_letters.RedriveSelected,
        dead_letters.Discard,
        dead_letters.DiscardSelected,
        dead_letters.Edit,
        scheduled.Cancel,
        scheduled.DeliverNow,
        scheduled.Move,
        jobs.CancelJobs,
        quarantine.Requeue,
        quarantine.DeleteQuarantined,
        quarantine.RequeueTopic,
        quarantine.DeleteTopic,
        recurring.RunRecurring,
        recurring.PauseRecurring,
        recurring.ResumeRecurring,
        recurring.DeleteRecurring,
        publishing.Publish,
    )
}


def respond(dashboard: DashboardContext, request: HttpRequest, name: str) -> HttpResponse:
    """Return the response of an operation.

    Raises:
        Http404: there is no such operation.
    """
    if name not in OPERATIONS:
        raise Http404(name)
    return base.respond(dashboard, request, OPERATIONS[name])

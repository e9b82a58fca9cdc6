"""What can be done from the dashboard; each is a form, a preview and a call of the service layer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from django.http import Http404, HttpRequest, HttpResponse

from django_mysqlqueue.admin.operations import base, groups, letters, scheduled, workers

if TYPE_CHECKING:
    from django_mysqlqueue.admin.dashboard import DashboardAdmin

OPERATIONS = {
    one.name: one
    for one in (
        groups.Pause,
        groups.Resume,
        groups.Seek,
        groups.Retry,
        groups.RetrySelected,
        groups.DeadLetter,
        groups.Drop,
        workers.ReleaseLeases,
        workers.ForgetSubscriber,
        letters.Redrive,
        letters.RedriveSelected,
        letters.Discard,
        letters.DiscardSelected,
        letters.Edit,
        scheduled.Cancel,
        scheduled.DeliverNow,
        scheduled.Move,
    )
}


def respond(dashboard: DashboardAdmin, request: HttpRequest, name: str) -> HttpResponse:
    """Answers for one operation; 404 if there is none of that name."""
    if name not in OPERATIONS:
        raise Http404(name)
    return base.respond(dashboard, request, OPERATIONS[name])

"""What can be done from the dashboard; each is a form, a preview and a call of the service layer."""

from __future__ import annotations

from django.http import Http404, HttpRequest, HttpResponse

from django_mysqlqueue.admin.context import DashboardContext
from django_mysqlqueue.admin.operations import base, dead_letters, groups, scheduled, subscribers

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
    )
}


def respond(dashboard: DashboardContext, request: HttpRequest, name: str) -> HttpResponse:
    """Answers for one operation; 404 if there is none of that name."""
    if name not in OPERATIONS:
        raise Http404(name)
    return base.respond(dashboard, request, OPERATIONS[name])

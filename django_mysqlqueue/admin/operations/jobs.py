"""The operation on jobs: cancel."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from django.utils.translation import gettext_lazy, ngettext

from django_mysqlqueue.admin.operations.base import AdminOperation, ReasonForm, RowsField
from django_mysqlqueue.operations.jobs import cancel_jobs, topics_of
from django_mysqlqueue.operations.results import Result
from django_mysqlqueue.text.escaping import visible


class JobsForm(ReasonForm):
    """The form with selected jobs."""

    row = RowsField(str)


class CancelJobs(AdminOperation):
    """Cancel selected jobs, of any queues."""

    name = "cancel-jobs"
    label = gettext_lazy("Cancel jobs")
    dangerous = True
    form = JobsForm

    @classmethod
    def topics(cls, form: Any) -> Collection[str] | None:
        rows = form.cleaned_data.get("row")
        return (topics_of(form.using, rows) or None) if rows else None

    def subject(self) -> str:
        rows = self.values["row"]
        if len(rows) == 1:
            return visible(rows[0])
        return ngettext("%(number)s job", "%(number)s jobs", len(rows)) % {"number": len(rows)}

    def operate(self, **how: Any) -> Result:
        return cancel_jobs(self.values["row"], **how)

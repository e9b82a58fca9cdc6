"""Operations on selected scheduled messages, jobs, subscribers and recurring schedules."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Sequence
from typing import Any, ClassVar

from django import forms
from django.http import HttpRequest
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext_lazy

from django_mysqlqueue import operations
from django_mysqlqueue.admin.operations.base import (
    AdminOperation,
    IdsField,
    ReasonForm,
    RowsField,
    RowsOperation,
    TimeField,
)
from django_mysqlqueue.admin.permissions import demand, may_edit_schedules, may_view
from django_mysqlqueue.exceptions import OperationRefused
from django_mysqlqueue.inspection import scheduled
from django_mysqlqueue.operations import jobs, recurring
from django_mysqlqueue.operations.scheduled import cancel_rows, reschedule_rows
from django_mysqlqueue.service.databases import queue_aliases
from django_mysqlqueue.sql.session import Session
from django_mysqlqueue.text.escaping import visible


class ScheduledOperation(RowsOperation):
    """Base class of operations on selected scheduled messages."""

    fields: ClassVar = {"row": IdsField()}
    renamed: ClassVar = {"row": "rows", "time": "deliver_at"}
    counted = ngettext_lazy("%(number)s scheduled message", "%(number)s scheduled messages", "number")

    @staticmethod
    def topics_of(using: str, rows: Sequence[Any]) -> Collection[str]:
        return scheduled.topics_of(Session(using), rows)


class Cancel(ScheduledOperation):
    """Cancel selected scheduled messages."""

    name = "cancel"
    label = gettext_lazy("Cancel scheduled messages")
    dangerous = True
    operation = staticmethod(cancel_rows)


class DeliverNow(ScheduledOperation):
    """Deliver selected scheduled messages now."""

    name = "deliver-now"
    label = gettext_lazy("Deliver scheduled messages now")
    operation = staticmethod(reschedule_rows)
    fixed: ClassVar = {"deliver_at": None}


class Move(ScheduledOperation):
    """Deliver selected scheduled messages at another time."""

    name = "move"
    label = gettext_lazy("Reschedule messages")
    operation = staticmethod(reschedule_rows)
    fields: ClassVar = {"time": TimeField(label=gettext_lazy("Deliver at"))}


class CancelJobs(RowsOperation):
    """Cancel selected jobs, of any queues."""

    name = "cancel-jobs"
    label = gettext_lazy("Cancel jobs")
    dangerous = True
    operation = staticmethod(jobs.cancel_jobs)
    fields: ClassVar = {"row": RowsField(str)}
    renamed: ClassVar = {"row": "ids"}
    counted = ngettext_lazy("%(number)s job", "%(number)s jobs", "number")

    @staticmethod
    def topics_of(using: str, rows: Sequence[Any]) -> Collection[str]:
        return jobs.topics_of(using, rows)

    def subject(self) -> str:
        rows = self.values["row"]
        return visible(rows[0]) if len(rows) == 1 else super().subject()


class CancelTask(AdminOperation):
    """Cancel the jobs of a task in a queue."""

    name = "cancel-task"
    label = gettext_lazy("Cancel all jobs of a task")
    dangerous = True
    operation = staticmethod(jobs.cancel_task)
    form = ReasonForm
    fields: ClassVar = {
        "topic": forms.CharField(widget=forms.HiddenInput),
        "task": forms.CharField(widget=forms.HiddenInput),
    }
    most: ClassVar[int] = IdsField.most
    """Maximum number of jobs that one request changes."""

    def subject(self) -> str:
        return _("task %(task)s in %(topic)s") % {name: visible(self.values[name]) for name in ("task", "topic")}

    def arguments(self) -> dict[str, Any]:
        return {**super().arguments(), "limit": self.most}

    def preview(self) -> list[str]:
        result = self.operate(dry_run=True, **self._how)
        if not result.planned:
            raise OperationRefused(" ".join(result.summary))
        return [*result.summary, *result.warnings, *self._rest(result.planned)]

    def run(self) -> str:
        result = self.operate(dry_run=False, **self._how)
        return " ".join([*result.summary, *self._rest(result.changed or 0)])

    def _rest(self, number: int) -> list[str]:
        """Return a sentence about the jobs that a request leaves, if there may be any."""
        if number < self.most:
            return []
        parts = ["manage.py", "queuecancel", self.values["topic"], "--task", self.values["task"]]
        parts += ["--database", self.using] if len(queue_aliases()) > 1 else []
        text = _("One request cancels at most %(most)s jobs. To cancel all of them, run: %(command)s")
        return [text % {"most": f"{self.most:,}", "command": shlex.join(parts)}]


class ReleaseLeases(AdminOperation):
    """Release the leases of selected partitions."""

    name = "release"
    label = gettext_lazy("Release leases")
    operation = staticmethod(operations.release)
    fields: ClassVar = {"row": RowsField(str)}
    renamed: ClassVar = {"row": "keys"}


class ForgetSubscriber(AdminOperation):
    """Forget a lost subscriber."""

    name = "forget"
    label = gettext_lazy("Forget a lost subscriber")
    operation = staticmethod(operations.forget)
    form = ReasonForm
    fields: ClassVar = {"subscriber": forms.CharField(widget=forms.HiddenInput)}

    @classmethod
    def topics(cls, form: Any) -> None:
        return None  # a subscriber may work for several topics

    def subject(self) -> str:
        return str(self.values["subscriber"])


class ScheduleOperation(AdminOperation):
    """Base class of operations on a recurring schedule."""

    form = ReasonForm
    fields: ClassVar = {"schedule": forms.CharField(widget=forms.HiddenInput)}
    renamed: ClassVar = {"schedule": "name"}

    @classmethod
    def topics(cls, form: Any) -> Collection[str] | None:
        name = form.cleaned_data.get("schedule")
        topic = recurring.topic_of(form.using, name) if name else ""
        return [topic] if topic else None

    def subject(self) -> str:
        return str(self.values["schedule"])


class RunRecurring(ScheduleOperation):
    """Run a schedule now."""

    name = "run-recurring"
    label = gettext_lazy("Run a schedule now")
    operation = staticmethod(operations.run_recurring)


class PauseRecurring(ScheduleOperation):
    """Pause a schedule."""

    name = "pause-recurring"
    label = gettext_lazy("Pause a schedule")
    operation = staticmethod(operations.pause_recurring)


class ResumeRecurring(ScheduleOperation):
    """Resume a schedule."""

    name = "resume-recurring"
    label = gettext_lazy("Resume a schedule")
    operation = staticmethod(operations.resume_recurring)


class DeleteRecurring(ScheduleOperation):
    """Delete a schedule that can be edited, or that no running process declares."""

    name = "delete-recurring"
    label = gettext_lazy("Delete a schedule")
    dangerous = True
    operation = staticmethod(operations.delete_recurring)

    @classmethod
    def check_permissions(cls, request: HttpRequest, form: Any) -> str:
        """Respond with 403 unless the user may delete it: one that can be edited needs the permission to edit it."""
        name, topics = form.cleaned_data.get("schedule"), cls.topics(form)
        if not topics or recurring.stored(form.using, name) is None:
            return super().check_permissions(request, form)
        demand(all(may_view(request, topic) and may_edit_schedules(request, topic) for topic in topics))
        return ""

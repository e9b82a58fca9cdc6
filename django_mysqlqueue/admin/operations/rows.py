"""Operations on selected scheduled messages, jobs, subscribers and recurring schedules."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, ClassVar

from django import forms
from django.http import HttpRequest
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext_lazy

from django_mysqlqueue import operations
from django_mysqlqueue.admin.copying import command
from django_mysqlqueue.admin.operations.base import (
    AdminOperation,
    IdsField,
    ReasonForm,
    RowsField,
    RowsOperation,
    TimeField,
    declare,
)
from django_mysqlqueue.admin.permissions import demand, may
from django_mysqlqueue.inspection import scheduled
from django_mysqlqueue.operations import jobs, recurring
from django_mysqlqueue.operations.scheduled import cancel_rows, reschedule_rows
from django_mysqlqueue.permissions import EDIT_SCHEDULES, VIEW
from django_mysqlqueue.sql.session import Session
from django_mysqlqueue.text.escaping import visible


class ScheduledOperation(RowsOperation):
    """Base class of operations on selected scheduled messages."""

    fields: ClassVar = {"row": IdsField()}
    renamed: ClassVar = {"row": "rows", "time": "deliver_at"}
    counted = ngettext_lazy("%(number)s scheduled message", "%(number)s scheduled messages", "number")
    topics_of = staticmethod(lambda using, rows: scheduled.topics_of(Session(using), rows))


declare("cancel", gettext_lazy("Cancel scheduled messages"), cancel_rows, base=ScheduledOperation, dangerous=True)
declare(
    "deliver-now",
    gettext_lazy("Deliver scheduled messages now"),
    reschedule_rows,
    base=ScheduledOperation,
    fixed={"deliver_at": None},
)
declare(
    "move",
    gettext_lazy("Reschedule messages"),
    reschedule_rows,
    base=ScheduledOperation,
    fields={"time": TimeField(label=gettext_lazy("Deliver at"))},
)


class CancelJobs(RowsOperation):
    """Cancel selected jobs, of any queues."""

    name = "cancel-jobs"
    label = gettext_lazy("Cancel jobs")
    dangerous = True
    operation = staticmethod(jobs.cancel_jobs)
    fields: ClassVar = {"row": RowsField()}
    renamed: ClassVar = {"row": "ids"}
    counted = ngettext_lazy("%(number)s job", "%(number)s jobs", "number")
    topics_of = staticmethod(jobs.topics_of)

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

    def left(self, number: int) -> list[str]:
        """Return a sentence about the jobs that the request leaves, if there may be any."""
        if number < self.most:
            return []
        line = command("queuecancel", self.values["topic"], "--task", self.values["task"], using=self.using)
        text = _("One request cancels at most %(most)s jobs. To cancel all of them, run: %(command)s")
        return [text % {"most": f"{self.most:,}", "command": line}]


declare(
    "drop-reader",
    gettext_lazy("Drop reader"),
    operations.drop_reader,
    form=ReasonForm,
    fields={"reader": forms.CharField(widget=forms.HiddenInput)},
    dangerous=True,
    named="reader",
)
declare(
    "forget",
    gettext_lazy("Forget a lost subscriber"),
    operations.forget,
    form=ReasonForm,
    fields={"subscriber": forms.CharField(widget=forms.HiddenInput)},
    named="subscriber",
    topics=classmethod(lambda cls, form: None),  # A subscriber may work for several topics.
)


class ScheduleOperation(AdminOperation):
    """Base class of operations on a recurring schedule."""

    form = ReasonForm
    fields: ClassVar = {"schedule": forms.CharField(widget=forms.HiddenInput)}
    renamed: ClassVar = {"schedule": "name"}
    named = "schedule"

    @classmethod
    def topics(cls, form: Any) -> Collection[str] | None:
        name = form.cleaned_data.get("schedule")
        topic = recurring.topic_of(form.using, name) if name else ""
        return [topic] if topic else None


declare("run-recurring", gettext_lazy("Run a schedule now"), operations.run_recurring, base=ScheduleOperation)
declare("pause-recurring", gettext_lazy("Pause a schedule"), operations.pause_recurring, base=ScheduleOperation)
declare("resume-recurring", gettext_lazy("Resume a schedule"), operations.resume_recurring, base=ScheduleOperation)


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
        demand(all(may(request, topic, VIEW, EDIT_SCHEDULES) for topic in topics))
        return ""

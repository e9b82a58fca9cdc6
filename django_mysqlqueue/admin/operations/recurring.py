"""Operations on recurring schedules: run now, pause, resume, delete."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from django import forms
from django.utils.translation import gettext_lazy

from django_mysqlqueue import operations
from django_mysqlqueue.admin.operations.base import AdminOperation, ReasonForm
from django_mysqlqueue.operations.recurring import topic_of
from django_mysqlqueue.operations.results import Result


class ScheduleForm(ReasonForm):
    """The form with a schedule."""

    schedule = forms.CharField(widget=forms.HiddenInput)


class ScheduleOperation(AdminOperation):
    """Base class of operations on a schedule."""

    form = ScheduleForm

    @classmethod
    def topics(cls, form: Any) -> Collection[str] | None:
        name = form.cleaned_data.get("schedule")
        topic = topic_of(form.using, name) if name else ""
        return [topic] if topic else None

    def subject(self) -> str:
        return str(self.values["schedule"])


class RunRecurring(ScheduleOperation):
    """Run a schedule now."""

    name = "run-recurring"
    label = gettext_lazy("Run a schedule now")

    def operate(self, **how: Any) -> Result:
        return operations.run_recurring(self.subject(), **how)


class PauseRecurring(ScheduleOperation):
    """Pause a schedule."""

    name = "pause-recurring"
    label = gettext_lazy("Pause a schedule")

    def operate(self, **how: Any) -> Result:
        return operations.pause_recurring(self.subject(), **how)


class ResumeRecurring(ScheduleOperation):
    """Resume a schedule."""

    name = "resume-recurring"
    label = gettext_lazy("Resume a schedule")

    def operate(self, **how: Any) -> Result:
        return operations.resume_recurring(self.subject(), **how)


class DeleteRecurring(ScheduleOperation):
    """Delete a schedule that no running process declares."""

    name = "delete-recurring"
    label = gettext_lazy("Delete a schedule")
    dangerous = True

    def operate(self, **how: Any) -> Result:
        return operations.delete_recurring(self.subject(), **how)

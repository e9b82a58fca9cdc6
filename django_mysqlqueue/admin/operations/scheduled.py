"""Operations on scheduled messages: cancel, deliver now, reschedule."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from django.utils.translation import gettext_lazy, ngettext

from django_mysqlqueue.admin.operations.base import AdminOperation, IdsField, ReasonForm, TimeField
from django_mysqlqueue.inspection.scheduled import topics_of
from django_mysqlqueue.operations.results import Result
from django_mysqlqueue.operations.scheduled import cancel_rows, reschedule_rows
from django_mysqlqueue.sql.session import Session


class ScheduledForm(ReasonForm):
    """The form with selected scheduled messages."""

    row = IdsField()


class ScheduledOperation(AdminOperation):
    """Base class of operations on selected scheduled messages, of any topics."""

    form = ScheduledForm

    @classmethod
    def topics(cls, form: Any) -> Collection[str] | None:
        rows = form.cleaned_data.get("row")
        # Rows that are no longer scheduled are not changed.
        return (topics_of(Session(form.using), rows) or None) if rows else None

    def subject(self) -> str:
        number = len(self.values["row"])
        return ngettext("%(number)s scheduled message", "%(number)s scheduled messages", number) % {"number": number}


class Cancel(ScheduledOperation):
    """Cancel selected scheduled messages."""

    name = "cancel"
    label = gettext_lazy("Cancel scheduled messages")
    dangerous = True

    def operate(self, **how: Any) -> Result:
        return cancel_rows(self.values["row"], **how)


class DeliverNow(ScheduledOperation):
    """Deliver selected scheduled messages now."""

    name = "deliver-now"
    label = gettext_lazy("Deliver scheduled messages now")

    def operate(self, **how: Any) -> Result:
        return reschedule_rows(self.values["row"], None, **how)


class MoveForm(ScheduledForm):
    """The form with the new time."""

    time = TimeField(label=gettext_lazy("Deliver at"))


class Move(ScheduledOperation):
    """Deliver selected scheduled messages at another time."""

    name = "move"
    label = gettext_lazy("Reschedule messages")
    form = MoveForm

    def operate(self, **how: Any) -> Result:
        return reschedule_rows(self.values["row"], self.values["time"], **how)

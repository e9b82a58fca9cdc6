"""Operations on messages that the log has refused: requeue, delete."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from django.utils.translation import gettext_lazy, ngettext

from django_mysqlqueue import operations
from django_mysqlqueue.admin.operations.base import AdminOperation, IdsField, ReasonForm
from django_mysqlqueue.inspection.quarantine import topics_of
from django_mysqlqueue.operations.results import Result


class QuarantineForm(ReasonForm):
    """The form with selected messages."""

    row = IdsField()


class QuarantineOperation(AdminOperation):
    """Base class of operations on selected messages, of any topics."""

    form = QuarantineForm

    @classmethod
    def topics(cls, form: Any) -> Collection[str] | None:
        rows = form.cleaned_data.get("row")
        return (topics_of(form.using, rows) or None) if rows else None

    def subject(self) -> str:
        number = len(self.values["row"])
        return ngettext("%(number)s quarantined message", "%(number)s quarantined messages", number) % {
            "number": number
        }


class Requeue(QuarantineOperation):
    """Move selected messages back into the outbox."""

    name = "requeue"
    label = gettext_lazy("Requeue quarantined messages")

    def operate(self, **how: Any) -> Result:
        return operations.requeue_quarantined(self.values["row"], **how)


class DeleteQuarantined(QuarantineOperation):
    """Delete selected messages."""

    name = "delete-quarantined"
    label = gettext_lazy("Delete quarantined messages")
    dangerous = True

    def operate(self, **how: Any) -> Result:
        return operations.delete_quarantined(self.values["row"], **how)

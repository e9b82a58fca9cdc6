"""Operations on messages that the log has refused: requeue, delete."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Sequence
from functools import cached_property
from typing import Any, ClassVar

from django import forms
from django.db import Error
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext

from django_mysqlqueue import operations
from django_mysqlqueue.admin.operations.base import AdminOperation, IdsField, ReasonForm
from django_mysqlqueue.exceptions import OperationRefused
from django_mysqlqueue.inspection import list_quarantined
from django_mysqlqueue.operations.results import Result
from django_mysqlqueue.service import quarantine
from django_mysqlqueue.service.databases import queue_aliases
from django_mysqlqueue.sql.session import Session


class QuarantineForm(ReasonForm):
    """The form with selected messages."""

    row = IdsField()


class TopicForm(ReasonForm):
    """The form with the topic of a page."""

    topic = forms.CharField(widget=forms.HiddenInput)
    upto = forms.IntegerField(widget=forms.HiddenInput, min_value=1, max_value=2**63 - 1)
    """Primary key of the newest message on the page: newer ones are not changed."""


def _topics(using: str, rows: Sequence[int]) -> set[str]:
    """Return the topics of messages that are in the quarantine."""
    return set(quarantine.topics(Session(using), rows).values())


class QuarantineOperation(AdminOperation):
    """Base class of operations on selected messages, of any topics."""

    form: ClassVar[type[ReasonForm]] = QuarantineForm

    @classmethod
    def topics(cls, form: Any) -> Collection[str] | None:
        rows = form.cleaned_data.get("row")
        return (_topics(form.using, rows) or None) if rows else None

    def subject(self) -> str:
        number = len(self.values["row"])
        return ngettext("%(number)s quarantined message", "%(number)s quarantined messages", number) % {
            "number": number
        }

    def rows(self) -> Sequence[int]:
        """Return the primary keys of the messages that this request changes."""
        rows: Sequence[int] = self.values["row"]
        return rows

    def change(self, rows: Sequence[int], **how: Any) -> Result:
        """Call the operation on messages and return its result."""
        raise NotImplementedError

    def operate(self, **how: Any) -> Result:
        rows = self.rows()
        try:
            return self.change(rows, **how)
        except OperationRefused as error:
            if not isinstance(error.__cause__, Error):
                raise
            text = str(error)
            for topic in _topics(self.using, rows):
                text = self.errors.whole(text, topic)
            raise OperationRefused(text) from error


class Requeue(QuarantineOperation):
    """Move selected messages back into the outbox."""

    name = "requeue"
    label = gettext_lazy("Requeue quarantined messages")

    def change(self, rows: Sequence[int], **how: Any) -> Result:
        return operations.requeue_quarantined(rows, **how)


class DeleteQuarantined(QuarantineOperation):
    """Delete selected messages."""

    name = "delete-quarantined"
    label = gettext_lazy("Delete quarantined messages")
    dangerous = True

    def change(self, rows: Sequence[int], **how: Any) -> Result:
        return operations.delete_quarantined(rows, **how)


class OfTopic(QuarantineOperation):
    """Base class of operations on all messages of a topic."""

    form = TopicForm
    option: ClassVar[str]
    """Option of the management command that does the same without limits."""

    @classmethod
    def topics(cls, form: Any) -> Collection[str] | None:
        topic = form.data.get("topic")
        return [topic] if topic else None

    def subject(self) -> str:
        return str(self.values["topic"])

    @cached_property
    def found(self) -> Sequence[int]:
        """The primary keys of the oldest messages, and of one more than this request changes.

        Raises:
            OperationRefused: there are none.
        """
        listed = list_quarantined(topic=self.values["topic"], limit=IdsField.most + 1, using=self.using)
        found = [one.quarantine_id for one in listed if one.quarantine_id <= self.values["upto"]]
        if not found:
            raise OperationRefused(_("The quarantine has no such messages."))
        return found

    def rows(self) -> Sequence[int]:
        return self.found[: IdsField.most]

    def preview(self) -> list[str]:
        return [*super().preview(), *self.left()]

    def run(self) -> str:
        return " ".join([super().run(), *self.left()])

    def left(self) -> list[str]:
        """Return a sentence about the messages that this request leaves, if any."""
        if len(self.found) <= IdsField.most:
            return []
        parts = ["manage.py", "queuequarantine", "--topic", self.values["topic"], self.option]
        if len(queue_aliases()) > 1:
            parts += ["--database", self.using]
        text = _("One request changes the oldest %(most)s. To change all of them, run: %(command)s")
        return [text % {"most": f"{IdsField.most:,}", "command": shlex.join(parts)}]


class RequeueTopic(OfTopic, Requeue):
    """Move all messages of a topic back into the outbox."""

    name = "requeue-topic"
    label = gettext_lazy("Requeue all quarantined messages of a topic")
    option = "--requeue"


class DeleteTopic(OfTopic, DeleteQuarantined):
    """Delete all messages of a topic."""

    name = "delete-quarantined-topic"
    label = gettext_lazy("Delete all quarantined messages of a topic")
    option = "--delete"

"""Operations on messages that the log has refused: requeue, delete."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Sequence
from functools import cached_property
from typing import Any, ClassVar

from django import forms
from django.db import Error
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext_lazy

from django_mysqlqueue import operations
from django_mysqlqueue.admin.operations.base import IdsField, LimitedOperation, ReasonForm, RowsOperation
from django_mysqlqueue.exceptions import OperationRefused
from django_mysqlqueue.inspection import list_quarantined
from django_mysqlqueue.operations.results import Result
from django_mysqlqueue.service import quarantine
from django_mysqlqueue.service.databases import queue_aliases
from django_mysqlqueue.sql.session import Session


class QuarantineOperation(RowsOperation):
    """Base class of operations on selected messages."""

    fields: ClassVar = {"row": IdsField()}
    renamed: ClassVar = {"row": "rows"}
    counted = ngettext_lazy("%(number)s quarantined message", "%(number)s quarantined messages", "number")

    @staticmethod
    def topics_of(using: str, rows: Sequence[Any]) -> Collection[str]:
        return set(quarantine.topics(Session(using), rows).values())

    def operate(self, **how: Any) -> Result:
        try:
            return super().operate(**how)
        except OperationRefused as error:
            if not isinstance(error.__cause__, Error):
                raise
            text = str(error)
            for topic in self.topics_of(self.using, self.arguments()["rows"]):
                text = self.errors.whole(text, topic)
            raise OperationRefused(text) from error


class Requeue(QuarantineOperation):
    """Move selected messages back into the outbox."""

    name = "requeue"
    label = gettext_lazy("Requeue quarantined messages")
    operation = staticmethod(operations.requeue_quarantined)


class DeleteQuarantined(QuarantineOperation):
    """Delete selected messages."""

    name = "delete-quarantined"
    label = gettext_lazy("Delete quarantined messages")
    dangerous = True
    operation = staticmethod(operations.delete_quarantined)


class OfTopic(LimitedOperation, QuarantineOperation):
    """Base class of operations on all messages of a topic."""

    form = ReasonForm
    fields: ClassVar = {
        "topic": forms.CharField(widget=forms.HiddenInput),
        # Primary key of the newest message on the page: newer ones are not changed.
        "upto": forms.IntegerField(widget=forms.HiddenInput, min_value=1, max_value=2**63 - 1),
    }
    rest = gettext_lazy("One request changes the oldest %(most)s. To change all of them, run: %(command)s")
    option: ClassVar[str]
    """Option of the management command that does the same without limits."""

    @classmethod
    def topics(cls, form: Any) -> Collection[str] | None:
        topic = form.data.get("topic")
        return [topic] if topic else None

    def subject(self) -> str:
        return str(self.values["topic"])

    def matches(self) -> tuple[Sequence[int], bool]:
        return self._found, True

    @cached_property
    def _found(self) -> Sequence[int]:
        """The primary keys of the oldest messages, and of one more than this request changes."""
        listed = list_quarantined(topic=self.values["topic"], limit=self.most + 1, using=self.using)
        found = [one.quarantine_id for one in listed if one.quarantine_id <= self.values["upto"]]
        if not found:
            raise OperationRefused(_("The quarantine has no such messages."))
        return found

    def arguments(self) -> dict[str, Any]:
        return {"rows": self.chosen}

    def command_line(self) -> str:
        parts = ["manage.py", "queuequarantine", "--topic", self.values["topic"], self.option]
        if len(queue_aliases()) > 1:
            parts += ["--database", self.using]
        return shlex.join(parts)


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

"""Operations on messages that the log has refused: requeue, delete."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, ClassVar

from django import forms
from django.db import Error
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext_lazy

from django_mysqlqueue import operations
from django_mysqlqueue.admin.copying import command
from django_mysqlqueue.admin.operations.base import (
    AdminOperation,
    IdsField,
    LimitedOperation,
    ReasonForm,
    RowsOperation,
    declare,
)
from django_mysqlqueue.exceptions import OperationRefused
from django_mysqlqueue.inspection import list_quarantined
from django_mysqlqueue.operations.results import Result
from django_mysqlqueue.service import quarantine
from django_mysqlqueue.sql.session import Session


class QuarantineOperation(RowsOperation):
    """Base class of operations on selected messages."""

    fields: ClassVar = {"row": IdsField()}
    renamed: ClassVar = {"row": "rows"}
    counted = ngettext_lazy("%(number)s quarantined message", "%(number)s quarantined messages", "number")
    topics_of = staticmethod(lambda using, rows: set(quarantine.topics(Session(using), rows).values()))

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
    named = "topic"
    subject, topics = AdminOperation.subject, AdminOperation.topics

    @functools.cached_property
    def matches(self) -> tuple[Sequence[int], bool]:
        """The oldest messages, and one more than this request changes."""
        listed = list_quarantined(topic=self.values["topic"], limit=self.most + 1, using=self.using)
        found = [one.quarantine_id for one in listed if one.quarantine_id <= self.values["upto"]]
        if not found:
            raise OperationRefused(_("The quarantine has no such messages."))
        return found, True

    def arguments(self) -> dict[str, Any]:
        return {"rows": self.chosen}

    def command_line(self) -> str:
        return command("queuequarantine", "--topic", self.values["topic"], self.option, using=self.using)


declare(
    "requeue",
    gettext_lazy("Requeue quarantined messages"),
    operations.requeue_quarantined,
    base=QuarantineOperation,
)
declare(
    "delete-quarantined",
    gettext_lazy("Delete quarantined messages"),
    operations.delete_quarantined,
    base=QuarantineOperation,
    dangerous=True,
)
declare(
    "requeue-topic",
    gettext_lazy("Requeue all quarantined messages of a topic"),
    operations.requeue_quarantined,
    base=OfTopic,
    option="--requeue",
)
declare(
    "delete-quarantined-topic",
    gettext_lazy("Delete all quarantined messages of a topic"),
    operations.delete_quarantined,
    base=OfTopic,
    dangerous=True,
    option="--delete",
)

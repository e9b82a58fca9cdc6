"""What is done to scheduled messages: cancel, deliver now, move."""

from __future__ import annotations

from django import forms
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from django_mysqlqueue.admin.operations.base import AdminOperation, IdsField, TimeField
from django_mysqlqueue.admin.words import messages, moment
from django_mysqlqueue.exceptions import OperationRefused
from django_mysqlqueue.inspection import scheduled
from django_mysqlqueue.operations import rescheduling
from django_mysqlqueue.sql.session import Session


class ScheduledForm(forms.Form):
    row = IdsField()


class ScheduledOperation(AdminOperation):
    """On scheduled messages that were ticked."""

    form = ScheduledForm

    def subject(self) -> str:
        return _("scheduled messages")

    def waiting(self) -> str:
        """How many of them have not come due, in words.

        Raises:
            OperationRefused: none has not.
        """
        number = scheduled.still_waiting(Session(self.using), self.values["row"])
        if not number:
            raise OperationRefused(_("What was selected is not scheduled any more: it has come due."))
        return messages(number)

    def said(self, done: int) -> str:
        """How many were changed; and how many were due, or locked by another transaction."""
        gone = len(set(self.values["row"])) - done
        text = messages(done)
        if not gone:
            return text
        return _("%(done)s; due, or being changed by another transaction: %(gone)s") % {"done": text, "gone": gone}


class CancelForm(ScheduledForm):
    reason = forms.CharField(required=False, max_length=500, label=gettext_lazy("Reason, for the record"))


class Cancel(ScheduledOperation):
    name = "cancel"
    label = gettext_lazy("Cancel scheduled messages")
    dangerous = True
    form = CancelForm

    def preview(self) -> list[str]:
        return [
            _("Deleted for good, before they enter the log: %(count)s.") % {"count": self.waiting()},
            _("No group ever gets them."),
        ]

    def run(self) -> str:
        done = rescheduling.cancel(self.using, self.values["row"], by=self.by, reason=self.values["reason"])
        return _("Cancelled: %(count)s.") % {"count": self.said(done)}


class DeliverNow(ScheduledOperation):
    name = "deliver-now"
    label = gettext_lazy("Deliver scheduled messages now")

    def preview(self) -> list[str]:
        return [_("Due at once instead of at their time: %(count)s.") % {"count": self.waiting()}]

    def run(self) -> str:
        done = rescheduling.deliver_now(self.using, self.values["row"], by=self.by)
        return _("Due at once: %(count)s.") % {"count": self.said(done)}


class MoveForm(ScheduledForm):
    time = TimeField(label=gettext_lazy("To the time"))


class Move(ScheduledOperation):
    name = "move"
    label = gettext_lazy("Move scheduled messages to another time")
    form = MoveForm

    def preview(self) -> list[str]:
        at = self.values["time"]
        found = [_("Due at %(time)s: %(count)s.") % {"time": moment(at), "count": self.waiting()}]
        if at <= Session(self.using).now():
            found.append(_("That time is past: they come due at once."))
        return found

    def run(self) -> str:
        at = self.values["time"]
        done = rescheduling.move(self.using, self.values["row"], at, by=self.by)
        return _("Due at %(time)s: %(count)s.") % {"time": moment(at), "count": self.said(done)}

"""What is done to a group."""

from __future__ import annotations

from typing import Any

from django import forms
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from django_mysqlqueue import naming
from django_mysqlqueue.admin.operations.base import AdminOperation, GroupForm, IdsField, RowsField, TimeField
from django_mysqlqueue.admin.words import messages
from django_mysqlqueue.exceptions import OperationRefused
from django_mysqlqueue.operations import dead_lettering, dropping, retrying, seeking
from django_mysqlqueue.operations.seeking import Place
from django_mysqlqueue.service import groups, retention
from django_mysqlqueue.sql.session import Session

COUNTED = seeking.COUNTED
SAID = 5
"""Of so many selected messages a preview says what it does to each."""


def counted(number: int) -> str:
    """``12 messages``, ``10,000 messages or more``."""
    return _("%(messages)s or more") % {"messages": messages(number)} if number >= COUNTED else messages(number)


class ReasonForm(GroupForm):
    reason = forms.CharField(required=False, max_length=500, label=gettext_lazy("Reason, for the record"))


class Pause(AdminOperation):
    name = "pause"
    label = gettext_lazy("Pause the group")
    form = ReasonForm

    def preview(self) -> list[str]:
        found = _registered(self)
        if found.paused:
            raise OperationRefused(_("The group %(ref)s is paused already.") % {"ref": self.ref})
        return [
            _("Subscribers of %(ref)s finish what they hold and claim nothing more.") % {"ref": self.ref},
            _("Nothing is lost: messages wait in the log, and cleaning up waits for the group, until it is resumed."),
        ]

    def run(self) -> str:
        if groups.pause(self.using, self.ref, by=self.by, reason=self.values["reason"]):
            return _("The group %(ref)s is paused.") % {"ref": self.ref}
        return _("The group %(ref)s was paused already.") % {"ref": self.ref}


class Resume(AdminOperation):
    name = "resume"
    label = gettext_lazy("Resume the group")

    def preview(self) -> list[str]:
        if not _registered(self).paused:
            raise OperationRefused(_("The group %(ref)s is not paused.") % {"ref": self.ref})
        return [
            _("Subscribers of %(ref)s go on with what waits; they notice within seconds.") % {"ref": self.ref},
        ]

    def run(self) -> str:
        if groups.resume(self.using, self.ref, by=self.by):
            return _("The group %(ref)s goes on.") % {"ref": self.ref}
        return _("The group %(ref)s was not paused.") % {"ref": self.ref}


class SeekForm(GroupForm):
    target = forms.ChoiceField(
        label=gettext_lazy("Go on from"),
        initial="latest",
        choices=[
            ("latest", gettext_lazy("the end: skip everything that waits")),
            ("earliest", gettext_lazy("the beginning: everything that is left in the log comes again")),
            ("offset", gettext_lazy("an offset")),
            ("time", gettext_lazy("a time")),
        ],
    )
    offset = forms.IntegerField(
        label=gettext_lazy("Offset"),
        required=False,
        min_value=1,
        help_text=gettext_lazy("The message that comes next."),
    )
    time = TimeField(
        label=gettext_lazy("Time"),
        required=False,
        help_text=gettext_lazy("What took its place in the log then or later comes next."),
    )

    def clean(self) -> dict[str, Any]:
        values = super().clean() or self.cleaned_data
        target = values.get("target")
        if target in ("offset", "time") and not values.get(target) and target not in self.errors:
            self.add_error(target, _("Say which."))
        return values


class Seek(AdminOperation):
    name = "seek"
    label = gettext_lazy("Seek: go on from another place")
    dangerous = True
    form = SeekForm

    def place(self) -> Place:
        match self.values["target"]:
            case "offset":
                return seeking.place_of(self.using, self.values["offset"])
            case "time":
                return seeking.place_of(self.using, time_ms=self.values["time"])
            case target:
                return seeking.place_of(self.using, target)

    def preview(self) -> list[str]:
        found = seeking.preview(self.using, self.ref, self.place())
        stopped = _("Counting stopped after %(number)s messages of the log: there may be more of both.")
        return [
            _("The group %(ref)s goes on behind offset %(offset)s.") % {"ref": self.ref, "offset": found.place.offset},
            _("Handled ones that come again: %(count)s.") % {"count": counted(found.replayed)},
            _("Unhandled ones that never come: %(count)s.") % {"count": counted(found.skipped)},
            *([] if found.exact else [stopped % {"number": f"{seeking.READ:,}"}]),
            _("Deliveries in flight are revoked. A message that is dead-lettered before that stays in the DLQ."),
        ]

    def run(self) -> str:
        place = self.place()
        seeking.seek(self.using, self.ref, place, by=self.by)
        return _("The group %(ref)s goes on behind offset %(offset)s.") % {"ref": self.ref, "offset": place.offset}


class RetryForm(GroupForm):
    reset_attempts = forms.BooleanField(required=False, label=gettext_lazy("Count attempts from one again"))


class Retry(AdminOperation):
    name = "retry"
    label = gettext_lazy("Retry now: everything that waits")
    form = RetryForm

    def preview(self) -> list[str]:
        waiting = retrying.waiting(self.using, self.ref, most=COUNTED)
        if not waiting:
            raise OperationRefused(_("Nothing of %(ref)s waits for another attempt.") % {"ref": self.ref})
        return [_("Due at once: %(count)s.") % {"count": counted(waiting)}]

    def run(self) -> str:
        done = retrying.retry_now(self.using, self.ref, by=self.by, reset_attempts=self.values["reset_attempts"])
        return _("Due at once: %(count)s.") % {"count": messages(done)}


class RetrySelectedForm(RetryForm):
    row = RowsField(list)

    def clean_row(self) -> list[tuple[str, int]]:
        rows: list[tuple[str, int]] = []
        for row in self.cleaned_data["row"]:
            match row:
                case [str(key), int(offset)] if 0 < offset < 2**63:
                    rows.append((key, offset))
                case _:
                    raise forms.ValidationError(
                        _("The selection cannot be read: %(value)s.") % {"value": str(row)[:200]}
                    )
        return rows


class RetrySelected(AdminOperation):
    name = "retry-selected"
    label = gettext_lazy("Retry now: what is selected")
    form = RetrySelectedForm

    def preview(self) -> list[str]:
        return [_("Due at once, if it waits: %(count)s.") % {"count": messages(len(self.values["row"]))}]

    def run(self) -> str:
        done = retrying.retry_now(
            self.using,
            self.ref,
            by=self.by,
            rows=self.values["row"],
            reset_attempts=self.values["reset_attempts"],
        )
        return _("Due at once: %(count)s.") % {"count": messages(done)}


class DeadLetterForm(ReasonForm):
    row = IdsField()


class DeadLetter(AdminOperation):
    name = "dead-letter"
    label = gettext_lazy("Dead-letter now")
    form = DeadLetterForm

    def preview(self) -> list[str]:
        found = dead_lettering.find(self.using, self.ref, self.values["row"])
        said = [
            _("Message %(offset)s of %(ref)s is dead-lettered. Attempts that failed: %(failed)s.")
            % {"offset": one.offset, "ref": self.ref, "failed": one.failed}
            for one in found[:SAID]
        ]
        if len(found) > SAID:
            said.append(_("The same for %(count)s more.") % {"count": messages(len(found) - SAID)})
        return [
            *said,
            _("It gets no further attempt. Its dead letter is in %(topic)s and can be redriven.")
            % {"topic": naming.dlq_topic(self.ref.topic)},
        ]

    def run(self) -> str:
        done = dead_lettering.dead_letter_now(
            self.using, self.ref, self.values["row"], by=self.by, reason=self.values["reason"]
        )
        return _("Dead-lettered: %(count)s.") % {"count": messages(done)}


class Drop(AdminOperation):
    name = "drop"
    label = gettext_lazy("Drop the group")
    dangerous = True
    removes = True

    def preview(self) -> list[str]:
        _registered(self)
        held = retention.held_back_by(Session(self.using), self.ref, most=COUNTED)
        return [
            _("%(ref)s and its place in every partition are forgotten for good.") % {"ref": self.ref},
            _("Messages that only this group holds back, and that cleaning up may delete then: %(count)s.")
            % {"count": counted(held)},
            _("A subscriber of the group that starts later begins anew, where its handler says."),
        ]

    def run(self) -> str:
        if dropping.drop(self.using, self.ref, by=self.by):
            return _("The group %(ref)s was dropped.") % {"ref": self.ref}
        return _("The group %(ref)s was gone already.") % {"ref": self.ref}


def _registered(operation: AdminOperation) -> groups.Registered:
    found = groups.find(operation.using, operation.ref)
    if found is None:
        raise OperationRefused(_("There is no group %(ref)s.") % {"ref": operation.ref})
    return found

"""Operations on a consumer group."""

from __future__ import annotations

from typing import Any

from django import forms
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from django_mysqlqueue import operations
from django_mysqlqueue.admin.operations.base import AdminOperation, GroupForm, IdsField, TimeField
from django_mysqlqueue.operations.results import Result


class Pause(AdminOperation):
    name = "pause"
    label = gettext_lazy("Pause the group")

    def operate(self, **how: Any) -> Result:
        return operations.pause(*self.ref, **how)


class Resume(AdminOperation):
    name = "resume"
    label = gettext_lazy("Resume the group")

    def operate(self, **how: Any) -> Result:
        return operations.resume(*self.ref, **how)


class SeekForm(GroupForm):
    target = forms.ChoiceField(
        label=gettext_lazy("Continue from"),
        initial="latest",
        choices=[
            ("latest", gettext_lazy("the end: skip all unsettled messages")),
            ("earliest", gettext_lazy("the beginning: redeliver all messages that are left in the log")),
            ("offset", gettext_lazy("an offset")),
            ("time", gettext_lazy("a time")),
        ],
    )
    offset = forms.IntegerField(
        label=gettext_lazy("Offset"),
        required=False,
        min_value=1,
        help_text=gettext_lazy("The next message."),
    )
    time = TimeField(
        label=gettext_lazy("Time"),
        required=False,
        help_text=gettext_lazy("The next message is the first that entered the log then or later."),
    )

    def clean(self) -> dict[str, Any]:
        values = super().clean() or self.cleaned_data
        target = values.get("target")
        if target in ("offset", "time") and not values.get(target) and target not in self.errors:
            self.add_error(target, _("This field is required."))
        return values


class Seek(AdminOperation):
    name = "seek"
    label = gettext_lazy("Seek: continue from another position")
    dangerous = True
    form = SeekForm

    def operate(self, **how: Any) -> Result:
        match self.values["target"]:
            case "time":
                return operations.seek(*self.ref, time=self.values["time"], **how)
            case "offset":
                return operations.seek(*self.ref, self.values["offset"], **how)
            case target:
                return operations.seek(*self.ref, target, **how)


class RetryForm(GroupForm):
    reset_attempts = forms.BooleanField(required=False, label=gettext_lazy("Count attempts from one again"))


class Retry(AdminOperation):
    name = "retry"
    label = gettext_lazy("Retry now: all messages in backoff")
    form = RetryForm

    def operate(self, **how: Any) -> Result:
        return operations.retry(*self.ref, reset_attempts=self.values["reset_attempts"], **how)


class RetrySelectedForm(RetryForm):
    row = IdsField()


class RetrySelected(AdminOperation):
    name = "retry-selected"
    label = gettext_lazy("Retry now: selected messages")
    form = RetrySelectedForm

    def operate(self, **how: Any) -> Result:
        return operations.retry(
            *self.ref,
            offsets=self.values["row"],
            # Some may have come due since the page was shown.
            missing_ok=True,
            reset_attempts=self.values["reset_attempts"],
            **how,
        )


class DeadLetterForm(GroupForm):
    row = IdsField()


class DeadLetter(AdminOperation):
    name = "dead-letter"
    label = gettext_lazy("Dead-letter now")
    form = DeadLetterForm

    def operate(self, **how: Any) -> Result:
        return operations.dead_letter(*self.ref, offsets=self.values["row"], **how)


class Drop(AdminOperation):
    name = "drop"
    label = gettext_lazy("Drop the group")
    dangerous = True
    removes = True

    def operate(self, **how: Any) -> Result:
        return operations.drop_group(*self.ref, **how)

"""Operations on a consumer group."""

from __future__ import annotations

from typing import Any

from django import forms
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from django_mysqlqueue import operations
from django_mysqlqueue.admin.operations.base import AdminOperation, GroupForm, IdsField, TimeField
from django_mysqlqueue.exceptions import OperationRefused
from django_mysqlqueue.filter_policies import MAX_POLICY_BYTES
from django_mysqlqueue.names.ids import new_message_id
from django_mysqlqueue.names.rules import KEY_LENGTH
from django_mysqlqueue.operations.results import Result
from django_mysqlqueue.options.table import OVERRIDABLE, parse_text


class Pause(AdminOperation):
    """Pause a group."""

    name = "pause"
    label = gettext_lazy("Pause group")

    def operate(self, **how: Any) -> Result:
        return operations.pause(*self.ref, **how)


class Resume(AdminOperation):
    """Resume a group."""

    name = "resume"
    label = gettext_lazy("Resume group")

    def operate(self, **how: Any) -> Result:
        return operations.resume(*self.ref, **how)


class SeekForm(GroupForm):
    """The form of a seek."""

    target = forms.ChoiceField(
        label=gettext_lazy("Continue from"),
        choices=[
            ("", gettext_lazy("(choose a position)")),
            ("latest", gettext_lazy("the end of the log: skip all unsettled messages")),
            ("earliest", gettext_lazy("the beginning of the log: replay all messages that are still in it")),
            ("offset", gettext_lazy("an offset")),
            ("time", gettext_lazy("a time")),
        ],
    )
    offset = forms.IntegerField(
        label=gettext_lazy("Offset"),
        required=False,
        min_value=1,
        help_text=gettext_lazy("Offset of the next message."),
    )
    time = TimeField(
        label=gettext_lazy("Time"),
        required=False,
        help_text=gettext_lazy("The next message is the first that entered the log at or after this time."),
    )

    def clean(self) -> dict[str, Any]:
        values = super().clean() or self.cleaned_data
        target = values.get("target")
        if target in ("offset", "time") and not values.get(target) and target not in self.errors:
            self.add_error(target, _("This field is required."))
        return values


class Seek(AdminOperation):
    """Move a group's position."""

    name = "seek"
    label = gettext_lazy("Seek")
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


class ReplayForm(GroupForm):
    """The form of a replay. It starts with a new name of the run, so that a second request with it adds nothing."""

    first = forms.IntegerField(label=gettext_lazy("First offset"), min_value=1)
    last = forms.IntegerField(
        label=gettext_lazy("Last offset"), min_value=1, help_text=gettext_lazy("Included in the range.")
    )
    key = forms.CharField(
        label=gettext_lazy("Only partition"),
        required=False,
        strip=False,
        max_length=KEY_LENGTH,
        help_text=gettext_lazy("The partition key. Leave empty for all partitions."),
    )
    run = forms.CharField(widget=forms.HiddenInput)

    def __init__(self, data: Any, *, using: str) -> None:
        if "run" not in data:
            data["run"] = new_message_id()
        super().__init__(data, using=using)


class Replay(AdminOperation):
    """Replay a range of the log into a group."""

    name = "replay"
    label = gettext_lazy("Replay a range into this group")
    form = ReplayForm

    def operate(self, **how: Any) -> Result:
        values = self.values
        return operations.replay(
            *self.ref,
            values["first"],
            values["last"],
            key=values["key"] or None,
            run=values["run"],
            limit=IdsField.most,
            **how,
        )


class RetryForm(GroupForm):
    """The form of a retry."""

    reset_attempts = forms.BooleanField(required=False, label=gettext_lazy("Count attempts from 1 again"))


def _error_field() -> forms.CharField:
    return forms.CharField(
        required=False,
        strip=False,
        max_length=1000,
        label=gettext_lazy("Only if the last error contains"),
        help_text=gettext_lazy("Leave empty for all waiting messages."),
    )


class RetryAllForm(RetryForm):
    """The form of a retry of all waiting messages, or of those with an error."""

    error = _error_field()


class Retry(AdminOperation):
    """Retry all messages of a group that wait for another attempt, or those with an error."""

    name = "retry"
    label = gettext_lazy("Retry all waiting messages now")
    form = RetryAllForm

    def operate(self, **how: Any) -> Result:
        reset, error = self.values["reset_attempts"], self.values["error"] or None
        return operations.retry(*self.ref, error=error, reset_attempts=reset, **how)


class RetrySelectedForm(RetryForm):
    """The form of a retry of selected messages."""

    row = IdsField()


class RetrySelected(AdminOperation):
    """Retry selected messages."""

    name = "retry-selected"
    label = gettext_lazy("Retry selected messages now")
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


class MoveRetriesForm(GroupForm):
    """The form of a move of all waiting retries, or of those with an error."""

    time = TimeField(label=gettext_lazy("Retry at"))
    error = _error_field()


class MoveRetries(AdminOperation):
    """Move all messages of a group that wait for another attempt to another time, or those with an error."""

    name = "move-retries"
    label = gettext_lazy("Retry waiting messages at another time")
    form = MoveRetriesForm

    def operate(self, **how: Any) -> Result:
        return operations.retry(*self.ref, error=self.values["error"] or None, at=self.values["time"], **how)


class MoveSelectedForm(GroupForm):
    """The form of a move of selected retries."""

    row = IdsField()
    time = TimeField(label=gettext_lazy("Retry at"))


class MoveSelectedRetries(AdminOperation):
    """Move selected messages that wait for another attempt to another time."""

    name = "move-selected"
    label = gettext_lazy("Retry selected messages at another time")
    form = MoveSelectedForm

    def operate(self, **how: Any) -> Result:
        return operations.retry(*self.ref, offsets=self.values["row"], at=self.values["time"], missing_ok=True, **how)


class DeadLetterForm(GroupForm):
    """The form with the messages to dead-letter."""

    row = IdsField()


class DeadLetter(AdminOperation):
    """Dead-letter selected messages."""

    name = "dead-letter"
    label = gettext_lazy("Dead-letter selected messages now")
    form = DeadLetterForm

    def operate(self, **how: Any) -> Result:
        return operations.dead_letter(*self.ref, offsets=self.values["row"], **how)


class OverrideForm(GroupForm):
    """The form of an override."""

    option = forms.ChoiceField(label=gettext_lazy("Option"), choices=[(name, name) for name in OVERRIDABLE])
    value = forms.CharField(
        label=gettext_lazy("Value"),
        max_length=MAX_POLICY_BYTES,
        widget=forms.Textarea(attrs={"rows": 2, "cols": 60, "dir": "ltr"}),
        help_text=gettext_lazy(
            "For example 100, 30s, 5m or none (no limit, no filter). For backoff, for example "
            'initial=1s,factor=2,maximum=1h,jitter=0.1; for filter, JSON such as {"region": ["eu"]}.'
        ),
    )


class OverrideOption(AdminOperation):
    """Override an option of a group."""

    name = "override"
    label = gettext_lazy("Override option")
    form = OverrideForm

    def operate(self, **how: Any) -> Result:
        option = self.values["option"]
        try:
            value = parse_text(option, self.values["value"])
        except ValueError as error:
            raise OperationRefused(str(error)) from error
        return operations.settings(*self.ref, {option: value}, **how)


class RestoreForm(GroupForm):
    """The form with the option whose override to remove. The code may no longer know it."""

    option = forms.CharField(widget=forms.HiddenInput)


class RestoreOption(AdminOperation):
    """Remove an override of a group."""

    name = "restore"
    label = gettext_lazy("Remove override")
    form = RestoreForm

    def operate(self, **how: Any) -> Result:
        return operations.settings(*self.ref, unset=[self.values["option"]], **how)


class Drop(AdminOperation):
    """Drop a group."""

    name = "drop"
    label = gettext_lazy("Drop group")
    dangerous = True
    removes = True

    def operate(self, **how: Any) -> Result:
        return operations.drop_group(*self.ref, **how)

"""Operations on a consumer group."""

from __future__ import annotations

from typing import Any, ClassVar

from django import forms
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from django_mysqlqueue import operations
from django_mysqlqueue.admin.operations.base import AdminOperation, GroupForm, IdsField, RowsField, TimeField, declare
from django_mysqlqueue.db.sizes import JOB_PATH_LENGTH
from django_mysqlqueue.exceptions import OperationRefused
from django_mysqlqueue.filter_policies import MAX_POLICY_BYTES
from django_mysqlqueue.names.ids import new_message_id
from django_mysqlqueue.names.rules import KEY_LENGTH
from django_mysqlqueue.options.table import OVERRIDABLE, parse_text
from django_mysqlqueue.service.job_results import is_of_jobs
from django_mysqlqueue.service.refs import GroupRef

RESET_ATTEMPTS = forms.BooleanField(required=False, label=gettext_lazy("Count attempts from 1 again"))
RETRY_AT = TimeField(
    label=gettext_lazy("Retry at"), required=False, help_text=gettext_lazy("Leave empty to retry them now.")
)
LAST_ERROR = forms.CharField(
    required=False,
    strip=False,
    max_length=1000,
    label=gettext_lazy("Only if the last error contains"),
    help_text=gettext_lazy("Leave empty for all waiting messages."),
)


TASK = forms.CharField(
    label=gettext_lazy("Task"), max_length=JOB_PATH_LENGTH, help_text=gettext_lazy("The dotted path.")
)

declare("pause", gettext_lazy("Pause group"), operations.pause)
declare("resume", gettext_lazy("Resume group"), operations.resume)
declare("pause-task", gettext_lazy("Pause task"), operations.pause, fields={"task": TASK})
declare("resume-task", gettext_lazy("Resume task"), operations.resume, fields={"task": TASK})
declare("drop", gettext_lazy("Drop group"), operations.drop_group, dangerous=True, removes=True)
declare(
    "retry-selected",
    gettext_lazy("Retry selected messages"),
    operations.retry,
    fields={"time": RETRY_AT, "reset_attempts": RESET_ATTEMPTS, "row": IdsField()},
    renamed={"row": "offsets", "time": "at"},
    # Some may have come due since the page was shown.
    fixed={"missing_ok": True},
)
declare(
    "dead-letter",
    gettext_lazy("Dead-letter selected messages now"),
    operations.dead_letter,
    fields={"row": IdsField()},
    renamed={"row": "offsets"},
)
declare(
    "release",
    gettext_lazy("Release leases"),
    operations.release,
    fields={"row": RowsField()},
    renamed={"row": "keys"},
)


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
    operation = staticmethod(operations.seek)

    def arguments(self) -> dict[str, Any]:
        values = self.values
        ref = self.ref._asdict()
        if values["target"] == "time":
            return {**ref, "time": values["time"]}
        return {**ref, "position": values["offset"] if values["target"] == "offset" else values["target"]}


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
    operation = staticmethod(operations.replay)

    def arguments(self) -> dict[str, Any]:
        return {**super().arguments(), "limit": IdsField.most}


class WaitingForm(GroupForm):
    """A form about messages that wait for another attempt: all, or those of a key, which of jobs is their task."""

    key = forms.CharField(
        label=gettext_lazy("Key"),
        required=False,
        strip=False,
        max_length=KEY_LENGTH,
        help_text=gettext_lazy("Only messages that were published with this key. Leave empty for all keys."),
    )
    task = forms.CharField(
        label=gettext_lazy("Only jobs of the task"),
        required=False,
        max_length=JOB_PATH_LENGTH,
        help_text=gettext_lazy("The dotted path. Leave empty for all tasks."),
    )

    def __init__(self, data: Any, *, using: str) -> None:
        super().__init__(data, using=using)
        of_jobs = is_of_jobs(GroupRef(str(data.get("group")), str(data.get("topic"))))
        del self.fields["key" if of_jobs else "task"]


declare(
    "retry",
    gettext_lazy("Retry waiting messages"),
    operations.retry,
    form=WaitingForm,
    fields={"time": RETRY_AT, "reset_attempts": RESET_ATTEMPTS, "error": LAST_ERROR},
    renamed={"time": "at"},
)


class OverrideOption(AdminOperation):
    """Override an option of a group."""

    name = "override"
    label = gettext_lazy("Override option")
    fields: ClassVar = {
        "option": forms.ChoiceField(label=gettext_lazy("Option"), choices=[(name, name) for name in OVERRIDABLE]),
        "value": forms.CharField(
            label=gettext_lazy("Value"),
            max_length=MAX_POLICY_BYTES,
            widget=forms.Textarea(attrs={"rows": 2, "cols": 60, "dir": "ltr"}),
            help_text=gettext_lazy(
                "For example 100, 30s, 5m or none (no limit, no filter). For backoff, for example "
                'initial=1s,factor=2,maximum=1h,jitter=0.1; for filter, JSON such as {"region": ["eu"]}.'
            ),
        ),
    }
    operation = staticmethod(operations.settings)

    def arguments(self) -> dict[str, Any]:
        option = self.values["option"]
        try:
            return {**self.ref._asdict(), "values": {option: parse_text(option, self.values["value"])}}
        except ValueError as error:
            raise OperationRefused(str(error)) from error


class RestoreOption(AdminOperation):
    """Remove an override of a group. The code may no longer know the option."""

    name = "restore"
    label = gettext_lazy("Remove override")
    operation = staticmethod(operations.settings)
    fields: ClassVar = {"option": forms.CharField(widget=forms.HiddenInput)}

    def arguments(self) -> dict[str, Any]:
        return {**self.ref._asdict(), "unset": [self.values["option"]]}

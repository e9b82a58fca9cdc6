"""The forms that create and edit recurring schedules."""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any, ClassVar

from django import forms
from django.http import HttpRequest
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from django_mysqlqueue import operations
from django_mysqlqueue.admin.contents import parse_json
from django_mysqlqueue.admin.operations.base import AdminOperation, ReasonForm, TimeField, code_field, time_text
from django_mysqlqueue.admin.permissions import demand, may
from django_mysqlqueue.exceptions import OperationRefused
from django_mysqlqueue.names.ids import SCHEDULE_NAME_LENGTH
from django_mysqlqueue.names.rules import KEY_LENGTH
from django_mysqlqueue.operations import recurring
from django_mysqlqueue.operations.results import Result
from django_mysqlqueue.options import job_queues
from django_mysqlqueue.permissions import EDIT_SCHEDULES, SEE_PAYLOADS, VIEW
from django_mysqlqueue.schedules import editing, registry
from django_mysqlqueue.schedules.definitions import ALL, LATEST, QUEUE, SKIP
from django_mysqlqueue.service.databases import queue_alias

NEEDED = (VIEW, EDIT_SCHEDULES)


class ScheduleForm(ReasonForm):
    """The fields of a schedule that people make."""

    suggestions_id = "mq-tasks"
    suggestions: tuple[str, ...] = ()
    """The tasks that the browser suggests."""
    task = forms.CharField(
        label=gettext_lazy("Task"),
        max_length=KEY_LENGTH,
        widget=forms.TextInput(attrs={"list": suggestions_id, "autocomplete": "off", "spellcheck": "false"}),
        help_text=gettext_lazy("The path of a task that the project declares, such as shop.tasks.send_reports."),
    )
    cron = forms.CharField(
        label=gettext_lazy("Cron line"),
        required=False,
        max_length=KEY_LENGTH,
        help_text=gettext_lazy("Minute, hour, day of the month, month, day of the week: 0 3 * * MON-FRI."),
    )
    timezone = forms.CharField(
        label=gettext_lazy("Time zone of the cron line"),
        required=False,
        max_length=KEY_LENGTH,
        help_text=gettext_lazy("Such as Europe/Berlin. Leave empty for that of the project."),
    )
    every = forms.FloatField(
        label=gettext_lazy("Interval in seconds"), required=False, help_text=gettext_lazy("Instead of a cron line.")
    )
    start = TimeField(
        label=gettext_lazy("First run of the interval"),
        required=False,
        help_text=gettext_lazy("Leave empty to let the name choose: so schedules do not all run in the same second."),
    )
    at = TimeField(label=gettext_lazy("Run once at"), required=False, help_text=gettext_lazy("Instead of both."))
    args = code_field(gettext_lazy("Positional arguments"), help_text=gettext_lazy('A JSON list such as [1, "eu"].'))
    kwargs = code_field(
        gettext_lazy("Keyword arguments"), help_text=gettext_lazy('A JSON object such as {"region": "eu"}.')
    )
    overlap = forms.ChoiceField(
        label=gettext_lazy("If the job of an earlier run has not ended"),
        initial=QUEUE,
        choices=[(QUEUE, gettext_lazy("enqueue the next one")), (SKIP, gettext_lazy("skip the run"))],
    )
    catch_up = forms.ChoiceField(
        label=gettext_lazy("After an outage"),
        initial=LATEST,
        choices=[(LATEST, gettext_lazy("run the latest missed run")), (ALL, gettext_lazy("run all missed runs"))],
    )
    enabled = forms.BooleanField(label=gettext_lazy("Enabled"), required=False, initial=True)

    def clean(self) -> dict[str, Any]:
        """Require one kind of times; the operation checks the rest."""
        values = super().clean() or self.cleaned_data
        if not self.errors and not any(values.get(name) not in (None, "") for name in editing.TIMES):
            self.add_error("cron", _("Enter a cron line, an interval, or a time to run once."))
        return values

    def clean_args(self) -> Any:
        return _parsed(self.cleaned_data["args"], list, _("This must be a JSON list: %(error)s"))

    def clean_kwargs(self) -> Any:
        return _parsed(self.cleaned_data["kwargs"], dict, _("This must be a JSON object: %(error)s"))


def _parsed(text: str, kind: type[Any], message: str) -> Any:
    if not text.strip():
        return kind()
    try:
        found = parse_json(text)
    except ValueError as error:
        raise forms.ValidationError(message % {"error": error}) from error
    if not isinstance(found, kind):
        raise forms.ValidationError(message % {"error": text[:200]})
    return found


class CreateScheduleForm(ScheduleForm):
    """The form of a new schedule."""

    name = forms.CharField(
        label=gettext_lazy("Name"),
        max_length=SCHEDULE_NAME_LENGTH,
        help_text=gettext_lazy("Letters, digits, dots, hyphens and underscores."),
    )
    field_order = ("name",)


class CreateRecurring(AdminOperation):
    """Create a schedule."""

    name = "create-recurring"
    label = gettext_lazy("Create a schedule")
    form = CreateScheduleForm
    operation = staticmethod(operations.create_recurring)
    named = "name"

    @classmethod
    def check_permissions(cls, request: HttpRequest, form: Any) -> str:
        """Respond with 403 unless the user may schedule a task, and refuse the form if the task is another one."""
        return _check_task(request, form)

    def operate(self, **how: Any) -> Result:
        topic = editing.topic_of(self.values["task"])
        if topic and (alias := queue_alias(topic=topic)) != self.using:
            text = _("The jobs of this task are in the database %(database)s: create the schedule there.")
            raise OperationRefused(text % {"database": alias})
        return super().operate(**how)


class EditScheduleForm(ScheduleForm):
    """The form of a schedule that exists. It starts with what is stored."""

    schedule = forms.CharField(widget=forms.HiddenInput)
    version = forms.IntegerField(widget=forms.HiddenInput)
    was_enabled = forms.BooleanField(required=False, widget=forms.HiddenInput)

    def __init__(self, data: Any, *, using: str) -> None:
        self.stored = recurring.stored(using, data.get("schedule", ""))
        if self.stored is not None and "asked" not in data:
            for name, value in _shown(self.stored).items():
                data[name] = value
        super().__init__(data, using=using)


class EditRecurring(AdminOperation):
    """Edit a schedule that people have made."""

    name = "edit-recurring"
    label = gettext_lazy("Edit a schedule")
    form = EditScheduleForm
    permissions = (*NEEDED, SEE_PAYLOADS)
    operation = staticmethod(operations.update_recurring)
    renamed: ClassVar = {"schedule": "name"}
    named = "schedule"

    @classmethod
    def topics(cls, form: Any) -> Collection[str] | None:
        return None if form.stored is None else [form.stored.definition.topic]

    @classmethod
    def check_permissions(cls, request: HttpRequest, form: Any) -> str:
        """Respond with 403 unless the user may edit this schedule, and refuse the form if the task is another one."""
        super().check_permissions(request, form)
        if form.stored is None:
            return _("There is no such schedule that can be edited.")
        if form.cleaned_data.get("task") == form.stored.definition.task:
            return _suggest(request, form)
        return _check_task(request, form)

    def arguments(self) -> dict[str, Any]:
        given = super().arguments()
        if given.pop("was_enabled") == given["enabled"]:
            del given["enabled"]  # Somebody may have paused or resumed it since the form was opened: it stays so.
        if self.bound.stored.definition.task == given["task"]:
            del given["task"]  # Its jobs stay in their queue.
        return given


def _check_task(request: HttpRequest, form: Any) -> str:
    """Respond with 403 unless the user may schedule a task; return why the given one is refused, if it is.

    The user types the task, so the form is shown again.
    """
    recurring.import_tasks()
    path = form.cleaned_data.get("task") or ""
    topic = editing.topic_of(path)
    # Who may schedule all tasks is told by the operation why one of them cannot run.
    if may(request, topic or None, *NEEDED):
        return _suggest(request, form)
    queues = job_queues.find() if job_queues.find is not None else ()
    demand(any(may(request, one, *NEEDED) for one in queues))
    _suggest(request, form)
    return _("There is no task %(task)s that you may schedule.") % {"task": path} if path else ""


def _suggest(request: HttpRequest, form: Any) -> str:
    known = registry.known_tasks() if registry.known_tasks is not None else ()
    topics = {path: editing.topic_of(path) for path in known}
    form.suggestions = tuple(path for path, topic in topics.items() if topic and may(request, topic, *NEEDED))
    return ""


def _shown(stored: recurring.Stored) -> dict[str, str]:
    """Return the values of the form's fields."""
    options = editing.options_of(stored.definition)
    every = options.get("every")
    shown = {
        "task": stored.definition.task,
        "cron": options.get("cron") or "",
        "timezone": options.get("timezone") or "",
        "every": "" if every is None else f"{every.total_seconds():.3f}".rstrip("0").rstrip("."),
        "args": _text(options["args"]),
        "kwargs": _text(options["kwargs"]),
        "overlap": stored.definition.overlap,
        "catch_up": stored.definition.catch_up,
        "version": str(stored.version),
        "enabled": "True" if stored.enabled else "",
        "was_enabled": "True" if stored.enabled else "",
    }
    for name in ("start", "at"):
        moment: Any = options.get(name)
        shown[name] = "" if moment is None else time_text(moment)
    return shown


def _text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, indent=2) if value else ""

"""An operation as a person does it: say what would happen, ask, do it, put it on record."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator
from typing import Any, ClassVar

from django import forms
from django.contrib import messages
from django.contrib.admin.models import CHANGE, LogEntry
from django.contrib.contenttypes.models import ContentType
from django.core.exceptions import ImproperlyConfigured, ValidationError
from django.db import Error
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.utils.http import url_has_allowed_host_and_scheme
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from django_mysqlqueue.admin.context import DashboardContext
from django_mysqlqueue.admin.permissions import demand, may_search_errors, may_see_payloads, search_refused
from django_mysqlqueue.exceptions import OperationRefused, QueueError
from django_mysqlqueue.models import Dashboard
from django_mysqlqueue.operations.results import Result
from django_mysqlqueue.service.publishing import queue_alias
from django_mysqlqueue.service.refs import GroupRef
from django_mysqlqueue.sql import failures
from django_mysqlqueue.sql.connection import LOCK_SECONDS, bounded

RECORDED = frozenset({"reason"})
"""Fields that only go on record: filled in after the preview they change nothing of it."""


class RowsField(forms.Field):
    """Rows that were ticked in a list: JSON texts of one type, repeated."""

    widget = forms.MultipleHiddenInput

    def __init__(self, kind: type, **options: Any) -> None:
        super().__init__(**options)
        self._kind = kind

    def to_python(self, value: Any) -> list[Any]:
        try:
            found = [json.loads(one) for one in value or ()]
            json.dumps(found, ensure_ascii=False).encode()  # half a surrogate pair can be sent to no database
        except (TypeError, ValueError, RecursionError):
            found = [None]
        if not all(type(one) is self._kind for one in found):
            raise ValidationError(_("The selection cannot be read: %(value)s.") % {"value": str(value)[:200]})
        return found

    def validate(self, value: Any) -> None:
        if self.required and not value:
            raise ValidationError(_("Nothing is selected."))


class IdsField(RowsField):
    """Rows that were ticked and that have a number: a bounded number of them."""

    most = 2000

    def __init__(self, **options: Any) -> None:
        super().__init__(int, **options)

    def validate(self, value: Any) -> None:
        super().validate(value)
        if len(value) > self.most:
            raise ValidationError(
                _("%(number)s rows are selected: at most %(most)s.") % {"number": len(value), "most": self.most}
            )
        for one in value:
            if not 0 < one < 2**63:
                raise ValidationError(_("The selection cannot be read: %(value)s.") % {"value": one})


class TimeField(forms.DateTimeField):
    """A date and time in the project's time zone."""

    widget = forms.DateTimeInput(attrs={"type": "datetime-local", "step": "1"})


class ReasonForm(forms.Form):
    """Every operation goes on record with a reason."""

    reason = forms.CharField(required=False, max_length=500, label=gettext_lazy("Reason, for the audit log"))

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.order_fields([*(name for name in self.fields if name != "reason"), "reason"])


class GroupForm(ReasonForm):
    """What an operation on a group needs to know."""

    group = forms.CharField(widget=forms.HiddenInput)
    topic = forms.CharField(widget=forms.HiddenInput)


class AdminOperation:
    """One kind of operation, with what a person has filled in."""

    do_not_call_in_templates = True

    name: ClassVar[str]
    """Of its URL."""
    label: ClassVar[Any]
    """What it does, as a heading and on its button."""
    dangerous: ClassVar[bool] = False
    """It cannot be undone."""
    removes: ClassVar[bool] = False
    """The page that it was asked from is about nothing afterwards: the way goes on to the overview."""
    shows_payloads: ClassVar[bool] = False
    """Only who may see payloads may do it."""
    form: ClassVar[type[forms.Form]] = GroupForm

    def __init__(self, values: dict[str, Any], actor: str) -> None:
        self.values = values
        self.using = queue_alias()
        self._how = {"using": self.using, "actor": actor, "reason": values.get("reason") or ""}

    @property
    def ref(self) -> GroupRef:
        return GroupRef(self.values["group"], self.values["topic"])

    def subject(self) -> str:
        """What it is done to, for the admin's log."""
        return str(self.ref)

    def operate(self, **how: Any) -> Result:
        """Calls the operation.

        Args:
            how: ``using``, ``actor``, ``reason`` and ``dry_run``.
        """
        raise NotImplementedError

    def preview(self) -> list[str]:
        """Sentences that say what it would do; it changes nothing.

        Raises:
            OperationRefused: it cannot be done, or there is nothing to do, and why.
        """
        result = self.operate(dry_run=True, **self._how)
        if not result.planned:
            raise OperationRefused(" ".join(result.summary))
        return [*result.summary, *result.warnings]

    def run(self) -> str:
        """Does it, and says what was done.

        Raises:
            OperationRefused: it was not done, and why.
        """
        return " ".join(self.operate(dry_run=False, **self._how).summary)


def respond(dashboard: DashboardContext, request: HttpRequest, operation: type[AdminOperation]) -> HttpResponse:
    """The page that asks, or on a confirmed POST the deed and the way back.

    What is done is what was previewed: values changed since are previewed anew.
    """
    demand(may_see_payloads(request) or not operation.shows_payloads)
    posted = request.method == "POST"
    given = (request.POST if posted else request.GET).copy()
    for name, field in operation.form.base_fields.items():
        if name not in given and field.initial is not None and "asked" not in given:
            given[name] = str(field.initial)
    back = _way_back(dashboard, request, given.get("next", ""))
    form = operation.form(given)
    sentences: list[str] = []
    digest = subject = ""
    confirmed = posted and "confirmed" in given
    refusal, status = _refused_search(request, form, given.get("error", ""))
    if not refusal and form.is_valid():
        digest = _digest(form.cleaned_data)
        one = operation(form.cleaned_data, request.user.get_username())
        subject = one.subject()
        try:
            if confirmed and given.get("previewed") == digest:
                return _do(dashboard, request, one, back)
            with _errors_as_refusals(one.using), bounded(one.using):
                sentences = one.preview()
        except QueueError as error:
            refusal = str(error)
    context = {
        "title": str(operation.label),
        "operation": operation,
        "subject": subject,
        "form": form,
        "show_errors": "asked" in given,
        "has_choices": any(not field.is_hidden for field in form),
        "hidden_errors": [error for field in form.hidden_fields() for error in field.errors],
        "sentences": sentences,
        "changed": confirmed and bool(sentences),
        "refusal": refusal,
        "previewed": digest,
        "back": back,
    }
    return dashboard.response(request, "confirm.html", context, status)


def _refused_search(request: HttpRequest, form: forms.Form, text: str) -> tuple[str, int]:
    """Why this person may not search the errors for a text, and the status; '' and 200: they may, or do not search."""
    if "error" not in form.fields or not text:
        return "", 200
    try:
        return ("", 200) if may_search_errors(request) else (search_refused(), 403)
    except ImproperlyConfigured as error:  # a bad REDACT
        return str(error), 500


def _do(dashboard: DashboardContext, request: HttpRequest, operation: AdminOperation, back: str) -> HttpResponse:
    try:
        with _errors_as_refusals(operation.using), bounded(operation.using, read=LOCK_SECONDS):
            done = operation.run()
    except QueueError as error:
        # Part of it may have been done: the queue's own record says how much.
        _log(request, operation, f"{operation.label}: {error}")
        messages.error(request, str(error))
    else:
        _log(request, operation, done)
        messages.success(request, done)
        if operation.removes:
            return HttpResponseRedirect(dashboard.url("changelist"))
    return HttpResponseRedirect(back)


@contextlib.contextmanager
def _errors_as_refusals(using: str) -> Iterator[None]:
    """A database that refuses or does not answer is told as an operation that was refused."""
    try:
        yield
    except Error as error:
        if failures.kind_of(using, error) is None:
            raise
        raise QueueError(failures.explain(using, error)) from error


def _log(request: HttpRequest, operation: AdminOperation, text: str) -> None:
    LogEntry.objects.create(
        user_id=request.user.pk or 0,
        content_type=ContentType.objects.get_for_model(Dashboard, for_concrete_model=False),
        object_repr=operation.subject()[:200],
        action_flag=CHANGE,
        change_message=text,
    )


def _digest(values: dict[str, Any]) -> str:
    """Names what was filled in, so that what is confirmed is what was shown."""
    shown = {name: value for name, value in values.items() if name not in RECORDED}
    return hashlib.sha256(json.dumps(shown, sort_keys=True, default=str).encode()).hexdigest()


def _way_back(dashboard: DashboardContext, request: HttpRequest, wanted: str) -> str:
    if url_has_allowed_host_and_scheme(wanted, {request.get_host()}, require_https=request.is_secure()):
        return wanted
    return dashboard.url("changelist")

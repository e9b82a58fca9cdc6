"""The base class of the dashboard's operations: preview, confirm, run, log."""

from __future__ import annotations

import contextlib
import datetime
import functools
import hashlib
import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, ClassVar

from django import forms
from django.contrib import messages
from django.contrib.admin.models import CHANGE, LogEntry
from django.contrib.contenttypes.models import ContentType
from django.core.exceptions import ImproperlyConfigured, ValidationError
from django.db import Error
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect, QueryDict
from django.utils import timezone
from django.utils.http import url_has_allowed_host_and_scheme
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from django_mysqlqueue.admin.context import BadQuery, DashboardContext, choose_database
from django_mysqlqueue.admin.diffs import DiffLine
from django_mysqlqueue.admin.error_texts import ErrorTexts
from django_mysqlqueue.admin.permissions import demand, may, may_search_errors, search_refused, text_of
from django_mysqlqueue.admin.shared import shared
from django_mysqlqueue.exceptions import OperationRefused, QueueError
from django_mysqlqueue.inspection.bounds import PAGES, Bounds
from django_mysqlqueue.models import Dashboard
from django_mysqlqueue.names.rules import KEY_LENGTH
from django_mysqlqueue.operations.results import Result
from django_mysqlqueue.permissions import OPERATE, VIEW
from django_mysqlqueue.service.refs import GroupRef
from django_mysqlqueue.sql import failures
from django_mysqlqueue.sql.connection import LOCK_SECONDS, READ_SECONDS, bounded
from django_mysqlqueue.text.escaping import visible
from django_mysqlqueue.text.humanize import shortened

OPERATIONS: dict[str, type[AdminOperation]] = {}
"""The operations by name. Each class that has a name is in it."""
RECORDED = frozenset({"reason"})
"""Fields that do not affect the preview: they can be changed after it."""


class RowsField(forms.Field):
    """Rows selected in a list, as repeated JSON values of one type."""

    widget = forms.MultipleHiddenInput
    kind: ClassVar[type] = str

    def to_python(self, value: Any) -> list[Any]:
        try:
            found = [json.loads(one) for one in value or ()]
            json.dumps(found, ensure_ascii=False).encode()  # no database accepts a lone surrogate
        except (TypeError, ValueError, RecursionError):
            found = [None]
        if not all(type(one) is self.kind for one in found):
            text = ", ".join(map(str, value))[:200]
            raise ValidationError(_("The selection is invalid: %(value)s.") % {"value": text})
        return found

    def validate(self, value: Any) -> None:
        if not value:
            raise ValidationError(_("Nothing is selected."))


class IdsField(RowsField):
    """Selected rows that are named by positive integers, at most ``most``."""

    kind = int
    most = 2000

    def validate(self, value: Any) -> None:
        super().validate(value)
        if len(value) > self.most:
            raise ValidationError(
                _("%(number)s rows are selected; the maximum is %(most)s.") % {"number": len(value), "most": self.most}
            )
        for one in value:
            if not 0 < one < 2**63:
                raise ValidationError(_("The selection is invalid: %(value)s.") % {"value": one})


class _TimeInput(forms.DateTimeInput):
    """The browser's field for a date and time, or one for text if there is an offset, which the browser's refuses."""

    input_type = "datetime-local"

    def get_context(self, name: str, value: Any, attrs: dict[str, Any] | None) -> dict[str, Any]:
        """Return the values of the template."""
        context = super().get_context(name, value, attrs)
        if re.search(r"[+-]\d\d:\d\d$", context["widget"]["value"] or ""):
            context["widget"]["type"] = "text"
        return context


class TimeField(forms.DateTimeField):
    """A date and time in the project's time zone."""

    widget = _TimeInput(attrs={"step": "1"})


def time_text(moment: datetime.datetime) -> str:
    """Return a time as the text of a field; with its offset if there is no other way to tell which time it is."""
    try:
        local = timezone.localtime(moment)
    except OverflowError:  # The end of the year 9999, in a time zone east of UTC.
        return moment.isoformat(timespec="seconds")
    comes_twice = local.utcoffset() != local.replace(fold=1 - local.fold).utcoffset()
    return local.isoformat(timespec="seconds") if comes_twice else f"{local:%Y-%m-%dT%H:%M:%S}"


def code_field(label: Any, *, rows: int = 3, css: str = "mq-json", **options: Any) -> forms.CharField:
    """Return a field for a text of several lines that is no prose."""
    widget = forms.Textarea(attrs={"rows": rows, "spellcheck": "false", "dir": "ltr", "class": css})
    return forms.CharField(label=label, widget=widget, **{"required": False, **options})


class ReasonForm(forms.Form):
    """A form with the reason for the audit log, which is asked for below the preview."""

    reason = forms.CharField(required=False, max_length=500, label=gettext_lazy("Reason, for the audit log"))

    def __init__(self, data: Any, *, using: str) -> None:
        super().__init__(data)
        self.using = using
        for name, field in self.fields.items():
            if field.widget.is_hidden:  # It has no label on the page.
                field.error_messages["required"] = _("The parameter %(name)s is required.") % {"name": name}


class GroupForm(ReasonForm):
    """A form with a consumer group and its topic."""

    group = forms.CharField(widget=forms.HiddenInput)
    topic = forms.CharField(widget=forms.HiddenInput)


class AdminOperation:
    """An operation of ``django_mysqlqueue.operations`` whose arguments are the fields of its form."""

    do_not_call_in_templates = True

    name: ClassVar[str]
    """Name in the URL."""
    label: ClassVar[Any]
    """Heading, and text of the button."""
    dangerous: ClassVar[bool] = False
    """True if it cannot be undone."""
    needs_reason: ClassVar[bool] = False
    """True if it does not run without a reason: the audit log is the only trace of what it deletes."""
    removes: ClassVar[bool] = False
    """True if the page that it was started from no longer exists afterwards: the overview follows."""
    permissions: ClassVar[Sequence[str]] = (VIEW, OPERATE)
    """What the user may do on its topics."""
    form: ClassVar[type[ReasonForm]] = GroupForm
    fields: ClassVar[Mapping[str, forms.Field]] = {}
    """The fields that the class adds to the form."""
    operation: ClassVar[Callable[..., Result]]
    renamed: ClassVar[Mapping[str, str]] = {}
    """The operation's arguments for fields that have another name."""
    fixed: ClassVar[Mapping[str, Any]] = {}
    """Further arguments of the operation."""
    named: ClassVar[str] = ""
    """The field with the name of the object; empty: the object is the group."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "fields" in vars(cls):
            cls.form = type(f"{cls.__name__}Form", (cls.form,), dict(cls.fields))
        if "name" in vars(cls):
            OPERATIONS[cls.name] = cls

    def __init__(self, form: Any, actor: str, errors: ErrorTexts) -> None:
        self.bound = form
        self.values: dict[str, Any] = form.cleaned_data
        self.errors = errors
        self.using: str = form.using
        self._how = {"using": self.using, "actor": actor, "reason": self.values.get("reason") or ""}

    @property
    def ref(self) -> GroupRef:
        """The group that the form names."""
        return GroupRef(self.values["group"], self.values["topic"])

    @classmethod
    def topics(cls, form: Any) -> Collection[str] | None:
        """Return the topics on which the user must have the permissions; None: on all."""
        topic = form.cleaned_data.get("topic") or form.data.get("topic")
        return [topic] if topic else None

    @classmethod
    def database(cls, dashboard: DashboardContext, request: HttpRequest, given: QueryDict) -> str:
        """Return the alias of the database to operate on: the one that is given, or that of the topic.

        With several databases, one of both is required: an offset or a subscriber's name means something else in each.
        """
        wanted, topic = given.get("database"), given.get("topic")
        if dashboard.databases and not (wanted or topic):
            raise BadQuery(_("The parameter %(name)s is required.") % {"name": "database"})
        return choose_database(request, wanted, topic)

    @classmethod
    def check_permissions(cls, request: HttpRequest, form: Any) -> str:
        """Respond with 403 unless the user may run the operation; return why the form is shown again, if it is."""
        topics = cls.topics(form)
        for topic in (None,) if topics is None else topics:
            demand(may(request, topic, *cls.permissions))
        searches = "error" in form.fields and form.data.get("error")
        return search_refused() if searches and not may_search_errors(request, form.data.get("topic")) else ""

    def subject(self) -> str:
        """Return the name of the object, for the heading and the admin's log."""
        return str(self.values[self.named] if self.named else self.ref)

    def operate(self, **how: Any) -> Result:
        """Call the operation, with ``using``, ``actor``, ``reason`` and ``dry_run``."""
        return type(self).operation(**self.arguments(), **how)

    def arguments(self) -> dict[str, Any]:
        """Return the operation's own arguments: the values of the form. An empty text is None."""
        given = {
            self.renamed.get(field, field): None if value == "" else value
            for field, value in self.values.items()
            if field not in RECORDED
        }
        return {**given, **self.fixed}

    def preview(self) -> list[str]:
        """Return sentences about what the operation would change, without changing anything."""
        result = self.operate(dry_run=True, **self._how)
        if not result.planned:
            raise OperationRefused(" ".join(result.summary))
        return [*result.summary, *result.warnings, *self.shares(), *self.left(result.planned)]

    def diff(self) -> list[DiffLine]:
        """Return what the operation changes in a text, line by line; empty if it changes none."""
        return []

    def run(self) -> str:
        """Run the operation and return sentences about what was changed."""
        result = self.operate(dry_run=False, **self._how)
        return " ".join([*result.summary, *self.left(result.changed or 0)])

    def shares(self) -> list[str]:
        """Return further sentences about what would be changed."""
        return []

    def left(self, number: int) -> list[str]:
        """Return a sentence about what the request leaves, of which it changes a number."""
        return []


def declare(
    name: str,
    label: Any,
    operation: Callable[..., Result],
    base: type[AdminOperation] = AdminOperation,
    **attributes: Any,
) -> None:
    """Declare an operation that needs no code of its own."""
    type(name, (base,), {"name": name, "label": label, "operation": staticmethod(operation), **attributes})


class RowsOperation(AdminOperation):
    """An operation on selected rows, of any topics."""

    form = ReasonForm
    counted: ClassVar[Any]
    """The text for a number of rows."""
    topics_of: ClassVar[Callable[..., Collection[str]]]
    """Returns the topics of those rows of a database that still exist: others are not changed."""

    @classmethod
    def topics(cls, form: Any) -> Collection[str] | None:
        rows = form.cleaned_data.get("row")
        return (cls.topics_of(form.using, rows) or None) if rows else None

    def subject(self) -> str:
        return str(self.counted % {"number": len(self.values["row"])})


class LimitedOperation(AdminOperation):
    """An operation on what matches a page. One request changes only the oldest ``most`` rows."""

    bounds: ClassVar[Bounds] = PAGES
    """Those of the page."""
    rest: ClassVar[Any] = gettext_lazy(
        "One request changes the oldest %(most)s. Remaining: %(left)s. Repeat the operation for these."
    )
    """The text about the rows that a request leaves."""

    @property
    def most(self) -> int:
        """The maximum number of rows that this request changes."""
        return IdsField.most

    @functools.cached_property
    def matches(self) -> tuple[Sequence[int], bool]:
        """The rows that match, oldest first, and whether there are no others."""
        raise NotImplementedError

    @property
    def chosen(self) -> Sequence[int]:
        """The rows that this request changes."""
        return self.matches[0][: self.most]

    def left(self, number: int) -> list[str]:
        rows, whole = self.matches
        left = max(0, len(rows) - self.most)
        if not left and whole:
            return []
        text = self.number_text(left)
        if not whole:
            text = _("%(number)s or more") % {"number": text} if left else _("possibly more")
        return [str(self.rest % {"most": f"{self.most:,}", "left": text, "command": self.command_line()})]

    @staticmethod
    def number_text(number: int) -> str:
        """Return the text for a number of rows."""
        return f"{number:,}"

    def command_line(self) -> str:
        """Return the shell command that does the same to all matches; empty if there is none."""
        return ""


def respond(dashboard: DashboardContext, request: HttpRequest, operation: type[AdminOperation]) -> HttpResponse:
    """Return the confirmation page, or on a confirmed POST run the operation, if it was previewed, and redirect."""
    posted = request.method == "POST"
    given = (request.POST if posted else request.GET).copy()
    for name, field in operation.form.base_fields.items():
        if name not in given and field.initial is not None and "asked" not in given:
            given[name] = str(field.initial)
    try:
        using = operation.database(dashboard, request, given)
    except BadQuery as error:
        return _page(dashboard, request, operation, str(error), error.status)
    dashboard = dashboard.on(using)
    confirmed = posted and "confirmed" in given
    sentences: list[str] = []
    diff: list[DiffLine] = []
    digest = subject = ""
    one, runs, lacks_reason, status = None, False, False, 403
    # All that is read and done here uses one connection. The admin's log below is written with the request's own.
    with bounded(using, read=LOCK_SECONDS if confirmed else READ_SECONDS):
        try:
            with _errors_as_refusals(using):
                form = operation.form(given, using=using)
                is_valid = form.is_valid()
                try:
                    refusal = operation.check_permissions(request, form)
                except ImproperlyConfigured as error:
                    refusal, status = str(error), 500
        except QueueError as error:
            return _page(dashboard, request, operation, text_of(request, error), 503)
        if not refusal:
            status = 200
        if not refusal and is_valid:
            digest = _digest(form.cleaned_data, dashboard.database)
            actor = shortened(request.user.get_username(), most=KEY_LENGTH)
            one = operation(form, actor, ErrorTexts(request))
            subject = one.subject()
            lacks_reason = confirmed and operation.needs_reason and not form.cleaned_data["reason"]
            runs = confirmed and given.get("previewed") == digest and not lacks_reason
            try:
                with _errors_as_refusals(using):
                    sentences = [one.run()] if runs else one.preview()
                    diff = [] if runs else one.diff()
            except QueueError as error:
                refusal = text_of(request, error)
    if one is not None and runs:
        shared.clear()
        return _finish(dashboard, request, one, refusal or sentences[0], is_done=not refusal)
    hidden_errors = [text for field in form.hidden_fields() for text in field.errors]
    if "asked" not in given:
        # The form is shown for the first time: fields without a value are not wrong yet.
        form.errors.clear()
    return _page(
        dashboard,
        request,
        operation,
        refusal,
        status,
        subject=subject,
        form=form,
        has_choices=any(not field.is_hidden and field.name not in RECORDED for field in form),
        lacks_reason=lacks_reason,
        hidden_errors=hidden_errors,
        sentences=sentences,
        changed=confirmed and not lacks_reason and bool(sentences),
        diff=diff,
        previewed=digest,
    )


def _page(
    dashboard: DashboardContext,
    request: HttpRequest,
    operation: type[AdminOperation],
    refusal: str,
    status: int,
    **context: Any,
) -> HttpResponse:
    """Return the page of an operation; without a form if the request or the database is to blame."""
    context |= {"title": str(operation.label), "operation": operation, "refusal": refusal}
    return dashboard.response(request, "confirm.html", {**context, "back": _way_back(dashboard, request)}, status)


def _finish(
    dashboard: DashboardContext, request: HttpRequest, operation: AdminOperation, text: str, *, is_done: bool
) -> HttpResponse:
    """Log what an operation has done, or why it has not, and return the redirect to the page that shows this."""
    text = visible(text)
    LogEntry.objects.create(
        user_id=request.user.pk or 0,
        content_type=ContentType.objects.get_for_model(Dashboard, for_concrete_model=False),
        object_repr=visible(dashboard.titled(operation.subject()))[:200],
        action_flag=CHANGE,
        # Of an operation that is not done, a part may be: the audit log counts how much.
        change_message=text if is_done else f"{operation.label}: {text}",
    )
    (messages.success if is_done else messages.error)(request, text)
    is_gone = is_done and operation.removes
    return HttpResponseRedirect(dashboard.url("changelist") if is_gone else _way_back(dashboard, request))


@contextlib.contextmanager
def _errors_as_refusals(using: str) -> Iterator[None]:
    """Turn the error of a database that refuses or does not answer into a refusal."""
    try:
        yield
    except Error as error:
        if failures.kind_of(using, error) is None:
            raise
        raise QueueError(failures.explain(using, error)) from error


def _digest(values: dict[str, Any], database: str) -> str:
    """Return a digest of the form's values, to check that the confirmed values are the previewed ones."""
    shown = {name: value for name, value in values.items() if name not in RECORDED}
    if database:
        shown["database"] = database
    return hashlib.sha256(json.dumps(shown, sort_keys=True, default=str).encode()).hexdigest()


def _way_back(dashboard: DashboardContext, request: HttpRequest) -> str:
    wanted = (request.POST if request.method == "POST" else request.GET).get("next", "")
    if url_has_allowed_host_and_scheme(wanted, {request.get_host()}, require_https=request.is_secure()):
        return wanted
    return dashboard.url("changelist")

"""Operations on dead letters: redrive, discard, edit."""

from __future__ import annotations

import contextlib
import functools
import shlex
from collections.abc import Collection, Sequence
from typing import Any, ClassVar

from django import forms
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext

from django_mysqlqueue import operations
from django_mysqlqueue.admin.contents import EDITED_CHARACTERS, editable
from django_mysqlqueue.admin.diffs import DiffLine, unified
from django_mysqlqueue.admin.formatting import json_lines, moment
from django_mysqlqueue.admin.operations.base import (
    AdminOperation,
    IdsField,
    LimitedOperation,
    ReasonForm,
    code_field,
    declare,
)
from django_mysqlqueue.exceptions import InvalidMessage, OperationRefused
from django_mysqlqueue.inspection import dead_letters, error_kinds
from django_mysqlqueue.inspection.dead_letters import DeadLetterMatches
from django_mysqlqueue.operations import redriving
from django_mysqlqueue.operations.results import Result
from django_mysqlqueue.options import job_queues
from django_mysqlqueue.options.topics import first_topic
from django_mysqlqueue.permissions import OPERATE, SEE_PAYLOADS, VIEW
from django_mysqlqueue.service import messages
from django_mysqlqueue.service.databases import queue_aliases
from django_mysqlqueue.service.dead_letters import DeadLetterFilter
from django_mysqlqueue.sql.session import Session

SECONDS = 10
"""Approximate maximum duration of a request with a rate, in seconds."""
FOREVER = 2**62
"""Largest valid time, in epoch milliseconds."""


SELECTED = {"topic": forms.CharField(widget=forms.HiddenInput), "row": IdsField()}


class MatchingForm(ReasonForm):
    """The form with a page's filter."""

    topic = forms.CharField(widget=forms.HiddenInput)
    group = forms.CharField(widget=forms.HiddenInput, required=False)
    key = forms.CharField(label=gettext_lazy("Key"), widget=forms.HiddenInput, required=False, strip=False)
    task = forms.CharField(widget=forms.HiddenInput, required=False)
    error = forms.CharField(widget=forms.HiddenInput, required=False, strip=False)
    kind = forms.CharField(widget=forms.HiddenInput, required=False, strip=False)
    """A masked error of the page."""
    since = forms.IntegerField(widget=forms.HiddenInput, required=False, min_value=0, max_value=FOREVER)
    until = forms.IntegerField(widget=forms.HiddenInput, required=False, min_value=0, max_value=FOREVER)
    upto = forms.IntegerField(widget=forms.HiddenInput, min_value=1)
    """Offset of the newest dead letter on the page: newer ones are not changed."""


class DeadLettersOperation(LimitedOperation):
    """Base class of operations on a selection of dead letters, with the same limits as the page."""

    form: ClassVar[type[ReasonForm]] = MatchingForm
    command: ClassVar[str]
    """Management command that does the same without limits."""
    options: ClassVar[Sequence[str]] = ()
    """Its further options, which the form has, too."""

    def subject(self) -> str:
        wanted = self.selection()
        parts = [wanted.topic]
        for text, value in (
            (_("group %(value)s"), wanted.group),
            (_("task %(value)s") if self.is_of_jobs else _("key %(value)s"), wanted.key),
            (_("error contains “%(value)s”"), wanted.error),
            (_("error “%(value)s”"), self.values.get("kind")),
            (_("since %(value)s"), moment(wanted.since)),
            (_("until %(value)s"), moment(wanted.until)),
        ):
            if value:
                parts.append(text % {"value": value})
        return ", ".join(parts)

    def selection(self) -> DeadLetterFilter:
        """Return the filter of the form, or its selected rows."""
        values = self.values
        if "row" in values:
            return DeadLetterFilter(values["topic"], offsets=tuple(values["row"]))
        return DeadLetterFilter(
            values["topic"],
            group=values["group"] or None,
            error=values["error"] or None,
            since=values["since"],
            until=values["until"],
            key=values["key"] or values["task"] or None,
            upto=values["upto"],
        )

    @property
    def is_of_jobs(self) -> bool:
        """True if they are dead letters of jobs, whose key is their task."""
        return job_queues.is_queue(first_topic(self.values["topic"]))

    @functools.cached_property
    def found(self) -> DeadLetterMatches:
        """The dead letters that match."""
        session = Session(self.using)
        found = dead_letters.look(session, self.selection(), bounds=self.bounds)
        if kind := self.values.get("kind"):
            found = error_kinds.of_kind(session, found, kind, shown=self.errors.line, bounds=self.bounds)
        if not found.offsets:
            raise OperationRefused(_("There are no such dead letters."))
        return found

    @functools.cached_property
    def matches(self) -> tuple[Sequence[int], bool]:
        return self.found.offsets[::-1], self.found.whole

    def arguments(self) -> dict[str, Any]:
        return {"found": self.selection()._replace(offsets=tuple(self.chosen)), "kind": self.values.get("kind") or None}

    @property
    def rest(self) -> Any:
        """The text about the dead letters that a request leaves. No command takes a masked error."""
        if self.values.get("kind"):
            return super().rest
        return _(
            "One request changes the oldest %(most)s. Remaining: %(left)s. To change all of them, run: %(command)s"
        )

    @staticmethod
    def number_text(number: int) -> str:
        return ngettext("%(number)s dead letter", "%(number)s dead letters", number) % {"number": f"{number:,}"}

    def shares(self) -> list[str]:
        """Return the number per group, if there are several groups and this request changes all matches."""
        if len(self.found.refs) < 2 or len(self.found.offsets) > self.most:
            return []
        return [_("%(ref)s: %(number)s.") % {"ref": ref, "number": f"{n:,}"} for ref, n in self.found.refs.items()]

    def command_line(self) -> str:
        """Return the shell command that does the same to all matches."""
        wanted = self.selection()
        parts = ["manage.py", self.command, wanted.topic]
        for name, value in (
            ("group", wanted.group),
            ("task" if self.is_of_jobs else "key", wanted.key),
            ("error", wanted.error),
            ("since", _iso(wanted.since)),
            ("until", _iso(wanted.until)),
            ("database", self.using if len(queue_aliases()) > 1 else None),
            *((name, self.values.get(name)) for name in self.options),
        ):
            if value is not None:
                parts += [f"--{name}={value}"] if str(value).startswith("-") else [f"--{name}", str(value)]
        return shlex.join(parts)


def _iso(milliseconds: int | None) -> str | None:
    return None if milliseconds is None else moment(milliseconds).replace(" ", "T")


class Redrive(DeadLettersOperation):
    """Redrive all dead letters that match a filter."""

    name = "redrive"
    label = gettext_lazy("Redrive all matching dead letters")
    command = "queueredrive"
    options = ("rate",)
    operation = staticmethod(redriving.redrive_found)
    fields: ClassVar = {
        "rate": forms.FloatField(
            label=gettext_lazy("Maximum number of messages per second"),
            required=False,
            min_value=0.1,
            help_text=gettext_lazy("Leave empty for no limit."),
        )
    }

    @property
    def most(self) -> int:
        rate = self.values.get("rate")
        return super().most if rate is None else max(1, min(super().most, int(rate * SECONDS)))

    def arguments(self) -> dict[str, Any]:
        return {**super().arguments(), "rate": self.values.get("rate")}

    def preview(self) -> list[str]:
        said = super().preview()
        if rate := self.values.get("rate"):
            said.append(_("This takes about %(seconds)s seconds.") % {"seconds": round(len(self.chosen) / rate)})
        return said


declare(
    "redrive-selected",
    gettext_lazy("Redrive selected dead letters"),
    redriving.redrive_found,
    base=Redrive,
    form=ReasonForm,
    fields=SELECTED,
)


class Discard(DeadLettersOperation):
    """Discard all dead letters that match a filter."""

    name = "discard"
    label = gettext_lazy("Discard all matching dead letters")
    dangerous = True
    needs_reason = True
    command = "queuediscard"
    options = ("reason",)
    operation = staticmethod(redriving.discard_found)


declare(
    "discard-selected",
    gettext_lazy("Discard selected dead letters"),
    redriving.discard_found,
    base=Discard,
    form=ReasonForm,
    fields=SELECTED,
)


class EditForm(ReasonForm):
    """The form of an edit. It starts with the stored payload."""

    offset = forms.IntegerField(widget=forms.HiddenInput, min_value=1)
    payload = code_field(
        gettext_lazy("Payload"), rows=24, css="mq-edit", required=True, strip=False, max_length=EDITED_CHARACTERS
    )

    def __init__(self, data: Any, *, using: str) -> None:
        super().__init__(data, using=using)
        offset = str(data.get("offset", ""))
        self.dead_letter = (
            dead_letters.one(Session(using), int(offset)) if offset.isdecimal() and len(offset) < 19 else None
        )
        self.editable = None if self.dead_letter is None else editable(self.dead_letter)
        if self.editable is None or self.editable.refusal:
            del self.fields["payload"]
        elif "payload" not in data:
            data["payload"] = self.editable.text

    def clean(self) -> dict[str, Any]:
        values = super().clean() or self.cleaned_data
        if self.dead_letter is None:
            self.add_error("offset", _("There is no dead letter at this offset."))
        elif self.editable is not None and self.editable.refusal:
            self.add_error("offset", self.editable.refusal)
        return values

    def clean_payload(self) -> str:
        text = str(self.cleaned_data["payload"])
        stored, edited = self.dead_letter, self.editable
        assert stored is not None and edited is not None  # noqa: S101, PT018  # otherwise there is no such field
        try:
            body, _kept = messages.encode_body(edited.parse(text), stored.metadata)
        except (ValueError, InvalidMessage) as error:
            raise forms.ValidationError(str(error)) from error
        with contextlib.suppress(ValueError, InvalidMessage):  # What is stored might be refused today.
            if body == messages.encode_body(edited.parse(edited.text), stored.metadata)[0]:
                text = _("The payload is unchanged. Edit it, or redrive the dead letter unchanged.")
                raise forms.ValidationError(text)
        return text


class Edit(AdminOperation):
    """Edit the payload of a dead letter and redrive it."""

    name = "edit"
    label = gettext_lazy("Edit and redrive")
    form = EditForm
    permissions = (VIEW, OPERATE, SEE_PAYLOADS)

    @classmethod
    def topics(cls, form: Any) -> Collection[str] | None:
        return None if form.dead_letter is None else [form.dead_letter.topic]

    def subject(self) -> str:
        return _("dead letter %(offset)s") % {"offset": self.values["offset"]}

    def diff(self) -> list[DiffLine]:
        stored, text = self.bound.editable, self.values["payload"]
        value = stored.parse(text)
        # With the line endings, and for JSON the indentation, of the stored one.
        lines = None if isinstance(value, bytes) else json_lines(value, most=EDITED_CHARACTERS)
        return unified(stored.text, text.replace("\r\n", "\n") if lines is None else lines)

    def operate(self, **how: Any) -> Result:
        payload = self.bound.editable.parse(self.values["payload"])
        return operations.edit(self.bound.dead_letter.topic, payload, offset=self.values["offset"], **how)

"""What is done to dead letters: redrive, discard, edit."""

from __future__ import annotations

import functools
import shlex
from typing import Any, ClassVar

from django import forms
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext

from django_mysqlqueue import operations
from django_mysqlqueue.admin.contents import EDITED_CHARACTERS, Editable, editable
from django_mysqlqueue.admin.formatting import moment
from django_mysqlqueue.admin.operations.base import AdminOperation, IdsField, ReasonForm
from django_mysqlqueue.exceptions import InvalidMessage, OperationRefused
from django_mysqlqueue.inspection import dead_letters
from django_mysqlqueue.inspection.bounds import PAGES, Bounds
from django_mysqlqueue.inspection.dead_letters import DeadLetter, DeadLetterMatches
from django_mysqlqueue.operations.results import Result
from django_mysqlqueue.service import messages
from django_mysqlqueue.service.dead_letters import DeadLetterFilter
from django_mysqlqueue.service.publishing import queue_alias
from django_mysqlqueue.sql.session import Session

AT_ONCE = IdsField.most
"""So many dead letters are changed by one request at most."""
SECONDS = 10
"""With a rate, a request lasts no longer than about that."""
FOREVER = 2**62
"""No column of times takes more."""


def letters_said(number: int) -> str:
    """``1 dead letter``, ``12 dead letters``."""
    return ngettext("%(number)s dead letter", "%(number)s dead letters", number) % {"number": f"{number:,}"}


class SelectedForm(ReasonForm):
    """Dead letters that were ticked."""

    topic = forms.CharField(widget=forms.HiddenInput)
    row = IdsField()


class MatchingForm(ReasonForm):
    """Dead letters that a page's filter admits."""

    topic = forms.CharField(widget=forms.HiddenInput)
    group = forms.CharField(widget=forms.HiddenInput, required=False)
    error = forms.CharField(widget=forms.HiddenInput, required=False, strip=False)
    since = forms.IntegerField(widget=forms.HiddenInput, required=False, min_value=0, max_value=FOREVER)
    until = forms.IntegerField(widget=forms.HiddenInput, required=False, min_value=0, max_value=FOREVER)
    upto = forms.IntegerField(widget=forms.HiddenInput, min_value=1)
    """The newest one that was shown: what has failed since stays."""


class DeadLettersOperation(AdminOperation):
    """On a selection of dead letters; it looks at no more of them than the page did."""

    command: ClassVar[str]
    """Of ``manage.py``, which does it without a bound."""
    bounds: ClassVar[Bounds] = PAGES

    def subject(self) -> str:
        """The DLQ topic, and the filter if there is one."""
        wanted = self.letters()
        parts = [wanted.topic]
        for text, value in (
            (_("group %(value)s"), wanted.group),
            (_("error with “%(value)s”"), wanted.error),
            (_("since %(value)s"), moment(wanted.since)),
            (_("until %(value)s"), moment(wanted.until)),
        ):
            if value:
                parts.append(text % {"value": value})
        return ", ".join(parts)

    def letters(self) -> DeadLetterFilter:
        values = self.values
        if "row" in values:
            return DeadLetterFilter(values["topic"], offsets=tuple(values["row"]))
        return DeadLetterFilter(
            values["topic"],
            group=values["group"] or None,
            error=values["error"] or None,
            since=values["since"],
            until=values["until"],
        )

    @functools.cached_property
    def found(self) -> DeadLetterMatches:
        """The dead letters that match.

        Raises:
            OperationRefused: nothing matches.
        """
        found = dead_letters.look(
            Session(self.using), self.letters(), newest=self.values.get("upto"), bounds=self.bounds
        )
        if not found.offsets:
            raise OperationRefused(_("There is no such dead letter (any more)."))
        return found

    def most(self) -> int:
        """How many this request may change."""
        return AT_ONCE

    def chosen(self) -> tuple[int, ...]:
        """The oldest of those found, by name: this request touches no others."""
        return self.found.offsets[::-1][: self.most()]

    def preview(self) -> list[str]:
        return [*super().preview(), *self.shares(), *self.left()]

    def run(self) -> str:
        return " ".join([super().run(), *self.left()])

    def left(self) -> list[str]:
        """A sentence on those that this request leaves, if any."""
        left = max(0, len(self.found.offsets) - self.most())
        if not left and self.found.whole:
            return []
        number = letters_said(left)
        if not self.found.whole:
            number = _("%(letters)s, or more") % {"letters": number} if left else _("maybe more")
        return [
            _("One request takes the oldest %(most)s; left: %(left)s. All at once: %(command)s")
            % {"most": f"{self.most():,}", "left": number, "command": self.command_line()}
        ]

    def shares(self) -> list[str]:
        """How many of each group, where there are several and this request takes them all."""
        if len(self.found.refs) < 2 or len(self.found.offsets) > self.most():
            return []
        return [_("Of %(ref)s: %(number)s.") % {"ref": ref, "number": f"{n:,}"} for ref, n in self.found.refs.items()]

    def command_line(self) -> str:
        """What does the same to all of them at a shell."""
        wanted = self.letters()
        words = ["manage.py", self.command, wanted.topic]
        for name, value in (
            ("group", wanted.group),
            ("error", wanted.error),
            ("since", _iso(wanted.since)),
            ("until", _iso(wanted.until)),
            *self.options(),
        ):
            if value is not None:
                words += [f"--{name}", str(value)]
        return shlex.join(words)

    def options(self) -> list[tuple[str, object]]:
        """Further options of the command."""
        return []


def _iso(milliseconds: int | None) -> str | None:
    return None if milliseconds is None else moment(milliseconds).replace(" ", "T")


class RedriveForm(MatchingForm):
    rate = forms.FloatField(
        label=gettext_lazy("Maximum number per second"),
        required=False,
        min_value=0.1,
        help_text=gettext_lazy("Empty: no limit."),
    )


class Redrive(DeadLettersOperation):
    name = "redrive"
    label = gettext_lazy("Redrive: all that match")
    form: ClassVar[type[forms.Form]] = RedriveForm
    command = "queueredrive"

    def rate(self) -> float | None:
        rate: float | None = self.values.get("rate")
        return rate

    def most(self) -> int:
        rate = self.rate()
        return AT_ONCE if rate is None else max(1, min(AT_ONCE, int(rate * SECONDS)))

    def options(self) -> list[tuple[str, object]]:
        return [("rate", self.rate())]

    def operate(self, **how: Any) -> Result:
        return operations.redrive(self.found.topic, offsets=self.chosen(), missing_ok=True, rate=self.rate(), **how)

    def preview(self) -> list[str]:
        rate = self.rate()
        takes = _("This takes about %(seconds)s s.")
        return [
            *super().preview(),
            *([takes % {"seconds": round(len(self.chosen()) / rate)}] if rate else []),
        ]


class RedriveSelected(Redrive):
    name = "redrive-selected"
    label = gettext_lazy("Redrive: selected dead letters")
    form = SelectedForm


REASON = forms.CharField(max_length=500, label=gettext_lazy("Reason, for the audit log"))
"""Required: what is deleted has no other trace."""


class DiscardForm(MatchingForm):
    reason = REASON


class Discard(DeadLettersOperation):
    name = "discard"
    label = gettext_lazy("Discard: all that match")
    dangerous = True
    form: ClassVar[type[forms.Form]] = DiscardForm
    command = "queuediscard"

    def options(self) -> list[tuple[str, object]]:
        return [("reason", self.values["reason"])]

    def operate(self, **how: Any) -> Result:
        return operations.discard(self.found.topic, offsets=self.chosen(), missing_ok=True, **how)


class DiscardSelectedForm(SelectedForm):
    reason = REASON


class DiscardSelected(Discard):
    name = "discard-selected"
    label = gettext_lazy("Discard: selected dead letters")
    form = DiscardSelectedForm


class EditForm(ReasonForm):
    """A dead letter's payload; without one in ``data`` it begins as it is stored."""

    offset = forms.IntegerField(widget=forms.HiddenInput, min_value=1)
    payload = forms.CharField(
        label=gettext_lazy("Payload"),
        strip=False,
        max_length=EDITED_CHARACTERS,
        widget=forms.Textarea(attrs={"rows": 24, "spellcheck": "false", "class": "mq-edit"}),
    )

    def __init__(self, data: Any) -> None:
        super().__init__(data)
        offset = str(data.get("offset", ""))
        self.letter = (
            dead_letters.one(Session(queue_alias()), int(offset)) if offset.isdecimal() and len(offset) < 19 else None
        )
        self.editable = None if self.letter is None else editable(self.letter)
        if self.editable is None or self.editable.refusal:
            del self.fields["payload"]
        elif "payload" not in data:
            data["payload"] = self.editable.text

    def clean(self) -> dict[str, Any]:
        values = super().clean() or self.cleaned_data
        if self.letter is None:
            self.add_error("offset", _("There is no dead letter at this offset (any more)."))
        elif self.editable is not None and self.editable.refusal:
            self.add_error("offset", self.editable.refusal)
        return values

    def clean_payload(self) -> str:
        text = str(self.cleaned_data["payload"])
        letter, edited = self.letter, self.editable
        assert letter is not None and edited is not None  # noqa: S101, PT018  # else the field is not there
        try:
            body, _kept = messages.encode_body(edited.parse(text), letter.metadata)
            same = body == _encoded(edited, letter)
        except (ValueError, InvalidMessage) as error:
            raise forms.ValidationError(str(error)) from error
        if same:
            raise forms.ValidationError(_("This is what failed: change it, or redrive the letter as it is."))
        return text


def _encoded(edited: Editable, letter: DeadLetter) -> bytes | None:
    """A payload as it would be stored if nothing was changed; None: it would be refused."""
    try:
        return messages.encode_body(edited.parse(edited.text), letter.metadata)[0]
    except (ValueError, InvalidMessage):
        return None


class Edit(AdminOperation):
    name = "edit"
    label = gettext_lazy("Edit and redrive")
    form = EditForm
    shows_payloads = True

    def subject(self) -> str:
        return _("dead letter %(offset)s") % {"offset": self.values["offset"]}

    def operate(self, **how: Any) -> Result:
        offset = self.values["offset"]
        found = dead_letters.one(Session(self.using), offset)
        if found is None:
            raise OperationRefused(_("There is no dead letter at this offset (any more)."))
        payload = editable(found).parse(self.values["payload"])
        return operations.edit(found.topic, payload, offset=offset, **how)

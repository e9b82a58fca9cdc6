"""Operations on the retrying messages of a group that have the same error, apart from numbers, ids and addresses."""

from __future__ import annotations

import functools
from typing import Any, ClassVar

from django import forms
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from django_mysqlqueue import operations
from django_mysqlqueue.admin.operations.base import AdminOperation, GroupForm, IdsField
from django_mysqlqueue.admin.operations.groups import RetryForm
from django_mysqlqueue.exceptions import OperationRefused
from django_mysqlqueue.inspection import error_kinds
from django_mysqlqueue.inspection.bounds import PAGES, Bounds
from django_mysqlqueue.operations.dead_lettering import MOST
from django_mysqlqueue.operations.results import Result
from django_mysqlqueue.sql.session import Session


def _kind_field() -> forms.CharField:
    """Return the field with the masked error."""
    return forms.CharField(widget=forms.HiddenInput, strip=False)


def _upto_field() -> forms.IntegerField:
    """Return the field with the offset of the newest message on the page: newer ones are not changed."""
    return forms.IntegerField(widget=forms.HiddenInput, min_value=1)


class RetryErrorForm(RetryForm):
    """The form of a retry of messages with an error."""

    kind = _kind_field()
    upto = _upto_field()


class ErrorOperation(AdminOperation):
    """Base class of operations on retrying messages with an error. They read the same messages as the page."""

    bounds: ClassVar[Bounds] = PAGES
    most: ClassVar[int]
    """Maximum number of messages that one request changes."""

    def subject(self) -> str:
        """Return the group and the error."""
        return _("%(ref)s, error “%(value)s”") % {"ref": self.ref, "value": self.values["kind"]}

    @functools.cached_property
    def found(self) -> tuple[list[int], bool]:
        """The offsets of the messages, oldest first, and whether there are no others.

        Raises:
            OperationRefused: no message has the error.
        """
        offsets, whole = error_kinds.retrying_of_kind(
            Session(self.using), self.ref, self.values["kind"], shown=self.errors.line, bounds=self.bounds
        )
        offsets = [offset for offset in offsets if offset <= self.values["upto"]]
        if not offsets:
            raise OperationRefused(_("No retrying message has this error."))
        return offsets, whole

    @property
    def chosen(self) -> list[int]:
        """The offsets of the messages that this request changes."""
        return self.found[0][: self.most]

    def preview(self) -> list[str]:
        return [*super().preview(), *self.left()]

    def run(self) -> str:
        return " ".join([super().run(), *self.left()])

    def left(self) -> list[str]:
        """Return a sentence about the messages that this request leaves, if any."""
        offsets, whole = self.found
        left = max(0, len(offsets) - self.most)
        if not left and whole:
            return []
        number = f"{left:,}"
        if not whole:
            number = _("%(number)s or more") % {"number": number} if left else _("possibly more")
        text = _("One request changes the oldest %(most)s. Remaining: %(left)s. Repeat the operation for these.")
        return [text % {"most": f"{self.most:,}", "left": number}]


class RetryError(ErrorOperation):
    """Retry the messages with an error now."""

    name = "retry-error"
    label = gettext_lazy("Retry messages with this error now")
    form = RetryErrorForm
    most = IdsField.most

    def operate(self, **how: Any) -> Result:
        # Some may have come due since the page was shown.
        reset = self.values["reset_attempts"]
        return operations.retry(*self.ref, offsets=self.chosen, missing_ok=True, reset_attempts=reset, **how)


class DeadLetterErrorForm(GroupForm):
    """The form of dead-lettering messages with an error."""

    kind = _kind_field()
    upto = _upto_field()


class DeadLetterError(ErrorOperation):
    """Dead-letter the messages with an error."""

    name = "dead-letter-error"
    label = gettext_lazy("Dead-letter messages with this error now")
    form = DeadLetterErrorForm
    most = MOST

    def operate(self, **how: Any) -> Result:
        # Some may have been claimed since they were read.
        return operations.dead_letter(*self.ref, offsets=self.chosen, missing_ok=True, **how)

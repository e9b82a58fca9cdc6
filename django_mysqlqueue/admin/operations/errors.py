"""Operations on the retrying messages of a group that have the same error, apart from numbers, ids and addresses."""

from __future__ import annotations

import functools
from typing import Any, ClassVar

from django import forms
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from django_mysqlqueue.admin.operations.base import IdsField, LimitedOperation
from django_mysqlqueue.admin.operations.groups import RESET_ATTEMPTS
from django_mysqlqueue.exceptions import OperationRefused
from django_mysqlqueue.inspection import error_kinds
from django_mysqlqueue.inspection.bounds import PAGES, Bounds
from django_mysqlqueue.operations import dead_lettering, retrying
from django_mysqlqueue.operations.dead_lettering import MOST
from django_mysqlqueue.sql.session import Session


class ErrorOperation(LimitedOperation):
    """Base class of operations on retrying messages with an error. They read the same messages as the page."""

    fields: ClassVar = {
        # A masked error of the page.
        "kind": forms.CharField(widget=forms.HiddenInput, strip=False),
        # Offset of the newest message on the page: newer ones are not changed.
        "upto": forms.IntegerField(widget=forms.HiddenInput, min_value=1),
    }
    bounds: ClassVar[Bounds] = PAGES
    moved: ClassVar[bool]
    """Whether it changes jobs that wait for long, in the outbox."""

    def subject(self) -> str:
        """Return the group and the error."""
        return _("%(ref)s, error “%(value)s”") % {"ref": self.ref, "value": self.values["kind"]}

    def matches(self) -> tuple[list[int], bool]:
        return self._found

    @functools.cached_property
    def _found(self) -> tuple[list[int], bool]:
        offsets, whole = error_kinds.retrying_of_kind(
            Session(self.using),
            self.ref,
            self.values["kind"],
            shown=self.errors.line,
            moved=self.moved,
            bounds=self.bounds,
        )
        offsets = [offset for offset in offsets if offset <= self.values["upto"]]
        if not offsets:
            raise OperationRefused(_("No retrying message has this error."))
        return offsets, whole

    def arguments(self) -> dict[str, Any]:
        given = super().arguments()
        del given["upto"]
        return {**given, "offsets": self.chosen}


class RetryError(ErrorOperation):
    """Retry the messages with an error now."""

    name = "retry-error"
    label = gettext_lazy("Retry messages with this error now")
    operation = staticmethod(retrying.retry_found)
    fields: ClassVar = {"reset_attempts": RESET_ATTEMPTS}
    moved = True
    most = IdsField.most


class DeadLetterError(ErrorOperation):
    """Dead-letter the messages with an error."""

    name = "dead-letter-error"
    label = gettext_lazy("Dead-letter messages with this error now")
    operation = staticmethod(dead_lettering.dead_letter_found)
    moved = False
    most = MOST

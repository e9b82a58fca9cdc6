"""Operations on the retrying messages of a group that have the same error, apart from numbers, ids and addresses."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, ClassVar

from django import forms
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from django_mysqlqueue.admin.operations.base import LimitedOperation, declare
from django_mysqlqueue.admin.operations.groups import RESET_ATTEMPTS
from django_mysqlqueue.exceptions import OperationRefused
from django_mysqlqueue.inspection import error_kinds
from django_mysqlqueue.operations import dead_lettering, retrying
from django_mysqlqueue.sql.session import Session


class ErrorOperation(LimitedOperation):
    """Base class of operations on retrying messages with an error. They read the same messages as the page."""

    fields: ClassVar = {
        # A masked error of the page.
        "kind": forms.CharField(widget=forms.HiddenInput, strip=False),
        # Offset of the newest message on the page: newer ones are not changed.
        "upto": forms.IntegerField(widget=forms.HiddenInput, min_value=1),
    }
    moved: ClassVar[bool]
    """Whether it changes jobs that wait for long, in the outbox."""

    def subject(self) -> str:
        return _("%(ref)s, error “%(value)s”") % {"ref": self.ref, "value": self.values["kind"]}

    @functools.cached_property
    def matches(self) -> tuple[Sequence[int], bool]:
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


declare(
    "retry-error",
    gettext_lazy("Retry messages with this error now"),
    retrying.retry_found,
    base=ErrorOperation,
    fields={"reset_attempts": RESET_ATTEMPTS},
    moved=True,
)
declare(
    "dead-letter-error",
    gettext_lazy("Dead-letter messages with this error now"),
    dead_lettering.dead_letter_found,
    base=ErrorOperation,
    moved=False,
    most=dead_lettering.MOST,
)

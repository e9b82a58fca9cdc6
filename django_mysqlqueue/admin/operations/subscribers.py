"""Operations on subscribers and their leases."""

from __future__ import annotations

from typing import Any

from django import forms
from django.utils.translation import gettext_lazy

from django_mysqlqueue import operations
from django_mysqlqueue.admin.operations.base import AdminOperation, GroupForm, ReasonForm, RowsField
from django_mysqlqueue.operations.results import Result


class LeasesForm(GroupForm):
    """The form with selected partitions."""

    row = RowsField(str)


class ReleaseLeases(AdminOperation):
    """Release the leases of selected partitions."""

    name = "release"
    label = gettext_lazy("Release leases")
    form = LeasesForm

    def operate(self, **how: Any) -> Result:
        return operations.release(*self.ref, self.values["row"], **how)


class SubscriberForm(ReasonForm):
    """The form with a subscriber."""

    subscriber = forms.CharField(widget=forms.HiddenInput)


class ForgetSubscriber(AdminOperation):
    """Forget a lost subscriber."""

    name = "forget"
    label = gettext_lazy("Forget a lost subscriber")
    form = SubscriberForm

    @classmethod
    def topics(cls, form: Any) -> None:
        return None  # a subscriber may work for several topics

    def subject(self) -> str:
        return str(self.values["subscriber"])

    def operate(self, **how: Any) -> Result:
        return operations.forget(self.subject(), **how)

"""What is done to subscribers and their leases."""

from __future__ import annotations

from django import forms
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext

from django_mysqlqueue.admin.operations.base import AdminOperation, GroupForm, RowsField
from django_mysqlqueue.service import heartbeats, leasing


class LeasesForm(GroupForm):
    row = RowsField(str)


class ReleaseLeases(AdminOperation):
    name = "release"
    label = gettext_lazy("Release leases")
    form = LeasesForm

    def preview(self) -> list[str]:
        number = len(self.values["row"])
        return [
            ngettext(
                "%(number)s partition of %(ref)s loses its owner; another subscriber takes it within seconds.",
                "%(number)s partitions of %(ref)s lose their owners; other subscribers take them within seconds.",
                number,
            )
            % {"number": number, "ref": self.ref},
            _("What the owners hold of them comes again, if they had not finished it."),
        ]

    def run(self) -> str:
        done = leasing.revoke(self.using, self.ref, self.values["row"], by=self.by)
        return ngettext("%(number)s lease was released.", "%(number)s leases were released.", done) % {"number": done}


class SubscriberForm(forms.Form):
    subscriber = forms.CharField(widget=forms.HiddenInput)


class ForgetSubscriber(AdminOperation):
    name = "forget"
    label = gettext_lazy("Forget a dead subscriber")
    form = SubscriberForm

    def subject(self) -> str:
        return str(self.values["subscriber"])

    def preview(self) -> list[str]:
        return [
            _("Nobody waits for %(name)s any more: its leases are free at once.") % {"name": self.subject()},
            _("It must be dead. One that is alive is refused."),
        ]

    def run(self) -> str:
        removed = heartbeats.remove(self.using, self.subject(), by=self.by, lease_ms=self.lease_ms)
        if removed:
            return _("The subscriber %(name)s was forgotten.") % {"name": self.subject()}
        return _("The subscriber %(name)s was gone already.") % {"name": self.subject()}

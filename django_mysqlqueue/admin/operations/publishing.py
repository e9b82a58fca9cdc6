"""The form that publishes a test message."""

from __future__ import annotations

import base64
import binascii
import contextlib
from typing import Any

from django import forms
from django.http import HttpRequest, QueryDict
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from django_mysqlqueue import operations
from django_mysqlqueue.admin.contents import EDITED_CHARACTERS, parse_json
from django_mysqlqueue.admin.context import DashboardContext, choose_database
from django_mysqlqueue.admin.operations.base import AdminOperation, ReasonForm, TimeField, code_field
from django_mysqlqueue.admin.permissions import demand, may
from django_mysqlqueue.db.sizes import MAX_METADATA_BYTES
from django_mysqlqueue.names.ids import new_message_id
from django_mysqlqueue.names.keys import HIGHEST_PRIORITY, LOWEST_PRIORITY
from django_mysqlqueue.names.rules import KEY_LENGTH, NAME_LENGTH, RELAY_MARK
from django_mysqlqueue.operations.results import Result
from django_mysqlqueue.options import job_queues
from django_mysqlqueue.options.conf import get_settings
from django_mysqlqueue.options.topics import check_topic, is_dlq
from django_mysqlqueue.permissions import PUBLISH, VIEW
from django_mysqlqueue.service import log
from django_mysqlqueue.service.publishing import stored_at
from django_mysqlqueue.sql.connection import LOCK_SECONDS, READ_SECONDS, bounded
from django_mysqlqueue.sql.session import Session
from django_mysqlqueue.text.humanize import close_names, did_you_mean


class PublishForm(ReasonForm):
    """The form of a test message. It starts with a new id, so that a second request with it publishes nothing."""

    suggestions_id = "mq-topics"
    suggestions: tuple[str, ...] = ()
    """The topics that the browser suggests."""
    topic = forms.CharField(
        label=gettext_lazy("Topic"),
        max_length=NAME_LENGTH,
        widget=forms.TextInput(attrs={"list": suggestions_id, "autocomplete": "off"}),
    )
    kind = forms.ChoiceField(
        label=gettext_lazy("Format of the payload"),
        initial="json",
        choices=[
            ("json", gettext_lazy("JSON")),
            ("text", gettext_lazy("text: stored as UTF-8 bytes")),
            ("base64", gettext_lazy("Base64: stored as bytes")),
        ],
    )
    payload = code_field(gettext_lazy("Payload"), rows=10, strip=False, max_length=EDITED_CHARACTERS)
    key = forms.CharField(
        label=gettext_lazy("Key"),
        required=False,
        strip=False,
        max_length=KEY_LENGTH,
        help_text=gettext_lazy("Messages with the same key keep their order. Leave empty for no key."),
    )
    metadata = code_field(
        gettext_lazy("Metadata"),
        strip=False,
        max_length=MAX_METADATA_BYTES,
        help_text=gettext_lazy('A JSON object such as {"region": "eu"}. Filters of consumer groups read it.'),
    )
    priority = forms.IntegerField(
        label=gettext_lazy("Priority"),
        initial=0,
        min_value=LOWEST_PRIORITY,
        max_value=HIGHEST_PRIORITY,
        help_text=gettext_lazy("Higher first."),
    )
    delay = forms.FloatField(label=gettext_lazy("Delay in seconds"), required=False, min_value=0)
    deliver_at = TimeField(
        label=gettext_lazy("Deliver at"), required=False, help_text=gettext_lazy("Instead of a delay.")
    )
    expires_in = forms.FloatField(label=gettext_lazy("Expires after seconds"), required=False, min_value=0)
    expires_at = TimeField(
        label=gettext_lazy("Expires at"), required=False, help_text=gettext_lazy("Instead of a number of seconds.")
    )
    id = forms.CharField(
        label=gettext_lazy("Message id"),
        max_length=KEY_LENGTH,
        help_text=gettext_lazy("A second message with the same id, topic and partition is dropped."),
    )

    def __init__(self, data: Any, *, using: str) -> None:
        if "id" not in data:
            data["id"] = new_message_id()
        super().__init__(data, using=using)

    def clean(self) -> dict[str, Any]:
        values = super().clean() or self.cleaned_data
        if "payload" in values and "kind" in values:
            try:
                _payload(values["kind"], values["payload"])
            except ValueError as error:
                self.add_error("payload", str(error))
        if values.get("metadata", "").strip():
            try:
                if not isinstance(parse_json(values["metadata"]), dict):
                    self.add_error("metadata", _("This must be a JSON object."))
            except ValueError as error:
                self.add_error("metadata", str(error))
        return values


class Publish(AdminOperation):
    """Publish a test message."""

    name = "publish"
    label = gettext_lazy("Publish a test message")
    form = PublishForm
    operation = staticmethod(operations.publish)
    named = "topic"
    permissions = (VIEW, PUBLISH)

    @classmethod
    def database(cls, dashboard: DashboardContext, request: HttpRequest, given: QueryDict) -> str:
        """Return the alias of the topic's database, whichever page the user comes from."""
        topic = given.get("topic")
        chosen = choose_database(request, given.get("database"), topic)
        return choose_database(request, None, topic) if topic else chosen

    @classmethod
    def check_permissions(cls, request: HttpRequest, form: Any) -> str:
        """Respond with 403 unless the user may publish to a topic, and refuse the form if the topic is another one.

        The user types the topic, so the form is shown again. The refusal is the same for topics that do not exist.
        """
        topic = form.data.get("topic") or None
        form.suggestions = tuple(_topics(request, form.using))
        if may(request, topic, *cls.permissions):
            return ""
        demand(bool(form.suggestions))
        if topic is None:
            return ""
        allowed = _("You may publish to these topics: %(topics)s. Choose one of them.")
        return allowed % {"topics": ", ".join(form.suggestions)}

    def preview(self) -> list[str]:
        topic, known = self.values["topic"], self.bound.suggestions
        meant = () if topic in known else close_names(topic, known)
        return [*super().preview(), *([did_you_mean(meant)] if meant else [])]

    def arguments(self) -> dict[str, Any]:
        given, metadata = super().arguments(), self.values["metadata"]
        payload = _payload(given.pop("kind"), self.values["payload"])
        return {**given, "payload": payload, "metadata": parse_json(metadata) if metadata.strip() else None}

    def operate(self, **how: Any) -> Result:
        stored, _topic = stored_at(check_topic(self.values["topic"]), None, None)
        reads = READ_SECONDS if how["dry_run"] else LOCK_SECONDS
        with contextlib.nullcontext() if stored == self.using else bounded(stored, read=reads):
            # The topic's settings decide about the database.
            return super().operate(**{**how, "using": None})


def _topics(request: HttpRequest, using: str) -> list[str]:
    """Return the topics of a database, and those in the settings, to which the user may publish."""
    known = {*log.known(Session(using)), *get_settings().topics.names()}
    return sorted(
        topic
        for topic in known
        if not is_dlq(topic)
        and RELAY_MARK not in topic
        and not job_queues.is_queue(topic)
        and may(request, topic, *Publish.permissions)
    )


def _payload(kind: str, text: str) -> Any:
    """Return the payload that a text stands for."""
    text = text.replace("\r\n", "\n")
    if kind == "json":
        return parse_json(text)
    if kind == "text":
        return text.encode()
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise ValueError(_("Invalid Base64: %(what)s.") % {"what": error}) from None

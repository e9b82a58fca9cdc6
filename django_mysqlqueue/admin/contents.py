"""Payloads and metadata of single messages: as they are shown, and as they can be edited."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from django.utils.translation import gettext as _

from django_mysqlqueue.admin.formatting import json_lines, metadata_text, payload_text, redacted
from django_mysqlqueue.exceptions import InvalidMessage
from django_mysqlqueue.inspection.dead_letters import DeadLetter
from django_mysqlqueue.service import messages

EDITED_CHARACTERS = 250_000
"""Below what Django reads of a form, however many bytes a character takes there."""


def payload(beginning: bytes, size: int, *, topic: str) -> str:
    """What is shown of a payload of ``size`` bytes whose first ones are given."""
    return redacted(payload_text(beginning, size), topic=topic, kind="payload")


def metadata(found: Mapping[str, Any], *, topic: str) -> str:
    """What is shown of metadata; '' for none."""
    if not found:
        return ""
    return redacted(metadata_text(found), topic=topic, kind="metadata")


@dataclass(frozen=True, slots=True)
class Editable:
    """A dead letter's payload as a person can edit it."""

    text: str = ""
    refusal: str = ""
    """Why it cannot be edited; '': it can."""
    kind: str = ""
    """What an edited text must be: "json", "text", or "" for JSON if it parses, as plain SQL has it."""

    def parse(self, text: str) -> Any:
        """The payload that an edited text stands for.

        Raises:
            ValueError: it is not JSON, and where.
        """
        body = text.replace("\r\n", "\n").encode()
        if self.kind == "text":
            return body
        try:
            return json.loads(text, parse_constant=_refuse)
        except json.JSONDecodeError as error:
            if not self.kind:
                return body
            raise ValueError(
                _("Not JSON: %(what)s, in line %(line)s, column %(column)s.")
                % {"what": error.msg, "line": error.lineno, "column": error.colno}
            ) from error
        except RecursionError:
            raise ValueError(_("Not JSON: nested too deep.")) from None


def _refuse(name: str) -> None:
    raise ValueError(_("Not JSON: %(name)s.") % {"name": name})


def editable(letter: DeadLetter) -> Editable:
    """How a dead letter's payload is edited, or why it cannot be."""
    if not letter.whole:
        return Editable(refusal=_("The payload is too long to be edited here."))
    stated = letter.metadata.get(messages.CONTENT_TYPE)
    kind = "" if stated is None else "json" if stated == messages.JSON_TYPE else "text"
    try:
        value = messages.decode(letter.payload, letter.metadata)
    except InvalidMessage:
        value = letter.payload  # it says that it is JSON and is not, which may be why it failed
    try:
        is_text = isinstance(value, bytes)
        text = letter.payload.decode() if is_text else json_lines(value, most=EDITED_CHARACTERS)
    except UnicodeDecodeError:
        return Editable(refusal=_("The payload is not text: it cannot be edited here."))
    if text is None:
        return Editable(refusal=_("The payload is too long to be edited here."))
    if is_text and ("\r" in text or "\0" in text):
        return Editable(refusal=_("A browser would change the line ends in the payload: it cannot be edited here."))
    # A redacted text in the field would be sent in the place of what it hides.
    if redacted(text, topic=letter.listed.ref.topic, kind="payload") != text:
        return Editable(refusal=_("Parts of the payload are not shown (REDACT): editing would lose them."))
    return Editable(text, kind=kind)

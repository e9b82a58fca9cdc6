"""Payloads and metadata of single messages, for display and for editing."""

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
"""Maximum number of characters to edit: below Django's limit for a form, even with multibyte characters."""


def payload(beginning: bytes, size: int, *, topic: str) -> str:
    """Return a payload as text, redacted."""
    return redacted(payload_text(beginning, size), topic=topic, kind="payload")


def metadata(found: Mapping[str, Any], *, topic: str) -> str:
    """Return metadata as text, redacted; ``""`` if there is none."""
    return redacted(metadata_text(found), topic=topic, kind="metadata") if found else ""


@dataclass(frozen=True, slots=True)
class Editable:
    """A dead letter's payload, for editing."""

    text: str = ""
    refusal: str = ""
    """The reason why it cannot be edited, or empty."""
    kind: str = ""
    """Required type of the edited text: "json", "text", or "" for JSON if it parses (messages of plain SQL)."""

    def parse(self, text: str) -> Any:
        """Return the payload that an edited text stands for."""
        body = text.replace("\r\n", "\n").encode()
        if self.kind == "text":
            return body
        try:
            return parse_json(text)
        except ValueError as error:
            if not self.kind and isinstance(error.__cause__, json.JSONDecodeError):
                return body
            raise


def parse_json(text: str) -> Any:
    """Parse JSON that a user has typed; a ValueError says where it is invalid, or that a name occurs twice."""
    try:
        return json.loads(text, parse_constant=_refuse, object_pairs_hook=_unique)
    except json.JSONDecodeError as error:
        raise ValueError(
            _("Invalid JSON: %(what)s (line %(line)s, column %(column)s).")
            % {"what": error.msg, "line": error.lineno, "column": error.colno}
        ) from error
    except RecursionError:
        raise ValueError(_("Invalid JSON: nested too deeply.")) from None


def _refuse(name: str) -> None:
    raise ValueError(_("Invalid JSON: %(name)s.") % {"name": name})


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _value in pairs]
        repeated = next(name for place, name in enumerate(names) if name in names[:place])
        raise ValueError(_("Invalid JSON: the name %(name)r occurs twice in an object.") % {"name": repeated})
    return found


def editable(dead_letter: DeadLetter) -> Editable:
    """Return a dead letter's payload for editing, or the reason why it cannot be edited."""
    if not dead_letter.whole:
        return Editable(refusal=_("The payload is too long to edit here."))
    stated = dead_letter.metadata.get(messages.CONTENT_TYPE)
    kind = "" if stated is None else "json" if stated == messages.JSON_TYPE else "text"
    try:
        value = messages.decode(dead_letter.payload, dead_letter.metadata)
    except InvalidMessage:
        value = dead_letter.payload  # declared as JSON but invalid, which may be why the message failed
    try:
        is_text = isinstance(value, bytes)
        text = dead_letter.payload.decode() if is_text else json_lines(value, most=EDITED_CHARACTERS)
    except UnicodeDecodeError:
        return Editable(refusal=_("The payload is not text and cannot be edited here."))
    if text is None:
        return Editable(refusal=_("The payload is too long to edit here."))
    if is_text and ("\r" in text or "\0" in text):
        return Editable(refusal=_("The payload cannot be edited here: a browser would change its line endings."))
    # The form would submit the redacted text in place of the original.
    if redacted(text, topic=dead_letter.listed.ref.topic, kind="payload") != text:
        return Editable(
            refusal=_("The payload cannot be edited here: REDACT hides parts of it, and editing would lose them.")
        )
    return Editable(text, kind=kind)

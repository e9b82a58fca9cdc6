"""Messages as texts to copy: JSON, and shell commands."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping

from django_mysqlqueue.admin.formatting import INDENTED_CHARACTERS, json_lines
from django_mysqlqueue.inspection import MessageContent
from django_mysqlqueue.service.databases import queue_aliases
from django_mysqlqueue.service.payloads import Body
from django_mysqlqueue.service.received import ReceivedMessage, message_values
from django_mysqlqueue.text.escaping import visible_lines


def message_json(found: MessageContent, shown: Mapping[str, tuple[str, str]]) -> str:
    """Return a message as JSON, with the names that ``queuetail`` uses; empty if that would be too long.

    ``shown``: for ``payload``, ``metadata`` and ``last_error``, the text and what ``REDACT`` makes of it. A text that
    it changes takes the place of the value.
    """
    entry = found.entry
    stored = Body(
        message_id=entry.message_id,
        payload=found.payload,
        metadata=json.dumps(found.metadata),
        original_id=entry.original_id,
        published_at=entry.published_at,
        created_at=entry.created_at,
        original_topic=entry.original_topic,
        failed_group=entry.failed_group,
        failure_count=found.failure_count,
        last_error=found.last_error,
        target_group=entry.target_group,
        publisher_key=found.publisher_key,
        expires_at=found.expires_at,
    )
    value = message_values(ReceivedMessage(entry.topic, entry.key, entry.offset, stored))
    for name, (text, redacted) in shown.items():
        if text != redacted:
            if name == "payload":
                value.pop("payload_base64", None)
            elif name not in value:
                continue
            value[name] = redacted
    lines = json_lines(value)
    # What JSON itself escapes is valid JSON, too.
    if lines is not None and visible_lines(lines) == lines:
        return lines
    try:
        # With thousands of nested brackets, indentation would explode.
        line = json.dumps(value)
    except RecursionError:
        return ""
    return line if len(line) <= INDENTED_CHARACTERS else ""


def command(*parts: str, using: str) -> str:
    """Return a shell command, which names the database if there are several."""
    database = ["--database", using] if len(queue_aliases()) > 1 else []
    return shlex.join(["manage.py", *parts, *database])

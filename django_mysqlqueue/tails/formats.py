"""Messages and gaps as JSON objects, for terminals and pages."""

from __future__ import annotations

import base64
import json
from typing import Any

from django_mysqlqueue.exceptions import InvalidMessage
from django_mysqlqueue.service.received import ReceivedMessage
from django_mysqlqueue.tails.reading import Event, Gap


def as_dict(one: Event) -> dict[str, Any]:
    """Return a message or a gap as JSON values.

    A message has ``offset``, ``topic``, ``key``, ``id``, ``priority``, ``created_at`` and ``published_at`` (ISO 8601,
    UTC), ``metadata``, and ``payload``, or ``payload_base64`` if it is not JSON. ``expires_at``, ``target_group`` and
    the attributes of dead letters are there if they are set. A gap has ``topic`` and ``gap``, with ``after`` and
    ``until``.

    Args:
        one: the message or gap.
    """
    if isinstance(one, Gap):
        return {"topic": one.topic, "gap": {"after": one.after, "until": one.until}}
    found: dict[str, Any] = {
        "offset": one.offset,
        "topic": one.topic,
        "key": one.key,
        "id": one.id,
        "priority": one.priority,
        "created_at": _moment(one, "created_at"),
        "published_at": _moment(one, "published_at"),
        "metadata": one.metadata,
        **_payload(one),
    }
    if (expires_at := _moment(one, "expires_at")) is not None:
        found["expires_at"] = expires_at
    if one.target_group:
        found["target_group"] = one.target_group
    if one.failed_group:
        for name in ("original_topic", "failed_group", "failure_count", "last_error"):
            found[name] = getattr(one, name)
    return found


def _moment(one: ReceivedMessage, name: str) -> str | None:
    """Return a time in ISO 8601; None if there is none, or if Python has no date for what plain SQL has stored."""
    try:
        found = getattr(one, name)
    except (ValueError, OverflowError, OSError):
        return None
    return None if found is None else str(found.isoformat(timespec="milliseconds"))


def _payload(one: ReceivedMessage) -> dict[str, Any]:
    try:
        payload = one.payload
    except InvalidMessage:  # Its content type is JSON, but it is not.
        payload = one.body
    if isinstance(payload, bytes):
        return {"payload_base64": base64.b64encode(payload).decode()}
    return {"payload": payload}


def as_json(value: Any, *, encoding: str = "utf-8") -> str:
    """Return JSON on one line. If an encoding lacks a character (UTF-8: a lone surrogate), it is in ASCII.

    Args:
        value: JSON values.
        encoding: the encoding in which the text will be written.
    """
    try:
        text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
        text.encode(encoding)
    except UnicodeEncodeError:
        return json.dumps(value, separators=(",", ":"))
    return text

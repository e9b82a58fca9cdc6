"""Messages and gaps as JSON objects, for terminals and pages."""

from __future__ import annotations

import json
from typing import Any

from django_mysqlqueue.service.received import message_values
from django_mysqlqueue.tails.reading import Event, Gap


def as_dict(one: Event) -> dict[str, Any]:
    """Return a message or a gap as JSON values.

    A message has ``offset``, ``topic``, ``key``, ``id``, ``priority``, ``created_at`` and ``published_at`` (ISO 8601,
    UTC), ``metadata``, and ``payload``, or ``payload_base64`` if it is not JSON. ``expires_at``, ``target_group`` and
    the attributes of dead letters are there if they are set. A gap has ``topic`` and ``gap``, with ``after`` and
    ``until``, and ``truncated`` if it is true.
    """
    if isinstance(one, Gap):
        gap = {"after": one.after, "until": one.until} | ({"truncated": True} if one.truncated else {})
        return {"topic": one.topic, "gap": gap}
    return message_values(one)


def as_json(value: Any, *, encoding: str = "utf-8") -> str:
    """Return JSON on one line. If an encoding lacks a character (UTF-8: a lone surrogate), it is in ASCII."""
    try:
        text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
        text.encode(encoding)
    except UnicodeEncodeError:
        return json.dumps(value, separators=(",", ":"))
    return text

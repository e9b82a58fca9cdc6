"""Messages as JSON values, for terminals and pages."""

from __future__ import annotations

import base64
from typing import Any

from django_mysqlqueue.exceptions import InvalidMessage
from django_mysqlqueue.service.received import ReceivedMessage


def message_values(one: ReceivedMessage) -> dict[str, Any]:
    """Return a message as JSON values, with the names that ``tails.formats.as_dict`` documents."""
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
    """Return a time in ISO 8601; None if there is none."""
    found = getattr(one, name)
    return None if found is None else str(found.isoformat(timespec="milliseconds"))


def _payload(one: ReceivedMessage) -> dict[str, Any]:
    try:
        payload = one.payload
    except InvalidMessage:  # Its content type is JSON, but it is not.
        payload = one.body
    if isinstance(payload, bytes):
        return {"payload_base64": base64.b64encode(payload).decode()}
    return {"payload": payload}

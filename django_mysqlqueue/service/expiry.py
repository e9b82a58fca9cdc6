"""The expiry of messages: the time after which their handling does not start.

It is in the metadata that the queue reserves.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeGuard

from django_mysqlqueue.limits import EXPIRES_AT, EXPIRES_IN, LATEST_DELIVERY, REPLACES, RESERVED_PREFIX
from django_mysqlqueue.service.messages import decode_metadata

MARK = f'"{RESERVED_PREFIX}expires_'
"""What the JSON text of the metadata of a message with an expiry contains."""


def expires_at(metadata: str | bytes | Mapping[str, Any], created_at: int, original_id: str) -> int | None:
    """Return when a message of the log expires, in epoch milliseconds; None if it does not.

    Dead letters and redriven messages do not expire, although their metadata is that of the original. Nor do values
    that plain SQL has stored, and that are not times.

    Args:
        metadata: its metadata, as JSON text or decoded.
        created_at: when the publisher wrote it, in epoch milliseconds.
        original_id: the id of the original message, if it is a copy.
    """
    # The search is quick; decoding the metadata of each message is not.
    if original_id or not _may_expire(metadata):
        return None
    found = decode_metadata(metadata)
    if REPLACES in found:
        return None
    at, within = found.get(EXPIRES_AT), found.get(EXPIRES_IN)
    if not _is_time(at) and _is_time(within):
        at = created_at + within
    return at if _is_time(at) else None


def _may_expire(metadata: str | bytes | Mapping[str, Any]) -> bool:
    if isinstance(metadata, bytes):
        return MARK.encode() in metadata
    return not isinstance(metadata, str) or MARK in metadata


def _is_time(value: object) -> TypeGuard[int]:
    return type(value) is int and 0 < value <= LATEST_DELIVERY

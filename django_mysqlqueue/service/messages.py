"""What a message is on its way in and out: validation, encoding, decoding."""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from django.conf import settings as django_settings
from django.core.serializers.json import DjangoJSONEncoder
from django.db.models import Model
from django.utils import timezone

from django_mysqlqueue import naming
from django_mysqlqueue.conf import get_settings
from django_mysqlqueue.exceptions import InvalidMessage
from django_mysqlqueue.limits import (
    LATEST_DELIVERY,
    MAX_METADATA_BYTES,
    MAX_METADATA_DEPTH,
    PUBLISHER_KEY,
    RESERVED_PREFIX,
    check_json_column,
)

JSON_TYPE = "application/json"
BINARY_TYPE = "application/octet-stream"
CONTENT_TYPE = "content_type"
GIVEN_TYPES = ((CONTENT_TYPE, JSON_TYPE), (CONTENT_TYPE, BINARY_TYPE))
PLAIN_JSON, PLAIN_BINARY = (f'{{"{CONTENT_TYPE}":"{kind}"}}' for kind in (JSON_TYPE, BINARY_TYPE))
"""The metadata of a message without any of its own, as they are stored."""
ENCODER = DjangoJSONEncoder(allow_nan=False, ensure_ascii=False, separators=(",", ":"))
EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)


@dataclass(frozen=True, slots=True)
class Message:
    """A message to publish, for ``publish_many``; the fields are those of ``publish``."""

    payload: Any
    key: str | None = None
    id: str | None = None
    """The message is dropped if one with this id, under the same topic and key, is in the log, handled or not."""
    metadata: Mapping[str, Any] | None = None
    delay: float | datetime.timedelta | None = None
    deliver_at: datetime.datetime | None = None


class OutboxRow(NamedTuple):
    """A valid message as the outbox stores it."""

    topic: str
    partition_key: str
    message_id: str
    payload: bytes
    metadata: str
    delay_ms: int | None
    """Milliseconds from the database's now; None: ``deliver_at`` counts."""
    deliver_at: int
    """Epoch milliseconds; 0: at once."""


def encode(topic: str, message: Message) -> OutboxRow:
    """Checks a message for a checked topic and gives it its partition.

    Raises:
        InvalidMessage: naming the value and the rule that it breaks.
    """
    message_id = naming.new_message_id() if message.id is None else naming.check_text("id", message.id)
    if not message_id:
        raise InvalidMessage("id '': must not be empty")
    metadata = _metadata(message.metadata)
    payload = _payload(message.payload, metadata)
    partition_key = _partition(topic, message.key, message_id, metadata)
    delay_ms, deliver_at = schedule(message.delay, message.deliver_at)
    return OutboxRow(topic, partition_key, message_id, payload, _stored(metadata), delay_ms, deliver_at)


def encode_body(payload: Any, metadata: Mapping[str, Any]) -> tuple[bytes, str]:
    """A payload and its metadata, the queue's own included, as they are stored.

    A content type that ``publish`` gave follows the payload; another one stays.

    Raises:
        InvalidMessage: naming the value and the rule that it breaks.
    """
    kept = {name: value for name, value in metadata.items() if (name, value) not in GIVEN_TYPES}
    body = _payload(payload, kept)
    return body, _stored(kept)


def _payload(payload: Any, metadata: dict[str, Any]) -> bytes:
    if isinstance(payload, (bytes, bytearray, memoryview)):
        body = bytes(payload)
        metadata.setdefault(CONTENT_TYPE, BINARY_TYPE)
    else:
        if metadata.setdefault(CONTENT_TYPE, JSON_TYPE) != JSON_TYPE:
            raise InvalidMessage(
                f"metadata {CONTENT_TYPE}={metadata[CONTENT_TYPE]!r}: "
                f"a payload that is not bytes is stored as {JSON_TYPE}"
            )
        body = _json(payload, "payload")
    limit = get_settings().max_payload_bytes
    if len(body) > limit:
        raise InvalidMessage(f"payload of {len(body)} bytes: MAX_PAYLOAD_BYTES allows {limit}")
    return body


def _json(value: Any, what: str) -> bytes:
    try:
        return ENCODER.encode(value).encode()
    except (TypeError, ValueError, RecursionError) as error:
        place, part = ("", value) if isinstance(error, RecursionError) else _culprit(value)
        advice = "; publish its pk instead" if isinstance(part, Model) else ""
        raise InvalidMessage(
            f"{what}{place} of type {type(part).__name__} cannot be written as JSON: {error}{advice}"
        ) from error


def _culprit(value: Any, depth: int = 1) -> tuple[str, Any]:
    """The part of a value that JSON has no form for, and its place as a subscript: ``['lines'][2]``."""
    if depth > MAX_METADATA_DEPTH:
        return "", value  # it may contain itself
    items: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, Mapping):
        items = value.items()
    elif isinstance(value, (list, tuple)):
        items = enumerate(value)
    for key, item in items:
        try:
            json.dumps({key: item} if isinstance(value, Mapping) else item, cls=DjangoJSONEncoder, allow_nan=False)
        except (TypeError, ValueError):
            place, part = _culprit(item, depth + 1)
            return f"[{key!r}]{place}", part
    return "", value


def _metadata(metadata: Mapping[str, Any] | None) -> dict[str, Any]:
    if metadata is None:
        return {}
    if not isinstance(metadata, Mapping) or not all(isinstance(name, str) for name in metadata):
        raise InvalidMessage(f"metadata {metadata!r}: must be a mapping with str keys")
    for name in metadata:
        if name.startswith(RESERVED_PREFIX):
            raise InvalidMessage(f"metadata {name!r}: names beginning with {RESERVED_PREFIX!r} are the queue's own")
    if CONTENT_TYPE in metadata and not isinstance(metadata[CONTENT_TYPE], str):
        raise InvalidMessage(f"metadata {CONTENT_TYPE}={metadata[CONTENT_TYPE]!r}: must be a str")
    return dict(metadata)


def _stored(metadata: dict[str, Any]) -> str:
    if len(metadata) == 1:  # the content type alone: nearly every message has no more
        kind = metadata[CONTENT_TYPE]
        if kind == JSON_TYPE:
            return PLAIN_JSON
        if kind == BINARY_TYPE:
            return PLAIN_BINARY
    text = _json(metadata, "metadata")
    if len(text) > MAX_METADATA_BYTES:
        raise InvalidMessage(f"metadata of {len(text)} bytes: at most {MAX_METADATA_BYTES} are allowed")
    check_json_column(json.loads(text))
    return text.decode()


def _partition(topic: str, key: str | None, message_id: str, metadata: dict[str, Any]) -> str:
    settings = get_settings()
    partitions = settings.partitions_of(topic)
    if key is None:
        return naming.hashed_partition(message_id, partitions or settings.keyless_partitions)
    naming.check_key(key)
    if partitions is None:
        return key
    metadata[PUBLISHER_KEY] = key
    return naming.hashed_partition(key, partitions)


def schedule(delay: float | datetime.timedelta | None, deliver_at: datetime.datetime | None) -> tuple[int | None, int]:
    """``delay`` in milliseconds, or None and ``deliver_at`` in epoch milliseconds (0 if neither was given).

    Raises:
        InvalidMessage: naming the value and the rule that it breaks.
    """
    if delay is not None and deliver_at is not None:
        raise InvalidMessage("delay and deliver_at were both given: one of them says when")
    if delay is not None:
        return duration_ms("delay", delay, longest=100 * 366 * 86400.0), 0
    if deliver_at is None:
        return None, 0
    moment = deliver_at
    if not isinstance(moment, datetime.datetime):
        raise InvalidMessage(f"deliver_at {moment!r}: must be a datetime")
    if timezone.is_naive(moment):
        if django_settings.USE_TZ:
            raise InvalidMessage(f"deliver_at {moment!r}: must be aware, since USE_TZ is True")
        moment = timezone.make_aware(moment, timezone.get_default_timezone())
    milliseconds = (moment - EPOCH) // datetime.timedelta(milliseconds=1)
    # 0 stands for "at once"; a moment at or before the epoch is long due.
    return None, min(max(milliseconds, 1), LATEST_DELIVERY)


def duration_ms(what: str, value: object, *, longest: float) -> int:
    """Milliseconds of a duration in seconds or a timedelta, from 0 to ``longest`` seconds.

    Raises:
        InvalidMessage: naming the value and the rule.
    """
    seconds = value.total_seconds() if isinstance(value, datetime.timedelta) else value
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 0 <= seconds <= longest:
        days = f" ({longest / 86400:.0f} days)" if longest >= 86400 else ""
        raise InvalidMessage(f"{what} {value!r}: must be a timedelta or seconds, from 0 to {longest:.0f}{days}")
    return round(seconds * 1000)


def decode(body: bytes, metadata: Mapping[str, Any]) -> Any:
    """A body in its published form: JSON where the content type says so, else bytes.

    A row that plain SQL enqueued has no content type: it is JSON if it parses.

    Raises:
        InvalidMessage: the content type says JSON and the body is none.
    """
    content_type = metadata.get(CONTENT_TYPE)
    if content_type is None:
        try:
            return _from_json(body)
        except (ValueError, RecursionError):
            return body
    if content_type != JSON_TYPE:
        return body
    try:
        return _from_json(body)
    except (ValueError, RecursionError) as error:
        raise InvalidMessage(f"payload {body[:80]!r}: its content type is {JSON_TYPE}, but: {error}") from error


def _from_json(body: bytes) -> Any:
    """Strictly: UTF-8, and no NaN or Infinity, which are not JSON."""

    def refuse(name: str) -> None:
        raise ValueError(f"{name} is not JSON")

    return json.loads(body.decode(), parse_constant=refuse)


ERROR_LENGTH = 16_000
"""Characters of an error that are kept: its end, where a traceback names the exception."""


def cut_error(error: str) -> str:
    """An error text that fits its column and that UTF-8 can encode."""
    text = error.encode("utf-8", "backslashreplace").decode()
    return text if len(text) <= ERROR_LENGTH else "…" + text[1 - ERROR_LENGTH :]


def last_line(error: str) -> str:
    """What a traceback says in the end."""
    lines = error.strip().splitlines()
    return lines[-1] if lines else ""


def public_metadata(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Without what the queue itself keeps there."""
    return {name: value for name, value in metadata.items() if not name.startswith(RESERVED_PREFIX)}


def publisher_key(partition_key: str, metadata: Mapping[str, Any]) -> str | None:
    """The publisher's key, also where it was hashed to a partition; None if there was none."""
    if partition_key.startswith(naming.PARTITION_PREFIX):
        return metadata.get(PUBLISHER_KEY)
    return partition_key


def decode_metadata(text: str | bytes | Mapping[str, Any]) -> dict[str, Any]:
    """Metadata as the driver gives it; what plain SQL stored as no object counts as empty."""
    value = json.loads(text) if isinstance(text, (str, bytes)) else text
    return dict(value) if isinstance(value, Mapping) else {}

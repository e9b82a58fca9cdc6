"""Validation, encoding and decoding of messages."""

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

from django_mysqlqueue.db.sizes import LATEST_DELIVERY, MAX_METADATA_BYTES, MAX_METADATA_DEPTH, check_json_column
from django_mysqlqueue.exceptions import InvalidMessage
from django_mysqlqueue.names.ids import new_message_id
from django_mysqlqueue.names.keys import (
    PARTITION_PREFIX,
    check_coalesce_key,
    check_key,
    check_priority,
    hashed_partition,
    lane,
    lane_of,
    scoped_coalesce_key,
)
from django_mysqlqueue.names.rules import RESERVED_PREFIX, check_text
from django_mysqlqueue.options.conf import get_settings

JSON_TYPE = "application/json"
BINARY_TYPE = "application/octet-stream"
CONTENT_TYPE = "content_type"
GIVEN_TYPES = ((CONTENT_TYPE, JSON_TYPE), (CONTENT_TYPE, BINARY_TYPE))
PLAIN_JSON, PLAIN_BINARY = (f'{{"{CONTENT_TYPE}":"{kind}"}}' for kind in (JSON_TYPE, BINARY_TYPE))
"""The stored metadata of a message that was published without metadata: JSON, and bytes."""
ENCODER = DjangoJSONEncoder(allow_nan=False, ensure_ascii=False, separators=(",", ":"))
LONGEST_SCHEDULE = 100 * 366 * 86400.0
"""Longest delay, and longest time until a message expires, in seconds."""
EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)


@dataclass(frozen=True, slots=True)
class Message:
    """A message for ``publish_many``. The fields are the arguments of ``publish``."""

    payload: Any
    key: str | None = None
    id: str | None = None
    """The message is dropped if the log has one with this id in the topic and partition, even if that was handled."""
    metadata: Mapping[str, Any] | None = None
    delay: float | datetime.timedelta | None = None
    deliver_at: datetime.datetime | None = None
    priority: int = 0
    expires_at: datetime.datetime | None = None
    expires_in: float | datetime.timedelta | None = None
    coalesce: str | None = None
    max_delay: float | datetime.timedelta | None = None


class OutboxRow(NamedTuple):
    """A valid message as the outbox stores it. Times are in milliseconds."""

    topic: str
    partition_key: str
    message_id: str
    payload: bytes
    metadata: str
    delay_ms: int | None
    """From the database's current time until delivery; None: ``deliver_at`` applies."""
    deliver_at: int
    """Since the epoch; 0: at once."""
    publisher_key: str | None = None
    """The key that the publisher gave, if it was hashed to the partition; None: there is none, or the partition is its
    own."""
    expires_in_ms: int | None = None
    """From the database's current time until the message expires; None: ``expires_at`` applies."""
    expires_at: int | None = None
    """Since the epoch; None: never."""
    coalesce_key: str | None = None
    """As it is stored (``names.keys.scoped_coalesce_key``)."""
    max_delay_ms: int | None = None
    """After which a debounced message, or the one that replaces it, enters the log at the latest; None: no limit."""

    @property
    def is_debounced(self) -> bool:
        """Whether the message waits for a later one with its coalesce key, which replaces it."""
        return self.coalesce_key is not None and bool(self.delay_ms)


def encode(topic: str, message: Message) -> OutboxRow:
    """Check and encode a message for a valid topic, and choose its partition.

    Each rule that it breaks is an InvalidMessage, whose text names the value and the rule.
    """
    message_id = new_message_id() if message.id is None else check_text("id", message.id)
    if not message_id:
        raise InvalidMessage("id '': must not be empty")
    metadata = _metadata(message.metadata)
    payload = _payload(message.payload, metadata)
    priority = check_priority(message.priority)
    coalesce = None if message.coalesce is None else check_coalesce_key(message.coalesce)
    # Without a key, messages with the same coalesce key must be in one partition.
    value = message_id if coalesce is None else coalesce
    partition_key, hashed_key = _partition(topic, message.key, value, priority)
    delay_ms, deliver_at = schedule(message.delay, message.deliver_at)
    return OutboxRow(
        topic,
        partition_key,
        message_id,
        payload,
        _stored(metadata),
        delay_ms,
        deliver_at,
        hashed_key,
        *_expiry(message),
        None if coalesce is None else scoped_coalesce_key(hashed_key, coalesce),
        _max_delay(message, delay_ms),
    )


def encode_body(payload: Any, metadata: Mapping[str, Any]) -> tuple[bytes, str]:
    """Return a payload and its metadata as they are stored. The metadata may include the queue's own.

    A content type that ``publish`` has set is set again for the payload; another one is kept.
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
    """Return the place of the part that cannot be written as JSON, as a subscript (``['lines'][2]``), and the part."""
    if depth > MAX_METADATA_DEPTH:
        return "", value  # It may contain itself.
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
            raise InvalidMessage(f"metadata {name!r}: names that start with {RESERVED_PREFIX!r} are reserved")
    if CONTENT_TYPE in metadata and not isinstance(metadata[CONTENT_TYPE], str):
        raise InvalidMessage(f"metadata {CONTENT_TYPE}={metadata[CONTENT_TYPE]!r}: must be a str")
    return dict(metadata)


def _stored(metadata: dict[str, Any]) -> str:
    if len(metadata) == 1:  # Only the content type, as for most messages.
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


def _partition(topic: str, key: str | None, value: str, priority: int) -> tuple[str, str | None]:
    """Return the partition of a key, and the key if it is hashed; without one, that to which a value is hashed."""
    settings = get_settings()
    partitions = settings.partitions_of(topic)
    if key is None:
        return lane(hashed_partition(value, partitions or settings.keyless_partitions), priority), None
    check_key(key)
    if partitions is None:
        return lane(key, priority), None
    return lane(hashed_partition(key, partitions), priority), key


def schedule(delay: float | datetime.timedelta | None, deliver_at: datetime.datetime | None) -> tuple[int | None, int]:
    """Return ``delay`` in milliseconds, or None and ``deliver_at`` in epoch milliseconds (0 if both are None)."""
    if delay is not None and deliver_at is not None:
        raise InvalidMessage("delay and deliver_at were both given: pass one of them")
    if delay is not None:
        return duration_ms("delay", delay, longest=LONGEST_SCHEDULE), 0
    if deliver_at is None:
        return None, 0
    # 0 means "at once"; a time at or before the epoch is long due.
    return None, _moment_ms("deliver_at", deliver_at)


def _max_delay(message: Message, delay_ms: int | None) -> int | None:
    """Return the maximum delay of a debounced message in milliseconds; None if it has none."""
    longest = message.max_delay
    if longest is None:
        return None
    if message.coalesce is None or not delay_ms:
        raise InvalidMessage(f"max_delay {longest!r}: needs coalesce, and a delay of at least a millisecond")
    milliseconds = duration_ms("max_delay", longest, longest=LONGEST_SCHEDULE)
    if milliseconds < delay_ms:
        raise InvalidMessage(f"max_delay {longest!r}: must be at least the delay {message.delay!r}")
    return milliseconds


def _expiry(message: Message) -> tuple[int | None, int | None]:
    """Return ``expires_in`` and ``expires_at`` in milliseconds, each None if it was not given."""
    at, within = message.expires_at, message.expires_in
    if at is not None and within is not None:
        raise InvalidMessage("expires_at and expires_in were both given: pass one of them")
    if at is not None:
        milliseconds = _moment_ms("expires_at", at)
        if message.deliver_at is not None and milliseconds <= _moment_ms("deliver_at", message.deliver_at):
            raise InvalidMessage(f"expires_at {at!r}: must be after deliver_at {message.deliver_at!r}")
        return None, milliseconds
    if within is None:
        return None, None
    # Relative to the database's time: the publisher's clock may be wrong.
    milliseconds = duration_ms("expires_in", within, longest=LONGEST_SCHEDULE)
    if not milliseconds:
        raise InvalidMessage(f"expires_in {within!r}: must be at least a millisecond")
    if message.delay is not None and milliseconds <= duration_ms("delay", message.delay, longest=LONGEST_SCHEDULE):
        raise InvalidMessage(f"expires_in {within!r}: must be longer than the delay {message.delay!r}")
    return milliseconds, None


def _moment_ms(what: str, moment: object) -> int:
    """Return a datetime in epoch milliseconds, from 1 to the end of the year 9999."""
    if not isinstance(moment, datetime.datetime):
        raise InvalidMessage(f"{what} {moment!r}: must be a datetime")
    if timezone.is_naive(moment):
        if django_settings.USE_TZ:
            raise InvalidMessage(f"{what} {moment!r}: must be aware because USE_TZ is True")
        moment = timezone.make_aware(moment, timezone.get_default_timezone())
    return min(max((moment - EPOCH) // datetime.timedelta(milliseconds=1), 1), LATEST_DELIVERY)


def duration_ms(what: str, value: object, *, longest: float) -> int:
    """Return a duration in milliseconds; InvalidMessage if it is no duration, or above ``longest`` seconds."""
    seconds = value.total_seconds() if isinstance(value, datetime.timedelta) else value
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 0 <= seconds <= longest:
        days = f" ({longest / 86400:.0f} days)" if longest >= 86400 else ""
        raise InvalidMessage(f"{what} {value!r}: must be a timedelta or seconds, from 0 to {longest:.0f}{days}")
    return round(seconds * 1000)


def decode(body: bytes, metadata: Mapping[str, Any]) -> Any:
    """Return a body as it was published: a JSON value if the content type is JSON, else bytes.

    A message that was published by plain SQL has no content type: it is JSON if it can be parsed.

    Raises:
        InvalidMessage: the content type is JSON, but the body is not valid JSON.
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
        raise InvalidMessage(
            f"payload {body[:80]!r}: its content type is {JSON_TYPE}, but it is not valid JSON: {error}"
        ) from error


def _from_json(body: bytes) -> Any:
    """Parse JSON strictly: it must be UTF-8, and NaN and Infinity are not JSON."""

    def refuse(name: str) -> None:
        raise ValueError(f"{name} is not JSON")

    return json.loads(body.decode(), parse_constant=refuse)


ERROR_LENGTH = 16_000
"""Number of characters of an error that are kept: the end, where a traceback names the exception."""


def cut_error(error: str) -> str:
    """Return an error text that fits its column and that UTF-8 can encode."""
    text = error.encode("utf-8", "backslashreplace").decode()
    return text if len(text) <= ERROR_LENGTH else "…" + text[1 - ERROR_LENGTH :]


def last_line(error: str) -> str:
    """Return the last line of a traceback."""
    lines = error.strip().splitlines()
    return lines[-1] if lines else ""


def public_metadata(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return metadata without the names that the queue reserves."""
    return {name: value for name, value in metadata.items() if not name.startswith(RESERVED_PREFIX)}


def publisher_key(partition_key: str, stored: str | None) -> str | None:
    """Return the publisher's key, even if it was hashed to a partition; None if there was none.

    ``stored``: the column ``publisher_key``.
    """
    if stored is not None:
        return stored
    partition = lane_of(partition_key).partition
    return None if partition.startswith(PARTITION_PREFIX) else partition


def decode_metadata(text: str | bytes | Mapping[str, Any]) -> dict[str, Any]:
    """Return metadata from the driver's value.

    What Python cannot decode (a number of 5,000 digits, an array in 1,000 others) counts as empty, and so does what is
    not an object. Only plain SQL can store that, the latter where constraints are switched off. No subscriber may stop
    because of it.
    """
    try:
        return dict(json.loads(text) if isinstance(text, (str, bytes)) else text)
    except (ValueError, TypeError, RecursionError):
        return {}

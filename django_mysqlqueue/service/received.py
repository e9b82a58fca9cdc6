"""A message as its readers get it: decoded, with the publisher's names instead of the columns'."""

from __future__ import annotations

import base64
import datetime
from functools import cached_property
from typing import Any

from django_mysqlqueue.exceptions import InvalidMessage
from django_mysqlqueue.names.keys import priority_of
from django_mysqlqueue.service.messages import decode, decode_metadata, public_metadata, publisher_key
from django_mysqlqueue.service.payloads import Body


class ReceivedMessage:
    """A message in the log.

    Attributes:
        id: the message's id; for a dead letter or a redriven message, the id of the original message.
        topic: the topic of the message.
        offset: the message's offset in the log.
        body: the payload's bytes as stored.
        original_topic: for a dead letter, the topic of the original message; otherwise empty.
        failed_group: for a dead letter, the group that dead-lettered the message; otherwise empty.
        failure_count: for a dead letter, the number of failed attempts; otherwise 0.
        last_error: for a dead letter, the reason (the end of the traceback); otherwise empty.
        target_group: the only group that receives the message, for example after a redrive; empty if all groups do.
    """

    def __init__(self, topic: str, partition_key: str, offset: int, stored: Body) -> None:
        self._partition_key = partition_key
        self._stored = stored
        self.id = stored.original_id or stored.message_id
        self.topic = topic
        self.offset = offset
        self.body = stored.payload
        self.original_topic = stored.original_topic
        self.failed_group = stored.failed_group
        self.failure_count = stored.failure_count
        self.last_error = stored.last_error
        self.target_group = stored.target_group

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.topic}[{self.offset}], id {self.id!r}>"

    def undecoded(self) -> ReceivedMessage:
        """Return the message without the decoded values of this one, which somebody may have changed."""
        return ReceivedMessage(self.topic, self._partition_key, self.offset, self._stored)

    @cached_property
    def _metadata(self) -> dict[str, Any]:
        return decode_metadata(self._stored.metadata)

    @cached_property
    def metadata(self) -> dict[str, Any]:
        """The publisher's metadata, and the ``content_type``."""
        return public_metadata(self._metadata)

    @cached_property
    def payload(self) -> Any:
        """The payload as published: a JSON value or bytes.

        Raises:
            InvalidMessage: the content type is JSON, but the body is not valid JSON.
        """
        return decode(self.body, self._metadata)

    @property
    def key(self) -> str | None:
        """The publisher's key, even if it was hashed to a partition; None if there was none."""
        return publisher_key(self._partition_key, self._stored.publisher_key)

    @property
    def priority(self) -> int:
        """The publisher's priority, from -100 to 100; higher ones are handled first."""
        return priority_of(self._partition_key)

    @property
    def published_ms(self) -> int:
        """When the message entered the log, in epoch milliseconds."""
        return self._stored.published_at

    @property
    def published_at(self) -> datetime.datetime:
        """When the message entered the log (aware, UTC, by the database's clock)."""
        return _utc(self._stored.published_at)

    @property
    def created_at(self) -> datetime.datetime:
        """When the publisher wrote the message (aware, UTC, by the database's clock)."""
        return _utc(self._stored.created_at)

    @property
    def expires_at(self) -> datetime.datetime | None:
        """When the message expires (aware, UTC, by the database's clock), or None.

        A handler is called before this time only. It is not interrupted when the time comes, but the message is not
        retried after it.
        """
        return None if self._stored.expires_at is None else _utc(self._stored.expires_at)


def message_values(message: ReceivedMessage) -> dict[str, Any]:
    """Return a message as JSON values, with the names that ``tails.formats.as_dict`` documents."""
    found: dict[str, Any] = {
        "offset": message.offset,
        "topic": message.topic,
        "key": message.key,
        "id": message.id,
        "priority": message.priority,
        "created_at": message.created_at.isoformat(timespec="milliseconds"),
        "published_at": message.published_at.isoformat(timespec="milliseconds"),
        "metadata": message.metadata,
        **_payload(message),
    }
    if message.expires_at is not None:
        found["expires_at"] = message.expires_at.isoformat(timespec="milliseconds")
    if message.target_group:
        found["target_group"] = message.target_group
    if message.failed_group:
        for name in ("original_topic", "failed_group", "failure_count", "last_error"):
            found[name] = getattr(message, name)
    return found


def _utc(milliseconds: int) -> datetime.datetime:
    return datetime.datetime.fromtimestamp(milliseconds / 1000, datetime.UTC)


def _payload(message: ReceivedMessage) -> dict[str, Any]:
    try:
        payload = message.payload
    except InvalidMessage:  # Its content type is JSON, but it is not.
        payload = message.body
    if isinstance(payload, bytes):
        return {"payload_base64": base64.b64encode(payload).decode()}
    return {"payload": payload}

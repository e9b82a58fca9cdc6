"""A topic as server-sent events, which a page follows with ``EventSource``.

The format is that of the HTML standard: https://html.spec.whatwg.org/multipage/server-sent-events.html
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
import weakref
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any, Generic, TypeVar

from asgiref.sync import sync_to_async
from django.contrib.auth.decorators import login_not_required
from django.core.exceptions import ImproperlyConfigured
from django.core.handlers.asgi import ASGIRequest
from django.db import Error
from django.http import HttpRequest, HttpResponse, HttpResponseBase, StreamingHttpResponse
from django.utils.decorators import method_decorator
from django.views import View

from django_mysqlqueue.exceptions import InvalidMessage
from django_mysqlqueue.inspection.redaction import hook as redaction_hook
from django_mysqlqueue.inspection.redaction import redacted
from django_mysqlqueue.options.conf import get_settings
from django_mysqlqueue.options.texts import parse_duration, parse_filter
from django_mysqlqueue.permissions import SEE_PAYLOADS, has_permission
from django_mysqlqueue.runtime.log import event
from django_mysqlqueue.service import log
from django_mysqlqueue.service.databases import queue_alias
from django_mysqlqueue.service.received import ReceivedMessage
from django_mysqlqueue.sql import failures
from django_mysqlqueue.sql.connection import bounded, used_connections
from django_mysqlqueue.sql.session import Session
from django_mysqlqueue.tails.api import AsyncTail, Tail, TailRequest, make_request
from django_mysqlqueue.tails.formats import as_dict, as_json
from django_mysqlqueue.tails.reading import Event, Gap

RECONNECT_MS = 3000
"""Milliseconds that a browser waits before it connects again."""
AnyTail = TypeVar("AnyTail", bound=Tail | AsyncTail)
PARAMETERS = ("key", "offset", "since", "where")


class _Listeners:
    """The streams of this process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tokens: set[object] = set()

    def __len__(self) -> int:
        return len(self._tokens)

    def enter(self, most: int) -> object | None:
        """Count one more and return its token, or None if there are as many as allowed."""
        with self._lock:
            if len(self._tokens) >= most:
                return None
            token = object()
            self._tokens.add(token)
            return token

    def leave(self, token: object) -> None:
        """Count one less. This takes no lock: the garbage collector may call it at any instruction."""
        self._tokens.discard(token)


LISTENERS = _Listeners()
# A child has none of its parent's streams, and may not have the thread that held the lock.
os.register_at_fork(after_in_child=LISTENERS.__init__)  # type: ignore[misc]


@method_decorator(login_not_required, name="dispatch")  # It checks permissions itself: EventSource shows no login page.
class TailView(View):
    """Stream a topic as server-sent events. Route it as ``path("tail/<str:topic>/", TailView.as_view())``.

    The data of a message is a JSON object as ``manage.py queuetail --format json`` prints it, and the event's id is
    the offset. A gap is an event of type ``gap``. Events of type ``position`` say at the beginning, and when there was
    nothing else for a while, up to which offset the stream has come. A browser that connects again sends the last id as
    ``Last-Event-ID``, and continues there. Otherwise the stream begins with the next message, or where the query string
    says: ``offset`` and ``since`` (such as ``10m``). ``key`` and ``where`` (a filter as JSON) select messages. All
    are as for ``tail``.

    The response is 403 without the permission, 400 if a parameter is invalid, and 503 if the process has too many
    streams, or the database does not answer. With ``REDACT`` set, payloads and metadata are redacted.

    Attributes:
        using: alias of the queue's database (default: the one that the topic is in).
        topics: the topics that may be followed; None: all.
        max_listeners: maximum number of streams in this process. Under WSGI, each occupies a thread.
        max_duration: seconds after which a stream ends. The browser then connects again, and permissions are checked
            again.
        heartbeat: seconds without an event after which the stream sends its position, so that a connection that has
            ended is noticed, and a browser that connects again need not read what did not match.
    """

    http_method_names = ["get", "options"]
    using: str | None = None
    topics: Sequence[str] | None = None
    max_listeners: int = 100
    max_duration: float = 600.0
    heartbeat: float = 15.0

    def has_permission(self, request: HttpRequest, topic: str) -> bool:
        """Return whether the user may follow a topic. Override this for pages that are public or have other rules.

        Args:
            request: the request.
            topic: the name of the topic.
        """
        user = getattr(request, "user", None)  # Without AuthenticationMiddleware, requests have no user.
        return user is not None and has_permission(user, SEE_PAYLOADS, topic)

    def serialize(self, message: ReceivedMessage) -> dict[str, Any] | None:
        """Return what the stream sends of a message: JSON values, or None to leave it out.

        A message for which this raises an exception is logged and left out. This must not query: under ASGI it runs in
        the event loop.

        Args:
            message: the message.
        """
        found = as_dict(message)
        if get_settings().redact is None:
            return found
        if found.pop("payload_base64", None) is not None:
            found["payload"] = message.body.decode(errors="backslashreplace")
        for name, kind in (("payload", "payload"), ("metadata", "metadata"), ("last_error", "error")):
            if name in found:
                found[name] = _redacted(found[name], topic=message.topic, kind=kind)
        return found

    def get(self, request: HttpRequest, topic: str) -> HttpResponseBase:
        """Start a stream.

        Args:
            request: the request.
            topic: the name of the topic.
        """
        if isinstance(self.topics, str):
            raise ImproperlyConfigured(f"TailView: topics={self.topics!r}: must be a list of topics")
        if (self.topics is not None and topic not in self.topics) or not self.has_permission(request, topic):
            return _text(f"You do not have permission to follow the topic {topic!r}.", 403)
        redaction_hook()  # An invalid REDACT is an error here, not in the middle of the stream.
        alias = queue_alias(self.using, topic=topic)
        try:
            with bounded(alias):
                tail_request = self._request(request, topic, alias)
        except (InvalidMessage, ValueError) as error:
            return _text(f"{error}.", 400)
        except Error as error:
            if failures.kind_of(alias, error) is None:
                raise
            return _text(f"{failures.summarize(alias, error)}.", 503)
        token = LISTENERS.enter(self.max_listeners)
        if token is None:
            response = _text(f"There are {self.max_listeners} streams already. Try again later.", 503)
            response["Retry-After"] = "30"
            return response
        try:
            stream = (_AsyncStream if isinstance(request, ASGIRequest) else _Stream)(self, tail_request, token)
        except BaseException:
            LISTENERS.leave(token)
            raise
        answer = StreamingHttpResponse(stream, content_type="text/event-stream; charset=utf-8")
        answer["Cache-Control"] = "no-store"
        answer["X-Accel-Buffering"] = "no"  # nginx would collect the events
        answer["Content-Encoding"] = "identity"  # so would GZipMiddleware
        return answer

    def _request(self, request: HttpRequest, topic: str, alias: str) -> TailRequest:
        """Return the arguments of the tail, with the position at which it begins as an offset.

        Raises:
            ValueError: a parameter is invalid.
        """
        unknown = sorted(set(request.GET) - {*PARAMETERS})
        if unknown:
            raise ValueError(f"{unknown[0]!r} is not a parameter. Parameters: {', '.join(PARAMETERS)}")
        offset, since, where = (request.GET.get(name) for name in ("offset", "since", "where"))
        first = None if offset is None else _integer("offset", offset)
        if last := request.headers.get("Last-Event-ID"):
            # The browser repeats the address with which it began, and has come further since.
            first, since = _integer("Last-Event-ID", last) + 1, None
        found = make_request(
            topic,
            since=None if since is None else parse_duration("since", since),
            offset=first,
            key=request.GET.get("key"),
            where=None if where is None else parse_filter("where", where),
            follow=True,
            limit=None,
            using=alias,
        )
        position = found.start()
        return found._replace(since=None, offset=position + 1, end=log.end_of_log(Session(alias)))


class _Chunks(Generic[AnyTail]):
    """What ``_Stream`` and ``_AsyncStream`` have in common."""

    def __init__(self, view: TailView, tail: AnyTail, token: object) -> None:
        self._view = view
        self._tail = tail
        now = time.monotonic()
        self._heartbeat_at = now + view.heartbeat
        self._ends_at = now + view.max_duration
        self._has_begun = False
        # Even if nobody closes the response, for example because a middleware has replaced it.
        self._leave = weakref.finalize(self, LISTENERS.leave, token)

    @property
    def _timeout(self) -> float:
        return max(0.0, min(self._heartbeat_at, self._ends_at) - time.monotonic())

    @property
    def _is_over(self) -> bool:
        return not self._leave.alive or time.monotonic() >= self._ends_at

    def _first(self) -> bytes:
        # The browser sends the id if it connects again before the first message.
        self._has_begun = True
        return f"retry: {RECONNECT_MS}\n".encode() + self._position()

    def _position(self) -> bytes:
        position = self._tail.position or 0
        return f'event: position\nid: {position}\ndata: {{"position":{position}}}\n\n'.encode()

    def _quiet(self) -> bytes:
        """Return a heartbeat if it is time for one."""
        if time.monotonic() < self._heartbeat_at:
            return b""
        self._heartbeat_at = time.monotonic() + self._view.heartbeat
        return self._position()

    def _event(self, one: Event) -> bytes:
        """Return an event, or nothing if the message is left out."""
        if isinstance(one, Gap):
            # What is left of the messages in the gap comes after it, so the id is the position before it.
            chunk = f"event: gap\nid: {one.after}\ndata: {as_json(as_dict(one))}\n\n"
        else:
            try:
                content = self._view.serialize(one)
                data = None if content is None else as_json(content)
            except Exception:  # noqa: BLE001
                # It must not end the stream: the browser would connect again, and get the same message again.
                event(logging.ERROR, "stream.message_left_out", exc_info=True, topic=one.topic, offset=one.offset)
                data = None
            if data is None:
                return self._quiet()
            chunk = f"id: {one.offset}\ndata: {data}\n\n"
        self._heartbeat_at = time.monotonic() + self._view.heartbeat
        return chunk.encode()

    def close(self) -> None:
        """End the stream. Django calls this when the response has been sent, or the client has gone."""
        self._tail.close()
        self._leave()


class _Stream(_Chunks[Tail]):
    """The chunks of a stream under WSGI."""

    def __init__(self, view: TailView, request: TailRequest, token: object) -> None:
        super().__init__(view, Tail(request), token)

    def __iter__(self) -> Iterator[bytes]:
        return self

    def __next__(self) -> bytes:
        tail = self._tail
        try:
            if not self._has_begun:
                _close_connections()
                return self._first()
            while not self._is_over:
                chunk = self._event(next(tail)) if tail.wait(self._timeout) else self._quiet()
                if chunk:
                    return chunk
        except BaseException:
            self.close()
            raise
        self.close()
        raise StopIteration


class _AsyncStream(_Chunks[AsyncTail]):
    """The chunks of a stream under ASGI."""

    def __init__(self, view: TailView, request: TailRequest, token: object) -> None:
        super().__init__(view, AsyncTail(request), token)

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        tail = self._tail
        try:
            if not self._has_begun:
                await tail.start()
                await sync_to_async(_close_connections)()
                return self._first()
            while not self._is_over:
                chunk = self._event(await anext(tail)) if await tail.wait(self._timeout) else self._quiet()
                if chunk:
                    return chunk
        except BaseException:
            # Django does not close a response whose asynchronous iterator has raised.
            self.close()
            raise
        self.close()
        raise StopAsyncIteration


def _close_connections() -> None:
    """Close the request's connections: the stream needs none, and may last for minutes."""
    for connection in used_connections():
        if not connection.in_atomic_block:  # of a TestCase
            connection.close()


def _redacted(value: Any, *, topic: str, kind: str) -> Any:
    """Return a JSON value, redacted as text; a text that is no longer JSON becomes a string."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    found = redacted(text, topic=topic, kind=kind)
    if found == text:
        return value
    try:
        return json.loads(found)
    except ValueError:
        return found


def _integer(name: str, text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 20):
        raise ValueError(f"{name} {text!r}: must be an integer from 0 to 2**63 - 1")
    return int(text)


def _text(text: str, status: int) -> HttpResponse:
    return HttpResponse(f"{text}\n", status=status, content_type="text/plain; charset=utf-8")

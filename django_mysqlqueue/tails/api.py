"""``tail`` and ``atail``: read a topic without a consumer group."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from asgiref.sync import sync_to_async
from django.utils import timezone

from django_mysqlqueue import filter_policies
from django_mysqlqueue.exceptions import InvalidMessage
from django_mysqlqueue.filter_policies import FilterPolicy
from django_mysqlqueue.names.keys import check_key
from django_mysqlqueue.options.topics import check_subscribed_topic
from django_mysqlqueue.runtime.log import event
from django_mysqlqueue.service import log
from django_mysqlqueue.service.databases import queue_alias
from django_mysqlqueue.service.received import ReceivedMessage
from django_mysqlqueue.sql.session import Session
from django_mysqlqueue.tails.following import Follower, hub_of
from django_mysqlqueue.tails.reading import Event, Gap, position_since, read_newest, read_topic

NEWEST = 10
"""Number of messages without ``since``, ``offset``, ``follow`` and ``limit``."""
SEARCHED = 10_000
"""Number of a topic's newest messages in which those with a key, or that match a filter, are searched."""
SEARCHED_PAGES = 50
"""Number of pages of the log in which they are searched: of a topic with many partitions, a page can have none."""
LARGEST_OFFSET = 2**63 - 1
Since = float | datetime.timedelta | datetime.datetime


class TailRequest(NamedTuple):
    """The validated arguments of a tail."""

    topic: str
    since: int | datetime.datetime | None
    """Milliseconds before now, or a moment."""
    offset: int | None
    key: str | None
    where: FilterPolicy | None
    follow: bool
    limit: int | None
    using: str
    end: int | None = None
    """The end of the log, if it was read already."""

    @property
    def is_newest(self) -> bool:
        """Whether the newest messages are asked for."""
        return not self.follow and self.since is None and self.offset is None

    def start(self) -> int:
        """Return the position from which to read: the offset below the first one."""
        if self.offset is not None:
            return max(self.offset - 1, 0)
        session = Session(self.using)
        if self.since is None:
            return log.end_of_log(session)
        if isinstance(self.since, datetime.datetime):
            moment = round(self.since.timestamp() * 1000)
        else:
            moment = session.now() - self.since
        return position_since(session, self.topic, moment)

    def selects(self, one: Event) -> bool:
        """Return whether the reader gets an event. It gets every gap."""
        if isinstance(one, Gap):
            return True
        if self.key is not None and one.key != self.key:
            return False
        return self.where is None or self.where.matches(one.metadata)

    def newest(self, end: int) -> list[ReceivedMessage]:
        """Return the newest messages up to the end of the log, oldest first."""
        session, selected, searched = Session(self.using), list[ReceivedMessage](), 0
        wanted = NEWEST if self.limit is None else self.limit
        before: int | None = end + 1
        for _ in range(SEARCHED_PAGES):
            if before is None or len(selected) >= wanted or searched >= SEARCHED:
                break
            messages, before = read_newest(session, self.topic, self.key, before)
            searched += len(messages)
            selected += filter(self.selects, messages)
        return selected[:wanted][::-1]


def make_request(
    topic: object,
    *,
    since: object,
    offset: object,
    key: object,
    where: object,
    follow: bool,
    limit: object,
    using: str | None,
) -> TailRequest:
    """Return the validated arguments of ``tail``, which describes them.

    Raises:
        InvalidMessage: an argument is invalid. The text names the value and the rule.
    """
    if since is not None and offset is not None:
        raise InvalidMessage("since and offset were both given: pass one of them")
    if offset is not None and not _is_integer(offset, least=0):
        raise InvalidMessage(f"offset {offset!r}: must be an integer from 0 to 2**63 - 1")
    if limit is not None and not _is_integer(limit, least=1):
        raise InvalidMessage(f"limit {limit!r}: must be an integer of at least 1, or None")
    if where is not None and not isinstance(where, FilterPolicy):
        try:
            where = filter_policies.parse(where)
        except ValueError as error:
            raise InvalidMessage(f"where: {error}") from None
    name = check_subscribed_topic(topic)
    return TailRequest(
        name,
        _since(since),
        offset,  # type: ignore[arg-type]
        None if key is None else check_key(key),
        where,
        follow,
        limit,  # type: ignore[arg-type]
        queue_alias(using, topic=name),
    )


def _since(value: object) -> int | datetime.datetime | None:
    if value is None:
        return None
    if isinstance(value, datetime.datetime):
        if timezone.is_naive(value):
            raise InvalidMessage(f"since {value!r}: must be an aware datetime")
        return value
    seconds = value.total_seconds() if isinstance(value, datetime.timedelta) else value
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 0 <= seconds <= 1e10:
        raise InvalidMessage(
            f"since {value!r}: must be an aware datetime, or seconds or a timedelta, from 0 to 10**10 s"
        )
    return round(seconds * 1000)


def _is_integer(value: object, *, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= LARGEST_OFFSET


class BaseTail:
    """What ``Tail`` and ``AsyncTail`` have in common: the events that were read and not yet returned."""

    def __init__(self, request: TailRequest) -> None:
        self._request = request
        self._ready: deque[Event] = deque()
        self._left = request.limit
        """Number of messages until the limit; None without one."""
        self._position: int | None = None
        self._reported = 0
        """The end of the last gap."""
        self._end: int | None = None
        """The end of the log at the beginning, for a tail that ends there."""
        self._follower: Follower | None = None
        self._leave: Any = None
        self._closed = False

    @property
    def topic(self) -> str:
        """The topic."""
        return self._request.topic

    @property
    def position(self) -> int | None:
        """The offset up to which everything was returned or does not match. None before the start.

        To continue later, pass ``position + 1`` as ``offset``.
        """
        if self._ready:
            first = self._ready[0]
            return first.after if isinstance(first, Gap) else first.offset - 1
        return self._position if self._follower is None else self._follower.position

    @property
    def is_open(self) -> bool:
        """Whether there may be more: it was neither closed, nor has it returned as many messages as its limit."""
        return not self._closed and self._left != 0

    def _start(self, wake: Any) -> None:
        """Find the position from which to read. This queries the database."""
        if self._request.is_newest:
            self._position = self._end = log.end_of_log(Session(self._request.using))
            self._add(self._request.newest(self._end))
            return
        position, end = self._request.start(), self._request.end
        if end is None:
            # After the position, so that one above it is of a log that went back. The end is that of all topics.
            end = log.end_of_log(Session(self._request.using))
        if position > end:
            event(logging.WARNING, "log.truncated", tail=position)
            self._add([Gap(self._request.topic, end, position, truncated=True)])
            position = end
        self._position = position
        if self._request.follow:
            hub = hub_of(self._request.using)
            self._follower = hub.join(self._request.topic, self._request.key, position, wake, end=end)
            # Not a method of this object, which must not live on because somebody forgot to close it.
            self._leave = weakref.finalize(self, hub.leave, self._follower)
        else:
            self._end = end

    def _read_page(self) -> None:
        """Read the next page of a tail that does not follow. This queries the database."""
        assert self._position is not None  # noqa: S101  # it has started
        assert self._end is not None  # noqa: S101  # it does not follow
        page = read_topic(Session(self._request.using), self._request.topic, self._request.key, self._position)
        if page.collected > max(self._position, self._reported):
            self._reported = page.collected
            self._add([Gap(self._request.topic, self._position, page.collected)])
        self._add(one for one in page.messages if one.offset <= self._end)
        self._position = min(page.position, self._end)

    def _take(self) -> bool:
        """Take what the hub has for a tail that follows, and return whether something is ready. This does not wait."""
        assert self._follower is not None  # noqa: S101  # it follows
        while not self._ready and (events := self._follower.hub.take(self._follower)) is not None:
            # Others get the same messages, so each reader gets copies, which it may change.
            self._ready.extend(
                one if isinstance(one, Gap) else one.undecoded() for one in events if self._request.selects(one)
            )
        return bool(self._ready)

    def _add(self, events: Iterable[Event]) -> None:
        self._ready.extend(filter(self._request.selects, events))

    @property
    def _is_over(self) -> bool:
        """Whether there will be nothing more than what was read."""
        return self._closed or (self._end is not None and self._position is not None and self._position >= self._end)

    def _next(self) -> Event:
        one = self._ready.popleft()
        if self._left is not None and isinstance(one, ReceivedMessage):
            self._left -= 1
        return one

    def _stop(self) -> None:
        self._closed = True
        if self._leave is not None:
            self._leave()


class Tail(BaseTail):
    """An iterator over the messages of a topic, made by ``tail``. It yields ``ReceivedMessage`` and ``Gap``.

    Close it, or use it in a ``with`` statement, to stop following.
    """

    def __init__(self, request: TailRequest) -> None:
        super().__init__(request)
        self._woken = threading.Event()
        self._start(self._woken.set)

    def __iter__(self) -> Iterator[Event]:
        return self

    def __next__(self) -> Event:
        while self.is_open:
            if self._ready:
                return self._next()
            if self._follower is not None:
                self.wait(None)
            elif self._is_over:
                break
            else:
                self._read_page()
        self.close()
        raise StopIteration

    def wait(self, timeout: float | None) -> bool:
        """Wait until there is something to return. A tail that does not follow reads up to its end.

        Args:
            timeout: maximum number of seconds for a tail that follows; None: no limit.

        Returns:
            Whether there is.
        """
        if self._follower is None:
            while not self._ready and not self._is_over:
                self._read_page()
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self._ready:
            self._woken.clear()
            # After the clear: a close() in another thread is either seen here, or wakes.
            if not self.is_open or self._follower is None or self._take():
                break
            if not self._woken.wait(None if deadline is None else deadline - time.monotonic()):
                break
        return bool(self._ready) and self.is_open

    def close(self) -> None:
        """Stop. Calls of ``next()`` raise ``StopIteration``, in another thread too."""
        self._stop()
        self._woken.set()

    def __enter__(self) -> Tail:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class AsyncTail(BaseTail):
    """An asynchronous iterator over the messages of a topic, made by ``atail``.

    It yields ``ReceivedMessage`` and ``Gap``. Close it, or use it in an ``async with`` statement, to stop following.
    """

    def __init__(self, request: TailRequest) -> None:
        super().__init__(request)
        self._woken = asyncio.Event()
        self._starting = asyncio.Lock()

    def __aiter__(self) -> AsyncTail:
        return self

    async def __anext__(self) -> Event:
        while self.is_open:
            await self.start()
            if self._ready:
                return self._next()
            if self._follower is not None:
                await self.wait(None)
            elif self._is_over:
                break
            else:
                await sync_to_async(self._read_page)()
        self.close()
        raise StopAsyncIteration

    async def start(self) -> None:
        """Find the position from which to read, unless this was done before. The first iteration calls this."""
        async with self._starting:
            if self._position is not None or self._closed:
                return
            loop, woken = asyncio.get_running_loop(), self._woken

            def wake() -> None:
                with contextlib.suppress(RuntimeError):  # the loop has ended, and the tail with it
                    loop.call_soon_threadsafe(woken.set)

            await sync_to_async(self._start)(wake)
            if not self.is_open:  # any more
                self._stop()

    async def wait(self, timeout: float | None) -> bool:
        """Wait until there is something to return. A tail that does not follow reads up to its end.

        Args:
            timeout: maximum number of seconds for a tail that follows; None: no limit.

        Returns:
            Whether there is.
        """
        await self.start()
        if self._follower is None:
            while not self._ready and not self._is_over:
                await sync_to_async(self._read_page)()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                while self.is_open and not self._ready and self._follower is not None:
                    self._woken.clear()
                    if not self._take():
                        await self._woken.wait()
        return bool(self._ready) and self.is_open

    def close(self) -> None:
        """Stop. Iterations end, in another task too."""
        self._stop()
        self._woken.set()

    async def aclose(self) -> None:
        """Do the same as ``close``, for ``contextlib.aclosing``."""
        self.close()

    async def __aenter__(self) -> AsyncTail:
        await self.start()
        return self

    async def __aexit__(self, *error: object) -> None:
        self.close()


def tail(
    topic: str,
    *,
    since: Since | None = None,
    offset: int | None = None,
    key: str | None = None,
    where: Mapping[str, Any] | FilterPolicy | None = None,
    follow: bool = False,
    limit: int | None = None,
    using: str | None = None,
) -> Tail:
    """Read a topic without a consumer group: its newest messages, those since a time or offset, or the new ones.

    This only reads. It does not move messages from the outbox into the log, which subscribers do, and GC does not wait
    for it. If GC has deleted messages that would have been next, it yields a ``Gap`` in their place. It also yields one
    if the log ends below the offset with which to continue, because the database went back to an earlier state, and
    continues from that end.

    All tails of a process that follow share one thread and one connection, and read new messages once. They keep
    trying while the database does not answer or interrupts their statements. Without ``follow``, the tail reads on the
    caller's connection, up to the end that the log has now.

    Args:
        topic: the topic, which may be a DLQ topic.
        since: begin with the first message that entered the log at this time or later: an aware datetime, or a
            duration before now as a timedelta or in seconds.
        offset: begin with this offset; 0: with the oldest message. If it is more than one above the end of the log,
            that of all topics, the tail begins with a gap. Without ``since`` and ``offset``, a tail that follows begins
            with the next message; otherwise it returns the newest messages, as many as ``limit`` (default: 10).
        key: only messages that were published with this key. If ``PARTITIONS`` does not apply to the topic now,
            messages from a time when it did are not found.
        where: only messages whose metadata match: a filter as for subscriptions.
        follow: do not end at the end of the log, but wait for new messages.
        limit: maximum number of messages; None: no limit. Gaps do not count.
        using: alias of the queue's database (default: the one that the topic is in).

    Returns:
        An iterator over ``ReceivedMessage`` and ``Gap``, in the order of the log.

    Raises:
        InvalidMessage: an argument is invalid. The text names the value and the rule.
        django.db.Error: here or while reading, the database refuses or does not answer.
    """
    return Tail(
        make_request(topic, since=since, offset=offset, key=key, where=where, follow=follow, limit=limit, using=using)
    )


def atail(
    topic: str,
    *,
    since: Since | None = None,
    offset: int | None = None,
    key: str | None = None,
    where: Mapping[str, Any] | FilterPolicy | None = None,
    follow: bool = False,
    limit: int | None = None,
    using: str | None = None,
) -> AsyncTail:
    """Do the same as ``tail``, for ``async for``. It begins with the first iteration, or with ``await tail.start()``.

    Args:
        topic: the topic, which may be a DLQ topic.
        since: begin with the first message that entered the log at this time or later.
        offset: begin with this offset.
        key: only messages that were published with this key.
        where: only messages whose metadata match.
        follow: do not end at the end of the log, but wait for new messages.
        limit: maximum number of messages.
        using: alias of the queue's database.

    Returns:
        An asynchronous iterator over ``ReceivedMessage`` and ``Gap``, in the order of the log.

    Raises:
        InvalidMessage: an argument is invalid. The text names the value and the rule.
        django.db.Error: while reading, the database refuses or does not answer.
    """
    return AsyncTail(
        make_request(topic, since=since, offset=offset, key=key, where=where, follow=follow, limit=limit, using=using)
    )

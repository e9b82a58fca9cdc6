"""Followers of the log's end: all of a process share one thread, one connection and one read of new messages.

The hub keeps the newest messages of each topic that is followed. A follower has a position, and takes what is above it.
If that is older than what the hub keeps, because it begins in the past or is slow, the hub reads a page for it alone.
Followers do not touch the database, so threads and event loops can both follow.
"""

from __future__ import annotations

import bisect
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from django.db import Error, connections

from django_mysqlqueue.options.backoff import Backoff, Failures
from django_mysqlqueue.options.conf import get_settings
from django_mysqlqueue.runtime import sessions
from django_mysqlqueue.runtime.log import error_line, event, failing
from django_mysqlqueue.runtime.threads import about
from django_mysqlqueue.service import log
from django_mysqlqueue.sql import failures
from django_mysqlqueue.sql.connection import READ_SECONDS, close_connections, drop_connection, forget_queries
from django_mysqlqueue.sql.session import Session
from django_mysqlqueue.tails.reading import LIMITS, Event, Gap, Page, PageLimits, read_topic, read_topics

RETRY = Backoff(initial=0.1, maximum=5.0, jitter=0.2)
"""The pause after an error of the database."""
IDLE_SECONDS = 60.0
"""Seconds after which the server may close the hub's connection, because its process has frozen."""
OUTAGES = frozenset({"no_answer", "too_many_connections", "busy", "interrupted"})
"""Kinds of errors after which the hub tries again. Any other error is raised where messages are read."""


@dataclass(frozen=True, slots=True)
class HubLimits:
    """Limits of a hub."""

    page: PageLimits = LIMITS
    """Limits of one read."""
    window_messages: int = 1000
    """Maximum number of messages that it keeps of a topic."""
    window_bytes: int = 8_388_608
    """Maximum size of the payloads that it keeps of a topic; the newest message is kept regardless."""
    linger: float = 5.0
    """Seconds without followers after which its thread and its connection end."""


@dataclass(slots=True, eq=False)
class Follower:
    """A reader of one topic, made by ``Hub.join``."""

    hub: Hub
    topic: str
    key: str | None
    position: int
    """The offset up to which everything was taken."""
    wake: Callable[[], object]
    reported: int = 0
    """The end of the last gap that was taken."""
    truncated: Gap | None = None
    """What the log has lost of what was taken."""
    page: Page | None = None
    """A page that the hub has read for this follower."""
    is_behind: bool = False
    """Whether it waits for such a page."""
    has_left: bool = False
    error: BaseException | None = None


class _Window:
    """The newest messages and gaps of a topic, and its followers."""

    def __init__(self, topic: str, begin: int) -> None:
        self.topic = topic
        self.followers: set[Follower] = set()
        self.restart(begin)

    def restart(self, begin: int) -> None:
        """Empty the window: it begins at an offset, because it has missed something before that."""
        self._begin = begin
        """The offset above which the window has everything."""
        self._gap: Gap | None = None
        """The last gap."""
        self._size = 0
        """Size of the payloads in bytes."""
        self._events: list[Event] = []
        self._places: list[int] = []
        """The offset of each event. That of a gap is one above the position before it."""

    def after(self, position: int) -> list[Event] | None:
        """Return what is above a position, or None if the window does not have all of it any more."""
        if position < self._begin:
            return None
        events = self._events[bisect.bisect_right(self._places, position) :]
        gap = self._gap
        if gap is not None and gap.after < position < gap.until:
            # The follower was ahead of the hub, so the gap begins below its position.
            events.insert(0, Gap(self.topic, position, gap.until))
        return events

    def extend(self, position: int, page: Page, limits: HubLimits) -> bool:
        """Add what was read above a position, and return whether there was anything."""
        before = len(self._events)
        if page.collected > max(position, 0 if self._gap is None else self._gap.until):
            self._gap = Gap(self.topic, position, page.collected)
            self._add(position + 1, self._gap)
        for message in page.messages:
            self._add(message.offset, message)
        has_grown = len(self._events) > before
        drop = 0
        while drop < len(self._events) - 1 and (
            len(self._events) - drop > limits.window_messages or self._size > limits.window_bytes
        ):
            self._size -= _size_of(self._events[drop])
            drop += 1
        if drop:
            self._begin = self._places[drop - 1]
            del self._events[:drop], self._places[:drop]
        return has_grown

    def _add(self, place: int, one: Event) -> None:
        self._events.append(one)
        self._places.append(place)
        self._size += _size_of(one)


def _size_of(one: Event) -> int:
    return 0 if isinstance(one, Gap) else len(one.body)


class Hub:
    """Reads the log for all followers of a process, on a thread that runs as long as there are followers.

    Args:
        using: alias of the queue's database.
        limits: its limits.
    """

    def __init__(self, using: str, limits: HubLimits | None = None) -> None:
        self.using = using
        self._limits = limits or HubLimits()
        self._leaving: deque[Follower] = deque()
        """Followers that have left, and that the thread has not removed yet."""
        self._changed = threading.Condition()
        """Guards everything below. It is never held during a statement."""
        self._windows: dict[str, _Window] = {}
        self._behind: deque[Follower] = deque()
        """Followers that wait for a page of their own."""
        self._position: int | None = None
        """The offset up to which the windows were read; None before the first read."""
        self._thread: threading.Thread | None = None

    # -- for followers --------------------------------------------------------

    def join(self, topic: str, key: str | None, position: int, wake: Callable[[], object], *, end: int) -> Follower:
        """Add a follower, and start the thread if it does not run.

        ``key``: a key with which pages of the past are searched, or None. New messages are not selected by it.
        ``wake``: called by the hub's thread when there may be something to take. It must neither block nor raise.
        """
        follower = Follower(self, topic, key, position, wake)
        with self._changed:
            if self._thread is None:
                name = f"mysqlqueue-tails-{self.using}"
                thread = threading.Thread(target=self._run, name=name, daemon=True)
                thread.start()  # It may fail. Otherwise it waits for the lock.
                self._thread = thread
            if self._position is None:
                self._position = end
            window = self._windows.get(topic)
            if window is None:
                window = self._windows[topic] = _Window(topic, self._position)
            window.followers.add(follower)
            self._changed.notify()
        return follower

    def leave(self, follower: Follower) -> None:
        """Remove a follower. This takes no lock: the garbage collector may call it at any instruction of any thread."""
        follower.has_left, follower.page = True, None
        self._leaving.append(follower)

    def take(self, follower: Follower) -> list[Event] | None:
        """Return what follows a follower's position, and move the position past it. This neither queries nor waits.

        Returns:
            Messages and gaps, which may be none, in which case there may be more; None if there is nothing now: the
            follower is woken when there may be something.

        Raises:
            BaseException: what the thread failed with.
        """
        with self._changed:
            if follower.error is not None:
                raise follower.error
            if follower.has_left:
                return None
            if follower.truncated is not None:
                gap, follower.truncated = follower.truncated, None
                return [gap]
            if follower.page is not None:
                return self._take_page(follower, follower.page)
            events = self._windows[follower.topic].after(follower.position)
            if events is None:
                if not follower.is_behind:
                    follower.is_behind = True
                    self._behind.append(follower)
                    self._changed.notify()
                return None
            assert self._position is not None  # noqa: S101  # the window has a beginning
            follower.position = max(follower.position, self._position)
            return [one for one in events if not self._is_known(follower, one)] or None

    def _take_page(self, follower: Follower, page: Page) -> list[Event]:
        events: list[Event] = list(page.messages)
        gap = Gap(follower.topic, follower.position, page.collected)
        if gap.until > gap.after and not self._is_known(follower, gap):
            events.insert(0, gap)
        follower.position, follower.page = page.position, None
        return events

    @staticmethod
    def _is_known(follower: Follower, one: Event) -> bool:
        """Return whether it is a gap that the follower has seen, and note it otherwise."""
        if not isinstance(one, Gap):
            return False
        is_known = one.until <= follower.reported
        follower.reported = max(follower.reported, one.until)
        return is_known

    # -- the thread -----------------------------------------------------------

    def _run(self) -> None:
        try:
            sessions.adopt(
                self.using, sessions.Timeouts(idle=IDLE_SECONDS, lock_wait=2, network=READ_SECONDS, read=READ_SECONDS)
            )
            with about(self.using):
                self._loop()
        except BaseException as error:  # noqa: BLE001  # raised where messages are read
            self._fail(error)
        finally:
            close_connections()

    def _loop(self) -> None:
        settings = get_settings()
        # As subscribers poll: often while messages come, then more and more seldom.
        pace = Backoff(settings.poll_interval, 1.5, max(settings.poll_interval, settings.max_poll_interval), jitter=0.1)
        quiet, outage, next_poll = 0, Failures(RETRY), 0.0
        while (due := self._wait(next_poll)) is not None:
            try:
                if due:
                    quiet = 0 if self._poll() else quiet + 1
                    next_poll = time.monotonic() + (0.0 if not quiet else pace.delay(quiet))
                self._read_page()
            except Error as error:
                if failures.kind_of(self.using, error) not in OUTAGES:
                    raise
                pause = outage.add()
                failing(logging.WARNING, "tails.failed", error=error_line(error), failures=outage.count)
                drop_connection(connections[self.using])
                next_poll = time.monotonic() + pause
                time.sleep(pause)
            else:
                forget_queries(connections[self.using])
                if count := outage.clear():
                    event(logging.INFO, "tails.recovered", failures=count)

    def _wait(self, next_poll: float) -> bool | None:
        """Wait until there is something to do.

        Returns:
            Whether a poll is due; None if there were no followers for a while: the thread has ended.
        """
        deserted_at: float | None = None
        with self._changed:
            while True:
                now = time.monotonic()
                self._remove_followers()
                if self._windows:
                    deserted_at = None
                    if now >= next_poll:
                        return True
                    if self._behind:
                        return False
                    self._changed.wait(next_poll - now)
                    continue
                deserted_at = now if deserted_at is None else deserted_at
                if now >= deserted_at + self._limits.linger:
                    self._thread, self._position = None, None
                    self._behind.clear()
                    return None
                self._changed.wait(deserted_at + self._limits.linger - now)

    def _poll(self) -> bool:
        """Read new messages of all topics that are followed, and return whether the log has grown."""
        session = Session(self.using)
        with self._changed:
            position, topics = self._position, list(self._windows)
            assert position is not None  # noqa: S101  # the first follower has brought it
            # Those that have joined since the last poll may be ahead of the hub.
            followers = [one for window in self._windows.values() for one in window.followers]
            read = max(position, *(one.position for one in followers))
        end = log.end_of_log(session)
        if end < read:
            event(logging.WARNING, "log.truncated", tail=read)
            self._go_back(min(position, end), end, followers)
            return False
        if end == position:
            return False
        pages = read_topics(session, topics, position, end, self._limits.page)
        woken: list[Follower] = []
        with self._changed:
            self._position = next((page.position for page in pages.values()), end)
            for topic, window in self._windows.items():
                if topic not in pages:  # its first follower has joined in the meantime
                    window.restart(self._position)
                    woken += window.followers
                elif window.extend(position, pages[topic], self._limits):
                    woken += window.followers
        for follower in woken:
            follower.wake()
        return True

    def _remove_followers(self) -> None:
        while self._leaving:
            follower = self._leaving.popleft()
            window = self._windows.get(follower.topic)
            if window is not None:
                window.followers.discard(follower)
                if not window.followers:
                    del self._windows[follower.topic]

    def _go_back(self, position: int, end: int, followers: Iterable[Follower]) -> None:
        """Follow a log that has lost its end, for example in a failover: its offsets are assigned again."""
        with self._changed:
            self._position = position
            for window in self._windows.values():
                window.restart(position)
            ahead = [one for one in followers if one.position > end]
            for follower in followers:
                follower.page, follower.reported = None, min(follower.reported, end)
            for follower in ahead:
                lost = follower.position if follower.truncated is None else follower.truncated.until
                follower.truncated = Gap(follower.topic, end, lost, truncated=True)
                follower.position = end
        for follower in ahead:
            follower.wake()

    def _read_page(self) -> None:
        """Read a page for the follower that has been behind for the longest time. The others wait for their turn."""
        with self._changed:
            if not self._behind:
                return
            follower = self._behind[0]
            # If reading fails, the next one is tried next.
            self._behind.rotate(-1)
        page = None
        if not follower.has_left:
            session = Session(self.using)
            page = read_topic(session, follower.topic, follower.key, follower.position, self._limits.page)
        with self._changed:
            self._behind.remove(follower)
            follower.page, follower.is_behind = page, False
        follower.wake()

    def abandon(self) -> None:
        """Leave it to the parent, in a child that was forked: the thread is not here, and may have held the lock."""
        self._changed = threading.Condition()
        self._fail(RuntimeError("The process has forked. Call tail() again in the child."))

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            followers = [follower for window in self._windows.values() for follower in window.followers]
            for follower in followers:
                follower.error = error
            self._windows.clear()
            self._behind.clear()
            self._thread, self._position = None, None
        for follower in followers:
            follower.wake()


# -- the hubs of this process -----------------------------------------------------

_hubs: dict[str, Hub] = {}
_lock = threading.Lock()


def hub_of(using: str) -> Hub:
    """Return the hub of this process for a database."""
    with _lock:
        if using not in _hubs:
            _hubs[using] = Hub(using)
        return _hubs[using]


def _forget() -> None:
    global _lock
    _lock = threading.Lock()
    for hub in _hubs.values():
        hub.abandon()
    _hubs.clear()


os.register_at_fork(after_in_child=_forget)

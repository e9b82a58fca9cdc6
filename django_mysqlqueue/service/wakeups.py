"""Those who wait for a commit are woken by it: in the process that commits, and in the others of its host."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from django.db import transaction

from django_mysqlqueue.options.conf import get_settings
from django_mysqlqueue.service import bell, remote_bell
from django_mysqlqueue.sql.connection import last_commit_hook, tells_commit
from django_mysqlqueue.sql.session import Session

RESULTS = ":results"
"""What those listen for who wait for the end of a job. No topic has this name."""

eager: Callable[[str], None] | None = None
"""A function that delivers in the publisher's thread if the setting ``EAGER`` is on. Set by the app."""

_here: dict[str, list[Listening]] = {}
"""Those who listen in this process, by alias."""


class Listening:
    """Call ``wake`` after every commit with messages of some topics, until it is stopped.

    Args:
        using: alias of the queue's database.
        topics: the topics, or ``RESULTS``.
        wake: called in the thread that commits, or in one of its own. It must neither block nor raise.
    """

    def __init__(self, using: str, topics: Iterable[str], wake: Callable[[], object]) -> None:
        self.using = using
        self.topics = frozenset(topics)
        self.wake = wake
        self.bell: bell.Listener | None = None
        """What other processes of this host ring; None if they cannot."""
        self.reason = ""
        """Why they cannot; empty if the setting says so."""
        self.check()
        _here.setdefault(using, []).append(self)

    def check(self) -> bool:
        """Listen for other processes, again if somebody has removed the socket; return whether it was removed."""
        if self.bell is not None and self.bell.is_reachable():
            return False
        was_removed = self.bell is not None
        if self.bell is not None:
            self.bell.stop()
            self.bell = None
        if get_settings().bell is not None:
            try:
                self.bell, self.reason = bell.Listener(self.using, self.topics, self.wake), ""
            except bell.Unavailable as error:
                self.reason = str(error)
        return was_removed

    def stop(self) -> None:
        """Listen no longer."""
        _here[self.using].remove(self)
        if self.bell is not None:
            self.bell.stop()


def has_listeners(using: str, topic: str) -> bool:
    """Return whether anybody in this process, or on this host, listens for a topic, or on other hosts may do."""
    if any(topic in one.topics for one in _here.get(using, ())) or bell.listeners(using, topic):
        return True
    return topic != RESULTS and remote_bell.is_on()


def notify(using: str, topics: Iterable[str]) -> None:
    """Wake all that listen for one of some topics."""
    topics = set(topics)
    for listening in list(_here.get(using, ())):
        if not listening.topics.isdisjoint(topics):
            listening.wake()
    bell.ring(using, topics)
    remote_bell.ring(using, topics - {RESULTS})


def notify_on_commit(session: Session, topic: str) -> None:
    """Wake all that listen for a topic when the open transaction commits, if it does: one hook for a transaction."""
    if not has_listeners(session.using, topic) or not tells_commit(session.connection):
        return  # With autocommit off, Django cannot tell when the caller commits: the next poll finds the message.
    hook = last_commit_hook(session.connection)
    if isinstance(hook, _Notify):
        hook.topics.add(topic)
    else:
        transaction.on_commit(_Notify(session.using, {topic}), using=session.using, robust=True)


class _Notify:
    def __init__(self, using: str, topics: set[str]) -> None:
        self._using = using
        self.topics = topics
        self.__qualname__ = "notify"  # Django logs the name of a robust hook that fails.

    def __call__(self) -> None:
        notify(self._using, self.topics)

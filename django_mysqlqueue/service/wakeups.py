"""Subscribers are woken when a transaction with messages has committed: those of this process, and of this host."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from django.db import transaction

from django_mysqlqueue.service import bell
from django_mysqlqueue.sql.connection import last_commit_hook, tells_commit
from django_mysqlqueue.sql.session import Session

eager: Callable[[str], None] | None = None
"""A function that delivers in the publisher's thread if the setting ``EAGER`` is on. Set by the app."""

_listeners: dict[str, list[tuple[frozenset[str], Callable[[], None]]]] = {}
"""Those of this process, by alias: the topics for which they listen."""


def listen(using: str, topics: Iterable[str], wake: Callable[[], None]) -> Callable[[], None]:
    """Call ``wake`` after every commit of this process with messages of some topics, until the result is called."""
    listener = (frozenset(topics), wake)
    _listeners.setdefault(using, []).append(listener)

    def stop() -> None:
        _listeners[using].remove(listener)

    return stop


def has_listeners(using: str, topic: str) -> bool:
    """Return whether anybody in this process, or on this host, listens for messages of a topic."""
    return any(topic in topics for topics, _ in _listeners.get(using, ())) or bool(bell.listeners(using, topic))


def notify(using: str, topics: Iterable[str]) -> None:
    """Wake all that listen for one of some topics."""
    topics = set(topics)
    for wanted, wake in list(_listeners.get(using, ())):
        if not wanted.isdisjoint(topics):
            wake()
    sockets = {socket for topic in topics for socket in bell.listeners(using, topic)}
    if sockets:
        bell.ring(sockets)


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

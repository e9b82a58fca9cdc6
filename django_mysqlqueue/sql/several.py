"""Reading several databases at once, so that one that is down or slow delays the others by a bounded time only."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from django.db import Error
from django.utils import timezone, translation

from django_mysqlqueue.sql import failures
from django_mysqlqueue.sql.connection import bounded, close_connections, may_be_bounded

ANSWER_SECONDS = 4.0
"""Seconds for which each database is waited for: until it is connected, and for the answer to each statement."""
TOTAL_SECONDS = 8.0
"""Seconds for which all of them together are waited for."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Unread:
    """A database that refused or did not answer."""

    reason: str
    """A sentence that names the database."""


def read_each(databases: Sequence[str], read: Callable[[str], T]) -> dict[str, T | Unread]:
    """Read several databases, and return by alias what was read of each, or why it could not be.

    Each server is read in a thread of its own, which closes its connections; language and time zone are the caller's.
    A server that is stopped (SIGSTOP, a hung disk, packets that are dropped) is given up after ``ANSWER_SECONDS``, and
    one that answers each statement slowly after ``TOTAL_SECONDS``: the call takes no longer than that, no matter how
    many databases are down. ``OPTIONS`` with longer time limits can keep such a thread waiting, but not the caller.

    One database alone is read in the caller's thread, within the usual limits of ``bounded``. SQLite, and databases
    inside a ``TestCase``, whose transaction other threads do not see, are read there too, one after the other.

    Args:
        databases: their aliases.
        read: a function of an alias. It must not use what belongs to the caller's thread: Django's ``reverse`` needs
            the prefix of the request's script there, for example.

    Raises:
        Exception: ``read`` has raised it for one of them, and it is not an error of a database that refuses or does
            not answer.
    """
    if len(databases) == 1:
        with bounded(databases[0]):
            return {databases[0]: _read(databases[0], read)}
    threads = [_Reading(alias, read) for alias in databases if may_be_bounded(alias)]
    until = time.monotonic() + TOTAL_SECONDS
    for thread in threads:
        thread.start()
    found: dict[str, T | Unread] = {}
    for alias in databases:
        if not may_be_bounded(alias):
            found[alias] = _read(alias, read)
    for thread in threads:
        found[thread.alias] = thread.result(until)
    return {alias: found[alias] for alias in databases}


def _read(alias: str, read: Callable[[str], T]) -> T | Unread:
    try:
        return read(alias)
    except Error as error:
        if failures.kind_of(alias, error) is None:
            raise
        return Unread(failures.explain(alias, error))


class _Reading(threading.Thread, Generic[T]):
    """The reading of one database. Nothing waits for it when the process ends."""

    def __init__(self, alias: str, read: Callable[[str], T]) -> None:
        super().__init__(name=f"mysqlqueue-read-{alias}", daemon=True)
        self.alias = alias
        self._function = read
        self._language, self._zone = translation.get_language(), timezone.get_current_timezone()
        self._found: list[T | Unread] = []
        self._error: Exception | None = None

    def run(self) -> None:
        try:
            with (
                translation.override(self._language),
                timezone.override(self._zone),
                bounded(self.alias, read=ANSWER_SECONDS, connect=ANSWER_SECONDS),
            ):
                self._found.append(_read(self.alias, self._function))
        except Exception as error:  # noqa: BLE001  # The caller raises it.
            self._error = error
        finally:
            close_connections()

    def result(self, until: float) -> T | Unread:
        """Wait for the thread's end, but no longer than until a time of the monotonic clock."""
        self.join(max(0.0, until - time.monotonic()))
        if self.is_alive():
            return Unread(failures.explain_silence(self.alias, TOTAL_SECONDS))
        if self._error is not None:
            raise self._error
        return self._found[0]

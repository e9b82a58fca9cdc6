"""Reading several databases at once, so that one that is down or slow delays the others by a bounded time only."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import NamedTuple, TypeVar

from django.db import Error
from django.utils import timezone, translation

from django_mysqlqueue.sql import failures
from django_mysqlqueue.sql.connection import (
    CONNECT_SECONDS,
    READ_SECONDS,
    bounded,
    close_connections,
    may_be_bounded,
)

ANSWER_SECONDS = 4.0
"""Seconds for which each database is waited for: until it is connected, and for the answer to each statement."""
TOTAL_SECONDS = 8.0
"""Seconds for which all of them together are waited for."""

T = TypeVar("T")


class Unread(NamedTuple):
    """A database that refused or did not answer."""

    reason: str
    """A sentence that names the database."""


def read_each(
    databases: Sequence[str], read: Callable[[str], T], *, within: float | None = None
) -> dict[str, T | Unread]:
    """Read several databases, and return by alias what was read of each, or why it could not be.

    Each server is read in a thread of its own, which closes its connections; language and time zone are the caller's.
    A server that is stopped (SIGSTOP, a hung disk, packets that are dropped) is given up after ``ANSWER_SECONDS``, and
    one that answers each statement slowly after ``TOTAL_SECONDS``: the call takes no longer than that, no matter how
    many databases are down. ``OPTIONS`` with longer time limits can keep such a thread waiting, but not the caller.

    Without ``within``, one database alone is read in the caller's thread, within the usual limits of ``bounded``.
    SQLite, and databases inside a ``TestCase``, whose transaction other threads do not see, are read there too, one
    after the other.

    ``read``: a function of an alias. It must not use what belongs to the caller's thread: Django's ``reverse`` needs
    the prefix of the request's script there, for example. ``within``: seconds to wait for each answer and for all
    databases together, instead of the two limits; for one database too.

    Raises:
        Exception: ``read`` has raised it for one of them, and it is not an error of a database that refuses or does
            not answer.
    """
    if len(databases) == 1 and within is None:
        with bounded(databases[0]):
            return {databases[0]: _read(databases[0], read)}
    seconds, total = (ANSWER_SECONDS, TOTAL_SECONDS) if within is None else (within, within)
    until = time.monotonic() + total
    started = start_each(databases, lambda alias: _read(alias, read), seconds=seconds, connect=seconds)
    found: dict[str, T | Unread] = {}
    for alias, answer in started.items():
        try:
            found[alias] = answer.result(max(0.0, until - time.monotonic()))
        except TimeoutError:
            if answer.done():
                raise  # by the function
            found[alias] = Unread(failures.explain_silence(alias, total))
    return found


def start_each(
    databases: Sequence[str],
    read: Callable[[str], T],
    *,
    seconds: float = READ_SECONDS,
    connect: float = CONNECT_SECONDS,
) -> dict[str, Future[T]]:
    """Start to read several databases, and return by alias what will be read of each.

    The threads are those of ``read_each``, but the caller says how long each waits, and decides how long to wait for
    each. What is read in the caller's thread has been read at the return.

    ``read``: as for ``read_each``. What it raises is raised by ``result()``. ``seconds``: seconds to wait for each
    answer, unless ``OPTIONS`` sets another value.
    """
    language, zone = translation.get_language(), timezone.get_current_timezone()

    def read_apart(alias: str) -> T:
        try:
            with (
                translation.override(language),
                timezone.override(zone),
                bounded(alias, read=seconds, connect=connect),
            ):
                return read(alias)
        finally:
            close_connections()

    found: dict[str, Future[T]] = {alias: Future() for alias in databases}
    for alias in filter(may_be_bounded, databases):
        # A daemon: nothing waits for it when the process ends.
        name = f"mysqlqueue-read-{alias}"
        threading.Thread(target=_fulfil, args=(found[alias], read_apart, alias), name=name, daemon=True).start()
    for alias in databases:
        if not may_be_bounded(alias):
            _fulfil(found[alias], read, alias)
    return found


def _fulfil(future: Future[T], read: Callable[[str], T], alias: str) -> None:
    try:
        value = read(alias)
    except BaseException as error:  # noqa: BLE001  # raised where the result is taken
        future.set_exception(error)
    else:
        future.set_result(value)


def _read(alias: str, read: Callable[[str], T]) -> T | Unread:
    try:
        return read(alias)
    except Error as error:
        if failures.kind_of(alias, error) is None:
            raise
        return Unread(failures.explain(alias, error))

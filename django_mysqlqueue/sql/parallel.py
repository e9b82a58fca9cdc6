"""Read several databases at the same time, so that one that does not answer does not delay the others."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import TypeVar

from django.db import connections

from django_mysqlqueue.sql.connection import READ_SECONDS, bounded, close_connections, in_testcase, is_server

T = TypeVar("T")


def read_each(
    aliases: Sequence[str], read: Callable[[str], T], *, seconds: float = READ_SECONDS
) -> Iterator[tuple[str, Future[T]]]:
    """Call a function for each database, in a thread and on a connection of its own, and yield the results.

    All threads start at the first step, and the results come in the order of the aliases. Where there is no server to
    wait for (SQLite), and inside a ``TestCase``, whose transaction no other connection sees, the function runs in the
    calling thread.

    Args:
        aliases: the aliases of the databases.
        read: called with an alias. In its thread, it has the caller's context (language, time zone).
        seconds: seconds to wait for each answer of a server, unless ``OPTIONS`` sets another value.
    """
    started = {alias: _start(alias, read, seconds) for alias in aliases if _has_server(alias)}
    for alias in aliases:
        future = started.get(alias)
        if future is None:
            future = Future()
            _run(future, read, alias)
        yield alias, future


def _has_server(alias: str) -> bool:
    connection = connections[alias]
    return is_server(connection) and not in_testcase(connection)


def _start(alias: str, read: Callable[[str], T], seconds: float) -> Future[T]:
    future: Future[T] = Future()

    def read_bounded(alias: str) -> T:
        with bounded(alias, read=seconds):
            return read(alias)

    def work() -> None:
        try:
            _run(future, read_bounded, alias)
        finally:
            close_connections()

    # A daemon: after Ctrl+C, the process must not wait for a server that does not answer.
    thread = threading.Thread(
        target=contextvars.copy_context().run, args=(work,), name=f"mysqlqueue-read-{alias}", daemon=True
    )
    thread.start()
    return future


def _run(future: Future[T], read: Callable[[str], T], alias: str) -> None:
    try:
        value = read(alias)
    except BaseException as error:  # noqa: BLE001  # raised where the result is taken
        future.set_exception(error)
    else:
        future.set_result(value)

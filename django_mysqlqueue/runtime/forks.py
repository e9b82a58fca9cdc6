"""A handler that forks: the child must not end, or talk on, the sessions of its parent.

It has all their sockets. Python forgets the other threads in a child and frees
their connections, and a driver says goodbye to the server when one is freed:
measured, it ended the sessions of every other thread of the parent.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import traceback
import weakref
from typing import Any, NoReturn

from django.db import connections
from django.db.backends.signals import connection_created

from django_mysqlqueue.sql.connection import detach

_open: dict[int, weakref.ref[Any]] = {}
"""Connections of the driver, of all threads."""
_forking = threading.local()
_inherited: list[Any] = []
"""In a child: its parent's, kept until it ends by ``os._exit``, which frees nothing."""


def _remember(*, connection: Any, **kwargs: Any) -> None:
    raw = connection.connection
    # SQLite's cannot be referred to weakly, and has no session to end.
    with contextlib.suppress(TypeError):
        _open[id(raw)] = weakref.ref(raw, functools.partial(_forget, id(raw)))


def _forget(number: int, reference: object) -> None:
    _open.pop(number, None)


connection_created.connect(_remember, dispatch_uid="django_mysqlqueue.runtime.forks")


@functools.cache
def guard() -> None:
    """From now on a child of this process leaves the sessions of its parent alone."""
    os.register_at_fork(before=_keep, after_in_parent=_let_go, after_in_child=_detach)


def _keep() -> None:
    _forking.kept = [reference() for reference in list(_open.values())]


def _let_go() -> None:
    _forking.kept = []


def _detach() -> None:
    """The child connects anew, outside its parent's transaction, as one that was not forked would."""
    _inherited.extend(_forking.kept)
    _inherited.extend(detach(connection) for connection in connections.all(initialized_only=True))


def leave(error: BaseException | None = None) -> NoReturn:
    """Ends a child that has come back out of the handler, as ``sys.exit`` or an error would have."""
    status = 0 if error is None else 1
    if isinstance(error, SystemExit):
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
    elif error is not None:
        # Not through sys.stderr: at the fork another thread may have held its lock.
        with contextlib.suppress(OSError):
            os.write(2, "".join(traceback.format_exception(error)).encode(errors="backslashreplace"))
    os._exit(status & 0xFF)

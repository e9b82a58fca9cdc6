"""Protection for handlers that fork: the child must neither use nor end the database sessions of its parent.

The child inherits all their sockets. In the child, Python drops the other threads and frees their connections, and a
driver that frees a connection tells the server to end its session. In a test this ended the sessions of all other
threads of the parent.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import traceback
import weakref
from typing import Any, NoReturn

from django.db.backends.signals import connection_created

from django_mysqlqueue.sql.connection import detach, used_connections

_open: dict[int, weakref.ref[Any]] = {}
"""The driver's connections of all threads."""
_forking = threading.local()
_inherited: list[Any] = []
"""In a child, the parent's connections: kept until the child ends by ``os._exit``, which frees nothing."""


def _remember(*, connection: Any, **kwargs: Any) -> None:
    raw = connection.connection
    # SQLite's connections allow no weak references, and have no session to end.
    with contextlib.suppress(TypeError):
        _open[id(raw)] = weakref.ref(raw, functools.partial(_forget, id(raw)))


def _forget(number: int, reference: object) -> None:
    _open.pop(number, None)


connection_created.connect(_remember, dispatch_uid="django_mysqlqueue.runtime.forks")


@functools.cache
def guard() -> None:
    """From now on, make children of this process leave the sessions of their parent alone."""
    os.register_at_fork(before=_keep, after_in_parent=_release, after_in_child=_detach)


def _keep() -> None:
    _forking.kept = [reference() for reference in list(_open.values())]


def _release() -> None:
    _forking.kept = []


def _detach() -> None:
    """Make the child open connections of its own, outside its parent's transaction."""
    _inherited.extend(_forking.kept)
    _inherited.extend(detach(connection) for connection in used_connections())


def leave(error: BaseException | None = None) -> NoReturn:
    """End a child in which the handler has returned or raised, with the status that a script would have.

    ``error``: the exception that the handler raised, or None.
    """
    status = 0 if error is None else 1
    if isinstance(error, SystemExit):
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
    elif error is not None:
        # Not through sys.stderr: another thread may have held its lock at the time of the fork.
        with contextlib.suppress(OSError):
            os.write(2, "".join(traceback.format_exception(error)).encode(errors="backslashreplace"))
    os._exit(status & 0xFF)

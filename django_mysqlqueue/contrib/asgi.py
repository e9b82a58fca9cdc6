"""An ASGI application with subscribers beside the server, in child processes of one of its workers.

In ``asgi.py``: ``application = with_subscriber(get_asgi_application())``
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import os
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from pathlib import Path
from typing import Any

from django.core.exceptions import ImproperlyConfigured

from django_mysqlqueue.options.conf import BellSettings, get_settings
from django_mysqlqueue.runtime.process import keeper
from django_mysqlqueue.service import bell

TURN = 1.0
"""Seconds after which a worker of the server looks whether it is the one to keep the subscribers."""
END_TURN = 0.1
PAUSE = 30.0
"""Seconds after which a start is repeated that the system has refused."""

Event = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Event]]
Send = Callable[[Event], Awaitable[None]]
Application = Callable[[Event, Receive, Send], Awaitable[None]]


def with_subscriber(application: Application, *arguments: str, manage: str = "manage.py") -> Application:
    """Return an application that runs subscribers for as long as the server runs.

    The server must send lifespan events, as uvicorn and hypercorn do; the application does not get them. If the server
    has several workers, only one of them has subscribers, and another one takes over if it ends: one for all servers of
    the project on the host. If the process of the subscribers ends, it is started again after a pause. If the server is
    killed, they stop.

    Args:
        application: the project's application.
        arguments: the arguments of ``manage.py runsubscriber`` (default: ``--processes=1``).
        manage: path of ``manage.py`` (default: in the folder that the server runs in).

    Raises:
        FileNotFoundError: there is no such file.
    """
    command = keeper.command_line(arguments, manage=manage)

    async def wrapped(scope: Event, receive: Receive, send: Send) -> None:
        if scope["type"] != "lifespan":
            await application(scope, receive, send)
            return
        await receive()
        try:
            lock = _open_lock(command)
        except (ImproperlyConfigured, bell.Unavailable, OSError) as error:
            await send({"type": "lifespan.startup.failed", "message": f"The subscriber cannot be started: {error}"})
            return
        try:
            keeping = asyncio.create_task(_keep(command, lock))
            await send({"type": "lifespan.startup.complete"})
            await receive()
            keeping.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await keeping
            await send({"type": "lifespan.shutdown.complete"})
        finally:
            os.close(lock)

    return wrapped


def _open_lock(command: Sequence[str]) -> int:
    """Open the file whose lock the worker with the subscribers has.

    Raises:
        ImproperlyConfigured: ``MYSQLQUEUE`` is invalid.
        Unavailable, OSError: there is no place for it.
    """
    settings = get_settings().bell or BellSettings()
    folder = Path(settings.directory or bell.default_directory())
    bell.require_private(folder, settings)
    name = hashlib.blake2b(os.fsencode(f"{Path.cwd()} {command}"), digest_size=6).hexdigest()
    return os.open(folder / f"{name}.lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)


async def _keep(command: Sequence[str], lock: int) -> None:
    """Keep subscribers running as soon as no other worker does; stop them when this is cancelled."""
    while True:
        try:
            if _take(lock):
                await _keep_one(command)
        except OSError as error:
            keeper.say(f"django-mysqlqueue: the subscriber cannot be started ({error}); next start in {PAUSE:g} s")
            await asyncio.sleep(PAUSE)
        else:
            await asyncio.sleep(TURN)


async def _keep_one(command: Sequence[str]) -> None:
    kept = keeper.start(command)
    try:
        while kept.poll() is None:
            await asyncio.sleep(TURN)
    finally:
        kept.terminate()
        while kept.poll() is None:
            await asyncio.sleep(END_TURN)


def _take(lock: int) -> bool:
    """Lock the file, unless another worker has; return whether this worker has the lock, now or from before."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True

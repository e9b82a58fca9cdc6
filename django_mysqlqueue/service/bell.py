"""The bell: datagrams that wake the subscribers of a host when a transaction with messages has committed.

Nothing depends on it. A ring says only that there may be something to do; a lost one is made good by the next poll.

A subscriber binds a datagram socket in the folder of its database, and puts a link to it into a folder for each topic
that it listens for. To see whether anybody listens, a publisher looks at the time of change of the topic's folder, and
reads it only if that has changed. It never waits: the socket of a process that stands still is full, and skipped.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import hashlib
import os
import secrets
import socket
import stat
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import NamedTuple

from django.core.signals import setting_changed
from django.db import connections

from django_mysqlqueue.options.conf import BellSettings, get_settings
from django_mysqlqueue.sql.connection import named_database, named_place

with contextlib.suppress(ImportError):  # Windows has neither of them, and no bell.
    import fcntl
    import grp

TOGETHER = 0.002
"""Seconds within which rings are one."""
NEW = 10.0
"""Seconds for which a file that nobody listens at is left: its process may be about to."""
FRESH = 1_000_000_000
"""Nanoseconds for which a folder's time of change may hide a further change: filesystems note it coarsely."""
DEAD = (errno.ECONNREFUSED, errno.ENOENT)
"""Errors that say that no process listens at a socket."""
LONGEST_PATH = 103 if sys.platform == "darwin" else 107
"""Bytes of the path of a socket (``sun_path``)."""
LONGEST_NAME = "4194304-123456"
"""A name of a socket that has as many bytes as one can have: the process id, at most 2²², and six digits."""

Wake = Callable[[], object]


class Unavailable(Exception):
    """The bell cannot be used here. The text is the reason."""


# -- folders ------------------------------------------------------------------


def _short(name: str) -> str:
    return hashlib.blake2b(name.encode(), digest_size=6).hexdigest()


def default_directory() -> str:
    """Return the runtime directory of this user: in memory where the host has such a place, the same for all of it."""
    root = "/dev/shm" if os.access("/dev/shm", os.W_OK) else "/tmp"  # noqa: S108  # its owner and mode are checked
    return f"{root}/mysqlqueue-{os.geteuid()}"


@cache
def _directory(using: str, name: str) -> str | None:
    """Return the folder of a database, whose name in ``DATABASES`` is given; None: the bell is off."""
    settings = get_settings().bell
    if settings is None or not hasattr(socket, "AF_UNIX"):
        return None
    return f"{settings.directory or default_directory()}/{_short(named_database(connections[using]) or name)}"


@cache
def _folder(using: str, name: str, topic: str) -> str | None:
    database = _directory(using, name)
    return None if database is None else f"{database}/{_short(topic)}"


def _forget(*, setting: str, **kwargs: object) -> None:
    if setting in ("MYSQLQUEUE", "DATABASES"):
        _directory.cache_clear()
        _folder.cache_clear()


setting_changed.connect(_forget, dispatch_uid="django_mysqlqueue.service.bell")


def _name(using: str) -> str:
    return str(connections[using].settings_dict["NAME"])


def folder_of(using: str, topic: str) -> str | None:
    """Return the folder of a topic: that of its database, and its own; None: the bell is off."""
    return _folder(using, _name(using), topic)


def require_private(path: Path, settings: BellSettings) -> None:
    """Create a folder that only this user, or the configured group, can write to; refuse one that others can.

    Raises:
        Unavailable: the folder is not one, belongs to another user, or others may write to it.
    """
    mode, group = (0o700, -1) if settings.group is None else (0o2770, _group_id(settings.group))
    try:
        with contextlib.suppress(FileExistsError):
            path.mkdir(parents=True)
            path.chmod(mode)
            if group >= 0:
                os.chown(path, -1, group)
                path.chmod(mode)
    except OSError as error:
        raise Unavailable(f"{path}: {error.strerror}") from error
    _judge(path, settings)


def _judge(path: Path, settings: BellSettings) -> None:
    try:
        found = path.lstat()
    except OSError as error:
        raise Unavailable(f"{path}: {error.strerror}") from error
    if not stat.S_ISDIR(found.st_mode):
        raise Unavailable(f"{path} is not a directory")
    if found.st_mode & stat.S_IWOTH:
        raise Unavailable(f"{path} can be written to by every user")
    if settings.group is None and found.st_uid != os.geteuid():
        raise Unavailable(f"{path} belongs to another user. Set BELL['GROUP'] to a group that both are in.")
    if settings.group is not None and found.st_gid != _group_id(settings.group):
        raise Unavailable(f"{path} belongs to another group than {settings.group!r}")


def _group_id(name: str) -> int:
    try:
        return grp.getgrnam(name).gr_gid
    except KeyError:
        raise Unavailable(f"there is no group {name!r}") from None


def _require_short(directory: str) -> None:
    longest = len(os.fsencode(f"{directory}/{_short('')}/{LONGEST_NAME}"))
    if longest > LONGEST_PATH:
        raise Unavailable(f"the path of a socket in {directory} has {longest} bytes, at most {LONGEST_PATH} work")


def require_usable(settings: BellSettings) -> None:
    """Check, without a change to it, that sockets can be in the runtime directory.

    Raises:
        Unavailable: they cannot.
    """
    if not hasattr(socket, "AF_UNIX"):
        raise Unavailable("this platform has no Unix sockets")
    path = Path(settings.directory or default_directory())
    _require_short(f"{path}/{_short('')}")
    if settings.group is not None:
        _group_id(settings.group)
    if os.path.exists(path):  # False, too, if this user may not look there.
        _judge(path, settings)


# -- ringing ------------------------------------------------------------------


_known: dict[str, tuple[int, tuple[str, ...]]] = {}
"""By folder, its time of change and the sockets in it."""
_sender: socket.socket | None = None
_own: set[str] = set()
"""The names of the sockets at which this process listens."""
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_own.clear)


def listeners(using: str, topic: str) -> tuple[str, ...]:
    """Return the sockets of the processes of this host that listen for a topic, without a query."""
    folder = folder_of(using, topic)
    return () if folder is None else listeners_in(folder)


def listeners_in(folder: str) -> tuple[str, ...]:
    """Return the sockets in a topic's folder."""
    try:
        changed = os.stat(folder).st_mtime_ns
    except OSError:
        return ()
    known = _known.get(folder)
    if known is not None and known[0] == changed:
        return known[1]
    settings, path = get_settings().bell, Path(folder)
    try:
        if settings is None:
            return ()
        for one in (path.parent.parent, path.parent, path):
            _judge(one, settings)  # Another user could have made it.
        found = tuple(f"{folder}/{name}" for name in os.listdir(folder))
    except (OSError, Unavailable):
        return ()
    if time.time_ns() - changed > FRESH:
        _known[folder] = changed, found
    return found


def ring(using: str, topics: Iterable[str]) -> None:
    """Wake the other processes of this host that listen for one of some topics."""
    # Who listens in this process is woken without it.
    paths = {path for topic in topics for path in listeners(using, topic)}
    send(path for path in paths if path.rpartition("/")[2] not in _own)


def send(sockets: Iterable[str]) -> None:
    """Ring some sockets. What cannot be reached is skipped; what has died is removed."""
    global _sender  # one for the process, made when it is needed
    for path in sockets:
        if _sender is None:
            _sender = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            _sender.settimeout(0)
            atexit.register(_sender.close)
        try:
            _sender.sendto(b".", path)
        except OSError as error:
            if error.errno in DEAD:
                _remove_link(path)


def _remove_link(path: str) -> None:
    """Remove a link or a socket, and nothing else."""
    with contextlib.suppress(OSError):
        mode = os.lstat(path).st_mode
        if stat.S_ISLNK(mode) or stat.S_ISSOCK(mode):
            os.unlink(path)


# -- listening ----------------------------------------------------------------


class Listener:
    """A socket that the publishers of this host ring, and the thread that waits for them.

    Args:
        using: alias of the queue's database.
        topics: the topics for which it listens.
        wake: called in the thread after a ring, or several within ``rest`` seconds. It must not block.

    Raises:
        Unavailable: the folder cannot be used.
    """

    def __init__(self, using: str, topics: Iterable[str], wake: Wake) -> None:
        settings = get_settings().bell
        directory = _directory(using, _name(using))
        if settings is None or directory is None:
            raise Unavailable("it is off")
        self._wake = wake
        self.rung_at: float | None = None
        """When it was last rung, by the monotonic clock."""
        self.rest = TOGETHER
        """Seconds after a wake within which rings are one."""
        self._stopped = threading.Event()
        name = f"{os.getpid()}-{secrets.token_hex(3)}"
        self.path = f"{directory}/{name}"
        _require_short(directory)
        require_private(Path(directory).parent, settings)
        require_private(Path(directory), settings)
        self._links = [f"{folder_of(using, topic)}/{name}" for topic in sorted(set(topics))]
        self._name = name
        self._thread = threading.Thread(target=self._run, name=f"mysqlqueue-bell-{using}", daemon=True)
        try:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        except OSError as error:
            raise Unavailable(str(error.strerror)) from error
        try:
            _own.add(name)
            self._socket.bind(self.path)
            os.chmod(self.path, 0o600 if settings.group is None else 0o660)
            if settings.group is not None:
                os.chown(self.path, -1, _group_id(settings.group))
            for link in self._links:
                require_private(Path(link).parent, settings)
                os.symlink(f"../{name}", link)
            self._thread.start()
        except (OSError, RuntimeError) as error:  # The latter: no thread can be started.
            self._remove()
            raise Unavailable(f"{directory}: {getattr(error, 'strerror', error)}") from error
        except Unavailable:
            self._remove()
            raise

    def is_reachable(self) -> bool:
        """Return whether nobody has removed the socket, or a link to it, or its folders."""
        return all(map(os.path.exists, (self.path, *self._links)))

    def neighbours(self) -> int:
        """Return how many processes, this one included, listen for the topic for which most do."""
        with contextlib.suppress(OSError):
            return max((len(os.listdir(os.path.dirname(link))) for link in self._links), default=1)
        return 1

    def _run(self) -> None:
        while True:
            self._socket.recv(16)
            if self._stopped.is_set():
                return
            self.rung_at = time.monotonic()
            # What is taken here was rung before the wake, so the poll after it finds what it was rung for.
            with contextlib.suppress(BlockingIOError):
                while True:
                    self._socket.recv(16, socket.MSG_DONTWAIT)
            self._wake()
            self._stopped.wait(self.rest)

    def stop(self) -> None:
        """Stop listening, and remove the socket."""
        self._stopped.set()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RD)  # It ends the wait for a ring.
        self._thread.join(1)
        self._remove()

    def _remove(self) -> None:
        for path in (*self._links, self.path):
            _remove_link(path)
        self._socket.close()
        _own.discard(self._name)


class Look(NamedTuple):
    """What a process knew that looked and found nothing to do."""

    at: float
    """When it looked, by the monotonic clock, which all processes of a host share and nobody can set."""
    tail: int
    """The offset up to which it had read the log."""
    next_deliver_at: int
    """When the next scheduled message comes due, in epoch milliseconds; 0 if there is none."""


LOOK = struct.Struct("<dqq")


class Looks:
    """The last look of the processes of this host that look for the same work, and whether one of them is looking.

    The lock of the file ends with the process that holds it.

    Args:
        using: alias of the queue's database.
        what: what they look for.

    Raises:
        Unavailable: the file cannot be used.
    """

    def __init__(self, using: str, what: object) -> None:
        settings, place = get_settings().bell, named_place(connections[using])
        path = f"{_directory(using, _name(using))}/look.{_short(repr((place, what)))}"
        try:
            self._file = os.open(path, os.O_CREAT | os.O_RDWR | getattr(os, "O_NOFOLLOW", 0), 0o600)
            with contextlib.suppress(OSError):  # It is another user's of the group, who has done so.
                if settings is not None and settings.group is not None:
                    os.fchmod(self._file, 0o660)
        except OSError as error:
            raise Unavailable(f"{path}: {error.strerror}") from error

    def last(self) -> Look | None:
        """Return the last look; None if there is none since the host started."""
        try:
            text = os.pread(self._file, LOOK.size, 0)
            if len(text) < LOOK.size or text != os.pread(self._file, LOOK.size, 0):
                return None
        except OSError:
            return None
        look = Look(*LOOK.unpack(text))
        return look if look.at <= time.monotonic() else None

    def note(self, look: Look) -> None:
        """Note a look that has found nothing."""
        with contextlib.suppress(OSError):
            os.pwrite(self._file, LOOK.pack(*look), 0)

    def begin(self) -> bool:
        """Return whether no other process is looking, until ``end`` is called."""
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        return True

    def end(self) -> None:
        """Let another process look."""
        with contextlib.suppress(OSError):
            fcntl.flock(self._file, fcntl.LOCK_UN)

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)


def clean(using: str) -> None:
    """Remove what killed processes have left: sockets on which nobody listens, and links to them."""
    directory = _directory(using, _name(using))
    if directory is None:
        return
    with contextlib.suppress(OSError), contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)) as probe:
        folders = [one.path for one in os.scandir(directory) if one.is_dir(follow_symlinks=False)]
        for folder in (*folders, directory):
            for name in os.listdir(folder):
                path = f"{folder}/{name}"
                try:
                    probe.connect(path)
                except OSError as error:
                    if error.errno in DEAD and time.time() - os.lstat(path).st_mtime > NEW:
                        _remove_link(path)

"""The bell between hosts: UDP packets that one process of each host passes on to the sockets of its host.

Nothing depends on it, as with ``bell``. A packet names the folder of a topic, and carries an HMAC of the name. It has
no time and no number: one that is sent again is a ring, and rings are few, however many packets come.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import hashlib
import hmac
import logging
import re
import socket
import threading
import time
from collections.abc import Iterable
from ipaddress import ip_address

from django.core.signals import setting_changed
from django.db import Error, connections

from django_mysqlqueue.options.conf import BellSettings, get_settings
from django_mysqlqueue.options.validators import Address
from django_mysqlqueue.service import bell, heartbeats
from django_mysqlqueue.sql.connection import named_place
from django_mysqlqueue.sql.session import Session

logger = logging.getLogger("django_mysqlqueue.service")

KNOWN_FOR = 5.0
"""Seconds after which a publishing process reads the addresses again."""
PACKET = re.compile(rb"mq1([0-9a-f]{12})([0-9a-f]{12})")
MAC_BYTES = 16
PACKETS = 20
"""Maximum number of packets that are read at a time."""
BUFFER_BYTES = 16_384
"""Of packets that wait: some forty of them."""
PAUSE = 0.02
"""Seconds, at least, between two reads."""
REST = 40
"""The same as a multiple of the CPU time that the packets of the last one took."""


def is_on() -> bool:
    """Return whether other hosts may have subscribers to ring."""
    settings = get_settings().bell
    return settings is not None and settings.secret is not None


def _mac(settings: BellSettings, name: bytes) -> bytes:
    return hmac.digest(str(settings.secret).encode(), name, hashlib.sha256)[:MAC_BYTES]


# -- ringing ------------------------------------------------------------------


_known: dict[str, tuple[float, dict[str, set[Address]]]] = {}
"""By alias, when the addresses were last read, by the monotonic clock, and those of each topic."""
_errors: dict[str, str] = {}
"""By alias, why they could not be read the last time."""
_reads = threading.Lock()
_senders: dict[socket.AddressFamily, socket.socket] = {}


def _forget(*, setting: str, **kwargs: object) -> None:
    if setting in ("MYSQLQUEUE", "DATABASES"):
        _known.clear()


setting_changed.connect(_forget, dispatch_uid="django_mysqlqueue.service.remote_bell")


def ring(using: str, topics: Iterable[str]) -> None:
    """Wake the subscribers of other hosts to some topics. It waits for none of them."""
    settings = get_settings().bell
    if settings is None or settings.secret is None or not topics:
        return
    addresses = _addresses(using)
    for topic in topics:
        folder = bell.folder_of(using, topic)
        if folder is None:
            return
        name = b"mq1" + "".join(folder.split("/")[-2:]).encode()
        packet = name + _mac(settings, name)
        for address in addresses.get(topic, ()):
            _send(packet, address)


def _send(packet: bytes, address: Address) -> None:
    with contextlib.suppress(OSError):  # It is a ring that is lost.
        if address.family not in _senders:
            _senders[address.family] = socket.socket(address.family, socket.SOCK_DGRAM)
            atexit.register(_senders[address.family].close)
        _senders[address.family].sendto(packet, socket.MSG_DONTWAIT, (str(address.ip), address.port))


def _addresses(using: str) -> dict[str, set[Address]]:
    """Return where the other hosts with subscribers listen, by topic; read at most every ``KNOWN_FOR`` seconds.

    Never in a transaction: it would begin to read there, and an error would break it.
    """
    connection = connections[using]
    with _reads:
        read_at, found = _known.get(using, (float("-inf"), {}))
        if connection.in_atomic_block or time.monotonic() < read_at + KNOWN_FOR:
            return found
        _known[using] = time.monotonic(), found  # Other threads need not wait for the answer.
    try:
        if not connection.get_autocommit():
            return found
        rows = heartbeats.bells(Session(using), round(get_settings().lease_duration * 1000))
    except Error as error:
        if _errors.get(using) != str(error):
            _errors[using] = str(error)
            logger.warning("bell.addresses_unknown database=%s error=%s", using, error)
        return found
    _errors.pop(using, None)
    found = {}
    for topic, host, text in rows:
        if host != socket.gethostname():
            with contextlib.suppress(ValueError):  # Clients in plain SQL write what they like.
                found.setdefault(topic, set()).add(Address.parse(text))
    _known[using] = time.monotonic(), found
    return found


# -- listening ----------------------------------------------------------------


def announced(using: str) -> str | None:
    """Return the address at which other hosts can ring for this one; None: the setting names none to listen at.

    Raises:
        bell.Unavailable: it is not known.
    """
    settings = get_settings().bell
    if settings is None or settings.listen is None:
        return None
    if settings.announce is not None or not settings.listen.ip.is_unspecified:
        return str(settings.announce or settings.listen)
    _, _, host, _, unix_socket, *_ = named_place(connections[using])
    try:
        local = _towards(host, settings.listen) if host and not unix_socket else None
    except OSError as error:
        raise bell.Unavailable(f"{host}: {error.strerror}. Set BELL['ANNOUNCE'].") from error
    if local is None or local.ip.is_loopback:
        raise bell.Unavailable("this host does not reach the database by the network. Set BELL['ANNOUNCE'].")
    return str(local)


def _towards(host: str, listen: Address) -> Address:
    """Return the address of this host from which it reaches another one. Nothing is sent."""
    *_, there = socket.getaddrinfo(host, listen.port, listen.family, socket.SOCK_DGRAM)[0]
    with socket.socket(listen.family, socket.SOCK_DGRAM) as probe:
        probe.connect(there)
        return listen._replace(ip=ip_address(probe.getsockname()[0]))


class Gateway:
    """Pass on the rings of other hosts to the sockets of this host, in one process of it."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._address: Address | None = None
        self._stopped = False

    def open(self) -> None:
        """Begin, unless this process has, or another one listens.

        Raises:
            bell.Unavailable: the address of the setting cannot be used.
        """
        settings = get_settings().bell
        if self._thread is not None or settings is None or settings.listen is None:
            return
        listening = socket.socket(settings.listen.family, socket.SOCK_DGRAM)
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
            listening.bind((str(settings.listen.ip), settings.listen.port))
        except OSError as error:
            listening.close()
            if error.errno == errno.EADDRINUSE:
                return
            raise bell.Unavailable(f"{settings.listen}: {error.strerror}") from error
        self._address = settings.listen
        self._thread = threading.Thread(
            target=self._run, args=(listening, settings), name="mysqlqueue-bell-hosts", daemon=True
        )
        self._thread.start()

    def _run(self, listening: socket.socket, settings: BellSettings) -> None:
        with listening:
            while True:
                packets = {listening.recv(64)}
                began = time.thread_time()
                if self._stopped:
                    return
                with contextlib.suppress(BlockingIOError):
                    for _ in range(PACKETS - 1):
                        packets.add(listening.recv(64, socket.MSG_DONTWAIT))
                for packet in packets:
                    _pass_on(packet, settings)
                time.sleep(max(PAUSE, REST * (time.thread_time() - began)))

    def stop(self) -> None:
        """Stop, so that another process can take over."""
        if self._thread is None or self._address is None:
            return
        self._stopped = True
        _send(b"", self._address)
        self._thread.join(1)


def _pass_on(packet: bytes, settings: BellSettings) -> None:
    """Ring the sockets of the topic that a packet names, if who has sent it knows the secret."""
    name = PACKET.fullmatch(packet[:-MAC_BYTES])
    if name is not None and hmac.compare_digest(packet[-MAC_BYTES:], _mac(settings, name[0])):
        directory = settings.directory or bell.default_directory()
        bell.send(bell.listeners_in(f"{directory}/{name[1].decode()}/{name[2].decode()}"))

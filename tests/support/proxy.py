"""A Unix socket in front of a server's, for what networks and fail-overs do to connections."""

from __future__ import annotations

import contextlib
import socket
import threading
from pathlib import Path

COM_QUERY = 3
WRITES = (b"INSERT", b"UPDATE", b"DELETE", b"REPLACE")
READ_ONLY = b"\xff" + (1290).to_bytes(2, "little") + b"#HY000The server is running with the --read-only option"


class Proxy:
    """Forwards connections until it is told to fall silent, or to refuse writes on those that are open."""

    def __init__(self, path: Path, target: Path) -> None:
        self.path = path
        self._target = target
        self._links: list[Link] = []
        self._lock = threading.Lock()
        self._dark = False
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen(100)
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with self._listener:  # If this thread fails, nobody waits for it.
            while True:
                try:
                    client, _ = self._listener.accept()
                except OSError:
                    return
                with self._lock:
                    self._links.append(self._link(client, self._target, dark=self._dark))

    def _link(self, client: socket.socket, target: Path, *, dark: bool) -> Link:
        return Link(client, target, dark=dark)

    def _open(self) -> list[Link]:
        with self._lock:
            self._links = [link for link in self._links if not link.closed]
            return list(self._links)

    def go_dark(self) -> list[Link]:
        """Nothing gets through any more and nothing is closed, as when a route is lost."""
        with self._lock:
            self._dark = True
        links = self._open()
        for link in links:
            link.dark = True
        return links

    def heal(self) -> None:
        """New connections get through; those that were silent stay so, as after a change of route."""
        with self._lock:
            self._dark = False

    def demote(self) -> list[Link]:
        """Open connections lead to a server that refuses writes from now on, new ones to the new primary."""
        links = self._open()
        for link in links:
            link.demoted = True
        return links

    def close(self) -> None:
        self._listener.close()
        for link in self._open():
            link.close()


class Link:
    """One connection: a thread for each direction."""

    def __init__(self, client: socket.socket, target: Path, *, dark: bool) -> None:
        self.dark = dark
        self.demoted = False
        self.closed = False
        self.spoke = False
        """The client has said something since the server was demoted."""
        self._client = client
        self._server = socket.socket(socket.AF_UNIX)
        if not dark:
            try:
                self._server.connect(str(target))
            except OSError:  # the server is down
                self.close()
                return
        threading.Thread(target=self._forward, daemon=True).start()
        if not dark:
            threading.Thread(target=self._answer, daemon=True).start()

    def close(self) -> None:
        self.closed = True
        for side in (self._client, self._server):
            with contextlib.suppress(OSError):
                side.shutdown(socket.SHUT_RDWR)
            side.close()

    def _forward(self) -> None:
        """The client's packets, one by one: commands are looked at while the server is demoted."""
        with contextlib.suppress(OSError), self._client.makefile("rb") as stream:
            while header := stream.read(4):
                body = stream.read(int.from_bytes(header[:3], "little"))
                if self.dark:
                    continue
                self.spoke = self.demoted
                if self.demoted and body[:1] == bytes([COM_QUERY]) and body[1:].lstrip().upper().startswith(WRITES):
                    self._client.sendall(len(READ_ONLY).to_bytes(3, "little") + b"\x01" + READ_ONLY)
                    continue
                self._server.sendall(header + body)
        self.close()

    def _answer(self) -> None:
        with contextlib.suppress(OSError):
            while data := self._server.recv(65536):
                if not self.dark:
                    self._client.sendall(data)
        if not self.dark:
            self.close()

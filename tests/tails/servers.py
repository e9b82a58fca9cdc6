"""A site that streams topics, on a real server: WSGI with threads, or ASGI."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import uvicorn
from django.core.handlers.asgi import ASGIHandler
from django.core.handlers.wsgi import WSGIHandler
from django.core.servers.basehttp import ThreadedWSGIServer
from django.http import HttpRequest
from django.test.testcases import QuietWSGIRequestHandler
from django.urls import path

from django_mysqlqueue.tails import ReceivedMessage, TailView

WAIT = 20.0
HEARTBEAT = 0.2


class Public(TailView):
    """Without a login, and with less than everything."""

    def has_permission(self, request: HttpRequest, topic: str) -> bool:
        return True

    def serialize(self, message: ReceivedMessage) -> dict[str, Any] | None:
        if message.payload == "raise":
            raise ValueError("on purpose")
        if message.payload == "slow secret":
            time.sleep(HEARTBEAT / 4)
            return None
        return None if message.payload == "secret" else {"payload": message.payload}


urlpatterns = [
    path("tail/<str:topic>/", TailView.as_view(heartbeat=HEARTBEAT)),
    path("public/<str:topic>/", Public.as_view(heartbeat=HEARTBEAT, topics=["t"])),
    path("wrong/<str:topic>/", Public.as_view(topics="topic")),
    path("few/<str:topic>/", TailView.as_view(heartbeat=HEARTBEAT, max_listeners=2)),
    path("short/<str:topic>/", TailView.as_view(heartbeat=HEARTBEAT, max_duration=0.5)),
    path("seldom/<str:topic>/", TailView.as_view(heartbeat=1.5)),
    path("elsewhere/<str:topic>/", TailView.as_view(using="queue")),
]


class Server:
    """Serves this process's site on a port of its own."""

    port: int

    def __init__(self) -> None:
        self.streams: list[Stream] = []

    def stop(self) -> None:
        """Close what a failed test has left open, too: it would fail the tests after it."""
        for stream in self.streams:
            stream.close()


class Wsgi(Server):
    def __init__(self) -> None:
        super().__init__()
        self._server = ThreadedWSGIServer(("127.0.0.1", 0), QuietWSGIRequestHandler, allow_reuse_address=True)
        self._server.daemon_threads = True
        self._server.set_app(WSGIHandler())
        self.port = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05})
        self._thread.start()

    def stop(self) -> None:
        super().stop()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(WAIT)


class Asgi(Server):
    def __init__(self) -> None:
        super().__init__()
        config = uvicorn.Config(ASGIHandler(), port=0, log_level="error", lifespan="off", timeout_graceful_shutdown=1)
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run)
        self._thread.start()
        deadline = time.monotonic() + WAIT
        while not self._server.started:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        self.port = self._server.servers[0].sockets[0].getsockname()[1]

    def stop(self) -> None:
        super().stop()
        self._server.should_exit = True
        self._thread.join(WAIT)


class Stream:
    """What a browser gets: the events of a stream, as the HTML standard reads them."""

    def __init__(self, server: Server, where: str, **headers: str) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=WAIT)
        self._connection.request("GET", where, headers={"Accept": "text/event-stream", **headers})
        self.response = self._connection.getresponse()
        self.last_id: int | None = None
        self.retry: int | None = None
        self.blocks = 0
        server.streams.append(self)

    def events(self) -> Iterator[tuple[str, Any]]:
        """Yield (type, data), and set ``last_id`` even if a block has no data."""
        kind, data = "message", []
        while line := self.response.readline():
            name, _, value = line.decode().rstrip("\n").partition(": ")
            if name == "":
                self.blocks += 1
                if data and kind != "position":
                    yield kind, json.loads("\n".join(data))
                kind, data = "message", []
            elif name == "id":
                self.last_id = int(value)
            elif name == "event":
                kind = value
            elif name == "data":
                data.append(value)
            else:
                assert name == "retry", line
                self.retry = int(value)

    def take(self, number: int) -> list[Any]:
        """The next payloads, and gaps."""
        found = []
        for kind, data in self.events():
            found.append(data["gap"] if kind == "gap" else data.get("payload", data))
            if len(found) == number:
                return found
        return found

    def first(self) -> Stream:
        """Read the first block, with the position at which the stream begins."""
        while self.last_id is None or self.blocks == 0:
            line = self.response.readline().decode().rstrip("\n")
            name, _, value = line.partition(": ")
            if name == "id":
                self.last_id = int(value)
            elif name == "retry":
                self.retry = int(value)
            elif not name:
                self.blocks += 1
        return self

    def close(self) -> None:
        self.response.close()
        self._connection.close()

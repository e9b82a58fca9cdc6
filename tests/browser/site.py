"""The site that the browser opens: the admin on a thread of the test, under a strict content policy."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable

from django.contrib import admin
from django.contrib.staticfiles.handlers import StaticFilesHandler
from django.core.handlers.wsgi import WSGIHandler
from django.core.servers.basehttp import ThreadedWSGIServer
from django.http import HttpRequest, HttpResponse
from django.test.testcases import QuietWSGIRequestHandler
from django.urls import path

ROOT = "/admin/django_mysqlqueue/dashboard/"
POLICY = "default-src 'self'"

urlpatterns = [
    path("admin/", admin.site.urls),
    path("favicon.ico", lambda request: HttpResponse(status=204)),
]


def strict_policy(get_response: Callable[[HttpRequest], HttpResponse]) -> Callable[[HttpRequest], HttpResponse]:
    """Middleware: no inline script, no inline style, nothing from elsewhere."""

    def respond(request: HttpRequest) -> HttpResponse:
        response = get_response(request)
        response["Content-Security-Policy"] = POLICY
        return response

    return respond


class Server(ThreadedWSGIServer):
    """Knows its connections, so that those that browsers keep open end with it."""

    connections: list[socket.socket]

    def get_request(self) -> tuple[socket.socket, object]:
        connection, address = super().get_request()
        self.connections.append(connection)
        return connection, address


class Site:
    """Serves on a port of its own; stopped, and started again on the same one."""

    def __init__(self) -> None:
        self.port = 0
        self._server: Server | None = None
        self._thread: threading.Thread | None = None
        self.start()

    def url(self, page: str = "") -> str:
        """The address of a page of the dashboard."""
        return f"{self.origin}{ROOT}{page}"

    @property
    def origin(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        server = Server(("127.0.0.1", self.port), QuietWSGIRequestHandler, allow_reuse_address=True)
        server.connections = []
        server.set_app(StaticFilesHandler(WSGIHandler()))
        self.port = server.server_address[1]
        self._server = server
        self._thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        self._thread.start()

    def stop(self) -> None:
        """Nobody listens any more, and what was open is closed."""
        if self._server is None or self._thread is None:
            return
        self._server.shutdown()
        self._server.server_close()
        for connection in self._server.connections:
            with contextlib.suppress(OSError):  # it has ended from the other side
                connection.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._server = self._thread = None

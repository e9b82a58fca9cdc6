"""A store that speaks S3: moto's server in a process of its own, because Delta's library may hold the GIL meanwhile."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from http import HTTPStatus
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
BUCKET = "bucket"
CONTROL = "/-/"


class Store:
    """A running store with one bucket."""

    def __init__(self, port: int) -> None:
        self._port = port
        self.environment = {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_REGION": "us-east-1",
            "AWS_ALLOW_HTTP": "true",
        }
        self._send(f"/{BUCKET}")

    def become(self, kind: str) -> None:
        """Be another store: ``unconditional`` has no conditional put, ``refusing`` refuses all, ``usual`` is S3."""
        self._send(f"{CONTROL}{kind}")

    def put(self, path: str, content: bytes) -> None:
        """Store an object in the bucket."""
        self._send(f"/{BUCKET}/{path}", content)

    def _send(self, path: str, content: bytes = b"") -> None:
        with closing(HTTPConnection("127.0.0.1", self._port)) as connection:
            connection.request("PUT", path, content)
            assert connection.getresponse().status == HTTPStatus.OK


@contextmanager
def running() -> Iterator[Store]:
    """Run a store."""
    process = subprocess.Popen([sys.executable, "-m", __name__], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield Store(int(process.stdout.readline()))
    finally:
        process.kill()
        process.communicate()


class Application:
    """Moto's server, without what not every store has."""

    def __init__(self) -> None:
        from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app

        self._moto = DomainDispatcherApplication(create_backend_app)
        self._kind = "usual"
        self._lock = threading.Lock()

    def __call__(self, environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        path = environ["PATH_INFO"]
        if path.startswith(CONTROL):
            self._kind = path.removeprefix(CONTROL)
            start("200 OK", [("Content-Length", "0")])
            return []
        if self._kind == "refusing":
            start("403 Forbidden", [("Content-Type", "application/xml")])
            return [b"<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"]
        if self._kind == "unconditional":
            environ.pop("HTTP_IF_NONE_MATCH", None)
        # Moto looks whether an object exists, and then stores it: between the two, another thread may have.
        with self._lock:
            found: Iterable[bytes] = self._moto(environ, start)
            return found


def main() -> None:
    """Serve on a free port, and print it."""
    from werkzeug.serving import make_server

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = make_server("127.0.0.1", 0, Application(), threaded=True)
    print(server.port, flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()

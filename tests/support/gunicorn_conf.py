"""The configuration of gunicorn in tests: a subscriber beside two workers."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any

from django_mysqlqueue.contrib import gunicorn
from django_mysqlqueue.contrib.gunicorn import on_exit, on_reload

__all__ = ["on_exit", "on_reload"]
workers = 2
bind = "127.0.0.1:0"
control_socket_disable = True


def when_ready(server: Any) -> None:
    manage = os.environ.get("TEST_MANAGE", "manage.py")
    gunicorn.when_ready(server, "--processes=1", "--group=plain", manage=manage)


def application(environ: dict[str, Any], start_response: Callable[..., object]) -> Iterable[bytes]:
    start_response("204 No Content", [])
    return []

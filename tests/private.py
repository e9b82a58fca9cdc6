"""Private servers for tests that set, stop or kill theirs."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import pytest
from django.core.management import call_command
from django.db import connections

from tools import servers


@contextlib.contextmanager
def private_server(engine: str) -> Iterator[servers.Server]:
    """A server of an engine; skips the test where the environment names somebody else's server, or there is none."""
    if os.environ.get(f"TEST_{engine.upper()}_URL"):
        pytest.skip(f"TEST_{engine.upper()}_URL names a server of somebody else's: it cannot be changed")
    with contextlib.ExitStack() as stack:
        try:
            server = stack.enter_context(servers.running(engine))
        except servers.NotAvailable as error:
            if os.environ.get("CI"):
                raise
            pytest.skip(f"no private {engine} server: {error}")
        yield server


@contextlib.contextmanager
def database_of(server: servers.Server, alias: str, name: str, *, charset: str = "utf8mb4") -> Iterator[str]:
    """A database of that name with the project's tables, which this process sees as ``alias``; yields the alias."""
    server.execute(f"CREATE DATABASE IF NOT EXISTS {name} CHARACTER SET {charset}")
    database = {
        "ENGINE": "django.db.backends.mysql",
        "NAME": name,
        "USER": "root",
        "OPTIONS": {"unix_socket": str(server.socket), "charset": "utf8mb4"},
    }
    connections.settings[alias] = connections.configure_settings({"default": database})["default"]
    call_command("migrate", database=alias, run_syncdb=True, verbosity=0)
    yield alias
    connections[alias].close()
    del connections[alias]
    del connections.settings[alias]

"""Private servers of the engine under test that a test starts for itself: with other settings, or to be killed."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import pytest
from django.core.management import call_command
from django.db import connection, connections

from tests.support.internals import dialect_of
from tools import servers


@contextlib.contextmanager
def private_server(*options: str) -> Iterator[servers.Server]:
    """Starts a server like the one under test with these options of its command line, and ends it."""
    engine = dialect_of(connection).name
    if engine == "mariadb" and connection.mysql_version < (11,):
        engine = "mariadb-10.11"
    if servers.given_url(engine):
        pytest.skip(f"the environment names a server of {engine} that the tests did not start")
    with contextlib.ExitStack() as stack:
        try:
            server = stack.enter_context(servers.running(engine, extra=options, in_memory=True))
        except servers.NotAvailable as error:
            if os.environ.get("CI"):
                raise
            pytest.skip(f"no private {engine} server: {error}")
        yield server


@contextlib.contextmanager
def alias_of(
    server: servers.Server, alias: str, name: str = servers.DATABASE, *, charset: str = "utf8mb4"
) -> Iterator[str]:
    """An alias in this process of one of the server's databases, which is made where it is missing, with all tables."""
    server.execute(f"CREATE DATABASE IF NOT EXISTS {name} CHARACTER SET {charset}")
    database = {
        "ENGINE": "django.db.backends.mysql",
        "NAME": name,
        "USER": "root",
        "OPTIONS": {"unix_socket": str(server.socket), "charset": "utf8mb4"},
    }
    connections.settings[alias] = connections.configure_settings({"default": database})["default"]
    try:
        call_command("migrate", database=alias, run_syncdb=True, verbosity=0)
        yield alias
    finally:
        connections[alias].close()
        del connections[alias]
        del connections.settings[alias]

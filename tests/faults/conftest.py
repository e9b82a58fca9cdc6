"""Processes to kill, and a server to take away."""

from __future__ import annotations

import contextlib

import pytest

from tests.support.outages import PRIVATE
from tests.support.private_servers import alias_of, private_server
from tests.support.processes import Worker, wait_for
from tools import servers


@pytest.fixture
def start(db, tmp_path):
    workers = []

    def start(*arguments, **settings):
        worker = Worker(tmp_path, *arguments, **settings)
        workers.append(worker)
        wait_for(worker.is_ready, worker)
        return worker

    yield start
    for worker in workers:
        worker.end()


@pytest.fixture(scope="module")
def server(_database):
    """A private server of the engine under test, with the tables and an account that read_only stops."""
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(private_server())
        server.execute(f"CREATE USER app@localhost; GRANT ALL ON `{servers.DATABASE}%`.* TO app@localhost")
        for suffix in ("", "_queue"):
            stack.enter_context(alias_of(server, f"{PRIVATE}{suffix}", f"{servers.DATABASE}{suffix}"))
        yield server

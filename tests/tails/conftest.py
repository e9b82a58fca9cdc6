"""Fixtures: hubs that poll often and end with the test, and the statements that they send."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from django.db import connections

from django_mysqlqueue.tails import following

POLL = 0.02


class Statements:
    """What the threads of hubs have sent, and their sessions on the server."""

    def __init__(self) -> None:
        self.sent: list[str] = []
        self.connections: list[int] = []

    def __call__(self, execute, sql, params, many, context):
        self.sent.append(sql)
        return execute(sql, params, many, context)


@pytest.fixture(autouse=True)
def hubs(settings, monkeypatch) -> Iterator[Statements]:
    settings.MYSQLQUEUE = {"POLL_INTERVAL": POLL, "MAX_POLL_INTERVAL": POLL}
    statements = Statements()
    real = following.sessions.adopt

    def adopt(using, timeouts):
        real(using, timeouts)
        connections[using].execute_wrappers.append(statements)

    monkeypatch.setattr(following.sessions, "adopt", adopt)
    monkeypatch.setattr(following, "_hubs", {})
    monkeypatch.setattr(following.HubLimits.__init__, "__defaults__", (following.LIMITS, 1000, 8_388_608, 0.05))
    yield statements
    for thread in threading.enumerate():
        if thread.name.startswith("mysqlqueue-tails-"):
            thread.join(10)
            assert not thread.is_alive(), "a follower was left open"

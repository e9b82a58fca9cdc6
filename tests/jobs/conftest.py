"""Fixtures for tests of jobs."""

from __future__ import annotations

import threading

import pytest
from django.db import connection, connections


@pytest.fixture
def in_thread():
    """Calls a function in a thread, which is joined in the end."""
    if connection.vendor == "sqlite":
        pytest.skip("an in-memory database has no second connection")
    threads = []

    def call(function):
        def run():
            try:
                function()
            finally:
                connections.close_all()

        threads.append(threading.Thread(target=run))
        threads[-1].start()
        return threads[-1]

    yield call
    for thread in threads:
        thread.join(30)

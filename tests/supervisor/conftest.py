"""Supervised processes."""

from __future__ import annotations

import pytest

from tests.support.processes import Supervised, wait_for


@pytest.fixture
def start(db, tmp_path):
    workers = []

    def start(*arguments, ready=1, **settings):
        worker = Supervised(tmp_path, *arguments, **settings)
        workers.append(worker)
        wait_for(lambda: worker.ready() >= ready, worker)
        return worker

    yield start
    for worker in workers:
        worker.end()

"""The queue on an alias of its own."""

from __future__ import annotations

import pytest
from django.db import connections

from tests.app.models import Effect
from tests.conftest import QUEUE_MODELS
from tests.support.internals import installing
from tests.support.routers import QueueElsewhere, ReadsFromReplica

QUEUE = "queue"


@pytest.fixture
def queue(queue_db):
    """An empty queue on the alias ``queue``; what is on ``default`` must stay empty."""
    yield
    assert not connections[QUEUE].in_atomic_block
    for model in QUEUE_MODELS:
        assert not model.objects.using("default").exists(), f"{model.__name__} on default"


@pytest.fixture(params=["setting", "router", "using"])
def where(request, queue, settings):
    """The three ways to say where the queue is; gives what a call must pass on."""
    if request.param == "setting":
        settings.MYSQLQUEUE = {"DATABASE": QUEUE}
    elif request.param == "router":
        settings.DATABASE_ROUTERS = [QueueElsewhere()]
    return {"using": QUEUE} if request.param == "using" else {}


@pytest.fixture
def replica(db, settings):
    """A router that sends every read to a replica, which fails whoever asks it."""
    settings.DATABASE_ROUTERS = [ReadsFromReplica()]
    with pytest.raises(AssertionError, match="the replica was read"):
        Effect.objects.exists()


@pytest.fixture
def no_procedures(queue_db):
    """Databases without the stored procedures that other tests may have installed."""
    for alias in ("default", QUEUE):
        if connections[alias].vendor == "mysql":
            installing.remove(alias)

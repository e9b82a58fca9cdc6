"""Fixtures: the procedures, and clients."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.support.harness import USING
from tests.support.internals import GroupRef, installing
from tests.support.sql_clients import REF, Client


@pytest.fixture
def procedures(db: None) -> None:
    installing.install(USING)


@pytest.fixture
def connect(procedures: None) -> Iterator[Callable[..., Client]]:
    """Connects a client, which the test need not close."""
    clients: list[Client] = []

    def one(ref: GroupRef = REF) -> Client:
        clients.append(Client(ref))
        return clients[-1]

    yield one
    for client in clients:
        client.close()


@pytest.fixture
def client(connect: Callable[..., Client]) -> Client:
    return connect()

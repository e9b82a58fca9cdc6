"""Fixtures of the tests of statements."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from django.db import connection, connections

from tests.conftest import empty
from tests.crash.crashes import ALIAS
from tests.sql.scenario import scenario
from tests.support.one_at_a_time import one_at_a_time
from tests.support.roles import Statements


@contextlib.contextmanager
def _one_connection() -> Iterator[None]:
    connections.settings[ALIAS] = connections.settings["default"]
    connections[ALIAS] = connection
    try:
        yield
    finally:
        del connections[ALIAS]
        del connections.settings[ALIAS]


@pytest.fixture
def alias() -> Iterator[None]:
    """The alias of the crash cases, on this test's own connection."""
    with _one_connection():
        yield


@dataclass
class Sent:
    """What a scripted life of the queue has sent."""

    texts: set[str] = field(default_factory=set)
    """All statements, also those that Django's ORM has put together."""
    of_roles: Statements = field(default_factory=Statements)

    def __call__(self, execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        self.texts.add(sql)
        return execute(sql, params, many, context)


@pytest.fixture(scope="session")
def sent(_database: None) -> Sent:
    """What the scenario sends. It takes half a minute, so tests share it."""
    found = Sent()
    empty()
    wrapped = connection.execute_wrapper
    with _one_connection(), one_at_a_time(), wrapped(found.of_roles), wrapped(found):
        scenario()
    return found

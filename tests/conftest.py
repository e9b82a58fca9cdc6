"""Fixtures: a clean queue, a clock to move, and what differs between the engines under test."""

from __future__ import annotations

import gc
import os
import threading
import time
import types
from collections.abc import Iterator
from pathlib import Path

import pytest
from django.core.management import call_command
from django.db import connection, connections, transaction

from django_mysqlqueue import models
from django_mysqlqueue.admin.shared import SharedReads
from django_mysqlqueue.schedules import registry as schedule_registry
from django_mysqlqueue.service import clocks, known_topics
from django_mysqlqueue.sql import dialect_of
from django_mysqlqueue.subscriptions import registry
from tests.app.models import Effect

gc.disable()  # until all tests are collected: little of what is made meanwhile can be freed
pytest.register_assert_rewrite("tests.crash", "tests.model", "tests.support")

SharedReads.SECONDS = 0.0  # a page shows what the test has just done
QUEUE_MODELS = (
    models.OutboxMessage,
    models.QueueMessage,
    models.DeliveryState,
    models.PartitionLease,
    models.ConsumerOffset,
    models.Slots,
    models.CoalesceKey,
    models.DebouncedMessage,
    models.QuarantinedMessage,
    models.SubscriberHeartbeat,
    models.ConsumerGroup,
    models.Sequencer,
    models.LogMark,
    models.DeliveryEvent,
    models.Operation,
    models.Rollup,
    models.CollectedTopic,
    models.RelayPosition,
    models.RelayWatermark,
    models.JobResult,
    models.JobStage,
    models.Schedule,
    models.Reader,
)


UNIT, DOCS = (Path(__file__).parent / name for name in ("unit", "docs"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        is_alone = "_database" not in item.fixturenames  # type: ignore[attr-defined]
        if item.path.is_relative_to(UNIT) and is_alone:
            item.add_marker(pytest.mark.any_engine)
        if (item.path.is_relative_to(UNIT) or item.path.is_relative_to(DOCS)) and item.get_closest_marker("any_engine"):
            item.add_marker(pytest.mark.any_version)
        if item.get_closest_marker("servers_only") and not os.environ.get("DATABASE_URL"):
            item.add_marker(pytest.mark.skip(reason="cannot hold on SQLite: one writer at a time"))


def pytest_collection_finish() -> None:
    """Collected tests and imported modules stay: no collection of garbage has to look at them."""
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session")
def _database(django_db_setup: None, django_db_blocker: pytest.FixtureRequest) -> Iterator[None]:
    """The test database, reachable from any thread: most tests are about more than one connection."""
    with django_db_blocker.unblock():  # type: ignore[attr-defined]
        call_command("migrate", verbosity=0)
        # pytest-django makes only what its own markers name. It must be there for every process:
        # from Django 6.1 on the system checks ask each alias what it can do.
        creation = connections["queue"].creation
        name = str(connections["queue"].settings_dict["NAME"])
        creation.create_test_db(verbosity=0, autoclobber=True)
        yield
        connections.close_all()
        creation.destroy_test_db(name, verbosity=0)


TABLES = tuple(model._meta.db_table for model in (*QUEUE_MODELS, Effect))


def empty(using: str = "default") -> None:
    """Deletes all rows of the queue; one statement finds the few tables that have any: every test begins with it."""
    with transaction.atomic(using=using, savepoint=False), connections[using].cursor() as cursor:
        cursor.execute(f"SELECT {', '.join(f'EXISTS (SELECT 1 FROM {table})' for table in TABLES)}")
        for table, has_rows in zip(TABLES, cursor.fetchone(), strict=True):
            if has_rows:
                cursor.execute(f"DELETE FROM {table}")


@pytest.fixture
def db(_database: None) -> Iterator[None]:
    """An empty queue and no transaction open."""
    empty()
    yield
    if connection.in_atomic_block:
        raise AssertionError("the test left a transaction open")
    _await_handlers()


def _await_handlers() -> None:
    """Handlers that outlive their test would write their log into another test."""
    until = time.monotonic() + 10
    for thread in threading.enumerate():
        if thread.name.startswith("mysqlqueue-handler"):
            thread.join(max(0, until - time.monotonic()))
            assert not thread.is_alive(), f"the test left a handler running on {thread.name}"


@pytest.fixture
def queue_db(db: None) -> None:
    """An empty queue on the alias ``queue`` as well."""
    empty("queue")


@pytest.fixture
def engine(db: None) -> str:
    """The engine under test: mysql, mariadb or sqlite."""
    return dialect_of(connection).name


class Clock:
    """Moves the database's clock, as every statement of the queue in this process sees it.

    ``advance``: as if the time had passed. ``step``: subscribers see that the clock alone has moved.
    """

    def __init__(self) -> None:
        self._dialect = dialect_of(connection)
        self._expression = type(self._dialect).now_ms
        self._monotonic = time.monotonic
        self._offset = 0
        self._passed = 0.0

    def advance(self, seconds: float) -> None:
        self._passed += seconds
        clocks.time = types.SimpleNamespace(monotonic=lambda: self._monotonic() + self._passed)
        self.step(seconds)

    def step(self, seconds: float) -> None:
        self._offset += int(seconds * 1000)
        self._dialect.now_ms = f"({self._expression} + {self._offset})"

    def stop(self) -> None:
        """Let no time pass but that by which the clock is moved."""
        with connection.cursor() as cursor:
            cursor.execute(f"SELECT {self._dialect.now_ms}")
            (now,) = cursor.fetchone()
        self._expression, began = str(now - self._offset), time.monotonic()
        self._monotonic = lambda: began
        self.advance(0)

    def stand_still(self, now: int) -> None:
        """Stop the clock at a time in epoch milliseconds, until it is moved."""
        self._dialect.now_ms = str(now)

    def restore(self) -> None:
        self._dialect.__dict__.pop("now_ms", None)
        clocks.time = time


@pytest.fixture
def clock(db: None, request: pytest.FixtureRequest) -> Iterator[Clock]:
    clock = Clock()
    if request.node.get_closest_marker("still_clock"):
        clock.stop()
    yield clock
    clock.restore()


@pytest.fixture
def no_handlers() -> Iterator[None]:
    """Empty registries of handlers and schedules, put back afterwards."""
    declared, handled = list(registry._declared), set(known_topics._handled)
    schedules = schedule_registry._declared
    known = dict(schedules)
    registry._declared.clear()
    schedules.clear()
    known_topics._handled.clear()
    yield
    registry._declared[:] = declared
    schedules.clear()
    schedules.update(known)
    known_topics._handled.clear()
    known_topics._handled.update(handled)


@pytest.fixture(scope="module")
def crasher(_database, tmp_path_factory):
    """What ends a connection or a process at any statement."""
    from tests.crash.crashes import crashes

    if connection.vendor == "mysql" and "unix_socket" not in connection.settings_dict["OPTIONS"]:
        pytest.skip("the gate stands before a Unix socket")
    with crashes(tmp_path_factory.mktemp("gate")) as crasher:
        yield crasher

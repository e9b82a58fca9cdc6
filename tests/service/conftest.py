"""Fixtures of the protocol's tests."""

from __future__ import annotations

import pytest
from django.db import connection, connections

from tests.support.still_time import Time


@pytest.fixture
def still(db, monkeypatch):
    """Time stands still until it is moved: a step takes none, however busy the machine is."""
    return Time(monkeypatch)


@pytest.fixture
def autocommit_off(db):
    connection.set_autocommit(False)
    yield
    connection.rollback()
    connection.set_autocommit(True)


@pytest.fixture
def other(db):
    """The second database, SQLite in memory, as an open connection."""
    connection = connections["other"]
    connection.ensure_connection()
    yield connection
    connection.close()


@pytest.fixture
def no_retention(settings):
    settings.MYSQLQUEUE = {"RETENTION": 0}

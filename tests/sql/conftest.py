"""Fixtures of the tests of statements."""

from __future__ import annotations

import pytest
from django.db import connection, connections

from tests.crash.crashes import ALIAS


@pytest.fixture
def alias():
    """The alias of the crash cases, on this test's own connection."""
    connections.settings[ALIAS] = connections.settings["default"]
    connections[ALIAS] = connection
    yield
    del connections[ALIAS]
    del connections.settings[ALIAS]

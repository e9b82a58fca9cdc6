"""An empty registry."""

from __future__ import annotations

import pytest

from tests.support.internals import registry


@pytest.fixture(scope="module", autouse=True)
def discovered():
    """What the test project declares is imported before the registry is emptied."""
    registry.discover()


@pytest.fixture(autouse=True)
def alone(discovered, no_handlers):
    """An empty registry; it is put back afterwards."""

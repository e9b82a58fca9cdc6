"""The pytest fixture ``mysqlqueue``, available if the package is installed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from types import ModuleType


@pytest.fixture
def mysqlqueue(db: None) -> ModuleType:
    """Return the module ``django_mysqlqueue.testing``, with access to the database."""
    from django_mysqlqueue import testing

    return testing

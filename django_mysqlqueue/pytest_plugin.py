"""The ``mysqlqueue`` fixture; pytest finds it where the package is installed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from types import ModuleType


@pytest.fixture
def mysqlqueue(db: None) -> ModuleType:
    """``django_mysqlqueue.testing`` with the test's database: ``published()`` and ``deliver_all()``."""
    from django_mysqlqueue import testing

    return testing

"""Tracing with an exporter that keeps the spans."""

from __future__ import annotations

import pytest

from django_mysqlqueue import otel
from tests.support.tracing import Tracing


@pytest.fixture
def traced(db):
    made = Tracing()
    otel.instrument(tracer_provider=made.provider)
    yield made
    otel.uninstrument()

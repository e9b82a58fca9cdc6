"""Statements one by one, for tests that look at each."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

from tests.support.internals import packets


@contextlib.contextmanager
def one_at_a_time() -> Iterator[None]:
    """No connection takes several statements in a packet."""
    with mock.patch.object(packets, "takes_several", return_value=False):
        yield

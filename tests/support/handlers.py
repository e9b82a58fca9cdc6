"""Handlers that tests subscribe."""

from __future__ import annotations

import pytest

from tests.support.harness import payloads


class Recorder:
    """A handler function that remembers its deliveries and does what the test says."""

    def __init__(self, action=None):
        self.deliveries = []
        self.action = action

    def __call__(self, delivery):
        self.deliveries.append(delivery)
        if self.action is not None:
            return self.action(delivery)
        return None

    @property
    def payloads(self):
        return payloads(self.deliveries)

    @property
    def attempts(self):
        return [(delivery.payload, delivery.attempt) for delivery in self.deliveries]


def fail(delivery):
    raise ValueError(f"no {delivery.payload}")


def both_modes(test):
    return pytest.mark.parametrize("mode", ["ordered", "shared"])(test)


def stuck(delivery):
    """Keeps its partition busy: unsettled work holds the lease."""
    delivery.nack(delay=3600)

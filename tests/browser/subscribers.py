"""Handlers that break as a test says, and are mended by a file that appears."""

from __future__ import annotations

import time
from pathlib import Path

from django_mysqlqueue import Delivery, subscriber
from tests.app.subscribers import record

NEVER = {"initial": 3600, "maximum": 3600, "jitter": 0}
"""A backoff after which no test is left: what comes again was sent by an operator."""


@subscriber("b.calm", group="calm")
def calm(delivery: Delivery) -> None:
    record("calm", delivery)


@subscriber("b.slow", group="slow")
def slow(delivery: Delivery) -> None:
    """Waits for the file that the message names."""
    while not Path(delivery.payload["go"]).exists():
        time.sleep(0.02)
    record("slow", delivery)


@subscriber("b.fragile", group="fragile", on_failure="block", max_attempts=5, backoff=NEVER)
def fragile(delivery: Delivery) -> None:
    """Fails on a message that names a file, until that is there."""
    if "mended" in delivery.payload and not Path(delivery.payload["mended"]).exists():
        raise ValueError("the warehouse does not answer")
    record("fragile", delivery)


@subscriber("b.mortal", group="mortal", max_attempts=1)
def mortal(delivery: Delivery) -> None:
    """Like ``fragile``, with one attempt: what fails is a dead letter."""
    if not Path(delivery.payload["mended"]).exists():
        raise ValueError("there is no such customer")
    record("mortal", delivery)

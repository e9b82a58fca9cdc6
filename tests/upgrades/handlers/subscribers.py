"""Handlers that note which side they ran on, declared as the last release can read them."""

from __future__ import annotations

import os

from django_mysqlqueue import Delivery, subscriber
from tests.upgrades.handlers.models import Effect


def record(name: str, delivery: Delivery) -> None:
    side = os.environ["UPGRADE_SIDE"]
    Effect.objects.create(name=f"{name}|{delivery.key}|{delivery.attempt}|{side}", value=delivery.payload["n"])


@subscriber("p.plain", group="plain", on_failure="block", backoff={"initial": 0.1})
def plain(delivery: Delivery) -> None:
    record("plain", delivery)


@subscriber("p.plain", group="atomic", atomic=True, on_failure="block", backoff={"initial": 0.1})
def atomic(delivery: Delivery) -> None:
    record("atomic", delivery)


@subscriber("p.shared", group="shared", mode="shared", visibility_timeout=3, backoff={"initial": 0.1})
def shared(delivery: Delivery) -> None:
    record("shared", delivery)

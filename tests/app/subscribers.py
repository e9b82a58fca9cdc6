"""Handlers that the tests of real subscriber processes run."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
import time
from pathlib import Path
from typing import Any

from asgiref.sync import sync_to_async
from django.db import connection

from django_mysqlqueue import Delivery, subscriber
from tests.app import hostile
from tests.app.models import Effect

grown: list[bytes] = []


def record(name: str, delivery: Delivery) -> None:
    Effect.objects.create(name=f"{name}|{delivery.key}|{delivery.attempt}", value=delivery.payload["n"])


@subscriber("p.plain", group="plain", backoff={"initial": 0.1})
def plain(delivery: Delivery) -> None:
    record("plain", delivery)
    if delivery.payload.get("fail") and delivery.attempt == 1:
        raise ValueError("the first attempt fails")


@subscriber("p.plain", group="atomic", atomic=True, backoff={"initial": 0.1})
def atomic(delivery: Delivery) -> None:
    record("atomic", delivery)
    act(delivery.payload)


@subscriber("p.shared", group="shared", mode="shared", visibility_timeout=3, backoff={"initial": 0.1})
def shared(delivery: Delivery) -> None:
    record("shared", delivery)
    act(delivery.payload)


@subscriber("p.shared_atomic", group="shared_atomic", mode="shared", atomic=True, backoff={"initial": 0.1})
def shared_atomic(delivery: Delivery) -> None:
    record("shared_atomic", delivery)
    act(delivery.payload)


@subscriber("p.action", group="action", max_attempts=3, backoff={"initial": 0.1})
def action(delivery: Delivery) -> None:
    record("action", delivery)
    act(delivery.payload)


def act(payload: dict[str, Any]) -> None:
    """Does what the message says."""
    what = payload.get("do")
    if what in hostile.ACTIONS:
        hostile.ACTIONS[what]()
    elif what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif what == "hang":
        time.sleep(payload.get("seconds", 60))
    elif what == "wait":
        # Says that it runs, then waits until the test lets it go on.
        Path(payload["started"]).touch()
        while not Path(payload["go"]).exists():
            time.sleep(0.01)
    elif what == "hog":
        # Backtracks for ever without letting go of the interpreter's lock; once.
        if not Path(payload["started"]).exists():
            Path(payload["started"]).touch()
            re.match(r"(a+)+$", "a" * 40 + "b")
    elif what == "grow":
        grown.append(b"x" * (payload["mb"] << 20))
    elif what == "exit":
        sys.exit(3)
    elif what == "close":
        connection.close()
    elif what == "open":
        connection.set_autocommit(False)
        Effect.objects.create(name="left open")


@subscriber("p.async", group="async", mode="shared", visibility_timeout=3, max_attempts=3, backoff={"initial": 0.1})
async def asynchronous(delivery: Delivery) -> None:
    """Does what the message says in a task."""

    async def task() -> None:
        act(delivery.payload)

    await sync_to_async(record)("async", delivery)
    await asyncio.gather(task())


@subscriber("p.coroutines", group="coroutines", backoff={"initial": 0.1})
@subscriber("p.coroutines_shared", group="coroutines_shared", mode="shared", visibility_timeout=3)
async def coroutines(delivery: Delivery) -> None:
    """Says that it runs, then waits until the test lets it go on."""
    await sync_to_async(record)(delivery.group, delivery)
    go = Path(delivery.payload["go"])
    while not go.exists():
        await asyncio.sleep(0.05)


@subscriber("p.strict", group="strict", on_failure="block", max_attempts=3, backoff={"initial": 0.05, "maximum": 0.2})
def strict(delivery: Delivery) -> None:
    record("strict", delivery)
    if delivery.payload["n"] % 7 == 0 and delivery.attempt == 1:
        raise ValueError("the first attempt of every seventh fails")
    if delivery.payload["n"] % 50 == 0:
        raise ValueError("every fiftieth fails for good")
    record("done", delivery)


@subscriber("p.batch", group="batch", atomic=True, batch=True, batch_size=30, backoff={"initial": 0.05})
def batch(deliveries: list[Delivery]) -> None:
    Effect.objects.bulk_create(
        Effect(name=f"batch|{delivery.key}|{delivery.attempt}", value=delivery.payload["n"]) for delivery in deliveries
    )
    if len(deliveries) > 1 and any(delivery.payload["n"] % 100 == 0 for delivery in deliveries):
        raise ValueError("fails in company")


@subscriber("p.limited", group="limited", rate="20/s", burst=10)
def limited(delivery: Delivery) -> None:
    Effect.objects.create(name=f"limited|{delivery.attempt}|{time.time():.6f}", value=delivery.payload["n"])


@subscriber("p.limited", group="limited_shared", mode="shared", rate="20/s", burst=10, visibility_timeout=3)
def limited_shared(delivery: Delivery) -> None:
    Effect.objects.create(name=f"limited_shared|{delivery.attempt}|{time.time():.6f}", value=delivery.payload["n"])


@subscriber("p.limited", group="few", mode="shared", max_in_flight=3, visibility_timeout=3)
def few(delivery: Delivery) -> None:
    began = time.time()
    time.sleep(0.05)
    Effect.objects.create(name=f"few|{began:.6f}|{time.time():.6f}", value=delivery.payload["n"])


@subscriber("p.controlled", group="controlled", filter={"region": ["eu"]}, backoff={"initial": 0.1})
@subscriber("p.controlled", group="controlled_shared", mode="shared", filter={"region": ["eu"]}, visibility_timeout=3)
def controlled(delivery: Delivery) -> None:
    began = time.time()
    act(delivery.payload)
    time.sleep(0.02)
    Effect.objects.create(name=f"{delivery.group}|{began:.6f}|{time.time():.6f}", value=delivery.payload["n"])

"""Faults that calls on the event loop could have: places that leak, and code that outlives its call."""

from __future__ import annotations

import asyncio
import threading

import pytest
from asgiref.sync import sync_to_async

from django_mysqlqueue import Message
from tests.support.async_handlers import run

pytestmark = pytest.mark.usefixtures("no_handlers")


def test_a_handler_that_cancels_the_tasks_of_others_leaves_no_call_behind(db):
    """Some of them have not begun: asyncio then never enters their coroutines."""
    got = []

    async def handle(delivery):
        got.append(delivery.attempt)
        if len(got) == 1:
            for task in asyncio.all_tasks() - {asyncio.current_task()}:
                task.cancel()

    run(handle, [Message(n, key=str(n)) for n in range(5)], backoff={"initial": 0})
    assert got.count(2) == 4


@pytest.mark.any_engine
def test_a_call_lasts_until_its_sync_code_has_ended(db):
    """Otherwise the next attempt, or the next message of the partition, would run beside it."""
    begun, go, beside = threading.Event(), threading.Event(), []

    def block():
        begun.set()
        go.wait(60)
        begun.clear()

    async def handle(delivery):
        beside.append(begun.is_set())
        if delivery.attempt == 1 and delivery.payload == 0:
            asyncio.get_running_loop().call_later(1, go.set)
            await sync_to_async(block)()

    run(handle, [Message(n, key="k") for n in range(3)], timeout=0.1, backoff={"initial": 0}, threads=2)
    assert beside == [False] * 4

"""A coroutine that blocks the event loop is named in the log."""

from __future__ import annotations

import asyncio
import threading

from tests.support.internals import Loop
from tests.support.processes import wait_for


def test_a_handler_that_blocks_the_loop_is_named(caplog):
    """Once for each time, with its stack; a healthy loop is not, however often it is checked."""
    loop = Loop("default")
    loop.start()
    try:
        for _ in range(20):
            loop.check()
            wait_for(lambda: loop._is_answered)
        assert not caplog.records
        for number in (1, 2):
            blocks, go = threading.Event(), threading.Event()
            loop.call(
                lambda blocks=blocks, go=go: asyncio.create_task(computes(blocks, go), name="shop.call, offset 7")
            )
            assert blocks.wait(60)
            for _ in range(20):
                loop.check()
            lines = [record for record in caplog.records if record.mysqlqueue["event"] == "event_loop.blocked"]
            go.set()
            assert len(lines) == number
            assert lines[-1].mysqlqueue["task"] == "shop.call, offset 7"
            assert "in computes\n    go.wait(60)" in lines[-1].stack_info
            wait_for(lambda: loop._is_answered)
    finally:
        loop.stop(60)


async def computes(blocks, go):
    blocks.set()
    go.wait(60)

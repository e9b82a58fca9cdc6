"""The ``timeout`` of an async handler, which cancels only the call."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any


def limited(function: Callable[[Any], Awaitable[Any]], seconds: float, where: str) -> Callable[[Any], Awaitable[Any]]:
    """Wrap an async function so that a call is cancelled after a time limit and raises TimeoutError.

    It raises TimeoutError however the call ends after the limit: a function that catches the cancellation and returns
    has not finished its work. Other cancellations (the event loop ends) pass through.
    """

    async def call(argument: Any) -> Any:
        text = f"{where} did not finish within {seconds:g} s (timeout)"
        try:
            async with asyncio.timeout(seconds) as limit:
                result = await function(argument)
        except Exception as error:
            if limit.expired():
                raise TimeoutError(text) from error
            raise
        if limit.expired():
            raise TimeoutError(text)
        return result

    return call

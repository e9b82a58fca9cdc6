"""The time limit of an async handler: it ends the call by cancelling it, and nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any


def limited(function: Callable[[Any], Awaitable[Any]], seconds: float, where: str) -> Callable[[Any], Awaitable[Any]]:
    """Wraps an async function so that a call is cancelled after so many seconds, and raises TimeoutError.

    However it ends after that: one that catches the cancellation and returns has
    not done what it was called for. A cancellation by somebody else (the event
    loop is ending) passes through.
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

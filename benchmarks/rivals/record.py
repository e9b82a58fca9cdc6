"""What jobs leave in the folder RIVALS_RECORD: how often each has run, and the time at which it started."""

from __future__ import annotations

import mmap
import os
import time
from functools import cache
from pathlib import Path
from typing import Any


@cache
def _runs() -> mmap.mmap:
    with Path(os.environ["RIVALS_RECORD"], "runs").open("r+b") as file:
        return mmap.mmap(file.fileno(), 0)


@cache
def _starts() -> int:
    return os.open(Path(os.environ["RIVALS_RECORD"], "starts"), os.O_WRONLY | os.O_APPEND)


def ran(payload: dict[str, Any]) -> None:
    """Count that a job has run, in the byte with its number. It costs less than a microsecond and takes no lock."""
    _runs()[payload["n"]] += 1


def started(payload: dict[str, Any]) -> None:
    """Write the number of a job and the time, in one line."""
    at = time.time()
    os.write(_starts(), f"{payload['n']} {at}\n".encode())

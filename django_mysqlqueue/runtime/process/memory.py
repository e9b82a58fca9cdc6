"""The memory of this process."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

STATM = Path("/proc/self/statm")


def resident_mb(statm: Path = STATM) -> float:
    """Return the resident memory in MB (1,048,576 bytes); where there is no /proc, its maximum so far."""
    try:
        pages = int(statm.read_bytes().split()[1])
    except OSError:
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20
    return pages * resource.getpagesize() / 2**20

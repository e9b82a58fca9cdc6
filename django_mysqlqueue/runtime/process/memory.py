"""How much memory this process takes."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

STATM = Path("/proc/self/statm")


def resident_mb(statm: Path = STATM) -> float:
    """Resident memory in MB (of 1,048,576 bytes). Where there is no /proc: the most that it has ever been."""
    try:
        pages = int(statm.read_bytes().split()[1])
    except OSError:
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20
    return pages * resource.getpagesize() / 2**20

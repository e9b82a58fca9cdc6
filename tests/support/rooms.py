"""The rooms of the package whose functions send statements, as the code is laid out."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path

import django_mysqlqueue

PACKAGE = Path(django_mysqlqueue.__file__).parent
ROOMS = ("service", "operations", "inspection", "tails")


def sources() -> Iterator[tuple[str, Path]]:
    """(``room.module``, file) of each module of these rooms."""
    for room in ROOMS:
        for path in sorted((PACKAGE / room).glob("*.py")):
            yield f"{room}.{path.stem}", path


@functools.cache
def module_of(file: str) -> str | None:
    """``room.module`` of a source file; None: it is in none of these rooms."""
    path = Path(file)
    room = path.parent.name
    return f"{room}.{path.stem}" if path.parent.parent == PACKAGE and room in ROOMS else None

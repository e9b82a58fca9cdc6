"""The name of a consumer group."""

from __future__ import annotations

from typing import NamedTuple


class GroupRef(NamedTuple):
    """A consumer group on a topic."""

    group: str
    topic: str

    def __str__(self) -> str:
        return f"{self.group}/{self.topic}"

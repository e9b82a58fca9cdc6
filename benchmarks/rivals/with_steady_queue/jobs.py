from __future__ import annotations

from typing import Any

import stamps
from django.tasks import task


@task()
def noop(payload: dict[str, Any]) -> None:
    pass


@task()
def stamp(payload: dict[str, Any]) -> None:
    stamps.stamp(payload)


def enqueue(payload: dict[str, Any], kind: str) -> None:
    (stamp if kind == "stamp" else noop).enqueue(payload)

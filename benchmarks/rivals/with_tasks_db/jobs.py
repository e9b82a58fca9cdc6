from __future__ import annotations

from typing import Any

from django.tasks import task


@task()
def noop(payload: dict[str, Any]) -> None:
    pass


def enqueue(payload: dict[str, Any], kind: str) -> None:
    noop.enqueue(payload)

from __future__ import annotations

from typing import Any

from django_q.tasks import async_task


def noop(payload: dict[str, Any]) -> None:
    pass


def enqueue(payload: dict[str, Any], kind: str) -> None:
    async_task("with_q2.jobs.noop", payload)

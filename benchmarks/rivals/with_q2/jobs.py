from __future__ import annotations

from typing import Any

import record
from django_q.tasks import async_task


def noop(payload: dict[str, Any]) -> None:
    record.ran(payload)


def start(payload: dict[str, Any]) -> None:
    record.started(payload)


def enqueue(payload: dict[str, Any], kind: str) -> None:
    async_task(f"with_q2.jobs.{kind}", payload)

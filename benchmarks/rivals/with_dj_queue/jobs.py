from __future__ import annotations

from typing import Any

import stamps
from django.tasks import default_task_backend, task


@task
def noop(payload: dict[str, Any]) -> None:
    pass


@task
def stamp(payload: dict[str, Any]) -> None:
    stamps.stamp(payload)


KINDS = {"": noop, "stamp": stamp}


def enqueue(payload: dict[str, Any], kind: str) -> None:
    KINDS[kind].enqueue(payload)


def enqueue_many(payloads: list[dict[str, Any]], kind: str) -> None:
    default_task_backend.enqueue_all([(KINDS[kind], [payload], {}) for payload in payloads])

from __future__ import annotations

from typing import Any

from django.tasks import task
from django_ox import bulk


@task()
def noop(payload: dict[str, Any]) -> None:
    pass


def enqueue(payload: dict[str, Any], kind: str) -> None:
    noop.enqueue(payload)


def enqueue_many(payloads: list[dict[str, Any]], kind: str) -> None:
    bulk.enqueue_many(noop, [((payload,), {}) for payload in payloads])

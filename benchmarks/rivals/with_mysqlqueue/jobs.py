from __future__ import annotations

from typing import Any

from django_mysqlqueue import publish, publish_many


def enqueue(payload: dict[str, Any], kind: str) -> None:
    publish(kind, payload)


def enqueue_many(payloads: list[dict[str, Any]], kind: str) -> None:
    publish_many(kind, payloads)

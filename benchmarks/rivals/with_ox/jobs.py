from __future__ import annotations

from typing import Any

import record
from django.tasks import task
from django_ox import bulk


@task()
def noop(payload: dict[str, Any]) -> None:
    record.ran(payload)


@task()
def start(payload: dict[str, Any]) -> None:
    record.started(payload)


KINDS = {"noop": noop, "start": start}


def enqueue(payload: dict[str, Any], kind: str) -> None:
    KINDS[kind].enqueue(payload)


def enqueue_many(payloads: list[dict[str, Any]], kind: str) -> None:
    bulk.enqueue_many(KINDS[kind], [((payload,), {}) for payload in payloads])

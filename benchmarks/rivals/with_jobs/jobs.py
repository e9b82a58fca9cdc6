from __future__ import annotations

from typing import Any

import stamps
from django.tasks import default_task_backend, task

from django_mysqlqueue.tasks import job


@task()
@job(atomic=False)
def noop(payload: dict[str, Any]) -> None:
    pass


@task()
def atomic(payload: dict[str, Any]) -> None:
    pass


@task()
@job(atomic=False)
def stamp(payload: dict[str, Any]) -> None:
    stamps.stamp(payload)


KINDS = {"noop": noop, "atomic": atomic, "stamp": stamp}


def enqueue(payload: dict[str, Any], kind: str) -> None:
    KINDS[kind].enqueue(payload)


def enqueue_many(payloads: list[dict[str, Any]], kind: str) -> None:
    default_task_backend.enqueue_many([(KINDS[kind], [payload], {}) for payload in payloads])

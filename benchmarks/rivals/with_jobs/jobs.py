from __future__ import annotations

from typing import Any

import record
from django.tasks import default_task_backend, task

from django_mysqlqueue.tasks import job


@task()
def noop(payload: dict[str, Any]) -> None:
    record.ran(payload)


@task()
def start(payload: dict[str, Any]) -> None:
    record.started(payload)


@task()
@job(atomic=False)
def plain_noop(payload: dict[str, Any]) -> None:
    record.ran(payload)


@task()
@job(atomic=False)
def plain_start(payload: dict[str, Any]) -> None:
    record.started(payload)


KINDS = {"noop": noop, "start": start, "plain_noop": plain_noop, "plain_start": plain_start}


def enqueue(payload: dict[str, Any], kind: str) -> None:
    KINDS[kind].enqueue(payload)


def enqueue_many(payloads: list[dict[str, Any]], kind: str) -> None:
    default_task_backend.enqueue_many([(KINDS[kind], [payload], {}) for payload in payloads])

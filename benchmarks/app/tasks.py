"""The tasks of the benchmarks, for Django 6.0 and for the package django-tasks."""

from __future__ import annotations

import asyncio

from benchmarks.app.subscribers import SLEEP, note
from django_mysqlqueue.tasks.framework import Task

if Task.__module__.startswith("django.tasks"):
    from django.tasks import task
else:
    from django_tasks import task


@task()
async def waiting(number: int) -> int:
    await asyncio.sleep(SLEEP)
    note()
    return number

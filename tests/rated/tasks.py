"""Tasks with a rate, which subscribers import when they start."""

from __future__ import annotations

import time

from django_mysqlqueue.tasks import job
from tests.app.models import Effect

try:
    from django.tasks import task
except ImportError:
    from django_tasks import task


@task
@job(rate="1/h")
def limited(number):
    Effect.objects.create(name="limited", value=number)


@task
@job(rate="1/h", max_attempts=3, backoff={"initial": 0, "jitter": 0})
def flaky(number):
    raise ValueError(number)


@job(rate="20/s", max_attempts=None)
@task
def fast(number):
    Effect.objects.create(name=f"fast|{time.time():.6f}", value=number)


@task
def free(number):
    Effect.objects.create(name="free", value=number)

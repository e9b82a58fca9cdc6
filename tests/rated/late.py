"""A task with a rate in a module that subscribers do not import when they start."""

from __future__ import annotations

from django_mysqlqueue.tasks import job
from tests.app.models import Effect

try:
    from django.tasks import task
except ImportError:
    from django_tasks import task


@task
@job(rate="1/h")
def late(number):
    Effect.objects.create(name="late", value=number)

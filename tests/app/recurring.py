"""Recurring schedules for tests. Only those that import it declare them."""

from __future__ import annotations

from datetime import timedelta

from django_mysqlqueue import recurring_message
from django_mysqlqueue.tasks import recurring
from tests.app.models import Effect

try:
    from django.tasks import task
except ImportError:
    from django_tasks import task


@recurring("0 3 * * *", timezone="Europe/Berlin", args=[1], kwargs={"b": {"c": [2]}})
@task(priority=7)
def above(a, b=None):
    """Declared on the task."""


@task
@recurring(every=timedelta(minutes=5), name="below", overlap="skip", catch_up="latest")
def below():
    """Declared on the function, before it was a task."""


@recurring(every=1, name="each-second")
@task
def each_second():
    Effect.objects.create(name="each-second")


recurring_message("ping", every=1, topic="pings", payload={"n": 1}, key="k", metadata={"m": True})

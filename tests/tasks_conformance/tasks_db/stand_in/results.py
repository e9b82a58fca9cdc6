"""This package's results, as the tests of django-tasks-db look at its own table."""

from __future__ import annotations

import json
import time

from asgiref.sync import sync_to_async
from django.tasks import task_backends

from django_mysqlqueue import reschedule
from django_mysqlqueue.models import JobResult


def milliseconds(moment):
    return round(moment.timestamp() * 1000)


COLUMNS = {
    "status": str,
    "started_at": milliseconds,
    "last_attempted_at": milliseconds,
    "finished_at": milliseconds,
    "run_after": milliseconds,
    "return_value": json.dumps,
    "worker_ids": lambda ids: "".join(f"{one}\n" for one in ids),
}


class Rows:
    """A query set."""

    def __init__(self, rows):
        self._rows = rows

    def count(self):
        return self._rows.count()

    def update(self, **values):
        if "run_after" in values:
            for row in self._rows:
                reschedule(row.id, topic=f"jobs.{row.queue_name}", deliver_at=values["run_after"])
        if "started_at" in values:
            values["last_attempted_at"] = values["started_at"]  # Their table has one column for both.
        return self._rows.update(**{name: COLUMNS[name](value) for name, value in values.items()})

    async def aupdate(self, **values):
        return await sync_to_async(self.update)(**values)


class Manager:
    """A manager."""

    def all(self):
        return Rows(JobResult.objects.all())

    def count(self):
        return self.all().count()

    def filter(self, **conditions):
        return Rows(JobResult.objects.filter(**conditions))

    def ready(self):
        return self.filter(status="READY", run_after__lte=round(time.time() * 1000))

    def successful(self):
        return self.filter(status="SUCCESSFUL")

    def failed(self):
        return self.filter(status="FAILED")

    def get(self, *, id):
        return task_backends["default"].get_result(id)

    def values(self, column):
        return JobResult.objects.values(column)


class DBTaskResult:
    """The model."""

    objects = Manager()

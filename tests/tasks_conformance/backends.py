"""The backends under test: how each is configured, and how its worker runs what is due."""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Mapping
from typing import Any

import django
from django.utils.module_loading import import_string

from django_mysqlqueue.tasks.framework import BaseTaskBackend

PACKAGE = BaseTaskBackend.__module__.removesuffix(".backends.base")
"""Of the framework: django.tasks, or django_tasks with a Django before 6.0."""
SECOND_ALIAS, SECOND_QUEUE = "reserve", "reserve"


class Backend:
    """A backend with its worker.

    Attributes:
        name: its name in the table.
        path: the path of its class.
        lacks: what it does not offer: names of feature flags, ``background`` (it has a worker), ``ends`` (its worker
            can end when nothing is due), ``retries``.
        options: its ``OPTIONS``: a job has one attempt.
        retry_options: its ``OPTIONS`` with which a job has three attempts.
        command: the management command that runs what is due in a process of its own, and then ends.
    """

    name: str
    path: str
    lacks: Collection[str] = ()
    options: Mapping[str, Any] = {}
    retry_options: Mapping[str, Any] = {}
    command: tuple[str, ...] = ()

    def tasks(self, **params: Any) -> dict[str, Any]:
        """Return the setting ``TASKS`` with this backend as the default one."""
        own = {"BACKEND": self.path, "OPTIONS": dict(self.options), "QUEUES": ["default", "mail"]}
        return {"default": {**own, **params}}

    def two(self) -> dict[str, Any]:
        """Return the setting ``TASKS`` with two backends of this kind."""
        return self.tasks() | {SECOND_ALIAS: self.tasks(QUEUES=[SECOND_QUEUE])["default"]}

    def offers(self, feature: str) -> bool:
        if feature == "Django 6.1":
            return django.VERSION >= (6, 1)
        return feature not in self.lacks

    @property
    def kind(self) -> type:
        return import_string(self.path)

    def clear(self) -> None:
        """Delete all jobs."""

    def run(self, alias: str = "default") -> None:
        """Run what is due, as often as an attempt is left."""

    def run_one_attempt(self) -> None:
        """Run one attempt of the job that is due."""


class Ours(Backend):
    name = "django-mysqlqueue"
    path = "django_mysqlqueue.tasks.MySQLQueueBackend"
    retry_options = {"MAX_ATTEMPTS": 3, "BACKOFF": {"initial": 0.01, "maximum": 0.01}}
    command = ("runsubscriber", "--drain")

    def run(self, alias: str = "default") -> None:
        from django_mysqlqueue.testing import deliver_all

        deliver_all(raise_exceptions=False)

    def run_one_attempt(self) -> None:
        from django_mysqlqueue.service.refs import GroupRef
        from django_mysqlqueue.subscriptions import registry
        from tests.support.harness import Sub

        worker = Sub(registry.handlers()[GroupRef("jobs", "jobs.default")])
        worker.step()
        worker.work()
        worker.flush()
        worker.leave()
        time.sleep(0.02)  # The retry comes due.


class Immediate(Backend):
    name = "ImmediateBackend"
    path = f"{PACKAGE}.backends.immediate.ImmediateBackend"
    lacks = ("supports_defer", "supports_get_result", "background", "retries")


class TasksDb(Backend):
    name = "django-tasks-db"
    path = "django_tasks_db.DatabaseBackend"
    lacks = ("retries",)
    command = ("db_worker", "--batch", "--no-startup-delay")

    def clear(self) -> None:
        from django_tasks_db.models import DBTaskResult

        DBTaskResult.objects.all().delete()

    def run(self, alias: str = "default") -> None:
        self._worker(alias, None).run()

    @staticmethod
    def _worker(alias: str, most: int | None) -> Any:
        from django_tasks_db.management.commands.db_worker import Worker

        return Worker(
            queue_names=["*"],
            interval=0,
            batch=True,
            backend_name=alias,
            startup_delay=False,
            max_tasks=most,
            worker_id="worker",
            excluded_queue_names=[],
        )


class Ox(Backend):
    name = "django-ox"
    path = "django_ox.backend.OxBackend"
    options = {"MAX_ATTEMPTS": 1}
    retry_options = {"MAX_ATTEMPTS": 3, "BACKOFF_INITIAL": 0.01, "BACKOFF_MAX": 0.01}
    command = ("ox_worker", "--batch")

    def clear(self) -> None:
        from django_ox.models import OxTask

        OxTask.objects.all().delete()

    def run(self, alias: str = "default") -> None:
        import datetime

        from django.utils import timezone
        from django_ox.models import OxTask

        while True:
            self._worker(alias).run()
            # A retry comes due soon; whatever else is left is a task of the future.
            soon = timezone.now() + datetime.timedelta(seconds=0.1)
            if not OxTask.objects.filter(
                status="READY", backend_name=alias, attempts__gt=0, run_after__lt=soon
            ).exists():
                return

    def run_one_attempt(self) -> None:
        self._worker("default", max_tasks=1).run()

    @staticmethod
    def _worker(alias: str, **options: Any) -> Any:
        from django_ox.worker import Worker

        return Worker(backend_alias=alias, batch=True, poll_interval=0.02, **options)


class DjQueue(Backend):
    name = "dj-queue"
    path = "dj_queue.backend.DjQueueBackend"
    lacks = ("ends", "retries")

    def clear(self) -> None:
        from dj_queue.models import Job, Process

        Job.objects.all().delete()
        Process.objects.all().delete()

    def run(self, alias: str = "default") -> None:
        from dj_queue.config import WorkerConfig
        from dj_queue.operations.claiming import claim_ready_jobs
        from dj_queue.operations.jobs import execute_claimed_job, promote_scheduled_jobs
        from dj_queue.runtime.worker import Worker

        # Without the threads of its worker, which would not see what the test has not committed.
        worker = Worker(WorkerConfig(), backend_alias=alias)
        worker.process = worker._register_process()
        try:
            promote_scheduled_jobs(batch_size=100, backend_alias=alias)
            while claimed := claim_ready_jobs(limit=100, process=worker.process, backend_alias=alias):
                for job in claimed:
                    execute_claimed_job(job, backend_alias=alias)
        finally:
            worker._deregister_process()


ALL: dict[str, Backend] = {kind.name: kind() for kind in (Ours, Immediate, TasksDb, Ox, DjQueue)}
TESTED = os.environ.get("TEST_TASK_BACKENDS", f"{Ours.name} {Immediate.name}").split()
"""The names of those that this run tests."""

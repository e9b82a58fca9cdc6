"""The app's configuration."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from django.apps import AppConfig
from django.apps.registry import Apps
from django.conf import settings
from django.db import router
from django.db.models.signals import post_migrate
from django.utils.translation import gettext_lazy as _

if TYPE_CHECKING:
    from django_mysqlqueue.schedules.registry import Destination
    from django_mysqlqueue.service.refs import GroupRef
    from django_mysqlqueue.subscriptions.handler import Handler


class DjangoMysqlqueueConfig(AppConfig):
    """Configuration of the app ``django_mysqlqueue``."""

    name = "django_mysqlqueue"
    label = "django_mysqlqueue"
    verbose_name = _("Message queue")
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        """Register the system checks, connect the layers, and register groups after ``migrate``."""
        from django_mysqlqueue.checks import schedules as schedule_checks  # noqa: F401
        from django_mysqlqueue.checks import system  # noqa: F401
        from django_mysqlqueue.options import job_queues
        from django_mysqlqueue.schedules import registry as schedules
        from django_mysqlqueue.service import known_topics, wakeups
        from django_mysqlqueue.sql import connection, sqlite  # noqa: F401  # prepare new connections
        from django_mysqlqueue.subscriptions import registry

        wakeups.eager = _deliver_eagerly
        known_topics.discover = registry.discover
        post_migrate.connect(_register_groups, sender=self)
        if _has_tasks():
            if _job_handlers not in registry.sources:  # Called again if a test overrides INSTALLED_APPS.
                registry.sources.append(_job_handlers)
            job_queues.find = _job_topics
            job_queues.find_option = _job_option
            schedules.place_of = _place_of_task
            schedules.known_tasks = _known_tasks
        if sys.argv[1:2] == ["runserver"]:
            from django_mysqlqueue.runtime.process import runserver

            runserver.start_subscriber()


def _has_tasks() -> bool:
    """Return whether there is a framework for tasks: Django has one since 6.0."""
    return any(importlib.util.find_spec(name) is not None for name in ("django.tasks", "django_tasks"))


def _job_handlers() -> Mapping[GroupRef, Handler]:
    if not getattr(settings, "TASKS", None):
        return {}  # Without the import, which for django-tasks includes the admin.
    from django_mysqlqueue.tasks.handlers import job_handlers

    return job_handlers()


def _job_topics() -> Collection[str]:
    if not getattr(settings, "TASKS", None):
        return ()
    from django_mysqlqueue.tasks.backend import queue_topics

    return queue_topics()


def _job_option(name: str, backend: str, queue_name: str, task_path: str) -> Any:
    from django_mysqlqueue.tasks.backend import option_of_task

    return option_of_task(name, backend, queue_name, task_path)


def _place_of_task(path: str, given: Destination | None) -> Destination:
    from django_mysqlqueue.tasks.backend import place_of

    return place_of(path, given)


def _known_tasks() -> Collection[str]:
    if not getattr(settings, "TASKS", None):
        return ()
    from django_mysqlqueue.tasks.importing import known_tasks

    return known_tasks()


def _deliver_eagerly(using: str) -> None:
    from django_mysqlqueue.runtime.inline import deliver_eagerly

    deliver_eagerly(using)


def _register_groups(*, using: str, apps: Apps | None = None, **kwargs: Any) -> None:
    """Register the groups of all handlers after ``migrate``.

    So ``start="latest"`` and GC know a group before its first subscriber starts.
    """
    # "flush" sends no apps; after "migrate … zero", apps lack the model.
    if apps is not None and "consumergroup" not in apps.all_models["django_mysqlqueue"]:
        return
    from django_mysqlqueue.models import ConsumerGroup
    from django_mysqlqueue.runtime.registering import register_groups

    # If a router does not allow the tables here, the migration counts as applied, but has created none.
    if not router.allow_migrate_model(using, ConsumerGroup):
        return
    register_groups(using)

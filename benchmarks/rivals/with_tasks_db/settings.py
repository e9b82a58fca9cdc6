"""django-tasks-db: a process runs one job at a time. ``db_worker`` has no threads, no prefetch and no batches.

The only choices are ``--interval`` (which matters only for an empty queue), ``--no-startup-delay`` and quiet logs.
"""

from common import *  # noqa: F403

INSTALLED_APPS = ["django_tasks_db"]
TASKS = {"default": {"BACKEND": "django_tasks_db.DatabaseBackend", "QUEUES": ["default"]}}

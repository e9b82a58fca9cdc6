"""django-tasks-db: one process runs one job at a time; ``db_worker`` has no threads, no prefetch, no batches.

What can be chosen: ``--interval`` (only an empty queue waits), ``--no-startup-delay``, quiet logs.
"""

from common import *  # noqa: F403

INSTALLED_APPS = ["django_tasks_db"]
TASKS = {"default": {"BACKEND": "django_tasks_db.DatabaseBackend", "QUEUES": ["default"]}}

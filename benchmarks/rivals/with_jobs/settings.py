"""This package as a backend for django.tasks, with the settings of ``with_mysqlqueue``."""

from common import *  # noqa: F403

INSTALLED_APPS = ["django_mysqlqueue"]
TASKS = {"default": {"BACKEND": "django_mysqlqueue.tasks.MySQLQueueBackend"}}
MYSQLQUEUE = {"CLAIM_SIZE": 500, "PREFETCH": 1000, "THREADS": 8}

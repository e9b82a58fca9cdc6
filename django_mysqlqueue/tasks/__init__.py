"""Jobs: a backend for ``django.tasks``, whose results commit with the jobs' own writes.

``TASKS = {"default": {"BACKEND": "django_mysqlqueue.tasks.MySQLQueueBackend"}}``
"""

from __future__ import annotations

from django_mysqlqueue.tasks.backend import MySQLQueueBackend
from django_mysqlqueue.tasks.options import job

__all__ = ["MySQLQueueBackend", "job"]

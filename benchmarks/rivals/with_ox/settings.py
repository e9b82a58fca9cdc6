"""django-ox: ``ox_worker`` claims one job at a time for each free thread of ``--concurrency``."""

from common import *  # noqa: F403

INSTALLED_APPS = ["django_ox"]
TASKS = {"default": {"BACKEND": "django_ox.backend.OxBackend", "QUEUES": ["default"]}}

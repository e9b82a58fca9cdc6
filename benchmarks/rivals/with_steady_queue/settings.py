"""Steady Queue: a supervisor with two processes of eight threads, as many as this package has. It keeps no results."""

from datetime import timedelta

from common import *  # noqa: F403
from common import DATABASES
from steady_queue.configuration import Configuration

INSTALLED_APPS = ["django.contrib.contenttypes", "steady_queue"]
DATABASES["default"]["ENGINE"] = "with_steady_queue.engine"  # keeps the connections of threads
TASKS = {"default": {"BACKEND": "steady_queue.backend.SteadyQueueBackend", "QUEUES": ["default"], "OPTIONS": {}}}
STEADY_QUEUE = Configuration.Options(
    workers=[Configuration.Worker(queues=["*"], threads=8, processes=2, polling_interval=timedelta(seconds=0.05))],
    recurring_tasks=[],
)

"""Settings of the soak test's processes. The environment has SOAK_FOLDER and SOAK_SOCKET."""

import os
from pathlib import Path
from typing import Any

import django

from soak import job_plan, plan, schedule_plan

SECRET_KEY = "soak"  # noqa: S105
INSTALLED_APPS = ["django_mysqlqueue", "soak.app"]
if django.VERSION < (6,):
    INSTALLED_APPS.append("django_tasks")
USE_TZ = True
DATABASES = {
    alias: {
        "ENGINE": "django.db.backends.mysql",
        "NAME": "mysqlqueue" if alias == plan.HOME else f"mysqlqueue_{alias}",
        "USER": "root",
        "OPTIONS": {"unix_socket": os.environ["SOAK_SOCKET"], "charset": "utf8mb4"},
    }
    for alias in plan.ALIASES
}
TASKS = {
    "default": {
        "BACKEND": "django_mysqlqueue.tasks.MySQLQueueBackend",
        "QUEUES": list(job_plan.QUEUES),
        "OPTIONS": {"MAX_ATTEMPTS": job_plan.MAX_ATTEMPTS, "BACKOFF": {"initial": 0.1, "maximum": 1}},
    }
}
SILENCED_SYSTEM_CHECKS: list[str] = []
# Shorter than the defaults, so that a run of minutes covers what would take hours.
MYSQLQUEUE: dict[str, Any] = {
    "LEASE_DURATION": plan.LEASE,
    "LEASE_RENEWAL_INTERVAL": plan.LEASE / 3,
    "VISIBILITY_TIMEOUT": 8,
    "MAX_PROCESSING_TIME": plan.PROCESSING,
    "SHUTDOWN_TIMEOUT": plan.SHUTDOWN,
    "MAX_ATTEMPTS": plan.MAX_ATTEMPTS,
    "BACKOFF": {"initial": 0.1, "maximum": 2},
    "MAX_POLL_INTERVAL": 0.5,
    "CLAIM_SIZE": 50,
    "RETENTION": plan.RETENTION,
    "TOPICS": {
        plan.RELAYED: {"DATABASE": plan.OTHER, "VIA": plan.HOME},
        schedule_plan.AWAY: {"DATABASE": plan.OTHER, "VIA": plan.HOME},
    },
}
if (Path(os.environ["SOAK_FOLDER"]) / plan.MOVED_SETTINGS).exists():
    MYSQLQUEUE["TOPICS"] |= {plan.MOVED: {"DATABASE": plan.OTHER, "VIA": plan.HOME}}

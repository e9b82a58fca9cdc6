"""Settings that all projects of the comparison share: the database, and none that slow workers down."""

from __future__ import annotations

import environ

SECRET_KEY = "benchmark"  # noqa: S105
USE_TZ = True
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
DATABASES = {
    "default": {
        **environ.Env().db_url("DATABASE_URL"),
        # Otherwise workers that close old connections after each job would open a new one for each job.
        "CONN_MAX_AGE": None,
    }
}
# django-tasks-db and django.tasks log each job below the level WARNING.
LOGGING = {
    "version": 1,
    "disable_existing_loggers": False,
    "handlers": {"stderr": {"class": "logging.StreamHandler"}},
    "root": {"handlers": ["stderr"], "level": "WARNING"},
    # The level of the root logger is not enough: Django sets that of its own loggers to INFO.
    "loggers": {"django": {"level": "WARNING"}},
}

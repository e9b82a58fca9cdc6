"""What every project of the comparison shares: the database, and nothing that slows a worker down."""

from __future__ import annotations

import environ

SECRET_KEY = "benchmark"  # noqa: S105
USE_TZ = True
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
DATABASES = {
    "default": {
        **environ.Env().db_url("DATABASE_URL"),
        # Workers that close old connections after each job would open a new one for each.
        "CONN_MAX_AGE": None,
    }
}
# django-tasks-db and django.tasks log each job; a production log at WARNING does not.
LOGGING = {
    "version": 1,
    "disable_existing_loggers": False,
    "handlers": {"stderr": {"class": "logging.StreamHandler"}},
    "root": {"handlers": ["stderr"], "level": "WARNING"},
}

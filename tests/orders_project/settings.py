"""The project of docs/howto/test.md; tests/docs/test_testing.py copies it, and adds the examples of the page."""

from pathlib import Path

import django

BASE = Path(__file__).parent
SECRET_KEY = "orders"  # noqa: S105
INSTALLED_APPS = ["django_mysqlqueue", "orders"]
if django.VERSION < (6, 0):
    INSTALLED_APPS.append("django_tasks")
ROOT_URLCONF = "urls"
USE_TZ = True
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
DATABASES = {
    alias: {
        "ENGINE": "django.db.backends.sqlite3",
        "NAME": BASE / f"{alias}.sqlite3",
        "TEST": {"NAME": BASE / f"{alias}.test.sqlite3"},
        "OPTIONS": {
            "transaction_mode": "IMMEDIATE",
            "timeout": 30,
            "init_command": "PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL;",
        },
    }
    for alias in ("default", "shop")
}
MYSQLQUEUE = {"STRICT_TOPICS": True}
TASKS = {"default": {"BACKEND": "django_mysqlqueue.tasks.MySQLQueueBackend"}}

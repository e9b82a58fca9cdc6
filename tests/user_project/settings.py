"""A project as users have one, with tests of its own; tests/packaging/test_testing.py runs them."""

import os

import django
import environ

SECRET_KEY = "shop"  # noqa: S105
INSTALLED_APPS = ["django_mysqlqueue", "tests.user_project.shop"]
if django.VERSION < (6, 0):
    INSTALLED_APPS.append("django_tasks")
TASKS = {"default": {"BACKEND": "django_mysqlqueue.tasks.MySQLQueueBackend", "QUEUES": ["default", "mail"]}}
DATABASES = {"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}}
if os.environ.get("DATABASE_URL"):
    DATABASES["default"] = environ.Env().db_url("DATABASE_URL")
    DATABASES["default"]["OPTIONS"].update(
        charset="utf8mb4", isolation_level=os.environ.get("TEST_ISOLATION", "read committed")
    )
DATABASES["second"] = {**DATABASES["default"]}
if os.environ.get("DATABASE_URL"):
    DATABASES["second"]["NAME"] = f"{DATABASES['default']['NAME']}_second"
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
USE_TZ = True

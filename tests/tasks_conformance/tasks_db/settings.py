"""The settings of those tests: a project with this package's backend."""

import os

import environ

env = environ.Env()

SECRET_KEY = "tests"  # noqa: S105
USE_TZ = True
INSTALLED_APPS = [
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django_mysqlqueue",
    "stand_in",
]
if os.environ.get("DATABASE_URL"):
    DATABASES = {"default": {**env.db_url("DATABASE_URL")}}
    DATABASES["default"]["OPTIONS"]["charset"] = "utf8mb4"
else:
    DATABASES = {
        "default": {
            "ENGINE": "django.db.backends.sqlite3",
            "NAME": os.environ["TEST_SQLITE_FILE"],
            "OPTIONS": {
                "transaction_mode": "IMMEDIATE",
                "timeout": 30,
                "init_command": "PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL;",
            },
            "TEST": {"NAME": os.environ["TEST_SQLITE_FILE"]},
        }
    }
if os.environ.get("IN_TEST") == "":
    # A worker process, which works on the test database.
    DATABASES["default"]["NAME"] = os.environ["TEST_DATABASE"]
TASKS = {"default": {"BACKEND": "django_mysqlqueue.tasks.MySQLQueueBackend", "QUEUES": ["default", "queue-1"]}}
MYSQLQUEUE = {"POLL_INTERVAL": 0.05, "MAX_POLL_INTERVAL": 0.2}
TEST_RUNNER = "stand_in.runner.Runner"
LOGGING = {
    "version": 1,
    "disable_existing_loggers": False,
    "handlers": {"stdout": {"class": "logging.StreamHandler", "stream": "ext://sys.stdout"}},
    "loggers": {"django.tasks": {"handlers": ["stdout"], "level": "INFO" if "IN_TEST" in os.environ else "ERROR"}},
}

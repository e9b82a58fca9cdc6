"""Settings of the test suite. DATABASE_URL names the engine; SQLite in a file without it."""

import json
import os
from pathlib import Path
from typing import Any

import django
import environ

env = environ.Env()

SECRET_KEY = "tests"  # noqa: S105
INSTALLED_APPS = [
    "django_mysqlqueue",
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.messages",
    "django.contrib.sessions",
    "tests.app",
]
if django.VERSION < (6,):
    INSTALLED_APPS.append("django_tasks")
INSTALLED_APPS += env.list("TEST_APPS", default=[])
if env.str("TEST_TASKS", ""):
    TASKS = env.json("TEST_TASKS")
if env.bool("TEST_WITHOUT_ADMIN", False):
    # Subscriber processes start in two thirds of the time; a test starts them by the hundred.
    INSTALLED_APPS.remove("django.contrib.admin")
MIDDLEWARE = [
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
]
TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
            ]
        },
    }
]
STATIC_URL = "static/"
PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]
USE_TZ = True
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"


def _database() -> dict[str, Any]:
    if os.environ.get("DATABASE_URL"):
        database = dict(env.db_url("DATABASE_URL"))
        database["OPTIONS"] = {**database.get("OPTIONS", {}), "charset": "utf8mb4"}
        if os.environ.get("TEST_ISOLATION"):
            # Where the project's default differs, the queue must bring its own level.
            database["OPTIONS"]["isolation_level"] = os.environ["TEST_ISOLATION"]
        return database
    return {
        "ENGINE": "django.db.backends.sqlite3",
        "NAME": os.environ.get("TEST_SQLITE_FILE", "tests.sqlite3"),
        "OPTIONS": {
            "transaction_mode": "IMMEDIATE",
            "timeout": 30,
            "init_command": "PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL;",
        },
        # A database in memory could not be shared with real subscriber processes.
        "TEST": {"NAME": os.environ.get("TEST_SQLITE_FILE", "tests.sqlite3")},
    }


def _beside(database: dict[str, Any], suffix: str) -> dict[str, Any]:
    """Another database on the same server; on SQLite another file."""
    path = Path(database["NAME"])
    name = str(path.with_name(f"{path.stem}_{suffix}{path.suffix}"))
    return {**database, "NAME": name, "TEST": {"NAME": name} if "TEST" in database else {}}


DATABASES = {
    "default": _database(),
    "other": {"ENGINE": "django.db.backends.sqlite3", "NAME": "file:other?mode=memory&cache=shared"},
    # For tests of several databases: a place for the queue alone, and a replica that nobody may read.
    "queue": _beside(_database(), "queue"),
    "replica": {"ENGINE": "tests.replica", "NAME": "replica", "TEST": {"MIRROR": "default"}},
}
if os.environ.get("TEST_FAR_SOCKET"):
    # Another server, for subscriber processes whose databases are not all up.
    DATABASES["far"] = {
        "ENGINE": "django.db.backends.mysql",
        "NAME": os.environ["TEST_FAR_NAME"],
        "USER": "root",
        "OPTIONS": {"unix_socket": os.environ["TEST_FAR_SOCKET"], "charset": "utf8mb4"},
    }
DATABASE_ROUTERS: list[str] = json.loads(os.environ.get("TEST_ROUTERS", "[]"))
# Real subscriber processes get shorter times than the defaults.
MYSQLQUEUE: dict[str, object] = json.loads(os.environ.get("TEST_MYSQLQUEUE", "{}"))

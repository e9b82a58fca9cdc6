"""Settings of the example project.

Environment variables: DATABASE_URL (default: SQLite in demo-output/), SECRET_KEY, DEBUG, ALLOWED_HOSTS.
"""

from __future__ import annotations

from typing import Any

import django
import environ

from example_project.paths import OUTPUT, ROOT

env = environ.Env()

BASE_DIR = ROOT
DEBUG = env.bool("DEBUG", default=True)
# The default is only for running the demo on your own machine.
SECRET_KEY = env.str("SECRET_KEY", default="insecure-demo-key-for-local-use-only")
ALLOWED_HOSTS = env.list("ALLOWED_HOSTS", default=["localhost", "127.0.0.1", "[::1]"])

INSTALLED_APPS = [
    "django_mysqlqueue",  # before the admin, whose index then shows the state of the queue
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.sessions",
    "django.contrib.messages",
    "django.contrib.staticfiles",
    "example_project.commits",
]
if django.VERSION < (6, 0):
    INSTALLED_APPS.append("django_tasks")
MIDDLEWARE = [
    "django.middleware.security.SecurityMiddleware",
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
    "django.middleware.clickjacking.XFrameOptionsMiddleware",
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
            ],
        },
    },
]
ROOT_URLCONF = "example_project.urls"
WSGI_APPLICATION = "example_project.wsgi.application"
STATIC_URL = "static/"
USE_TZ = True
TIME_ZONE = "UTC"
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"

SQLITE_OPTIONS = {
    # Take the write lock when a transaction begins, and wait for it there. With Django's default the
    # lock is taken at the first write, where waiting cannot help: "database is locked".
    "transaction_mode": "IMMEDIATE",
    "timeout": 30,
    # WAL: readers do not wait for the writer. NORMAL: a commit does not wait for the disk.
    "init_command": "PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL;",
}


def _database() -> dict[str, Any]:
    # make exports an empty DATABASE_URL if none is set.
    if env.str("DATABASE_URL", default=""):
        database: dict[str, Any] = dict(env.db_url("DATABASE_URL"))
    else:
        OUTPUT.mkdir(exist_ok=True)
        database = {"ENGINE": "django.db.backends.sqlite3", "NAME": str(OUTPUT / "demo.sqlite3")}
    defaults: dict[str, Any] = {}
    if database["ENGINE"].endswith(".sqlite3"):
        defaults = SQLITE_OPTIONS
    elif database["ENGINE"].endswith(".mysql"):
        defaults = {"charset": "utf8mb4"}
    # Options in the URL take precedence.
    database["OPTIONS"] = {**defaults, **database.get("OPTIONS", {})}
    return database


DATABASES = {"default": _database()}

TASKS = {"default": {"BACKEND": "django_mysqlqueue.tasks.MySQLQueueBackend"}}
MYSQLQUEUE = {
    # manage.py pipelinedemo sets these three through its environment.
    "RETENTION": env.float("RETENTION", default=86400.0),
    "ARCHIVE_REQUIRED": env.bool("ARCHIVE_REQUIRED", default=False),
    "RECORD_DELIVERIES": env.str("RECORD_DELIVERIES", default="failures"),
    "ARCHIVE_PATH": str(OUTPUT / "archive"),
    # Publishing to a mistyped topic raises an error instead of storing messages that no handler reads.
    "STRICT_TOPICS": True,
    # Short backoffs (in seconds), so that the demo ends soon. The defaults are 1 second, growing to 1 hour.
    "BACKOFF": {"initial": 0.05, "maximum": 1.0},
}

"""Settings of the test suite. DATABASE_URL names the engine; SQLite in a file by default."""

import os

import environ

env = environ.Env()

SECRET_KEY = "tests"  # noqa: S105
INSTALLED_APPS = ["django_mysqlqueue", "tests.app"]
USE_TZ = True
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"

_url = os.environ.get("DATABASE_URL", "")
if _url:
    _default = env.db_url("DATABASE_URL")
    # Queue code must bring its own isolation level: MySQL's own default here.
    _default["OPTIONS"] = {**_default.get("OPTIONS", {}), "charset": "utf8mb4"}
else:
    _default = {
        "ENGINE": "django.db.backends.sqlite3",
        "NAME": os.environ.get("TEST_SQLITE_FILE", "tests.sqlite3"),
        "OPTIONS": {
            "transaction_mode": "IMMEDIATE",
            "timeout": 30,
            "init_command": "PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL;",
        },
    }
DATABASES = {"default": _default}
MYSQLQUEUE: dict[str, object] = {}

"""Settings of the benchmarks: the queue, and an application with two tables.

The environment variable DATABASE_URL selects the server. BENCH_MYSQLQUEUE (JSON) overrides the queue's defaults.
"""

import json
import os
from typing import Any

import environ

SECRET_KEY = "benchmarks"  # noqa: S105
INSTALLED_APPS = ["django_mysqlqueue", "benchmarks.app"]
USE_TZ = True
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
DATABASES: dict[str, Any] = {"default": dict(environ.Env().db_url("DATABASE_URL", default="sqlite:///bench.sqlite3"))}
if DATABASES["default"]["ENGINE"].endswith("sqlite3"):
    DATABASES["default"]["OPTIONS"] = {
        "transaction_mode": "IMMEDIATE",
        "timeout": 30,
        "init_command": "PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL;",
    }
else:
    DATABASES["default"]["OPTIONS"] = {**DATABASES["default"].get("OPTIONS", {}), "charset": "utf8mb4"}
MYSQLQUEUE: dict[str, object] = json.loads(os.environ.get("BENCH_MYSQLQUEUE", "{}"))

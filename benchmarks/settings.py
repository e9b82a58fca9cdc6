"""Settings of the benchmarks: the queue, and an application with two tables.

The environment variable DATABASE_URL selects the server. BENCH_DATABASES (JSON) has the URLs of further ones by alias,
BENCH_MYSQLQUEUE (JSON) overrides the queue's defaults, and BENCH_TASKS (JSON) is TASKS.
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
for _alias, _url in json.loads(os.environ.get("BENCH_DATABASES", "{}")).items():
    DATABASES[_alias] = dict(environ.Env.db_url_config(_url))
    DATABASES[_alias]["OPTIONS"] = {**DATABASES[_alias].get("OPTIONS", {}), "charset": "utf8mb4"}
if "BENCH_TASKS" in os.environ:
    TASKS = json.loads(os.environ["BENCH_TASKS"])
MYSQLQUEUE: dict[str, object] = json.loads(os.environ.get("BENCH_MYSQLQUEUE", "{}"))

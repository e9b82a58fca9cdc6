"""Users of the server with the privileges of a role, and the statements that each role's work consists of."""

from __future__ import annotations

import contextlib
import io
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from django.core.management import call_command
from django.db import IntegrityError, OperationalError, connection

import django_mysqlqueue
from django_mysqlqueue.grants import ROLES
from tests.support.recorded_statements import _shape

PACKAGE = Path(django_mysqlqueue.__file__).parent
DENIED = (1142, 1143, 1370)
"""No privilege on a table, on a column, on a procedure."""
PASSWORD = "role"  # noqa: S105


def user_of(role: str) -> str:
    return f"queue_{role.replace('-', '_')}"


@contextlib.contextmanager
def account(role: str) -> Iterator[Any]:
    """A connection of a user to which what ``queuegrants`` prints was granted, and nothing else."""
    name = user_of(role)
    printed = io.StringIO()
    call_command("queuegrants", "--role", role, stdout=printed)
    with connection.cursor() as cursor:
        cursor.execute(f"DROP USER IF EXISTS '{name}'@'%%'", [])
        cursor.execute(f"CREATE USER '{name}'@'%%' IDENTIFIED BY '{PASSWORD}'", [])
        for line in printed.getvalue().splitlines():
            if not line.startswith("--"):
                cursor.execute(line.replace("%", "%%"), [])
    own = connection.copy()
    own.settings_dict = {**own.settings_dict, "USER": name, "PASSWORD": PASSWORD}
    try:
        yield own
    finally:
        own.close()
        with connection.cursor() as cursor:
            cursor.execute(f"DROP USER '{name}'@'%%'", [])


def denied(own: Any, sql: str, params: Any = ()) -> bool:
    """Whether the server refuses a statement to a user for want of a privilege. It changes nothing."""
    try:
        with own.cursor() as cursor:
            cursor.execute(f"EXPLAIN {sql}", params)
            cursor.fetchall()
    except OperationalError as error:
        if error.args[0] in DENIED:
            return True
        raise
    except IntegrityError:
        return False  # a value is missing, which the server says only to those who may insert
    return False


class Statements:
    """One statement of each shape, and the roles whose work sends it, by what is on the stack."""

    def __init__(self) -> None:
        self.of: dict[str, dict[str, tuple[str, Any]]] = {role: {} for role in ROLES}

    def __call__(self, execute, sql, params, many, context):
        if re.match(r"\(?SELECT|INSERT|UPDATE|DELETE", sql) and re.search(r"queue_|django_migrations", sql):
            for role in _roles():
                self.of[role].setdefault(_shape(sql), (sql, params))
        return execute(sql, params, many, context)


def _roles() -> set[str]:
    rooms, functions = set(), set()
    frame = sys._getframe(2)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if PACKAGE in path.parents:
            rooms.add(path.relative_to(PACKAGE).parts[0])
            functions.add(f"{path.stem}.{frame.f_code.co_name}")
        frame = frame.f_back
    if "operations" in rooms:
        return {"operator"}
    if rooms & {"inspection", "tails", "management"} or "schedules.read_all" in functions:
        return {"reader", "operator"}
    if "runtime" in rooms or "handlers._insert" in functions:  # which inserts results of messages that have none
        return {"subscriber"}
    if functions & {"publishing._insert_chunk"}:
        return (
            {"scheduler", "subscriber"}
            if "debouncing.remember" in functions
            else {"publisher", "scheduler", "subscriber"}
        )
    if functions & {"job_rows.insert", "job_stages.insert"} and "job_rows.insert_unique" not in functions:
        return {"publisher", "scheduler", "subscriber"}
    if functions & {
        "scheduling.cancel",
        "scheduling.reschedule",
        "job_results.request_cancel",
        "job_rows.insert_unique",
    }:
        return {"scheduler", "subscriber"}
    if functions & {"leasing.revoke", "heartbeats.remove"}:
        return {"operator"}
    if "audit.collect" in functions:
        return {"subscriber"}
    if "service" in rooms <= {"service", "sql", "managers.py", "models"} and not any(
        name.startswith("audit.") for name in functions
    ):
        return {"subscriber"}
    return set()

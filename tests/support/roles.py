"""Users of the server with the privileges of a role, and the statements that each role's work consists of."""

from __future__ import annotations

import contextlib
import io
import re
import zlib
from collections.abc import Iterator
from typing import Any

from django.core.management import call_command
from django.db import IntegrityError, OperationalError, connection

from django_mysqlqueue.checks.grants import ROLES
from tests.support.recorded_statements import sender, shape_of

DENIED = (1142, 1143, 1370)
"""No privilege on a table, on a column, on a procedure."""
PASSWORD = "role"  # noqa: S105
ALSO = {"publisher": ("scheduler", "subscriber"), "scheduler": ("subscriber",), "reader": ("operator",)}
"""Roles that may do what another one may."""


def own_user(name: str) -> str:
    """The name of a server's user that no other run of tests on the server has: each has its own database."""
    return f"{name.replace('-', '_')}_{zlib.crc32(connection.settings_dict['NAME'].encode()):08x}"


def user_of(role: str) -> str:
    return own_user(f"queue_{role}")


@contextlib.contextmanager
def account(role: str) -> Iterator[Any]:
    """A connection of a user to which what ``queuegrants`` prints was granted, and nothing else."""
    name = user_of(role)
    printed = io.StringIO()
    call_command("queuegrants", "--role", role, "--user", name, stdout=printed)
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


_working: list[str] = []
"""The roles whose work is being done; the last one is meant."""


@contextlib.contextmanager
def as_role(role: str) -> Iterator[None]:
    """What the queue sends inside is the work of this role."""
    assert role in ROLES
    _working.append(role)
    try:
        yield
    finally:
        _working.pop()


class Statements:
    """One statement of each shape of each role's work, which also is the work of those who may do more."""

    def __init__(self) -> None:
        self.of: dict[str, dict[str, tuple[str, Any]]] = {role: {} for role in ROLES}

    def __call__(self, execute, sql, params, many, context):
        if _working and sender() is not None and re.match(r"\(?SELECT|INSERT|UPDATE|DELETE", sql):
            for role in (_working[-1], *ALSO.get(_working[-1], ())):
                self.of[role].setdefault(shape_of(sql), (sql, params))
        return execute(sql, params, many, context)

"""``manage.py queuegrants``: print the privileges that a role of database users needs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from django.core.management.base import CommandError, CommandParser
from django.db import Error, connections

from django_mysqlqueue.checks import grants
from django_mysqlqueue.management.base import QueueCommand, add_format, database_errors
from django_mysqlqueue.sql.connection import database_name, is_server, named_database


class Command(QueueCommand):
    """Print the GRANT statements of a role."""

    every_database = True
    help = (
        "Print the GRANT statements with the least privileges that a role of database users needs, for MariaDB and "
        "MySQL. Nothing is changed: run the statements as a user who may grant them."
    )
    requires_system_checks: list[str] = []

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        parser.add_argument(
            "--role",
            required=True,
            choices=list(grants.ROLES),
            help="; ".join(f"{name}: {role.work}" for name, role in grants.ROLES.items()),
        )
        parser.add_argument(
            "--user",
            metavar="USER[@HOST]",
            help="account to grant to (default: queue_ROLE@%%; without a host: any host)",
        )
        add_format(parser)

    @contextlib.contextmanager
    def prepared(self, using: str) -> Iterator[None]:
        """Require no tables: privileges can be granted before they are there."""
        with database_errors(using):
            yield

    def write_heading(self, using: str, *, is_first: bool) -> None:
        """Write the heading as a comment: all of the output is SQL."""
        if not is_first:
            self.stdout.write("")
        self.stdout.write(f"-- Database {using!r}")

    def write_error(self, text: str) -> None:
        """Write the error as a comment."""
        self.stdout.write(f"-- {text}")

    def run_on(self, using: str, options: dict[str, Any]) -> None:
        connection = connections[using]
        if not is_server(connection):
            raise CommandError(f"The database {using!r} is {connection.display_name}, which has no users.")
        role = options["role"]
        user, _, host = (options["user"] or f"queue_{role.replace('-', '_')}").partition("@")
        if not user or "\\" in f"{user}{host}" or not f"{user}{host}".isprintable():
            raise CommandError(f"--user {options['user']!r}: must be USER or USER@HOST, without backslashes.")
        found = grants.statements(role, database=_database(using), user=user, host=host or "%")
        if options["format"] == "json":
            account = {"user": user, "host": host or "%"}
            self.write_json({"database": using, "role": role, **account, "statements": found})
            return
        self.stdout.write(f"-- {role}: {grants.ROLES[role].work}.")
        for statement in found:
            self.stdout.write(f"{statement};")


def _database(using: str) -> str:
    """Return the name of a database: as its server says it, or as the settings do if the server does not let us in.

    The user of the settings may be one to whom nothing has been granted yet.
    """
    connection = connections[using]
    try:
        name = database_name(connection)
    except Error:
        name = named_database(connection)
        if not name:
            raise
    if not name:
        raise CommandError(f"The connection to {using!r} is on no database: DATABASES[{using!r}] has no NAME.")
    return name

"""``manage.py queuegrants``: print the privileges that a role of database users needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from django.core.management.base import CommandError, CommandParser
from django.db import connections

from django_mysqlqueue import grants
from django_mysqlqueue.management.base import LimitedCommand, add_database, database_of, require_none
from django_mysqlqueue.service.databases import queue_aliases
from django_mysqlqueue.sql.connection import is_server


class Command(LimitedCommand):
    """Print the GRANT statements of a role."""

    help = (
        "Print the GRANT statements with the least privileges that a role of database users needs, for MariaDB and "
        "MySQL. Nothing is changed: run the statements as a user who may grant them."
    )
    requires_system_checks: list[str] = []

    def add_arguments(self, parser: CommandParser) -> None:
        add_database(parser)
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

    def databases(self, options: Mapping[str, Any]) -> Sequence[str]:
        """Return the aliases of the databases to print statements for: all of the queue's, without ``--database``."""
        return queue_aliases() if options.get("database") is None else [database_of(options["database"])]

    def handle(self, *args: Any, **options: Any) -> None:
        aliases = self.databases(options)
        if len(aliases) == 1:
            self._print(aliases[0], options)
            return
        failed = []
        for number, using in enumerate(aliases):
            # All of the output is SQL.
            if number:
                self.stdout.write("")
            self.stdout.write(f"-- Database {using!r}")
            try:
                self._print(using, options)
            except CommandError as error:
                self.stdout.write(f"-- {error}")
                failed.append(using)
        require_none(failed, aliases)

    def _print(self, using: str, options: dict[str, Any]) -> None:
        connection = connections[using]
        if not is_server(connection):
            raise CommandError(f"The database {using!r} is {connection.display_name}, which has no users.")
        role = options["role"]
        user, _, host = (options["user"] or f"queue_{role.replace('-', '_')}").partition("@")
        if not user or "\\" in f"{user}{host}" or not f"{user}{host}".isprintable():
            raise CommandError(f"--user {options['user']!r}: must be USER or USER@HOST, without backslashes.")
        found = grants.statements(role, database=str(connection.settings_dict["NAME"]), user=user, host=host or "%")
        self.stdout.write(f"-- {role}: {grants.ROLES[role].work}.")
        for statement in found:
            self.stdout.write(f"{statement};")

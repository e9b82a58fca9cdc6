"""``manage.py queueprocedures``: install, update or remove the stored procedures for clients in plain SQL."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from django.core.management.base import CommandError, CommandParser

from django_mysqlqueue.exceptions import OperationRefused
from django_mysqlqueue.humanize import counted
from django_mysqlqueue.management.base import QueueCommand
from django_mysqlqueue.procedures import installing
from django_mysqlqueue.procedures.definitions import SESSION


class Command(QueueCommand):
    """Install, update or remove the stored procedures."""

    every_database = True
    help = (
        "Install the stored procedures with which clients in any language consume messages, or update them. Run it "
        "after each upgrade, and when settings or handlers' options have changed."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        how = parser.add_mutually_exclusive_group()
        how.add_argument("--remove", action="store_true", help="drop the procedures")
        how.add_argument(
            "--check", action="store_true", help="change nothing; exit with status 1 if an update is necessary"
        )
        how.add_argument("--print", action="store_true", help="print the statements instead, for the mysql client")

    def run_on(self, using: str, options: dict[str, Any]) -> None:
        try:
            if options["remove"]:
                names = installing.remove(using)
                self.stdout.write(f"Removed {counted(len(names), 'procedure')}.")
            elif options["check"]:
                self._check(installing.state(using))
            elif options["print"]:
                self._print(using)
            else:
                self._install(using)
        except OperationRefused as error:
            raise CommandError(str(error)) from error

    def run_on_each(self, aliases: Sequence[str], options: dict[str, Any]) -> None:
        """Refuse to print a script for several databases; otherwise as for every command."""
        if options["print"]:
            known = ", ".join(map(repr, aliases))
            raise CommandError(f"--print prints the statements for one database: pass --database, one of {known}.")
        super().run_on_each(aliases, options)

    def _install(self, using: str) -> None:
        before = installing.install(using)
        if before.is_current:
            self.stdout.write("The procedures are up to date.")
        for number, verb in (
            (len(before.missing), "Installed"),
            (len(before.different), "Replaced"),
            (len(before.unknown), "Removed"),
        ):
            if number:
                self.stdout.write(f"{verb} {counted(number, 'procedure')}.")

    def _check(self, state: installing.State) -> None:
        for names, verb in (
            (state.missing, "installed"),
            (state.different, "replaced"),
            (state.unknown, "removed"),
        ):
            if names:
                self.stdout.write(f"To be {verb}: {', '.join(names)}.")
        if not state.is_current:
            sys.exit(1)
        self.stdout.write("The procedures are up to date.")

    def _print(self, using: str) -> None:
        for statement in SESSION:
            self.stdout.write(f"{statement};")
        self.stdout.write("DELIMITER //")
        for one in installing.wanted(using):
            self.stdout.write(f"DROP PROCEDURE IF EXISTS {one.name}//\n{one.sql}//")
        self.stdout.write("DELIMITER ;")

"""``manage.py queueprocedures``: install, update or remove the stored procedures for clients in plain SQL."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any

from django.core.management.base import CommandError, CommandParser

from django_mysqlqueue.exceptions import OperationRefused
from django_mysqlqueue.management.base import QueueCommand, add_format
from django_mysqlqueue.procedures import installing
from django_mysqlqueue.procedures.definitions import SESSION
from django_mysqlqueue.text.humanize import counted


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
        add_format(parser)

    def run_on(self, using: str, options: dict[str, Any]) -> None:
        as_json = options["format"] == "json"
        try:
            if options["remove"]:
                names = installing.remove(using)
                if as_json:
                    self.write_json({"database": using, "removed": names})
                else:
                    self.stdout.write(f"Removed {counted(len(names), 'procedure')}.")
            elif options["check"]:
                self._check(using, installing.state(using), as_json=as_json)
            elif options["print"]:
                self._print(using, as_json=as_json)
            else:
                self._install(using, as_json=as_json)
                if not as_json and installing.follows_sessions(using):
                    self.stderr.write(self.style.WARNING(installing.SYSDATE_IS_NOW))
        except OperationRefused as error:
            raise CommandError(str(error)) from error

    def run_on_each(self, aliases: Sequence[str], options: dict[str, Any]) -> None:
        """Refuse to print a script for several databases; otherwise as for every command."""
        if options["print"] and options["format"] == "text":
            known = ", ".join(map(repr, aliases))
            raise CommandError(f"--print prints the statements for one database: pass --database, one of {known}.")
        super().run_on_each(aliases, options)

    def _install(self, using: str, *, as_json: bool) -> None:
        before = installing.install(using)
        if as_json:
            self._write_state(using, before)
            return
        if before.is_current:
            self.stdout.write("The procedures are up to date.")
        for names, verb in _changes(before):
            if names:
                self.stdout.write(f"{verb.capitalize()} {counted(len(names), 'procedure')}.")

    def _check(self, using: str, state: installing.State, *, as_json: bool) -> None:
        if as_json:
            self._write_state(using, state)
        for names, verb in _changes(state):
            if names and not as_json:
                self.stdout.write(f"To be {verb}: {', '.join(names)}.")
        if not state.is_current:
            sys.exit(1)
        if not as_json:
            self.stdout.write("The procedures are up to date.")

    def _write_state(self, using: str, state: installing.State) -> None:
        changes = {verb: names for names, verb in _changes(state)}
        facts = {"up_to_date": state.is_current, "sysdate_is_now": installing.follows_sessions(using), **changes}
        self.write_json({"database": using, **facts})

    def _print(self, using: str, *, as_json: bool) -> None:
        procedures = installing.wanted(using)
        if as_json:
            drop_and_create = [sql for one in procedures for sql in (f"DROP PROCEDURE IF EXISTS {one.name}", one.sql)]
            self.write_json({"database": using, "statements": [*SESSION, *drop_and_create]})
            return
        for statement in SESSION:
            self.stdout.write(f"{statement};")
        self.stdout.write("DELIMITER //")
        for one in procedures:
            self.stdout.write(f"DROP PROCEDURE IF EXISTS {one.name}//\n{one.sql}//")
        self.stdout.write("DELIMITER ;")


def _changes(state: installing.State) -> Iterator[tuple[Sequence[str], str]]:
    """Yield the procedures that an installation changes, and how."""
    yield state.missing, "installed"
    yield state.different, "replaced"
    yield state.unknown, "removed"

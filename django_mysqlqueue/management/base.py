"""Base classes and checks of the queue's commands."""

from __future__ import annotations

import contextlib
import json
import os
import pkgutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar

from django.core.exceptions import ImproperlyConfigured
from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.db import Error, connections, router
from django.db.migrations.executor import MigrationExecutor
from django.db.migrations.loader import MigrationLoader
from django.db.migrations.recorder import MigrationRecorder

from django_mysqlqueue.db.tables import GROUPS
from django_mysqlqueue.exceptions import CommitOutcomeUnknown
from django_mysqlqueue.models import ConsumerGroup
from django_mysqlqueue.runtime import sessions
from django_mysqlqueue.service.databases import queue_alias, queue_aliases
from django_mysqlqueue.sql import failures
from django_mysqlqueue.sql.connection import LOCK_SECONDS, is_server, limited_settings
from django_mysqlqueue.sql.several import start_each

if TYPE_CHECKING:
    from tqdm import tqdm

APP = ConsumerGroup._meta.app_label
INTERRUPTED = 130
"""The exit status after Ctrl+C, as shells have it."""
BROKEN_PIPE = 141
"""The exit status after SIGPIPE, as shells have it: the program that reads the output has ended."""


def database_of(alias: str | None, topic: str | None = None) -> str:
    """Return the alias of the queue's database, or of the one that a topic is in.

    ``alias``: value of ``--database``; if None, ``DATABASE`` of the topic's entry in ``TOPICS``,
    ``MYSQLQUEUE["DATABASE"]`` or the router decides. ``topic``: the topic that the command works on, if it works on
    one.
    """
    if alias is not None and alias not in connections:
        raise CommandError(f"DATABASES has no alias {alias!r}.")
    return queue_alias(alias, topic=topic)


def add_database(parser: CommandParser) -> None:
    """Add the option ``--database``."""
    parser.add_argument(
        "--database",
        metavar="ALIAS",
        help="alias of the queue's database (default: MYSQLQUEUE['DATABASE'], else the router's choice; with DATABASE "
        "in TOPICS, the database of the topic, or all of the queue's databases)",
    )


def add_format(parser: CommandParser) -> None:
    """Add the option ``--format``."""
    parser.add_argument("--format", choices=("text", "json"), default="text", help="output format (default: text)")


def progress_bar(title: str, total: int | None, options: Mapping[str, Any]) -> tqdm[Any]:
    """Return a progress bar on stderr, hidden unless that is a terminal; with JSON and with ``--verbosity 0`` too.

    ``total``: the number at which it is full; None to show only a count.
    """
    from tqdm import tqdm

    hidden = options["format"] == "json" or options["verbosity"] == 0 or not sys.stderr.isatty()
    return tqdm(desc=title, total=total, unit=" ", disable=hidden, leave=False)


def require_tables(using: str) -> None:
    """Require that the queue's tables exist and have all migrations of this version.

    Newer migrations than this version's are accepted, so that subscribers can be upgraded one by one.
    """
    migrate = failures.migrate_command(using)
    if GROUPS not in connections[using].introspection.table_names():
        hint = (
            ""
            if router.allow_migrate_model(using, ConsumerGroup)
            else " The database routers do not allow these tables there: see allow_migrate."
        )
        raise CommandError(f"Database {using!r} does not have the queue's tables. Run {migrate}.{hint}")
    missing = unapplied_migrations(using)
    if missing:
        raise CommandError(
            f"The queue's tables in database {using!r} are older than this code. "
            f"Missing migrations: {', '.join(missing)}. Run {migrate}."
        )


def unapplied_migrations(using: str) -> list[str]:
    """Return the names of the queue's migrations that are not applied to a database, in order."""
    module, _ = MigrationLoader.migrations_module(APP)
    if module is None:
        return []
    recorder = MigrationRecorder(connections[using])
    names = {file.name for file in pkgutil.iter_modules(import_module(module).__path__)}
    if recorder.has_table() and names <= {*recorder.migration_qs.filter(app=APP).values_list("name", flat=True)}:
        return []  # Without the executor, which imports and sorts the migrations of all apps.
    executor = MigrationExecutor(connections[using])
    plan = executor.migration_plan(executor.loader.graph.leaf_nodes(APP))
    return [migration.name for migration, _ in plan if migration.app_label == APP]


@contextlib.contextmanager
def database_errors(using: str) -> Iterator[None]:
    """Turn database errors into a one-line ``CommandError``; ``--traceback`` shows the original error."""
    try:
        yield
    except Error as error:
        raise CommandError(failures.explain(using, error)) from error
    except CommitOutcomeUnknown as error:
        raise CommandError(f"{error}. The last change may have been committed: run the command again.") from error


class LimitedCommand(BaseCommand):
    """A command with a time limit for each answer of the database server."""

    read_timeout: ClassVar[float] = LOCK_SECONDS
    """Seconds to wait for each answer, unless ``OPTIONS`` of the database has its own ``read_timeout``.

    It must be longer than any statement of the command takes.
    """

    def run_from_argv(self, argv: list[str]) -> None:
        """Run the command of a command line. If the program that reads its output ends, end without a message."""
        try:
            try:
                super().run_from_argv(argv)
            finally:
                if sys.stdout is not None:  # as with >&-
                    sys.stdout.flush()
        except BrokenPipeError:
            # At its end, Python writes the rest of the output: it must not fail again.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.exit(BROKEN_PIPE)

    def execute(self, *args: Any, **options: Any) -> str | None:
        """Run the command with the time limit."""
        with contextlib.ExitStack() as limits:
            # Invalid ones are reported by the checks or the command itself.
            with contextlib.suppress(CommandError, ImproperlyConfigured):
                aliases = self.databases(options)
                # This includes the system checks, some of which query databases: any of several may be down.
                several = queue_aliases() if _are_several() else []
                for alias in dict.fromkeys([*aliases, *several]):
                    limits.enter_context(self._limited(alias))
            return super().execute(*args, **options)

    def databases(self, options: Mapping[str, Any]) -> Sequence[str]:
        """Return the aliases of the databases that the command works on, without a query."""
        return [database_of(options.get("database"))]

    def check(self, *args: Any, **kwargs: Any) -> None:
        """Run the system checks; a database error becomes a ``CommandError``, or with several databases a warning."""
        # Since Django 6.1, model checks query each database for its features.
        try:
            super().check(*args, **kwargs)
        except Error as error:
            alias = failures.alias_of(error)
            if alias is None:
                raise
            text = failures.explain(alias, error)
            if not _are_several():
                raise CommandError(text) from error
            # The command may work on the others. If it does not, it says so itself.
            self.stderr.write(self.style.WARNING(f"System checks were not run: {text}"))

    @contextlib.contextmanager
    def _limited(self, alias: str) -> Iterator[None]:
        connection = connections[alias]
        # An open connection (``call_command`` in a program) keeps its limits.
        before, was_open = connection.settings_dict, connection.connection is not None
        connection.settings_dict = limited_settings(connection, read=self.read_timeout)
        try:
            yield
        finally:
            connection.settings_dict = before
            if is_server(connection) and not was_open and not connection.in_atomic_block:
                connection.close()


def _are_several() -> bool:
    try:
        return len(queue_aliases()) > 1
    except ImproperlyConfigured:
        return False  # The checks report it.


class QueueCommand(LimitedCommand):
    """A command on the queue's database: on the one that ``--database`` names, else on that of the command's topic.

    If the command has no topic, it works on the database of the project, or with ``every_database`` on all of them.
    """

    every_database: ClassVar[bool] = False
    """Whether the command works on the whole queue, which can have several databases."""
    json_indent: ClassVar[int | None] = None
    _sections: list[dict[str, Any]] | None = None
    """With several databases, the JSON objects of those that are done."""

    def add_arguments(self, parser: CommandParser) -> None:
        """Add ``--database``."""
        add_database(parser)

    def databases(self, options: Mapping[str, Any]) -> Sequence[str]:
        alias, topic = options.get("database"), options.get("topic")
        if self.every_database and alias is None and not topic:
            return queue_aliases()
        # A command with several topics decides by itself.
        return [database_of(alias, topic if isinstance(topic, str) else None)]

    def handle(self, *args: Any, **options: Any) -> None:
        """Check the queue's tables and call ``run_on``, or ``run_on_each`` if there are several databases."""
        aliases = self.databases(options)
        if len(aliases) == 1:
            with self.prepared(aliases[0]):
                self.run_on(aliases[0], options)
        else:
            self.run_on_each(aliases, options)

    @contextlib.contextmanager
    def prepared(self, using: str) -> Iterator[None]:
        """Prepare this thread's connection to a database for the command."""
        with database_errors(using), sessions.sound(using):
            require_tables(using)
            # In a project with autocommit off, the writes of operations would never be committed.
            if not connections[using].get_autocommit() and not connections[using].in_atomic_block:
                connections[using].set_autocommit(True)
            yield

    def run_on(self, using: str, options: dict[str, Any]) -> None:
        """Run the command."""
        raise NotImplementedError

    def run_on_each(self, aliases: Sequence[str], options: dict[str, Any]) -> None:
        """Run the command on several databases, one after another. If it fails on one, it continues with the others.

        With ``--format json``, the objects of all of them are written at the end, as one.
        """
        failed = []
        sections = self._sections = [] if options.get("format") == "json" else None
        for number, using in enumerate(aliases):
            if sections is None:
                self.write_heading(using, is_first=number == 0)
            try:
                with self.prepared(using):
                    self.run_on(using, options)
            except CommandError as error:
                failed.append(using)
                if sections is None:
                    self.write_error(str(error))
                elif sections and sections[-1]["database"] == using:
                    sections[-1]["error"] = str(error)
                else:
                    sections.append({"database": using, "error": str(error)})
            except SystemExit as end:  # it has said why
                if end.code:
                    failed.append(using)
        self._sections = None
        if sections is not None:
            self.write_json({"databases": sections})
        require_none(failed, aliases)

    def write_json(self, facts: dict[str, Any]) -> None:
        """Write a JSON object, or with several databases keep it for the object of all of them.

        ``facts``: JSON values; of one database, its alias among them, as ``database``.
        """
        if self._sections is not None:
            self._sections.append(facts)
        else:
            self.stdout.write(json.dumps(facts, indent=self.json_indent))

    def write_error(self, text: str) -> None:
        """Write in a database's section that the command has failed on it."""
        self.stdout.write(self.style.ERROR(text))

    def write_heading(self, using: str, *, is_first: bool) -> None:
        """Write the heading of a database's section."""
        if not is_first:
            self.stdout.write("")
        self.stdout.write(self.style.MIGRATE_HEADING(f"Database {using!r}"))


def require_none(failed: Sequence[str], aliases: Sequence[str]) -> None:
    """Require that a command has failed on none of the databases."""
    if failed:
        raise CommandError(f"Failed on {len(failed)} of {len(aliases)} databases: {', '.join(map(repr, failed))}.")


class ReadingCommand(QueueCommand):
    """A command that reads the queue's state and shows it as text or JSON.

    Several databases are read at the same time, and shown in sections.
    """

    every_database = True
    json_indent: ClassVar[int | None] = 2

    def read(self, using: str, options: dict[str, Any]) -> Any:
        """Return the state of one database. With several databases, this runs in a thread."""
        raise NotImplementedError

    def as_json(self, using: str, found: Any) -> dict[str, Any]:
        """Return what ``read`` has returned as JSON values."""
        raise NotImplementedError

    def show(self, using: str, found: Any) -> None:
        """Write what ``read`` has returned as text."""
        raise NotImplementedError

    def run_on(self, using: str, options: dict[str, Any]) -> None:
        """Read and show the state of one database."""
        found = self.read(using, options)
        if options["format"] == "json":
            self.write_json(self.as_json(using, found))
        else:
            self.show(using, found)
        self.finish({using: found}, [], options)

    def run_on_each(self, aliases: Sequence[str], options: dict[str, Any]) -> None:
        """Read several databases at the same time, and show their states in sections."""

        def read(using: str) -> Any:
            with self.prepared(using):
                return self.read(using, options)

        found: dict[str, Any] = {}
        failed: list[str] = []
        sections: list[dict[str, Any]] = []
        as_json = options["format"] == "json"
        for using, answer in start_each(aliases, read, seconds=self.read_timeout).items():
            if not as_json:
                self.write_heading(using, is_first=not (found or failed))
            try:
                found[using] = answer.result()
            except CommandError as error:
                failed.append(using)
                sections.append({"database": using, "error": str(error)})
                if not as_json:
                    self.write_error(str(error))
                continue
            if as_json:
                sections.append(self.as_json(using, found[using]))
            else:
                self.show(using, found[using])
        if as_json:
            self.write_json(self.together(sections))
        self.finish(found, failed, options)

    def together(self, sections: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Return the JSON object for several databases.

        ``sections``: the object of each database; of one that could not be read, its alias and the error.
        """
        return {"databases": sections}

    def finish(self, found: Mapping[str, Any], failed: Sequence[str], options: dict[str, Any]) -> None:
        """Do what is left when everything was shown, such as setting the exit status.

        ``found``: by alias, what ``read`` has returned. ``failed``: the aliases of databases that could not be read.
        """
        require_none(failed, [*found, *failed])

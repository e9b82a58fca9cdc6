"""``manage.py runsubscriber``: run handlers until stopped."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from django.conf import settings as django_settings
from django.core.management.base import CommandError, CommandParser
from django.db import connections
from django.utils.autoreload import get_child_arguments

from django_mysqlqueue.checks.system import same_log_hint, same_log_text, server_problems
from django_mysqlqueue.exceptions import SubscriberError
from django_mysqlqueue.management import refusals
from django_mysqlqueue.management.banner import show_banner, show_groups
from django_mysqlqueue.management.base import (
    LimitedCommand,
    add_database,
    database_errors,
    database_of,
    require_tables,
)
from django_mysqlqueue.management.ports import MetricsPorts, port
from django_mysqlqueue.options.conf import get_settings
from django_mysqlqueue.runtime.process import memory, reload
from django_mysqlqueue.runtime.process.lifeline import Lifeline
from django_mysqlqueue.runtime.process.liveness_file import HeartbeatFile
from django_mysqlqueue.runtime.process.stop_signals import STOP_SIGNALS
from django_mysqlqueue.runtime.process.subscriber import Schedules, Subscriber, register_all, require_handlers
from django_mysqlqueue.runtime.registering import declared_schedules
from django_mysqlqueue.service.databases import queue_aliases, works_on
from django_mysqlqueue.service.refs import GroupRef
from django_mysqlqueue.service.sequencing import identify
from django_mysqlqueue.service.subsets import Subset
from django_mysqlqueue.sql.connection import is_server
from django_mysqlqueue.subscriptions.handler import Handler
from django_mysqlqueue.subscriptions.registry import handlers, handlers_in


def positive(text: str) -> int:
    """Parse an integer above 0."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: must be an integer of at least 1")
    return int(text)


def _at_home(chosen: Mapping[str, Mapping[GroupRef, Handler]]) -> dict[str, dict[GroupRef, Handler]]:
    """Return the handlers without those whose topics are in another database, and may not have moved there yet."""
    return {
        alias: {ref: handler for ref, handler in of_database.items() if alias not in works_on(ref.topic)[1:]}
        for alias, of_database in chosen.items()
    }


class Command(LimitedCommand):
    """Run handlers until stopped."""

    help = "Run the handlers declared with @subscriber, until SIGTERM or SIGINT."

    def add_arguments(self, parser: CommandParser) -> None:
        add = parser.add_argument
        add(
            "--group",
            action="append",
            metavar="GROUP",
            help="run only handlers of this consumer group (may be repeated)",
        )
        add("--topic", action="append", metavar="TOPIC", help="run only handlers of this topic (may be repeated)")
        add(
            "--partition",
            action="append",
            metavar="PATTERN",
            help="claim only partitions whose key matches PATTERN: * matches any text, ? one character (may be "
            "repeated)",
        )
        add("--shard", metavar="I/N", help="claim only the I-th of N equal parts of the partitions, for example 1/4")
        add(
            "--threads",
            type=positive,
            metavar="N",
            help="handler threads per process, for each database (default: MYSQLQUEUE['THREADS'], 4)",
        )
        add("--processes", type=positive, metavar="N", help="run N subscriber processes and replace those that end")
        add("--name", help="first part of the subscriber's name (default: the host name)")
        add(
            "--claim-size",
            type=positive,
            metavar="N",
            help="maximum number of messages per claim, for groups without a claim_size of their own (default: "
            "MYSQLQUEUE['CLAIM_SIZE'], 100)",
        )
        add(
            "--drain",
            action="store_true",
            help="exit when the backlog is empty; waits for messages in backoff, not for scheduled messages",
        )
        add(
            "--max-messages", type=positive, metavar="N", help="exit after passing N messages to handlers (per process)"
        )
        add(
            "--max-memory",
            type=positive,
            metavar="MB",
            help="exit when the process uses more than MB megabytes of resident memory",
        )
        add(
            "--heartbeat-file",
            metavar="PATH",
            help="file whose modification time is updated every second while the subscriber makes progress",
        )
        add(
            "--metrics-port",
            type=port,
            metavar="PORT",
            help="serve the process's Prometheus metrics on this port; with --processes, the second process uses "
            "PORT + 1, and so on",
        )
        add(
            "--metrics-address",
            default="127.0.0.1",
            metavar="IP",
            help="address to bind the metrics port to (default: 127.0.0.1; 0.0.0.0: all interfaces)",
        )
        add(
            "--reload",
            action=argparse.BooleanOptionalAction,
            help="restart when the code changes (default: on a terminal with DEBUG = True)",
        )
        add_database(parser)

    lifeline: Lifeline | None = None
    _verbosity = 1

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._logs: dict[str, str] = {}
        """By the id of its log, the alias of each database that workers have prepared, each in its thread."""

    def execute(self, *args: Any, **options: Any) -> str | None:
        self.lifeline = Lifeline.inherited()
        if self.lifeline is not None and not self.lifeline.reload:
            options["skip_checks"] = True  # the supervisor has run them on the same code
        try:
            return super().execute(*args, **options)
        except Exception as error:
            # One that has started ends with a status: an error means that it could not, in one of its databases.
            refusals.record(self._refs(options), options["name"], error)
            raise

    def _refs(self, options: dict[str, Any]) -> dict[str, Collection[GroupRef]]:
        """Return the groups by database that the command was to work for; empty if that is what is wrong."""
        try:
            return {using: [*chosen] for using, chosen in self._by_database(options).items()}
        except Exception:  # noqa: BLE001  # Also one of the project's modules.
            return {}

    def handle(self, *args: Any, **options: Any) -> None:
        self._verbosity = options["verbosity"]
        self._log(options)
        try:
            chosen = self._by_database(options)
            with database_errors(next(iter(chosen))):
                self._handle(chosen, options)
        except SubscriberError as error:
            raise CommandError(str(error)) from error

    def _by_database(self, options: dict[str, Any]) -> dict[str, dict[GroupRef, Handler]]:
        """Return the handlers to run by the databases of their topics."""
        chosen = self._choose(options["group"], options["topic"])
        aliases = queue_aliases()
        only = None if options["database"] is None else database_of(options["database"])
        return {alias: handlers_in(alias, chosen) for alias in (aliases if only is None else [only])}

    def _handle(self, chosen: dict[str, dict[GroupRef, Handler]], options: dict[str, Any]) -> None:
        reloads = self._reloads(options)
        self._check_memory(options["max_memory"])
        if self.lifeline is None and (options["processes"] or reloads):
            self._supervise(chosen, options, reloads=reloads)
        else:
            self._subscribe(chosen, options)

    def _prepare(self, using: str) -> None:
        """Require that a database can run the queue, before a worker starts."""
        require_tables(using)
        for problem in server_problems(using):
            raise CommandError(problem)
        log = identify(using)
        other = self._logs.setdefault(log, using) if log else using
        if other != using:
            raise CommandError(f"{same_log_text(other, using)} {same_log_hint(log)}")

    def _schedules(self, options: dict[str, Any]) -> Schedules | None:
        """Return the recurring schedules to run: all, even if the options select handlers; None if it drains.

        With ``EAGER``, their messages would be handled in the poller's thread.
        """
        return None if options["drain"] or get_settings().eager else declared_schedules()

    # -- one process ----------------------------------------------------------

    def _subscribe(self, chosen: dict[str, dict[GroupRef, Handler]], options: dict[str, Any]) -> None:
        child = self.lifeline
        # A supervisor updates the file for all its children.
        path = options["heartbeat_file"] if child is None else None
        subscriber = Subscriber(
            chosen,
            get_settings(),
            name=options["name"],
            threads=self._threads(chosen, options),
            claim_size=options["claim_size"],
            schedules=self._schedules(options),
            drain=options["drain"],
            subset=Subset.parse(options["partition"] or (), options["shard"]),
            max_messages=options["max_messages"],
            max_memory=options["max_memory"],
            heartbeat_file=HeartbeatFile(path) if path else None,
            lifeline=child,
            prepare=self._prepare,
        )
        metrics = MetricsPorts.of(options)
        stop_serving = metrics.serve(subscriber, child.number if child is not None else 1) if metrics else None
        restore = subscriber.handle_signals()
        if child is not None and child.reload:
            reload.watch(lambda: subscriber.stop("the code has changed", replace=True))
        try:
            subscriber.run(ready=lambda: self._introduce(subscriber, metrics))
        finally:
            if stop_serving is not None:
                stop_serving()
            if child is None:
                restore()
            else:
                # The process is about to exit. The supervisor's signal may arrive after the service manager's.
                for number in STOP_SIGNALS:
                    signal.signal(number, signal.SIG_IGN)
            if subscriber.heartbeat_file is not None:
                subscriber.heartbeat_file.remove()
        subscriber.leave()
        if child is None:
            self._say("Stopped.")

    def _threads(self, chosen: Iterable[str], options: dict[str, Any]) -> dict[str, int]:
        # SQLite has one writer at a time: more threads would only wait for each other.
        threads = options["threads"] or get_settings().threads
        return {using: threads if is_server(connections[using]) else 1 for using in chosen}

    def _introduce(self, subscriber: Subscriber, metrics: MetricsPorts | None) -> None:
        if self.lifeline is not None:
            if self.lifeline.reload:
                self._print(lambda: show_groups(self.stdout, subscriber.handlers))
            return
        self._print(lambda: self._banner(subscriber, metrics))

    def _banner(self, subscriber: Subscriber, metrics: MetricsPorts | None) -> None:
        show_banner(
            self.stdout,
            self.style,
            title=f"Subscriber {subscriber.name}",
            databases=_at_home({worker.using: worker.handlers for worker in subscriber.workers}),
            settings=subscriber.settings,
            threads=subscriber.threads,
            claim_size=subscriber.claim_size,
            subset=subscriber.subset,
            metrics=metrics,
        )

    # -- a supervisor ---------------------------------------------------------

    def _supervise(self, chosen: dict[str, dict[GroupRef, Handler]], options: dict[str, Any], *, reloads: bool) -> None:
        """Run a supervisor. What would make every child fail is checked here first, once."""
        from django_mysqlqueue.runtime.process.supervisor import Supervisor

        settings = get_settings()
        require_handlers(chosen)
        subset = Subset.parse(options["partition"] or (), options["shard"])
        register_all(chosen, self._prepare, self._schedules(options))
        metrics = MetricsPorts.of(options)
        if metrics is not None:
            metrics.require()
        file = HeartbeatFile(options["heartbeat_file"]) if options["heartbeat_file"] else None
        if "runsubscriber" not in sys.argv:
            raise CommandError(
                "--processes and --reload run this command line again in child processes: run it from a shell."
            )
        supervisor = Supervisor(
            get_child_arguments(),
            processes=options["processes"] or 1,
            shutdown_timeout=settings.shutdown_timeout,
            longest_handler=max(handler.longest_time for each in chosen.values() for handler in each.values()),
            lease_duration=settings.lease_duration,
            drain=options["drain"],
            heartbeat_file=file,
            snapshot=reload.snapshot if reloads else None,
        )
        kind = "Supervisor" if options["processes"] else "Subscriber"
        self._print(
            lambda: show_banner(
                self.stdout,
                self.style,
                title=f"{kind} {options['name'] or socket.gethostname()} (pid {os.getpid()})",
                databases=_at_home(chosen),
                settings=settings,
                threads=self._threads(chosen, options),
                claim_size=options["claim_size"] or settings.claim_size,
                subset=subset,
                processes=options["processes"],
                reload=reloads,
                metrics=metrics,
            )
        )
        connections.close_all()
        restore = supervisor.handle_signals()
        try:
            code = supervisor.run()
        finally:
            restore()
            if file is not None:
                file.remove()
        if code:
            self._say("Stopped; at least one process did not exit cleanly.")
            sys.exit(code)
        self._say("Stopped.")

    def _reloads(self, options: dict[str, Any]) -> bool:
        if self.lifeline is not None:
            return self.lifeline.reload
        if options["reload"] is None:
            others = options["processes"] or options["drain"] or options["max_messages"]
            return bool(django_settings.DEBUG and self.stdout.isatty() and not others)
        if options["reload"] and options["processes"]:
            raise CommandError(
                "--reload is for a single process during development: with --processes, every process would watch the "
                "files and report the same errors. Pass one of the two."
            )
        return bool(options["reload"])

    # -- shared ---------------------------------------------------------------

    def _say(self, text: str) -> None:
        self._print(lambda: self.stdout.write(text))

    def _print(self, write: Callable[[], None]) -> None:
        """Write to stdout. A full disk, or a reader that has closed the pipe, must not stop a subscriber."""
        if not self._verbosity:
            return
        try:
            write()
            self.stdout.flush()
        except OSError:
            # Otherwise the interpreter would fail when it flushes stdout at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)

    def _check_memory(self, limit: int | None) -> None:
        if limit is not None and self.lifeline is None and (taken := memory.resident_mb()) >= limit:
            raise CommandError(f"--max-memory {limit}: the process uses {taken:.0f} MB before its first message.")

    def _choose(self, only_groups: list[str] | None, only_topics: list[str] | None) -> dict[GroupRef, Handler]:
        known = handlers()
        for kind, given, names in (
            ("group", only_groups, {ref.group for ref in known}),
            ("topic", only_topics, {ref.topic for ref in known}),
        ):
            for name in given or ():
                if name not in names:
                    raise CommandError(
                        f"--{kind} {name}: no handler has this {kind}. Handlers have: {', '.join(sorted(names))}."
                    )
        return {
            ref: handler
            for ref, handler in known.items()
            if (not only_groups or ref.group in only_groups) and (not only_topics or ref.topic in only_topics)
        }

    def _log(self, options: dict[str, Any]) -> None:
        """Log to stderr if the project has not configured logging for the queue."""
        logger = logging.getLogger("django_mysqlqueue")
        if logger.hasHandlers():
            return
        # The number tells the processes apart that log to one terminal.
        number = f"[{self.lifeline.number}] " if self.lifeline is not None and options["processes"] else ""
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter(f"%(asctime)s %(levelname)s {number}%(message)s"))
        logger.addHandler(handler)
        levels = {0: logging.ERROR, 1: logging.INFO, 2: logging.DEBUG, 3: logging.DEBUG}
        logger.setLevel(levels[options["verbosity"]])

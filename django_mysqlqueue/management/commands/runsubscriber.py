"""``manage.py runsubscriber``: runs handlers until it is stopped."""

from __future__ import annotations

import logging
import sys
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.db import connections

from django_mysqlqueue.checks import server_problems
from django_mysqlqueue.conf import get_settings
from django_mysqlqueue.exceptions import SubscriberError
from django_mysqlqueue.management.base import database_of, require_tables
from django_mysqlqueue.runtime.process import Subscriber
from django_mysqlqueue.runtime.registry import Handler, handlers
from django_mysqlqueue.service import stats
from django_mysqlqueue.service.groups import GroupRef
from django_mysqlqueue.service.subsets import Subset
from django_mysqlqueue.service.transactions import Session
from django_mysqlqueue.sql import dialect_of


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError(f"{value} is not above 0")
    return value


class Command(BaseCommand):
    help = "Runs the handlers that @subscriber declares, until SIGTERM or SIGINT."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--group", action="append", metavar="G", help="only this consumer group (repeatable)")
        parser.add_argument("--topic", action="append", metavar="T", help="only this topic (repeatable)")
        parser.add_argument(
            "--partition",
            action="append",
            metavar="KEY",
            help="only partitions whose key matches: * is any text, ? one character (repeatable)",
        )
        parser.add_argument("--shard", metavar="I/N", help="only the I-th of N equal parts of the partitions, as 1/4")
        parser.add_argument("--threads", type=positive, metavar="N", help="handler threads (default: THREADS)")
        parser.add_argument("--name", help="a name for this subscriber (default: the host's)")
        parser.add_argument("--batch-size", type=positive, metavar="N", help="messages a claim (default: BATCH_SIZE)")
        parser.add_argument("--drain", action="store_true", help="exit when nothing is left to do (waits for backoffs)")
        parser.add_argument("--database", metavar="ALIAS", help="the queue's database alias")

    def handle(self, *args: Any, **options: Any) -> None:
        using = database_of(options["database"])
        require_tables(using)
        if not connections[using].get_autocommit():
            connections[using].set_autocommit(True)
        self._log(options["verbosity"])
        settings = get_settings()
        try:
            chosen = self._choose(options["group"], options["topic"])
            for problem in server_problems(using):
                raise CommandError(problem)
            threads = options["threads"] or settings.threads
            if not dialect_of(connections[using]).has_row_locks:
                threads = 1  # one writer at a time: more threads would only wait for each other
            subscriber = Subscriber(
                using,
                chosen,
                settings,
                name=options["name"],
                threads=threads,
                batch_size=options["batch_size"],
                drain=options["drain"],
                subset=Subset.parse(options["partition"] or (), options["shard"]),
            )
            restore = subscriber.handle_signals()
            try:
                subscriber.run(ready=lambda: self._banner(subscriber))
            finally:
                restore()
        except SubscriberError as error:
            raise CommandError(str(error)) from error
        subscriber.leave()
        self.stdout.write("Stopped.")

    def _choose(self, only_groups: list[str] | None, only_topics: list[str] | None) -> dict[GroupRef, Handler]:
        known = handlers()
        for kind, given, names in (
            ("group", only_groups, {ref.group for ref in known}),
            ("topic", only_topics, {ref.topic for ref in known}),
        ):
            for name in given or ():
                if name not in names:
                    raise CommandError(f"--{kind} {name}: no handler has it; there are: {', '.join(sorted(names))}")
        return {
            ref: handler
            for ref, handler in known.items()
            if (not only_groups or ref.group in only_groups) and (not only_topics or ref.topic in only_topics)
        }

    def _banner(self, subscriber: Subscriber) -> None:
        settings = connections[subscriber.using].settings_dict
        vendor = dialect_of(connections[subscriber.using]).name
        threads = f"{subscriber.threads} handler thread{'s' if subscriber.threads > 1 else ''}"
        write = self.stdout.write
        write(self.style.MIGRATE_HEADING(f"Subscriber {subscriber.name}"))
        write(f"  database  {subscriber.using} ({vendor}: {settings['NAME']})")
        write(f"  working   {threads}, batches of {subscriber.batch_size}")
        if str(subscriber.subset):
            write(f"  subset    {subscriber.subset}")
        for ref, handler in sorted(subscriber.handlers.items()):
            batch = [f"batches of {handler.batch_size}"] if handler.batch else []
            detail = ", ".join([handler.mode, *(["atomic"] if handler.atomic else []), *batch])
            write(f"  group     {ref.group} of {ref.topic} ({detail}): {handler.where}")
        for warning in self._one_partition(subscriber):
            write(self.style.WARNING(f"  warning   {warning}"))
        write("Ctrl-C stops it; a second one at once.")
        self.stdout.flush()

    def _one_partition(self, subscriber: Subscriber) -> list[str]:
        if subscriber.threads == 1:
            return []
        session = Session(subscriber.using)
        return [
            f"{ref.topic} has one partition and {ref.group} keeps its order: one of the {subscriber.threads} threads "
            "will work. Raise PARTITIONS or publish with keys."
            for ref, handler in sorted(subscriber.handlers.items())
            if not handler.shared
            and (subscriber.settings.partitions_of(ref.topic) == 1 or stats.has_one_partition(session, ref.topic))
        ]

    def _log(self, verbosity: int) -> None:
        """Log lines on stderr where the project has configured no logging of its own for them."""
        logger = logging.getLogger("django_mysqlqueue")
        if logger.hasHandlers():
            return
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        logger.addHandler(handler)
        levels = {0: logging.ERROR, 1: logging.INFO, 2: logging.DEBUG, 3: logging.DEBUG}
        logger.setLevel(levels[verbosity])

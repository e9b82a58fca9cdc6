"""The text that ``runsubscriber`` prints when it starts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from django.core.management.base import OutputWrapper
from django.core.management.color import Style
from django.db import Error, connections

from django_mysqlqueue.management.ports import MetricsPorts
from django_mysqlqueue.options.conf import Settings
from django_mysqlqueue.options.topics import is_dlq
from django_mysqlqueue.runtime import sessions
from django_mysqlqueue.service import log, partitions
from django_mysqlqueue.service.refs import GroupRef
from django_mysqlqueue.service.subsets import EVERYTHING, Subset
from django_mysqlqueue.sql import dialect_of, failures
from django_mysqlqueue.sql.connection import bounded, database_name
from django_mysqlqueue.sql.session import Session
from django_mysqlqueue.subscriptions.handler import Handler

READ = 2.0
"""Seconds to wait for each answer of a database."""


def show_banner(
    out: OutputWrapper,
    style: Style,
    *,
    title: str,
    databases: Mapping[str, Mapping[GroupRef, Handler]],
    settings: Settings,
    threads: Mapping[str, int],
    claim_size: int,
    subset: Subset,
    processes: int | None = None,
    reload: bool = False,
    metrics: MetricsPorts | None = None,
) -> None:
    """Print the databases, numbers of threads and processes, groups, warnings, and how to stop the command.

    ``processes``: number of processes under a supervisor; None without one. ``reload``: True if the command restarts
    when code changes. ``metrics``: ports of the processes' metrics; None if they serve none.
    """
    out.write(style.MIGRATE_HEADING(title))
    warnings: list[str] = []
    for using, handlers in databases.items():
        try:
            # The others must not wait for one that does not answer.
            with bounded(using, read=READ), sessions.sound(using):
                engine, name = dialect_of(connections[using]).name, database_name(connections[using])
                out.write(f"  database  {using} ({engine}: {name})")
                warnings += _one_partition(using, handlers, settings, threads[using] * (processes or 1))
                warnings += _mistyped(using, handlers)
        except Error as error:
            if len(databases) == 1:
                raise
            out.write(f"  database  {using}")
            warnings.append(f"{failures.explain(using, error)}. It is tried again.")
    most = max(threads.values())
    runs = f"{most} handler thread{'s' if most > 1 else ''}{' for each database' if len(databases) > 1 else ''}"
    if processes is not None:
        runs = f"{processes} process{'es' if processes > 1 else ''} with {runs}{' each' if processes > 1 else ''}"
    out.write(f"  runs      {runs}, up to {claim_size} messages per claim")
    if subset != EVERYTHING:
        out.write(f"  subset    {subset}")
    if metrics is not None:
        out.write(f"  metrics   {metrics}")
    if reload:
        out.write("  reload    on code changes")
    else:
        for using, handlers in databases.items():  # with --reload, each new process shows its own
            show_groups(out, handlers, f" in {using}" if len(databases) > 1 else "")
    if settings.eager:
        warnings.append("EAGER is True: publishers run the handlers themselves.")
    for warning in warnings:
        out.write(style.WARNING(f"  warning   {warning}"))
    out.write("Press Ctrl-C to stop, twice to stop at once.")
    out.flush()


def show_groups(out: OutputWrapper, handlers: Mapping[GroupRef, Handler], where: str = "") -> None:
    """Print one line for each handler, sorted by group and topic, with a text that follows the topic."""
    for ref, handler in sorted(handlers.items()):
        batch = [f"batches of {handler.batch_size}"] if handler.batch else []
        detail = ", ".join([handler.mode, *(["atomic"] if handler.atomic else []), *batch])
        out.write(f"  group     {ref.group} on {ref.topic}{where} ({detail}): {handler.where}")
    out.flush()


def _mistyped(using: str, handlers: Mapping[GroupRef, Handler]) -> Iterator[str]:
    """Yield a warning for each handled topic that never had messages, if topics without a handler here have some."""
    wanted = {ref.topic for ref in handlers if not is_dlq(ref.topic)}
    used = log.used(Session(using))
    others = [topic for topic in used if topic not in wanted and not is_dlq(topic)]
    for topic in sorted(wanted - set(used)):
        if others:
            yield f"topic {topic!r} has no messages; topics with messages but no handler here: {', '.join(others)}."


def _one_partition(using: str, handlers: Mapping[GroupRef, Handler], settings: Settings, threads: int) -> Iterator[str]:
    if threads == 1:
        return
    session = Session(using)
    for ref, handler in sorted(handlers.items()):
        if handler.shared:
            continue
        if (
            settings.partitions_of(ref.topic) == 1
            or len(partitions.in_log(session, ref.topic, after=None, limit=2)) == 1
        ):
            yield (
                f"topic {ref.topic!r} has one partition and group {ref.group!r} is ordered: it uses only one of the "
                f"{threads} threads. Increase PARTITIONS or publish with keys."
            )

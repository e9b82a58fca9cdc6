"""The text that ``runsubscriber`` prints when it starts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from django.core.management.base import OutputWrapper
from django.core.management.color import Style
from django.db import connections

from django_mysqlqueue import naming
from django_mysqlqueue.conf import Settings
from django_mysqlqueue.management.ports import MetricsPorts
from django_mysqlqueue.service import log, partitions
from django_mysqlqueue.service.refs import GroupRef
from django_mysqlqueue.service.subsets import EVERYTHING, Subset
from django_mysqlqueue.sql import dialect_of
from django_mysqlqueue.sql.session import Session
from django_mysqlqueue.subscriptions.handler import Handler


def show_banner(
    out: OutputWrapper,
    style: Style,
    *,
    title: str,
    using: str,
    handlers: Mapping[GroupRef, Handler],
    settings: Settings,
    threads: int,
    claim_size: int,
    subset: Subset,
    processes: int | None = None,
    reload: bool = False,
    metrics: MetricsPorts | None = None,
) -> None:
    """Print the database, numbers of threads and processes, groups, warnings, and how to stop the command.

    Args:
        out: where to print.
        style: style of headings and warnings.
        title: the first line.
        using: alias of the queue's database.
        handlers: the handlers that will run, by group and topic.
        settings: the queue's settings.
        threads: number of handler threads per process.
        claim_size: maximum number of messages per claim.
        subset: the partitions that are claimed.
        processes: number of processes under a supervisor; None without one.
        reload: True if the command restarts when code changes.
        metrics: ports of the processes' metrics; None if they serve none.
    """
    vendor = dialect_of(connections[using]).name
    out.write(style.MIGRATE_HEADING(title))
    out.write(f"  database  {using} ({vendor}: {connections[using].settings_dict['NAME']})")
    runs = f"{threads} handler thread{'s' if threads > 1 else ''}"
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
        show_groups(out, handlers)  # with --reload, each new process shows its own
    warnings = [
        *_one_partition(using, handlers, settings, threads * (processes or 1)),
        *_mistyped(using, handlers),
        *(["EAGER is True: publishers run the handlers themselves."] if settings.eager else []),
    ]
    for warning in warnings:
        out.write(style.WARNING(f"  warning   {warning}"))
    out.write("Press Ctrl-C to stop, twice to stop at once.")
    out.flush()


def show_groups(out: OutputWrapper, handlers: Mapping[GroupRef, Handler]) -> None:
    """Print one line for each handler, sorted by group and topic."""
    for ref, handler in sorted(handlers.items()):
        batch = [f"batches of {handler.batch_size}"] if handler.batch else []
        detail = ", ".join([handler.mode, *(["atomic"] if handler.atomic else []), *batch])
        out.write(f"  group     {ref.group} on {ref.topic} ({detail}): {handler.where}")
    out.flush()


def _mistyped(using: str, handlers: Mapping[GroupRef, Handler]) -> Iterator[str]:
    """Yield a warning for each handled topic that never had messages, if topics without a handler here have some."""
    wanted = {ref.topic for ref in handlers if not naming.is_dlq(ref.topic)}
    used = log.used(Session(using))
    others = [topic for topic in used if topic not in wanted and not naming.is_dlq(topic)]
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

"""What ``runsubscriber`` prints when it starts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from django.core.management.base import OutputWrapper
from django.core.management.color import Style
from django.db import connections

from django_mysqlqueue import naming
from django_mysqlqueue.conf import Settings
from django_mysqlqueue.management.ports import MetricsPorts
from django_mysqlqueue.runtime.handling.handler import Handler
from django_mysqlqueue.service import log, partitions
from django_mysqlqueue.service.refs import GroupRef
from django_mysqlqueue.service.subsets import EVERYTHING, Subset
from django_mysqlqueue.sql import dialect_of
from django_mysqlqueue.sql.session import Session


def show_banner(
    out: OutputWrapper,
    style: Style,
    *,
    title: str,
    using: str,
    handlers: Mapping[GroupRef, Handler],
    settings: Settings,
    threads: int,
    batch_size: int,
    subset: Subset,
    processes: int | None = None,
    reload: bool = False,
    metrics: MetricsPorts | None = None,
) -> None:
    """Database, numbers, groups, warnings, and how to end it."""
    vendor = dialect_of(connections[using]).name
    out.write(style.MIGRATE_HEADING(title))
    out.write(f"  database  {using} ({vendor}: {connections[using].settings_dict['NAME']})")
    working = f"{threads} handler thread{'s' if threads > 1 else ''}"
    if processes is not None:
        working = f"{processes} process{'es' if processes > 1 else ''} with {working}{' each' if processes > 1 else ''}"
    out.write(f"  working   {working}, batches of {batch_size}")
    if subset != EVERYTHING:
        out.write(f"  subset    {subset}")
    if metrics is not None:
        out.write(f"  metrics   {metrics}")
    if reload:
        out.write("  reload    when the code changes")
    else:
        show_groups(out, handlers)  # a process that reloads shows them itself, each time
    warnings = [
        *_one_partition(using, handlers, settings, threads * (processes or 1)),
        *_mistyped(using, handlers),
        *(["EAGER is on: publishers run the handlers themselves."] if settings.eager else []),
    ]
    for warning in warnings:
        out.write(style.WARNING(f"  warning   {warning}"))
    out.write("Ctrl-C stops it; a second one at once.")
    out.flush()


def show_groups(out: OutputWrapper, handlers: Mapping[GroupRef, Handler]) -> None:
    """A line for each handler."""
    for ref, handler in sorted(handlers.items()):
        batch = [f"batches of {handler.batch_size}"] if handler.batch else []
        detail = ", ".join([handler.mode, *(["atomic"] if handler.atomic else []), *batch])
        out.write(f"  group     {ref.group} of {ref.topic} ({detail}): {handler.where}")
    out.flush()


def _mistyped(using: str, handlers: Mapping[GroupRef, Handler]) -> Iterator[str]:
    """Topics of handlers that are empty, while others that nobody here handles are not."""
    wanted = {ref.topic for ref in handlers if not naming.is_dlq(ref.topic)}
    used = log.used(Session(using))
    others = [topic for topic in used if topic not in wanted and not naming.is_dlq(topic)]
    for topic in sorted(wanted - set(used)):
        if others:
            yield f"nothing is in the topic {topic!r}; topics without a handler here: {', '.join(others)}."


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
                f"{ref.topic} has one partition and {ref.group} keeps its order: one of the {threads} threads "
                "will work. Raise PARTITIONS or publish with keys."
            )

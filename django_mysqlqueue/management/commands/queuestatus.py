"""``manage.py queuestatus``: what is in the queue, who works on it, what is stuck."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from django.core.management.base import CommandParser

from django_mysqlqueue.conf import get_settings
from django_mysqlqueue.management.base import QueueCommand
from django_mysqlqueue.service import problems, stats
from django_mysqlqueue.service.overview import Count
from django_mysqlqueue.service.stats import GroupStatus, QueueStatus
from django_mysqlqueue.service.transactions import Session


class Command(QueueCommand):
    # It counts exactly, so it walks the log, however long that is.
    read_timeout = 600.0
    help = "Shows topics, groups, lag, what is in flight, dead letters and owners."

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        parser.add_argument("--format", choices=("text", "json"), default="text")

    def run_on(self, using: str, options: dict[str, Any]) -> None:
        status = stats.status(using, lease_ms=int(get_settings().lease_duration * 1000))
        if options["format"] == "json":
            self.stdout.write(json.dumps({"database": using, **dataclasses.asdict(status)}, indent=2))
            return
        self._text(using, status)

    def _text(self, using: str, status: QueueStatus) -> None:
        heading = self.style.MIGRATE_HEADING
        ago = f"{(status.now - status.sequenced_at) / 1000:.1f} s ago" if status.sequenced_at else "never"
        waiting = sum(one.waiting for one in status.topics)
        since = min((one.waiting_since for one in status.topics if one.waiting_since is not None), default=None)
        outbox = ""
        if waiting and since is not None:
            oldest = _age(max(0, status.now - since) / 1000)
            outbox = f", {_count(waiting, 'message')} in the outbox (the oldest for {oldest}; no lag counts them)"
        self.stdout.write(
            f"Queue on the database {using!r}: last offset {status.last_offset}, sequenced {ago}{outbox}.\n"
        )
        if not status.topics and not status.groups:
            self.stdout.write("It is empty: no message, no group.")
            return
        self.stdout.write(heading("Topics"))
        self._table(
            ("topic", "in log", "partitions", "outbox", "scheduled"),
            [(one.topic, one.in_log, one.partitions, one.waiting, one.scheduled) for one in status.topics],
        )
        self.stdout.write("")
        self.stdout.write(heading("Groups"))
        self._table(
            ("group", "topic", "mode", "lag", "oldest", "in flight", "retrying", "dead", "subscribers"),
            [
                (
                    one.group,
                    one.topic,
                    one.mode + (" (paused)" if one.paused else ""),
                    one.lag,
                    "-" if one.oldest_unacked_age is None else _age(one.oldest_unacked_age),
                    one.in_flight,
                    one.retrying,
                    one.dead_letters,
                    len(one.subscribers),
                )
                for one in status.groups
            ],
        )
        owners = [
            (one.group, one.topic, owner or "(nobody)", count)
            for one in status.groups
            for owner, count in sorted(one.partitions_owned.items())
        ]
        if owners:
            self.stdout.write("")
            self.stdout.write(heading("Leases"))
            self._table(("group", "topic", "owner", "partitions"), owners)
        found = [text for one in status.groups for text in _problems(one)]
        stalled = problems.of_outbox(status.now, Count(waiting), since, status.sequenced_at)
        if waiting and not any(one.subscribers for one in status.groups):
            found.insert(0, f"{_count(waiting, 'message')} in the outbox, and no subscriber runs.")
        elif stalled is not None:
            found.insert(0, stalled.text)
        topics = [one.topic for one in status.topics]
        found += [one.text for one in problems.groupless_topics(Session(using), topics, status.now)]
        if found:
            self.stdout.write("")
            self.stdout.write(heading("Problems"))
            for text in found:
                self.stdout.write(self.style.WARNING(f"  {text}"))

    def _table(self, header: tuple[str, ...], rows: list[tuple[Any, ...]]) -> None:
        cells = [header, *[tuple(str(value) for value in row) for row in rows]]
        widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
        numeric = [all(isinstance(row[column], int) for row in rows) for column in range(len(header))]
        for row in cells:
            line = "  ".join(
                value.rjust(width) if right else value.ljust(width)
                for value, width, right in zip(row, widths, numeric, strict=True)
            )
            self.stdout.write(f"  {line.rstrip()}")


def _age(seconds: float) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.1f} s"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _problems(group: GroupStatus) -> list[str]:
    found = []
    name = f"{group.group} of {group.topic}"
    if group.abandoned and group.lag:
        found.append(
            f"{name} has {_count(group.lag, 'unsettled message')} and no live subscriber: GC keeps everything for it. "
            f"Start one. (Only if the group has gone for good: manage.py queuedropgroup {group.group} {group.topic})"
        )
    if group.unserved:
        found.append(
            f"{name} has something to do in {group.unserved} partitions that no live subscriber takes: all of them "
            f"run with --partition or --shard ({', '.join(sorted(set(group.subsets.values())))})."
        )
    if group.failing:
        found.append(f"{name} handles dead letters and fails: they are tried again for ever.")
    if group.paused:
        found.append(f"{name} is paused.")
    return found

"""``manage.py queuetail``: print messages of a topic, and follow it."""

from __future__ import annotations

import datetime
import os
import select
import sys
from typing import Any

from django.core.management.base import CommandError, CommandParser

from django_mysqlqueue.exceptions import InvalidMessage
from django_mysqlqueue.management.base import INTERRUPTED, QueueCommand
from django_mysqlqueue.management.operations import check_topics, moment
from django_mysqlqueue.options.texts import parse_duration, parse_filter
from django_mysqlqueue.service.messages import CONTENT_TYPE, last_line
from django_mysqlqueue.service.received import ReceivedMessage
from django_mysqlqueue.tails.api import Tail, tail
from django_mysqlqueue.tails.formats import as_dict, as_json
from django_mysqlqueue.tails.reading import Event, Gap
from django_mysqlqueue.text.escaping import visible
from django_mysqlqueue.text.humanize import moment as moment_text
from django_mysqlqueue.text.humanize import shortened

SHOWN = 2000
"""Maximum number of characters of a payload in a line of text."""
READER_SECONDS = 1.0
"""Seconds between two checks whether the output is still read."""


class Command(QueueCommand):
    """Print messages of a topic, and follow it."""

    help = (
        "Print messages of a topic in the order of the log. This only reads: no consumer group is involved, and GC "
        "does not wait. Without --since, --offset and --follow, print the newest messages."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        parser.add_argument("topic", help="topic to read; it may be a DLQ topic")
        start = parser.add_mutually_exclusive_group()
        start.add_argument(
            "--since",
            metavar="WHEN",
            help="begin with the first message that entered the log at WHEN or later: a duration before now such "
            "as 10m (ms, s, m, h, d; default: seconds), or a time in ISO 8601",
        )
        start.add_argument(
            "--offset", type=int, metavar="N", help="begin with offset N; 0: with the oldest message in the log"
        )
        parser.add_argument("--key", help="only messages published with this key")
        parser.add_argument(
            "--where",
            metavar="FILTER",
            help='only messages whose metadata match, for example \'{"region": ["eu"]}\', as in the filter of a group',
        )
        parser.add_argument(
            "--format",
            choices=("text", "json"),
            help="output format: text, or one JSON object per line (default: text on a terminal, otherwise json)",
        )
        parser.add_argument(
            "--follow",
            action="store_true",
            help="wait for new messages until Ctrl+C; without --since and --offset, print only new ones",
        )
        parser.add_argument(
            "--limit", type=int, metavar="N", help="exit after N messages (default for the newest messages: 10)"
        )

    def run_on(self, using: str, options: dict[str, Any]) -> None:
        check_topics(using, [options["topic"]])
        try:
            found = tail(
                options["topic"],
                since=_since(options["since"]),
                offset=options["offset"],
                key=options["key"],
                where=None if options["where"] is None else parse_filter("--where", options["where"]),
                follow=options["follow"],
                limit=options["limit"],
                using=using,
            )
        except (InvalidMessage, ValueError) as error:
            raise CommandError(f"{error}.") from error
        as_text = (options["format"] or ("text" if self.stdout.isatty() else "json")) == "text"
        try:
            with found:
                self._print(found, as_text=as_text, follow=options["follow"])
        except KeyboardInterrupt:
            sys.exit(INTERRUPTED)
        except BrokenPipeError:
            # The reader has ended, such as head. Python would report that it could not write the rest.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        except OSError as error:
            raise CommandError(f"The output cannot be written: {error}.") from error

    def _print(self, found: Tail, *, as_text: bool, follow: bool) -> None:
        if as_text and follow and self.stderr.isatty():
            text = f"Following {found.topic!r} from offset {(found.position or 0) + 1}. Press Ctrl+C to stop."
            self.stderr.write(text, self.style.NOTICE)
        number = 0
        while not follow or self._waits(found):
            one = next(found, None)
            if one is None:
                break
            number += 1
            self.stdout.write(self._line(one) if as_text else as_json(as_dict(one), encoding=self._encoding))
            if follow:
                self.stdout.flush()
        if as_text and not number:
            self.stderr.write("No messages.", self.style.NOTICE)

    def _waits(self, found: Tail) -> bool:
        """Wait until there is a message, or the limit is reached."""
        while found.is_open and not found.wait(READER_SECONDS):
            if self.stdout is not None and _has_lost_reader(self.stdout):
                raise BrokenPipeError
        return True

    @property
    def _encoding(self) -> str:
        return getattr(self.stdout, "encoding", None) or "utf-8"

    def _line(self, one: Event) -> str:
        if isinstance(one, Gap):
            if one.truncated:
                return self.style.WARNING(
                    f"The log ends at offset {one.after}, and this tail was to continue after {one.until}: that offset "
                    "is wrong, or the database was restored, or a failover lost transactions. The tail continues after "
                    f"{one.after}."
                )
            return self.style.WARNING(f"GC has deleted messages up to offset {one.until} before they were read.")
        parts = [
            self.style.HTTP_NOT_MODIFIED(moment_text(one.published_ms) or "-"),
            self.style.SQL_COLTYPE(str(one.offset)),
            self.style.SQL_FIELD("-" if one.key is None else visible(one.key) or "''"),
            _payload(one),
        ]
        metadata = {name: value for name, value in one.metadata.items() if name != CONTENT_TYPE}
        if metadata:
            parts.append(self.style.HTTP_INFO(visible(shortened(as_json(metadata), most=SHOWN))))
        if one.priority:
            parts.append(f"priority {one.priority}")
        if one.target_group:
            parts.append(f"for group {visible(one.target_group)}")
        if one.failed_group:
            text = f"failed in {one.failed_group} after {one.failure_count} attempts: {last_line(one.last_error)}"
            parts.append(self.style.ERROR(visible(shortened(text, most=SHOWN))))
        return "  ".join(parts).encode(self._encoding, "backslashreplace").decode(self._encoding)


def _payload(one: ReceivedMessage) -> str:
    found = as_dict(one)
    text = as_json(found["payload"]) if "payload" in found else one.body.decode(errors="backslashreplace")
    return visible(shortened(text, most=SHOWN))


def _since(text: str | None) -> float | datetime.datetime | None:
    if text is None:
        return None
    try:
        return parse_duration("--since", text)
    except ValueError:
        pass
    try:
        return moment(text)
    except CommandError:
        raise CommandError(
            f"--since {text!r}: must be a duration such as 10m, or a time such as 2026-11-21T03:00."
        ) from None


def _has_lost_reader(out: Any) -> bool:
    """Return whether the output is a pipe that nobody reads any more."""
    try:
        descriptor = out.fileno()
    except (AttributeError, OSError, ValueError):  # not a file
        return False
    events = select.poll()
    events.register(descriptor, 0)  # errors are always reported
    return any(found & select.POLLERR for _, found in events.poll(0))

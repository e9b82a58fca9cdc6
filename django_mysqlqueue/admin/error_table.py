"""The errors of retrying messages, of dead letters and of past attempts, grouped by kind, as a page lists them."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

from django.utils.safestring import SafeString
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from django_mysqlqueue.admin import charts
from django_mysqlqueue.inspection import ErrorKind
from django_mysqlqueue.inspection.error_kinds import HOURS, ErrorListing
from django_mysqlqueue.options.topics import dlq_topic
from django_mysqlqueue.text.humanize import task_name

STATES = {
    "retrying": gettext_lazy("retrying"),
    "dead_letters": gettext_lazy("dead letters"),
    "settled": gettext_lazy("settled"),
}
NO_CLASS = "-"
"""In the filter by class: only errors that begin with no class."""
SHOWN_KINDS = 50


@dataclass(frozen=True, slots=True)
class KindFilter:
    """Which kinds are listed; None: all."""

    state: str | None
    error_class: str | None
    text: str | None
    """That of one kind."""

    def matches(self, kind: ErrorKind) -> bool:
        """Return whether a kind is listed."""
        return (
            (self.state is None or self.state in kind.states)
            and self.error_class in (None, kind.error_class or NO_CLASS)
            and self.text in (None, kind.text)
        )


@dataclass(frozen=True, slots=True)
class KindRow:
    """A kind of error in the table."""

    kind: ErrorKind
    id: str
    """The same after a refresh, so that what is expanded stays so."""
    dlq_topic: str
    trend: SafeString


@dataclass(frozen=True, slots=True)
class ErrorTable:
    """The table of errors."""

    rows: Sequence[KindRow]
    more: int
    """The number of kinds that match and are not shown."""
    listing: ErrorListing
    classes: Sequence[tuple[str, str]]
    """The classes to choose from, with their names."""
    tasks: Sequence[tuple[str, str]]
    hours: int = HOURS


def error_table(found: ErrorListing, wanted: KindFilter, task: str | None) -> ErrorTable:
    """Return the table of those kinds that are wanted.

    ``task``: the task that was chosen, to which ``found`` is restricted.
    """
    kinds = [kind for kind in found.kinds if wanted.matches(kind)]
    classes = {kind.error_class or NO_CLASS for kind in found.kinds} | _given(wanted.error_class)
    tasks = {task for kind in found.kinds for task in kind.tasks} | _given(task)
    return ErrorTable(
        [_row(kind) for kind in kinds[:SHOWN_KINDS]],
        max(0, len(kinds) - SHOWN_KINDS),
        found,
        [
            *((one, one) for one in sorted(classes - {NO_CLASS})),
            *([(NO_CLASS, _("none"))] if NO_CLASS in classes else []),
        ],
        [(task, task_name(task)) for task in sorted(tasks)],
    )


def _given(value: str | None) -> set[str]:
    return set() if value is None else {value}


def _row(kind: ErrorKind) -> KindRow:
    label = _("%(number)s in the last %(hours)s hours") % {"number": kind.attempts, "hours": HOURS}
    return KindRow(
        kind,
        f"mq-kind-{zlib.crc32(repr((kind.ref, kind.text)).encode()):08x}",
        dlq_topic(kind.ref.topic),
        charts.sparkline(kind.by_hour, label),
    )

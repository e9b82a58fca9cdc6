"""The audit log: operations of users, newest first.

Its only index is the primary key. A page searches ``Bounds.operations`` rows along it, and the next page continues.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from django_mysqlqueue.db.tables import OPERATIONS
from django_mysqlqueue.inspection.bounds import PAGES, Bounds
from django_mysqlqueue.inspection.redaction import redacted
from django_mysqlqueue.options.topics import dlq_topic, first_topic
from django_mysqlqueue.service.audit import ACTIONS, SILENT_MS
from django_mysqlqueue.service.refs import GroupRef
from django_mysqlqueue.sql.session import Session, among, built, matches
from django_mysqlqueue.text.humanize import duration, moment

State = Literal["running", "interrupted", "ended"]
LAST = 2**63 - 1
COLUMNS = (
    "s.id, s.action, s.consumer_group AS `group`, s.topic, s.actor, s.detail, s.reason, s.changed, s.total, "
    "s.started_at, s.progress_at, s.ended_at"
)
SILENT = "(started_at < %s AND progress_at < %s)"
PAUSING = ("pause", "resume")
PAUSES = 500


@dataclass(frozen=True, slots=True)
class OperationEntry:
    """An operation in the audit log. Times are in epoch milliseconds."""

    id: int
    action: str
    group: str
    """The group that it changes; empty if there is none."""
    topic: str
    """The topic that it changes, which may be a DLQ topic; empty if there is none, or several."""
    actor: str
    detail: str
    reason: str
    changed: int
    """Number of messages or other rows that it has changed so far."""
    total: int
    """Maximum number that it will change; 0: not known."""
    started_at: int
    progress_at: int
    """When it last recorded progress; 0: not since its start."""
    ended_at: int
    """0: it has not ended."""
    state: State

    @property
    def label(self) -> str:
        """The name of the operation for people. Later releases may have stored others."""
        return str(ACTIONS[self.action].label) if self.action in ACTIONS else self.action

    @property
    def changed_text(self) -> str:
        """What it has changed so far, such as "120 of 2,000 dead letters"; empty if it counts nothing."""
        unit = ACTIONS[self.action].unit if self.action in ACTIONS else None
        if unit is None:
            return ""
        is_open = self.total and self.state != "ended"
        number = self.total if is_open else self.changed
        text = str(unit % {"count": number, "number": f"{number:,}"})
        return _("%(number)s of %(total)s") % {"number": f"{self.changed:,}", "total": text} if is_open else text

    @property
    def detail_text(self) -> str:
        """Its arguments, with times in the project's time zone, and redacted."""
        topic = first_topic(self.topic)
        return redacted(TIME.sub(_local, self.detail), topic=topic, kind="error") if self.detail else ""

    def duration_text(self, now: int) -> str:
        """Return how long it took, has taken so far, or has made no progress."""
        if self.state == "ended":
            return duration((self.ended_at - self.started_at) / 1000)
        if self.state == "running":
            return _("%(time)s so far") % {"time": duration((now - self.started_at) / 1000)}
        silent = duration((now - max(self.started_at, self.progress_at)) / 1000)
        return _("no progress for %(time)s") % {"time": silent}


@dataclass(frozen=True, slots=True)
class OperationListing:
    """A page of the audit log."""

    entries: tuple[OperationEntry, ...]
    """Newest first."""
    before: int | None
    """The argument ``before`` for the next page; None if this is the last."""
    whole: bool
    """True if the page is full, or all operations after its start were searched."""


@dataclass(frozen=True, slots=True)
class OperationFilter:
    """Conditions for operations, all of which must be met."""

    group: str | None = None
    topics: Collection[str] | None = None
    """The topics; None: all, and operations on no single topic."""
    actor: str | None = None
    actions: Collection[str] | None = None
    state: State | None = None

    def condition(self, now: int) -> tuple[str, list[Any]]:
        """Return the condition on the columns of the table, or an empty text, and its parameters."""
        conditions: list[str] = []
        parameters: list[Any] = []
        for column, values in (
            ("consumer_group", None if self.group is None else [self.group]),
            ("topic", self.topics),
            ("actor", None if self.actor is None else [self.actor]),
            ("action", self.actions),
        ):
            if values is not None:
                conditions.append(among(column, values))
                parameters += sorted(values)
        if self.state == "ended":
            conditions.append("ended_at <> 0")
        elif self.state is not None:
            conditions.append(f"ended_at = 0 AND {'' if self.state == 'interrupted' else 'NOT '}{SILENT}")
            parameters += [now - SILENT_MS, now - SILENT_MS]
        return " AND ".join(conditions), parameters


def with_dlq(topics: Iterable[str]) -> frozenset[str]:
    """Return some topics with their DLQ topics, which operations on dead letters name."""
    firsts = {first_topic(topic) for topic in topics}
    return frozenset(firsts | {dlq_topic(topic) for topic in firsts})


def look(
    session: Session,
    wanted: OperationFilter,
    *,
    before: int | None = None,
    limit: int = 50,
    bounds: Bounds = PAGES,
) -> OperationListing:
    """Return a page of the operations that match a filter."""
    now = session.now()
    condition, parameters = wanted.condition(now)
    number = bounds.operations if condition else limit + 1
    rows = session.rows(
        f"SELECT id, {matches(condition)} FROM {OPERATIONS}{session.dialect.force_index('PRIMARY')} "
        "WHERE id < %s ORDER BY id DESC LIMIT %s",
        (*parameters, LAST if before is None else before, number),
    )
    ids = [operation for operation, is_match in rows if is_match]
    joins = f"{session.dialect.join_to(OPERATIONS, 's')} ON s.id = v.i"
    named = session.joined(f"SELECT {COLUMNS}", "i", ids[:limit], joins)
    shown = tuple(built(OperationEntry, row, state=_state(row, now)) for row in sorted(named, reverse=True))
    if len(ids) > limit:
        return OperationListing(shown, ids[limit - 1], whole=True)
    if len(rows) < number:
        return OperationListing(shown, None, whole=True)
    return OperationListing(shown, rows[-1][0], whole=False)


class Unfinished(NamedTuple):
    """Numbers of operations that have not ended."""

    running: int
    interrupted: int


def count_unfinished(session: Session, topics: Collection[str] | None, *, bounds: Bounds = PAGES) -> Unfinished:
    """Count the operations on topics that have not ended, among the newest ``bounds.operations``."""
    condition, parameters = OperationFilter(topics=topics).condition(0)
    now = session.now()
    number, interrupted = session.one(
        f"SELECT COUNT(*), COALESCE(SUM(CASE WHEN {SILENT} THEN 1 ELSE 0 END), 0) FROM "
        f"(SELECT topic, started_at, progress_at, ended_at FROM {OPERATIONS}{session.dialect.force_index('PRIMARY')} "
        f"WHERE id < %s ORDER BY id DESC LIMIT %s) w WHERE ended_at = 0{f' AND {condition}' if condition else ''}",
        (now - SILENT_MS, now - SILENT_MS, LAST, bounds.operations, *parameters),
    )
    return Unfinished(number - int(interrupted), int(interrupted))


def _state(row: Any, now: int) -> State:
    if row.ended_at:
        return "ended"
    return "running" if max(row.started_at, row.progress_at) >= now - SILENT_MS else "interrupted"


def pauses_of(
    session: Session, registered: Mapping[GroupRef, int], *, bounds: Bounds = PAGES
) -> dict[GroupRef, OperationEntry]:
    """Return the operations that have paused groups since they were registered, among the newest on their topics."""
    if not registered:
        return {}
    wanted = OperationFilter(topics={ref.topic for ref in registered}, actions=PAUSING)
    entries = look(session, wanted, limit=PAUSES, bounds=bounds).entries
    newest = {GroupRef(entry.group, entry.topic): entry for entry in reversed(entries)}
    return {
        ref: entry
        for ref, entry in newest.items()
        # An earlier operation has paused another group of this name.
        if entry.action == "pause" and ref in registered and entry.started_at >= registered[ref]
    }


STATES = {
    "running": gettext_lazy("running"),
    "interrupted": gettext_lazy("interrupted"),
    "ended": gettext_lazy("finished"),
}
TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d(?::\d\d(?:\.\d+)?)?(?:[+-]\d\d:\d\d|Z)?")


def _local(found: re.Match[str]) -> str:
    try:
        at = datetime.datetime.fromisoformat(found[0])
    except ValueError:
        return found[0]
    return found[0] if at.tzinfo is None else moment(int(at.timestamp() * 1000)).removesuffix(".000")

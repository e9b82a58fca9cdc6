"""Topics of the log: how much they hold, and what keeps GC from deleting it."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from django.template.defaultfilters import filesizeformat
from django.utils.translation import gettext as _

from django_mysqlqueue.db.tables import ARCHIVE, LOG
from django_mysqlqueue.inspection.bounds import PAGES, Bounds
from django_mysqlqueue.inspection.dead_letters import count_topic
from django_mysqlqueue.inspection.overview import GroupOverview, QueueOverview
from django_mysqlqueue.inspection.problem import ADVICE, Problem
from django_mysqlqueue.inspection.queue_problems import oldest_message
from django_mysqlqueue.inspection.trends import Rates, read_rates
from django_mysqlqueue.names.rules import relayed_from
from django_mysqlqueue.options.conf import get_settings
from django_mysqlqueue.service import log_places, partitions
from django_mysqlqueue.service.counts import Count
from django_mysqlqueue.service.readers import RegisteredReader, waited_for
from django_mysqlqueue.service.refs import GroupRef
from django_mysqlqueue.sql.session import Session
from django_mysqlqueue.text.humanize import duration, messages_per_second

FIRST = 10
"""Number of topics that are read in any case: the large messages of one must not hide the others."""


@dataclass(frozen=True, slots=True)
class TopicSummary:
    """A topic of the log. Times are in epoch milliseconds."""

    topic: str
    groups: tuple[GroupRef, ...]
    """The groups that read it."""
    retention: float | None
    """The seconds for which settled messages are kept; None: forever."""
    entered: float | None = None
    """Messages per second that enter the log; None if nobody has counted them."""
    settled: float = 0.0
    """Messages per second that its groups settle, of all groups together."""
    messages: Count | None = None
    """Messages in the log; None if they were not counted in time."""
    is_estimate: bool = False
    """Whether the number is one of the server's statistics."""
    bytes: int | None = None
    """About how many bytes of disk they take, by the sizes of some of them."""
    oldest_at: int | None = None
    """When the oldest message entered the log, if this is known."""
    held_by: GroupRef | None = None
    """The group that has kept GC from deleting messages for longest."""
    held_since: int | None = None
    """Since when it does. Without a group, it is a registered reader that has not read the messages yet."""
    reader: str = ""
    """The name of this reader."""

    @property
    def number(self) -> str:
        """The number of messages."""
        if self.messages is None:
            return ""
        return _("≈ %(number)s") % {"number": self.messages} if self.is_estimate else str(self.messages)

    @property
    def reader_text(self) -> str:
        """The text for this reader."""
        return _("the archive") if self.reader == ARCHIVE else _("the reader %(name)s") % {"name": self.reader}

    @property
    def entered_text(self) -> str:
        """How many messages come in per second."""
        return "-" if self.entered is None else messages_per_second(self.entered)

    @property
    def settled_text(self) -> str:
        """How many messages are settled per second."""
        return messages_per_second(self.settled)

    @property
    def size(self) -> str:
        """The size of the messages on disk."""
        if self.bytes is None:
            return ""
        exact = self.is_estimate or (self.messages is not None and self.messages.exact)
        text = _("≈ %(size)s") if exact else _("≈ %(size)s or more")
        return text % {"size": filesizeformat(self.bytes)}


def summarize_topics(
    session: Session,
    topics: Iterable[str],
    groups: Sequence[GroupOverview],
    readers: Sequence[RegisteredReader],
    now: int,
    *,
    bounds: Bounds = PAGES,
) -> list[TopicSummary]:
    """Return summaries of topics by name, with what needs the log until ``bounds.seconds`` have passed."""
    until = time.monotonic() + bounds.seconds
    of_topic: dict[str, list[GroupOverview]] = {topic: [] for topic in sorted(topics)}
    for group in groups:
        of_topic.setdefault(group.ref.topic, []).append(group)
    rates = read_rates(session, groups, now)
    waited = waited_for(readers)
    return [
        _summary(
            session,
            topic,
            found,
            rates,
            now,
            waited,
            bounds if place < FIRST or time.monotonic() < until else None,
        )
        for place, (topic, found) in enumerate(of_topic.items())
    ]


def disk(session: Session, overview: QueueOverview, most: int | None) -> Iterator[Problem]:
    """Yield that the log takes more than some bytes of disk, with the topic that takes most of it; None: no limit."""
    size = overview.log_bytes
    if most is None or size is None or size <= most or not overview.topics:
        return
    found = summarize_topics(session, overview.topics, overview.groups, overview.readers, overview.now)
    largest = max(found, key=lambda one: one.bytes or 0)
    share = (largest.bytes or 0) / max(1, sum(one.bytes or 0 for one in found))
    text = _("The log takes about %(size)s of disk (limit %(most)s); %(share)s of it is topic %(topic)s.")
    advice = ""
    if largest.held_since is not None:
        text += " " + _("GC waits for %(holder)s.")
        advice = _("Archive the log.") if largest.reader == ARCHIVE else str(ADVICE["reader"])
        if largest.held_by:
            advice = _("Start a subscriber of the group, or drop it.")
    elif largest.retention is None:
        text += " " + _("GC never deletes its messages.")
    else:
        text += " " + _("GC deletes its messages %(retention)s after they entered the log.")
    values = {
        "size": filesizeformat(size),
        "most": filesizeformat(most),
        "topic": repr(largest.topic),
        "share": f"{share:.0%}",
        "holder": largest.held_by or largest.reader_text,
        "retention": duration(largest.retention or 0),
    }
    yield Problem(1, "disk", text % values, topic=largest.topic, oldest_at=largest.oldest_at, advice=advice)


def _summary(
    session: Session,
    topic: str,
    groups: Sequence[GroupOverview],
    rates: Mapping[GroupRef, Rates],
    now: int,
    registered: Sequence[RegisteredReader],
    bounds: Bounds | None,
) -> TopicSummary:
    kept = get_settings().retention_of(relayed_from(topic), has_groups=bool(groups))
    refs = tuple(group.ref for group in groups)
    entered = [found for ref in refs if (found := rates[ref].entered) is not None]
    settled = sum(rates[ref].settled for ref in refs)
    known = TopicSummary(topic, refs, kept, max(entered, default=None), settled)
    if bounds is None:
        return known
    messages = count_topic(session, topic, bounds.count)
    estimate = None if messages.exact else _estimate(session, topic)
    if estimate is not None:
        messages = Count(max(estimate, messages.value))
    keys, whole = (groups[0].partitions, not groups[0].more_partitions) if groups else ((), True)
    if not groups and messages != Count(0):
        ends, whole = partitions.last_offsets(session, topic, limit=bounds.groupless_partitions)
        keys = tuple(ends)
    first = oldest_message(session, topic, keys) if whole else None
    of_topic = [one for one in registered if not one.topics or topic in one.topics]
    slowest = min(of_topic, key=lambda one: one.offset, default=None)
    held_by, reader, held_since = _holder(groups, first, slowest, None if kept is None else now - int(kept * 1000))
    return replace(
        known,
        messages=messages,
        is_estimate=estimate is not None,
        bytes=round(log_places.disk_per_message(session, topic, keys, 0) * messages.value) if messages else 0,
        oldest_at=None if first is None else first[1],
        held_by=held_by,
        reader=reader,
        held_since=None if held_since is None or kept is None else held_since + int(kept * 1000),
    )


def _estimate(session: Session, topic: str) -> int | None:
    """Return the number of a topic's messages by the server's statistics; None if it has none."""
    # MySQL estimates nothing if it is told which index to use.
    plan = session.dialect.explained(f"SELECT topic FROM {LOG} WHERE topic = %s")
    if plan is None:
        return None
    (row,) = session.named(plan, (topic,))
    return int(row.rows or 0)


def _holder(
    groups: Sequence[GroupOverview],
    first: tuple[int, int] | None,
    slowest: RegisteredReader | None,
    youngest: int | None,
) -> tuple[GroupRef | None, str, int | None]:
    """Return the group, or else the reader, that keeps GC from deleting, and the time of its oldest message."""
    if youngest is None:
        return None, "", None
    late = [(group.oldest_at, group.ref) for group in groups if group.oldest_at is not None]
    at, ref = min(late, default=(youngest + 1, None))
    if at <= youngest:
        return ref, "", at
    if slowest is not None and first is not None and first[0] > slowest.offset and first[1] <= youngest:
        return None, slowest.name, first[1]
    return None, "", None

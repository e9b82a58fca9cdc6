"""Pages of the log in the order of its offsets, for readers without a consumer group.

A reader keeps its position itself: it has read everything up to an offset. GC does not wait for it. What GC has deleted
in front of it is a gap.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from django.db import DatabaseError

from django_mysqlqueue.models import CollectedTopic
from django_mysqlqueue.names.keys import lanes
from django_mysqlqueue.options.conf import get_settings
from django_mysqlqueue.options.topics import first_topic
from django_mysqlqueue.service import log, log_places, partitions, payloads
from django_mysqlqueue.service.log_places import LogPlace
from django_mysqlqueue.service.received import ReceivedMessage
from django_mysqlqueue.sql.session import Session


@dataclass(frozen=True, slots=True)
class Gap:
    """Messages that GC deleted before they were read, or that the log has lost.

    Messages of the range that are in the log follow.
    """

    topic: str
    """The topic."""
    after: int
    """The offset up to which everything was read; if the log was truncated, the end of the log."""
    until: int
    """The highest offset that GC has deleted from the topic, so that messages up to it may be missing; if the log was
    truncated, the position of the tail."""
    truncated: bool = False
    """Whether the log ended below ``until``: its database was restored to an earlier state, or a failover lost
    transactions. Messages above ``after`` no longer exist, and others get their offsets."""


Event = ReceivedMessage | Gap


@dataclass(frozen=True, slots=True)
class PageLimits:
    """Limits of what one page reads."""

    messages: int = 500
    """Maximum number of messages of a topic that are read along the index of partitions."""
    partitions: int = 50
    """Maximum number of partitions to read this way. If a topic has more, the log is walked."""
    walked: int = 3000
    """Number of messages, of all topics, that a walk along the log reads."""
    size: int = 4_194_304
    """Payloads of a page, in bytes, after which it ends early. It has at least one message."""


LIMITS = PageLimits()


class Page(NamedTuple):
    """The next messages of a topic."""

    messages: list[ReceivedMessage]
    position: int
    """The offset up to which everything was read."""
    collected: int
    """The highest offset that GC had deleted from the topic after the messages were read; 0 if it has deleted none.

    If it is above the position before, messages of the topic may be missing: it is read last, so it is not lower than
    the offset of any message that was deleted before it was read."""


def read_topic(session: Session, topic: str, key: str | None, position: int, limits: PageLimits = LIMITS) -> Page:
    """Read the next page of a topic.

    ``key``: a publisher's key. If it has partitions of its own, only these are read; otherwise all are.
    """
    # Read first: no message up to it can be in a partition that the list of partitions lacks.
    end = max(position, log.end_of_log(session))
    keys = partitions_of(session, topic, key, limits.partitions)
    if keys is None:
        found, reached = _walk(session, [topic], position, end, limits)
    else:
        offsets = log_places.in_partitions(session, topic, keys, position, limits.messages, newer=True)
        reached = min(offsets[-1], end) if len(offsets) == limits.messages else end
        found = log_places.at(session, [offset for offset in offsets if offset <= reached])
    found, reached = _cut(found, reached, limits.size)
    messages = _messages(session, found)
    return Page(messages, reached, collected(session, [topic])[topic].offset)


def read_topics(
    session: Session, topics: Collection[str], position: int, end: int, limits: PageLimits = LIMITS
) -> dict[str, Page]:
    """Read the next messages of several topics along the log, up to the same position for all of them."""
    found, reached = _cut(*_walk(session, topics, position, end, limits), limits.size)
    messages = _messages(session, found)
    marks = collected(session, topics)
    return {
        topic: Page([one for one in messages if one.topic == topic], reached, marks[topic].offset) for topic in topics
    }


def read_newest(
    session: Session, topic: str, key: str | None, before: int, limits: PageLimits = LIMITS
) -> tuple[list[ReceivedMessage], int | None]:
    """Read the last messages of a topic before an offset.

    ``key``: as for ``read_topic``. ``before``: only messages below this offset, which is at most one above the end of
    the log.

    Returns:
        The messages, newest first, and the offset before which to continue; None if there are no more.
    """
    keys = partitions_of(session, topic, key, limits.partitions)
    if keys is None:
        walked = log_places.walk(session, before, limits.walked, newer=False)
        more = walked[-1].offset if len(walked) == limits.walked else None
        found = [place for place in walked if place.topic == topic]
    else:
        offsets = log_places.in_partitions(session, topic, keys, before, limits.messages, newer=False)
        more = offsets[-1] if len(offsets) == limits.messages else None
        found = log_places.at(session, offsets)[::-1]
    shown, last = _cut(found, more or 0, limits.size)
    return _messages(session, shown)[::-1], more if len(shown) == len(found) else last


def partitions_of(session: Session, topic: str, key: str | None, most: int) -> list[str] | None:
    """Return the partitions in which messages with a key are, or all partitions of the topic.

    Returns:
        The partitions; None if there are more.
    """
    # Dead letters are in the partitions of their topic.
    if key is None or get_settings().partitions_of(first_topic(topic)) is not None:
        return partitions.all_in_log(session, topic, most=most)
    return partitions.among(session, topic, lanes(key))


class Mark(NamedTuple):
    """What GC has deleted from a topic."""

    offset: int
    """The highest offset."""
    published_at: int
    """When the last of the messages entered the log, in epoch milliseconds."""


NOTHING = Mark(0, 0)


def collected(session: Session, topics: Collection[str]) -> dict[str, Mark]:
    """Return what GC has deleted from topics."""
    rows = CollectedTopic.objects.using(session.using).filter(topic__in=sorted(topics))
    marks = {row[0]: Mark(*row[1:]) for row in rows.values_list("topic", "collected_offset", "published_at")}
    return dict.fromkeys(topics, NOTHING) | marks


def position_since(session: Session, topic: str, moment: int) -> int:
    """Return the position before the first message of a topic that entered the log at a time or later.

    If GC has deleted such messages, it is before the last of them, so that reading from it begins with a gap.
    """
    first = log.first_since(session, moment)
    mark = collected(session, [topic])[topic]
    return (min(first, mark.offset) if mark.published_at >= moment else first) - 1


def _walk(
    session: Session, topics: Collection[str], position: int, end: int, limits: PageLimits
) -> tuple[list[LogPlace], int]:
    """Return the places of topics among the next messages of the log, and the offset up to which they are all."""
    walked = log_places.walk(session, position, limits.walked, newer=True)
    last = walked[-1].offset if walked else position
    reached = last if len(walked) == limits.walked else max(last, end)
    wanted = set(topics)
    return [place for place in walked if place.topic in wanted], reached


def _cut(places: Sequence[LogPlace], reached: int, size: int) -> tuple[list[LogPlace], int]:
    """Return the first places whose payloads fit, at least one, and the offset up to which they are all."""
    total = 0
    for number, place in enumerate(places):
        total += place.size
        if number and total > size:
            return list(places[:number]), places[number - 1].offset
    return list(places), reached


def _messages(session: Session, places: Iterable[LogPlace]) -> list[ReceivedMessage]:
    """Return the messages at some places, lowest offset first, without those that were deleted in the meantime.

    Raises:
        DatabaseError: a result lacks a message that is in the log.
    """
    ordered = sorted(places)
    found = payloads.read(session.using, [place.offset for place in ordered])
    missing = {place.offset for place in ordered} - found.keys()
    if missing and (lost := missing - payloads.deleted(session.using, missing)):
        raise DatabaseError(
            f"The database returned a result without {len(lost)} of the messages that were asked for (the first has "
            f"the offset {min(lost)}): something truncates results, for example sql_select_limit."
        )
    return [
        ReceivedMessage(place.topic, place.key, place.offset, found[place.offset])
        for place in ordered
        if place.offset in found
    ]

"""Messages of the log that wait to be relayed to other databases."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from django_mysqlqueue import naming
from django_mysqlqueue.inspection.bounds import PAGES, Bounds
from django_mysqlqueue.models import QueueMessage
from django_mysqlqueue.service import log_places, relaying
from django_mysqlqueue.service.counts import Count
from django_mysqlqueue.sql.session import Session

LOG = QueueMessage._meta.db_table


@dataclass(frozen=True, slots=True)
class RefusedMessage:
    """A message that its topic's database refuses. No later one is relayed there."""

    topic: str
    """Its topic."""
    id: str
    """Its id."""
    offset: int
    """Its offset in the log of the database via which it was published."""
    error: str
    """The error of the database that refuses it."""


@dataclass(frozen=True, slots=True)
class RelayBacklog:
    """What a database has not received yet of this one's log."""

    target: str
    """Alias of the database."""
    messages: Count
    """Number of messages that wait. A count that stopped at a limit is not exact."""
    oldest_at: int | None
    """When the oldest of them entered the log, in epoch milliseconds; None if none waits."""
    refused: RefusedMessage | None = None
    """The oldest of them, if the database has refused it."""


def read_relays(session: Session, topics: Iterable[str], *, bounds: Bounds = PAGES) -> tuple[RelayBacklog, ...]:
    """Return the backlog of each relay from this database, by target, without a query if there is none."""
    targets = {naming.relay_target(topic) for topic in topics} - {None}
    return tuple(_backlog(session, target, bounds) for target in sorted(filter(None, targets)))


def _backlog(session: Session, target: str, bounds: Bounds) -> RelayBacklog:
    reached = relaying.watermark(session, target)
    places = log_places.walk(session, reached.read_offset, bounds.walked, newer=True)
    waiting = [place for place in places if naming.relay_target(place.topic) == target]
    count = Count(len(waiting), exact=len(places) < bounds.walked)
    if not waiting:
        return RelayBacklog(target, count, None)
    first = waiting[0]
    row = session.row(f"SELECT published_at, id FROM {LOG} WHERE `offset` = %s", (first.offset,))
    refusal = relaying.refusal(session, target)
    refused = None
    if row is not None and refusal.offset == first.offset:
        refused = RefusedMessage(naming.relayed_from(first.topic), str(row[1]), first.offset, refusal.error)
    return RelayBacklog(target, count, None if row is None else int(row[0]), refused)

"""An overview of the queue's state, for the dashboard, the metrics and the health check.

Nothing here reads more rows than ``Bounds`` allows, regardless of the length of the log, the backlogs and the history:
counts stop and are then not exact. Only one index lookup per partition of a topic grows, 4 µs each.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple

from django_mysqlqueue.arguments import checked
from django_mysqlqueue.db import log_queries
from django_mysqlqueue.db.tables import GROUPS, READERS, SEQUENCER
from django_mysqlqueue.filter_policies import FilterPolicy
from django_mysqlqueue.inspection.bounds import PAGES, Bounds
from django_mysqlqueue.inspection.dead_letters import NO_DEAD_LETTERS, DeadLetterCount, count_by_group
from django_mysqlqueue.inspection.limited import Limited, read_limited
from django_mysqlqueue.inspection.outbox import DueMessages, OutboxOverview, RelayBacklog, read_outbox, read_relays
from django_mysqlqueue.inspection.partitions import HeadMessage, heads
from django_mysqlqueue.inspection.subscribers import SubscriberStatus, read_subscribers
from django_mysqlqueue.names.keys import lane_of, priority_of
from django_mysqlqueue.options.conf import get_settings
from django_mysqlqueue.options.delivery_limits import DeliveryLimits
from django_mysqlqueue.options.topics import dlq_topic, is_dlq
from django_mysqlqueue.service import groups, log_places, routing
from django_mysqlqueue.service import unclaimed as of_partitions
from django_mysqlqueue.service.counts import Count, total
from django_mysqlqueue.service.databases import queue_alias
from django_mysqlqueue.service.groups import OptionColumns, waiting_since
from django_mysqlqueue.service.heartbeats import RoundTrip
from django_mysqlqueue.service.log import Ends, all_topics
from django_mysqlqueue.service.readers import RegisteredReader, registered
from django_mysqlqueue.service.refs import GroupRef
from django_mysqlqueue.service.routing import Route
from django_mysqlqueue.sql.session import Session, built
from django_mysqlqueue.subscriptions.effective import GroupOption, effective_options
from django_mysqlqueue.subscriptions.options import Override, filter_of, limits_of, paused_tasks_of, stored
from django_mysqlqueue.subscriptions.registry import subscriptions


@checked()
def list_options(
    *, group: str | None = None, topic: str | None = None, using: str | None = None
) -> Mapping[GroupRef, tuple[GroupOption, ...]]:
    """Return the options of registered consumer groups that operators can override, in order of topic and group.

    Options come from the code of this process; of a group without a handler here, only overrides are known.

    Args:
        group: only this consumer group, on each of its topics.
        topic: only the consumer groups on this topic.
        using: alias of the database (default: that of the topic, else of the queue).

    Raises:
        SubscriberError: this project declares two handlers for a group.
    """
    session = Session(queue_alias(using, topic=topic))
    refs = [
        ref
        for ref in groups.registered_refs(session.using)
        if group in (None, ref.group) and topic in (None, ref.topic)
    ]
    controls = groups.group_controls(session, refs)
    known = subscriptions()
    return {ref: tuple(effective_options(ref, controls[ref].options, known)) for ref in refs if ref in controls}


def read_filter(columns: OptionColumns) -> FilterPolicy | str | None:
    """Return the filter that applies to a group: None if it has none; a text, the error, if it cannot be parsed."""
    try:
        return filter_of(columns)
    except ValueError as error:
        return str(error)


@dataclass(frozen=True, slots=True)
class GroupOverview:
    """A consumer group on a topic. Counts are of messages, times in epoch milliseconds."""

    ref: GroupRef
    """Its name and its topic: ``ref.group``, ``ref.topic``."""
    mode: str
    """``"ordered"`` or ``"shared"``."""
    paused: bool
    after_seek: str
    """What happens to the group when its unfinished seek or drop ends; empty if there is none. See Tables."""
    start_offset: int
    """In partitions that it has not read yet, the group receives messages above this offset."""
    registered_at: int
    sought_at: int
    """When its last seek began or ended; 0 if there was none."""
    overrides: tuple[Override, ...]
    """Options that operators have overridden."""
    filter: FilterPolicy | str | None
    """The filter that applies; None if it has none; a text if this release cannot parse it: the reason."""
    option_columns: OptionColumns
    """The columns of its row with options, as JSON text."""
    limited: Limited | None
    """Whether its limits are reached; None if it has none."""
    lag: Count
    """Messages in the log that it has not settled."""
    lag_by_priority: dict[int, Count]
    """Of these, the number with each priority, the highest first."""
    waiting: DueMessages | None
    """Messages for the group that are due in the outbox; None if there are none."""
    in_flight: Count
    """Messages in flight."""
    retrying: Count
    """Messages that failed at least once and wait for another attempt."""
    dead_letters: Count
    """Messages in the DLQ topic that failed in this group."""
    recent_dead_letters: Count
    """Those of them that failed within the window of the overview."""
    heads: tuple[HeadMessage, ...]
    """The first unsettled messages of partitions, oldest first; at most ``Bounds.heads``."""
    head_backlogs: dict[str, int]
    """The numbers of unsettled messages that were counted in their partitions, by key."""
    partitions: tuple[str, ...]
    """Partitions of its topic that have messages in the log; at most ``Bounds.groupless_partitions``."""
    more_partitions: bool
    """True if the topic has others."""
    subscribers: tuple[SubscriberStatus, ...]
    """Live and lost subscribers, without those that have stopped."""

    @property
    def live(self) -> tuple[SubscriberStatus, ...]:
        """The live subscribers."""
        return tuple(row for row in self.subscribers if row.live)

    def uptime(self, now: int) -> float:
        """Return for how many seconds the group has had its longest-running live subscriber; 0 if it has none.

        Args:
            now: the database's clock, in epoch milliseconds.
        """
        return max((max(0, now - row.started_at) / 1000 for row in self.live), default=0.0)

    @property
    def placed_at(self) -> int:
        """When it was registered or last sought: what was counted before is of another position."""
        return max(self.registered_at, self.sought_at)

    @property
    def paused_tasks(self) -> Mapping[str, int]:
        """The paths of the tasks of a queue of jobs that are paused, and since when."""
        return paused_tasks_of(self.overrides)

    @property
    def moving_heads(self) -> tuple[HeadMessage, ...]:
        """The ``heads`` without those of tasks that are paused."""
        paused = self.paused_tasks
        return tuple(head for head in self.heads if lane_of(head.key).partition not in paused) if paused else self.heads

    @property
    def oldest_at(self) -> int | None:
        """When the oldest unsettled message started to wait, in the log or due in the outbox; None if there is none.

        Jobs of tasks that are paused do not count.
        """
        times = [self.waiting_since(head.published_at) for head in self.moving_heads]
        if self.waiting is not None:
            times.append(self.waiting_since(self.waiting.since))
        return min(times, default=None)

    @property
    def waiting_messages(self) -> Count:
        """Messages that wait for the group, in the log or due in the outbox."""
        return self.lag if self.waiting is None else self.lag + self.waiting.count

    def backlog_of(self, key: str) -> Count:
        """Return the number of unsettled messages in the partition of one of ``heads``."""
        return Count(self.head_backlogs.get(key, 0), self.lag.exact)

    @property
    def lag_is_bound(self) -> bool:
        """True if the backlog is longer than what was counted."""
        return not self.lag.exact and not self.lag.age

    @property
    def has_work(self) -> bool:
        """True if messages wait for the group, in the log or due in the outbox."""
        return bool(self.lag) or self.waiting is not None

    @property
    def options(self) -> tuple[GroupOption, ...]:
        """The options that its subscribers use, as far as this project's code knows them."""
        return tuple(effective_options(self.ref, self.option_columns))

    @property
    def limits(self) -> DeliveryLimits:
        """The limits that apply to the group."""
        return limits_of(self.option_columns)

    def waiting_since(self, at: int) -> int:
        """Return when a message started to wait for the group: not before the group was registered or last sought.

        Args:
            at: when the message entered the log, in epoch milliseconds.
        """
        return waiting_since(at, self.registered_at, self.sought_at)


class HostBell(NamedTuple):
    """Whether publishers wake the live subscribers of a host."""

    host: str
    subscribers: int
    rung_at: int | None
    """When one of them was last rung, in epoch milliseconds; None if none was since it started."""
    error: str
    """Why one of them cannot be; empty if all can."""


@dataclass(frozen=True, slots=True)
class QueueOverview:
    """The queue on one database, or some of its groups. Times are in epoch milliseconds of the database's clock."""

    using: str
    """Alias of the database."""
    now: int
    """When it was read."""
    last_offset: int
    """The newest offset of the log."""
    sequenced_at: int
    """When the sequencer last moved messages into the log, or found all due ones locked by transactions; 0: never."""
    debounced: int
    """How many debounced messages later ones have replaced before they entered the log."""
    outbox: OutboxOverview
    groups: tuple[GroupOverview, ...]
    """In order of topic and group."""
    dead_letters: Count
    """Messages in all DLQ topics that were read, including those of dropped groups."""
    more_groups: bool
    """True if there are more groups than were read."""
    window: float
    """Length, in seconds, of the window that ends now."""
    topics: tuple[str, ...] | None
    """Topics with messages in the log; None if the overview is of some groups only."""
    relays: tuple[RelayBacklog, ...] = ()
    """Messages of the log that wait to be relayed to other databases, by database."""
    routes: Mapping[str, Route] = field(default_factory=dict)
    """Where the messages of topics go that move, or have moved, to another database, by topic."""
    readers: tuple[RegisteredReader, ...] = ()
    """The registered readers, for which GC keeps messages, by name."""
    log_bytes: int | None = None
    """About how many bytes of disk the log takes, by the server's statistics (on SQLite, the size of the file); None if
    the overview is of some groups only."""

    @property
    def lag(self) -> Count:
        """Messages in the log that groups have not settled."""
        return total(group.lag for group in self.groups)

    @property
    def in_flight(self) -> Count:
        """Messages in flight."""
        return total(group.in_flight for group in self.groups)

    @property
    def retrying(self) -> Count:
        """Messages that failed at least once and wait for another attempt."""
        return total(group.retrying for group in self.groups)

    @property
    def oldest_at(self) -> int | None:
        """When the oldest unsettled message started to wait for a group; None if there is none."""
        return min((group.oldest_at for group in self.groups if group.oldest_at is not None), default=None)

    @property
    def live(self) -> frozenset[str]:
        """Names of the live subscribers."""
        return frozenset(row.name for group in self.groups for row in group.live)

    @property
    def round_trips(self) -> dict[str, RoundTrip]:
        """How long the database takes to answer the polls of live subscribers, by name."""
        live = (row for group in self.groups for row in group.live)
        return {row.name: row.round_trip for row in live if row.round_trip is not None}

    @property
    def bells(self) -> tuple[HostBell, ...]:
        """Whether publishers wake the live subscribers, by host; without those of a host where the bell is off."""
        by_host: dict[str, dict[str, SubscriberStatus]] = {}
        for row in (row for group in self.groups for row in group.live if "no_bell" in row.info):
            by_host.setdefault(str(row.info.get("host", "")), {})[row.name] = row
        return tuple(
            HostBell(
                host,
                len(rows),
                max((row.rung_at for row in rows.values() if row.rung_at is not None), default=None),
                next((row.no_bell for row in rows.values() if row.no_bell), ""),
            )
            for host, rows in sorted(by_host.items())
        )

    @property
    def slowest_round_trip(self) -> RoundTrip | None:
        """The longest of these; None if no live subscriber has stored one."""
        return max(self.round_trips.values(), default=None)


@checked()
def get_overview(
    *,
    group: str | None = None,
    topic: str | None = None,
    using: str | None = None,
    bounds: Bounds = PAGES,
    window: float | None = None,
    lease_duration: float | None = None,
) -> QueueOverview:
    """Read the state of the queue: the outbox, and each consumer group with its backlog and its subscribers.

    Args:
        group: only this consumer group, on each of its topics.
        topic: only the consumer groups on this topic.
        using: alias of the database (default: that of the topic, else of the queue).
        bounds: limits of what is read; a count that reaches its limit is not exact.
        window: length, in seconds, of the window that ends now (default: ``HEALTH["WINDOW"]``).
        lease_duration: seconds without a heartbeat after which a subscriber is lost (default: ``LEASE_DURATION``).

    Raises:
        ImproperlyConfigured: the setting ``HEALTH`` is invalid.
    """
    session = Session(queue_alias(using, topic=topic))
    settings = get_settings()
    if window is None:
        window = settings.health.window
    lease_ms = int((settings.lease_duration if lease_duration is None else lease_duration) * 1000)
    now = session.now()
    last_offset, sequenced_at, debounced, routes, has_readers = session.row(
        f"SELECT last_offset, sequenced_at, debounced, routes, EXISTS (SELECT 1 FROM {READERS}) FROM {SEQUENCER} "
        "WHERE id = 1"
    ) or (0, 0, 0, "{}", False)
    rows = _registered(session, group, topic, bounds.groups + 1)
    topics = log_bytes = None
    dlqs = sorted({dlq_topic(row.topic) for row in rows})
    if group is None and topic is None:
        topics, log_bytes = tuple(all_topics(session)), log_places.disk_of_log(session)
        dlqs = [name for name in topics if is_dlq(name)]
    dead_letters = count_by_group(session, now - int(window * 1000), dlqs, bounds=bounds)
    ref = None if group is None or topic is None else GroupRef(group, topic)
    subscribers = read_subscribers(session, lease_ms=lease_ms, ref=ref)
    outbox = read_outbox(session, now, bounds=bounds)
    reader = _GroupReader(session, bounds, now, min(bounds.groups, len(rows)))
    found = []
    for row in rows[: bounds.groups]:
        ref = GroupRef(row.consumer_group, row.topic)
        dead = dead_letters.get((dlq_topic(row.topic), ref), NO_DEAD_LETTERS)
        found.append(reader.read(row, outbox.of(ref), dead, subscribers.get(ref, [])))
    return QueueOverview(
        using=session.using,
        now=now,
        last_offset=last_offset,
        sequenced_at=sequenced_at,
        debounced=debounced,
        outbox=outbox,
        groups=tuple(found),
        dead_letters=total(one.all for one in dead_letters.values()),
        more_groups=len(rows) > bounds.groups,
        window=window,
        topics=topics,
        log_bytes=log_bytes,
        relays=read_relays(session, topics or (), bounds=bounds),
        routes=routing.decoded(routes),
        readers=tuple(registered(session)) if has_readers else (),
    )


def _registered(session: Session, group: str | None, topic: str | None, limit: int) -> list[Any]:
    """Return the rows of groups, in order of topic and group."""
    wanted = {name: value for name, value in (("consumer_group", group), ("topic", topic)) if value is not None}
    where = f"WHERE {' AND '.join(f'{name} = %s' for name in wanted)} " if wanted else ""
    return session.named(
        "SELECT consumer_group, topic, mode, paused, after_seek, start_offset, registered_at, sought_at, "
        f"{', '.join(OptionColumns._fields)} FROM {GROUPS} {where}ORDER BY topic, consumer_group LIMIT %s",
        (*wanted.values(), limit),
    )


# -- a group ------------------------------------------------------------------


class _Unsettled(NamedTuple):
    """Messages of a group, with the first and the number of those that were counted in each partition."""

    all: Count
    partitions: Mapping[str, tuple[int, int]]
    in_flight: Count = Count(0)
    retrying: Count = Count(0)


class _GroupReader:
    """Reads groups. Their counts share the ends of their topics, and a time limit."""

    def __init__(self, session: Session, bounds: Bounds, now: int, groups: int) -> None:
        self._session = session
        self._bounds = bounds
        self._now = now
        self._ends = Ends(session, bounds.partitions)
        self._left = bounds.seconds
        self._groups = groups

    def read(
        self, row: Any, waiting: DueMessages | None, dead: DeadLetterCount, subscribers: Sequence[SubscriberStatus]
    ) -> GroupOverview:
        ref = GroupRef(row.consumer_group, row.topic)
        columns = OptionColumns(*(getattr(row, name) for name in OptionColumns._fields))
        live = {one.name for one in subscribers if one.live}
        claimed = self._claimed(ref)
        unclaimed = self._unclaimed(ref, row.start_offset)
        firsts = {key: first for part in (unclaimed, claimed) for key, (first, _) in part.partitions.items()}
        overrides = stored(columns.overrides)
        paused = paused_tasks_of(overrides)
        halted = {key for key in firsts if lane_of(key).partition in paused} if paused else set()
        # What is paused comes last: nobody has to find out why it waits.
        first = sorted((key in halted, offset, key) for key, offset in firsts.items())[: self._bounds.heads]
        ends, whole = self._ends.of(ref.topic)
        partitions = tuple(islice(ends, self._bounds.groupless_partitions))
        return built(
            GroupOverview,
            row,
            ref=ref,
            paused=bool(row.paused),
            overrides=tuple(overrides),
            filter=read_filter(columns),
            option_columns=columns,
            limited=read_limited(self._session, ref, limits_of(columns), self._now, live),
            lag=(claimed.all + unclaimed.all).capped(self._bounds.count),
            lag_by_priority=_by_priority(claimed, unclaimed),
            waiting=waiting,
            in_flight=claimed.in_flight,
            retrying=claimed.retrying,
            dead_letters=dead.all,
            recent_dead_letters=dead.recent,
            heads=tuple(heads(self._session, ref, [offset for _, offset, _ in first])),
            head_backlogs={
                key: sum(part.partitions.get(key, (0, 0))[1] for part in (claimed, unclaimed))
                for key in {*halted, *(key for _, _, key in first)}
            },
            partitions=partitions,
            more_partitions=not whole or len(ends) > len(partitions),
            subscribers=tuple(subscribers),
        )

    def _claimed(self, ref: GroupRef) -> _Unsettled:
        """Count the messages that are claimed and not settled."""
        most = self._bounds.count
        rows = self._session.named(
            "SELECT w.partition_key, MIN(w.message_offset) AS first, COUNT(*) AS number, "
            "SUM(CASE WHEN w.delivery_token <> 0 THEN 1 ELSE 0 END) AS in_flight, "
            "SUM(CASE WHEN w.delivery_token = 0 AND w.retry_count > 0 THEN 1 ELSE 0 END) AS retrying "
            f"FROM (SELECT partition_key, message_offset, delivery_token, retry_count "
            f"{log_queries.claimed(self._session)} LIMIT %s) w GROUP BY w.partition_key",
            (*ref, False, most + 1),
        )
        found = Count.up_to(most, sum(row.number for row in rows))
        return _Unsettled(
            found,
            {row.partition_key: (row.first, row.number) for row in rows},
            Count(sum(int(row.in_flight) for row in rows), found.exact).capped(most),
            Count(sum(int(row.retrying) for row in rows), found.exact).capped(most),
        )

    def _unclaimed(self, ref: GroupRef, offset: int) -> _Unsettled:
        """Count the messages that the group has not claimed, in the partitions furthest behind first, up to a bound."""
        session, bounds, most = self._session, self._bounds, self._bounds.count
        last, whole = self._ends.of(ref.topic)
        read = of_partitions.many_positions(session, ref, last, self._ends.most)
        new = (offset, offset)
        behind = sorted((position, key) for key, end in last.items() if end > (position := read.get(key, new)[1]))
        number = 0
        found: dict[str, tuple[int, int]] = {}
        with self._share() as is_over:
            for start in range(0, len(behind), bounds.piece):
                # The first ones are read in any case: no group with a backlog may seem to have none.
                if number > most or (start and is_over()):
                    whole = False
                    break
                piece = behind[start : start + bounds.piece]
                claimed = {key: position for position, key in piece}
                for key, counted in of_partitions.count(session, ref, piece, depth=bounds.depth).items():
                    in_partition = counted.number
                    if in_partition == bounds.depth and number <= most:
                        # Count long ones one by one, so that together they cost no more than the limit.
                        depth = max(bounds.depth, most + 1 - number)
                        alone = of_partitions.count(session, ref, [(claimed[key], key)], depth=depth)
                        in_partition = alone[key].number if key in alone else 0
                    found[key] = (counted.first, in_partition)
                    number += in_partition
        return _Unsettled(Count(number, whole).capped(most), found)

    @contextmanager
    def _share(self) -> Iterator[Callable[[], bool]]:
        """Yield whether the next group's share of the time is over. What it does not use is left for the others."""
        began, share = time.monotonic(), self._left / max(1, self._groups)
        self._groups -= 1
        yield lambda: time.monotonic() - began > share
        self._left = max(0.0, self._left - (time.monotonic() - began))


def _by_priority(*parts: _Unsettled) -> dict[int, Count]:
    """Return the number of messages with each priority. All are lower bounds if one of the counts stopped."""
    numbers: Counter[int] = Counter()
    for part in parts:
        for key, (_, number) in part.partitions.items():
            numbers[priority_of(key)] += number
    exact = all(part.all.exact for part in parts)
    return {priority: Count(numbers[priority], exact) for priority in sorted(numbers, reverse=True)}

"""All rows of the queue at one moment, so that two moments can be compared."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from django.apps import apps
from django.db import connections

from tests.support.internals import GroupRef, dialect_of

Place = tuple[GroupRef, str]
"""A partition of a group's topic: (group, partition key)."""
Delivery = tuple[GroupRef, str, int]
"""A message of a group: (group, partition key, offset)."""


class Logged(NamedTuple):
    """A row of the log."""

    offset: int
    topic: str
    key: str
    id: str
    payload: bytes
    target_group: str = ""
    original_id: str = ""
    original_topic: str = ""
    original_offset: int = 0
    failed_group: str = ""
    failed_at: int = 0
    failure_count: int = 0
    last_error: str = ""
    metadata: str = "{}"
    expires_at: int | None = None
    coalesce_key: str | None = None
    created_at: int = 0
    published_at: int = 0

    @property
    def identity(self) -> tuple[str, str, str]:
        """What is unique in the log."""
        return self.topic, self.key, self.id


class Waiting(NamedTuple):
    """A row of the outbox."""

    outbox_id: int
    topic: str
    key: str
    id: str
    payload: bytes
    target_group: str = ""
    original_id: str = ""
    original_topic: str = ""
    original_offset: int = 0
    failed_group: str = ""
    failed_at: int = 0
    failure_count: int = 0
    last_error: str = ""
    metadata: str = "{}"
    expires_at: int | None = None
    coalesce_key: str | None = None
    created_at: int = 0
    deliver_at: int = 0
    is_debounced: bool = False
    """Whether a later message with its coalesce key replaces it."""

    @property
    def identity(self) -> tuple[str, str, str]:
        """What will be unique in the log."""
        return self.topic, self.key, self.id


class SetAside(NamedTuple):
    """A row of the quarantine."""

    quarantine_id: int
    topic: str
    key: str
    id: str
    payload: bytes
    target_group: str = ""
    original_id: str = ""
    original_topic: str = ""
    original_offset: int = 0
    failed_group: str = ""
    failed_at: int = 0
    failure_count: int = 0
    last_error: str = ""
    metadata: str = "{}"
    expires_at: int | None = None
    coalesce_key: str | None = None
    created_at: int = 0
    deliver_at: int = 0
    reason: str = ""

    @property
    def identity(self) -> tuple[str, str, str]:
        """What would be unique in the log."""
        return self.topic, self.key, self.id


class Group(NamedTuple):
    """A row of a consumer group."""

    mode: str = "ordered"
    start_offset: int = 0
    paused: bool = False
    after_seek: str = ""
    revision: int = 0
    id: int = 0
    registered_at: int = 0
    sought_at: int = 0
    operation: int = 0
    overrides: str = "{}"
    filter: str = "{}"

    @property
    def overridden(self) -> dict[str, Any]:
        """The options that operators have overridden, by name."""
        return {name: one["value"] for name, one in sorted(json.loads(self.overrides).items())}

    @property
    def registered_filter(self) -> dict[str, Any]:
        """The filter as it was registered; empty: none."""
        return dict(json.loads(self.filter))


class Offsets(NamedTuple):
    """Watermark and cursor."""

    acked: int
    claimed: int


class State(NamedTuple):
    """A delivery's row."""

    acked: bool = False
    retry_count: int = 0
    delivered_by: str = ""
    delivery_token: int = 0
    suspect: bool = False
    invisible_until: int = 0
    delivered_at: int = 0
    last_error: str = ""


class Heartbeat(NamedTuple):
    """A subscriber's heartbeat for one group."""

    heartbeat_at: int
    deregistered_at: int = 0


class Event(NamedTuple):
    """The recorded end of a delivery, or what an operator did with a dead letter."""

    id: int
    ref: GroupRef
    key: str
    offset: int
    outcome: str
    attempt: int = 0
    settled_by: str = ""
    error: str = ""
    related_id: str = ""


class Operation(NamedTuple):
    """What an operator did."""

    id: int
    action: str
    ref: GroupRef
    actor: str = ""
    detail: str = ""
    changed: int = 0
    started_at: int = 0
    ended_at: int = 0


class Rollup(NamedTuple):
    """The counts of a minute or an hour."""

    acked: int
    failed: int
    dead_lettered: int


class Schedule(NamedTuple):
    """A row of a recurring schedule."""

    definition: str
    last_tick: int
    last_run: int
    skipped: int
    paused_at: int
    seen_at: int
    editable: int

    @property
    def every_ms(self) -> int:
        """The interval of its ticks in milliseconds."""
        return int(json.loads(self.definition)["every_ms"])

    @property
    def arguments(self) -> list[Any]:
        """The positional arguments of its jobs."""
        return list(json.loads(self.definition)["payload"]["args"])


class Effect(NamedTuple):
    """What a handler wrote into the application's own table."""

    id: int
    name: str
    value: int


@dataclass(frozen=True, slots=True)
class Tables:
    """The queue as it stands. Rows are as they are, in the order of their keys."""

    log: dict[int, Logged] = field(default_factory=dict)
    """By offset."""
    outbox: list[Waiting] = field(default_factory=list)
    groups: dict[GroupRef, Group] = field(default_factory=dict)
    offsets: dict[Place, Offsets] = field(default_factory=dict)
    state: dict[Delivery, State] = field(default_factory=dict)
    leases: dict[Place, str] = field(default_factory=dict)
    """The owner of each; ``''``: nobody."""
    superseding: dict[tuple[GroupRef, str, str], int] = field(default_factory=dict)
    """By group, partition and coalesce key: the message for which the group has given up others; 0: none."""
    heartbeats: dict[tuple[GroupRef, str], Heartbeat] = field(default_factory=dict)
    """By group and subscriber."""
    sequencer: int | None = None
    """The last offset of the sequencer's row; None: there is no row."""
    events: list[Event] = field(default_factory=list)
    operations: list[Operation] = field(default_factory=list)
    rollups: dict[tuple[int, int, GroupRef], Rollup] = field(default_factory=dict)
    """By grain, beginning and group."""
    collected: dict[str, int] = field(default_factory=dict)
    """By topic: the highest offset that GC has deleted."""
    schedules: dict[str, Schedule] = field(default_factory=dict)
    results: dict[str, str] = field(default_factory=dict)
    """The status of each job, by id."""
    quarantine: list[SetAside] = field(default_factory=list)
    effects: list[Effect] = field(default_factory=list)
    """Empty in projects without the table."""
    now: int = 0
    """The database's clock in epoch milliseconds."""

    @classmethod
    def read(
        cls, using: str = "default", *, changed: Collection[str] | None = None, before: Tables | None = None
    ) -> Tables:
        """Reads the tables, each that has rows by a statement of its own.

        Args:
            using: the alias. While others write, open a transaction with a snapshot first.
            changed: names of tables; the rows of all others are taken from ``before``.
            before: what was read earlier; without it everything is read.
        """
        connection = connections[using]
        with connection.cursor() as cursor:

            def rows(sql: str) -> list[tuple[Any, ...]]:
                cursor.execute(sql)
                return list(cursor.fetchall())

            found: dict[str, Any] = {}
            wanted: dict[str, tuple[str, str, Callable[[list[tuple[Any, ...]]], Any]]] = {}
            for name, source in _SOURCES.items():
                if before is not None and changed is not None and source[0] not in changed:
                    found[name] = getattr(before, name)
                elif name != "effects" or apps.is_installed("tests.app"):
                    wanted[name] = source
            # Most tables are empty most of the time: one statement says which.
            have_rows = [f"EXISTS (SELECT 1 FROM {table})" for table, _, _ in wanted.values()]
            now, *full = rows(f"SELECT {', '.join([dialect_of(connection).now_ms, *have_rows])}")[0]
            for (name, (_, sql, convert)), has_rows in zip(wanted.items(), full, strict=True):
                found[name] = convert(rows(sql) if has_rows else [])
        return cls(**found, now=int(now))


def _log(rows: list[tuple[Any, ...]]) -> dict[int, Logged]:
    return {row[0]: Logged._make(row) for row in rows}


def _outbox(rows: list[tuple[Any, ...]]) -> list[Waiting]:
    return [Waiting._make(row) for row in rows]


def _quarantine(rows: list[tuple[Any, ...]]) -> list[SetAside]:
    return [SetAside._make(row) for row in rows]


def _groups(rows: list[tuple[Any, ...]]) -> dict[GroupRef, Group]:
    return {
        GroupRef(group, topic): Group(mode, start, bool(paused), *more)
        for group, topic, mode, start, paused, *more in rows
    }


def _offsets(rows: list[tuple[Any, ...]]) -> dict[Place, Offsets]:
    return {(GroupRef(group, topic), key): Offsets(acked, claimed) for group, topic, key, acked, claimed in rows}


def _state(rows: list[tuple[Any, ...]]) -> dict[Delivery, State]:
    return {
        (GroupRef(group, topic), key, offset): State(bool(acked), *more)
        for group, topic, key, offset, acked, *more in rows
    }


def _leases(rows: list[tuple[Any, ...]]) -> dict[Place, str]:
    return {(GroupRef(group, topic), key): owner for group, topic, key, owner in rows}


def _superseding(rows: list[tuple[Any, ...]]) -> dict[tuple[GroupRef, str, str], int]:
    return {(GroupRef(group, topic), *key): offset for group, topic, *key, offset in rows if group}


def _heartbeats(rows: list[tuple[Any, ...]]) -> dict[tuple[GroupRef, str], Heartbeat]:
    return {(GroupRef(group, topic), name): Heartbeat(at, gone) for group, topic, name, at, gone in rows}


def _sequencer(rows: list[tuple[Any, ...]]) -> int | None:
    return int(rows[0][0]) if rows else None


def _events(rows: list[tuple[Any, ...]]) -> list[Event]:
    return [Event(number, GroupRef(group, topic), *more) for number, group, topic, *more in rows]


def _operations(rows: list[tuple[Any, ...]]) -> list[Operation]:
    return [Operation(number, action, GroupRef(group, topic), *more) for number, action, group, topic, *more in rows]


def _rollups(rows: list[tuple[Any, ...]]) -> dict[tuple[int, int, GroupRef], Rollup]:
    return {(grain, at, GroupRef(group, topic)): Rollup(*counts) for grain, at, group, topic, *counts in rows}


def _collected(rows: list[tuple[Any, ...]]) -> dict[str, int]:
    return {topic: int(offset) for topic, offset in rows}


def _schedules(rows: list[tuple[Any, ...]]) -> dict[str, Schedule]:
    return {name: Schedule._make(more) for name, *more in rows}


def _results(rows: list[tuple[Any, ...]]) -> dict[str, str]:
    return dict(rows)


def _effects(rows: list[tuple[Any, ...]]) -> list[Effect]:
    return [Effect._make(row) for row in rows]


_MESSAGE = (
    "topic, partition_key, id, payload, target_group, original_id, original_topic, original_offset, failed_group, "
    "failed_at, failure_count, last_error, metadata, expires_at, coalesce_key, created_at"
)
_DEBOUNCED = "EXISTS (SELECT 1 FROM queue_debounced d WHERE d.outbox_id = queue_outbox.outbox_id)"
_GROUP = "consumer_group, topic"
_DELIVERY = f"{_GROUP}, partition_key, message_offset"
_SOURCES: dict[str, tuple[str, str, Callable[[list[tuple[Any, ...]]], Any]]] = {
    name: (table, f"SELECT {columns} FROM {table} ORDER BY {order}", convert)
    for name, table, columns, order, convert in (
        ("log", "queue_messages", f"`offset`, {_MESSAGE}, published_at", "`offset`", _log),
        ("outbox", "queue_outbox", f"outbox_id, {_MESSAGE}, deliver_at, {_DEBOUNCED}", "outbox_id", _outbox),
        (
            "quarantine",
            "queue_quarantine",
            f"quarantine_id, {_MESSAGE}, deliver_at, reason",
            "quarantine_id",
            _quarantine,
        ),
        (
            "groups",
            "queue_consumer_groups",
            f"{_GROUP}, {', '.join(Group._fields)}",
            "consumer_group, topic",
            _groups,
        ),
        (
            "offsets",
            "queue_offsets",
            "consumer_group, topic, partition_key, offset_acked, offset_claimed",
            "consumer_group, topic, partition_key",
            _offsets,
        ),
        (
            "state",
            "queue_delivery_state",
            f"{_DELIVERY}, {', '.join(State._fields)}",
            _DELIVERY,
            _state,
        ),
        (
            "leases",
            "queue_partition_leases",
            "consumer_group, topic, partition_key, leased_by",
            "consumer_group, topic, partition_key",
            _leases,
        ),
        (
            "superseding",
            "queue_coalesce_keys",
            "consumer_group, topic, partition_key, coalesce_key, superseding_offset",
            "consumer_group, topic, partition_key, coalesce_key",
            _superseding,
        ),
        (
            "heartbeats",
            "queue_subscriber_heartbeats",
            "consumer_group, topic, subscriber_name, heartbeat_at, deregistered_at",
            "consumer_group, topic, subscriber_name",
            _heartbeats,
        ),
        ("sequencer", "queue_sequencer", "last_offset", "id", _sequencer),
        (
            "events",
            "queue_delivery_events",
            "id, consumer_group, topic, partition_key, message_offset, outcome, attempt, settled_by, error, related_id",
            "id",
            _events,
        ),
        (
            "operations",
            "queue_operations",
            "id, action, consumer_group, topic, actor, detail, changed, started_at, ended_at",
            "id",
            _operations,
        ),
        (
            "rollups",
            "queue_rollups",
            "grain, bucket_at, consumer_group, topic, acked, failed, dead_lettered",
            "grain, bucket_at, consumer_group, topic",
            _rollups,
        ),
        ("collected", "queue_collected", "topic, collected_offset", "topic", _collected),
        ("schedules", "queue_schedules", f"name, {', '.join(Schedule._fields)}", "name", _schedules),
        ("results", "queue_job_results", "id, status", "id", _results),
        ("effects", "tests_app_effect", "id, name, value", "id", _effects),
    )
}
"""Field → its table, the statement, and what makes rows of the answer."""

"""What the tables of the queue say at one moment, read whole, so that two moments can be compared."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from django.db import connection, transaction
from django.db.models import Model

from django_mysqlqueue import models
from django_mysqlqueue.service.transactions import Session
from tests.app.models import Effect
from tests.conftest import QUEUE_MODELS, empty
from tests.crashes import DLQ, TOPIC
from tests.harness import USING

OLD_MS = 1_800_000
"""A heartbeat of half an hour ago is not one of this run."""


@dataclass(frozen=True)
class Picture:
    """The tables of the queue at one moment, and what they mean."""

    tables: dict[str, Any]
    """Every row, with messages by their names, and times and tokens by what they say: comparable between runs."""
    messages: Counter[str]
    """How often a message of the topic is in outbox and log."""
    letters: Counter[tuple[str, ...]]
    """(group, message) → its dead letters in outbox and log."""
    settled: frozenset[tuple[str, str]]
    """(group, message): acked or dead-lettered."""
    failures: dict[tuple[str, str], int]
    """(group, message) → attempts that count, of what has a state row."""
    offsets: dict[tuple[str, str], tuple[int, int]]
    """(group, partition key) → watermark and cursor."""
    broken: list[str]
    """What holds at no moment."""


@dataclass(frozen=True)
class _Rows:
    """Rows as they are. All groups are of the one topic."""

    log: dict[int, tuple[str, str, str]]
    """Offset → topic, partition key, name."""
    groups: list[tuple[Any, ...]]
    offsets: dict[tuple[str, str], tuple[int, int]]
    state: dict[tuple[str, str, int], tuple[Any, ...]]
    """(group, partition key, offset) → acked, retry count, by whom, token, invisible until, error."""


class Observer:
    """Reads the tables; remembers the messages that GC has deleted meanwhile."""

    def __init__(self) -> None:
        self._places: dict[int, tuple[str, str, str]] = {}
        """Offset → topic, partition key, name."""
        self._settled: frozenset[tuple[str, str]] = frozenset()

    def read(self) -> Picture:
        now = Session(USING).now()
        outbox = [
            (topic, key, _name(message_id, group, original), _when(at, now), count, error)
            for topic, key, message_id, group, original, at, count, error in _rows(
                models.OutboxMessage,
                "topic partition_key message_id failed_group original_id deliver_at failure_count last_error",
                order="outbox_id",
            )
        ]
        rows = self._read_rows()
        settled, broken = self._judge_messages(rows)
        everything = [(topic, name) for topic, _, name in rows.log.values()] + [(row[0], row[2]) for row in outbox]
        return Picture(
            tables={"outbox": outbox, **self._tables(rows, now)},
            messages=Counter(name for topic, name in everything if topic == TOPIC),
            letters=Counter(tuple(name.split(":", 1)) for topic, name in everything if topic == DLQ),
            settled=settled,
            failures={(group, self._at(offset)): row[1] for (group, _, offset), row in rows.state.items()},
            offsets=rows.offsets,
            broken=broken + self._judge_state(rows),
        )

    def _read_rows(self) -> _Rows:
        log = {
            offset: (topic, key, _name(message_id, group, original))
            for offset, topic, key, message_id, group, original in _rows(
                models.QueueMessage,
                "offset topic partition_key message_id failed_group original_id",
                order="offset",
            )
        }
        self._places = self._places | log
        state = _rows(
            models.DeliveryState,
            "consumer_group partition_key message_offset acked retry_count delivered_by delivery_token "
            "invisible_until last_error",
        )
        groups = _rows(
            models.ConsumerGroup,
            "consumer_group topic mode start_offset paused",
            order="consumer_group",
        )
        return _Rows(
            log,
            list(groups),
            offsets(),
            {(group, key, offset): tuple(row) for group, key, offset, *row in state},
        )

    def _tables(self, rows: _Rows, now: int) -> dict[str, Any]:
        return {
            "log": list(rows.log.values()),
            "groups": rows.groups,
            "offsets": {
                (group, key): (self._passed(key, watermark), self._passed(key, cursor))
                for (group, key), (watermark, cursor) in rows.offsets.items()
            },
            "state": {
                (group, key, self._at(offset)): (acked, count, _who(by), bool(token), _when(until, now), error)
                for (group, key, offset), (acked, count, by, token, until, error) in rows.state.items()
            },
            "leases": {
                (group, key): _who(by)
                for group, key, by in _rows(models.PartitionLease, "consumer_group partition_key leased_by")
            },
            "heartbeats": {
                (group, _who(name), topic): (at > now - OLD_MS, bool(gone))
                for group, name, topic, at, gone in _rows(
                    models.SubscriberHeartbeat,
                    "consumer_group subscriber_name topic heartbeat_at deregistered_at",
                )
            },
            "sequencer": [self._at(last) for (last,) in _rows(models.Sequencer, "last_offset")],
            "effects": sorted(name for (name,) in _rows(Effect, "name")),
        }

    def _at(self, offset: int) -> str:
        return self._places[offset][2] if offset in self._places else "" if offset == 0 else "?"

    def _passed(self, key: str, offset: int) -> int:
        """How many messages of a partition are at or below an offset."""
        return sum(at <= offset and place[:2] == (TOPIC, key) for at, place in self._places.items())

    def _judge_messages(self, rows: _Rows) -> tuple[frozenset[tuple[str, str]], list[str]]:
        """What each group has settled, and where a message is neither that nor going to be delivered."""
        settled: set[tuple[str, str]] = set()
        broken: list[str] = []
        places = [(offset, key, name) for offset, (topic, key, name) in self._places.items() if topic == TOPIC]
        for group, topic, _, _, paused in rows.groups:
            if topic != TOPIC or paused:  # a drop that died leaves a paused group: it is run again
                continue
            for offset, key, name in places:
                watermark, cursor = rows.offsets.get((group, key), (0, 0))
                row = rows.state.get((group, key, offset))
                if offset not in rows.log:
                    if (group, name) in self._settled:
                        settled.add((group, name))
                    else:
                        broken.append(f"{name} was deleted from the log and {group} had not settled it")
                elif offset <= watermark or (row is not None and row[0]):
                    settled.add((group, name))
                elif offset <= cursor and row is None:
                    broken.append(f"{name} is between watermark and cursor of {group} and has no state row")
        self._settled = frozenset(settled)
        return self._settled, broken

    def _judge_state(self, rows: _Rows) -> list[str]:
        broken = [
            f"the watermark of {place} is above the cursor"
            for place, (watermark, cursor) in rows.offsets.items()
            if watermark > cursor
        ]
        known = {group for group, topic, *_ in rows.groups if topic == TOPIC}
        left = {place[0] for place in (*rows.offsets, *rows.state)} - known
        # They would meet the claims of a group that is registered anew.
        broken += [f"there are rows of {group}, which is not registered" for group in left]
        for (group, key, offset), (acked, *_) in rows.state.items():
            name = self._at(offset)
            watermark, cursor = rows.offsets.get((group, key), (-1, -1))
            if not acked and offset <= watermark:
                broken.append(f"the watermark of {group} has passed {name}, which is not settled")
            if offset > cursor:
                broken.append(f"{name} has a state row of {group} above the cursor")
        return broken


def offsets() -> dict[tuple[str, str], tuple[int, int]]:
    """Watermark and cursor of each group and partition."""
    return {
        (group, key): (watermark, cursor)
        for group, key, watermark, cursor in _rows(
            models.ConsumerOffset,
            "consumer_group partition_key offset_acked offset_claimed",
        )
    }


class Snapshot:
    """All rows as they are, to be put back."""

    def __init__(self) -> None:
        self._tables: list[tuple[str, str, list[tuple[Any, ...]]]] = []
        """Those that have any."""
        for model in (*QUEUE_MODELS, Effect):
            fields = [field for field in model._meta.concrete_fields if not field.generated]
            columns = ", ".join(connection.ops.quote_name(field.column) for field in fields)
            with connection.cursor() as cursor:
                cursor.execute(f"SELECT {columns} FROM {model._meta.db_table}")
                if rows := list(cursor.fetchall()):
                    self._tables.append((model._meta.db_table, columns, rows))

    def restore(self) -> None:
        with transaction.atomic(), connection.cursor() as cursor:
            empty()
            for table, columns, rows in self._tables:
                places = ", ".join(["%s"] * len(rows[0]))
                cursor.executemany(f"INSERT INTO {table} ({columns}) VALUES ({places})", rows)


def _rows(model: type[Model], names: str, *, order: str = "") -> list[tuple[Any, ...]]:
    """Columns of a table by the names of the model's fields; plain SQL, since this is done thousands of times."""
    columns = ", ".join(connection.ops.quote_name(model._meta.get_field(name).column) for name in names.split())
    ordered = f" ORDER BY {connection.ops.quote_name(order)}" if order else ""
    return Session(USING).rows(f"SELECT {columns} FROM {model._meta.db_table}{ordered}")


def _name(message_id: str, failed_group: str, original_id: str) -> str:
    return f"{failed_group}:{original_id}" if failed_group else message_id


def _who(name: str) -> str:
    """A subscriber without its incarnation."""
    return name.split(":")[0]


def _when(at: int, now: int) -> str:
    return "at once" if at == 0 else "later" if at > now else "now"

"""What the tables of the queue say at one moment: read whole, so that two moments can be compared."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from django_mysqlqueue import models
from django_mysqlqueue.service.transactions import Session
from tests.app.models import Effect
from tests.crashes import DLQ, TOPIC
from tests.harness import USING


@dataclass(frozen=True)
class Picture:
    """The tables of the queue at one moment, and what they mean."""

    tables: dict[str, Any]
    """Every row, with messages by their names, and times and tokens by what they say: comparable between runs."""
    messages: Counter[str]
    """How often a message of the topic is in outbox and log."""
    letters: Counter[tuple[str, str]]
    """(group, message) → its dead letters in outbox and log."""
    settled: frozenset[tuple[str, str]]
    """(group, message): acked or dead-lettered."""
    failures: dict[tuple[str, str], int]
    """(group, message) → attempts that count, of what is not settled."""
    offsets: dict[tuple[str, str], tuple[int, int]]
    """(group, partition key) → watermark and cursor."""
    broken: list[str]
    """What holds at no moment."""


class Observer:
    """Reads the tables; remembers the names of messages that GC has deleted meanwhile."""

    def __init__(self) -> None:
        self._places: dict[int, tuple[str, str, str]] = {}
        """Offset → topic, partition key, name."""
        self._settled: frozenset[tuple[str, str]] = frozenset()

    def read(self) -> Picture:
        now = Session(USING).now()
        outbox = [
            (topic, key, _name(message_id, group, original), _when(at, now), count, error)
            for topic, key, message_id, group, original, at, count, error in models.OutboxMessage.objects.order_by(
                "outbox_id"
            ).values_list(
                "topic",
                "partition_key",
                "message_id",
                "failed_group",
                "original_id",
                "deliver_at",
                "failure_count",
                "last_error",
            )
        ]
        rows = list(
            models.QueueMessage.objects.order_by("offset").values_list(
                "offset", "topic", "partition_key", "message_id", "failed_group", "original_id", "failure_count"
            )
        )
        log = {
            offset: (topic, key, _name(message_id, group, original))
            for offset, topic, key, message_id, group, original, _ in rows
        }
        self._places |= log
        groups = list(
            models.ConsumerGroup.objects.order_by("topic", "consumer_group").values_list(
                "topic", "consumer_group", "mode", "start_offset", "paused"
            )
        )
        offsets = {
            (group, key): (acked, claimed)
            for group, key, acked, claimed in models.ConsumerOffset.objects.filter(topic=TOPIC).values_list(
                "consumer_group", "partition_key", "offset_acked", "offset_claimed"
            )
        }
        state = {
            (group, key, offset): rest
            for group, key, offset, *rest in models.DeliveryState.objects.filter(topic=TOPIC).values_list(
                "consumer_group",
                "partition_key",
                "message_offset",
                "acked",
                "retry_count",
                "delivered_by",
                "delivery_token",
                "invisible_until",
                "last_error",
            )
        }
        settled, failures, broken = self._judge(log, offsets, state, {group for _, group, *_ in groups})
        everything = [(topic, name) for topic, _, name in log.values()] + [(row[0], row[2]) for row in outbox]
        letters = Counter(tuple(name.split(":", 1)) for topic, name in everything if topic == DLQ)
        tables = {
            "outbox": outbox,
            "log": [(*log[offset], count) for offset, *_, count in rows],
            "groups": [(*group, mode, self._at(start), paused) for *group, mode, start, paused in groups],
            "offsets": {place: tuple(map(self._at, both)) for place, both in offsets.items()},
            "state": {
                (group, key, self._at(offset)): (acked, count, by, bool(token), _when(until, now), error)
                for (group, key, offset), (acked, count, by, token, until, error) in state.items()
            },
            "leases": dict(_pairs(models.PartitionLease, "consumer_group", "partition_key", "leased_by")),
            "heartbeats": {
                place: (_when(at, now - 3_600_000), bool(gone))
                for *place, at, gone in models.SubscriberHeartbeat.objects.values_list(
                    "consumer_group", "subscriber_name", "heartbeat_at", "deregistered_at"
                )
                for place in [tuple(place)]
            },
            "sequencer": [self._at(last) for last in models.Sequencer.objects.values_list("last_offset", flat=True)],
            "effects": sorted(Effect.objects.values_list("name", flat=True)),
        }
        return Picture(
            tables=tables,
            messages=Counter(name for topic, name in everything if topic == TOPIC),
            letters=letters,
            settled=settled,
            failures=failures,
            offsets=offsets,
            broken=broken,
        )

    def _at(self, offset: int) -> str:
        return self._places[offset][2] if offset in self._places else f"?{bool(offset)}"

    def _judge(
        self,
        log: dict[int, tuple[str, str, str]],
        offsets: dict[tuple[str, str], tuple[int, int]],
        state: dict[tuple[str, str, int], list[Any]],
        groups: set[str],
    ) -> tuple[frozenset[tuple[str, str]], dict[tuple[str, str], int], list[str]]:
        settled: set[tuple[str, str]] = set()
        broken: list[str] = []
        for offset, (topic, key, name) in self._places.items():
            if topic != TOPIC:
                continue
            for group in groups:
                watermark, cursor = offsets.get((group, key), (0, 0))
                row = state.get((group, key, offset))
                if offset not in log:
                    if (group, name) in self._settled:
                        settled.add((group, name))
                    else:
                        broken.append(f"{name} was deleted from the log and {group} had not passed it")
                elif offset <= watermark or (row is not None and row[0]):
                    settled.add((group, name))
                elif offset <= cursor and row is None:
                    broken.append(f"{name} is between watermark and cursor of {group} and has no state row")
        failures: dict[tuple[str, str], int] = {}
        for (group, key, offset), (acked, count, *_) in state.items():
            name = self._at(offset)
            failures[group, name] = count
            watermark, cursor = offsets.get((group, key), (-1, -1))
            if not acked and offset <= watermark:
                broken.append(f"the watermark of {group} has passed {name}, which is not settled")
            if offset > cursor:
                broken.append(f"{name} has a state row of {group} above the cursor")
        for place, (watermark, cursor) in offsets.items():
            if watermark > cursor:
                broken.append(f"the watermark of {place} is above the cursor")
        self._settled = frozenset(settled)
        return self._settled, failures, broken


def _name(message_id: str, failed_group: str, original_id: str) -> str:
    return f"{failed_group}:{original_id}" if failed_group else message_id


def _when(at: int, now: int) -> str:
    return "at once" if at == 0 else "later" if at > now else "now"


def _pairs(model: Any, *columns: str) -> Iterator[tuple[tuple[str, ...], str]]:
    for *place, value in model.objects.values_list(*columns):
        yield tuple(place), value


def sample() -> dict[tuple[str, str, str], tuple[int, int]]:
    """Watermark and cursor of each group and partition."""
    return {
        (group, topic, key): (acked, claimed)
        for group, topic, key, acked, claimed in models.ConsumerOffset.objects.values_list(
            "consumer_group", "topic", "partition_key", "offset_acked", "offset_claimed"
        )
    }

"""What the tables of the queue say in the crash tests: each message by its name, so that two runs can be compared."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from typing import Any

from tests.crash.crashes import DLQ, TOPIC
from tests.support import invariants
from tests.support.harness import USING
from tests.support.invariants import Message, Settled
from tests.support.tables import Tables

OLD_MS = 1_800_000
"""A heartbeat of half an hour ago is not one of this run."""


@dataclass(frozen=True)
class Picture:
    """The tables of the queue at one moment, and what they mean."""

    rows: Tables
    tables: dict[str, Any]
    """Every row, with messages by their names, and times and tokens by what they say: comparable between runs."""
    messages: Counter[str]
    """How often a message of the topic is in outbox and log."""
    aside: frozenset[str]
    """Messages in the quarantine."""
    letters: Counter[tuple[str, ...]]
    """(group, message) → its dead letters in outbox and log."""
    settled: frozenset[tuple[str, str]]
    """(group, message): acked or dead-lettered."""
    failures: dict[tuple[str, str], int]
    """(group, message) → attempts that count, of what has a state row."""
    broken: list[str]
    """What holds at any moment, and does not hold here."""


class Observer:
    """Reads the tables; remembers the messages that GC has deleted meanwhile."""

    def __init__(self) -> None:
        self._places: dict[int, tuple[str, str, str]] = {}
        """Offset → topic, partition key, name."""
        self._settled: Settled = frozenset()

    def read(self) -> Picture:
        rows = Tables.read(USING)
        self._places = self._places | {
            offset: (message.topic, message.key, _name(message)) for offset, message in rows.log.items()
        }
        self._settled = invariants.settled(rows, self._settled)
        names = [(message.topic, _name(message)) for message in invariants.messages(rows)]
        return Picture(
            rows=rows,
            tables=self._tables(rows),
            messages=Counter(name for topic, name in names if topic == TOPIC),
            aside=frozenset(one.id for one in rows.quarantine),
            letters=Counter(tuple(name.split(":", 1)) for topic, name in names if topic == DLQ),
            settled=frozenset((ref.group, self._at(offset)) for ref, offset in self._settled),
            failures={(ref.group, self._at(offset)): row.retry_count for (ref, _, offset), row in rows.state.items()},
            broken=invariants.at_any_moment(rows),
        )

    def _tables(self, rows: Tables) -> dict[str, Any]:
        """All groups are of the one topic."""
        now = rows.now
        return {
            "log": [self._places[offset] for offset in rows.log],
            "outbox": [
                (one.topic, one.key, _name(one), _when(one.deliver_at, now), one.failure_count, one.last_error)
                for one in rows.outbox
            ],
            "quarantine": [(one.topic, one.key, one.id, _when(one.deliver_at, now)) for one in rows.quarantine],
            "groups": [
                (*ref, group.mode, group.start_offset, group.paused, json.loads(group.filter))
                for ref, group in rows.groups.items()
            ],
            "offsets": {
                (ref.group, key): (self._passed(key, watermark), self._passed(key, cursor))
                for (ref, key), (watermark, cursor) in rows.offsets.items()
            },
            "state": {
                (ref.group, key, self._at(offset)): (
                    row.acked,
                    row.retry_count,
                    _who(row.delivered_by),
                    bool(row.delivery_token),
                    row.suspect,
                    _when(row.invisible_until, now),
                    row.last_error,
                )
                for (ref, key, offset), row in rows.state.items()
            },
            "leases": {(ref.group, key): _who(owner) for (ref, key), owner in rows.leases.items()},
            "superseding": {
                (ref.group, *key): self._at(offset) for (ref, *key), offset in rows.superseding.items() if offset
            },
            "heartbeats": {
                (ref.group, _who(name), ref.topic): (beat.heartbeat_at > now - OLD_MS, bool(beat.deregistered_at))
                for (ref, name), beat in rows.heartbeats.items()
            },
            "sequencer": None if rows.sequencer is None else self._at(rows.sequencer),
            "effects": sorted(effect.name for effect in rows.effects),
        }

    def _at(self, offset: int) -> str:
        return self._places[offset][2] if offset in self._places else "" if offset == 0 else "?"

    def _passed(self, key: str, offset: int) -> int:
        """How many messages of a partition are at or below an offset."""
        return sum(at <= offset and place[:2] == (TOPIC, key) for at, place in self._places.items())


def _name(message: Message) -> str:
    return f"{message.failed_group}:{message.original_id}" if message.failed_group else message.id


def _who(name: str) -> str:
    """A subscriber without its incarnation."""
    return name.split(":")[0]


def _when(at: int, now: int) -> str:
    return "at once" if at == 0 else "later" if at > now else "now"

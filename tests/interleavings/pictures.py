"""The outcome of a schedule by what it means, in words that do not change from run to run, nor with the code.

A picture says where each message is and how it stands with each group. It knows no column (``tests/support/tables.py``
does), and no text of the queue.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from typing import Any

from django_mysqlqueue.models import ConsumerGroup
from tests.interleavings.worlds import LEASE_MS
from tests.support.internals import RUN_PREFIX, GroupRef, tick_of
from tests.support.tables import Group, Schedule, State, Tables

RECENT_MS = LEASE_MS
"""A heartbeat is older, unless somebody is alive."""
SOON_MS = 10_000
"""What is due later than this waits for its time."""
UNDER_WAY = {
    ConsumerGroup.AfterSeek.NOTHING: "",
    ConsumerGroup.AfterSeek.RESUME: "in a seek",
    ConsumerGroup.AfterSeek.STAY: "in a seek, to stay paused",
    ConsumerGroup.AfterSeek.DROPPED: "in a drop",
    ConsumerGroup.AfterSeek.MOVES: "in a move",
}
HANDLERS_ERROR = "no"
"""The error of the attempts that fail in schedules. Any other one is of the queue."""
NEVER = 2**60
FIRST_OFFSET = 1_000_000
"""Of the log where schedules are run: a larger number is an offset, and no count."""

Picture = dict[str, Any]


def message_name(row: Any) -> str:
    """A message's payload; ``!`` marks a dead letter, ``'`` one that is for a single group."""
    return row.payload.decode().strip('"') + ("!" if row.failed_group else "") + ("'" if row.target_group else "")


class Names:
    """What offsets and tokens are called, also those of messages that are gone."""

    def __init__(self, tables: Tables, earlier: Names | None = None) -> None:
        self.places: dict[int, tuple[str, str, str]] = dict(earlier.places) if earlier is not None else {}
        """Offset → topic, partition key, name."""
        for offset, row in tables.log.items():
            self.places[offset] = (row.topic, row.key, message_name(row))

    def at(self, offset: int) -> str:
        if offset in self.places:
            return self.places[offset][2]
        return "" if offset == 0 else "?"

    def upto(self, ref: GroupRef, key: str, offset: int) -> str:
        """The messages of a group's partition at or below an offset."""
        if offset >= NEVER:
            return "all"
        found = (name for at, (*of, name) in sorted(self.places.items()) if at <= offset and of == [ref.topic, key])
        return "+".join(found) or "nothing"

    def offsets(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for offset, (_, _, name) in sorted(self.places.items()):
            found.setdefault(name, offset)
        return found


def picture(tables: Tables, names: Names, tokens: Mapping[int, str]) -> Picture:
    """Where each message is, how it stands with each group, who works for the groups, and what has been recorded.

    Args:
        tables: all rows.
        names: what offsets are called.
        tokens: token → the claim that drew it.
    """
    now = tables.now
    end = max(tables.log, default=0)
    return {
        "log": [f"{row.topic}/{message_name(row)}" for row in tables.log.values()],
        "outbox": sorted(f"{row.topic}/{message_name(row)}, {_when(row.deliver_at, now)}" for row in tables.outbox),
        "groups": [
            _said(
                f"{'/'.join(ref)}: {row.mode}",
                f"from {_start(row, end, names)}",
                row.paused and "paused",
                *_rules(row),
            )
            for ref, row in tables.groups.items()
        ],
        "positions": [
            f"{ref.group} {key}: settled {names.upto(ref, key, row.acked)}, claimed {names.upto(ref, key, row.claimed)}"
            for (ref, key), row in tables.offsets.items()
        ],
        "deliveries": [
            f"{ref.group} {names.at(offset)}: {_delivery(row, tokens, now)}"
            for (ref, _, offset), row in tables.state.items()
        ],
        "leases": [f"{ref.group} {key}: {who(owner)}" for (ref, key), owner in tables.leases.items()],
        "heartbeats": sorted(
            _said(
                f"{ref.group} {who(name)}: {'alive' if row.heartbeat_at > now - RECENT_MS else 'silent'}",
                row.deregistered_at and "deregistered",
            )
            for (ref, name), row in tables.heartbeats.items()
        ),
        "sequenced": names.at(tables.sequencer or 0),
        "effects": sorted(row.name for row in tables.effects),
        "events": sorted(
            f"{row.ref.group} {names.at(row.offset)}: {row.outcome}, attempt {row.attempt}, by {who(row.settled_by)}"
            for row in tables.events
        ),
        "operations": sorted(
            _said(f"{row.action} {row.ref.group}: {row.changed} changed", not row.ended_at and "under way")
            for row in tables.operations
        ),
        "rollups": sorted(
            f"{grain} s: {row.acked} acked, {row.failed} failed" for (grain, _, _), row in tables.rollups.items()
        ),
        "collected": {topic: names.at(offset) for topic, offset in tables.collected.items()},
        **_quarantine(tables),
        **_recurring(tables),
    }


def _quarantine(tables: Tables) -> Picture:
    """What the log has refused, if there is any."""
    if not tables.quarantine:
        return {}
    return {"quarantine": [f"{row.topic}/{message_name(row)}" for row in tables.quarantine]}


def _recurring(tables: Tables) -> Picture:
    """Schedules and their jobs, if there are any."""
    runs = {one: status for one, status in tables.results.items() if one.startswith(RUN_PREFIX)}
    if not tables.schedules and not runs:
        return {}
    day = tables.now - 43_200_000
    return {
        "schedules": [_schedule(name, row, day) for name, row in tables.schedules.items()],
        "runs": sorted(
            f"{'by hand' if '-' in one.rsplit(':', 1)[1] else 'earlier' if tick_of(one) < day else 'tick'}: {status}"
            for one, status in runs.items()
        ),
    }


def _schedule(name: str, row: Schedule, day: int) -> str:
    return _said(
        f"{name}: every {row.every_ms} ms with {row.arguments}",
        "decided" if row.last_tick > day else "due",
        row.last_run > day and "run",
        f"{row.skipped} skipped",
        row.paused_at and "paused",
        row.seen_at and "seen",
    )


def _start(row: Group, end: int, names: Names) -> str:
    return "the end" if row.start_offset and row.start_offset >= end else names.at(row.start_offset) or "the beginning"


def _rules(row: Group) -> list[str]:
    """What is under way on a group, and its options that are not the defaults."""
    return [
        UNDER_WAY[ConsumerGroup.AfterSeek(row.after_seek)],
        row.overridden and f"overridden {_json(row.overridden)}",
        row.registered_filter and f"filter {_json(row.registered_filter)}",
    ]


def _delivery(row: State, tokens: Mapping[int, str], now: int) -> str:
    """A delivery's state, holder and claim, whether it is a suspect, and until when it stays so."""
    return _said(
        "settled" if row.acked else "in flight" if row.delivery_token else "waits",
        row.delivered_by and f"by {who(row.delivered_by)}",
        row.delivery_token and f"claim {tokens.get(row.delivery_token, '?')}",
        row.suspect and "suspect",
        row.retry_count and f"{row.retry_count} failed",
        row.last_error and ("the handler's error" if row.last_error == HANDLERS_ERROR else "the queue's error"),
        f"visible {_when(row.invisible_until, now)}",
    )


def _when(at: int, now: int) -> str:
    return "at once" if at == 0 else "later" if at > now + SOON_MS else "now"


def _said(*parts: object) -> str:
    """Those parts that say something."""
    return ", ".join(str(part) for part in parts if part)


def who(name: str) -> str:
    """A subscriber without its incarnation."""
    return name.split(":")[0]


def named(text: str, names: Names) -> str:
    """A text with messages for offsets."""
    for offset in names.places:
        text = text.replace(str(offset), names.at(offset))
    return text


def text(outcome: Picture) -> str:
    """The outcome as one line: two are the same if their texts are."""
    return json.dumps(outcome, sort_keys=True, default=str)


def difference(outcome: Picture, others: Mapping[str, Picture]) -> tuple[str, list[str]]:
    """Which of the others is nearest, and where it differs from that one: ``state: -[…] +[…]``."""
    best: tuple[str, list[str]] | None = None
    for name, other in others.items():
        lines = _lines(outcome, other)
        if best is None or len(lines) < len(best[1]):
            best = (name, lines)
    assert best is not None
    return best


def _lines(outcome: Picture, other: Picture) -> list[str]:
    lines = []
    for table in {**outcome, **other}:  # Some have a table only if there are rows.
        mine, theirs = outcome.get(table, []), other.get(table, [])
        if mine == theirs:
            continue
        if isinstance(mine, list) and isinstance(theirs, list):
            ours, those = (Counter(_json(one) for one in rows) for rows in (mine, theirs))
            if ours == those:
                lines.append(f"{table}: another order: {_json(mine)}")
            lines += [f"{table}: + {row}" for row in sorted((ours - those).elements())]
            lines += [f"{table}: - {row}" for row in sorted((those - ours).elements())]
        elif isinstance(mine, dict) and isinstance(theirs, dict):
            lines += [
                f"{table}.{name}: {_json(mine.get(name))}, not {_json(theirs.get(name))}"
                for name in sorted(mine.keys() | theirs.keys())
                if mine.get(name) != theirs.get(name)
            ]
        else:
            lines.append(f"{table}: {_json(mine)}, not {_json(theirs)}")
    return lines


def _json(value: Any) -> str:
    return json.dumps(value, default=str)

"""The outcome of a schedule in words that do not change from run to run."""

from __future__ import annotations

import dataclasses
import json
import re
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from django_mysqlqueue.limits import RUN_PREFIX, tick_of
from django_mysqlqueue.service.claims import Claim
from django_mysqlqueue.service.deliveries import Action, Claimed, Flushed, Settlement
from django_mysqlqueue.service.leasing import Acquired
from django_mysqlqueue.service.refs import GroupRef
from django_mysqlqueue.service.sequencing import Sequenced
from django_mysqlqueue.service.slots import Rest
from tests.crash.crashes import TOPIC
from tests.interleavings.worlds import LEASE_MS
from tests.support.tables import Tables

RECENT_MS = LEASE_MS
"""A heartbeat is older, unless somebody is alive."""
SOON_MS = 10_000
"""What is due later than this waits for its time."""
RECORDED = {Action.RELEASE: "give_back"}
"""What the recorded outcomes call an action, where that is not its value. (Their digests can only be computed again by
running all schedules.)"""
RECORDED_ERRORS = (
    (r"(group '\w+') on topic '", r"\1 of '"),
    (r"(\w+) on t\b", r"\1 of t"),
    ("while it was being registered", "while it was registered"),
    ("was claimed again or settled", "has been handed out again or settled"),
    (r"(group g/t) is already paused", r"\1 is paused already"),
    (r"mode of the (group g/t) is already (\w+)", r"\1 is \2 already"),
    (r"(group g/t) no longer exists", r"\1 is gone already"),
    (
        r"No messages of the (group g/t) are waiting for another attempt",
        r"No message waits for another attempt in the \1",
    ),
    (r"No dead letters of (\w+) match", r"No dead letter of \1 matches"),
    (r"Not scheduled in topic", "Not scheduled for the topic"),
    (r"Messages not changed, because", "Messages left as they are, because"),
    (r"is no longer registered and would not receive it\.", "is not registered any more: nobody would get it."),
    (r"during the retry\. Deliveries", "during the retry: deliveries"),
    (r"is only for the group ('\w+')", r"is for the group \1 alone"),
    (r"has not been claimed yet \(use queueseek to skip it\)", "has not been claimed yet: to skip it use queueseek"),
    (r"is already settled", "is settled already"),
    (
        r"is in flight at the live subscriber ('\w+') \(wait until its attempt ends, or stop the subscriber\)",
        r"is held by the live subscriber \1: wait for its end, or stop that subscriber",
    ),
    (
        r"Nothing was changed\. Being settled right now: (.*)\. Try again\.",
        r"\1: being settled at this moment. Nothing was changed; try again.",
    ),
)
"""Former wordings of errors, which the recorded outcomes have: pattern → replacement."""
NEVER = 2**60
FIRST_OFFSET = 1_000_000
"""Of the log where schedules are run: a larger number is an offset, and no count."""

Picture = dict[str, Any]


def _values(column: str) -> dict[str, Any]:
    """The overrides of a group's options, without when and by whom."""
    return {name: one["value"] for name, one in sorted(json.loads(column).items())}


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

    def upto(self, key: str, offset: int) -> str:
        """The messages of a partition at or below an offset."""
        if offset >= NEVER:
            return "all"
        return "+".join(
            name
            for at, (topic, of, name) in sorted(self.places.items())
            if at <= offset and (topic, of) == (TOPIC, key)
        )

    def offsets(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for offset, (_, _, name) in sorted(self.places.items()):
            found.setdefault(name, offset)
        return found


def picture(tables: Tables, names: Names, tokens: Mapping[int, str]) -> Picture:
    """Every table, with messages by their names, and times and tokens by what they say."""
    now = tables.now

    def when(at: int) -> str:
        return "at once" if at == 0 else "later" if at > now + SOON_MS else "now"

    end = max(tables.log, default=0)
    return {
        "log": [f"{row.topic}/{message_name(row)}" for row in tables.log.values()],
        "outbox": sorted(f"{row.topic}/{message_name(row)} {when(row.deliver_at)}" for row in tables.outbox),
        "groups": [
            [
                *ref,
                row.mode,
                "end" if row.start_offset and row.start_offset >= end else names.at(row.start_offset),
                row.paused,
                row.after_seek,
                *([_values(row.overrides)] if row.overrides != "{}" else []),
                *([{"registered filter": json.loads(row.filter)}] if row.filter != "{}" else []),
            ]
            for ref, row in tables.groups.items()
        ],
        "offsets": [
            [ref.group, key, names.upto(key, row.acked), names.upto(key, row.claimed)]
            for (ref, key), row in tables.offsets.items()
        ],
        "state": [
            [
                ref.group,
                names.at(offset),
                row.acked,
                row.retry_count,
                who(row.delivered_by),
                tokens.get(abs(row.delivery_token), "?") if row.delivery_token else "",
                when(row.invisible_until),
                row.last_error,
            ]
            for (ref, _, offset), row in tables.state.items()
        ],
        "leases": [[ref.group, key, who(owner)] for (ref, key), owner in tables.leases.items()],
        "heartbeats": sorted(
            [ref.group, who(name), row.heartbeat_at > now - RECENT_MS, bool(row.deregistered_at)]
            for (ref, name), row in tables.heartbeats.items()
        ),
        "sequencer": names.at(tables.sequencer or 0),
        "effects": sorted(row.name for row in tables.effects),
        "events": sorted(
            [row.ref.group, names.at(row.offset), row.outcome, row.attempt, who(row.settled_by)]
            for row in tables.events
        ),
        "operations": sorted([row.action, row.ref.group, row.changed, bool(row.ended_at)] for row in tables.operations),
        "rollups": sorted([grain, row.acked, row.failed] for (grain, _, _), row in tables.rollups.items()),
        "collected": {topic: names.at(offset) for topic, offset in tables.collected.items()},
        **_recurring(tables),
    }


def _recurring(tables: Tables) -> Picture:
    """Schedules and their jobs, if there are any."""
    if not tables.schedules and not any(one.startswith(RUN_PREFIX) for one in tables.results):
        return {}
    day = tables.now - 43_200_000
    return {
        "schedules": [
            [
                name,
                json.loads(row.definition)["payload"],
                json.loads(row.definition)["every_ms"],
                "decided" if row.last_tick > day else "due",
                "run" if row.last_run > day else "",
                row.skipped,
                bool(row.paused_at),
                bool(row.seen_at),
            ]
            for name, row in tables.schedules.items()
        ],
        "runs": sorted(
            ["by hand" if "-" in one.rsplit(":", 1)[1] else "earlier" if tick_of(one) < day else "tick", status]
            for one, status in tables.results.items()
            if one.startswith(RUN_PREFIX)
        ),
    }


def who(name: str) -> str:
    """A subscriber without its incarnation."""
    return name.split(":")[0]


TEXTS: dict[type, Callable[[Any], str | dict[str, Any]]] = {
    GroupRef: lambda ref: ref.group,
    Sequenced: lambda done: {
        name: value for name, value in dataclasses.asdict(done).items() if value or name != "replaced"
    },
    Rest: lambda rest: f"no slot of {rest.key!r}{' in flight' if rest.in_flight else ''}",
}


def result(value: Any, names: Names) -> Any:
    """What an operation has returned, in the same words."""
    if isinstance(value, Claimed):
        return f"{names.at(value.offset)}#{value.attempt}{' suspect' if value.suspect else ''}"
    if isinstance(value, Settlement):
        return f"{RECORDED.get(value.action, value.action.value)} {names.at(value.delivery.offset)}"
    if isinstance(value, Claim | Flushed | Acquired):
        found = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        found |= found.pop("passed", {})
        return {name: result(one, names) for name, one in found.items() if one and name not in ("watermarks", "began")}
    if type(value) in TEXTS:
        return TEXTS[type(value)](value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: result(getattr(value, field.name), names) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return sorted(f"{result(one, names)}" for one in value)
    if isinstance(value, set | frozenset):
        return sorted(str(result(one, names)) for one in value)
    if isinstance(value, list | tuple):
        return [result(one, names) for one in value]
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, int):
        return names.at(value) if value >= FIRST_OFFSET else value
    if isinstance(value, str) and len(value) > 30:
        return "…"
    return value


def error(raised: BaseException, names: Names) -> str:
    """An error's type and text, without incarnations and tokens, and with messages for offsets."""
    said = re.sub(r":[0-9]+|\b[0-9]{10,}\b", "", str(raised))
    for pattern, former in RECORDED_ERRORS:
        said = re.sub(pattern, former, said)
    return f"{type(raised).__name__}: {named(said, names)[:120]}"


def named(text: str, names: Names) -> str:
    """A text with messages for offsets."""
    return re.sub(r"\b[1-9][0-9]{6}\b", lambda found: names.at(int(found[0])), text)


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
    for table in outcome:
        mine, theirs = outcome[table], other.get(table)
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

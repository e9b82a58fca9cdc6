"""What the soak does, drawn before it begins: which groups there are, which messages fail, what is killed when."""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterator
from dataclasses import dataclass

TOPIC = "soak.events"
DLQ = f"{TOPIC}_dlq"
PARTITIONS = 200
NAME_INSIDE = "soak_message"
"""The field of a payload that has the message's id."""
REPEAT = "soak_repeat"
"""A field that payloads published under an id for the second time have."""
MAX_ATTEMPTS = 6
LEASE = 5.0
"""Seconds; a frozen process sleeps for longer."""
RETENTION = 60.0
"""Seconds: short, so that GC works at the heels of the subscribers."""


@dataclass(frozen=True, slots=True)
class Group:
    """A consumer group of the topic, and what is promised of it."""

    name: str
    ordered: bool
    strict: bool = False
    atomic: bool = False
    batch: bool = False


GROUPS = (
    Group("skip", ordered=True),
    Group("strict", ordered=True, strict=True),
    Group("shared", ordered=False),
    Group("atomic", ordered=True, atomic=True),
    Group("batch", ordered=True, atomic=True, batch=True),
)

POISON, REJECT, FLAKY, PUT_OFF, FINE = "poison", "reject", "flaky", "put off", "fine"
_SHARES = ((0.003, POISON), (0.006, REJECT), (0.026, FLAKY), (0.036, PUT_OFF))


def fate(group: str, message_id: str) -> str:
    """What the group's handler does with a message: drawn by its name, so that the checker knows it too.

    ``POISON`` always raises, ``REJECT`` is rejected, ``FLAKY`` raises and
    ``PUT_OFF`` nacks the first attempt.
    """
    place = zlib.crc32(f"{group}:{message_id}".encode()) / 2**32
    return next((name for share, name in _SHARES if place < share), FINE)


SLOW_SHARE, SLOW = 0.01, 0.2
"""Share of the messages over which a handler sits, and for how many seconds: others have time to get in its way."""


def is_slow(group: str, message_id: str) -> bool:
    return zlib.crc32(f"slow:{group}:{message_id}".encode()) / 2**32 < SLOW_SHARE


def is_for_the_dlq(group: str, message_id: str) -> bool:
    return fate(group, message_id) in (POISON, REJECT)


# -- the killer's plan --------------------------------------------------------

KILL_SUBSCRIBER = "SIGKILL a subscriber"
KILL_CHILD = "SIGKILL a supervisor's child"
KILL_SUPERVISOR = "SIGKILL a supervisor"
KILL_PUBLISHER = "SIGKILL a publisher"
KILL_SEQUENCER = "SIGKILL inside the sequencer"
KILL_CLAIM = "SIGKILL inside a claim"
KILL_WATERMARK = "SIGKILL inside a watermark's transaction"
KILL_ATOMIC = "SIGKILL inside an atomic handler"
FREEZE_SUBSCRIBER = "SIGSTOP of a subscriber"
FREEZE_PUBLISHER = "SIGSTOP of a publisher"
FREEZE_SEQUENCER = "SIGSTOP inside the sequencer"
FREEZE_CLAIM = "SIGSTOP inside a claim"
FREEZE_WATERMARK = "SIGSTOP inside a watermark's transaction"
FREEZE_ATOMIC = "SIGSTOP inside an atomic handler"
CUT = "KILL of random connections"
IMPATIENT = "wait_timeout=2 for a while"
RESTART = "clean restart of the server"
CRASH = "SIGKILL of the server"

TRAPS = {
    KILL_SEQUENCER: "sequencer",
    FREEZE_SEQUENCER: "sequencer",
    KILL_CLAIM: "claim",
    FREEZE_CLAIM: "claim",
    KILL_WATERMARK: "watermark",
    FREEZE_WATERMARK: "watermark",
    KILL_ATOMIC: "atomic",
    FREEZE_ATOMIC: "atomic",
}
"""Actions that are aimed: at which place a process waits to be hit."""

DECK = (
    *[KILL_SUBSCRIBER] * 4,
    *[KILL_PUBLISHER] * 2,
    *[CUT] * 3,
    *[FREEZE_SUBSCRIBER, FREEZE_SEQUENCER, FREEZE_CLAIM, FREEZE_ATOMIC, FREEZE_WATERMARK, FREEZE_PUBLISHER],
    *[KILL_SEQUENCER, KILL_CLAIM, KILL_WATERMARK, KILL_ATOMIC, KILL_CHILD, KILL_SUPERVISOR],
    IMPATIENT,
)
FREEZES = frozenset(kind for kind in DECK if kind.startswith("SIGSTOP"))
AWAY = frozenset({RESTART, CRASH})
ACTIONS = (*dict.fromkeys(DECK), RESTART, CRASH)
CONNECTIONS = 6
"""How many ``CUT`` cuts at once."""
SHORTEST, LONGEST = 2.0, 5.0
"""Seconds between two actions."""


@dataclass(frozen=True, slots=True)
class Action:
    at: float
    """Seconds since the beginning."""
    kind: str
    draw: float
    """0 to 1: which of those that it may hit, and for how long."""


def actions(seed: int, seconds: float) -> list[Action]:
    """Every kind in turn, shuffled: a short run has met each as well. The server goes once a deck, each way in turn."""
    return list(_actions(random.Random(seed), seconds))


def _actions(rng: random.Random, seconds: float) -> Iterator[Action]:
    at = 5.0
    for server in _alternating():
        deck = list(DECK)
        rng.shuffle(deck)
        for kind in (*deck, server):
            if at >= seconds:
                return
            yield Action(round(at, 2), kind, rng.random())
            at += rng.uniform(SHORTEST, LONGEST)


def _alternating() -> Iterator[str]:
    while True:
        yield CRASH
        yield RESTART

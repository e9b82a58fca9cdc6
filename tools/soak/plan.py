"""The plan of a run, drawn from a seed: groups, messages that fail, and disturbances."""

from __future__ import annotations

import datetime
import random
import zlib
from collections.abc import Iterator
from dataclasses import dataclass

HOME, OTHER = "default", "other"
ALIASES = (HOME, OTHER)
"""The queue's databases. All publishers' transactions are on the first one."""
TOPIC = "soak.events"
RELAYED = "soak.relayed"
"""A topic in the other database. Its messages are published via the first one, and relayed."""
SQL = "soak.sql"
"""A topic whose groups have clients in plain SQL beside their subscribers."""
MOVED = "soak.moved"
"""A topic that moves to the other database during the run."""
REFUSED = "soak.refused"
"""A topic that a trigger refuses in the log of the first database. It has no group."""
MOVED_SETTINGS = "moved-settings"
"""While this file exists, processes start with the settings that name the other database for the topic."""
HOMES = {TOPIC: HOME, RELAYED: OTHER, SQL: HOME, MOVED: OTHER}
"""Topic → the database that it is in at the end."""
_TOPICS = (*[RELAYED] * 3, *[SQL] * 3, *[MOVED] * 2, *[TOPIC] * 12)
PARTITIONS = 200
NAME_INSIDE = "soak_message"
"""The field of a payload with the message id."""
REPEAT = "soak_repeat"
"""A field in the payload of a duplicate."""
MAX_ATTEMPTS = 6
SHUTDOWN = 1.0
"""SHUTDOWN_TIMEOUT in seconds."""
PROCESSING = 40.0
"""MAX_PROCESSING_TIME in seconds."""
LEASE = 5.0
"""Lease duration in seconds. A process is frozen for longer."""
RETENTION = 60.0
"""Seconds. Short, so that GC deletes messages soon after they are settled."""


def topic_of(message_id: str) -> str:
    """Return the topic of a message. It depends on the message id, so that the checker knows it."""
    return _TOPICS[zlib.crc32(f"published to:{message_id}".encode()) % len(_TOPICS)]


LOG_SIZE = 10**12


def place(alias: str, offset: int) -> int:
    """Return a position that stands for an offset in one of the databases. Those in the other one are higher.

    So the offsets of two logs are not confused. It is also the order for a topic that moves from the first database to
    the other one.
    """
    return ALIASES.index(alias) * LOG_SIZE + offset


@dataclass(frozen=True, slots=True)
class Group:
    """A consumer group, and its guarantees."""

    name: str
    ordered: bool
    topic: str = TOPIC
    strict: bool = False
    atomic: bool = False
    batch: bool = False
    regions: tuple[str, ...] = ()
    """The group gets only messages with these regions in their metadata. Empty: it has no filter."""
    sometimes: tuple[str, ...] = ()
    """Further regions that the registered filter matches, until an operator overrides it for a while."""

    def gets(self, message_id: str) -> bool:
        """Return whether a message is on the group's topic, has not expired, and matches the group's filter."""
        return (
            topic_of(message_id) == self.topic
            and not has_expired(message_id)
            and (not self.regions or region(message_id) in self.regions)
        )

    def may_get(self, message_id: str) -> bool:
        """Return whether the group gets a message under one of its filters."""
        return self.gets(message_id) or (
            topic_of(message_id) == self.topic and not has_expired(message_id) and region(message_id) in self.sometimes
        )


REGIONS = ("eu", "us", "asia")


LIMITED, RATE_PER_KEY, BURST = "limited", "4/s", 2
"""The group with a rate per key, and its rate and burst."""
LONG_AGO = datetime.datetime.fromtimestamp(0.001, datetime.UTC)  # as tests.support.filtering has it
EXPIRED = 20
"""One of this number of messages has expired when it is published. No group may start it."""


COALESCED = 10
"""One of this number of messages has a coalesce key, and another one of them is debounced."""
COALESCED_PARTITIONS = 2
NOT_COALESCED = (SQL, MOVED)
"""The procedures refuse topics with coalesce keys. Debounced messages replace each other only under one setting."""


@dataclass(frozen=True, slots=True)
class Coalescing:
    """The coalesce key of a message."""

    key: str
    """The keys of publishers differ, so that the numbers of a publisher say which message is the latest."""
    partition: str
    debounces: bool


def coalescing(message_id: str) -> Coalescing | None:
    """Return the coalesce key of a message, or None. It depends on the message id, so that the checker knows it."""
    draw = zlib.crc32(f"coalescing:{message_id}".encode())
    kind, draw = draw % COALESCED, draw // COALESCED
    if kind > 1 or topic_of(message_id) in NOT_COALESCED:
        return None
    publisher = message_id.rpartition(":")[0]
    return Coalescing(f"{publisher}/{kind}", f"coalesced#{draw % COALESCED_PARTITIONS}", debounces=kind == 1)


def has_expired(message_id: str) -> bool:
    """Return whether a message has expired. It depends on the message id, so that the checker knows it."""
    return coalescing(message_id) is None and zlib.crc32(f"expiry:{message_id}".encode()) % EXPIRED == 0


def expiry(message_id: str) -> datetime.datetime | None:
    """Return when a message expires."""
    return LONG_AGO if has_expired(message_id) else None


def region(message_id: str) -> str:
    """Return the region in the metadata of a message. It depends on the message id, so that the checker knows it."""
    return REGIONS[zlib.crc32(f"region:{message_id}".encode()) % len(REGIONS)]


GROUPS = (
    Group("skip", ordered=True),
    Group("strict", ordered=True, strict=True),
    Group("shared", ordered=False),
    Group("async", ordered=True),
    Group("async-shared", ordered=False),
    Group("atomic", ordered=True, atomic=True),
    Group("batch", ordered=True, atomic=True, batch=True),
    Group("filtered", ordered=True, regions=("eu", "us")),
    Group("narrowed", ordered=True, regions=("eu",), sometimes=("us",)),
    Group(LIMITED, ordered=True),
    Group("relayed", ordered=True, topic=RELAYED),
    Group("relayed-atomic", ordered=True, topic=RELAYED, atomic=True),
    Group("moved", ordered=True, topic=MOVED, strict=True),
    Group("moved-atomic", ordered=True, topic=MOVED, atomic=True),
    Group("sql-ordered", ordered=True, topic=SQL),
    Group("sql-shared", ordered=False, topic=SQL, atomic=True),
)
SQL_GROUPS = tuple(group for group in GROUPS if group.topic == SQL)
MOVED_GROUPS = tuple(group for group in GROUPS if group.topic == MOVED)

POISON, REJECT, FLAKY, PUT_OFF, FINE = "poison", "reject", "flaky", "put off", "fine"
_SHARES = ((0.003, POISON), (0.006, REJECT), (0.026, FLAKY), (0.036, PUT_OFF))


def fate(group: str, message_id: str) -> str:
    """Return what the group's handler does with a message. It depends on the message id, so that the checker knows it.

    ``POISON`` always raises, ``REJECT`` is rejected, ``FLAKY`` raises at the first attempt, and ``PUT_OFF`` nacks it.
    """
    place = zlib.crc32(f"{group}:{message_id}".encode()) / 2**32
    return next((name for share, name in _SHARES if place < share), FINE)


SLOW_SHARE, SLOW = 0.01, 0.2
"""Share of the messages that a handler takes long for, and for how many seconds, so that others can interfere."""


def is_slow(group: str, message_id: str) -> bool:
    return zlib.crc32(f"slow:{group}:{message_id}".encode()) / 2**32 < SLOW_SHARE


LONG_SHARE, LONG = 0.001, 4.0
"""Share of the messages whose handler takes longer than ``SHUTDOWN_TIMEOUT``, and for how many seconds."""


def is_long(group: str, message_id: str) -> bool:
    return zlib.crc32(f"long:{group}:{message_id}".encode()) / 2**32 < LONG_SHARE


def is_for_the_dlq(group: str, message_id: str) -> bool:
    return fate(group, message_id) in (POISON, REJECT)


# -- the disturbances ---------------------------------------------------------

KILL_SUBSCRIBER = "SIGKILL a subscriber"
KILL_AGAIN = "SIGKILL of one subscriber after another"
DEPLOY = "SIGTERM of a subscriber"
KILL_CHILD = "SIGKILL a supervisor's child"
KILL_SUPERVISOR = "SIGKILL a supervisor"
KILL_PUBLISHER = "SIGKILL a publisher"
KILL_SEQUENCER = "SIGKILL inside the sequencer"
KILL_CLAIM = "SIGKILL inside a claim"
KILL_WATERMARK = "SIGKILL inside a watermark's transaction"
KILL_ATOMIC = "SIGKILL inside an atomic handler"
KILL_CLIENT = "SIGKILL a client in plain SQL"
KILL_CLIENT_INSIDE = "SIGKILL inside the transaction of a client in plain SQL"
KILL_MOVE = "SIGKILL or failure of a command that moves a topic"
KILL_RELAY = "SIGKILL inside a relay's transaction"
KILL_RELAYED = "SIGKILL of a relay between its two transactions"
FREEZE_SUBSCRIBER = "SIGSTOP of a subscriber"
FREEZE_PUBLISHER = "SIGSTOP of a publisher"
FREEZE_SEQUENCER = "SIGSTOP inside the sequencer"
FREEZE_CLAIM = "SIGSTOP inside a claim"
FREEZE_WATERMARK = "SIGSTOP inside a watermark's transaction"
FREEZE_ATOMIC = "SIGSTOP inside an atomic handler"
FREEZE_CLIENT = "SIGSTOP of a client in plain SQL"
FREEZE_CLIENT_INSIDE = "SIGSTOP inside the transaction of a client in plain SQL"
FREEZE_RELAY = "SIGSTOP inside a relay's transaction"
KILL_TICK = "SIGKILL inside the transaction of a tick"
FREEZE_TICK = "SIGSTOP inside the transaction of a tick"
KILL_JOB = "SIGKILL inside an atomic job"
KILL_BEGIN = "SIGKILL inside the transaction that makes jobs RUNNING"
KILL_STAGE = "SIGKILL inside the transaction that publishes a stage of jobs"
FREEZE_JOB = "SIGSTOP inside an atomic job"
FREEZE_STAGE = "SIGSTOP inside the transaction that publishes a stage of jobs"
REDRIVE = "redrive of the dead letters of jobs"
SEEK = "seek of a queue of jobs to its beginning"
RELEASE = "release of the partitions of a group with a rate per key"
CUT = "KILL of random connections"
IMPATIENT = "wait_timeout=2 for a while"
OVERRIDE = "options overridden for a while"
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
    KILL_CLIENT_INSIDE: "client",
    FREEZE_CLIENT_INSIDE: "client",
    KILL_RELAY: "relay",
    FREEZE_RELAY: "relay",
    KILL_RELAYED: "relayed",
    KILL_TICK: "tick",
    FREEZE_TICK: "tick",
    KILL_JOB: "job",
    FREEZE_JOB: "job",
    KILL_BEGIN: "begin",
    KILL_STAGE: "stage",
    FREEZE_STAGE: "stage",
}
"""Action → the trap in which a process waits for it."""

DECK = (
    *[KILL_SUBSCRIBER] * 3,
    *[DEPLOY] * 3,
    *[KILL_AGAIN, KILL_AGAIN, RELEASE, RELEASE],
    *[KILL_PUBLISHER] * 2,
    *[CUT] * 3,
    *[FREEZE_SUBSCRIBER, FREEZE_SEQUENCER, FREEZE_CLAIM, FREEZE_ATOMIC, FREEZE_WATERMARK, FREEZE_PUBLISHER],
    *[KILL_SEQUENCER, KILL_CLAIM, KILL_WATERMARK, KILL_ATOMIC, KILL_CHILD, KILL_SUPERVISOR],
    *[KILL_RELAY, KILL_RELAYED, FREEZE_RELAY],
    *[KILL_CLIENT, KILL_CLIENT, KILL_CLIENT_INSIDE, FREEZE_CLIENT, FREEZE_CLIENT_INSIDE],
    *[KILL_JOB, KILL_BEGIN, KILL_STAGE, FREEZE_JOB, FREEZE_STAGE, REDRIVE, REDRIVE, SEEK],
    *[KILL_TICK, FREEZE_TICK],
    *[IMPATIENT, OVERRIDE, OVERRIDE],
)
FREEZES = frozenset(kind for kind in DECK if kind.startswith("SIGSTOP"))
AWAY = frozenset({RESTART, CRASH})
SHUTDOWNS = frozenset({DEPLOY, KILL_SUPERVISOR})
"""What makes processes shut down: SIGTERM, and the end of their supervisor."""
ACTIONS = (*dict.fromkeys(DECK), RESTART, CRASH)
CONNECTIONS = 6
"""Number of connections that ``CUT`` cuts at once."""
SHORTEST, LONGEST = 2.0, 5.0
"""Seconds between two actions."""


@dataclass(frozen=True, slots=True)
class Action:
    at: float
    """Seconds since the beginning of the run."""
    kind: str
    draw: float
    """A random number from 0 to 1 that selects the target and the duration."""


def actions(seed: int, seconds: float) -> list[Action]:
    """Return the actions of a run: shuffled decks, so that a short run has every kind too.

    In the middle of each deck the server crashes, and after it, it restarts.
    """
    return list(_actions(random.Random(seed), seconds))


def _actions(rng: random.Random, seconds: float) -> Iterator[Action]:
    at = 5.0
    while True:
        deck = list(DECK)
        rng.shuffle(deck)
        middle = len(deck) // 2
        for kind in (*deck[:middle], CRASH, *deck[middle:], RESTART):
            if at >= seconds:
                return
            yield Action(round(at, 2), kind, rng.random())
            at += rng.uniform(SHORTEST, LONGEST)

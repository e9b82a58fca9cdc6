"""The limits of a consumer group: how many of its messages start in a time, and how many are in flight.

This module holds the values and the arithmetic; ``service/slots.py`` keeps the accounts in the database.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from hashlib import sha256
from typing import Any

from django_mysqlqueue.limits import KEY_LENGTH

START_WITHIN_US = 200_000
"""Microseconds after the time of its slot within which a message must start. Later, its process returns it."""
AHEAD_US = 100_000
"""Microseconds in advance for which a claim reserves slots."""
SLACK_US = 5_000_000
"""Microseconds by which an account may be ahead of the time that a claim has read before it waited for the lock: more
than such a wait can last (2 s)."""
MOST_PER_SECOND = 10_000
"""Highest rate. Above it, the microseconds between two starts would be too coarse."""
LONGEST_PERIOD_US = 86_400_000_000
UNITS_US = {"s": 1_000_000, "m": 60_000_000, "h": 3_600_000_000, "d": LONGEST_PERIOD_US}

NO_KEY = ""
"""The key of the limits of a whole group."""


@dataclass(frozen=True, slots=True)
class Rate:
    """A number of messages per period, for example 100/s."""

    count: int
    unit: str
    """``s``, ``m``, ``h`` or ``d``."""

    def __str__(self) -> str:
        return f"{self.count}/{self.unit}"

    @property
    def period_us(self) -> int:
        """The period in microseconds."""
        return UNITS_US[self.unit]


def parse_rate(text: object) -> Rate:
    """Return a rate, which is written as a number and a unit: ``100/s``, ``5/m``, ``1000/h``, ``1/d``.

    Raises:
        ValueError: the text is not such a rate; the error is the rule that it breaks.
    """
    if isinstance(text, Rate):
        return text
    found = re.fullmatch(r"\s*([0-9]{1,10})\s*/\s*([smhd])\s*", text, re.ASCII) if isinstance(text, str) else None
    if found is None:
        raise ValueError("must be a number and a unit, such as '100/s', '5/m', '1000/h' or '1/d'")
    rate = Rate(int(found[1]), found[2])
    if not rate.count:
        raise ValueError("must be at least 1: to stop a group, pause it")
    if rate.count * UNITS_US["s"] > MOST_PER_SECOND * rate.period_us:
        raise ValueError(f"must be at most {MOST_PER_SECOND} per second")
    return rate


@dataclass(frozen=True, slots=True)
class Throttle:
    """A rate for the generic cell rate algorithm (GCRA, ITU-T I.371): a leaky bucket without the edge of a window.

    A slot at the time ``t`` is free if ``t >= full_at - tolerance_us``; reserving it moves ``full_at`` to
    ``max(full_at, t) + interval_us``. So within any period, at most ``rate + burst`` messages start: each starts within
    ``START_WITHIN_US`` after its slot, and the numbers are chosen so that this lateness is included.
    """

    interval_us: int
    """Microseconds between two slots of a steady flow."""
    tolerance_us: int
    """By how many microseconds slots may come too early: a burst."""

    @classmethod
    def of(cls, rate: Rate, burst: int | None) -> Throttle:
        """Return the throttle of a rate.

        Args:
            rate: the rate.
            burst: how many more messages may start in a period. None: what the rate can be kept with, although starts
                may be late: a fifth of a second of it, and at least 1. A smaller burst lowers the average rate.
        """
        period = rate.period_us
        if burst is None:
            burst = max(1, -(-rate.count * START_WITHIN_US // period))
        most, span = rate.count + burst, period + START_WITHIN_US
        # Slots of a span that is longer by the lateness may start within a period.
        at_once = most - rate.count * span // period
        if at_once < 1:
            return cls(span // most + 1, 0)
        interval = -(-period // rate.count)
        return cls(interval, (at_once - 1) * interval)

    def next_slot(self, full_at: int, now: int) -> int:
        """Return the time of the next free slot, all in epoch microseconds."""
        return max(now, full_at - self.tolerance_us)

    def reserve(self, full_at: int, slot: int) -> int:
        """Return the new ``full_at`` after a slot was reserved."""
        return max(full_at, slot) + self.interval_us

    def corrected(self, full_at: int, now: int) -> int:
        """Return ``full_at``, or the latest one that this throttle can have caused.

        A later one is from a slower rate before, or from a clock that has been corrected since.
        """
        latest = now + AHEAD_US + self.tolerance_us + self.interval_us
        return latest if full_at > latest + SLACK_US else full_at


@dataclass(frozen=True, slots=True)
class DeliveryLimits:
    """The limits of a group. They hold for all its subscribers together."""

    rate: Rate | None = None
    """How many messages of the group start."""
    rate_per_key: Rate | None = None
    """How many messages with the same key start."""
    burst: int | None = None
    """How many more of them may start in a period. None: see ``Throttle.of``."""
    max_in_flight: int | None = None
    """Maximum number of the group's messages that its subscribers have claimed and not finished."""
    max_in_flight_per_key: int | None = None
    """The same for the messages with one key."""
    limit_by: str | None = None
    """Name of the field in the metadata that is the key of the limits per key. None: the publisher's key."""

    def __bool__(self) -> bool:
        """Whether anything is limited."""
        return self.limits_group or self.limits_keys

    @property
    def limits_group(self) -> bool:
        """Whether there is a limit for the group as a whole."""
        return self.rate is not None or self.max_in_flight is not None

    @property
    def limits_keys(self) -> bool:
        """Whether there is a limit per key."""
        return self.rate_per_key is not None or self.max_in_flight_per_key is not None

    @property
    def counts_in_flight(self) -> bool:
        """Whether the number of messages in flight is limited."""
        return self.max_in_flight is not None or self.max_in_flight_per_key is not None

    def counted(self, held: Mapping[str, int]) -> dict[str, int]:
        """Return those of the numbers of messages in flight that are limited.

        Args:
            held: numbers by key; ``NO_KEY`` for the group.
        """
        by_kind = {True: self.max_in_flight, False: self.max_in_flight_per_key}
        return {key: number for key, number in held.items() if number and by_kind[key == NO_KEY] is not None}

    @property
    def by_group(self) -> Throttle | None:
        """The throttle of the group."""
        return None if self.rate is None else Throttle.of(self.rate, self.burst)

    @property
    def by_key(self) -> Throttle | None:
        """The throttle of each key."""
        return None if self.rate_per_key is None else Throttle.of(self.rate_per_key, self.burst)

    def has_interval_of(self, other: DeliveryLimits, key: str) -> bool:
        """Return whether a slot of a limited key (``NO_KEY``: of the group) takes as long as with other limits."""
        if key != NO_KEY and self.limit_by != other.limit_by:
            return False
        mine, theirs = (self.by_group, other.by_group) if key == NO_KEY else (self.by_key, other.by_key)
        return mine is not None and theirs is not None and mine.interval_us == theirs.interval_us

    def key_of(self, key: str | None, metadata: Mapping[str, Any]) -> str:
        """Return the key of a message for the limits per key, or ``NO_KEY`` if it has none: then these do not apply.

        Args:
            key: the publisher's key; None if there is none.
            metadata: the message's metadata.
        """
        if not self.limits_keys:
            return NO_KEY
        value = key if self.limit_by is None else metadata.get(self.limit_by)
        if value is None:
            return NO_KEY
        text = value if isinstance(value, str) else json.dumps(value, sort_keys=True, ensure_ascii=False)
        if len(text) > KEY_LENGTH or not text.isprintable():
            # Longer texts, and those that a column might refuse (a lone surrogate, which JSON can contain).
            return f"#{sha256(text.encode(errors='surrogatepass')).hexdigest()}"
        return f":{text}"

    @property
    def text(self) -> str:
        """The limits for people, for example ``100/s, 5/s per key``."""
        per_key = "key" if self.limit_by is None else self.limit_by
        parts = [
            ("{}", self.rate),
            (f"{{}} per {per_key}", self.rate_per_key),
            ("{} in flight", self.max_in_flight),
            (f"{{}} in flight per {per_key}", self.max_in_flight_per_key),
        ]
        return ", ".join(part.format(value) for part, value in parts if value is not None)


LIMIT_OPTIONS = tuple(one.name for one in fields(DeliveryLimits))
"""Names of the options of a subscription that are limits."""
NO_LIMITS = DeliveryLimits()

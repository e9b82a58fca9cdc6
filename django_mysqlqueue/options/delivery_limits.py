"""The limits of a consumer group: how many of its messages start in a time, and how many are in flight.

This module holds the values and the arithmetic; ``service/slots.py`` keeps the accounts in the database.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any, NamedTuple

from django_mysqlqueue.names.rules import KEY_LENGTH

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
OTHER_KEYS = "*"
"""Stands, among rates by key, for all keys that are not among them."""
MOST_RATES = 1000
"""Maximum number of keys with a rate of their own: each claim reads them with the group's row."""


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


def as_limit_key(text: str) -> str:
    """Return a text as a key of the limits."""
    if len(text) > KEY_LENGTH or not text.isprintable():
        # Longer texts, and those that a column might refuse (a lone surrogate, which JSON can contain).
        return f"#{sha256(text.encode(errors='surrogatepass')).hexdigest()}"
    return f":{text}"


@dataclass(frozen=True, slots=True)
class KeyRates:
    """Rates by key, for example 50/s for the key ``acme`` and 5/s for each of the others."""

    rates: tuple[tuple[str, Rate | None], ...]
    """Keys in alphabetical order, each with its rate. None: no limit."""
    others: Rate | None = None
    """The rate of each other key. None: no limit."""
    _by_limit_key: Mapping[str, Rate | None] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_by_limit_key", {as_limit_key(key): rate for key, rate in self.rates})

    def of(self, limit_key: str) -> Rate | None:
        """Return the rate of a key of the limits. None: it has none."""
        return self._by_limit_key.get(limit_key, self.others)

    def as_json(self) -> dict[str, str | None]:
        """Return the mapping from which it was parsed."""
        given = {key: None if rate is None else str(rate) for key, rate in self.rates}
        return given if self.others is None else {**given, OTHER_KEYS: str(self.others)}

    def text(self, name: str) -> str:
        """Return the rates for people, for example ``50/s for key 'acme', 5/s per other key``."""
        shown = [f"{rate or 'no rate'} for {name} {key!r}" for key, rate in self.rates[:3]]
        if more := len(self.rates) - len(shown):
            shown.append(f"rates for {more} more")
        return ", ".join(shown if self.others is None else [*shown, f"{self.others} per other {name}"])


def parse_key_rates(value: object) -> Rate | KeyRates:
    """Return one rate for each key, or the rates by key if ``value`` is a mapping.

    Raises:
        ValueError: it is neither; the error is the rule that it breaks.
    """
    if isinstance(value, KeyRates) or not isinstance(value, Mapping):
        return value if isinstance(value, KeyRates) else parse_rate(value)
    if len(value) > MOST_RATES:
        raise ValueError(f"has {len(value):,} keys: at most {MOST_RATES:,} are allowed")
    found: dict[str, Rate | None] = {}
    for key, rate in value.items():
        if not isinstance(key, str) or len(key) > KEY_LENGTH:
            raise ValueError(f"has the key {key!r}: a key must be a string of at most {KEY_LENGTH} characters")
        try:
            found[key] = None if rate is None else parse_rate(rate)
        except ValueError as error:
            raise ValueError(f"has {rate!r} for {key!r}: a rate {error}") from None
    if not any(found.values()):
        raise ValueError(f"must have a rate for at least one key, or for {OTHER_KEYS!r}: all other keys")
    others = found.pop(OTHER_KEYS, None)
    return KeyRates(tuple(sorted(found.items())), others)


class Throttle(NamedTuple):
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

        ``burst``: how many more messages may start in a period. None: what the rate can be kept with, although starts
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


class DeliveryLimits(NamedTuple):
    """The limits of a group. They hold for all its subscribers together."""

    rate: Rate | None = None
    """How many messages of the group start."""
    rate_per_key: Rate | KeyRates | None = None
    """How many messages with the same key start: of each key, or by key."""
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
    def limits_some_keys(self) -> bool:
        """Whether there are only rates of some keys: messages with other keys need no slot."""
        return (
            not self.limits_group
            and self.max_in_flight_per_key is None
            and isinstance(self.rate_per_key, KeyRates)
            and self.rate_per_key.others is None
        )

    @property
    def counts_in_flight(self) -> bool:
        """Whether the number of messages in flight is limited."""
        return self.max_in_flight is not None or self.max_in_flight_per_key is not None

    def counted(self, held: Mapping[str, int]) -> dict[str, int]:
        """Return those of the numbers of messages in flight that are limited.

        ``held``: numbers by key; ``NO_KEY`` for the group.
        """
        by_kind = {True: self.max_in_flight, False: self.max_in_flight_per_key}
        return {key: number for key, number in held.items() if number and by_kind[key == NO_KEY] is not None}

    def rate_of(self, key: str) -> Rate | None:
        """Return the rate of a limited key; ``NO_KEY``: of the group. None: it has none."""
        if key == NO_KEY:
            return self.rate
        return self.rate_per_key.of(key) if isinstance(self.rate_per_key, KeyRates) else self.rate_per_key

    def throttle_of(self, key: str) -> Throttle | None:
        """Return the throttle of a limited key; ``NO_KEY``: of the group. None: it has no rate."""
        rate = self.rate_of(key)
        return None if rate is None else Throttle.of(rate, self.burst)

    def has_interval_of(self, other: DeliveryLimits, key: str) -> bool:
        """Return whether a slot of a limited key (``NO_KEY``: of the group) takes as long as with other limits."""
        if key != NO_KEY and self.limit_by != other.limit_by:
            return False
        mine, theirs = self.throttle_of(key), other.throttle_of(key)
        return mine is not None and theirs is not None and mine.interval_us == theirs.interval_us

    def key_of(self, key: str | None, metadata: Mapping[str, Any]) -> str:
        """Return the key of a message for the limits per key, or ``NO_KEY`` if these do not apply to it.

        ``key``: the publisher's key; None if there is none.
        """
        if not self.limits_keys:
            return NO_KEY
        value = key if self.limit_by is None else metadata.get(self.limit_by)
        if value is None:
            return NO_KEY
        found = as_limit_key(value if isinstance(value, str) else json.dumps(value, sort_keys=True, ensure_ascii=False))
        return NO_KEY if self.max_in_flight_per_key is None and self.rate_of(found) is None else found

    @property
    def text(self) -> str:
        """The limits for people, for example ``100/s, 5/s per key``."""
        name, rates = self.limit_by or "key", self.rate_per_key
        parts = [
            self.rate and str(self.rate),
            rates.text(name) if isinstance(rates, KeyRates) else rates and f"{rates} per {name}",
            self.max_in_flight and f"{self.max_in_flight} in flight",
            self.max_in_flight_per_key and f"{self.max_in_flight_per_key} in flight per {name}",
        ]
        return ", ".join(part for part in parts if part)


LIMIT_OPTIONS = DeliveryLimits._fields
"""Names of the options of a subscription that are limits."""
NO_LIMITS = DeliveryLimits()

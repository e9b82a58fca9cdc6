"""Subsets: the partitions that a subscriber works on, if its options or those of a group restrict them."""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from django_mysqlqueue.exceptions import SubscriberError
from django_mysqlqueue.names.keys import lane_of
from django_mysqlqueue.names.rules import KEY_LENGTH
from django_mysqlqueue.sql.base import Dialect, lane_partition

MOST_STARS = 3
"""Maximum number of stars in a pattern. Each one multiplies the cost of matching a key."""


@dataclass(frozen=True)
class Subset:
    """A subset of every topic's partitions. Without any of its fields, it contains all of them.

    Subscribers with equal subsets divide its partitions among themselves. Different subsets may overlap: a lease is
    exclusive, regardless of its owner's subset.
    """

    patterns: tuple[str, ...] = ()
    """Patterns of which the partition key must match one: ``*`` matches any text, ``?`` one character."""
    shard: tuple[int, int] | None = None
    """(number, number of shards): the CRC-32 of the key's UTF-8 bytes modulo the second number is the first minus 1."""
    without: tuple[str, ...] = ()
    """Keys that it does not contain: those of a group that are paused, which are no part of what ``parse`` reads."""

    @classmethod
    def parse(cls, patterns: Sequence[str] = (), shard: str | None = None) -> Subset:
        """Return the subset for options of the command line.

        ``shard``: the shard, for example ``1/4``.

        Raises:
            SubscriberError: a value breaks a rule. The error names the value and the rule.
        """
        for pattern in patterns:
            if not 1 <= len(pattern) <= KEY_LENGTH or pattern.count("*") > MOST_STARS:
                raise SubscriberError(
                    f"partition {pattern!r}: must have 1 to {KEY_LENGTH} characters, and at most {MOST_STARS} stars"
                )
        chosen = () if "*" in patterns else tuple(sorted(set(patterns)))
        if shard is None:
            return cls(chosen)
        match = re.fullmatch(r"(\d{1,6})/(\d{1,6})", shard, re.ASCII)
        if match is None or not 1 <= int(match[1]) <= int(match[2]):
            raise SubscriberError(f"shard {shard!r}: must be like 1/4, with the first number from 1 to the second one")
        number, parts = int(match[1]), int(match[2])
        return cls(chosen, None if parts == 1 else (number, parts))

    @classmethod
    def read(cls, info: Mapping[str, Any] | None) -> Subset:
        """Return the subset in the ``info`` of a heartbeat row (``as_json``). Consumers in plain SQL store none."""
        return cls() if info is None else cls.parse(info["partitions"], info["shard"])

    def as_json(self) -> dict[str, object] | None:
        """Return the value for ``read``."""
        if self == EVERYTHING:
            return None
        return {"partitions": list(self.patterns), "shard": self.shard and f"{self.shard[0]}/{self.shard[1]}"}

    def __str__(self) -> str:
        shard = [f"shard {self.shard[0]}/{self.shard[1]}"] if self.shard else []
        return ", ".join([*self.patterns, *shard])

    def minus(self, keys: tuple[str, ...]) -> Subset:
        """Return the subset without the partitions of some keys."""
        return replace(self, without=keys) if keys else self

    @cached_property
    def _expression(self) -> re.Pattern[str]:
        alternatives = (
            "".join({"*": ".*", "?": "."}.get(character, re.escape(character)) for character in pattern)
            for pattern in self.patterns
        )
        return re.compile("|".join(f"(?:{one})" for one in alternatives), re.DOTALL)

    def __contains__(self, key: str) -> bool:
        if not (self.patterns or self.shard or self.without):
            return True
        key = lane_of(key).partition
        if key in self.without:
            return False
        if self.patterns and not self._expression.fullmatch(key):
            return False
        return self.shard is None or zlib.crc32(key.encode()) % self.shard[1] == self.shard[0] - 1

    def condition(self, dialect: Dialect, column: str) -> tuple[str, tuple[object, ...]]:
        """Return the condition equivalent to ``in`` for a column of partition keys, as ``" AND …"`` with parameters."""
        column = lane_partition(column)
        sql = ""
        parameters: list[object] = []
        if self.patterns:
            sql += f" AND ({' OR '.join([dialect.matches(column)] * len(self.patterns))})"
            parameters += [dialect.pattern(pattern) for pattern in self.patterns]
        if self.shard is not None:
            sql += f" AND {dialect.shard(column)}"
            parameters += [self.shard[1], self.shard[0] - 1]
        if self.without:
            sql += f" AND {column} NOT IN ({dialect.placeholders(len(self.without), '%s')})"
            parameters += self.without
        return sql, tuple(parameters)


EVERYTHING = Subset()

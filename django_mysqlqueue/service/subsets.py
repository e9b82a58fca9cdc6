"""Subsets: the partitions that a subscriber works on, where they are divided up by hand."""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from django_mysqlqueue.exceptions import SubscriberError
from django_mysqlqueue.naming import KEY_LENGTH
from django_mysqlqueue.sql.base import Dialect

MOST_STARS = 3
"""In a pattern: each more multiplies what matching a key may cost."""


@dataclass(frozen=True)
class Subset:
    """Some of every topic's partitions; without patterns and shard it is all of them.

    Subscribers with equal subsets share its partitions out among themselves.
    Others may overlap: a lease is exclusive whoever holds it.
    """

    patterns: tuple[str, ...] = ()
    """Partition keys of which one must match: ``*`` stands for any text, ``?`` for one character."""
    shard: tuple[int, int] | None = None
    """(number, of how many): the CRC-32 of the key's UTF-8 bytes, modulo the second, is the first less one."""

    @classmethod
    def parse(cls, patterns: Sequence[str] = (), shard: str | None = None) -> Subset:
        """A subset from the command line: patterns, and a shard such as ``1/4``.

        Raises:
            SubscriberError: names the value and the rule.
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
            raise SubscriberError(f"shard {shard!r}: must be like 1/4, the first number from 1 to the second")
        number, parts = int(match[1]), int(match[2])
        return cls(chosen, None if parts == 1 else (number, parts))

    @classmethod
    def read(cls, info: object) -> Subset:
        """A subset as a heartbeat row's ``info`` names it (``as_json``).

        What cannot be read counts as everything: it may come from another version.
        """
        if not isinstance(info, Mapping):
            return cls()
        try:
            return cls.parse(info.get("partitions", ()), info.get("shard"))
        except (SubscriberError, TypeError):
            return cls()

    def as_json(self) -> dict[str, object] | None:
        """What ``read`` takes."""
        if self == EVERYTHING:
            return None
        return {"partitions": list(self.patterns), "shard": self.shard and f"{self.shard[0]}/{self.shard[1]}"}

    def __str__(self) -> str:
        shard = [f"shard {self.shard[0]}/{self.shard[1]}"] if self.shard else []
        return ", ".join([*self.patterns, *shard])

    @cached_property
    def _expression(self) -> re.Pattern[str]:
        alternatives = (
            "".join({"*": ".*", "?": "."}.get(character, re.escape(character)) for character in pattern)
            for pattern in self.patterns
        )
        return re.compile("|".join(f"(?:{one})" for one in alternatives), re.DOTALL)

    def __contains__(self, key: str) -> bool:
        if self.patterns and not self._expression.fullmatch(key):
            return False
        return self.shard is None or zlib.crc32(key.encode()) % self.shard[1] == self.shard[0] - 1

    def condition(self, dialect: Dialect, column: str) -> tuple[str, tuple[object, ...]]:
        """`` AND …`` and its parameters: the same as ``in``, for a WHERE on a column of partition keys."""
        sql = ""
        parameters: list[object] = []
        if self.patterns:
            sql += f" AND ({' OR '.join([dialect.matches(column)] * len(self.patterns))})"
            parameters += [dialect.pattern(pattern) for pattern in self.patterns]
        if self.shard is not None:
            sql += f" AND {dialect.shard(column)}"
            parameters += [self.shard[1], self.shard[0] - 1]
        return sql, tuple(parameters)


EVERYTHING = Subset()
